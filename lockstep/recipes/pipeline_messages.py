"""The messages of a pipeline.config of TensorFlow's Object Detection API, and what becomes of their fields in a recipe.

All fields of its protos of October 2017 and of 2018, and some of later ones, with their types and defaults, and what
becomes of each (after tensorflow/models, research/object_detection/protos: train, eval, optimizer, input_reader,
image_resizer, graph_rewriter and pipeline.proto; Apache 2.0). The messages of the model are the classes of
`lockstep.detection`'s `tf_configs` and `blocks`, those of the augmentations the classes of `lockstep.augmentations`;
what becomes of the fields that these lack is in `ELSEWHERE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from lockstep.augmentations import random_crops, resizers
from lockstep.checks import Checked, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from lockstep.detection import blocks, tf_center_net_configs, tf_configs
from lockstep.recipes.messages import FieldOutcome, no_effect, not_mapped, to
from lockstep.records.text_format import Field

_LOADING = no_effect("`feed` says how examples are loaded; how fast changes nothing in what is learned")
_ORDER = no_effect("each epoch is one permutation of all examples, without a buffer")
_PADDING = no_effect("objects are not padded: a batch keeps the number of each image")
_SHOWN = no_effect("images are read again where they are shown")
_RECALL = not_mapped("precision is averaged over all recalls")
_SIGMAS = to("evaluate.detection.keypoint_sigmas")
_INITIAL = to("optimizer.lr.initial")
_METHODS: Mapping[str, str] = {"nearest_neighbor": "nearest"}
"""The methods of resizing that have another name in the config."""


@dataclass(frozen=True)
class ConstantLearningRate:
    """The same rate at every step."""

    learning_rate: Annotated[float, to("optimizer.lr")] = 0.002


@dataclass(frozen=True)
class ExponentialDecayLearningRate:
    """The last three fields are of 2018."""

    initial_learning_rate: Annotated[float, _INITIAL] = 0.002
    decay_steps: Annotated[int, to("optimizer.lr.decay_steps")] = 4_000_000
    decay_factor: Annotated[float, to("optimizer.lr.factor")] = 0.95
    staircase: Annotated[bool, to("optimizer.lr.staircase")] = True
    burnin_learning_rate: Annotated[float, to("optimizer.lr.burn_in")] = 0.0
    burnin_steps: Annotated[int, to("optimizer.lr.burn_in_steps")] = 0
    min_learning_rate: Annotated[float, to("optimizer.lr.final")] = 0.0


@dataclass(frozen=True)
class LearningRateSchedule:
    """A rate, and the step from which on it holds."""

    step: Annotated[int, to("optimizer.lr.boundaries")] = 0
    learning_rate: Annotated[float, to("optimizer.lr.values")] = 0.002


@dataclass(frozen=True)
class ManualStepLearningRate:
    """`warmup` is of 2018."""

    initial_learning_rate: Annotated[float, to("optimizer.lr.values")] = 0.002
    schedule: tuple[LearningRateSchedule, ...] = ()
    warmup: Annotated[bool, to("optimizer.lr.warmup")] = False


@dataclass(frozen=True)
class CosineDecayLearningRate:
    """`hold_base_rate_steps` is of 2018."""

    learning_rate_base: Annotated[float, _INITIAL] = 0.002
    total_steps: Annotated[int, to("optimizer.lr.steps")] = 4_000_000
    warmup_learning_rate: Annotated[float, to("optimizer.lr.warmup_initial")] = 0.0002
    warmup_steps: Annotated[int, to("optimizer.lr.warmup_steps")] = 10_000
    hold_base_rate_steps: Annotated[int, to("optimizer.lr.hold_steps")] = 0


LearningRate = ConstantLearningRate | ExponentialDecayLearningRate | ManualStepLearningRate | CosineDecayLearningRate


@dataclass(frozen=True)
class RMSPropOptimizer:
    """Epsilon is inside of the root."""

    learning_rate: LearningRate
    momentum_optimizer_value: Annotated[Fraction, to("optimizer.momentum")] = 0.9
    decay: Annotated[Fraction, to("optimizer.alpha")] = 0.9
    epsilon: Annotated[NonNegativeFloat, to("optimizer.eps")] = 1.0


@dataclass(frozen=True)
class MomentumOptimizer:
    """Momentum without Nesterov's correction."""

    learning_rate: LearningRate
    momentum_optimizer_value: Annotated[Fraction, to("optimizer.momentum")] = 0.9


