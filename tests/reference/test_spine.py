"""What the test suites of the reference systems assert of their training loops, said of ours."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from toy import Logistic, loss_after, losses, make_loader

import lockstep as ls
from lockstep.cli import train
from lockstep.cli.scoring import format_accuracy
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.reporting.events import event_paths
from lockstep.runs.run import Run
from lockstep.runs.workdir import Workdir
from lockstep.workers.rank import leave


def make_state(*, seed: int = 0, batch_norm: bool = False, model: nn.Module | None = None) -> ls.TrainState:
    torch.manual_seed(seed)
    return ls.TrainState(model or Logistic(batch_norm=batch_norm), ls.optim.SGD(lr=1.0))


# Training to a loss --------------------------------------------------------------------------------------------------


def test_a_batch_norm_classifier_learns_with_a_workdir(tmp_path: Path) -> None:
    state, loader = make_state(batch_norm=True), make_loader()
    report = ls.train(state, losses, loader, until=ls.Steps(300))
    ls.save(state, loader, tmp_path)
    assert report is not None
    assert report.total < 0.1
    assert (tmp_path / "checkpoints" / "step-00000300").is_dir()


@pytest.mark.parametrize("towers", [1, 2])
def test_a_classifier_learns_without_a_workdir(towers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert loss_after(300, make_state(), towers=ls.Towers(towers)) < 0.015
    assert list(tmp_path.iterdir()) == []


def test_what_the_model_keeps_beside_its_parameters_does_not_disturb() -> None:
    class WithLocals(Logistic):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("local", torch.zeros(()), persistent=False)
            self.plain = torch.ones(3)

    assert loss_after(300, make_state(model=WithLocals())) < 0.015


def test_a_resumed_run_goes_on_from_what_was_learned(tmp_path: Path) -> None:
    for number, end in enumerate((300, 301, 305)):
        state, loader = make_state(seed=number), make_loader()
        resumed = ls.resume(state, loader, tmp_path)
        assert resumed == (None, 300, 301)[number]
        report = ls.train(state, losses, loader, until=ls.Steps(end))
        assert report is not None
        assert report.step == end
        assert report.total < 0.015
        ls.save(state, loader, tmp_path)


# The end of a run ----------------------------------------------------------------------------------------------------


def test_an_epoch_limit_ends_the_run_by_itself(tmp_path: Path) -> None:
    state, loader = make_state(), make_loader()
    report = ls.train(state, losses, loader, until=ls.Epochs(300))
    ls.save(state, loader, tmp_path)
    assert report is not None
    assert report.step == 300
    assert report.total < 0.015
    assert sorted(path.name for path in (tmp_path / "checkpoints" / "step-00000300").glob("*.safetensors")) == [
        "average.safetensors",
        "buffers.safetensors",
        "parameters.safetensors",
        "slots.safetensors",
    ]


def test_the_end_of_the_data_is_the_end_of_no_batch() -> None:
    reports = list(ls.train_steps(make_state(), losses, make_loader(batch_size=6), until=ls.Epochs(2)))
    assert [report.progress.position for report in reports] == [6, 12, 18, 24, 30]
    assert all(report.num_examples == 6 for report in reports)


def test_no_step_is_made_at_or_past_the_end(caplog: pytest.LogCaptureFixture) -> None:
    state, loader = make_state(), make_loader()
    assert [report.step for report in ls.train_steps(state, losses, loader, until=ls.Steps(2))] == [1, 2]
    for end in (2, 1):
        caplog.clear()
        with caplog.at_level("INFO"):
            assert ls.train(state, losses, loader, until=ls.Steps(end)) is None
        assert state.step == 2
        assert f"nothing to do: the run is at step 2 (epoch 2.00), its end is {end} steps" in caplog.text


@pytest.mark.parametrize("count", [0, -1])
def test_a_run_of_no_steps_is_refused(count: int) -> None:
    with pytest.raises(ls.InputError, match=f"A run of {count} steps has no step to do"):
        ls.Steps(count)


def test_the_last_report_is_returned_and_hooks_see_them_all() -> None:
    seen: list[ls.StepReport] = []
    last = ls.train(make_state(), losses, make_loader(), until=ls.Steps(3), hooks=[seen.append])
    assert [report.step for report in seen] == [1, 2, 3]
    assert last is seen[-1]


def test_a_hook_with_an_interval_runs_at_its_multiples_also_after_a_resume() -> None:
    state, loader, seen = make_state(), make_loader(), []
    for end in (7, 13):
        start = ls.Progress(state.step, loader.position, loader.epoch_size)
        hook = ls.every(5, lambda report: seen.append(report.step), start=start)
        ls.train(state, losses, loader, until=ls.Steps(end), hooks=[hook])
    assert seen == [5, 10]


# Towers --------------------------------------------------------------------------------------------------------------


def test_each_tower_calls_the_loss_with_the_one_model_and_its_slice() -> None:
    calls: list[tuple[nn.Module, list[int]]] = []

    def record(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        calls.append((model, batch["row"].argmax(1).tolist()))
        return losses(model, batch)

    state, loader = make_state(), make_loader()
    (whole,) = ls.batches(loader, until=ls.Steps(1))
    loader.load_state({**loader.state(), "position": 0})
    ls.train(state, record, loader, ls.Towers(4), until=ls.Steps(1))
    assert [model for model, _ in calls] == [state.model] * 4
    assert [column for _, part in calls for column in part] == whole["row"].argmax(1).tolist()


def test_the_update_is_the_mean_of_the_towers_gradients() -> None:
    state, gradients = make_state(), []

    def record(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        named = losses(model, batch)
        gradients.append(torch.autograd.grad(named["log_loss"], list(model.parameters()), retain_graph=True))
        return named

    before = [parameter.detach().clone() for parameter in state.model.parameters()]
    ls.train(state, record, make_loader(), ls.Towers(4), until=ls.Steps(1))
    means = [torch.stack(each).mean(0) for each in zip(*gradients, strict=True)]
    for parameter, start, mean in zip(state.model.parameters(), before, means, strict=True):
        torch.testing.assert_close(parameter.detach(), start - mean)


def test_a_regularisation_counts_once_however_many_towers_there_are() -> None:
    def regularised(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {**losses(model, batch), "decay": 0.1 * model.linear.weight.square().sum()}

    states = [make_state(), make_state()]
    totals = []
    for state, towers in zip(states, (1, 4), strict=True):
        report = ls.train(state, regularised, make_loader(), ls.Towers(towers), until=ls.Steps(5))
        assert report is not None
        assert report.total == pytest.approx(sum(report.losses.values()))
        totals.append(report.losses)
    assert totals[0] == pytest.approx(totals[1], rel=1e-5)
    torch.testing.assert_close(states[0].model.linear.weight, states[1].model.linear.weight)


def test_a_tower_without_a_loss_is_refused() -> None:
    def only_the_first(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return losses(model, batch) if batch.towers.start == 0 else {}

    with pytest.raises(ls.InputError, match="returned no named losses"):
        ls.train(make_state(), only_the_first, make_loader(), ls.Towers(2), until=ls.Steps(1))
    with pytest.raises(ls.InputError, match="returned no named losses"):
        ls.train(make_state(), lambda model, batch: {}, make_loader(), ls.Towers(2), until=ls.Steps(1))


def test_a_batch_is_the_total_and_must_divide() -> None:
    report = ls.train(make_state(), losses, make_loader(batch_size=8), ls.Towers(4), until=ls.Steps(1))
    assert report is not None
    assert report.num_examples == 8
    assert report.progress.position == 8
    with pytest.raises(ls.InputError, match=r"cannot be split evenly.*\n.*batch_size=10 over 4 towers(.|\n)*8 or 12"):
        ls.train(make_state(), losses, make_loader(batch_size=10), ls.Towers(4), until=ls.Steps(1))


# The net of the MNIST example --------------------------------------------------------------------------------------


def test_the_net_has_the_references_layers_and_initial_values() -> None:
    net = ls.models.Mnist().build(seed=0)
    expected = {
        "conv1": ((32, 1, 5, 5), 0.05, 0.0),
        "conv2": ((64, 32, 5, 5), 0.05, 0.1),
        "local3": ((1024, 3136), 0.04, 0.1),
        "local4": ((10, 1024), 0.04, 0.1),
        "softmax_linear": ((10, 10), 1 / 192, 0.0),
    }
    assert {name.partition(".")[0] for name, _ in net.named_parameters()} == set(expected)
    for name, (shape, std, bias) in expected.items():
        layer = net.get_submodule(name)
        assert tuple(layer.weight.shape) == shape
        assert (layer.bias == bias).all()
        assert layer.weight.abs().max() <= 2 * std * (1 + 1e-6)
        # A normal distribution cut at two standard deviations keeps 0.88 of its own, but for the chance of samples.
        by_chance = 4 / math.sqrt(2 * layer.weight.numel())
        assert layer.weight.std().item() == pytest.approx(0.88 * std, rel=0.002 + by_chance)


def test_response_normalisation_is_an_option_by_the_references_formula() -> None:
    plain, normalised = (ls.models.Mnist(lrn=lrn).build(seed=0) for lrn in (False, True))
    images = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(1)) - 0.5

    def normalise(values: Tensor) -> Tensor:
        squares = F.pad(values.square(), (0, 0, 0, 0, 4, 4)).unfold(1, 9, 1).sum(-1)
        return values / (1 + 0.001 / 9 * squares) ** 0.75

    hidden = normalise(F.max_pool2d(F.relu(plain.conv1(images)), 2))
    hidden = F.max_pool2d(normalise(F.relu(plain.conv2(hidden))), 2)
    hidden = F.relu(plain.local4(F.relu(plain.local3(hidden.flatten(1)))))
    torch.testing.assert_close(normalised(images), plain.softmax_linear(hidden))
    assert not torch.allclose(normalised(images), plain(images), rtol=1e-6, atol=0)


# What is refused before anything happens -----------------------------------------------------------------------------


def test_a_loss_function_that_returns_nothing_is_refused() -> None:
    with pytest.raises(ls.InputError, match=r"returned no named losses.*\n.*given: +None"):
        ls.train(make_state(), lambda model, batch: None, make_loader(), until=ls.Steps(1))  # type: ignore[arg-type,return-value]


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = Logistic()
    with pytest.raises(ls.InputError, match=r"'linear.weight' cannot be trained.*\n.*on the meta device"):
        loss_after(1, make_state(model=model))


# The run of a recipe -------------------------------------------------------------------------------------------------


def small_recipe(steps: int) -> Recipe:
    exact = ls.AllReduce(exact=True)  # one thread
    return dataclasses.replace(find("mnist"), end=ls.Steps(steps), batch_size=16, num_towers=2, exchange=exact)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of a run of two steps."""
    path = tmp_path_factory.mktemp("runs") / "mnist"
    result = Run(small_recipe(2), path, ls.join("cpu")).run(conclude=False)
    leave()
    assert result.step == 2
    return path


