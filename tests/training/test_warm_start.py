from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.detection.detector import DetectionModel
from lockstep.errors import CheckpointError, InputError
from lockstep.models import InceptionV3, LeNet, Mnist, SqueezeNet
from lockstep.training.warm_start import targets_of
from lockstep.weights.names import Destination, NameTable, Rename


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(images)).mean((2, 3)))


def make(seed: int = 0, **options: Any) -> ls.TrainState:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ls.TrainState(Net(), ls.optim.SGD(0.1, momentum=0.9), **options)


def values(state: ls.TrainState) -> dict[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in state.model.state_dict().items()}


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"square": model(batch["image"]).square().mean()}


def loader() -> ls.data.Loader:
    images = torch.randn(16, 3, 5, 5, generator=torch.Generator().manual_seed(3))
    return ls.data.Loader(ls.data.Arrays({"image": images}), batch_size=4)


def test_another_states_weights_start_a_run_and_its_averages() -> None:
    donor = make(1)
    state = make(2, average=ls.optim.MovingAverage(0.9))
    report = ls.warm_start(state, donor.model.state_dict())
    assert report.share == 1.0
    assert values(state) == values(donor)
    assert all(torch.equal(state.averaged()[name], parameter) for name, parameter in state.parameters.items())
    assert state.step == 0


@pytest.mark.parametrize("prefer_average", [False, True])
def test_a_run_starts_another(tmp_path: Path, prefer_average: bool) -> None:
    donor, stream = make(1, average=ls.optim.MovingAverage(0.5)), loader()
    ls.train(donor, losses, stream, until=ls.Steps(3))
    ls.save(donor, stream, tmp_path)
    state = make(2)
    report = ls.warm_start(state, tmp_path, ls.weights.WarmStart(prefer_average=prefer_average))
    wanted = donor.averaged() if prefer_average else donor.parameters
    assert all(torch.equal(state.parameters[name], tensor) for name, tensor in wanted.items())
    assert report.share == 1.0
    assert state.step == 0
    assert ls.warm_start(make(2), f"{tmp_path}@3").share == 1.0


def test_heads_may_stay_fresh(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    donor, state = make(1), make(2)
    fresh = values(state)["head.weight"]
    report = ls.warm_start(state, donor.model.state_dict(), ls.weights.WarmStart(skip=r"^head\."))
    assert values(state)["conv.weight"] == values(donor)["conv.weight"]
    assert values(state)["head.weight"] == fresh
    assert {each.name for each in report.skipped} == {"head.weight", "head.bias"}
    assert any("tensors of the model" in record.message for record in caplog.records)


def test_a_tensor_of_tensorflow_is_laid_out_anew() -> None:
    state = make()
    kernel = np.random.default_rng(0).normal(size=(3, 3, 3, 4)).astype(np.float32)
    names = {"conv/weights": kernel}
    mapping = ls.weights.WarmStart(
        rename=(ls.weights.Rename("/weights$", ".weight"),), ignore_missing=True, system="tensorflow"
    )
    ls.warm_start(state, names, mapping)
    assert np.array_equal(state.parameters["conv.weight"].detach().numpy(), kernel.transpose(3, 2, 0, 1))


def test_what_does_not_fit_changes_nothing() -> None:
    state, donor = make(1), make(2).model.state_dict()
    before = values(state)
    donor["head.weight"] = torch.zeros(3, 4)
    with pytest.raises(CheckpointError, match=r"head\.weight"):
        ls.warm_start(state, donor)
    with pytest.raises(CheckpointError):
        ls.warm_start(
            state,
            {"conv.bias": torch.zeros(4)},
            ls.weights.WarmStart(ignore_missing=True, require_loaded=0.5),
        )
    assert values(state) == before


def test_weights_that_are_not_finite_are_refused_by_name() -> None:
    state, donor = make(1), make(2).model.state_dict()
    before = values(state)
    donor["head.weight"][0, :2] = torch.tensor([float("nan"), float("inf")])
    donor["norm.running_var"][0] = float("nan")
    with pytest.raises(CheckpointError) as caught:
        ls.warm_start(state, donor)
    assert str(caught.value) == (
        "Weights in memory (values in memory) are not finite.\n"
        "  given:    head.weight (1 NaN, 1 infinite), norm.running_var (1 NaN)\n"
        "  expected: finite values for each parameter, and for each buffer no NaN\n"
        "  hint:     take an earlier checkpoint of that training, or leave out what is not finite: "
        "skip=['head.weight', 'norm.running_var']"
    )
    assert values(state) == before
    report = ls.warm_start(state, donor, ls.weights.WarmStart(skip=["head.weight", "norm.running_var"]))
    assert report.nonfinite == ()


def test_infinities_of_a_mask_are_loaded_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.zeros(3))
    state = ls.TrainState(model, ls.optim.SGD(0.1))
    infinite = torch.tensor([0.0, float("-inf"), float("-inf")])
    report = ls.warm_start(state, model.state_dict() | {"mask": infinite})
    assert torch.equal(model.mask, infinite)
    assert [str(each) for each in report.nonfinite or ()] == ["mask (2 infinite)"]
    assert any("mask (2 infinite)" in record.message for record in caplog.records)


