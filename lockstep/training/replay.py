"""Making an attempt again, on this worker and on all others, which tells a bad device from bad data.

That is done to an attempt that is not finite, to one at which the copies of the model are found to differ, and to one
tower of each `replay_steps`-th one: a tower of another worker each time. The tower's part of the batch goes to all
workers, through an exchange of bytes, and each of them computes its losses and gradients before it computes its own.
So all that is computed is the attempt itself, to its bits; a device that errs now and then is seen where it errs in a
tower that is looked at, and one that always does at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.checkpoints.encoding import can_encode, decode_tensors, encode_tensors
from lockstep.exchange.exchange import TransportName
from lockstep.exchange.tree import PartialSum
from lockstep.ragged import Ragged
from lockstep.screen import log
from lockstep.tensors import write_values
from lockstep.towers.hosting import TowerBatch, TowerHost
from lockstep.towers.statistics import restored
from lockstep.training.attempt import Given
from lockstep.training.handing_over import passed_on
from lockstep.training.memory import is_lack_of_memory
from lockstep.training.replicas import Replicas, checksum_of
from lockstep.training.state import TrainState
from lockstep.training.verdict import NO_MEMORY, Judgement, TowerResult, judge, result_of
from lockstep.types import Batch, FaultError, ReplayVerdict
from lockstep.workers.devices import describe_accelerator, describe_cpu, describe_machine
from lockstep.workers.group import unlike_most
from lockstep.workers.rank import Worker

ALIGNMENT_BYTES = 512
"""Kernels of a CPU and of a GPU look at no more of an address when they choose how to compute."""
MORE_RUNS = 3
"""How often each worker makes an attempt again once more, where the first time has not given the same everywhere."""
_PARTS = "parts"


class Replay:
    """Makes attempts of a state again; all workers call its functions together.

    Args:
        transport: by which parts of batches travel.
        problem: why no attempt of these towers can be made again; empty where it can.
        inexact: why workers may come to other bits than each other; empty where they do not.
    """

    def __init__(
        self,
        state: TrainState,
        host: TowerHost,
        worker: Worker,
        transport: TransportName | None,
        problem: str = "",
        inexact: str = "",
    ) -> None:
        self._state, self._host, self._worker, self._transport = state, host, worker, transport
        self._problem, self._inexact, self._is_over = problem, inexact, False
        self._told: set[str] = set()
        self._sent: _Sent | None = None
        self._results: list[TowerResult] = []
        """The tower that is looked at now: made again, and then, on the worker that hosts it, the tower itself."""
        self._found: ReplayVerdict | None = None

    # Each so many updates ---------------------------------------------------------------------------------------------

    def begin(self, given: Given) -> bool:
        """Make one tower of an attempt again, before the attempt itself, where that is due; returns whether it is.

        Raises:
            FaultError: a worker has other weights than the others.
        """
        self._host.tap = None  # of an attempt that an error has cut short
        every, step = self._state.replay_steps, given.inputs.step
        if not every or not step or step % every or self._is_over or self._host.outputs.names is None:
            return False
        owner, turn = step // every % self._worker.num_workers, step // every // self._worker.num_workers
        parts = self._host.parts(given.batch_again())
        part = parts[turn % len(parts)]
        sent = self._send(given, owner, [part])
        if sent is None:
            return False
        self._sent, self._results = sent, [self._result(given, sent)]
        if owner == self._worker.rank:
            self._host.tap = part.tower, self._listen
        return True

    def _listen(self, operand: PartialSum) -> None:
        assert self._host.tap is not None, "it was called by it"
        self._results.append(result_of([self._host.values[self._host.tap[0]]], operand.tensors))

    def end(self, given: Given) -> bool:
        """Compare what `begin` has found with the attempt; returns whether towers have run again since.

        Raises:
            FaultError: it is a device.
        """
        sent, self._sent, self._host.tap = self._sent, None, None
        if sent is None:
            return False
        gathered = [[TowerResult(*each) for each in results] for results in self._worker.group.gather(self._results)]
        again = [results[0] for results in gathered]
        judgement = self._judge(given, sent, gathered[sent.owner][1], [sent.owner], again)
        if judgement is None:
            return NO_MEMORY not in again  # where one had none later, they have run several times
        if judgement.cause == "data":
            return False
        verdict = self._verdict(given, judgement)
        if verdict.cause == "device":
            raise self._error(given, verdict)
        self._found, self._is_over = verdict, True
        if self._worker.is_chief:
            log.warning("step %d: %s; no more attempts that are finite are made again", verdict.step, verdict.said)
        return True

    def has_passed(self, given: Given) -> None:
        """Keep in mind that an attempt was not finite, and that it is, made again to be read at once."""
        said = "it was not finite at first, and is when made again: a fault of a device that has passed, or an operator"
        said, names = f"{said} that is not deterministic", range(self._worker.num_workers)
        self._found = self._verdict(given, Judgement("unclear", names, said))
        if self._worker.is_chief:
            log.warning("step %d: %s", given.inputs.step, said)

    def found(self) -> ReplayVerdict | None:
        """Return, once, what has been found since the last call, of attempts that were finite."""
        found, self._found = self._found, None
        return found

    # After an error ---------------------------------------------------------------------------------------------------

    def of_nonfinite(self, given: Given, certainty: int) -> ReplayVerdict | None:
        """Make an attempt again that is not finite; nothing has run since.

        The certainty is 2 where this worker's towers are not finite, 1 where theirs may be, 0 where they are finite.
        Returns None where it cannot be made again, or the sum over all workers alone is not finite.
        """
        of_all = self._worker.group.gather(certainty)
        most = max(of_all)
        suspects = [rank for rank, each in enumerate(of_all) if each == most]
        suspects = suspects[:1] if most == 2 else suspects
        original = TowerResult(result_of([*self._host.values.values()], []).values, False, None)
        try:
            parts = self._host.parts(given.batch_again())
            sent = self._send(given, suspects[0], parts, in_outline=True) if most else None
        except FaultError as error:
            return error.verdict._replace(position=given.batch.position)
        if sent is None:
            return None
        gathered = self._worker.group.gather([original, self._result(given, sent)])
        results = [TowerResult(*result) for _, result in gathered]
        first = TowerResult(*gathered[sent.owner][0])
        # Not to the bits, which are not the same each time where an operator is not deterministic, as on most GPUs.
        judgement = self._judge(given, sent, first, suspects, results, in_outline=True)
        return None if judgement is None else self._verdict(given, judgement)

    def of_replicas(self, error: FaultError, given: Given) -> FaultError:
        """Say whether devices err, too, where copies of the model differ: all compute with one of the copies."""
        weights = self._weights()
        reference, _ = unlike_most(self._worker.group.gather(self._checksum()))
        sent = self._send(given, reference, self._host.parts(given.batch_again()), may_differ=True)
        if sent is None:
            return error
        with restored(weights):
            self._take_over(weights, reference)
            gathered = self._worker.group.gather(self._result(given, sent))
            results = [TowerResult(*result) for result in gathered]
            judgement = self._judge(given, sent, None, [], results)
        if judgement is None:
            return error
        verdict = self._verdict(given, judgement)
        if judgement.cause != "device":
            words = "made again, it gives the same on all" if judgement.cause == "data" else judgement.words
            said = f"{error.verdict.said}; with the weights of {self._worker.group.names[reference]}, {words}"
            verdict = error.verdict._replace(said=said, position=given.batch.position)
        hint = f"{verdict.said}; {error.hint}"
        return FaultError(error.what, given=error.given, expected=error.expected, hint=hint, verdict=verdict)

    # Its parts --------------------------------------------------------------------------------------------------------

    def _send(
        self,
        given: Given,
        owner: int,
        parts: Sequence[TowerBatch],
        *,
        may_differ: bool = False,
        in_outline: bool = False,
    ) -> _Sent | None:
        """Have all workers get some parts of the batch of one of them; the others' `parts` do not matter.

        Where they `may_differ` the workers need not have the same weights, and what is looked at `in_outline` not the
        same bits.

        Returns:
            None where that cannot be done, which is told once.

        Raises:
            FaultError: the workers do not have the same weights, and do not have to differ.
        """
        worker, problem, packed = self._worker, self._problem, b""
        if not in_outline:
            problem = problem or self._inexact
        if given.has_changed():
            problem = problem or "the loss function changes its batch in place"
        if worker.rank == owner and not problem:
            try:
                packed = _packed(parts, {*given.fields})
            except Exception as error:  # whatever it is, the others wait
                problem = str(error) if isinstance(error, _NotSentError) else f"the batch is not sent: {error!r:.200}"
        kind = f"{_kind(worker.device)}, {torch.get_num_threads()} threads"
        gathered = worker.group.gather([problem, self._checksum(), kind, len(packed)])
        if problem := next((each[0] for each in gathered if each[0]), ""):
            self._tell(problem)
            return None
        if len({each[1] for each in gathered}) > 1 and not may_differ:
            raise Replicas(self._state, worker).error()
        alike = [rank for rank, each in enumerate(gathered) if each[2] == gathered[owner][2]]
        return _Sent(owner, alike, self._passed_on(packed, gathered[owner][3]))

    def _tell(self, problem: str) -> None:
        """Say, once, why no attempt is made again."""
        if self._worker.is_chief and problem not in self._told:
            log.info("no attempt is made again to tell a bad device from bad data: %s", problem)
        self._told.add(problem)

    def _passed_on(self, own: bytes, num_bytes: int) -> bytes:
        if self._worker.num_workers == 1:
            return own
        return bytes(passed_on([own], num_bytes, self._worker, self._transport)[:num_bytes].numpy())

    def _result(self, given: Given, sent: _Sent) -> TowerResult:
        """Run the towers that were sent; what that raises is a result, too, as the others wait for it."""
        try:
            parts = sent.unpacked(given.batch, self._worker.device)
            for part in parts if given.counts else []:
                given.counts(part.batch)  # type: ignore[misc]
            with torch.enable_grad(), restored(self._state.other_buffers()):
                total = self._host.run(given.losses, parts, given.inputs).total()
        except Exception as error:
            return NO_MEMORY if is_lack_of_memory(error) else TowerResult([f"raised {error!r:.200}"], False, None)
        return result_of([self._host.values[part.tower] for part in parts], total.tensors)

    def _judge(
        self,
        given: Given,
        sent: _Sent,
        original: TowerResult | None,
        suspects: Sequence[int],
        results: Sequence[TowerResult],
        *,
        in_outline: bool = False,
    ) -> Judgement | None:
        """Judge what all workers know, by what is finite or to the bits; where not all is the same they run again.

        Returns:
            None where a worker has no memory for it, which is told once, and says nothing of its device.
        """

        def seen(result: TowerResult) -> TowerResult:
            return result.outline() if in_outline else result

        names = self._worker.group.names
        runs = [[seen(each)] for each in results]
        original = original and seen(original)
        first = original or runs[sent.owner][0]
        if NO_MEMORY not in results and not all(runs[rank][0].agrees_with(first) for rank in sent.alike):
            more = self._worker.group.gather([self._result(given, sent) for _ in range(MORE_RUNS)])
            for found, again in zip(runs, more, strict=True):
                found += [seen(TowerResult(*each)) for each in again]
        if lacking := [name for name, found in zip(names, runs, strict=True) if NO_MEMORY in found]:
            self._tell(f"{lacking[0]} has no memory for one more copy of a tower's part of a batch")
            return None
        return judge(original, suspects, {rank: runs[rank] for rank in sent.alike}, names)

    def _verdict(self, given: Given, judgement: Judgement) -> ReplayVerdict:
        suspects = tuple(self._worker.group.names[rank] for rank in judgement.workers)
        return ReplayVerdict(judgement.cause, judgement.words, suspects, given.inputs.step, given.batch.position)

    def _error(self, given: Given, verdict: ReplayVerdict) -> FaultError:
        return FaultError(
            f"The attempt after step {verdict.step} is not the same when it is made again.",
            given=verdict.said,
            expected="the same bits each time, on every worker",
            hint=f"leave {' and '.join(verdict.suspects)} out, or look after its device; then go on from the last "
            "checkpoint. If an operator is to blame, set verify.replay=0",
            verdict=verdict,
        )

    def _weights(self) -> list[Tensor]:
        """What a forward pass uses of the state."""
        sections = self._state.sections()
        return [*sections["parameters"].values(), *sections["buffers"].values()]

    def _checksum(self) -> int:
        return int(checksum_of([t for t in self._weights() if t.device == self._worker.device], 0))

    def _take_over(self, weights: Sequence[Tensor], source: int) -> None:
        """Write the weights of another worker over this one's."""
        own = b""
        if self._worker.rank == source:
            own = b"".join(encode_tensors({str(index): tensor for index, tensor in enumerate(weights)}))
        [num_bytes] = filter(None, self._worker.group.gather(len(own)))
        found = decode_tensors(self._passed_on(own, num_bytes))
        if self._worker.rank != source:
            with torch.no_grad():
                for index, tensor in enumerate(weights):
                    write_values(tensor, found[str(index)])


