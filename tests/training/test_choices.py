from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

import lockstep as ls
from lockstep.errors import WorkdirError, WorkerError
from lockstep.towers import backends
from lockstep.training.choices import Choices, compare, differences, refuse_changed, resolve
from lockstep.workers.pulse import Pulse
from lockstep.workers.rank import Worker
from tests.thread_workers import run_threads

CHOICES = Choices(1, "cpu", "x86_64 AVX2", "fp32", "channels_last", "fused", "off", "none", "2.11.0", "0.1.0")


def test_one_line_says_all() -> None:
    assert str(CHOICES) == (
        "cpu (x86_64 AVX2), 1 thread a worker, fp32, channels_last, fused kernels, compilation off, "
        "torch 2.11.0, lockstep 0.1.0"
    )
    assert ", 4 threads a worker, " in str(replace(CHOICES, threads=4))


GPU = {"gpu": "NVIDIA H200", "driver": "570.86", "cuda": "13.0", "conv_tf32": "on"}


def test_the_line_names_the_gpu() -> None:
    line = str(replace(CHOICES, device="cuda", accelerator=GPU))
    assert line.startswith("cuda (x86_64 AVX2), gpu NVIDIA H200, driver 570.86, cuda 13.0, conv_tf32 on, 1 thread a ")


@pytest.mark.parametrize("choices", [CHOICES, replace(CHOICES, accelerator={}), replace(CHOICES, accelerator=GPU)])
def test_choices_survive_json(choices: Choices) -> None:
    assert Choices.read(json.loads(json.dumps(asdict(choices)))) == choices


def test_choices_of_an_older_version_have_no_accelerator() -> None:
    older = Choices.read({name: value for name, value in asdict(CHOICES).items() if name != "accelerator"})
    assert older == CHOICES
    assert differences(older, replace(CHOICES, accelerator=GPU)) == []


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"accelerator": "cuda"}, {"accelerator": {"gpu": 1}}, {"more": "x"}])
def test_what_was_never_written_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)) if "more" not in wrong else "the fields are not"):
        Choices.read(asdict(CHOICES) | wrong)


def test_another_gpu_driver_or_flag_is_named() -> None:
    now = GPU | {"gpu": "NVIDIA A100", "conv_tf32": "off"}
    assert differences(replace(CHOICES, accelerator=GPU), replace(CHOICES, accelerator=now)) == [
        "gpu was NVIDIA H200 and is NVIDIA A100",
        "conv_tf32 was on and is off",
    ]
    on_cpu = differences(replace(CHOICES, device="cuda", accelerator=GPU), replace(CHOICES, accelerator={}))
    assert on_cpu == ["device was cuda and is cpu"]


def test_differences_are_named() -> None:
    assert differences(CHOICES, CHOICES) == []
    assert differences(CHOICES, replace(CHOICES, cpu="x86_64 AVX512", torch="2.13.0")) == [
        "cpu was x86_64 AVX2 and is x86_64 AVX512",
        "torch was 2.11.0 and is 2.13.0",
    ]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("simplejpeg 1.9.0 (libjpeg-turbo)", "pillow 13.0.0 (libjpeg-turbo 3.2.0)", False),
        ("torchcodec 0.17.0; pillow 13.0.0, libjpeg-turbo 3.2.0", "simplejpeg 1.9.0 (libjpeg-turbo)", False),
        ("simplejpeg 1.9.0 (libjpeg-turbo)", "pillow 13.0.0 (libjpeg 9.6)", True),
        ("a decoder 1.0", "a decoder 1.1", True),
        ("none", "simplejpeg 1.9.0 (libjpeg-turbo)", True),
    ],
)
def test_another_decoder_is_named_if_its_pixels_may_differ(before: str, after: str, told: bool) -> None:
    changed = differences(replace(CHOICES, decoder=before), replace(CHOICES, decoder=after))
    assert changed == ([f"decoder was {before} and is {after}"] if told else [])


@pytest.mark.parametrize("exact", [True, False])
def test_choices_are_what_a_step_is_computed_with(monkeypatch: pytest.MonkeyPatch, exact: bool) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(backends, "describe_accelerator", lambda device: GPU)
    state = ls.TrainState(torch.nn.Linear(1, 1), ls.optim.SGD(0.1))
    loader = ls.data.Loader(ls.data.Arrays({"x": torch.ones(4, 1)}), batch_size=2)
    for device, found in (("cpu", {}), ("cuda", {"gpu": "NVIDIA H200", "deterministic": "on" if exact else "off"})):
        worker = replace(ls.join(), device=torch.device(device))
        accelerator = resolve(state, ls.Towers(), loader, worker, exact=exact, saved=None).accelerator
        assert accelerator is not None
        assert {name: accelerator[name] for name in found} == found
        assert bool(accelerator) == bool(found)


