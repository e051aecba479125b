from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from device_calls import accelerator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

import lockstep as ls
from lockstep.optim.gradients import Gradients
from lockstep.reporting.summaries import Summaries
from lockstep.training.observe import ActivationSource, GradientSource, Observer, Source, VariableSource
from lockstep.types import Interval, Progress

BEGINNING = Progress(0, 0, 80)


class Net(nn.Module):
    """An activation in place after batch norm, dropout, a part that is never used, and a buffer of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5))
        self.head = nn.Linear(8, 1)
        self.never = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def make_state(make_model: Callable[[], nn.Module] = Net, **options: object) -> ls.TrainState:
    torch.manual_seed(0)
    options.setdefault("optimizer", ls.optim.SGD(0.1, momentum=0.9))
    return ls.TrainState(make_model(), **options)  # type: ignore[arg-type]


def make_batch(step: int = 0, num_towers: int = 1) -> ls.Batch:
    generator = torch.Generator().manual_seed(step)
    fields = {"x": torch.randn(8, 3, generator=generator), "y": torch.randn(8, generator=generator)}
    return ls.Batch(fields, position=8 * step, batch_size=8, towers=range(num_towers), epoch_size=80)


def squared(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
    return {"squared": (model(batch["x"]).squeeze(1) - batch["y"]).square().mean()}


def sources_of(state: ls.TrainState) -> list[Source]:
    return [GradientSource(state), VariableSource(state), ActivationSource(state, ls.Towers())]


def attached(state: ls.TrainState) -> bool:
    hooks = [hook for module in state.model.modules() for hook in module._forward_hooks]
    return bool(state.gradient_hooks or hooks)


Observe = Callable[..., list[Observer]]


@pytest.fixture
def observe(tmp_path: Path) -> Iterator[Observe]:
    """Observers that write to `tmp_path`."""
    summaries = Summaries(tmp_path, from_step=0, interval=Interval(0))

    def make(*sources: Source, interval: Interval, start: Progress = BEGINNING) -> list[Observer]:
        return [Observer(source, interval, summaries, start=start, batch_size=8) for source in sources]

    yield make
    summaries.close()


def run(
    state: ls.TrainState, hooks: list[Observer], steps: range, towers: ls.Towers | None = None, losses=squared
) -> list[ls.StepReport]:
    reports = []
    for step in steps:
        report = ls.train_step(state, losses, make_batch(step, (towers and towers.count) or 1), towers)
        for hook in hooks:
            hook(report)
        reports.append(report)
    return reports


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"histograms": 0, "scalars": 0}).Reload()


def steps_of(folder: Path, tag: str) -> list[int]:
    events = read(folder)
    if tag in events.Tags()["histograms"]:
        return [event.step for event in events.Histograms(tag)]
    return [event.step for event in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []


def value_of(folder: Path, tag: str) -> float:
    return read(folder).Scalars(tag)[-1].value


@pytest.mark.parametrize("kind", range(3))
def test_steps_in_between_have_nothing_attached(tmp_path: Path, observe: Observe, kind: int) -> None:
    state = make_state()
    hooks = observe(sources_of(state)[kind], interval=Interval(3))
    found: list[int] = []

    def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        found.extend([state.step + 1] if attached(state) else [])
        return squared(model, batch)

    run(state, hooks, range(7), losses=losses)
    assert found == ([] if kind == 1 else [3, 6])
    assert not attached(state)
    assert steps_of(tmp_path, ("gradients/head.weight", "variables/head.weight", "activations/head")[kind]) == [3, 6]


def test_an_interval_of_zero_attaches_nothing(tmp_path: Path, observe: Observe) -> None:
    state = make_state()
    hooks = observe(*sources_of(state), interval=Interval(0))
    assert not attached(state)
    run(state, hooks, range(2))
    assert not attached(state)
    assert read(tmp_path).Tags()["histograms"] == []


CLIPPED = [ls.optim.ClipGlobalNorm(0.5)]


@pytest.mark.parametrize(
    ("options", "towers"),
    [
        ({}, ls.Towers()),
        ({"gradient_transforms": CLIPPED}, ls.Towers(2)),
        ({"gradient_transforms": CLIPPED, "optimizer": ls.optim.Adam(0.01)}, ls.Towers(1, precision="fp16")),
        ({"tower_gradient_transforms": CLIPPED}, ls.Towers(2, precision="bf16")),
        (
            {"optimizer": {"^body": ls.optim.SGD(0.1), "^(head|never)": ls.optim.Adam(0.1)}},
            ls.Towers(2, batch_norm="sync"),
        ),
    ],
    ids=["plain", "clipped", "fp16", "bf16", "several"],
)
def test_what_is_trained_has_the_same_bits(observe: Observe, options: dict[str, object], towers: ls.Towers) -> None:
    ends = []
    for observed in [False, True]:
        state = make_state(**options)
        hooks = observe(*sources_of(state), interval=Interval(1)) if observed else []
        reports = run(state, hooks, range(4), towers)
        facts = [(dict(report.losses), report.gradient_norm) for report in reports]
        ends.append((state.sections(), facts, torch.get_rng_state()))
    (sections, facts, random), (other_sections, other_facts, other_random) = ends
    assert facts == other_facts
    assert torch.equal(random, other_random)
    for section, tensors in sections.items():
        assert all(torch.equal(tensor, other_sections[section][name]) for name, tensor in tensors.items())


def test_gradients_are_those_the_optimizer_gets(
    tmp_path: Path, observe: Observe, caplog: pytest.LogCaptureFixture
) -> None:
    state = make_state(gradient_transforms=[ls.optim.ClipGlobalNorm(0.01)], optimizer=ls.optim.SGD(1.0))
    before = state.model.head.weight.detach().clone()
    with caplog.at_level(logging.INFO, "lockstep"):
        (report, _) = run(state, observe(GradientSource(state), interval=Interval(1)), range(2))
    assert report.gradient_norm > 0.1
    events = read(tmp_path)
    first = events.Histograms("gradients/head.weight")[0].histogram_value
    state = make_state(gradient_transforms=[ls.optim.ClipGlobalNorm(0.01)], optimizer=ls.optim.SGD(1.0))
    run(state, [], range(1))
    applied = before - state.model.head.weight
    assert first.num == 8
    assert first.min == pytest.approx(applied.min().item(), rel=1e-3)
    assert first.sum_squares == pytest.approx(applied.square().sum().item(), rel=1e-3)
    squares = [
        events.Scalars(tag)[0].value ** 2 for tag in events.Tags()["scalars"] if tag.startswith("gradient_norms/")
    ]
    assert math.sqrt(sum(squares)) == pytest.approx(0.01, rel=1e-4)
    assert not any("never" in tag for tag in (*events.Tags()["histograms"], *events.Tags()["scalars"]))
    said = [message for message in caplog.messages if message.startswith("never.weight has no gradient")]
    assert said == ["never.weight has no gradient: the summaries show none"]


def test_a_division_is_left_to_the_update() -> None:
    state = make_state(partial(nn.Linear, 3, 1))
    source = GradientSource(state)
    source.attach()
    gradients = Gradients(["weight", "bias"], [torch.full((1, 3), 8.0), None], divisor=2.0, owned=True)
    (hook,) = state.gradient_hooks
    hook(gradients)
    assert gradients.to_divide()[1] == 2.0
    assert source.seen(1).histograms["gradients/weight"].largest == 4.0


def test_of_a_sparse_gradient_its_rows_are_shown(tmp_path: Path, observe: Observe) -> None:
    state = make_state(partial(nn.Embedding, 10, 2, sparse=True), optimizer=ls.optim.SGD(0.1))
    batch = make_batch()
    batch["x"] = torch.tensor([1, 1, 4, 4, 4, 4, 4, 4])
    (hook,) = observe(GradientSource(state), interval=Interval(1))
    hook(ls.train_step(state, lambda model, part: {"sum": model(part["x"]).sum()}, batch))
    histogram = read(tmp_path).Histograms("gradients/weight")[0].histogram_value
    assert (histogram.num, histogram.min, histogram.max) == (4, 2, 6)


def test_parameters_and_floating_buffers_are_shown(tmp_path: Path, observe: Observe) -> None:
    state = make_state(frozen=["never.*"])
    run(state, observe(VariableSource(state), interval=Interval(2)), range(2))
    events = read(tmp_path)
    shown = {name for name, tensor in (*state.model.named_parameters(), *state.model.named_buffers()) if tensor.ndim}
    assert {"body.1.running_mean", "never.weight"} < shown
    assert "body.1.num_batches_tracked" not in shown
    assert set(events.Tags()["histograms"]) == {f"variables/{name}" for name in shown}
    assert set(events.Tags()["scalars"]) == {f"variable_norms/{name}" for name in shown}
    weight = state.model.head.weight
    assert value_of(tmp_path, "variable_norms/head.weight") == pytest.approx(weight.norm().item())
    assert events.Histograms("variables/head.weight")[0].histogram_value.max == weight.max().item()


def test_activations_are_those_of_the_first_tower(tmp_path: Path, observe: Observe) -> None:
    state = make_state()
    seen: dict[str, list[Tensor]] = {"body.1": [], "body.2": []}
    for name, outputs in seen.items():
        state.model.get_submodule(name).register_forward_hook(
            lambda _, inputs, output, outputs=outputs: outputs.append(output.detach().clone())
        )
    run(state, observe(ActivationSource(state, ls.Towers(2)), interval=Interval(1)), range(1), ls.Towers(2))
    events = read(tmp_path)
    modules = ["body.0", "body.1", "body.2", "body.3", "head"]
    assert sorted(events.Tags()["histograms"]) == [f"activations/{name}" for name in modules]
    assert sorted(events.Tags()["scalars"]) == [f"sparsity/{name}" for name in modules]
    for name, outputs in seen.items():
        assert len(outputs) == 2
        histogram = events.Histograms(f"activations/{name}")[0].histogram_value
        assert (histogram.num, histogram.min, histogram.max) == (32, outputs[0].min(), outputs[0].max())
    share = (seen["body.2"][0] == 0).float().mean().item()
    assert 0 < value_of(tmp_path, "sparsity/body.2") == pytest.approx(share)
    assert value_of(tmp_path, "sparsity/body.1") == 0


def test_tags_are_the_same_for_any_number_of_towers(tmp_path: Path) -> None:
    tags = []
    for count in [1, 4]:
        state, towers = make_state(), ls.Towers(count)
        summaries = Summaries(tmp_path / str(count), from_step=0, interval=Interval(1))
        hooks = [
            Observer(source, Interval(1), summaries, start=BEGINNING, batch_size=8) for source in sources_of(state)
        ]
        run(state, [*hooks, summaries], range(1), towers)
        summaries.close()
        tags.append(read(tmp_path / str(count)).Tags())
    assert tags[0] == tags[1]
    assert "activations/body.2" in tags[0]["histograms"]


def test_the_total_is_the_mean_of_the_towers_not_their_sum(tmp_path: Path) -> None:
    totals = []
    for count in [1, 4]:
        state = make_state(partial(nn.Linear, 3, 1), regularization=[ls.losses.L2(0.1)])
        summaries = Summaries(tmp_path / str(count), from_step=0, interval=Interval(1))
        run(state, [summaries], range(1), ls.Towers(count))
        summaries.close()
        totals.append(value_of(tmp_path / str(count), "losses/total"))
    assert totals[0] == pytest.approx(totals[1], rel=1e-6)


def test_a_refused_attempt_shows_nothing_and_the_next_one_does(tmp_path: Path, observe: Observe) -> None:
    state = make_state(nonfinite="skip")
    hooks = observe(*sources_of(state), interval=Interval(2))

    def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        if batch.position == 8:
            batch["x"] = batch["x"] * math.inf
        return squared(model, batch)

    reports = run(state, hooks, range(3), losses=losses)
    assert [report.skipped for report in reports] == [False, True, False]
    for tag in ["gradients/head.weight", "variables/head.weight", "activations/head"]:
        assert steps_of(tmp_path, tag) == [2]
    assert not [tag for tag in read(tmp_path).Tags()["scalars"] if tag.startswith("nonfinite/")]
    assert not attached(state)


@pytest.mark.parametrize("interval", [Interval(3), Interval(0.5, "epochs"), Interval(1)], ids=str)
def test_a_resumed_run_writes_at_the_same_steps(tmp_path: Path, observe: Observe, interval: Interval) -> None:
    state = make_state()
    run(state, observe(VariableSource(state), interval=interval), range(12))
    expected = steps_of(tmp_path, "variables/head.weight")
    for first in [1, 5, 9]:
        summaries = Summaries(tmp_path / f"from{first}", from_step=first)
        state = make_state()
        state.step = first
        start = Progress(first, 8 * first, 80)
        hook = Observer(VariableSource(state), interval, summaries, start=start, batch_size=8)
        run(state, [hook], range(first, 12))
        summaries.close()
        assert steps_of(tmp_path / f"from{first}", "variables/head.weight") == [s for s in expected if s > first]
    assert expected == {3: [3, 6, 9, 12], 0.5: [5, 10], 1: list(range(1, 13))}[interval.amount]


def test_time_is_noticed_at_the_step_after(tmp_path: Path, observe: Observe) -> None:
    state = make_state()
    (hook,) = observe(GradientSource(state), interval=Interval(10, "seconds"))
    for step in range(5):
        report = ls.train_step(state, squared, make_batch(step))
        hook(report._replace(progress=report.progress._replace(elapsed_seconds=6.0 * (step + 1))))
    assert steps_of(tmp_path, "gradients/head.weight") == [3, 5]


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_activations_that_are_read_late_are_those_of_their_step(tmp_path: Path, observe: Observe) -> None:
    largest: list[float] = []

    def noted(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        with torch.no_grad():
            largest.append(model(batch["x"]).max().item())
        return squared(model, batch)

    fields = {"x": torch.randn(64, 3), "y": torch.randn(64)}
    loader = ls.data.Loader(ls.data.Arrays(fields), batch_size=8)
    with accelerator():
        state = make_state(Scores)
        hooks = observe(ActivationSource(state, ls.Towers()), interval=Interval(2))
        ls.train(state, noted, loader, until=ls.Steps(6), hooks=hooks)
    steps = steps_of(tmp_path, "activations/linear")
    assert steps == [3, 5], "the one whose turn it was, 2, was under way when the observer came"
    shown = [event.histogram_value.max for event in read(tmp_path).Histograms("activations/linear")]
    assert shown == [largest[step - 1] for step in steps]


def test_a_forward_pass_outside_of_the_step_is_not_seen(tmp_path: Path, observe: Observe) -> None:
    state = make_state(Scores)
    hooks = observe(ActivationSource(state, ls.Towers()), interval=Interval(1))
    copy.deepcopy(state.model)(torch.full((5, 3), 1e6))
    with torch.no_grad():
        state.model(torch.full((5, 3), 1e6))
    run(state, hooks, range(1))
    histogram = read(tmp_path).Histograms("activations/linear")[0].histogram_value
    assert histogram.num == 8
    assert histogram.max < 1e3


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.relu(), x


class Odd(nn.Module):
    """Modules that return several tensors, and none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.pair, self.nothing = nn.Linear(3, 1), Pair(), Nothing()

    def forward(self, x: Tensor) -> Tensor:
        self.nothing(x)
        return self.pair(self.linear(x))[1]


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> None:
        return None


