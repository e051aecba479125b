"""The law of stages: they are stretches of one run, which ends with the same bytes however often it is disturbed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from staged_run import (
    BATCH_SIZE,
    BOUNDARIES,
    HEAD,
    STAGES,
    STEPS,
    Disturbance,
    contents,
    lines,
    make_recipe,
    run,
    start,
)

import lockstep as ls
from lockstep.recipes.data import MnistData
from lockstep.recipes.parts import Checkpoints, Monitoring, Stage
from lockstep.runs.build import Parts, build
from lockstep.training.state import _states

POSITIONS = [step * BATCH_SIZE for step in range(STEPS)]


class KilledError(Exception):
    """The end of a start that was killed."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    workdir = tmp_path_factory.mktemp("undisturbed")
    run(workdir, make_recipe(1))
    return workdir


def tensors(workdir: Path, step: int, section: str) -> dict[str, torch.Tensor]:
    return load_file(workdir / f"checkpoints/step-{step:08d}/{section}.safetensors")


# What goes on, and what begins anew -----------------------------------------------------------------------------------


def test_each_stage_trains_its_own_parameters(undisturbed: Path) -> None:
    names = tensors(undisturbed, 0, "parameters").keys()
    heads = {"head.weight", "head.bias"}
    for before, trained in zip((0, *BOUNDARIES), (heads, set(names), set(names) - {"head.bias"}), strict=True):
        old, new = (tensors(undisturbed, step, "parameters") for step in (before, before + 1))
        assert {name for name in names if not torch.equal(old[name], new[name])} == trained


def test_each_learning_rate_counts_the_steps_of_its_stage(undisturbed: Path) -> None:
    rates = [line["learning_rate"] for line in lines(undisturbed, "metrics.jsonl") if "learning_rate" in line]
    assert rates == [0.1, 0.1, 0.1, 0.2, 0.1, 0.01, 0.01, 0.01]


def test_slots_are_fresh_and_what_was_learned_goes_on(undisturbed: Path) -> None:
    """The first step of each stage, made by hand from the last checkpoint of the one before."""
    for number, boundary in enumerate(BOUNDARIES, start=1):
        stage = STAGES[number]
        given = replace(
            make_recipe(), optimizer=stage.optimizer, train_only=stage.train_only or (), frozen=stage.frozen or ()
        )
        if stage.image_size:
            given = replace(given, data=replace(given.data, image_size=stage.image_size))
        parts = build(replace(given, stages=()), ls.join("cpu"))
        state = parts.state
        before = {name: tensors(undisturbed, boundary, name) for name in ("parameters", "buffers", "average")}
        present = before["parameters"] | before["buffers"]
        fresh = {name: present[name] for name in state.averages()} | before["average"]
        for name, average in state.averages().items():
            average.copy_(fresh[name])
        with torch.no_grad():
            for name, tensor in [*state.model.named_parameters(), *state.model.named_buffers()]:
                tensor.copy_(present[name])
        optimizer_step_by_step(parts, boundary)
        after = state.sections()
        for section in ("parameters", "buffers", "slots"):
            saved = tensors(undisturbed, boundary + 1, section)
            assert saved.keys() == after[section].keys()
            assert all(torch.equal(saved[name], after[section][name]) for name in saved), (number, section)


def optimizer_step_by_step(parts: Parts, boundary: int) -> None:
    """One step by hand, which the optimizer takes for its first; the towers' random streams are those of the run."""
    parts.loader.position = boundary * BATCH_SIZE
    parts.state.step = parts.state.first_step = boundary
    next(ls.train_steps(parts.state, parts.task.losses, parts.loader, parts.towers, ls.AllReduce(exact=True)))


def test_averages_go_on_and_begin_where_a_parameter_is_trained_first(undisturbed: Path) -> None:
    first, second = (tensors(undisturbed, boundary + 1, "average") for boundary in BOUNDARIES)
    assert "conv.weight" not in tensors(undisturbed, BOUNDARIES[0], "average")
    before, after = (tensors(undisturbed, BOUNDARIES[0] + more, "parameters")["conv.weight"] for more in (0, 1))
    decay = ls.optim.MovingAverage(0.9).decay_at(BOUNDARIES[0] + 1)
    torch.testing.assert_close(first["conv.weight"], decay * before + (1 - decay) * after)
    old = tensors(undisturbed, BOUNDARIES[0], "average")["head.weight"]
    now = tensors(undisturbed, BOUNDARIES[0] + 1, "parameters")["head.weight"]
    torch.testing.assert_close(first["head.weight"], decay * old + (1 - decay) * now)
    assert "head.bias" not in second, "it is no longer trained"