def test_a_state_under_training_is_left_alone() -> None:
    state = make()
    ls.train(state, losses, loader(), until=ls.Steps(1))
    with pytest.raises(InputError) as caught:
        ls.warm_start(state, make(1).model.state_dict())
    assert str(caught.value) == (
        "A state that is under training cannot be started from other weights.\n"
        "  given:    a state after 1 steps\n"
        "  expected: one that has made no step\n"
        "  hint:     warm-start before the first step; to go on with a run call ls.resume"
    )


def started(workdir: Path) -> list[float]:
    state = make(5)
    ls.warm_start(state, workdir)
    ls.train(state, losses, loader(), ls.Towers(2), until=ls.Steps(1))
    return values(state)["conv.weight"]


@pytest.mark.process
def test_all_workers_start_alike(tmp_path: Path, run_workers: Callable[..., list[Any]]) -> None:
    ls.save(make(1), loader(), tmp_path)
    first, second = run_workers(started, 2, tmp_path)
    assert first == second


@pytest.mark.parametrize(
    ("module", "permutation"),
    [
        (nn.Conv1d(3, 3, 3), (2, 1, 0)),
        (nn.ConvTranspose1d(3, 3, 3), (2, 1, 0)),
        (nn.Conv2d(3, 3, 3), (3, 2, 0, 1)),
        (nn.Conv3d(3, 3, 3), (4, 3, 0, 1, 2)),
        (nn.Linear(3, 3), (1, 0)),
        (nn.Embedding(3, 3), (0, 1)),
        (nn.EmbeddingBag(3, 3), (0, 1)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_cube_of_tensorflow_lies_as_its_module_has_it(module: nn.Module, permutation: tuple[int, ...]) -> None:
    state = ls.TrainState(module, ls.optim.SGD(0.1))
    cube = np.arange(3 ** len(permutation), dtype=np.float32).reshape([3] * len(permutation))
    mapping = ls.weights.WarmStart(system="tensorflow", ignore_missing=True)
    ls.warm_start(state, {"weight": cube}, mapping)
    assert np.array_equal(state.parameters["weight"].detach().numpy(), cube.transpose(permutation))


def test_targets_say_what_they_are_for() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(4, 4), "head": nn.Linear(4, 4), "again": nn.Linear(4, 4)})
    model["head"].weight = model["table"].weight
    model["twin"] = model["again"]
    targets = targets_of(model)
    assert {name: (target.role, target.other_names) for name, target in targets.items()} == {
        "table.weight": ("table", ("head.weight",)),
        "head.bias": ("other", ()),
        "again.weight": ("kernel", ("twin.weight",)),
        "again.bias": ("other", ("twin.bias",)),
    }


AXES = {4: (2, 3, 1, 0), 2: (1, 0), 1: (0,)}
"""Of torch, in the order of TensorFlow, by their number."""


class Reversed(nn.Module):
    """A module that is none of torch's."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flip(2)


class Flattened(nn.Module):
    """Two convolutions of 28x28 images, 7x7 places with 6 channels, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, 2, 1), nn.Conv2d(4, 6, 3, 2, 1)
        self.fc1, self.fc2 = nn.Linear(7 * 7 * 6, 6), nn.Linear(6, 3)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.fc2(self.fc1(self.conv2(self.conv1(images)).flatten(1)).relu())
        return logits


