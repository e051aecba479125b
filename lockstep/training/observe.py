"""Histograms of variables, gradients and activations for TensorBoard.

Before an attempt whose turn it is, an observer attaches itself to the state or to the modules; after it, nothing of it
is left there. The steps in between cost nothing. What is computed is the same to the bit, observed or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.errors import InputError
from lockstep.optim.gradients import Gradients
from lockstep.reporting.histograms import Histogram, compute_histograms
from lockstep.reporting.summaries import Summaries
from lockstep.screen import log
from lockstep.towers.towers import Towers
from lockstep.training.state import TrainState
from lockstep.types import Interval, Progress, StepReport
from lockstep.workers.rank import join


class Seen(NamedTuple):
    """Histograms and scalars of one step, by tag."""

    histograms: Mapping[str, Histogram]
    scalars: Mapping[str, float]


class Source(Protocol):
    """A source of histograms: it watches an attempt, or reads the state after it."""

    def attach(self) -> None:
        """Watch the attempts that follow; it may be called again."""

    def detach(self) -> None:
        """Stop watching."""

    def seen(self, step: int) -> Seen:
        """Histograms of the attempt that made `step`; none where the source was attached too late to watch it."""


class Observer:
    """A hook that writes the histograms of a source at an interval.

    A skipped attempt is no step: the next one that is made takes its place, as it does of one whose forward pass was
    over before the observer came, where attempts are read late. The time is read before an attempt, so an
    interval in seconds is noticed one step later. A run that is resumed writes at the same steps and epochs. A step
    that raises leaves it attached: `close` it before training goes on.

    Args:
        interval: how often; an amount of 0 is never.
        start: where the run begins, or is resumed.
        batch_size: examples an attempt, over all towers.
    """

    def __init__(
        self, source: Source, interval: Interval, summaries: Summaries, *, start: Progress, batch_size: int
    ) -> None:
        self._source = source
        self._interval = interval
        self._summaries = summaries
        self._is_due = False
        self._expected = start
        self._look_ahead(start, batch_size)

    def __call__(self, report: StepReport) -> None:
        """Write the histograms of a watched attempt, and watch the next one if it is due."""
        if self._is_due and not report.skipped and any(seen := self._source.seen(report.step)):
            self._summaries.write_histograms(*seen, report.step)
            self._is_due = False
            self._source.detach()
        self._look_ahead(report.progress, report.num_examples)

    def close(self) -> None:
        """Remove all hooks from the model and its state; the next call goes on with the attempt after it."""
        self._source.detach()
        self._is_due = False

    def _look_ahead(self, now: Progress, batch_size: int) -> None:
        before, self._expected = self._expected, now._replace(step=now.step + 1, position=now.position + batch_size)
        self._is_due = self._is_due or self._interval.passed(before, self._expected)
        if self._is_due:
            self._source.attach()


class VariableSource:
    """All parameters and floating buffers after a step: `variables/NAME`, and their 2-norms `variable_norms/NAME`."""

    def __init__(self, state: TrainState) -> None:
        self._model = state.model

    def attach(self) -> None:
        """Nothing to do: they can be read at any time."""

    def detach(self) -> None:
        """Nothing to do."""

    def seen(self, step: int) -> Seen:
        """Histograms of their present values."""
        found = compute_histograms({**dict(self._model.named_parameters()), **dict(self._model.named_buffers())})
        return Seen(
            {f"variables/{name}": histogram for name, histogram in found.items()},
            {f"variable_norms/{name}": histogram.norm for name, histogram in found.items()},
        )


class GradientSource:
    """The gradients that the optimizer gets, after all transforms: `gradients/NAME`, and `gradient_norms/NAME`.

    Of a sparse gradient the rows that it has. A parameter without a gradient is named in the log, once. While it is
    attached, it is one of the state's gradient hooks.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._found: dict[str, Histogram] = {}
        self._without: set[str] = set()

    def attach(self) -> None:
        """Watch the next update."""
        self._found = {}
        self.detach()
        self._state.gradient_hooks.append(self._look)

    def detach(self) -> None:
        """Watch no more."""
        if self._look in self._state.gradient_hooks:
            self._state.gradient_hooks.remove(self._look)

    def seen(self, step: int) -> Seen:
        """Histograms of the gradients of the last update."""
        return Seen(
            {f"gradients/{name}": histogram for name, histogram in self._found.items()},
            {f"gradient_norms/{name}": histogram.norm for name, histogram in self._found.items()},
        )

    def _look(self, gradients: Gradients) -> None:
        # Reading the tensors makes a division that a fused update would make on the way, and round otherwise.
        apart = gradients.subset(range(len(gradients.names)))
        named = dict(zip(apart.names, apart.tensors, strict=True))
        for name, gradient in named.items():
            if gradient is None and name not in self._without:
                self._without.add(name)
                log.info("%s has no gradient: the summaries show none", name)
        self._found = compute_histograms({name: gradient for name, gradient in named.items() if gradient is not None})


class ActivationSource:
    """The outputs of the modules without children: `activations/MODULE`, and the share of zeros `sparsity/MODULE`.

    Of each module the first call of the attempt: in the first of this worker's towers that calls it. Of several outputs
    the first. A model that is such a module itself goes by the name of the state.
    """

    def __init__(self, state: TrainState, towers: Towers) -> None:
        if towers.compile:
            raise InputError(
                "A compiled model does not show its activations.",
                given="compile=True, and an interval for activations",
                expected="a model that runs module by module, or no activations",
                hint="set watch.activations=0, or towers.compile=false",
            )
        modules = state.model.named_modules()
        self._modules = {name or state.name: m for name, m in modules if next(m.children(), None) is None}
        self._handles: list[RemovableHandle] = []
        self._found: dict[int, _Outputs] = {}

    def attach(self) -> None:
        """Watch the forward passes that follow."""
        if not self._handles:
            self._handles = [
                module.register_forward_hook(_looking(name, module, self._found))
                for name, module in self._modules.items()
            ]

    def detach(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._found.clear()

    def seen(self, step: int) -> Seen:
        """Histograms of the outputs."""
        found = self._found[step].histograms if step in self._found else {}
        return Seen(
            {f"activations/{name}": histogram for name, histogram in found.items()},
            {f"sparsity/{name}": histogram.sparsity for name, histogram in found.items()},
        )


class _Outputs(NamedTuple):
    """What modules returned in one attempt."""

    attempt: int
    """The pulse's count: an attempt that is made again is another one."""
    histograms: dict[str, Histogram]


def _looking(name: str, module: nn.Module, found: dict[int, _Outputs]) -> Callable[[nn.Module, Any, Any], None]:
    # A function, not a method: a copy of the model, made to be scored, takes its hooks along, and must not copy more.
    pulse = join().pulse

    def look(called: nn.Module, _: Any, output: Any) -> None:
        if called is not module or not torch.is_grad_enabled():
            return
        step, attempt = pulse.step + 1, pulse.count  # where steps are read late, the next report is not this one's
        if step not in found or found[step].attempt != attempt:
            found[step] = _Outputs(attempt, {})
        first = output[0] if isinstance(output, tuple | list) and output else output
        if isinstance(first, Tensor) and name not in found[step].histograms:
            found[step].histograms.update(compute_histograms({name: first}))

    return look