def test_a_run_saves_at_its_start_and_at_its_end(run: Path) -> None:
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000000", "step-00000002"]


def test_the_chief_writes_what_ran_and_what_happened(run: Path) -> None:
    texts = b"".join(path.read_bytes() for path in event_paths(run / "summaries"))
    for part in (b"start at step 0", b"end at step 2", b"cosine", b"MnistNet(", b"losses/total", b"learning_rate"):
        assert part in texts, part
    assert (run / "recipe.toml").is_file()
    assert (run / "history.jsonl").read_text().count("\n") == 2


def test_the_intervals_of_a_run_are_those_of_the_supervisor_or_stated() -> None:
    mnist = find("mnist")
    assert str(mnist.checkpoints.every) == "600 s"
    assert str(mnist.watch.summaries) == "120 s"
    assert str(mnist.watch.console) == "10 steps"
    assert not ls.Interval(0).passed(ls.Progress(0, 0, 0), ls.Progress(10, 10, 1, 1e9))


def test_without_a_workdir_files_asked_for_are_refused() -> None:
    """Those of the command: what a recipe asks for by itself is left out."""
    off, asked = ["--set", "watch.summaries=0"], ["--set", "checkpoints.every=20 steps"]
    train.plan_train(["train", "mnist", "--workdir", "none", *off])
    with pytest.raises(ls.InputError, match=r'given: +--workdir none --set checkpoints.every="20 steps"\n'):
        train.plan_train(["train", "mnist", "--workdir", "none", *off, *asked])