@dataclass(frozen=True)
class AdamOptimizer:
    """TensorFlow's form, with epsilon hat; the field is of 2019."""

    learning_rate: LearningRate
    epsilon: Annotated[NonNegativeFloat, to("optimizer.eps")] = 1e-8


@dataclass(frozen=True)
class OptimizerConfig(Checked):
    """One of the first three."""

    rms_prop_optimizer: RMSPropOptimizer | None = None
    momentum_optimizer: MomentumOptimizer | None = None
    adam_optimizer: AdamOptimizer | None = None
    use_moving_average: Annotated[bool, to("average")] = True
    moving_average_decay: Annotated[float, to("average.decay")] = 0.9999


@dataclass(frozen=True)
class TrainConfig(Checked):
    """`train_config`."""

    optimizer: OptimizerConfig
    data_augmentation_options: tuple[Field, ...] = ()
    batch_size: Annotated[PositiveInt, to("batch_size")] = 32
    sync_replicas: Annotated[bool, to("num_towers")] = False
    replicas_to_aggregate: Annotated[PositiveInt, to("num_towers")] = 1
    startup_delay_steps: Annotated[float, no_effect("all workers begin together")] = 15.0
    keep_checkpoint_every_n_hours: Annotated[PositiveInt, to("checkpoints.retention.every_hours")] = 1000
    gradient_clipping_by_norm: Annotated[NonNegativeFloat, to("gradient_transforms: clip_norm")] = 0.0
    bias_grad_multiplier: Annotated[float, to("gradient_transforms: scale_gradients of biases")] = 0.0
    fine_tune_checkpoint: Annotated[str, to("warm_start.path")] = ""
    fine_tune_checkpoint_type: Annotated[str, to("warm_start.takes")] = ""
    from_detection_checkpoint: Annotated[bool, to("warm_start.takes")] = False
    load_all_detection_checkpoint_vars: Annotated[bool, to("warm_start.takes")] = False
    fine_tune_checkpoint_version: Annotated[
        Literal["unknown", "v1", "v2"], no_effect("the file itself says which format it has")
    ] = "v1"
    num_steps: Annotated[NonNegativeInt, to("end")] = 0
    freeze_variables: Annotated[tuple[str, ...], to("frozen (by this project's names of parameters)")] = ()
    update_trainable_variables: Annotated[
        tuple[str, ...], to("train_only (by this project's names of parameters)")
    ] = ()
    merge_multiple_label_boxes: Annotated[bool, to("data.merge_multiple_label_boxes")] = False
    max_number_of_boxes: Annotated[PositiveInt | None, to("data.max_number_of_boxes")] = None
    """100, and unused but for padding, if it is not set."""
    add_regularization_loss: Annotated[bool, to("model.add_regularization_loss")] = True
    use_bfloat16: Annotated[bool, to("towers.precision")] = False
    use_multiclass_scores: Annotated[bool, to("data.use_multiclass_scores")] = False
    unpad_groundtruth_tensors: Annotated[bool, _PADDING] = True
    retain_original_images: Annotated[bool, _SHOWN] = False
    summarize_gradients: Annotated[bool, no_effect("`watch.gradients` says when gradients are shown")] = False
    batch_queue_capacity: Annotated[int, _LOADING] = 150
    num_batch_queue_threads: Annotated[int, _LOADING] = 8
    prefetch_queue_capacity: Annotated[int, _LOADING] = 5
    per_process_gpu_memory_fraction: Annotated[float, no_effect("memory is allocated as it is needed")] = 0.0


@dataclass(frozen=True)
class KeypointSigma(Checked):
    """How far apart people mark a keypoint."""

    key: Annotated[str, _SIGMAS]
    value: Annotated[PositiveFloat, _SIGMAS]


@dataclass(frozen=True)
class CocoKeypointMetrics(Checked):
    """How keypoints of one class are scored."""

    class_label: Annotated[str, _SIGMAS] = ""
    keypoint_label_to_sigmas: tuple[KeypointSigma, ...] = ()


@dataclass(frozen=True)
class ParameterizedMetric(Checked):
    """A metric that has parameters."""

    coco_keypoint_metrics: CocoKeypointMetrics | None = None