def test_the_first_of_several_outputs_is_shown(tmp_path: Path, observe: Observe) -> None:
    state = make_state(Odd)
    run(state, observe(ActivationSource(state, ls.Towers()), interval=Interval(1)), range(1))
    events = read(tmp_path)
    assert sorted(events.Tags()["histograms"]) == ["activations/linear", "activations/pair"]
    assert events.Histograms("activations/pair")[0].histogram_value.min >= 0


def test_a_model_of_one_module_goes_by_the_name_of_the_state(tmp_path: Path, observe: Observe) -> None:
    state = make_state(partial(nn.Linear, 3, 1), name="student")
    run(state, observe(ActivationSource(state, ls.Towers()), interval=Interval(1)), range(1))
    assert read(tmp_path).Tags()["histograms"] == ["activations/student"]


def test_closing_leaves_no_trace(observe: Observe) -> None:
    state = make_state()
    hooks = observe(*sources_of(state), interval=Interval(1))
    assert attached(state)
    for hook in hooks:
        hook.close()
        hook.close()
    assert not attached(state)


def test_a_step_that_raised_is_forgotten_by_closing(tmp_path: Path, observe: Observe) -> None:
    state = make_state(Scores)
    (hook,) = observe(ActivationSource(state, ls.Towers()), interval=Interval(1))
    batch = make_batch()
    batch["x"][0] = math.inf
    with pytest.raises(ls.NonFiniteError):
        ls.train_step(state, squared, batch)
    hook.close()
    assert not attached(state)
    run(state, [hook], range(2))
    assert steps_of(tmp_path, "activations/linear") == [2]


def test_closing_leaves_the_watcher_of_somebody_else(observe: Observe) -> None:
    state = make_state()
    (hook,) = observe(GradientSource(state), interval=Interval(5))
    mine = [].append
    state.gradient_hooks.append(mine)
    hook.close()
    assert state.gradient_hooks == [mine]


def test_activations_of_a_compiled_model_are_refused() -> None:
    with pytest.raises(ls.InputError) as error:
        ActivationSource(make_state(), ls.Towers(compile=True))
    assert error.value.what == "A compiled model does not show its activations."
    assert error.value.given == "compile=True, and an interval for activations"
    assert error.value.expected == "a model that runs module by module, or no activations"
    assert error.value.hint == "set watch.activations=0, or towers.compile=false"
