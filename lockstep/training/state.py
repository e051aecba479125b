"""What a run has learned: parameters, slots, averages, statistics and the step, and the one way to change them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lockstep.checks import check_one_of, check_type, wrong_type
from lockstep.errors import CheckpointError, InputError
from lockstep.optim.averages import MovingAverage
from lockstep.optim.optimizers import Optimizer
from lockstep.optim.transforms import Gradients, GradientTransform
from lockstep.parallel.hosting import changeable_buffers
from lockstep.training.smoothing import SmoothedLosses


class Attempt(NamedTuple):
    """What the towers made of one batch, averaged over all of them: what an update is made from."""

    gradients: Sequence[Tensor | None]
    """In the order of the parameters; None where no tower had one."""
    statistics: Sequence[Tensor]
    """New values of the model's buffers, in their order."""
    losses: Mapping[str, float]


class Outcome(NamedTuple):
    """What `apply` did with an attempt."""

    learning_rate: float
    gradient_norm: float
    """Of the averaged gradients, before any transform."""
    unfit: tuple[str, ...] = ()
    """What is not finite, in words: then the attempt was refused, and nothing has changed."""

    @property
    def refused(self) -> bool:
        """Whether nothing has changed."""
        return bool(self.unfit)


class TrainState:
    """Step, parameters, slots, averages and statistics of one model under training.

    Parameters that do not require a gradient are left alone. `apply` is the only place where anything here changes.

    Args:
        model: the module to train, on its device, in the memory format and dtype it is to have.
        optimizer: what updates the parameters.
        gradient_transforms: applied in order to the averaged gradients.
        average: a moving average of the parameters to keep.
        nonfinite: what a loss or gradient that is not finite does: "stop" ends the run, "skip" that attempt alone.
        name: tells the random streams of several states in one run apart.
    """

    living: ClassVar[WeakSet[TrainState]] = WeakSet()

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        gradient_transforms: Sequence[GradientTransform] = (),
        average: MovingAverage | None = None,
        nonfinite: Literal["stop", "skip"] = "stop",
        name: str = "model",
    ) -> None:
        check_type("model", model, nn.Module, expected="a torch.nn.Module", mend="pass the module to train")
        if isinstance(optimizer, type) or not hasattr(optimizer, "bind"):
            raise wrong_type(
                "optimizer",
                optimizer,
                expected="an optimizer of lockstep.optim, a value without parameters",
                mend="write ls.optim.SGD(lr=0.1, momentum=0.9); the state gives it the parameters",
            )
        check_one_of("nonfinite", nonfinite, ("stop", "skip"))
        self.step = 0
        self.model = model.train()
        self.name = name
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise InputError(
                "The model has no parameter to train.",
                given=f"{type(model).__name__} with {len(list(model.parameters()))} parameters, none to train",
                expected="at least one parameter with requires_grad",
                mend="pass the model that is to be trained, and leave requires_grad on for what is to change",
            )
        self._tensors: list[Tensor] = list(self.parameters.values())
        self._buffers = changeable_buffers(model)
        self._optimizer = optimizer.bind(self._tensors)
        self._average = average.bind(self._tensors) if average else None
        self._transforms = tuple(gradient_transforms)
        self.nonfinite = nonfinite
        self.smoothed = SmoothedLosses()
        self.steps: dict[object, object] = {}
        """The steps bound to this state, by their towers and exchange (see `lockstep.training.step`)."""
        self.living.add(self)

    @torch.no_grad()
    def apply(self, attempt: Attempt) -> Outcome:
        """Make one update of everything, or none at all where a loss or a gradient is not finite."""
        lr = self._optimizer.learning_rate(self.step)
        norm = _global_norm(attempt.gradients)
        if not (math.isfinite(norm) and all(map(math.isfinite, attempt.losses.values()))):
            return Outcome(lr, norm, self._unfit(attempt))
        gradients = Gradients(attempt.gradients, norm)
        for transform in self._transforms:
            transform(gradients, self.step)
        self._optimizer.update(gradients.tensors, lr)
        self.step += 1
        if self._average:
            self._average.update(self.step)
        for buffer, new in zip(self._buffers, attempt.statistics, strict=True):
            buffer.copy_(new)
        self.smoothed.update(attempt.losses)
        return Outcome(lr, norm)

    def _unfit(self, attempt: Attempt) -> tuple[str, ...]:
        """Which losses and gradients are not finite, in words."""
        losses = [f"loss {name!r} is {value}" for name, value in attempt.losses.items() if not math.isfinite(value)]
        gradients = [
            f"gradient of {name!r}"
            for name, gradient in zip(self.parameters, attempt.gradients, strict=True)
            if gradient is not None and not gradient.isfinite().all()
        ]
        found = losses + gradients[:8] + ([f"{len(gradients) - 8} gradients more"] if len(gradients) > 8 else [])
        return tuple(found or ["the gradients are finite, and their global norm is not"])

    def to_channels_last(self) -> None:
        """Lay convolution weights, and all that is kept for them, out in the channels_last memory format."""
        slots = [t for tensors in self._optimizer.slots.values() for t in tensors]
        averages = self._average.tensors if self._average else []
        for tensor in (*self.model.parameters(), *slots, *averages):
            if tensor.ndim == 4:
                tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)

    def averaged(self) -> dict[str, Tensor]:
        """The moving averages of the parameters, by name.

        Raises:
            InputError: the state keeps none.
        """
        if self._average is None:
            raise InputError(
                "This state keeps no moving average.",
                given="average=None",
                expected="a TrainState with average=MovingAverage(...)",
                mend="train with an average, or use the raw weights",
            )
        return dict(zip(self.parameters, self._average.tensors, strict=True))

    def sections(self) -> dict[str, dict[str, Tensor]]:
        """Everything that has to be saved, as tensors by section and name; they are the state's own, not copies."""
        sections: dict[str, Mapping[str, Tensor]] = {
            "parameters": dict(self.model.named_parameters()),
            "buffers": dict(self.model.named_buffers()),
            "slots": {
                f"{slot}/{name}": tensor
                for slot, tensors in self._optimizer.slots.items()
                for name, tensor in zip(self.parameters, tensors, strict=True)
            },
            "average": self.averaged() if self._average else {},
        }
        return {section: {n: t.detach() for n, t in tensors.items()} for section, tensors in sections.items()}

    def values(self) -> dict[str, Any]:
        """The rest of what has to be saved, as JSON."""
        return {"step": self.step, "smoothed": self.smoothed.values()}

    def load(self, sections: Mapping[str, Mapping[str, Tensor]], values: Mapping[str, Any]) -> None:
        """Take over what was saved; everything is checked before anything changes.

        Raises:
            CheckpointError: a tensor is missing, left over, or of another shape or dtype.
        """
        own = self.sections()
        problems = [line for name, tensors in own.items() for line in _compare(name, tensors, sections.get(name, {}))]
        if problems:
            raise CheckpointError(
                "The checkpoint does not fit this model and optimizer.",
                given="; ".join(problems[:10]) + (f"; and {len(problems) - 10} more" if len(problems) > 10 else ""),
                expected="the same names, shapes and dtypes",
                mend="resume with the model, optimizer and average of the run, or train in another workdir",
            )
        with torch.no_grad():
            for section, tensors in own.items():
                for name, tensor in tensors.items():
                    tensor.copy_(sections[section][name])
        self.step = int(values["step"])
        self.smoothed = SmoothedLosses(values["smoothed"])


def _global_norm(gradients: Sequence[Tensor | None]) -> float:
    """The 2-norm of all gradients together; 0 where there are none."""
    present = [g for g in gradients if g is not None]
    if not present:
        return 0.0
    norms = torch._foreach_norm(present)
    if present[0].device.type == "cpu":  # reading a number costs less here than one more operation
        return math.sqrt(sum([norm.item() ** 2 for norm in norms]))
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def _compare(section: str, own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> list[str]:
    lines = [f"{section}: {name!r} is missing" for name in own.keys() - saved.keys()]
    lines += [f"{section}: {name!r} is not in the model" for name in saved.keys() - own.keys()]
    for name in own.keys() & saved.keys():
        wanted, found = own[name], saved[name]
        if wanted.shape != found.shape or wanted.dtype != found.dtype:
            lines.append(
                f"{section}: {name!r} is {tuple(found.shape)} {found.dtype}, not {tuple(wanted.shape)} {wanted.dtype}"
            )
    return sorted(lines)
