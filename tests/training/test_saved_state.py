"""What modules keep beside parameters and buffers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.training.saved_state import check_compatible


class Scaled(nn.Module):
    """A layer whose largest inputs so far are a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.largest = torch.zeros(0)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.largest = torch.cat([self.largest, x.detach().abs().max().reshape(1)])
        self.passes += 1
        result: Tensor = self.linear(x)
        return result

    def get_extra_state(self) -> Any:
        return {"history": [self.largest, {"passes": self.passes}], "note": None}

    def set_extra_state(self, state: Any) -> None:
        self.largest, counts = state["history"]
        self.passes = counts["passes"]


class Gives(nn.Linear):
    """Gives what it is told to as its extra state."""

    given: Any = None

    def get_extra_state(self) -> Any:
        return self.given

    def set_extra_state(self, state: Any) -> None:
        self.given = state


class OneWay(nn.Linear):
    def get_extra_state(self) -> Any:
        return 1


def make_state(*modules: nn.Module) -> ls.TrainState:
    torch.manual_seed(0)
    return ls.TrainState(nn.Sequential(*modules), ls.optim.SGD(0.1), average=ls.optim.MovingAverage(0.9))


def make_loader() -> ls.data.Loader:
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
    return ls.data.Loader(ls.data.Arrays({"x": x}), batch_size=6)


def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"square": model(batch["x"]).square().mean()}


def trained_for(steps: int, state: ls.TrainState, loader: ls.data.Loader) -> ls.TrainState:
    ls.train(state, losses, loader, until=ls.Steps(steps))
    return state


@pytest.mark.parametrize("in_background", [False, True])
def test_extra_state_of_modules_is_saved_and_loaded(tmp_path: Path, in_background: bool) -> None:
    expected = trained_for(5, make_state(Scaled(), Gives(1, 1)), make_loader()).model[0]
    loader = make_loader()
    state = trained_for(3, make_state(Scaled(), Gives(1, 1)), loader)
    state.model[1].given = "é"
    if in_background:
        with ls.Saver(tmp_path) as saver:
            saver.save(state, loader)
            trained_for(4, state, loader)
    else:
        ls.save(state, loader, tmp_path)
    loader = make_loader()
    resumed = make_state(Scaled(), Gives(1, 1))
    assert ls.resume(resumed, loader, tmp_path) == 3
    assert (resumed.model[0].passes, len(resumed.model[0].largest), resumed.model[1].given) == (3, 3, "é")
    trained_for(5, resumed, loader)
    assert torch.equal(resumed.model[0].largest, expected.largest)
    assert resumed.model[0].passes == expected.passes


def test_each_of_several_states_has_its_own(tmp_path: Path) -> None:
    def states() -> dict[str, ls.TrainState]:
        return {"a": make_state(Gives(3, 1)), "b": make_state(Gives(3, 1)), "c": make_state(nn.Linear(3, 1))}

    first, second, loader = states(), states(), make_loader()
    first["a"].model[0].given, first["b"].model[0].given = torch.tensor([1.0]), [torch.tensor(2)]
    ls.save(first, loader, tmp_path)
    ls.resume(second, loader, tmp_path)
    assert torch.equal(second["a"].model[0].given, torch.tensor([1.0]))
    assert second["b"].model[0].given == [torch.tensor(2)]
    assert second["a"].model[0].given is not first["a"].model[0].given


def test_a_model_without_any_is_saved_as_before(tmp_path: Path) -> None:
    ls.save(make_state(nn.Linear(3, 1)), make_loader(), tmp_path)
    (folder,) = (tmp_path / "checkpoints").glob("step-*")
    assert not (folder / "extra.safetensors").exists()
    assert "extra" not in json.loads((folder / "values.json").read_text())["states"][""]


@pytest.mark.parametrize(
    "given",
    [object(), (1, 2), float("nan"), {1: 2}, {"a": [torch.ones(1), b"bytes"]}, {"__tensor__": "0/0"}, {1, 2}],
    ids=["object", "tuple", "nan", "number as key", "bytes", "key of ours", "set"],
)
def test_what_is_no_json_and_no_tensor_is_refused_by_name(given: Any, tmp_path: Path) -> None:
    state = make_state(nn.Linear(3, 3), Gives(3, 1))
    state.model[1].given = given
    message = r"The extra state of the module '1' cannot be saved.*\n.*Gives.get_extra_state\(\) gives (.*\n)*.*hint"
    with pytest.raises(ls.CheckpointError, match=message):
        trained_for(1, state, make_loader())
    with pytest.raises(ls.CheckpointError, match=message):
        ls.save(state, make_loader(), tmp_path)
    assert state.step == 0


def test_a_tensor_in_it_that_cannot_be_saved_is_refused() -> None:
    state = make_state(Gives(3, 1))
    state.model[0].given = torch.eye(2).to_sparse()
    with pytest.raises(ls.CheckpointError, match=r"tensor '0/0' of 'extra' is of a kind that cannot be saved"):
        trained_for(1, state, make_loader())


def test_what_cannot_be_taken_back_is_refused() -> None:
    with pytest.raises(ls.CheckpointError, match=r"module '0' cannot be saved and taken back(.*\n)*.*set_extra_state"):
        trained_for(1, make_state(OneWay(3, 1)), make_loader())


class Kept(nn.Sequential):
    """A model that keeps something itself, not by one of its layers."""

    note: Any = None

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