def test_a_folder_that_holds_something_else_is_never_deleted(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ls.WorkdirError, match=r"holds something that is not a run.*\n.*given: +thesis.tex"):
        Workdir(tmp_path).check(find("mnist"), accept_changes=True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_the_same_workdir_is_taken_up_and_not_begun_anew(run: Path) -> None:
    assert Workdir(run).check(small_recipe(3), accept_changes=False) == ["end.count: saved 2, given 3"]


def test_accuracy_is_a_share_with_the_count_beside_it() -> None:
    assert format_accuracy(ls.Evaluation({"top1": 9912.0}, 10_000)) == "99.12 % (9912 of 10000)"


def test_the_reference_preset_has_the_references_figures() -> None:
    reference = find("mnist_reference")
    assert reference.batch_size == 2 * 64  # per GPU there, over two GPUs; in total here
    assert reference.end == ls.Epochs(10)
    assert reference.optimizer == ls.optim.SGD(0.1, momentum=0.9, nesterov=True)
    assert reference.average is None


def test_a_loss_that_is_not_a_number_ends_the_run() -> None:
    def spoiled(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {"log_loss": losses(model, batch)["log_loss"] * math.nan}

    with pytest.raises(ls.NonFiniteError, match="loss 'log_loss' is nan"):
        ls.train(make_state(), spoiled, make_loader(), until=ls.Steps(1))