def test_the_stream_goes_on(undisturbed: Path) -> None:
    positions = [line["position"] for line in lines(undisturbed, "metrics.jsonl") if "position" in line]
    assert positions == [position + BATCH_SIZE for position in POSITIONS]


def test_each_stage_is_logged_and_in_the_history(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run(tmp_path, make_recipe())
    assert [line for line in caplog.messages if line.startswith("stage")] == [
        "stage 1 of 3: steps 1 to 3, training 2 of 6 parameters, images of 28x28 pixels",
        "stage 2 of 3: steps 4 to 5, training 6 of 6 parameters, images of 28x28 pixels",
        "stage 3 of 3: steps 6 to 8, training 5 of 6 parameters, images of 32x32 pixels",
    ]
    told = [(line["event"], line["step"], line.get("stage")) for line in lines(tmp_path, "history.jsonl")]
    assert told == [("start", 0, None), ("stage", 3, 2), ("stage", 5, 3), ("end", 8, None)]
    caplog.clear()
    run(tmp_path, make_recipe())
    assert "nothing to do: the run is at step 8 (epoch 3.20), its end is 8 steps" in caplog.messages


def test_a_stage_that_is_over_leaves_no_state_behind(tmp_path: Path) -> None:
    before, living = len(_states), set[int]()
    run(tmp_path, make_recipe(), Disturbance(attempted=lambda _: living.add(len(_states) - before)))
    assert living == {1}


def test_each_stage_is_scored_at_its_size(tmp_path: Path) -> None:
    what = Disturbance()
    run(tmp_path, make_recipe(), what)
    scored = [size for step in (2, 4, 6, 8) for size in [32 if step > BOUNDARIES[1] else 28] * 3]
    assert what.sizes == [28, *scored], "one of a trial, then three an evaluation; the last one is that of the result"


# Disturbed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kill_at", "every"),
    [
        pytest.param(kill_at, every, marks=[pytest.mark.slow] * (every != (1, 3)[number % 2]))
        for number, kill_at in enumerate(POSITIONS)
        for every in (1, 3)
    ],
)
def test_a_killed_run_ends_with_the_same_bytes(undisturbed: Path, tmp_path: Path, kill_at: int, every: int) -> None:
    def die(position: int) -> None:
        if position == kill_at:
            raise KilledError

    with pytest.raises(KilledError):
        run(tmp_path, make_recipe(every), Disturbance(attempted=die))
    assert not (tmp_path / "result.json").exists()
    run(tmp_path, make_recipe(every))
    assert contents(tmp_path) == contents(undisturbed)


@pytest.mark.parametrize("stop_at", POSITIONS)
def test_a_stopped_run_ends_with_the_same_bytes(undisturbed: Path, tmp_path: Path, stop_at: int) -> None:
    assert stop_all(tmp_path, {stop_at}) == 1
    assert contents(tmp_path) == contents(undisturbed)


def test_a_run_that_is_stopped_again_and_again_ends_with_the_same_bytes(undisturbed: Path, tmp_path: Path) -> None:
    assert stop_all(tmp_path, {*POSITIONS}) >= STEPS / 2
    assert contents(tmp_path) == contents(undisturbed)


def stop_all(workdir: Path, left: set[int]) -> int:
    """Start the run until it is at its end; an attempt at each of the positions has it stop once, after the next one.

    Returns:
        How often it has stopped.
    """

    def stop(position: int) -> None:
        if position in left:
            left.remove(position)
            ls.join().pulse.stop_requested = "SIGUSR1"

    count = 0
    while run(workdir, make_recipe(4), Disturbance(attempted=stop)).reason == "stopped":
        assert not (workdir / "result.json").exists()
        count += 1
    return count


