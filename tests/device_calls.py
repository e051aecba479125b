"""What a step would ask of an accelerator, counted on CPU tensors: where the host waits, and what is launched.

Inside `accelerator()` the package takes the branches of a device whose numbers cannot be read at once. Inside
`counted()` each tensor is the device's, but for those that are made on the host: by a function of torch that is given
no `device`, by `cpu()`, `to("cpu")` or `pin_memory()`, and what is computed from these alone. So a copy between the two
is seen, and an operation that takes both is refused, as CUDA refuses it. What `lockstep.tensors` copies is known to be
on its way: to read it waits only where the device has been given nothing to do since. What the loader does to make
a batch is not counted, and the batch is the device's.

    with accelerator():
        state = make_state()
        train(state)  # what the first step alone does is not counted
        with counted() as calls:
            train(state)
    assert not calls.waits
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from lockstep import tensors

QUEUED = 10
"""A number has come where so many launches followed its copy to the host: the device has work meanwhile."""
_CHUNK_ELEMENTS, _MAX_BLOCKS = 65536, 320
_MAX_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""What one launch of a foreach kernel takes, by the number of its lists: torch's MultiTensorApply.cuh (4 KB)."""
_FACTORIES = {torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, torch.from_numpy, torch.frombuffer}
_FACTORIES |= {torch.zeros, torch.ones, torch.full, torch.empty, torch.empty_strided, torch.arange, torch.linspace}
_FACTORIES |= {torch.eye, torch.rand, torch.randn, torch.randint, torch.randperm}
_FROM_NUMBERS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
_SIZED_BY_VALUES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "equal"}
_SIZED_BY_VALUES |= {"_coalesce", "allclose", "nms"}
"""Operations whose result the host cannot size, or have, before it has read from the device."""
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "is_pinned"}
_FREE |= {"lift_fresh", "_local_scalar_dense", "set_", "resize_"}
"""Operations that launch nothing; views launch nothing either."""
_OURS, _TORCH = str(Path(tensors.__file__).parent), str(Path(torch.__file__).parent)
_LOADER = (f"{_OURS}/data/", f"{_OURS}/readers/")
_READBACK = ("numbers_on", "tensor_on", "Readback.")


class Call(NamedTuple):
    """One call, and the line that made it: the innermost of Lockstep, or else of whoever called torch."""

    what: str
    line: str


@dataclass
class DeviceCalls:
    """What was counted."""

    waits: list[Call] = field(default_factory=list)
    """Reads of the device by the host, and copies to it from memory that is not pinned."""
    mixed: list[Call] = field(default_factory=list)
    """Foreach calls with a list of two dtypes: torch's CUDA kernels take such a list tensor by tensor."""
    launches: Counter[Call] = field(default_factory=Counter)
    """Kernels and copies, at least one for each operation that is no view."""

    @property
    def num_launches(self) -> int:
        """The number of all launches."""
        return self.launches.total()

    def by_line(self) -> dict[str, int]:
        """The launches of each line, most of them first."""
        lines: Counter[str] = Counter()
        for call, count in self.launches.items():
            lines[call.line] += count
        return dict(lines.most_common())


@contextmanager
def accelerator() -> Iterator[None]:
    """Have the package treat CPU tensors as those of a device that the host must wait for to read a number."""
    with patch.object(tensors, "READ_AT_ONCE", frozenset()):
        yield


@contextmanager
def counted(*, refuse_waits: bool = False) -> Iterator[DeviceCalls]:
    """Count what the calls inside ask of the device; they may be those of several steps.

    With `refuse_waits` what would wait raises a RuntimeError instead, as in torch's sync debug mode "error".
    """
    calls = DeviceCalls()
    host = _Host(calls, refuse_waits=refuse_waits)
    with _Operations(host), _Functions(host):
        yield calls


@dataclass
class _Memory:
    tensor: Tensor
    """Kept, so that its address stays its own."""
    is_pinned: bool = False
    copied_at: int | None = None
    """Launches before the device's copy to it began; None: it holds nothing of the device's."""


