"""Flags of torch's backends on a CUDA device: TF32, cuDNN's benchmark, and deterministic algorithms for exact bits."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.backends import cuda, cudnn
from torch.utils import deterministic

from lockstep.errors import InputError
from lockstep.towers.towers import Towers
from lockstep.workers.devices import describe_accelerator

_WORKSPACE, _DETERMINISTIC = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
_OF_TOWERS = ("cudnn_benchmark", "conv_tf32", "matmul_tf32")
_FILL = "fill_uninitialized_memory"
_RAISES = 2
"""The mode of torch in which an operator without a deterministic algorithm raises an error."""
_ALERT = " does not have a deterministic implementation"
"""What torch says then, after the name of the operator."""


class Backends:
    """Flags that hold within the context, and are put back after it.

    Torch has one of each for the whole process, so states with other flags, and the user's own code, keep theirs. A CPU
    has none of them, and a flag of None leaves torch's own.
    """

    def __init__(self, device: torch.device, flags: Mapping[str, Any]) -> None:
        self._device = device
        self.flags = {name: flag for name, flag in flags.items() if flag is not None and device.type != "cpu"}
        """What entering the context changes; nothing on a CPU."""
        self._before: dict[str, Any] = {}

    def described(self) -> dict[str, str]:
        """All that decides the bits of a GPU: its name, its software, and each flag; empty on a CPU."""
        if self._device.type == "cpu":
            return {}
        with self:
            values = {name: flag.get() for name, flag in _FLAGS.items() if name != _FILL}
        flags = {name: value if type(value) is str else "on" if value else "off" for name, value in values.items()}
        return describe_accelerator(self._device) | flags

    def __enter__(self) -> None:
        for name, value in self.flags.items():
            flag = _FLAGS[name]
            if (before := flag.get()) != value:
                self._before[name] = before
                flag.set(value)

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        while self._before:
            name, before = self._before.popitem()
            _FLAGS[name].set(before)
        if "deterministic" in self.flags and isinstance(error, RuntimeError) and _ALERT in str(error):
            operator = str(error).partition(_ALERT)[0]
            raise InputError(
                f"The operator {operator} has no deterministic algorithm on this device.",
                given=f"{operator} in the model or the loss, and an exact exchange",
                expected="operators that give the same bits each time",
                hint="compute it in another way, or set exact=False (exchange.exact in a recipe)",
            ) from error


class _Flag(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], None]


def _get_conv_tf32() -> bool:
    return bool(cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]


def _set_conv_tf32(on: bool) -> None:
    cudnn.allow_tf32 = on
    if _get_conv_tf32() != on:  # the older flag's "off" leaves it to `torch.backends.fp32_precision`
        cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]


def _get_matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by a newer flag
        return "high" if cuda.matmul.fp32_precision == "tf32" else "highest"


# For TF32 torch has newer flags too. What reads an older one, as torch.compile does, fails where the two disagree: so
# the older are set, which set both.
_FLAGS = {
    "cudnn_benchmark": _Flag(lambda: cudnn.benchmark, lambda on: setattr(cudnn, "benchmark", on)),
    "conv_tf32": _Flag(_get_conv_tf32, _set_conv_tf32),
    "float32_matmul_precision": _Flag(_get_matmul_precision, torch.set_float32_matmul_precision),
    "cudnn_deterministic": _Flag(lambda: cudnn.deterministic, lambda on: setattr(cudnn, "deterministic", on)),
    "deterministic": _Flag(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    # Torch fills what a deterministic operator allocates with NaN, unless told not to: no operator reads it.
    _FILL: _Flag(lambda: getattr(deterministic, _FILL), lambda on: setattr(deterministic, _FILL, on)),
}


def backends_of_steps(towers: Towers, device: torch.device, *, exact: bool) -> Backends:
    """The flags of a state's steps: those of the towers; of an exact exchange, deterministic ones, and all others off.

    Raises:
        InputError: an exact exchange is asked for, and cannot be had: cuBLAS has not been told in time, or the towers
            choose by timing.
    """
    flags = _flags({name: getattr(towers, name) for name in _OF_TOWERS}, exact=exact)
    if exact and device.type != "cpu":
        _check_exact(towers, device)
        flags |= {"cudnn_deterministic": True, "deterministic": _RAISES, _FILL: False}
    return Backends(device, flags)


def backends_of_scores(trained_with: Mapping[str, Any], device: torch.device) -> Backends:
    """The flags of the towers that a state was trained with, by its description: what a forward pass depends on."""
    towers, exchange = (trained_with.get(part, {}) for part in ("towers", "exchange"))
    return Backends(device, _flags({name: towers.get(name) for name in _OF_TOWERS}, exact=exchange.get("exact", False)))


def _flags(of_towers: Mapping[str, bool | None], *, exact: bool) -> dict[str, Any]:
    """The flags of torch for those of towers: of an exact exchange, what is left out is off."""
    flags: dict[str, Any] = {name: bool(on) if exact else on for name, on in of_towers.items()}
    flags["float32_matmul_precision"] = {None: None, True: "high", False: "highest"}[flags.pop("matmul_tf32")]
    return flags


def chosen_by_timing(towers: Towers, device: torch.device, *, exact: bool) -> list[str]:
    """The fields of towers by which each process times kernels of the device, and may take others than the next one."""
    benchmark = cudnn.benchmark if towers.cudnn_benchmark is None and not exact else towers.cudnn_benchmark
    timed = {"cudnn_benchmark": benchmark, "compile": towers.compile}
    return [name for name, is_on in timed.items() if is_on and device.type != "cpu"]


def _check_exact(towers: Towers, device: torch.device) -> None:
    if by_time := chosen_by_timing(towers, device, exact=True):
        raise InputError(
            "An exact exchange needs kernels that are not chosen by timing them.",
            given=f"exact=True, and Towers({by_time[0]}=True) on a GPU",
            expected=f"{by_time[0]} left off, or an exchange that is not exact",
            hint=f"leave {by_time[0]} out of the towers, or set exact=False (exchange.exact in a recipe)",
        )
    workspace = os.environ.get(_WORKSPACE)
    if torch.version.hip is None and workspace not in _DETERMINISTIC:
        raise InputError(
            "An exact exchange needs cuBLAS with deterministic sums, which it reads from the environment once.",
            given=f"no {_WORKSPACE}" if workspace is None else f"{_WORKSPACE}={workspace}",
            expected=f"{' or '.join(_DETERMINISTIC)}, before the process uses the GPU",
            hint=f"start it with {_WORKSPACE}={_DETERMINISTIC[0]} in the environment; lockstep train and lockstep run "
            "do, where it is not set",
        )