@pytest.mark.parametrize(
    ("saved", "resumed", "message"),
    [
        (make_state(Gives(3, 1)), make_state(nn.Linear(3, 1)), "'0' has none in the model"),
        (make_state(Gives(3, 3), nn.Linear(3, 1)), make_state(Gives(3, 3), Gives(3, 1)), "that of '1' is missing"),
    ],
)
def test_a_checkpoint_of_other_modules_is_refused(
    tmp_path: Path, saved: ls.TrainState, resumed: ls.TrainState, message: str
) -> None:
    ls.save(saved, make_loader(), tmp_path)
    resumed.model[0].weight.data.fill_(7.0)
    with pytest.raises(ls.CheckpointError, match=rf"the extra state of this model's modules.*\n.*{message}"):
        ls.resume(resumed, make_loader(), tmp_path)
    assert torch.equal(resumed.model[0].weight, torch.full_like(resumed.model[0].weight, 7.0))


def test_a_checkpoint_of_an_older_version_holds_none_and_is_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = make_state(nn.Linear(3, 1))
    ls.save(saved, make_loader(), tmp_path)
    resumed = ls.TrainState(Kept(Gives(3, 1)), ls.optim.SGD(0.1), average=ls.optim.MovingAverage(0.9))
    resumed.model.note, resumed.model[0].given = "mine", 5
    assert ls.resume(resumed, make_loader(), tmp_path) == 0
    assert (resumed.model.note, resumed.model[0].given) == ("mine", 5)
    assert torch.equal(resumed.model[0].weight, saved.model[0].weight)
    told = "the checkpoint holds no extra state of the model, '0': it stays as the model has it"
    assert caplog.text.count(told) == 1


def test_the_model_itself_is_called_so(tmp_path: Path) -> None:
    state = ls.TrainState(Kept(nn.Linear(3, 1)), ls.optim.SGD(0.1))
    state.model.note = object()
    with pytest.raises(ls.CheckpointError, match="The extra state of the model cannot be saved"):
        ls.save(state, make_loader(), tmp_path)


def test_a_scored_copy_and_the_next_stage_have_it() -> None:
    state = trained_for(2, make_state(Scaled()), make_loader())
    seen = []

    def score(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        seen.append(model[0].passes)  # type: ignore[index]
        return {"y": model(batch["x"]).squeeze(1)}

    ls.evaluate(state, score, make_loader(), weights="average")
    assert seen[0] == 2
    assert state.model[0].passes == 2
    following = make_state(Scaled())
    following.continue_from(state)
    assert following.model[0].passes == 2
    assert torch.equal(following.model[0].largest, state.model[0].largest)
    assert following.model[0].largest is not state.model[0].largest


class Best:
    """What a loop keeps beside its model."""

    def __init__(self, best: Any = 0.0) -> None:
        self.kept = {"best": best, "teacher": [torch.zeros(2)]}

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict


def state_with(stateful: Any) -> ls.TrainState:
    return ls.TrainState(nn.Linear(1, 1), ls.optim.SGD(0.1), stateful=stateful)


def test_what_a_script_keeps_beside_is_saved_and_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = ls.data.Loader(ls.data.Arrays({"x": torch.ones(8, 1)}), batch_size=4)
    best, resumed = Best(), Best()
    state = state_with(best)
    best.kept = {"best": 0.75, "teacher": [torch.tensor([1.5, -2.0])]}
    ls.save(state, loader, tmp_path)
    ls.resume(state_with(resumed), loader, tmp_path)
    assert resumed.kept["best"] == 0.75
    assert resumed.kept["teacher"][0].tolist() == [1.5, -2.0]
    ls.resume(state_with(None), loader, tmp_path)
    ls.save(state_with(None), loader, tmp_path / "without")
    with caplog.at_level("WARNING"):
        ls.resume(state_with(resumed), loader, tmp_path / "without")
    assert resumed.kept["best"] == 0.75
    assert "the checkpoint holds nothing for stateful (Best): it stays as it is" in caplog.text


def test_a_module_may_be_kept_beside(tmp_path: Path) -> None:
    loader = ls.data.Loader(ls.data.Arrays({"x": torch.ones(8, 1)}), batch_size=4)
    teacher, resumed = nn.Linear(2, 1), nn.Linear(2, 1)
    ls.save(state_with(teacher), loader, tmp_path)
    ls.resume(state_with(resumed), loader, tmp_path)
    assert torch.equal(teacher.weight, resumed.weight)


@pytest.mark.parametrize("given", [(1, 2), float("inf"), {1: 2}])
def test_what_no_checkpoint_holds_is_not_kept_beside(given: Any) -> None:
    with pytest.raises(ls.CheckpointError, match="What stateful keeps cannot be saved and taken back") as caught:
        state_with(Best(given))
    assert str(caught.value.given).startswith("Best.state_dict() gives {'best': ")
    with pytest.raises(ls.InputError, match="stateful") as wrong:
        state_with({"best": 1})
    assert wrong.value.expected == "an object with state_dict and load_state_dict"


def test_what_does_not_fit_another_recipe_may_start_it_with_its_weights_alone() -> None:
    ranges = {"quantization.steps": torch.zeros(())}
    with pytest.raises(ls.CheckpointError, match=r"'quantization.steps' is missing(?s:.*)warm_start\.path=RUN"):
        check_compatible({"buffers": ranges}, {"buffers": {}})
