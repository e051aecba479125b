"""The shipped recipes of Inception-v3 hold the numbers of the reference trainers, and so does what is built of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.checkpoints.retention import Retention
from lockstep.errors import InputError
from lockstep.evaluation.scores import Weights
from lockstep.losses.regularization import L2
from lockstep.models.inception_v3 import InceptionV3, InceptionV3Net
from lockstep.models.torchvision_models import Timm, Torchvision
from lockstep.optim import Exponential, MovingAverage, RMSProp
from lockstep.optim.schedules import Constant, resolve_schedule
from lockstep.recipes.data import ImageData
from lockstep.recipes.parts import CrossEntropy, Evaluate, InitialWeights, Stage
from lockstep.recipes.preprocessing import Inception
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import from_toml, to_toml, with_settings
from lockstep.runs.build import build_state
from lockstep.runs.inputs import check_inputs
from lockstep.selection import selected
from lockstep.towers.towers import Towers
from lockstep.training.state import TrainState
from lockstep.types import Epochs, Interval, Steps
from lockstep.weights.warm_start import WarmStart
from lockstep.workers.rank import join

NAMES = ["inception_v3", "inception_v3_distributed", "flowers", "flowers_two_stages"]
IMAGENET_EXAMPLES = 1_281_167
NUM_CONVOLUTIONS = 96
SMALL = ["model.depth_multiplier=0.05", "data.image_size=75"]


def rmsprop(lr: float | Exponential) -> RMSProp:
    return RMSProp(lr, alpha=0.9, momentum=0.9, eps=1.0)


def state_of(name: str, *settings: str) -> TrainState:
    return build_state(with_settings(find(name), [*SMALL, *settings]), join("cpu"))


# On ImageNet ----------------------------------------------------------------------------------------------------------


def test_inception_v3_is_that_of_the_multi_gpu_trainer() -> None:
    given = find("inception_v3")
    assert given.model == InceptionV3(1001)
    assert given.data == ImageData(image_size=299, preprocessing=Inception(crop_by_boxes=True), labels_offset=0)
    assert given.optimizer == rmsprop(Exponential(0.1, decay_steps=Epochs(30), factor=0.16, staircase=True))
    assert given.loss == CrossEntropy(label_smoothing=0.1, auxiliary_weight=0.4)
    assert given.regularization == (L2(4e-5),)
    assert given.average == MovingAverage(0.9999, dynamic=True, statistics=True)
    assert (given.batch_size, given.num_towers) == (256, 8)
    assert replace(given.towers, precision="fp32") == Towers(batch_norm="last", channels_last=True)
    assert (given.end, given.stages, given.warm_start) == (Steps(100_000), (), None)
    assert given.gradient_transforms == given.tower_gradient_transforms == ()


def test_its_networks_details_are_those_of_inception_slim() -> None:
    """What is not said in the recipe, and so is the value's default."""
    model = InceptionV3()
    assert (model.num_classes, model.image_size, model.auxiliary, model.dropout) == (1001, 299, True, 0.2)
    assert (model.batch_norm_decay, model.batch_norm_epsilon, model.batch_norm_scale) == (0.9997, 0.001, False)
    assert (model.initial_weights, model.depth_multiplier) == ("truncated_normal", 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_scored_is_the_average_for_precision_at_1_and_recall_at_5(name: str) -> None:
    given = find(name)
    weights: Weights = "raw" if name == "flowers_two_stages" else "average"  # slim's script keeps no averages
    assert given.evaluate == Evaluate(Interval(1, "epochs"), weights=weights, top=(1, 5))
    assert (given.average is None) == (weights == "raw")
    assert given.checkpoints.retention == Retention(best="validation/top1")
    assert given.chosen_task.top == (1, 5)


@pytest.mark.parametrize(
    ("name", "steps", "expected"),
    [
        ("inception_v3", [0, 150_135, 150_136, 300_271, 300_272], [0.1, 0.1, 0.016, 0.016, 0.00256]),
        ("inception_v3_distributed", [0, 10_008, 10_009, 20_017], [0.045, 0.045, 0.0423, 0.0423]),
        ("flowers", [0, 150_135, 150_136], [0.001, 0.001, 0.00016]),
    ],
)
def test_rates_fall_in_steps_after_so_many_epochs(name: str, steps: list[int], expected: list[float]) -> None:
    """As the reference counts: int(1281167 / 256 * 30) updates made."""
    given = find(name).optimizer
    assert isinstance(given, RMSProp)
    schedule = resolve_schedule(given.lr, IMAGENET_EXAMPLES, 256)
    assert [schedule(step) for step in steps] == pytest.approx(expected)


def test_the_distributed_preset_differs_in_its_rate_and_length_alone() -> None:
    given, base = find("inception_v3_distributed"), find("inception_v3")
    assert given.optimizer == rmsprop(Exponential(0.045, decay_steps=Epochs(2), factor=0.94))
    assert replace(given, name=base.name, optimizer=base.optimizer, end=base.end) == base


# On flowers -----------------------------------------------------------------------------------------------------------


def test_flowers_have_fresh_last_layers_and_a_small_rate() -> None:
    given = find("flowers")
    assert given.model == InceptionV3(num_classes=6)
    assert given.data == ImageData()
    assert given.optimizer == rmsprop(Exponential(0.001, decay_steps=Epochs(30), factor=0.16))
    assert given.warm_start == InitialWeights(mapping=WarmStart(skip=(r"^fc\.", r"^AuxLogits\.fc\.")))
    assert (given.batch_size, given.num_towers, given.end) == (32, 1, Steps(2_000))
    assert given.loss == CrossEntropy(label_smoothing=0.1, auxiliary_weight=0.4)


def test_flowers_in_two_stages_train_the_heads_first() -> None:
    given, heads = find("flowers_two_stages"), (r"^fc\.", r"^AuxLogits\.")
    assert given.stages == (
        Stage(Steps(1_000), optimizer=rmsprop(0.01), train_only=heads),
        Stage(Steps(500), optimizer=rmsprop(0.0001)),
    )
    assert given.warm_start == InitialWeights(mapping=WarmStart(skip=heads))
    assert given.end is None


def test_what_is_fresh_is_what_has_a_number_for_each_class() -> None:
    """The reference restores 384 of its 388 variables: all but two weights and two biases."""

    def built(num_classes: int) -> dict[str, torch.Size]:
        model = InceptionV3(num_classes, depth_multiplier=0.05).build(0)
        return {name: parameter.shape for name, parameter in model.named_parameters()}

    ours, theirs = built(6), built(1001)
    mapping = find("flowers").warm_start
    assert mapping is not None
    fresh = selected("skip", mapping.mapping.skip, ours)
    assert [*fresh] == [name for name in ours if ours[name] != theirs[name]]
    assert len(fresh) == 4


def test_the_first_stage_trains_the_heads_alone() -> None:
    state = state_of("flowers_two_stages", r'train_only=["^fc\\.", "^AuxLogits\\."]')
    assert {name.partition(".")[0] for name in state.parameters} == {"fc", "AuxLogits"}
    assert len(state.parameters) == 2 + 2 + 2 * 2, "two last layers, two convolutions with what batch norm adds"


# What is built --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def state() -> TrainState:
    return state_of("inception_v3")


def test_weights_alone_decay_and_each_once(state: TrainState) -> None:
    """98 weights; no bias of a layer, and nothing of batch norm."""
    assert len(state.penalised) == NUM_CONVOLUTIONS + 2
    assert all(name.endswith((".conv.weight", "fc.weight")) for name in state.penalised)
    assert len(state.parameters) == 2 * NUM_CONVOLUTIONS + 2 * 2, "a weight, and what batch norm adds; two heads"


def test_statistics_have_averages(state: TrainState) -> None:
    assert isinstance(state.model, InceptionV3Net)
    norms = [module for module in state.model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == NUM_CONVOLUTIONS
    assert {norm.eps for norm in norms} == {0.001}
    assert [norm.momentum for norm in norms] == pytest.approx([0.0003] * NUM_CONVOLUTIONS)
    statistics = {name for name in state.averaged() if name.endswith(("running_mean", "running_var"))}
    assert len(statistics) == 2 * NUM_CONVOLUTIONS
    assert {*state.averaged()} - statistics == {*state.parameters}


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_path_says_how_to_build_the_shards(name: str) -> None:
    with pytest.raises(InputError, match=r"`lockstep convert imagenet --help`"):
        check_inputs(find(name), None)


@pytest.mark.parametrize("name", ["flowers", "flowers_two_stages"])
def test_a_missing_checkpoint_says_how_to_name_one(name: str, tmp_path: Path) -> None:
    (tmp_path / "roses").mkdir()
    told = with_settings(find(name), [f"data.train={tmp_path}", f"data.validation={tmp_path}"])
    with pytest.raises(InputError, match="and has not been told which") as caught:
        check_inputs(told, None)
    assert "--set warm_start.path=PATH" in caught.value.hint
    assert "slim_inception_v3" in caught.value.hint
    check_inputs(with_settings(told, ["warm_start=none"]), None)


@pytest.mark.parametrize("name", NAMES)
def test_its_input_is_what_the_net_takes(name: str) -> None:
    assert find(name).data.blank(2).shape == (2, 3, 299, 299)


@pytest.mark.parametrize("name", NAMES)
def test_as_toml_it_says_every_number_and_is_read_back(name: str) -> None:
    text = to_toml(find(name))
    assert from_toml(text, "text") == find(name)
    smoothing = "0.0" if name == "flowers_two_stages" else "0.1"
    losses = f"label_smoothing = {smoothing}", "auxiliary_weight = 0.4"
    for line in ("alpha = 0.9", "momentum = 0.9", "eps = 1.0", *losses):
        assert re.search(f"^{re.escape(line)}$", text, re.MULTILINE), line


# What cannot be -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "size", "where"),
    [(["data.image_size=74"], 74, "data.image_size"), (["stages.1.image_size=74"], 74, "stages[1].image_size")],
)
def test_images_too_small_for_the_stem_are_refused(settings: list[str], size: int, where: str) -> None:
    with pytest.raises(InputError) as caught:
        with_settings(find("flowers_two_stages"), settings)
    assert str(caught.value) == (
        "--set: The images are too small for InceptionV3.\n"
        f"  given:    {where}={size}\n"
        "  expected: 75 pixels or more\n"
        f"  hint:     set {where} to 75 or more (299 is usual)"
    )


def test_images_too_small_for_the_auxiliary_head_of_torchvisions_are_refused() -> None:
    whole = find("inception_v3")
    with pytest.raises(InputError, match=r"set data.image_size to 299 or more \(299 is usual\)"):
        replace(whole, model=Torchvision("inception_v3"), data=replace(whole.data, image_size=224))


@pytest.mark.parametrize(
    ("model", "size"),
    [(Timm("vit_tiny_patch16_224", options={"img_size": 384}), 384), (Torchvision("vit_b_16"), 224)],
)
def test_images_of_another_size_than_a_transformer_takes_are_refused(model: Timm | Torchvision, size: int) -> None:
    whole = find("flowers")
    with pytest.raises(InputError) as caught:
        replace(whole, model=model, data=replace(whole.data, image_size=299))
    assert str(caught.value) == (
        f"This {type(model).__name__} takes images of one size.\n"
        "  given:    data.image_size=299\n"
        f"  expected: {size} pixels\n"
        f"  hint:     set data.image_size to {size}, or make the model for other images, by an option of it"
    )
    replace(whole, model=model, data=replace(whole.data, image_size=size))


@pytest.mark.parametrize(("name", "least"), [("alexnet", 63), ("densenet161", 29)])
def test_images_too_small_for_a_net_of_torchvision_are_refused(name: str, least: int) -> None:
    whole = find("flowers")
    with pytest.raises(InputError, match=rf"set data.image_size to {least} or more \(224 is usual\)"):
        replace(whole, model=Torchvision(name), data=replace(whole.data, image_size=least - 1))


@pytest.mark.parametrize("setting", ["stages.0.image_size=257", "data.image_size=257"])
def test_images_too_large_for_the_preprocessing_are_refused(setting: str) -> None:
    vgg = ["data.preprocessing.kind=vgg", "data.image_size=256"]
    with pytest.raises(InputError, match=r"short_side is out of range") as caught:
        with_settings(find("flowers_two_stages"), [*vgg, setting])
    assert caught.value.given == "short_side=(256, 512), size=257"
    with_settings(find("flowers_two_stages"), vgg)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_few_classes_has_no_top_5(name: str) -> None:
    with pytest.raises(InputError) as caught:
        with_settings(find(name), ["model.num_classes=4"])
    assert str(caught.value) == (
        "--set: A model with 4 classes has no top 5.\n"
        "  given:    evaluate.top=[1, 5]\n"
        "  expected: numbers of 4 at most\n"
        "  hint:     set evaluate.top=[1]"
    )
    with_settings(find(name), ["model.num_classes=4", "evaluate.top=[1, 4]"])


def test_a_score_that_is_none_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "roses").mkdir()
    told = [f"data.train={tmp_path}", f"data.validation={tmp_path}", "checkpoints.retention.best=validation/top3"]
    with pytest.raises(InputError, match=r"checkpoints.retention.best cannot be 'validation/top3'") as caught:
        check_inputs(with_settings(find("inception_v3"), told), None)
    assert caught.value.expected == "'validation/top1' or 'validation/top5'"


def test_the_smallest_images_are_not_refused() -> None:
    given = with_settings(find("flowers_two_stages"), ["data.image_size=75", "stages.0.image_size=75"])
    assert isinstance(given, Recipe)
    assert isinstance(given.optimizer, RMSProp)
    assert not isinstance(given.optimizer.lr, Constant)