@cache
def _kind(device: torch.device) -> str:
    """The kind of machine: another one rounds differently, and is no witness."""
    return str([describe_machine(), describe_cpu(), describe_accelerator(device)])


# Parts of a batch as bytes --------------------------------------------------------------------------------------------


class _NotSentError(Exception):
    """A field of a batch has what no other worker can be sent."""


class _Sent(NamedTuple):
    """Parts of the batch of one worker, which all have."""

    owner: int
    alike: list[int]
    """The workers whose machines are of the kind of the owner's, by rank."""
    data: bytes

    def unpacked(self, like: Batch, device: torch.device) -> list[TowerBatch]:
        """Make the parts anew, with memory of their own; `like` is this worker's part of the batch."""
        tensors = decode_tensors(self.data)
        made = []
        for leaf, tower, towers, fields in json.loads(bytes(tensors[_PARTS].numpy())):
            values = {name: _unpacked(each, tensors, device) for name, each in fields.items()}
            part = replace(like, fields=values, towers=range(*towers), bad=(), loader=None)
            made.append(TowerBatch(leaf, tower, part))
        return made


def _packed(parts: Sequence[TowerBatch], names: set[str]) -> bytes:
    """Pack the fields of these names: their tensors, and JSON that says what they are.

    Raises:
        _NotSentError: a field has another kind of value.
    """
    tensors: dict[str, Tensor] = {}
    packed = []
    for leaf, tower, batch in parts:
        fields = {name: _value(name, value, tensors) for name, value in batch.items() if name in names}
        packed.append([leaf, tower, [batch.towers.start, batch.towers.stop], fields])
    tensors[_PARTS] = torch.frombuffer(bytearray(json.dumps(packed).encode()), dtype=torch.uint8)
    return b"".join(encode_tensors(tensors))