def in_tensorflow(model: Flattened) -> dict[str, Tensor]:
    """The weights of the model as TensorFlow has them, where features are flattened with their channels last."""
    names = {".weight": "/weights", ".bias": "/biases"}
    weights = {
        name.replace(end, names[end]): w for name, w in model.state_dict().items() for end in names if end in name
    }
    weights["fc1/weights"] = weights["fc1/weights"].reshape(6, 6, 7, 7).permute(0, 2, 3, 1).reshape(6, -1)
    return {name: value.permute(AXES[value.ndim]) for name, value in weights.items()}


def test_a_layer_behind_a_flattening_is_not_loaded_from_tensorflow_until_its_order_is_given() -> None:
    theirs, images = Flattened(), torch.randn(5, 1, 28, 28)
    state = ls.TrainState(Flattened(), ls.optim.SGD(0.1))
    source, before = in_tensorflow(theirs), values(state)
    with pytest.raises(CheckpointError) as caught:
        ls.warm_start(state, source, ls.weights.WarmStart(name_map="tensorflow"))
    assert values(state) == before
    assert caught.value.given == (
        "'fc1/weights' does not fit 'fc1.weight': its layer takes 6 channels of 49 places, flattened, with the "
        "channels last in TensorFlow and first in torch"
    )
    assert caught.value.hint == (
        r"give rename=(Rename('^fc1\\.weight$', 'fc1.weight', Layout('(h=7 w=7 i) o -> o (i h w)')),); "
        "the same with Layout('i o -> o i') takes the weights as they are"
    )
    rename = ls.weights.Rename("^fc1\\.weight$", "fc1.weight", ls.weights.Layout("(h=7 w=7 i) o -> o (i h w)"))
    ls.warm_start(state, source, ls.weights.WarmStart(name_map="tensorflow", rename=(rename,)))
    assert torch.equal(state.model(images), theirs(images))
    as_it_is = ls.weights.Rename("^fc1\\.weight$", "fc1.weight", ls.weights.Layout("i o -> o i"))
    report = ls.warm_start(state, source, ls.weights.WarmStart(name_map="tensorflow", rename=(as_it_is,)))
    assert report.share == 1
    assert not torch.equal(state.model(images), theirs(images))


def test_the_rename_of_a_layer_behind_a_flattening_comes_before_the_prefix_that_is_added() -> None:
    state = ls.TrainState(nn.ModuleDict({"net": Flattened()}), ls.optim.SGD(0.1))
    rename = ls.weights.Rename("^fc1\\.weight$", "fc1.weight", ls.weights.Layout("(h=7 w=7 i) o -> o (i h w)"))
    mapping = ls.weights.WarmStart(name_map="tensorflow", add_prefix="net.")
    with pytest.raises(CheckpointError, match=r"Rename\('\^fc1\\\\\.weight\$', 'fc1\.weight', Layout"):
        ls.warm_start(state, in_tensorflow(Flattened()), mapping)
    assert ls.warm_start(state, in_tensorflow(Flattened()), replace(mapping, rename=(rename,))).share == 1


def test_a_layer_behind_a_flattening_needs_no_order_from_torch() -> None:
    state = ls.TrainState(Flattened(), ls.optim.SGD(0.1))
    assert ls.warm_start(state, Flattened().state_dict()).share == 1