class _Host:
    """The memory of the host, and what it means to read from it, or from the device."""

    def __init__(self, calls: DeviceCalls, *, refuse_waits: bool = False) -> None:
        self.calls, self._refuse_waits = calls, refuse_waits
        self.makes_own = False
        """Whether what is made now is the host's."""
        self._memory: dict[int, _Memory] = {}

    def memory_of(self, tensor: Tensor) -> _Memory | None:
        return self._memory.get(_address(tensor)) if tensor.layout == torch.strided else None

    def take(self, result: Any) -> Any:
        """What was made is the host's."""
        for tensor in _tensors(result):
            self._memory.setdefault(_address(tensor), _Memory(tensor))
        return result

    def take_copy(self, tensor: Tensor, *, is_pinned: bool = False, copied_at: int | None = None) -> Tensor:
        """A copy of a tensor in memory of the host."""
        copy = _copy(tensor)
        self._memory[_address(copy)] = _Memory(copy, is_pinned, copied_at)
        return copy

    def give(self, result: Any) -> Any:
        """What was made is the device's."""
        for tensor in _tensors(result):
            self._memory.pop(_address(tensor), None)
        return result

    def note_wait(self, what: str) -> None:
        self.calls.waits.append(Call(what, _line()))
        if self._refuse_waits:
            raise RuntimeError(f"the host would wait: {what}, at {_line()}")

    def note_launches(self, what: str, count: int = 1) -> None:
        self.calls.launches[Call(what, _line())] += count

    def read(self, tensor: Tensor, what: str) -> None:
        """The host reads values: they are its own, or have come, or it waits."""
        memory = self.memory_of(tensor)
        if memory is None:
            if not _in_readback():  # else it is older than the counting
                self.note_launches(what)
                self.note_wait(what)
        elif memory.copied_at is not None and self.calls.num_launches - memory.copied_at < QUEUED:
            self.note_wait(f"{what} of what has just been copied")
            memory.copied_at = None

    def copy_from_device(self, tensor: Tensor, what: str, *, waits: bool) -> Tensor:
        self.note_launches(what)
        if waits:
            self.note_wait(what)
        return self.take_copy(tensor, is_pinned=not waits, copied_at=None if waits else self.calls.num_launches)

    def note_copy_to_device(self, source: Tensor, what: str, *, non_blocking: bool) -> None:
        self.note_launches(what)
        memory = self.memory_of(source)
        if not (memory and memory.is_pinned and non_blocking):
            self.note_wait(f"{what} from memory that is not pinned" if non_blocking else what)


class _Functions(TorchFunctionMode):
    """Sees the calls of Python: what they say of devices, and reads that torch makes without an operation."""

    def __init__(self, host: _Host) -> None:
        super().__init__()
        self._host = host

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, host = dict(kwargs or {}), self._host
        if _in_loader():
            return function(*args, **given)
        if function in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            host.read(args[0], function.__name__)
        elif function in (torch.prod, Tensor.prod) and args[0].requires_grad:
            host.note_wait("prod, whose gradient reads whether there are zeros")  # but not where a mode of torch is on
        elif function is Tensor.pin_memory:
            return host.take_copy(args[0], is_pinned=True)
        elif function is Tensor.is_pinned:
            memory = host.memory_of(args[0])
            return bool(memory and memory.is_pinned)
        elif function in (Tensor.to, Tensor.cpu):
            return self._moved(function, args, given)
        elif function in _FROM_NUMBERS and (given.get("device") is not None or function is Tensor.new_tensor):
            if not isinstance(args[0 if function is not Tensor.new_tensor else 1], Tensor):
                host.note_launches(function.__name__)
                host.note_wait(f"{function.__name__} of numbers of the host")
            return host.give(function(*args, **given))
        elif function in _FACTORIES and given.get("device") is None and not any(map(_is_tensor, args)):
            return self._made(function, args, given)
        return function(*args, **given)

    def _made(self, function: Callable[..., Any], args: Any, given: dict[str, Any]) -> Any:
        """What a factory makes for the host."""
        host, is_pinned = self._host, bool(given.pop("pin_memory", False))
        if _in_readback():  # numbers that it sends to the device
            host.note_launches("numbers of the host")
            return host.give(function(*args, **given))
        host.makes_own = True
        try:
            made = function(*args, **given)
        finally:
            host.makes_own = False
        return host.take_copy(made, is_pinned=True) if is_pinned else host.take(made)

    def _moved(self, function: Callable[..., Any], args: Any, given: dict[str, Any]) -> Any:
        """A tensor after `to` or `cpu`, which do nothing to a CPU tensor: a copy where it changes sides."""
        host, source = self._host, args[0]
        target = given.get("device", args[1] if len(args) > 1 else None)
        non_blocking = bool(given.get("non_blocking", args[-1] if isinstance(args[-1], bool) else False))
        is_host = host.memory_of(source) is not None
        if function is Tensor.cpu or target == "cpu":
            return source if is_host else host.copy_from_device(source, "copy to the host", waits=not non_blocking)
        to_device = isinstance(target, torch.device) or (isinstance(target, Tensor) and host.memory_of(target) is None)
        if not (is_host and to_device):
            return function(*args, **given)
        host.note_copy_to_device(source, "copy to the device", non_blocking=non_blocking)
        return host.give(function(_copy(source), *args[1:], **given))


