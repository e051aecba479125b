"""A pipeline.config of TensorFlow's Object Detection API as a recipe, and what became of each of its fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple, cast, get_args

from lockstep.augmentations.augment import Augment
from lockstep.augmentations.lists import AUGMENTATIONS
from lockstep.augmentations.resizers import FixedShapeResizer, KeepAspectRatioResizer, ResizeImage
from lockstep.augmentations.turns import HorizontalFlip
from lockstep.detection.tf_center_net_configs import CenterNet, KeypointEstimation, TfDetector
from lockstep.detection.tf_configs import FasterRcnn, Ssd
from lockstep.detection.tf_supported import check_supported, substituted, substitutes
from lockstep.detection.values import Detector
from lockstep.errors import DataError, InputError
from lockstep.inline_toml import kind_name
from lockstep.listing import did_you_mean
from lockstep.readers.label_map import Label, read_label_map
from lockstep.recipes import pipeline_messages as messages
from lockstep.recipes import pipeline_training as training
from lockstep.recipes.data import DetectionData
from lockstep.recipes.messages import At, FieldOutcome, MessageReader, Row, made_together, no_effect, not_mapped, to
from lockstep.recipes.parts import DataLoading, DetectionEvaluation, DetectionMetrics, Evaluate, Pictures, Quantization
from lockstep.recipes.pipeline_training import variables_of
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.toml import made
from lockstep.records.text_format import Field, Place, parse_text_format, quoted
from lockstep.types import Epochs, Interval

_CLASSES: Mapping[str, type] = {kind_name(cls): cls for cls in AUGMENTATIONS}
OPTIONS: Mapping[str, type | None] = {
    name: HorizontalFlip if name == "random_horizontal_flip" else _CLASSES.get(name) for name in messages.OPTIONS
}
"""The class of each data augmentation option, None where there is none. It is given the fields that the file sets: for
the others the defaults of the class hold, as those of the reference's function do."""

_AUGMENTATIONS = "data_augmentation_options"
_MODELS: Mapping[str, type[TfDetector]] = {"ssd": Ssd, "faster_rcnn": FasterRcnn, "center_net": CenterNet}
_Resizer = FixedShapeResizer | KeepAspectRatioResizer
_SIGMA = 0.05
"""A keypoint's where none is given, as in the reference."""
_ONE_EACH = no_effect("each evaluation scores every example once, in their order")


class Imported(NamedTuple):
    """A recipe, and what became of the fields of the file that it was made of, in their order."""

    recipe: Recipe
    rows: list[Row]
    substitutes: Mapping[str, object]
    """Fields of the recipe, by their paths, that make up for what is not here."""
    refusal: InputError | None
    """Why the recipe's model cannot be trained; None if it can."""


def import_pipeline(text: str, source: str, name: str, *, substitute_model: bool = False) -> Imported:
    """Make a recipe of a pipeline.config.

    Args:
        text: in the text format of protocol buffers.
        source: the name of its file, for messages.
        name: of the recipe; signs that the name of a folder cannot have are replaced.
        substitute_model: take the nearest feature extractor where that of the file is not there, with fresh weights,
            and leave context out.

    Raises:
        InputError: a value that its field does not take, or a part that is missing; InputErrors where there are
            several.
    """
    reader = MessageReader(source, messages.ELSEWHERE)
    parsed = _read(reader, parse_text_format(text, source))
    train = parsed.pipeline.train_config
    parts = made_together(
        {
            part: partial(made, partial(make, reader, parsed), f"{source}, {part}")
            for part, make in {"training": _training, "data": _data, "evaluation": _evaluate}.items()
        }
    )
    model = parsed.detector.model
    if not isinstance(model, CenterNet):  # which has no regularizers
        model = replace(model, add_regularization_loss=train.add_regularization_loss)
    others = substitutes(model) if substitute_model else {}
    if "feature_extractor.type" in others:
        _report_substitutes(reader, model.feature_extractor.type, others)
        parts["training"]["warm_start"] = None
    if others:
        model = substituted(model)
    refusal = _refusal(model)
    by_name = made(partial(_fields_by_name, reader, train, model, refusal), f"{source}, training")
    recipe = made(
        lambda: Recipe(
            name=re.sub(r"[^\w.+-]", "_", name).lstrip(".+-") or "imported",
            model=model,
            data=parts["data"],
            evaluate=parts["evaluation"],
            quantization=parsed.detector.quantization,
            feed=DataLoading(order="shuffled" if parsed.train_reader.shuffle else "sequential"),
            **parts["training"],
            **by_name,
        ),
        source,
    )
    return Imported(recipe, reader.rows, {f"model.{path}": value for path, value in others.items()}, refusal)


