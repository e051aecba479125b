"""Moving averages are found under the names that trainers give them, and never replaced by raw weights in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lockstep.errors import CheckpointError, InputError
from lockstep.weights.assignment import assign_tensors
from lockstep.weights.name_maps import AVERAGE
from lockstep.weights.names import Rename
from lockstep.weights.open import open_weights_file
from lockstep.weights.source import MemorySource, WeightSource
from lockstep.weights.warm_start import Target, WarmStart

NAMES = ("conv.weight", "conv.bias", "bn.weight", "bn.running_mean")
TARGETS = {name: Target((1,), "float32", "buffer" if "running" in name else "parameter") for name in NAMES}
RAW, AVERAGED = 1.0, 2.0


def tensors(value: float, prefix: str = "") -> dict[str, Tensor]:
    return {prefix + name: torch.full((1,), value) for name in NAMES}


def loaded(source: WeightSource, **fields: Any) -> list[float]:
    found = assign_tensors(source, TARGETS, WarmStart(prefer_average=True, **fields))
    return [value.item() for _, value in found.tensors(source)]


COUNT = {"n_averaged": torch.tensor(5)}


@pytest.mark.parametrize(
    "content",
    [
        {"state_dict": tensors(RAW), "ema": tensors(AVERAGED)},
        {"state_dict": tensors(RAW), "ema": tensors(AVERAGED, "module.") | COUNT},
        {"state_dict": tensors(RAW), "ema": tensors(AVERAGED, "_orig_mod.")},
        {"state_dict": tensors(RAW), "model_ema": tensors(AVERAGED, "module._orig_mod.")},
        {"net": tensors(RAW), "ema_model": tensors(AVERAGED, "module.") | COUNT},
        tensors(RAW) | tensors(AVERAGED, "ema.module."),
        tensors(RAW) | tensors(AVERAGED, "ema_model.module.") | {"ema_model.n_averaged": torch.tensor(5)},
        tensors(RAW) | tensors(AVERAGED, "model_ema."),
        tensors(RAW) | tensors(AVERAGED, "module.ema."),
        tensors(RAW) | tensors(AVERAGED, "swa.module.") | {"swa.n_averaged": torch.tensor(5)},
        tensors(AVERAGED, "module.") | COUNT,
    ],
)  # fmt: skip
def test_averages_are_loaded_whatever_stands_before_their_names(tmp_path: Path, content: dict[str, Any]) -> None:
    torch.save(content, tmp_path / "weights")
    fields = {"strip_prefix": "net."} if "net" in content else {}
    assert loaded(open_weights_file(tmp_path / "weights"), **fields) == [AVERAGED] * len(NAMES)


@pytest.mark.parametrize("averaged", ["", "module.", "ema.module."])
@pytest.mark.parametrize("raw", ["module.", "model."])
def test_averages_take_the_prefix_of_the_weights(raw: str, averaged: str) -> None:
    own = {name + AVERAGE: value for name, value in tensors(AVERAGED, averaged).items()}
    source = MemorySource(tensors(RAW, raw) | own)
    assert loaded(source, strip_prefix=raw) == [AVERAGED] * len(NAMES)
    report = assign_tensors(source, TARGETS, WarmStart(prefer_average=True, strip_prefix=raw)).report
    assert all(each.averaged for each in report.loaded)
    assert {each.reason for each in report.ignored} == {"its moving average is loaded"}


def test_the_averaged_model_of_torch_is_taken_as_one(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    averaged = AveragedModel(model)
    with torch.no_grad():
        model[0].weight.fill_(RAW)
    averaged.update_parameters(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    torch.save({"model": model.state_dict(), "ema": averaged.state_dict()}, tmp_path / "weights")
    source = open_weights_file(tmp_path / "weights")
    targets = {
        name: Target(tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for name, value in model.state_dict().items()
    }
    found = assign_tensors(source, targets, WarmStart(prefer_average=True))
    expected = averaged.module.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.tensors(source))
    assert found.report.missing == found.report.unexpected == ()
    assert [each.reason for each in found.report.ignored].count("count of averaged models") == 1


def test_a_variable_without_an_average_is_loaded_as_it_is() -> None:
    own = {f"module.{name}{AVERAGE}": torch.full((1,), AVERAGED) for name in NAMES if "running" not in name}
    assert loaded(MemorySource(tensors(RAW) | own)) == [AVERAGED, AVERAGED, AVERAGED, RAW]


def test_averages_that_belong_to_none_of_the_weights_are_named() -> None:
    own = {f"shadow_params.{number}{AVERAGE}": torch.full((1,), AVERAGED) for number in range(3)}
    source = MemorySource(tensors(RAW) | own, "weights.pt")
    with pytest.raises(CheckpointError) as refusal:
        loaded(source)
    assert str(refusal.value) == (
        "The moving averages of weights.pt have other names than its weights, which would be loaded instead.\n"
        "  given:    prefer_average=True; averages shadow_params.0/ExponentialMovingAverage, "
        "shadow_params.1/ExponentialMovingAverage, shadow_params.2/ExponentialMovingAverage\n"
        "  expected: averages of what is loaded: conv.weight, conv.bias, bn.weight, bn.running_mean\n"
        "  hint:     correct their names with rename=..., or leave prefer_average out to load the raw weights"
    )
    renames = tuple(Rename(rf"^shadow_params\.{number}$", name) for number, name in enumerate(NAMES[:3]))
    assert loaded(source, rename=renames) == [AVERAGED, AVERAGED, AVERAGED, RAW]
    assert loaded(source, rename=renames, skip=r"^shadow_params\.1/") == [AVERAGED, RAW, AVERAGED, RAW]


def test_a_file_without_averages_says_how_they_are_told() -> None:
    with pytest.raises(InputError) as refusal:
        loaded(MemorySource(tensors(RAW, "layer.ema."), "weights.pt"))
    assert refusal.value.what == "weights.pt holds no moving averages."
    assert "begin with ema, ema_state_dict," in str(refusal.value.expected)


def test_nothing_changes_where_averages_are_not_preferred() -> None:
    source = MemorySource(tensors(RAW) | tensors(AVERAGED, "ema.module.") | COUNT)
    found = assign_tensors(source, TARGETS)
    assert [value.item() for _, value in found.tensors(source)] == [RAW] * len(NAMES)
    assert set(found.report.unexpected) == {"n_averaged", *tensors(AVERAGED, "ema.module.")}


def test_what_a_partial_file_of_averages_lacks_is_named(tmp_path: Path) -> None:
    averaged = {
        name: value for name, value in tensors(AVERAGED).items() if name not in ("conv.bias", "bn.running_mean")
    }
    torch.save({"state_dict": tensors(RAW), "ema": averaged}, tmp_path / "weights")
    source = open_weights_file(tmp_path / "weights")
    assert loaded(source) == [AVERAGED, RAW, AVERAGED, RAW]
    report = assign_tensors(source, TARGETS, WarmStart(prefer_average=True)).report
    assert report.not_averaged == ("conv.bias",)  # statistics are seldom averaged
    assert "\n  not averaged      1  conv.bias" in str(report)
    assert report.as_json()["counts"]["not averaged"] == 1
    assert assign_tensors(source, TARGETS, WarmStart()).report.not_averaged == ()