@dataclass(frozen=True)
class EvalConfig(Checked):
    """`eval_config`: evaluations are part of the run."""

    metrics_set: Annotated[tuple[str, ...], to("evaluate.detection.metrics")] = ()
    """One in 2017, several in 2018; none: "pascal_voc_detection_metrics"."""
    parameterized_metric: tuple[ParameterizedMetric, ...] = ()
    batch_size: Annotated[PositiveInt | None, to("evaluate.micro_batch")] = None
    """1 if it is not set."""
    num_examples: Annotated[NonNegativeInt | None, to("evaluate.examples")] = None
    """5000 in 2017, and all of them in 2018, if it is not set."""
    eval_interval_secs: Annotated[NonNegativeInt, to("evaluate.every")] = 300
    max_evals: Annotated[
        NonNegativeInt, no_effect("it ends the reference's evaluation job; a run is scored until its end")
    ] = 0
    use_moving_averages: Annotated[bool, to("evaluate.weights")] = False
    ignore_groundtruth: Annotated[bool, to("evaluate.detection.ignore_ground_truth")] = False
    include_metrics_per_category: Annotated[bool, to("evaluate.detection.per_category")] = False
    export_path: Annotated[str, to("evaluate.detection.export_path")] = ""
    recall_lower_bound: Annotated[float, _RECALL] = 0.0
    recall_upper_bound: Annotated[float, _RECALL] = 1.0
    num_visualizations: Annotated[NonNegativeInt, to("evaluate.detection.pictures.count")] = 10
    visualization_export_dir: Annotated[str, to("evaluate.detection.pictures.folder")] = ""
    min_score_threshold: Annotated[float, to("evaluate.detection.pictures.min_score")] = 0.5
    max_num_boxes_to_visualize: Annotated[NonNegativeInt, to("evaluate.detection.pictures.max_boxes")] = 20
    skip_scores: Annotated[bool, to("evaluate.detection.pictures.scores")] = False
    skip_labels: Annotated[bool, to("evaluate.detection.pictures.labels")] = False
    visualize_groundtruth_boxes: Annotated[bool, to("evaluate.detection.pictures.ground_truth")] = False
    groundtruth_box_visualization_color: Annotated[
        str, no_effect("pictures have colours of their own for the ground truth")
    ] = "black"
    keep_image_id_for_visualization_export: Annotated[
        bool, no_effect("pictures are numbered in the order of the examples")
    ] = False
    retain_original_images: Annotated[bool, _SHOWN] = True
    retain_original_image_additional_channels: Annotated[bool, _SHOWN] = False
    eval_instance_masks: Annotated[bool, no_effect("the reference does not use it either")] = False
    save_graph: Annotated[bool, no_effect("there is no graph")] = False
    eval_master: Annotated[str, no_effect("there is no session")] = ""


@dataclass(frozen=True)
class TFRecordInputReader:
    """Files of records."""

    input_path: tuple[str, ...] = ()


@dataclass(frozen=True)
class InputReader(Checked):
    """`train_input_reader` and `eval_input_reader`; where these differ, `pipeline_config` says so."""

    tf_record_input_reader: TFRecordInputReader | None = None
    label_map_path: Annotated[str, to("data.label_map")] = ""
    load_instance_masks: Annotated[bool, to("data.masks")] = False
    num_keypoints: Annotated[NonNegativeInt, to("data.num_keypoints")] = 0
    max_number_of_boxes: Annotated[PositiveInt | None, to("data.max_number_of_boxes")] = None
    """100, and unused but for padding, if it is not set."""
    shuffle: Annotated[bool, to("feed.order")] = True
    num_epochs: Annotated[NonNegativeInt, to("end")] = 0
    """0: without end."""
    sample_1_of_n_examples: Annotated[
        PositiveInt, not_mapped("evaluate.examples limits how many are scored, the first ones")
    ] = 1
    mask_type: Annotated[
        Literal["default", "numerical_masks", "png_masks"],
        no_effect("both kinds of masks are told apart as they are read"),
    ] = "numerical_masks"
    use_display_name: Annotated[bool, no_effect("names and display names are both looked up")] = False
    include_source_id: Annotated[bool, no_effect("each example has its id")] = False
    input_type: Annotated[
        Literal["input_default", "tf_example", "tf_sequence_example"], no_effect("records are read as tf.train.Example")
    ] = "tf_example"
    num_additional_channels: Annotated[int, not_mapped("images have three channels")] = 0
    keypoint_type_weight: Annotated[tuple[float, ...], not_mapped("keypoints have one weight")] = ()
    load_multiclass_scores: Annotated[
        bool, no_effect("they are read where data.use_multiclass_scores asks for them")
    ] = False
    load_context_features: Annotated[bool, not_mapped("there is no Context R-CNN here")] = False
    load_track_id: Annotated[bool, not_mapped("objects are not tracked")] = False
    load_dense_pose: Annotated[bool, not_mapped("there is no DensePose here")] = False
    expand_labels_hierarchy: Annotated[bool, not_mapped("labels have no hierarchy")] = False
    name: Annotated[str, no_effect("it names the reader and nothing else")] = ""
    shuffle_buffer_size: Annotated[int, _ORDER] = 2048
    filenames_shuffle_buffer_size: Annotated[int, _ORDER] = 100
    min_after_dequeue: Annotated[int, _ORDER] = 1000
    queue_capacity: Annotated[int, _LOADING] = 2000
    num_readers: Annotated[int, _LOADING] = 64
    """8 in 2017."""
    num_parallel_batches: Annotated[int, _LOADING] = 8
    num_prefetch_batches: Annotated[int, _LOADING] = 2
    read_block_length: Annotated[int, _LOADING] = 32
    prefetch_size: Annotated[int, _LOADING] = 512
    num_parallel_map_calls: Annotated[int, _LOADING] = 64
    drop_remainder: Annotated[bool, no_effect("all batches of training are full")] = True