def _refusal(model: Detector) -> InputError | None:
    try:
        check_supported(model)
    except InputError as error:
        return error
    return None


def _report_substitutes(reader: MessageReader, extractor: str, others: Mapping[str, object]) -> None:
    """Say of each field of the model that another value takes the place of its own, and of the weights that none do."""
    for row in reader.rows:
        for path, value in others.items():
            if row.outcome.fate == "mapped" and f"{row.outcome.text}.".startswith(f"model.{path}."):
                why = f"there is no {extractor} here; model.{path} is {value} in its place"
                reader.revise(row.field, not_mapped(why), row.value)
    for name in ("fine_tune_checkpoint", *training.OF_FIRST_WEIGHTS):
        reader.revise(f"train_config.{name}", not_mapped(f"its weights are those of {extractor}"))


class _ParsedModel(NamedTuple):
    """What a configuration file says of its model."""

    model: TfDetector
    resizer: _Resizer
    quantization: Quantization | None
    labels: Sequence[Label]
    """The classes that have keypoints."""


class _ParsedConfig(NamedTuple):
    """The parts of a configuration file, parsed."""

    pipeline: messages.PipelineConfig
    detector: _ParsedModel
    augment: tuple[Augment, ...]
    train_reader: messages.InputReader
    eval_reader: messages.InputReader


def _read(reader: MessageReader, message: Sequence[Field]) -> _ParsedConfig:
    """Read all parts of a file, so that all that is wrong in it is reported together."""
    found = made_together(
        {
            "pipeline": partial(reader.read, messages.PipelineConfig, message, At("", Place(1, 1), to(""))),
            "detector": partial(_read_model, reader, _inside(message, "model"), _inside(message, "graph_rewriter")),
            "augment": partial(_augmentations, reader, _inside(_inside(message, "train_config"), _AUGMENTATIONS)),
            "train_reader": partial(_input_reader, reader, "train_input_reader", message),
            "eval_reader": partial(_input_reader, reader, "eval_input_reader", message),
        }
    )
    return _ParsedConfig(**found)


def _read_model(reader: MessageReader, models: Sequence[Field], graph: Sequence[Field]) -> _ParsedModel:
    if len(models) != 1 or models[0].name not in _MODELS:
        given = ", ".join(field.name for field in models) or "none"
        place = models[0].place if models else Place(1, 1)
        raise reader.wrong("model", place, given, " or ".join(_MODELS), "other models are not imported")
    (field,) = models
    at = At(f"model.{field.name}", field.value_place, to("model"))
    message = reader.message(field, at)
    names = {each.name for each in fields(messages.BesideTheModel)}
    beside = [inner for inner in message if inner.name in names]
    rest = [inner for inner in message if inner.name not in names]
    found = made_together(
        {
            "model": partial(reader.read, _MODELS[field.name], rest, at),
            "beside": partial(reader.read, messages.BesideTheModel, beside, at),
            "graph": partial(
                reader.read, messages.GraphRewriter, graph, At("graph_rewriter", Place(1, 1), to("model"))
            ),
        }
    )
    said = {row.outcome for row in reader.rows}
    model = replace(
        found["model"], untrained_parts=tuple(name for name, outcome in messages.UNTRAINED.items() if outcome in said)
    )
    if found["beside"].first_stage_only and isinstance(model, FasterRcnn):
        model = replace(model, number_of_stages=1)
    labels: Sequence[Label] = ()
    if isinstance(model, CenterNet) and model.keypoint_estimation_task:
        labels = _labels_with_keypoints(reader, found["beside"].keypoint_label_map_path, at)
        named = (_with_names(reader, task, labels, at) for task in model.keypoint_estimation_task)
        model = made(lambda: replace(model, keypoint_estimation_task=tuple(named)), at.path)
    said = found["graph"].quantization
    quantization = said and made(lambda: Quantization(said.delay, said.weight_bits, said.activation_bits), at.path)
    given_resizer = found["beside"].image_resizer
    if isinstance(given_resizer, messages.KeepAspectRatioResizerConfig | messages.FixedShapeResizerConfig):
        return _ParsedModel(model, given_resizer.resizer(), quantization, labels)
    reader.revise(f"{at.path}.image_resizer.{kind_name(type(given_resizer))}", messages.OTHER_RESIZER)
    return _ParsedModel(model, FixedShapeResizer(), quantization, labels)


