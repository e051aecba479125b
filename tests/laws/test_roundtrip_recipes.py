"""The law of the round trip, for recipes: what is written is read back as it was, field by field.

A part that a recipe can hold gets a line in the strategies below.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.augmentations.auto_augment import RandAugment
from lockstep.augmentations.boxes import ConvertClassLogitsToSoftmax
from lockstep.augmentations.colours import (
    NormalizeImage,
    RandomAdjustContrast,
    RandomDistortColor,
    RgbToGray,
    SubtractChannelMean,
)
from lockstep.augmentations.mixing import MixDraws
from lockstep.augmentations.pixels import RandomBlackPatches, RandomErasing
from lockstep.augmentations.resizers import FixedShapeResizer, KeepAspectRatioResizer
from lockstep.augmentations.turns import HorizontalFlip, RandomShift, RandomVerticalFlip
from lockstep.checkpoints.retention import Retention
from lockstep.data.order import BlockShuffled, Repeated
from lockstep.detection.tf_configs import FasterRcnn, Ssd
from lockstep.detection.values import (
    FasterRcnnFpn,
    Fcos,
    KeypointRcnnFpn,
    MaskRcnnFpn,
    RtDetr,
    SqueezeSsd,
    Ssd300,
    Ssdlite,
    TorchvisionDetector,
)
from lockstep.exchange.exchange import AllReduce, Alone
from lockstep.images.decode import Decoding
from lockstep.losses.regularization import L1, L2
from lockstep.models import InceptionV3, LeNet, Mnist, SqueezeNet, Timm, Torchvision
from lockstep.optim import (
    SGD,
    Adam,
    AdaptiveClip,
    ByName,
    ClipGlobalNorm,
    ClipNorm,
    ClipValue,
    Cosine,
    Exponential,
    LayerDecay,
    MovingAverage,
    PiecewiseConstant,
    RMSProp,
    ScaledByBatch,
    ScaleGradients,
    Warmup,
)
from lockstep.optim.from_torch import TorchOptimizerByName
from lockstep.optim.schedules import Constant
from lockstep.recipes.code import Function
from lockstep.recipes.data import DetectionData, ImageData, MnistData
from lockstep.recipes.parts import (
    Checkpoints,
    CrossEntropy,
    DataLoading,
    DetectionEvaluation,
    Evaluate,
    InitialWeights,
    Monitoring,
    Quantization,
    Stage,
    Verification,
)
from lockstep.recipes.preprocessing import Cifarnet, Inception, Lenet, ResizedCrop, Vgg
from lockstep.recipes.python_parts import PythonData, PythonHook, PythonModel, PythonOptimizer, PythonTask
from lockstep.recipes.recipe import Recipe, recipe_changes
from lockstep.recipes.shipped import find, names
from lockstep.recipes.toml import FieldType, field_hints, field_type, from_toml, to_toml, with_settings
from lockstep.reporting.profiling import Profile
from lockstep.towers.towers import Towers
from lockstep.training.attempt import LossAverage
from lockstep.types import Epochs, Hours, Interval, StepRange, Steps
from lockstep.weights.layouts import Layout
from lockstep.weights.names import Rename
from lockstep.weights.warm_start import WarmStart

rates = st.floats(min_value=0, allow_infinity=False)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False) | st.integers(1, 10**6)
counts = st.integers(1, 2**63 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]))
intervals = st.builds(
    Interval,
    st.floats(min_value=0, allow_infinity=False) | st.integers(0, 2**53),
    st.sampled_from(["steps", "seconds", "epochs"]),
)
steps = st.builds(lambda start, count: StepRange(start, start + count), st.integers(0, 10**9), st.integers(1, 100))
profiles = (
    st.none() | st.builds(Profile, st.integers(1, 10**9), with_stack=st.booleans()) | st.builds(Profile, steps=steps)
)
epochs = st.builds(Epochs, positive)
schedules = (
    st.builds(Constant, rates)
    | st.builds(Cosine, rates, st.integers(2, 10**9), warmup_steps=st.integers(0, 1), final=rates)
    | st.builds(Cosine, rates, epochs)
)
any_schedules = (
    schedules
    | st.builds(Warmup, schedules, st.integers(1, 10**9))
    | st.builds(ScaledByBatch, schedules | positive, st.integers(1, 10**6))
    | st.builds(Exponential, positive, epochs, st.floats(0, 1, exclude_min=True))
    | st.just(PiecewiseConstant((10, 20), (0.1, 0.01, 0.001)))
)
decays = st.dictionaries(texts.filter(bool), rates, max_size=2)
functions = st.builds(
    Function,
    st.sampled_from(["my_net", "nets.small", "__main__"]),
    st.sampled_from(["Net", "Nets.small", "main.<locals>.<lambda>", "Net(...)"]),
    st.sampled_from(["/home/me/my nets, source/net.py", "/home/me/net.py"]),
    st.sampled_from(["", "0123456789abcdef"]),
)
single_optimizers = st.builds(
    SGD,
    rates | st.integers(0, 3) | any_schedules,
    momentum=st.floats(0, 1, exclude_min=True, exclude_max=True),
    nesterov=st.booleans(),
    weight_decay=rates | decays,
) | st.sampled_from([Adam(1e-3, epsilon_hat=True), RMSProp(0.045, momentum=0.9, eps=1.0)])
arguments = st.dictionaries(
    texts.filter(lambda text: text != "lr"), st.booleans() | rates | texts | st.just((0.9, 0.99)), max_size=2
)
single_optimizers |= st.builds(PythonOptimizer, functions, rates | any_schedules, arguments)
single_optimizers |= st.builds(TorchOptimizerByName, texts, rates | any_schedules, arguments)
optimizers = (
    single_optimizers
    | st.builds(
        ByName,
        st.dictionaries(texts.filter(lambda text: text not in ("", "rest")), single_optimizers, min_size=1, max_size=2),
        st.none() | single_optimizers,
    )
    | st.builds(LayerDecay, single_optimizers, st.floats(0, 1, exclude_min=True))
)
unit = st.floats(0, 1, exclude_min=True, exclude_max=True)
averages = st.builds(MovingAverage, unit, st.booleans(), st.booleans()) | st.builds(
    MovingAverage, half_life_steps=st.floats(0.01, 1e9) | st.integers(1, 10**9)
)
patterns = st.lists(texts.filter(bool), max_size=2).map(tuple)
transforms = st.lists(
    st.builds(ClipGlobalNorm, positive)
    | st.builds(ClipNorm, positive)
    | st.builds(ClipValue, positive)
    | st.just(AdaptiveClip())
    | st.builds(ScaleGradients, st.dictionaries(texts.filter(bool), rates, min_size=1, max_size=2)),
    max_size=3,
).map(tuple)
penalties = st.lists(
    st.builds(L2, positive, st.none() | texts | patterns) | st.builds(L1, positive, st.none() | patterns), max_size=2
).map(tuple)
towers = st.builds(
    Towers,
    batch_norm=st.sampled_from(["mean", "first", "last", "none", "frozen"]),
    variance=st.sampled_from(["unbiased", "biased"]),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    channels_last=st.booleans(),
)
transports = st.sampled_from([None, "shared_memory", "gloo", "nccl"])
exchanges = (
    st.just(Alone())
    | st.builds(AllReduce, transports, st.booleans())
    | st.builds(AllReduce, transports, compression=st.sampled_from(["bf16", "fp16"]))
)
feeds = st.builds(
    DataLoading,
    st.sampled_from(["shuffled", "sequential"])
    | st.builds(BlockShuffled, counts, counts)
    | st.builds(Repeated, counts),
    num_processes=st.none() | st.integers(0, 8),
    prefetch=counts,
    bad_examples=st.sampled_from(["raise", "skip"]),
    bad_budget=st.integers(0, 100),
) | st.builds(DataLoading, num_threads=counts)
renames = st.sampled_from(
    [(), (Rename("/weights$", ".weight"),), (Rename("a", ("b", "c"), Layout("i o -> o i")), Rename("x", "y"))]
)
warm_starts = st.none() | st.builds(
    InitialWeights,
    st.none() | texts,
    st.builds(
        WarmStart,
        renames,
        texts,
        skip=patterns,
        reshape=st.booleans(),
        mismatch=st.sampled_from(["error", "skip"]),
        name_map=st.sampled_from([None, "mnist"]),
        require_loaded=st.none() | st.floats(0, 1),
    ),
    st.sampled_from([None, "classifier", "features", "detector"]),
)
shares = st.floats(0, 1, exclude_min=True)
chances = st.floats(0, 1)
below_one = st.floats(0, 1, exclude_max=True)
classes = st.integers(10, 2**31)
channels = st.tuples(*[st.floats(0, 255)] * 3)
deviations = st.tuples(*[st.floats(1e-3, 255)] * 3)
options = st.dictionaries(texts, st.booleans() | st.integers(-9, 9) | rates | texts, max_size=2)
models_of_photos = (
    st.builds(
        InceptionV3,
        classes,
        st.booleans(),
        below_one,
        unit,
        st.floats(1e-6, 1),
        st.booleans(),
        st.booleans(),
        st.floats(0.01, 4),
        st.sampled_from(["truncated_normal", "variance_scaling"]),
        st.integers(1, 64),
    )
    | st.builds(SqueezeNet, classes, below_one)
    | st.builds(Torchvision, texts, classes, options)
    | st.builds(Timm, texts, classes, options)
)
own_models = st.builds(PythonModel, functions, options, classes)
models_of_photos |= own_models
tasks = st.builds(
    PythonTask, functions, options, main_score=texts, better=st.sampled_from((None, "higher", "lower"))
) | st.builds(PythonTask, losses=functions, score=st.none() | functions, predict=st.none() | functions)
own_data = st.builds(PythonData, functions, options, st.none() | functions, st.none() | functions)
hooks = st.lists(st.builds(PythonHook, functions, options), max_size=2).map(tuple)
models_of_digits = st.builds(Mnist, lrn=st.booleans()) | st.builds(LeNet, classes, st.integers(1, 4), below_one)
preprocessings = (
    st.builds(Inception, st.booleans(), st.booleans(), shares)
    | st.builds(Vgg, st.tuples(st.integers(512, 600), st.integers(600, 700)))
    | st.sampled_from([Cifarnet(), Lenet()])
    | st.builds(
        ResizedCrop,
        shares,
        st.floats(0, 9),
        st.sampled_from(["none", "rand_augment", "trivial_augment"]),
        chances,
        channels,
        deviations,
        st.sampled_from(["rgb", "bgr"]),
        st.just((0.5, 2.0)),
        st.sampled_from(["antialiased", "bilinear"]),
        chances,
        st.lists(
            st.sampled_from([RandomVerticalFlip(), RandAugment(3, 5), RandomErasing(fill="noise")]), max_size=3
        ).map(lambda some: (*some, MixDraws(0.8, 1.0))),
    )
)
sizes = st.integers(75, 512)
paths = st.none() | texts.filter(bool)
splits = st.sampled_from(["train", "validation", "test"])
photos = st.builds(
    ImageData,
    paths,
    paths,
    paths,
    sizes,
    preprocessings,
    st.integers(-5, 5),
    st.builds(Decoding, st.sampled_from(["auto", "pillow"]), st.booleans(), counts),
    st.none() | functions,
    splits,
) | st.builds(
    ImageData,
    paths,
    preprocessing=st.sampled_from([Inception(), ResizedCrop()]),
    preprocess_on=st.sampled_from(["host", "device"]),
)
methods = st.sampled_from(["bilinear", "nearest", "bicubic", "area", "antialiased"])
colours = st.tuples(*[st.integers(0, 255)] * 3)
resizers = st.builds(FixedShapeResizer, sizes, sizes, methods) | st.builds(
    KeepAspectRatioResizer, sizes, st.integers(512, 2048), methods, st.booleans(), colours
)
options = (
    st.builds(HorizontalFlip, chances)
    | st.builds(NormalizeImage, st.floats(-9, -1), st.floats(0, 255))
    | st.builds(SubtractChannelMean, channels)
    | st.builds(RandomAdjustContrast, st.floats(0, 1), st.floats(1, 2))
    | st.builds(RandomDistortColor, st.integers(0, 1))
    | st.builds(RandomBlackPatches, counts, chances)
    | st.sampled_from([RgbToGray(), ConvertClassLogitsToSoftmax()])
)
augmentations = st.lists(options, max_size=3).map(tuple)
photos_with_objects = st.builds(
    DetectionData,
    train=paths,
    validation=paths,
    test=paths,
    train_split=paths,
    year=st.none() | st.integers(2005, 2012),
    label_map=paths,
    labels_offset=st.integers(-5, 5),
    masks=st.booleans(),
    num_keypoints=st.integers(0, 17),
    crowd=st.booleans(),
    difficult=st.booleans(),
    max_number_of_boxes=st.none() | st.integers(1, 1000),
    quantization_bins=st.none() | st.integers(2, 2**31 - 1),
    use_multiclass_scores=st.booleans(),
    bad_objects=st.sampled_from(["raise", "drop"]),
    resizer=resizers,
    augment=augmentations,
    function=st.none() | functions,
    split=splits,
    cache=paths,
    cache_gb=st.none() | st.floats(0, 1000),
    image_column=paths,
    objects_column=paths,
)
digits = st.builds(
    MnistData,
    st.none() | texts,
    augment=st.lists(st.builds(RandomShift, counts, texts), max_size=3).map(tuple),
    split=splits,
    scale=st.sampled_from(["half", "one"]),
)


def detector(cls: type, seed: int) -> Any:
    """Make a detector whose parts are drawn by one seed: strategies for all of them take minutes."""
    return made_up(FieldType((), (), {"": cls}), Random(seed))


def made_up(kind: FieldType, random: Random) -> Any:
    """Make a value of a field: any small number, word or part will do."""
    if kind.item is not None:
        return tuple(made_up(field_type(kind.item), random) for _ in range(random.randint(0, 2)))
    if type(None) in kind.scalars and random.random() < 0.5:
        return None
    if kind.classes:
        cls = random.choice([*kind.classes.values()])
        return cls(**{name: made_up(field_type(hint), random) for name, hint in field_hints(cls).items()})
    if kind.words:
        return random.choice(kind.words)
    plain = {bool: random.random() < 0.5, int: random.randint(1, 3), float: random.uniform(0.01, 1), str: "any"}
    return next(plain[scalar] for scalar in kind.scalars if scalar in plain)


detectors = st.builds(detector, st.sampled_from([Ssd, FasterRcnn]), st.integers(0, 10**6)) | st.builds(
    SqueezeSsd,
    st.integers(1, 90),
    st.sampled_from([(7, 12), (4, 9)]),
    anchor_ratios=st.tuples(shares),
    max_detections=counts,
)
detectors |= st.builds(detector, st.sampled_from([Fcos, RtDetr, Ssd300, Ssdlite]), st.integers(0, 10**6))
torchvision_options = st.dictionaries(texts, st.booleans(), max_size=1)
detectors |= st.builds(TorchvisionDetector, texts, st.integers(1, 90), torchvision_options)
detectors |= st.builds(
    FasterRcnnFpn, st.integers(1, 90), anchor_ratios=st.tuples(shares), rpn_pre_nms_top_n_test=counts
) | st.builds(MaskRcnnFpn, st.integers(1, 90), freeze_batchnorm=st.booleans(), iou_threshold=shares)
detectors |= st.builds(KeypointRcnnFpn, st.integers(1, 90), num_keypoints=counts)
models_and_data = (
    st.tuples(models_of_photos, photos)
    | st.tuples(models_of_digits, digits)
    | st.tuples(own_models, own_data)
    | st.tuples(detectors, photos_with_objects).filter(lambda pair: pair[1].image_size >= pair[0].smallest_image)
)
tops = st.lists(st.integers(1, 10), min_size=1, max_size=3).map(tuple)


def stages(sizes: st.SearchStrategy[int | None]) -> st.SearchStrategy[tuple[Stage, ...]]:
    length = st.builds(Steps, counts) | epochs
    switches = st.none() | st.booleans()
    stage = st.builds(
        Stage, length, st.none() | optimizers, st.none() | patterns, st.none() | patterns, switches, sizes
    )
    return st.lists(stage, max_size=2).map(tuple)


scores = st.none() | texts.map("validation/{}".format)
better = st.sampled_from(["higher", "lower"])


def checkpoints(best: st.SearchStrategy[str | None]) -> st.SearchStrategy[Checkpoints]:
    retention = st.builds(Retention, counts, st.none() | positive, best, better, counts, rates)
    return st.builds(Checkpoints, intervals, retention)


quantizations = st.none() | st.builds(Quantization, st.integers(0, 10**9), st.integers(2, 8), st.integers(2, 8))


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    num_towers = draw(st.integers(1, 64))
    average = draw(st.none() | averages)
    weights = ["raw", "average"] if average else ["raw"]
    evaluation: dict[str, Any] = {
        "every": intervals,
        "micro_batch": st.none() | counts,
        "weights": st.sampled_from(weights),
        "precision": st.sampled_from([None, "fp32", "bf16", "fp16"]),
        "examples": st.none() | counts,
        "drop_last": st.booleans(),
        "top": tops,
        "flip": st.booleans(),
        "detection": st.none()
        | st.builds(
            DetectionEvaluation,
            per_category=st.booleans(),
            keypoint_sigmas=st.tuples(shares),
            export_path=st.none() | texts,
        ),
    }
    evaluate = draw(st.builds(Evaluate, **evaluation))
    kept = draw(checkpoints(scores if evaluate.every.amount else st.none()))
    if kept.retention.best:
        evaluate = replace(evaluate, patience=draw(st.none() | counts))
    model, data = draw(models_and_data)
    parted = draw(towers)
    in_float32 = {parted.precision, evaluate.precision} <= {"fp32", None} and parted.batch_norm in ("mean", "first")
    can_quantize = in_float32 and not (parted.compile or parted.activation_checkpointing)
    return Recipe(
        name=draw(st.from_regex(r"\w[\w.+-]*", fullmatch=True)),
        model=model,
        data=data,
        optimizer=draw(optimizers),
        task=draw(tasks) if isinstance(model, PythonModel) and (kept.retention.best or not evaluate.patience) else None,
        loss=draw(st.builds(CrossEntropy, below_one, rates)),
        warm_start=draw(warm_starts),
        feed=draw(feeds),
        batch_size=num_towers * draw(st.integers(2, 1000)),
        seed=draw(st.integers(0, 2**63 - 1)),
        frozen=draw(patterns),
        train_only=draw(patterns),
        freeze_statistics=draw(st.booleans()),
        regularization=draw(penalties),
        tower_gradient_transforms=draw(transforms),
        gradient_transforms=draw(transforms),
        average=average,
        loss_average=draw(st.builds(LossAverage, unit, st.booleans())),
        nonfinite=draw(st.sampled_from(["stop", "skip", "rollback", "off"])),
        nonfinite_budget=draw(st.integers(0, 100)),
        num_towers=draw(st.sampled_from([None, num_towers])),
        towers=parted,
        num_workers=draw(st.none() | st.integers(1, num_towers)),
        device=draw(st.none() | texts),
        exchange=draw(exchanges),
        end=draw(st.none() | st.builds(Steps, counts) | epochs | st.builds(Hours, positive)),
        stages=draw(stages(st.none() | sizes if isinstance(data, ImageData) else st.none())),
        checkpoints=kept,
        watch=draw(
            st.builds(Monitoring, *[intervals] * 6, st.integers(0, 100), trace=st.none() | steps, profile=profiles)
        ),
        verify=draw(st.builds(Verification, st.integers(0, 100), st.integers(0, 100))),
        evaluate=evaluate,
        hooks=draw(hooks),
        quantization=draw(quantizations) if can_quantize else None,
    )


@settings(max_examples=50, deadline=None)
@given(recipes())
def test_what_is_written_is_read_back(written: Recipe) -> None:
    text = to_toml(written)
    assert from_toml(text, "text") == written
    assert to_toml(from_toml(text, "text")) == text
    assert recipe_changes(written, from_toml(text, "text")) == []


@settings(max_examples=20, deadline=None)
@given(recipes())
def test_no_setting_is_no_change(given_recipe: Recipe) -> None:
    assert with_settings(given_recipe, []) == given_recipe


@pytest.mark.parametrize("name", names())
def test_every_shipped_recipe_is_read_back(name: str) -> None:
    assert from_toml(to_toml(find(name)), name) == find(name)


@pytest.mark.process
def test_no_recipe_needs_torch_to_be_read() -> None:
    written = []

    @settings(max_examples=50, deadline=None, database=None)
    @given(recipes())
    def write(recipe: Recipe) -> None:
        written.append(to_toml(recipe))

    write()
    code = """
import json, sys
from lockstep.lazy import import_lazily
import_lazily("torch", "numpy")
from lockstep import recipes
from lockstep.recipes.recipe import recipe_changes
from lockstep.recipes.toml import from_toml, to_toml
for name in recipes.__all__: getattr(recipes, name)
for text in json.load(sys.stdin):
    recipe = from_toml(text, "text")
    assert to_toml(recipe) == text and not recipe_changes(recipe, recipe)
loaded = {"torch._C", "numpy._core", "PIL.Image"} & {*sys.modules}
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], input=json.dumps(written), text=True, check=True)