OPTIONS = (
    "normalize_image",
    "random_horizontal_flip",
    "random_pixel_value_scale",
    "random_image_scale",
    "random_rgb_to_gray",
    "random_adjust_brightness",
    "random_adjust_contrast",
    "random_adjust_hue",
    "random_adjust_saturation",
    "random_distort_color",
    "random_jitter_boxes",
    "random_crop_image",
    "random_pad_image",
    "random_crop_pad_image",
    "random_crop_to_aspect_ratio",
    "random_black_patches",
    "random_resize_method",
    "scale_boxes_to_pixel_coordinates",
    "resize_image",
    "subtract_channel_mean",
    "ssd_random_crop",
    "ssd_random_crop_pad",
    "ssd_random_crop_fixed_aspect_ratio",
    "ssd_random_crop_pad_fixed_aspect_ratio",
    "random_vertical_flip",
    "random_rotation90",
    "rgb_to_gray",
    "convert_class_logits_to_softmax",
    "random_absolute_pad_image",
    "random_self_concat_image",
    "random_square_crop_by_scale",
    "random_scale_crop_and_pad_to_square",
)
"""The data augmentation options of preprocessor.proto: 26 of October 2017, four of 2018, and two of 2020."""


@dataclass(frozen=True)
class ResizeImageConfig:
    """The option `resize_image`, whose method is an enumeration."""

    new_height: int = 600
    new_width: int = 1024
    method: Literal["area", "bicubic", "bilinear", "nearest_neighbor"] = "bilinear"

    def augmentation(self) -> resizers.ResizeImage:
        """Make the augmentation."""
        return resizers.ResizeImage(self.new_height, self.new_width, _METHODS.get(self.method, self.method))


@dataclass(frozen=True)
class PipelineConfig:
    """The whole file; parts that are fields are read by `pipeline_config`."""

    train_config: TrainConfig
    eval_config: EvalConfig = field(default_factory=EvalConfig)
    train_input_reader: tuple[Field, ...] = ()
    eval_input_reader: tuple[Field, ...] = ()
    """One in 2017, several in 2018."""
    model: tuple[Field, ...] = ()
    graph_rewriter: tuple[Field, ...] = ()


_Method = Annotated[Literal["bilinear", "nearest_neighbor", "bicubic", "area"], to("data.resizer.resize_method")]
_GREY = not_mapped("images have three channels")
OTHER_RESIZER = not_mapped("images are resized to a fixed shape, or with their aspect ratio; the recipe says 300 x 300")


@dataclass(frozen=True)
class KeepAspectRatioResizerConfig(Checked):
    """The shorter side to `min_dimension`, or the longer one to `max_dimension` where it would be longer."""

    min_dimension: Annotated[PositiveInt, to("data.resizer.min_dimension")] = 600
    max_dimension: Annotated[PositiveInt, to("data.resizer.max_dimension")] = 1024
    resize_method: _Method = "bilinear"
    pad_to_max_dimension: Annotated[bool, to("data.resizer.pad_to_max_dimension")] = False
    per_channel_pad_value: Annotated[tuple[float, ...], to("data.resizer.per_channel_pad_value")] = ()
    convert_to_grayscale: Annotated[bool, _GREY] = False

    def resizer(self) -> resizers.KeepAspectRatioResizer:
        """Make the resizer of the data."""
        colour: Any = tuple(map(round, self.per_channel_pad_value)) or (0, 0, 0)
        method = _METHODS.get(self.resize_method, self.resize_method)
        return resizers.KeepAspectRatioResizer(
            self.min_dimension, self.max_dimension, method, self.pad_to_max_dimension, colour
        )