def _labels_with_keypoints(reader: MessageReader, path: str, at: At) -> Sequence[Label]:
    """Read the classes that have keypoints from the label map; why it cannot be read is reported."""
    try:
        return [label for label in read_label_map(path).labels if label.keypoints]
    except DataError as error:
        why = f"{error.what} {error.given}"
        reader.revise(f"{at.path}.keypoint_label_map_path", not_mapped(why))
    return ()


def _with_names(reader: MessageReader, task: KeypointEstimation, labels: Sequence[Label], at: At) -> KeypointEstimation:
    """Give a task the names of the keypoints of its class; without, the model is refused."""
    for label in labels:
        if label.name == task.keypoint_class_name:
            ids, names = zip(*label.keypoints, strict=True)
            named = partial(replace, task, label=label.id, keypoint_labels=names, keypoint_ids=ids)
            return cast(KeypointEstimation, made(named, at.path))
    if labels:
        why = f"of the label map's classes with keypoints none has the name {task.keypoint_class_name!r}"
        path = f"{at.path}.keypoint_estimation_task.keypoint_class_name"
        reader.revise(path, not_mapped(why), quoted(task.keypoint_class_name))
    return task


def _inside(message: Iterable[Field], name: str) -> list[Field]:
    """Return what is in the messages of this name, one after the other."""
    return [inner for field in message if field.name == name and isinstance(field.value, list) for inner in field.value]


def _augmentations(reader: MessageReader, steps: Sequence[Field]) -> tuple[Augment, ...]:
    """Read the augmentations, in their order; those that there are not here are reported."""
    path = f"train_config.{_AUGMENTATIONS}"
    makers: dict[int, Callable[[], Augment]] = {}
    for step in steps:
        if cls := OPTIONS.get(step.name):
            at = At(f"{path}.{step.name}", step.value_place, to(f"data.augment.{len(makers)}"))
            makers[len(makers)] = partial(_augmentation, reader, cls, step, at)
            continue
        meant = "" if step.name in OPTIONS else did_you_mean(step.name, OPTIONS)
        reader.leave([step], At(path, step.place, not_mapped(f"there is no such augmentation here. {meant}".rstrip())))
    augment = tuple(made_together(makers).values())
    for name in OPTIONS:
        for field in (f"{path}.{name}.clip_boxes", f"{path}.{name}.operations.clip_boxes"):
            reader.revise(field, no_effect("boxes are always clipped to the crop"), "true")
    return augment


def _augmentation(reader: MessageReader, cls: type, step: Field, at: At) -> Augment:
    if cls is ResizeImage:
        return reader.read_field(messages.ResizeImageConfig, step, at).augmentation()
    augment: Augment = reader.read_field(cls, step, at)
    return augment


def _input_reader(reader: MessageReader, name: str, message: Sequence[Field]) -> messages.InputReader:
    """Read the first reader of a name; further ones are reported."""
    given = [field for field in message if field.name == name]
    if not given:
        return messages.InputReader()
    first, *others = given
    reader.leave(others, At("", first.place, not_mapped("data has one path for each of train, validation and test")))
    read = reader.read_field(messages.InputReader, first, At(name, first.value_place, to("data")))
    if read.input_type == "tf_sequence_example":
        reader.revise(f"{name}.input_type", not_mapped("records are read as tf.train.Example alone"))
    return read