class _Operations(TorchDispatchMode):
    """Sees the operations, those of the backward pass among them."""

    def __init__(self, host: _Host) -> None:
        super().__init__()
        self._host = host

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, host = dict(kwargs or {}), self._host
        if _in_loader():
            return operation(*args, **given)
        name = operation._schema.name.partition("::")[2]
        tensors = _tensors((args, given))
        mine = [host.memory_of(tensor) for tensor in tensors]
        if name == "_local_scalar_dense":
            host.read(tensors[0], "item")
        elif name == "clone" and _in_readback():
            host.note_launches("copy to the host")
            return host.take_copy(args[0], is_pinned=True, copied_at=host.calls.num_launches)
        elif host.makes_own or name == "lift_fresh" or (mine and all(mine)):
            return host.take(operation(*args, **given))
        elif name == "copy_" and any(mine):
            self._note_copy(*args[:2], non_blocking=bool(given.get("non_blocking", len(args) > 2 and args[2])))
        else:
            if any(mine):
                self._check_mixing(name, tensors, args)
            self._note(name, operation, args, given)
        return operation(*args, **given)

    def _note(self, name: str, operation: Any, args: Any, given: dict[str, Any]) -> None:
        """Note what an operation of the device launches, and whether the host waits for it."""
        host = self._host
        if name.startswith(("_foreach_", "_fused_")) and isinstance(args[0], list | tuple):
            lists = _lists(operation, args, given)
            if any(len({t.dtype for t in each}) > 1 for each in lists):
                host.calls.mixed.append(Call(name, _line()))
            launches = foreach_launches(name, lists, returns_new=not name.endswith("_"))
            if any(isinstance(arg, Tensor) and arg.dtype != lists[0][0].dtype for arg in args[1:]):
                launches = len(lists[0])  # torch casts a number of another dtype for each tensor
            host.note_launches(name, launches)
            return
        reads = name in _SIZED_BY_VALUES or (name == "repeat_interleave" and given.get("output_size") is None)
        if reads or (name in ("index", "index_put_", "index_put") and self._reads_mask(name, args)):
            host.note_wait(name)
        if name not in _FREE and not _is_view(operation):
            host.note_launches(name)

    def _reads_mask(self, name: str, args: Any) -> bool:
        """Whether an index has to be made of the values of a mask; one number at a mask's places needs none."""
        has_mask = any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1]))
        fills = name != "index" and args[2].numel() == 1 and self._host.memory_of(args[2]) is not None
        return has_mask and not fills

    def _note_copy(self, to: Tensor, source: Tensor, *, non_blocking: bool) -> None:
        host = self._host
        memory = host.memory_of(to)
        if memory is None:
            host.note_copy_to_device(source, "copy_ to the device", non_blocking=non_blocking)
            return
        host.note_launches("copy_ to the host")
        waits = not (memory.is_pinned and non_blocking)
        if waits:
            host.note_wait("copy_ to the host")
        memory.copied_at = None if waits else host.calls.num_launches

    def _check_mixing(self, name: str, tensors: Sequence[Tensor], args: Any) -> None:
        """Refuse tensors of both sides, but for single numbers of the host in arithmetic, and the host's indices."""
        if name in ("index", "index_put_", "index_put"):
            if any(self._host.memory_of(index) is not None for index in _tensors(args[1])):
                self._host.note_wait(f"{name} by numbers of the host")
            return
        whole = [t for t in tensors if t.ndim and self._host.memory_of(t) is not None]
        takes_lists = name in ("cat", "stack") or name.startswith("_foreach_")
        if whole or takes_lists:
            raise AssertionError(f"{name} takes tensors of the host and of the device, at {_line()}")