@dataclass(frozen=True)
class FixedShapeResizerConfig(Checked):
    """Resizes images to one height and width."""

    height: Annotated[PositiveInt, to("data.resizer.height")] = 300
    width: Annotated[PositiveInt, to("data.resizer.width")] = 300
    resize_method: _Method = "bilinear"
    convert_to_grayscale: Annotated[bool, _GREY] = False

    def resizer(self) -> resizers.FixedShapeResizer:
        """Make the resizer of the data."""
        return resizers.FixedShapeResizer(self.height, self.width, _METHODS.get(self.resize_method, self.resize_method))


@dataclass(frozen=True)
class IdentityResizerConfig:
    """Images stay as they are; of 2018, as is the next one."""


@dataclass(frozen=True)
class ConditionalShapeResizerConfig:
    """Images of which a side is beyond `size_threshold`, or below it, are resized to meet it."""

    condition: Annotated[Literal["greater", "smaller"], OTHER_RESIZER] = "greater"
    size_threshold: Annotated[int, OTHER_RESIZER] = 300
    resize_method: Annotated[Literal["bilinear", "nearest_neighbor", "bicubic", "area"], OTHER_RESIZER] = "bilinear"
    convert_to_grayscale: Annotated[bool, OTHER_RESIZER] = False


@dataclass(frozen=True)
class BesideTheModel:
    """What the message of a model says that is no field of its configuration here."""

    image_resizer: Annotated[
        KeepAspectRatioResizerConfig | FixedShapeResizerConfig | IdentityResizerConfig | ConditionalShapeResizerConfig,
        to("data.resizer"),
    ]
    keypoint_label_map_path: Annotated[str, to("model.keypoint_estimation_task")] = ""
    """The file of the keypoints' names, which are put into the recipe."""
    first_stage_only: Annotated[bool, to("model.number_of_stages")] = False
    """The setting by which Faster R-CNN computed its first stage alone before October 2017."""


@dataclass(frozen=True)
class QuantizationConfig(Checked):
    """`quantization`, with the defaults of its proto."""

    delay: int = 500000
    weight_bits: int = 8
    activation_bits: int = 8
    symmetric: Annotated[bool, not_mapped("ranges have the ends that they have")] = False


@dataclass(frozen=True)
class GraphRewriter:
    """How the graph is changed before it is trained."""

    quantization: Annotated[QuantizationConfig | None, to("quantization")] = None