def _value(name: str, value: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Describe a value of a field; its tensors are added to those given."""
    if isinstance(value, Tensor) and can_encode(value):
        # The format keeps elements in their order, and no strides, by which torch chooses kernels.
        order = sorted(range(value.ndim), key=value.stride, reverse=True)
        number = str(len(tensors))
        tensors[number] = value.permute(order)
        place, is_here = value.data_ptr() % ALIGNMENT_BYTES, value.device.type == "cpu"
        return {"tensor": number, "order": order, "strides": value.stride(), "place": place, "is_here": is_here}
    if isinstance(value, Ragged):
        return {"values": _value(name, value.values, tensors), "lengths": _value(name, value.lengths, tensors)}
    if isinstance(value, list):
        return {"list": [_value(name, each, tensors) for each in value]}
    if value is None or isinstance(value, str | int | float):
        return {"plain": value}
    kind = f"{value.dtype}, {value.layout}" if isinstance(value, Tensor) else type(value).__name__
    raise _NotSentError(f"the field {name!r} of the batch has values that are not sent to others: {kind}")


def _unpacked(packed: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    if "tensor" in packed:
        order = packed["order"]
        value = _placed(
            tensors[packed["tensor"]], packed["place"], torch.device("cpu") if packed["is_here"] else device
        )
        value = value.permute([order.index(dimension) for dimension in range(len(order))])
        sizes = zip(value.shape, value.stride(), packed["strides"], strict=True)
        if all(mine == theirs for size, mine, theirs in sizes if size > 1):  # not where it had gaps, or was expanded
            value = value.as_strided(value.shape, packed["strides"])
        return value
    if "values" in packed:
        return Ragged(*(_unpacked(packed[each], tensors, device) for each in ("values", "lengths")))
    if "list" in packed:
        return [_unpacked(each, tensors, device) for each in packed["list"]]
    return packed["plain"]


def _placed(tensor: Tensor, place: int, device: torch.device) -> Tensor:
    """Copy a contiguous tensor to memory that begins as many bytes after a multiple of `ALIGNMENT_BYTES`.

    The second tower of a batch begins where the first one ends, and a product of matrices that do not begin on whole
    vectors is rounded otherwise.
    """
    memory = torch.empty(tensor.nbytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    start = (place - memory.data_ptr()) % ALIGNMENT_BYTES
    return memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