@pytest.mark.parametrize("end", range(1, STEPS))
def test_a_run_that_was_to_end_earlier_goes_on(undisturbed: Path, tmp_path: Path, end: int) -> None:
    first = run(tmp_path, make_recipe(4, end=ls.Steps(end)))
    assert (first.step, first.reason) == (end, "end")
    run(tmp_path, make_recipe(4))
    assert contents(tmp_path) == contents(undisturbed)


@pytest.mark.parametrize("step", [2, *BOUNDARIES, 6])
def test_a_fork_goes_on_in_the_stage_of_its_checkpoint(undisturbed: Path, tmp_path: Path, step: int) -> None:
    run(tmp_path, make_recipe(), fork_from=f"{undisturbed}@{step}")
    forked, whole = contents(tmp_path), contents(undisturbed)
    for name in set(whole) - {"metrics.jsonl", "result.json"}:
        assert forked[name] == whole[name], name


def test_a_rollback_over_a_boundary_is_a_run_told_from_the_start(tmp_path: Path) -> None:
    """To the end of the stage before, which is saved whatever the interval."""
    bad, given = [12, 24], make_recipe(nonfinite="rollback", checkpoints=Checkpoints(ls.Interval(0)))
    run(tmp_path / "told", given, Disturbance(skipped=bad))
    run(tmp_path / "back", given, Disturbance(bad=bad))
    assert contents(tmp_path / "back") == contents(tmp_path / "told")
    back = [line for line in lines(tmp_path / "back", "history.jsonl") if line["event"] == "rollback"]
    assert [line["skipped"] for line in back] == bad
    assert [line["step"] for line in back] == [3, 5]


@pytest.mark.parametrize("step", BOUNDARIES)
def test_weights_at_a_boundary_are_to_blame_where_no_batch_of_the_next_stage_is_finite(
    tmp_path: Path, step: int
) -> None:
    given = make_recipe(1, nonfinite="rollback")
    bad = range(step * BATCH_SIZE, 100, BATCH_SIZE)
    with pytest.raises(ls.NonFiniteError, match=f"The weights after step {step} are to blame, and their checkpoint"):
        run(tmp_path, given, Disturbance(bad=bad))
    back = [line for line in lines(tmp_path, "history.jsonl") if line["event"] == "rollback"]
    assert [line["step"] for line in back] == [step, step - 1]


def test_what_is_skipped_at_a_boundary_survives_a_kill(tmp_path: Path) -> None:
    given = make_recipe(3, nonfinite="rollback")

    def die(position: int) -> None:
        if position == 20:
            raise KilledError

    with pytest.raises(KilledError):
        run(tmp_path, given, Disturbance(bad=[12], attempted=die))
    run(tmp_path, given, Disturbance(bad=[12]))
    assert [line["event"] for line in lines(tmp_path, "history.jsonl")].count("rollback") == 1


def on_two_workers(workdir: Path) -> str:
    def stop(position: int) -> None:
        if position == (BOUNDARIES[0] - 1) * BATCH_SIZE:
            ls.join().pulse.stop_requested = "SIGUSR1"

    first = run_here(workdir, Disturbance(attempted=stop))
    return f"{first}, {run_here(workdir, Disturbance())}"


def run_here(workdir: Path, what: Disturbance, **more: Any) -> str:
    return start(workdir, make_recipe(**more), what).run().reason


@pytest.mark.process
def test_two_workers_stop_at_a_boundary_and_go_on(
    undisturbed: Path, tmp_path: Path, run_workers: Callable[..., list[Any]]
) -> None:
    assert run_workers(on_two_workers, 2, tmp_path) == ["stopped, end"] * 2
    assert contents(tmp_path) == contents(undisturbed)


def blamed_on_two_workers(workdir: Path) -> str:
    bad = range(BOUNDARIES[0] * BATCH_SIZE, 100, BATCH_SIZE)
    with pytest.raises(ls.NonFiniteError) as blamed:
        run_here(workdir, Disturbance(bad=bad), every=1, nonfinite="rollback")
    return f"{blamed.value.what} {blamed.value.given}"


@pytest.mark.process
def test_two_workers_blame_the_weights_at_a_boundary_alike(
    tmp_path: Path, run_workers: Callable[..., list[Any]]
) -> None:
    first, second = run_workers(blamed_on_two_workers, 2, tmp_path)
    assert first == second
    assert first.startswith("The weights after step 3 are to blame")
    assert "the batches at positions 12, 16, 20, one after the other" in first