CERTAIN, IN_DOUBT = True, False


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ([nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(54, 5), nn.Linear(30, 5)], [(6, 9, 2, CERTAIN), None]),
        ([nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(48, 5)], [(6, 8, 2, CERTAIN)]),
        ([nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.BatchNorm1d(48), nn.Linear(48, 5)], [(6, 8, 2, CERTAIN)]),
        ([nn.Conv2d(3, 6, 3), nn.MaxPool2d(2), nn.LayerNorm([6, 2, 4]), nn.Linear(48, 5)], [(6, 8, 2, IN_DOUBT)]),
        ([nn.Sequential(nn.Conv2d(3, 6, 3)), nn.Flatten(), nn.Linear(48, 5)], [(6, 8, 2, IN_DOUBT)]),
        ([nn.Conv2d(3, 6, 3), Reversed(), nn.Flatten(), nn.Linear(54, 5)], [(6, 9, 2, IN_DOUBT)]),
        ([nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.PReLU(), nn.Linear(54, 5)], [(6, 9, 2, CERTAIN)]),
        ([nn.Conv2d(3, 6, 3), nn.LayerNorm(54), nn.Linear(54, 5), nn.Linear(54, 1)], [(6, 9, 2, CERTAIN)] * 2),
        ([nn.Conv2d(3, 6, 3), nn.Linear(54, 54), nn.Linear(54, 1)], [(6, 9, 2, CERTAIN), (6, 9, 2, IN_DOUBT)]),
        ([nn.Conv2d(3, 6, 3), nn.Linear(54, 7), nn.Linear(7, 12), nn.Linear(12, 1)], [(6, 9, 2, CERTAIN), None, None]),
        (
            [nn.Conv2d(3, 6, 3), nn.Linear(54, 7), nn.Linear(7, 54), nn.Linear(54, 1)],
            [(6, 9, 2, CERTAIN), None, (6, 9, 2, IN_DOUBT)],
        ),
        ([nn.Linear(54, 5), nn.Conv2d(3, 6, 3)], [(6, 9, 2, IN_DOUBT)]),
        ([nn.Linear(48, 5), nn.Conv2d(3, 6, 3)], [None]),
        ([nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 6, 3), nn.Linear(54, 5)], [(6, 9, 2, IN_DOUBT)]),
        ([nn.Conv2d(3, 6, 3), nn.Conv2d(3, 6, 3), nn.Linear(24, 5)], [(6, 4, 2, IN_DOUBT)]),  # branches side by side
        ([nn.Conv1d(3, 6, 3), nn.GroupNorm(2, 6), nn.Dropout(), nn.Linear(60, 5)], [(6, 10, 1, IN_DOUBT)]),
        ([nn.Conv3d(3, 6, 3), nn.AdaptiveAvgPool3d((2, 2, 2)), nn.Linear(48, 5)], [(6, 8, 3, IN_DOUBT)]),
        ([nn.Conv2d(3, 6, 3), nn.Linear(6, 5)], [None]),
        ([nn.Conv2d(3, 6, 3), nn.Linear(20, 5)], [None]),
        ([nn.Conv2d(3, 1, 3), nn.Linear(20, 5)], [None]),
        ([nn.Conv2d(3, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Linear(24, 5)], [None]),
        ([nn.Conv2d(3, 6, 3), nn.AdaptiveMaxPool2d((1, 1)), nn.Linear(24, 5)], [None]),
        ([nn.Conv2d(3, 6, 3), nn.BatchNorm2d(24), nn.Linear(24, 5)], [None]),
        ([nn.Conv2d(3, 6, 3), nn.LSTM(6, 24), nn.Linear(24, 5)], [None]),
        ([nn.Conv2d(3, 6, 3), nn.LayerNorm(6), nn.Linear(24, 5)], [None]),
        ([nn.BatchNorm1d(6), nn.Linear(24, 5)], [None]),
    ],
)
def test_what_linear_layers_take_is_told_by_the_modules_around_them(
    modules: list[nn.Module], expected: list[tuple[int, int, int, bool] | None]
) -> None:
    model = nn.Sequential(*modules)
    targets = targets_of(model)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert [targets[f"{name}.weight"].flattening for name in linear] == expected


class Branches(nn.Module):
    """Convolutions side by side, whose means over all places are concatenated, and a linear layer."""

    def __init__(self, *num_channels: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(3, each, 3) for each in num_channels)
        self.fc = nn.Linear(sum(num_channels), 5)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.fc(torch.cat([branch(images).mean((2, 3)) for branch in self.branches], 1))
        return scores