def foreach_launches(name: str, lists: Sequence[Sequence[Tensor]], *, returns_new: bool) -> int:
    """Count the launches of torch's CUDA kernel for lists of tensors: chunks, or each tensor alone on the slow path.

    The conditions are those of torch's ForeachUtils.h, and of MultiTensorApply.cuh.
    """
    if not name.startswith("_fused_") and not _takes_fast_path(name, lists):
        return len(lists[0])
    launches = tensors = blocks = 0
    depth = len(lists) + returns_new * (name != "_foreach_norm")
    for elements in filter(None, (t.numel() for t in lists[0])):
        tensors += 1
        num_chunks = -(-elements // _CHUNK_ELEMENTS)
        for chunk in range(num_chunks):
            blocks += 1
            is_last = chunk == num_chunks - 1
            if blocks == _MAX_BLOCKS or (is_last and tensors == _MAX_TENSORS[depth]):
                launches += 1
                blocks, tensors = 0, int(not is_last)
    extra = 2 if name == "_foreach_norm" else 0  # zeros for the parts, and their sums
    return launches + bool(blocks) + extra


def _takes_fast_path(name: str, lists: Sequence[Sequence[Tensor]]) -> bool:
    dtypes = [{t.dtype for t in each} for each in lists]
    if any(len(each) > 1 for each in dtypes) or (len(set.union(*dtypes)) > 1 and name != "_foreach_copy_"):
        return False
    return all(
        t.shape == first.shape and _strides(t) == _strides(first) and _is_dense(t)
        for each in lists
        for t, first in zip(each, lists[0], strict=True)
    )


def _strides(tensor: Tensor) -> list[int]:
    """The strides that count: of dimensions of more than one."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def _is_dense(tensor: Tensor) -> bool:
    with _disable_current_modes():
        dense: bool = torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
    return dense


def _lists(operation: Any, args: Any, given: Mapping[str, Any]) -> list[Sequence[Tensor]]:
    """The lists of tensors that a foreach or fused operation walks: not the steps, which it only looks up."""
    named = dict(zip((a.name for a in operation._schema.arguments), args, strict=False)) | given
    return [
        value
        for key, value in named.items()
        if key != "state_steps" and isinstance(value, list | tuple) and value and isinstance(value[0], Tensor)
    ]


def _is_view(operation: Any) -> bool:
    returned = operation._schema.returns
    return bool(returned) and all(each.alias_info and not each.alias_info.is_write for each in returned)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _copy(tensor: Tensor) -> Tensor:
    with _disable_current_modes():
        return tensor.detach().clone()


def _in_readback() -> bool:
    """Whether the innermost function of Lockstep on the stack sends numbers to the device, or reads them from it."""
    ours = next((frame.f_code for frame in _stack() if frame.f_code.co_filename.startswith(_OURS)), None)
    return ours is not None and ours.co_filename == tensors.__file__ and ours.co_qualname.startswith(_READBACK)


def _in_loader() -> bool:
    return any(frame.f_code.co_filename.startswith(_LOADER) for frame in _stack())


def _line() -> str:
    """The innermost line of Lockstep on the stack, or else of whoever called torch."""
    caller = ""
    for frame in _stack():
        path, line = frame.f_code.co_filename, frame.f_lineno
        if path.startswith(_OURS):
            return f"{path[len(_OURS) + 1 :]}:{line}"
        if not caller and path != __file__ and not path.startswith((_TORCH, "<")):
            caller = f"{Path(path).name}:{line}"
    return caller


def _stack() -> Iterator[FrameType]:
    """The frames that are being run, from the innermost one."""
    frame: FrameType | None = sys._getframe(1)
    while frame:
        yield frame
        frame = frame.f_back