_TASKS: tuple[tf_configs.UntrainedPart, ...] = (
    "mask_estimation_task",
    "deepmac_mask_estimation",
    "densepose_estimation_task",
    "track_estimation_task",
    "temporal_offset_task",
)
UNTRAINED: Mapping[tf_configs.UntrainedPart, FieldOutcome] = {
    "context_config": not_mapped("Context R-CNN is not trained here"),
    "random_example_sampler": not_mapped("anchors are not sampled here"),
    "equalization_loss": not_mapped("there is no equalization loss here"),
    **{task: not_mapped(f"a CenterNet predicts boxes and keypoints here, and has no {task}") for task in _TASKS},
}
"""What is said of parts that nothing trains; the model keeps their names, and is refused for them."""
_TPU = no_effect("it is about TPUs, or how the same is computed")
_OUTPUT = no_effect("it names further outputs, and changes none")
_NO_MASKS = not_mapped("an SSD predicts boxes alone")
_CLIPPED = {"clip_boxes": not_mapped("boxes are always clipped to the crop")}
_FULL = not_mapped("convolutions are full ones here")
_ANCHORWISE = {"anchorwise_output": no_effect("losses are kept for each anchor anyway")}
ELSEWHERE: Mapping[type, Mapping[str, FieldOutcome]] = {
    blocks.Loss: {name: UNTRAINED[name] for name in ("random_example_sampler", "equalization_loss")},
    tf_configs.Ssd: {
        "inplace_batchnorm_update": _TPU,
        "return_raw_detections_during_predict": _OUTPUT,
        "mask_head_config": _NO_MASKS,
    },
    tf_configs.FasterRcnn: {
        "context_config": UNTRAINED["context_config"],
        **dict.fromkeys(
            (
                "inplace_batchnorm_update",
                "use_static_shapes",
                "use_static_shapes_for_eval",
                "use_static_balanced_label_sampler",
                "use_matmul_crop_and_resize",
                "use_matmul_gather_in_matcher",
                "use_partitioned_nms_in_first_stage",
                "use_combined_nms_in_first_stage",
            ),
            _TPU,
        ),
        **dict.fromkeys(
            ("return_raw_detections_during_predict", "output_final_box_features", "output_final_box_rpn_features"),
            _OUTPUT,
        ),
    },
    tf_center_net_configs.CenterNet: {
        **{name: UNTRAINED[name] for name in _TASKS},
        "use_depthwise": _FULL,
        "compute_heatmap_sparse": no_effect("it is how the same heat map is drawn"),
        "post_processing": not_mapped("the peaks of the heat map are the detections"),
        "output_prediction_dict": _OUTPUT,
    },
    tf_center_net_configs.CenterNetFeatureExtractor: {
        "use_depthwise": _FULL,
        "use_separable_conv": _FULL,
        "depth_multiplier": not_mapped("a MobileNet has its full width here"),
        "upsampling_interpolation": not_mapped("the nearest cell is taken here"),
    },
    tf_center_net_configs.ObjectCenterParams: {
        "use_labeled_classes": not_mapped("the classes of an image that are not labelled have no objects here"),
        "keypoint_weights_for_center": not_mapped("the middle of an object is that of its box"),
    },
    tf_center_net_configs.KeypointLoss: dict.fromkeys(
        ("hard_example_miner", "classification_weight", "localization_weight", "random_example_sampler"),
        no_effect("a task of keypoints has factors of its own, and all cells count"),
    ),
    tf_center_net_configs.KeypointEstimation: {
        **dict.fromkeys(
            ("predict_depth", "per_keypoint_depth", "keypoint_depth_loss_weight"), not_mapped("depth is not predicted")
        ),
        **dict.fromkeys(
            ("rescore_instances", "rescoring_threshold"), not_mapped("objects keep the scores of their middles")
        ),
        "clip_out_of_frame_keypoints": not_mapped("keypoints outside of an image stay there"),
        "gaussian_denom_ratio": no_effect("no candidate_ranking_mode of these takes it"),
        "argmax_postprocessing": not_mapped("all peaks are candidates"),
    },
    EvalConfig: {"keypoint_edge": no_effect("keypoints are drawn as points, without lines")},
    tf_configs.SsdFeatureExtractor: {
        "replace_preprocessor_with_placeholder": no_effect("images are always prepared outside of the model"),
        "batch_norm_trainable": not_mapped("model.freeze_batchnorm says it, and the hyperparameters of the layers"),
    },
    tf_configs.ConvolutionalBoxPredictor: {"mask_head": _NO_MASKS},
    tf_configs.WeightSharedConvolutionalBoxPredictor: {"mask_head": _NO_MASKS},
    blocks.ArgmaxMatcher: {"use_matmul_gather": _TPU},
    blocks.BatchNonMaxSuppression: dict.fromkeys(("use_static_shapes", "combined_nms", "use_combined_nms"), _TPU),
    blocks.PostProcessing: {"calibration_config": not_mapped("scores are not calibrated")},
    blocks.WeightedL2: _ANCHORWISE,
    blocks.WeightedSmoothL1: _ANCHORWISE,
    blocks.WeightedSigmoid: _ANCHORWISE,
    blocks.WeightedSigmoidFocal: _ANCHORWISE,
    blocks.WeightedSoftmax: _ANCHORWISE,
    blocks.WeightedLogitsSoftmax: _ANCHORWISE,
    blocks.BootstrappedSigmoid: _ANCHORWISE,
    random_crops.RandomCropImage: _CLIPPED,
    random_crops.RandomCropPadImage: _CLIPPED,
    random_crops.RandomCropToAspectRatio: _CLIPPED,
    random_crops.SsdRandomCropOperation: _CLIPPED,
    random_crops.SsdRandomCropPadOperation: _CLIPPED,
    random_crops.SsdRandomCropFixedAspectRatioOperation: _CLIPPED,
}
"""The fields of the messages of models and augmentations that their classes here have not, and what becomes of them."""