def test_hours_are_those_of_the_whole_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts of ten minutes: the first that begins after 54 is the last, as in a run without stages."""
    clock = SimpleNamespace(now=0.0)
    for module in ("training.step", "runs.run"):
        monkeypatch.setattr(f"lockstep.{module}.time", SimpleNamespace(perf_counter=lambda: clock.now))

    def ten_minutes(position: int) -> None:
        clock.now += 600.0

    result = run(tmp_path, make_recipe(end=ls.Hours(0.9)), Disturbance(attempted=ten_minutes))
    assert (result.step, result.reason) == (7, "end")
    result = run(tmp_path, make_recipe(end=ls.Hours(0.9)), Disturbance(attempted=ten_minutes))
    assert (result.step, result.reason) == (STEPS, "end"), "its last stage ends before that"


@pytest.mark.parametrize(("end", "steps"), [(ls.Epochs(1.7), 4), (ls.Epochs(9), STEPS), (ls.Steps(99), STEPS)])
def test_the_run_ends_with_its_last_stage_or_earlier(
    tmp_path: Path, end: ls.Epochs | ls.Steps, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    watch = Monitoring(console=ls.Interval(1), metrics=ls.Interval(0), summaries=ls.Interval(0))
    result = run(tmp_path, make_recipe(end=end, watch=watch))
    assert (result.step, result.reason) == (steps, "end")
    shown = [line.split(" | ")[0] for line in caplog.messages if " | loss " in line or "cross_entropy" in line]
    assert shown == [f"step {step} of {steps}" for step in range(1, steps + 1)]
    told = [line for line in caplog.messages if line.startswith("the run ends with its last stage")]
    assert told == [f"the run ends with its last stage at step {STEPS}, and not after {end} (end)"] * (steps == STEPS)


# Lengths and mistakes -------------------------------------------------------------------------------------------------


def test_a_pattern_of_a_later_stage_is_refused_at_the_start(tmp_path: Path) -> None:
    later = (STAGES[0], replace(STAGES[1], train_only=("tail",)))
    with pytest.raises(ls.InputError, match=r"Stage 2: A pattern of train_only matches no parameter"):
        run(tmp_path, make_recipe(stages=later))
    assert not list(tmp_path.iterdir())


def test_a_stage_that_is_too_short(tmp_path: Path) -> None:
    with pytest.raises(ls.InputError) as raised:
        run(tmp_path, make_recipe(stages=(STAGES[0], Stage(ls.Epochs(0.3)))))
    assert str(raised.value) == (
        "Stage 2 is too short for an update.\n"
        "  given:    0.3 epochs, 10 examples in an epoch, batches of 4\n"
        "  expected: at least one whole batch\n"
        "  hint:     raise stages[1].length, or lower the batch size"
    )


def test_a_length_that_is_a_number() -> None:
    with pytest.raises(ls.InputError, match=r"expected: steps or epochs\n +hint: +write ls\.Steps\(1000\)"):
        Stage(1000)  # type: ignore[arg-type]


def test_sizes_of_images_that_have_one() -> None:
    with pytest.raises(ls.InputError) as raised:
        make_recipe(data=MnistData())
    assert str(raised.value) == (
        "The images of MnistData have one size.\n"
        "  given:    stages[2].image_size=32\n"
        "  expected: 28 pixels throughout\n"
        "  hint:     leave image_size out of the stages, or take ImageData"
    )


def test_a_changed_stage_is_refused(tmp_path: Path) -> None:
    run(tmp_path, make_recipe(end=ls.Steps(4)))
    with pytest.raises(ls.WorkdirError, match="has another recipe"):
        run(tmp_path, make_recipe(stages=(replace(STAGES[0], train_only=(HEAD, "norm")), *STAGES[1:])))


def test_rates_that_end_elsewhere_than_their_stage_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cosine = ls.optim.SGD(ls.optim.Cosine(0.1, 5))
    run(tmp_path, make_recipe(stages=(STAGES[0], Stage(ls.Steps(3), optimizer=cosine))))
    assert (
        "the learning rate ends at step 5, stage 2, counted from its first step, at step 3: "
        "it is still on its way (optimizer.lr.steps)" in caplog.messages
    )