def _training(reader: MessageReader, parsed: _ParsedConfig) -> dict[str, Any]:
    fields = training.recipe_fields(parsed.pipeline.train_config)
    epochs = parsed.train_reader.num_epochs
    if epochs and "end" in fields:
        reader.revise("train_input_reader.num_epochs", not_mapped("the run ends after train_config.num_steps"))
    for name, outcome in _left_out(parsed.pipeline.train_config).items():
        reader.revise(f"train_config.{name}", outcome)
    return {"end": Epochs(epochs) if epochs else None, **fields}


def _fields_by_name(
    reader: MessageReader, train: messages.TrainConfig, model: TfDetector, refusal: InputError | None
) -> dict[str, Any]:
    """Make the fields that choose parameters; the detector is built for their names, if it can be."""
    if refusal is not None:
        for name in training.BY_NAME:
            reader.revise(f"train_config.{name}", not_mapped("the detector, whose names it is about, is not trained"))
        train = replace(train, freeze_variables=(), update_trainable_variables=(), bias_grad_multiplier=0.0)
    variables: Mapping[str, str] = {}
    if any(getattr(train, name) for name in training.BY_NAME):
        variables = variables_of(model.build(0), model.feature_extractor.type)
    for name, pattern in training.unmatched(train, variables):
        why = "it matches no variable; of a single layer, give this project's names in frozen or train_only"
        reader.revise(f"train_config.{name}", not_mapped(why), quoted(pattern))
    return training.fields_by_name(train, variables)


def _left_out(train: messages.TrainConfig) -> dict[str, FieldOutcome]:
    """Say which fields of the training are not in its recipe because of what others say."""
    outcomes: dict[str, FieldOutcome] = {}
    if not train.fine_tune_checkpoint:
        outcomes |= dict.fromkeys(training.OF_FIRST_WEIGHTS, no_effect("no fine_tune_checkpoint is named"))
    elif train.fine_tune_checkpoint_type == "fine_tune":
        why = "the reference knows it of CenterNet alone; all but the predictions is taken, as for detection"
        outcomes["fine_tune_checkpoint_type"] = not_mapped(why)
    elif train.fine_tune_checkpoint_type not in ("", *training.CHECKPOINT_TYPES):
        why = f"it is none of {', '.join(training.CHECKPOINT_TYPES)}; the weights are taken as those of a classifier"
        outcomes["fine_tune_checkpoint_type"] = not_mapped(why)
    if not train.sync_replicas:
        outcomes["replicas_to_aggregate"] = no_effect("sync_replicas is not set")
    elif not training.has_even_shares(train):
        outcomes["replicas_to_aggregate"] = not_mapped("the batch cannot be split evenly over so many towers")
    if not train.optimizer.use_moving_average:
        outcomes["optimizer.moving_average_decay"] = no_effect("use_moving_average is false")
    return outcomes


def _data(reader: MessageReader, parsed: _ParsedConfig) -> DetectionData:
    """Make the data of what the readers of training and evaluation say, much of it twice."""
    train, val, config = parsed.train_reader, parsed.eval_reader, parsed.pipeline.train_config
    for name in ("shuffle", "num_epochs"):
        reader.revise(f"eval_input_reader.{name}", _ONE_EACH)
    reader.revise("eval_input_reader.max_number_of_boxes", no_effect("detections are scored against all objects"))
    most = train.max_number_of_boxes or config.max_number_of_boxes
    num_keypoints = train.num_keypoints or val.num_keypoints
    if train.label_map_path and val.label_map_path not in ("", train.label_map_path):
        one = not_mapped("training and evaluation have one label map, that of train_input_reader")
        reader.revise("eval_input_reader.label_map_path", one)
    if val.num_keypoints not in (0, num_keypoints):
        one = not_mapped("training and evaluation have one number, that of train_input_reader")
        reader.revise("eval_input_reader.num_keypoints", one)
    if config.max_number_of_boxes not in (None, most):
        reader.revise("train_config.max_number_of_boxes", not_mapped("train_input_reader says another number"))
    return DetectionData(
        train=_path(reader, train, "train"),
        validation=_path(reader, val, "eval"),
        label_map=train.label_map_path or val.label_map_path or None,
        masks=train.load_instance_masks or val.load_instance_masks,
        num_keypoints=num_keypoints,
        max_number_of_boxes=most,
        merge_multiple_label_boxes=config.merge_multiple_label_boxes,
        use_multiclass_scores=config.use_multiclass_scores,
        resizer=parsed.detector.resizer,
        augment=parsed.augment,
    )