@pytest.mark.parametrize("num_channels", [(384, 384, 128, 128), (100,) * 3, (256,) * 4, (672,) * 6, (864,) * 5])
def test_branches_that_are_concatenated_are_loaded_from_tensorflow_with_a_warning(
    num_channels: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    model = Branches(*num_channels)
    state = ls.TrainState(model, ls.optim.SGD(0.1))
    theirs = {name: value.permute(AXES[value.ndim]) for name, value in model.state_dict().items()}
    report = ls.warm_start(state, theirs, ls.weights.WarmStart(system="tensorflow"))
    assert report.share == 1
    (warning,) = (each.getMessage() for each in caplog.records if each.levelname == "WARNING")
    assert warning.startswith(f"'fc.weight' is loaded as it is, but its layer may take {num_channels[-1]} channels of ")
    assert r"Rename('^fc\\.weight$', 'fc.weight', Layout('(h=" in warning


def test_a_warning_says_which_numbers_to_fill_in() -> None:
    model = Branches(4, 4, 4)
    theirs = {name: value.permute(AXES[value.ndim]) for name, value in model.state_dict().items()}
    report = ls.warm_start(ls.TrainState(model, ls.optim.SGD(0.1)), theirs, ls.weights.WarmStart(system="tensorflow"))
    assert [each.doubt for each in report.loaded if each.doubt] == [
        "its layer may take 4 channels of H x W = 3 places, flattened, with the channels last in TensorFlow and first "
        r"in torch. If it does, give rename=(Rename('^fc\\.weight$', 'fc.weight', "
        "Layout('(h=H w=W i) o -> o (i h w)')),), with the features' height for H and width for W; "
        "the same with Layout('i o -> o i') takes the weights as they are"
    ]


def test_all_heads_on_one_flattening_are_refused_with_one_list_of_renames() -> None:
    model = nn.ModuleDict({"conv": nn.Conv2d(3, 6, 3), "actor": nn.Linear(54, 5), "critic": nn.Linear(54, 1)})
    theirs = {"conv.weight": torch.zeros(3, 3, 3, 6), "actor.weight": torch.zeros(54, 5)}
    theirs |= {"critic.weight": torch.zeros(54, 1)}
    mapping = ls.weights.WarmStart(system="tensorflow", ignore_missing=True)
    with pytest.raises(CheckpointError) as caught:
        ls.warm_start(ls.TrainState(model, ls.optim.SGD(0.1)), theirs, mapping)
    assert caught.value.hint == (
        r"give rename=(Rename('^actor\\.weight$', 'actor.weight', Layout('(h=3 w=3 i) o -> o (i h w)')), "
        r"Rename('^critic\\.weight$', 'critic.weight', Layout('(h=3 w=3 i) o -> o (i h w)')),); "
        "the same with Layout('i o -> o i') takes the weights as they are"
    )


@pytest.mark.parametrize("model", [InceptionV3(), SqueezeNet(), Mnist(), LeNet()], ids=lambda each: type(each).__name__)
def test_only_what_is_flattened_in_our_models_is_taken_for_that(model: Any) -> None:
    found = [name for name, target in targets_of(model.build(0)).items() if target.flattening]
    assert found == {Mnist: ["local3.weight"], LeNet: ["fc3.weight"]}.get(type(model), [])


def test_a_model_with_tied_weights_takes_its_own_state_dict() -> None:
    def tied(value: float) -> ls.TrainState:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        nn.init.constant_(model[0].weight, value)
        return ls.TrainState(model, ls.optim.SGD(0.1))

    state = tied(1.0)
    saved = tied(2.0).model.state_dict()
    assert ls.warm_start(state, saved).unexpected == ()
    assert bool((state.parameters["0.weight"] == 2).all())
    with pytest.raises(CheckpointError, match=r"'0\.weight', and '1\.weight', which has other values"):
        ls.warm_start(state, saved | {"1.weight": torch.zeros(2, 2)})


@pytest.mark.parametrize(
    ("arguments", "what", "given"),
    [
        ({"source": None}, "source is of the wrong type.", "source is NoneType"),
        ({"source": nn.Linear(1, 1)}, "source is of the wrong type.", "source is Linear"),
        ({"state": nn.Linear(1, 1)}, "state is of the wrong type.", "state is Linear"),
        ({"mapping": {"skip": "head"}}, "mapping is of the wrong type.", "mapping is dict"),
    ],
    ids=["no source", "a module as source", "a module", "a dict"],
)
def test_arguments_of_other_types_are_refused(arguments: dict[str, Any], what: str, given: str) -> None:
    state = make()
    with pytest.raises(InputError) as caught:
        ls.warm_start(**{"state": state, "source": state.model.state_dict(), **arguments})
    assert (caught.value.what, caught.value.given) == (what, given)


def started_from_a_live_run(workdir: Path, newer: Path) -> list[float]:
    """Once the chief has looked, and before the others do, the run gets a newer checkpoint."""
    worker, state = ls.join(), make(5)
    broadcast = worker.group.broadcast

    def late(value: Any) -> Any:
        if worker.is_chief:
            newer.rename(workdir / "checkpoints" / newer.name)
        return broadcast(value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.group, "broadcast", late)
        ls.warm_start(state, workdir)
    return values(state)["conv.weight"]


@pytest.mark.process
def test_all_workers_take_the_same_checkpoint_of_a_run_that_goes_on(
    tmp_path: Path, run_workers: Callable[..., list[Any]]
) -> None:
    ls.save(make(1), loader(), tmp_path / "run")
    donor, stream = make(7), loader()
    ls.train(donor, losses, stream, until=ls.Steps(1))
    ls.save(donor, stream, tmp_path / "later")
    newer = tmp_path / "later" / "checkpoints" / "step-00000001"
    first, second = run_workers(started_from_a_live_run, 2, tmp_path / "run", newer)
    assert first == second == values(make(1))["conv.weight"]
    assert (tmp_path / "run" / "checkpoints" / newer.name).is_dir()


class Detector(DetectionModel):
    """A detector of 5 classes on the first layers of SqueezeNet, and no more."""

    num_classes = 5

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential()
        self.backbone.add_module("features", SqueezeNet().build(0).get_submodule("features"))
        self.head = nn.Conv2d(512, 9, 1)


def test_a_detectors_backbone_starts_from_a_trained_classifier(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    weights = Path(__file__).parents[2] / "data" / "squeezenet" / "squeezenet1_1_imagenet_features.safetensors"
    state = ls.TrainState(Detector(), ls.optim.SGD(0.1))
    fresh = values(state)["head.weight"]
    report = ls.warm_start(state, weights, takes="classifier")
    assert len(report.loaded) == 50
    assert {each.name for each in report.skipped} == {"head.weight", "head.bias"}
    assert "taken as a classifier, for the backbone: add_prefix backbone." in caplog.messages
    assert values(state)["head.weight"] == fresh
    assert state.model.get_parameter("backbone.features.0.weight").std() > 0.1


def test_a_detector_of_other_classes_leaves_the_heads_fresh_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    state, donor = (ls.TrainState(Detector(), ls.optim.SGD(0.1)) for _ in range(2))
    weights = {**donor.model.state_dict(), "head.weight": torch.ones(30, 512, 1, 1), "head.bias": torch.ones(30)}
    report = ls.warm_start(state, weights, takes="detector")
    assert len(report.loaded) == 50
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "2 tensors stay fresh" in warning
    assert "head.weight (shape (30, 512, 1, 1) in the file, (9, 512, 1, 1) in the model" in warning


def test_a_model_that_is_no_detector_takes_no_part() -> None:
    with pytest.raises(InputError, match="Only a detector takes a part of the weights"):
        ls.warm_start(make(), make(1).model.state_dict(), takes="features")
    with pytest.raises(InputError, match=r"(?s)takes cannot be 'all'.*'classifier' or 'features' or 'detector'"):
        ls.warm_start(make(), make(1).model.state_dict(), takes="all")  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(1,), (3,)])
def test_a_bias_of_another_shape_is_not_subtracted_from_a_mean(shape: tuple[int, ...]) -> None:
    """One value would be spread over all channels without a word."""
    model = nn.Sequential(nn.Conv2d(3, 2, 1, bias=False), nn.BatchNorm2d(2))
    place = Destination("1.running_mean", is_subtracted=True)
    mapping = ls.weights.WarmStart(name_map=NameTable((Rename("^a/", ""),), places={"bias": [place]}))
    values = {**model.state_dict(), "a/bias": torch.ones(shape)}
    with pytest.raises(CheckpointError, match=r"(?s)a/bias.*cannot be subtracted.*a bias of the shape"):
        ls.warm_start(ls.TrainState(model, ls.optim.SGD(lr=0.1)), values, mapping)
    assert not model.get_buffer("1.running_mean").any()