@pytest.mark.parametrize(
    ("in_force", "shared", "exact", "saved", "named", "threads"),
    [
        (4, 4, False, None, None, 2),  # two workers share the four cores
        (3, 4, False, None, None, 3),  # torch.set_num_threads(3)
        (3, None, False, None, None, 3),  # OMP_NUM_THREADS=3
        (3, None, True, None, None, 1),
        (3, None, True, None, 2, 2),
        (3, None, False, 4, None, 4),
        (3, None, False, 4, 2, 2),
    ],
)
def test_threads_are_those_named_or_saved_or_a_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
    in_force: int,
    shared: int | None,
    exact: bool,
    saved: int | None,
    named: int | None,
    threads: int,
) -> None:
    monkeypatch.setattr("lockstep.cores.usable_cores", lambda: 4)
    torch.set_num_threads(in_force)
    worker = replace(ls.join("cpu"), num_local_workers=2, pulse=Pulse(launched=True))
    worker.pulse.shared_threads = shared
    state = ls.TrainState(torch.nn.Linear(1, 1), ls.optim.SGD(0.1))
    loader = ls.data.Loader(ls.data.Arrays({"x": torch.ones(4, 1)}), batch_size=2)
    before = None if saved is None else replace(CHOICES, threads=saved)
    now = resolve(state, ls.Towers(), loader, worker, exact=exact, saved=before, num_threads=named)
    assert now.threads == threads


@pytest.mark.parametrize(
    ("variable", "num_workers", "threads"), [("3", 1, 3), ("3", 2, 2), ("none", 1, 4), (None, 1, 4)]
)
def test_without_a_launcher_threads_are_those_of_the_variable_for_one_worker(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, num_workers: int, threads: int
) -> None:
    monkeypatch.setattr("lockstep.cores.usable_cores", lambda: 4)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    torch.set_num_threads(3)  # as torch itself does for the variable
    worker = replace(ls.join("cpu"), num_local_workers=num_workers, pulse=Pulse())
    state = ls.TrainState(torch.nn.Linear(1, 1), ls.optim.SGD(0.1))
    loader = ls.data.Loader(ls.data.Arrays({"x": torch.ones(4, 1)}), batch_size=2)
    assert resolve(state, ls.Towers(), loader, worker, exact=False, saved=None, num_threads=None).threads == threads


def test_exact_runs_refuse_them() -> None:
    refuse_changed([])
    with pytest.raises(WorkdirError) as caught:
        refuse_changed(["torch was 2.11.0 and is 2.13.0", "kernels was fused and is foreach"])
    assert str(caught.value) == (
        "This exact run cannot go on with the same bits here.\n"
        "  given:    torch was 2.11.0 and is 2.13.0; kernels was fused and is foreach\n"
        "  expected: the choices of its first start\n"
        "  hint:     resume on a machine and with versions like those, or set exchange.exact to false"
    )


def compared(own: dict[str, Any], *, exact: bool) -> list[Any]:
    """What three workers say of each other's choices, of which worker 1 has some of its own."""

    def compare_here(worker: Worker) -> Any:
        try:
            return compare(replace(CHOICES, **(own if worker.rank == 1 else {})), worker, exact=exact)
        except WorkerError as error:
            return error

    return run_threads(compare_here, 3)


def test_a_worker_with_other_choices_is_refused_where_the_run_is_exact() -> None:
    assert compared({}, exact=True) == [None] * 3
    for error in compared({"cpu": "x86_64 AVX512"}, exact=True):
        assert error.what == "The workers do not agree on the choices, on which exact bits depend: worker 1 differs."
        assert error.given == 'worker 1: cpu: "x86_64 AVX512" instead of "x86_64 AVX2"'


def test_a_worker_with_other_choices_is_named_where_the_run_is_not_exact(caplog: pytest.LogCaptureFixture) -> None:
    assert compared({"cpu": "x86_64 AVX512", "accelerator": GPU}, exact=False) == [None] * 3
    assert caplog.messages == [
        "worker 1 computes with other choices than worker 0: cpu x86_64 AVX512 instead of x86_64 AVX2"
    ]
    caplog.clear()
    assert compared({}, exact=False) == [None] * 3
    assert caplog.messages == []