def _path(reader: MessageReader, given: messages.InputReader, name: str) -> str | None:
    """Return the path of the records; further ones are reported."""
    files = given.tf_record_input_reader
    first = files.input_path[0] if files and files.input_path else ""
    field = f"{name}_input_reader.tf_record_input_reader.input_path"
    reader.revise(field, not_mapped("data has one path or pattern; write one that all files match"))
    reader.revise(field, to("data.train" if name == "train" else "data.validation"), quoted(first))
    return first or None


def _evaluate(reader: MessageReader, parsed: _ParsedConfig) -> Evaluate:
    given, has_average = parsed.pipeline.eval_config, parsed.pipeline.train_config.optimizer.use_moving_average
    if given.use_moving_averages and not has_average:
        why = "train_config.optimizer keeps no averages"
        reader.revise("eval_config.use_moving_averages", not_mapped(why))
    names: tuple[DetectionMetrics, ...] = get_args(DetectionMetrics)
    for name in set(given.metrics_set).difference(names):
        why = f"there are no such metrics here. {did_you_mean(name, names)}".rstrip()
        reader.revise("eval_config.metrics_set", not_mapped(why), quoted(name))
    known = tuple(name for name in names if name in given.metrics_set)
    sigmas = _sigmas(reader, parsed)
    if sigmas and "coco_keypoint_metrics" not in known:
        known = (*(known or DetectionEvaluation().metrics), "coco_keypoint_metrics")
    return Evaluate(
        every=Interval(given.eval_interval_secs, "seconds"),
        micro_batch=given.batch_size,
        weights="average" if given.use_moving_averages and has_average else "raw",
        examples=given.num_examples or None,
        detection=DetectionEvaluation(
            metrics=known or DetectionEvaluation().metrics,
            keypoint_sigmas=sigmas,
            per_category=given.include_metrics_per_category,
            ignore_ground_truth=given.ignore_groundtruth,
            export_path=given.export_path or None,
            pictures=Pictures(
                count=given.num_visualizations,
                folder=given.visualization_export_dir or None,
                min_score=given.min_score_threshold,
                max_boxes=given.max_num_boxes_to_visualize,
                scores=not given.skip_scores,
                labels=not given.skip_labels,
                ground_truth=given.visualize_groundtruth_boxes,
            ),
        ),
    )


def _sigmas(reader: MessageReader, parsed: _ParsedConfig) -> tuple[float, ...]:
    """Return a sigma for each keypoint that the data has of an object, of the first class that has so many."""
    number = parsed.train_reader.num_keypoints or parsed.eval_reader.num_keypoints
    path, found = "eval_config.parameterized_metric.coco_keypoint_metrics", tuple[float, ...]()
    for metric in (each.coco_keypoint_metrics for each in parsed.pipeline.eval_config.parameterized_metric):
        named = metric.class_label if metric else ""
        own = [label.keypoints for label in parsed.detector.labels if named in (label.name, label.display_name)]
        if metric and not found and own and {index for index, _ in own[0]} == {*range(number)}:
            given = {each.key: each.value for each in metric.keypoint_label_to_sigmas}
            found = tuple(given.get(name, _SIGMA) for _, name in sorted(own[0]))
            continue
        why = f"of the label map's classes none of this name has {number} keypoints, or another one is scored"
        reader.revise(f"{path}.class_label", not_mapped(why), quoted(named))
        if not found:
            for part in ("key", "value"):
                reader.revise(f"{path}.keypoint_label_to_sigmas.{part}", not_mapped(why))
    return found
