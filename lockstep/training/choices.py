"""Everything about the machine and the software that can change bits: resolved once, saved, replayed on resume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from lockstep.cores import openmp_threads_are_named, share_of_cores
from lockstep.data.loader import Loader
from lockstep.errors import WorkdirError
from lockstep.images.jpeg import TURBO
from lockstep.readers.reader import decoder_of
from lockstep.screen import log
from lockstep.towers.backends import backends_of_steps
from lockstep.towers.towers import Towers
from lockstep.training.state import TrainState
from lockstep.version import __version__
from lockstep.workers.devices import describe_cpu
from lockstep.workers.rank import Worker


@dataclass(frozen=True)
class Choices:
    """What a run was computed with. Two runs with equal choices, recipes and data have equal bits."""

    threads: int
    """Intra-operation threads of each worker: it stays when the number of workers changes."""
    device: str
    cpu: str
    """The instruction set that torch uses on the CPU."""
    precision: str
    memory_format: str
    kernels: str
    compilation: str
    decoder: str
    torch: str
    lockstep: str
    accelerator: Mapping[str, str] | None = None
    """The name of the GPU, the versions of its software, and the flags of torch's backends that hold in a step; empty
    on a CPU, None where an older version has not written it down."""

    @classmethod
    def read(cls, saved: Any) -> Choices:
        """The choices as `dataclasses.asdict` gives them; a ValueError names the field that is wrong."""
        names = [field.name for field in fields(cls)]
        if not isinstance(saved, dict) or sorted(saved.keys() | {"accelerator"}) != sorted(names):
            raise ValueError(f"the fields are not {', '.join(names)}")
        for name, value in saved.items():
            if not _is_right(name, value):
                raise ValueError(f"{name} is {value!r}")
        return cls(**saved)

    def __str__(self) -> str:
        parts = (
            f"{self.device} ({self.cpu})",
            *(f"{name} {value}" for name, value in (self.accelerator or {}).items()),
            f"{self.threads} {'thread' if self.threads == 1 else 'threads'} a worker",
            self.precision,
            self.memory_format,
            f"{self.kernels} kernels",
            f"compilation {self.compilation}",
            f"torch {self.torch}",
            f"lockstep {self.lockstep}",
        )
        return ", ".join(parts)


def _is_right(name: str, value: object) -> bool:
    if name == "accelerator":
        return value is None or (isinstance(value, dict) and all(type(fact) is str for fact in value.values()))
    return type(value) is int and value > 0 if name == "threads" else type(value) is str


def resolve(
    state: TrainState,
    towers: Towers,
    loader: Loader,
    worker: Worker,
    *,
    exact: bool,
    saved: Choices | None,
    num_threads: int | None = None,
) -> Choices:
    """The choices of this start of a run: those of its first start where they were saved, else what suits the machine.

    A number of threads that the recipe or the command names goes before all. One thread a worker on a CPU where
    exactness is asked for; else what the user has told OpenMP or torch, else the cores that each worker has to itself,
    on the host where these are fewest. All workers call it together.
    """
    fewest = min(worker.group.gather(1 if exact and worker.device.type == "cpu" else _threads_here(worker)))
    return Choices(
        threads=num_threads or worker.pulse.named_threads or (saved.threads if saved else fewest),
        device=worker.device.type,
        cpu=describe_cpu(),
        precision=towers.precision,
        memory_format="channels_last" if towers.channels_last else "contiguous",
        kernels=state.kernels,
        compilation="on" if towers.compile else "off",
        decoder=decoder_of(loader.reader),
        torch=torch.__version__,
        lockstep=__version__,
        accelerator=backends_of_steps(towers, worker.device, exact=exact).described(),
    )


def _threads_here(worker: Worker) -> int:
    """The threads that the user has set for this worker, by OMP_NUM_THREADS or in a script; else its share of cores."""
    in_force = torch.get_num_threads()
    if worker.pulse.launched:
        is_set = in_force != worker.pulse.shared_threads
    else:  # of several workers, torchrun has set it for each
        is_set = openmp_threads_are_named() and worker.num_local_workers == 1
    return in_force if is_set else share_of_cores(worker.num_local_workers)


def compare(now: Choices, worker: Worker, *, exact: bool) -> None:
    """Compare the choices of all workers: those of an exact run must be the same, else the chief tells who differs.

    Raises:
        WorkerError: the run is exact, and workers differ.
    """
    if exact:
        worker.group.agree("the choices, on which exact bits depend", _flat(now))
        return
    mine, *others = worker.group.gather(_flat(now))
    for name, theirs in zip(worker.group.names[1:], others, strict=True):
        odd = [f"{what} {theirs.get(what)} instead of {mine[what]}" for what in mine if theirs.get(what) != mine[what]]
        if odd and worker.is_chief:
            log.warning("%s computes with other choices than %s: %s", name, worker.name, ", ".join(odd))


def differences(saved: Choices, now: Choices) -> list[str]:
    """One line for each choice that has changed since the first start so that bits may differ."""
    before, after = _flat(saved), _flat(now)
    return [
        f"{name} was {before[name]} and is {after[name]}"
        for name in filter(after.__contains__, before)
        # Whatever rests on libjpeg-turbo gives the same pixels, in every version.
        if before[name] != after[name] and not (name == "decoder" and TURBO in saved.decoder and TURBO in now.decoder)
    ]


def _flat(choices: Choices) -> dict[str, Any]:
    """The choices by name, those of the accelerator among them."""
    facts = asdict(choices)
    return facts | (facts.pop("accelerator") or {})


def refuse_changed(changed: list[str]) -> None:
    """Refuse to go on in exact mode with choices that have changed."""
    if changed:
        raise WorkdirError(
            "This exact run cannot go on with the same bits here.",
            given="; ".join(changed),
            expected="the choices of its first start",
            hint="resume on a machine and with versions like those, or set exchange.exact to false",
        )
