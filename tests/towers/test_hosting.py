"""One worker's towers, in one process: what they add up, and what they leave as it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lockstep as ls
from lockstep.exchange.tree import PartialSum, TreeSum
from lockstep.optim.transforms import BoundTransforms
from lockstep.towers.hosting import StepInputs, TowerHost

if TYPE_CHECKING:
    from lockstep.exchange.tree import GradientHook
    from lockstep.types import LossFunction

NUM_EXAMPLES = 12


class Net(nn.Module):
    """A layer with batch norm, an unused parameter, and an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 3, sparse=True)
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 2)
        self.unused = nn.Parameter(torch.zeros(4))

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.linear(self.norm(self.embedding(tokens)))
        return output


def make_batch(num_towers: int, first: int = 0) -> ls.Batch:
    tokens = torch.arange(NUM_EXAMPLES) % 4  # row 4 is never looked up
    size = NUM_EXAMPLES // num_towers
    rows = slice(first * size, None)
    return ls.Batch(
        {"tokens": tokens[rows]}, position=24, batch_size=NUM_EXAMPLES, towers=range(first, num_towers), seed=3
    )


def make_host(model: nn.Module, num_towers: int, **options: object) -> TowerHost:
    towers = ls.Towers(num_towers, **options)  # type: ignore[arg-type]
    return TowerHost(model, dict(model.named_parameters()), towers, ls.join("cpu"), "model")


def run(host: TowerHost, losses: LossFunction, batch: ls.Batch, inputs: StepInputs | None = None) -> TreeSum:
    return host.run(losses, host.parts(batch), inputs or StepInputs())


def losses(model: nn.Module, batch: ls.Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    output = model(batch["tokens"])
    return {"square": output.square().mean(), "size": output.abs().mean()}, {"mean": output.detach().mean()}


def by_hand(model: Net, num_towers: int) -> tuple[dict[str, Tensor], float]:
    """The mean over the towers of each one's gradients, and of their objective."""
    total: Mapping[str, Tensor] | None = None
    parts = make_batch(num_towers)["tokens"].chunk(num_towers)
    objective = torch.zeros(())
    for part in parts:
        named, _ = losses(model, ls.Batch({"tokens": part}, position=0, batch_size=len(part), towers=range(1)))
        objective = objective + sum(named.values()) / num_towers
    names = [name for name, _ in model.named_parameters() if name != "unused"]
    found = torch.autograd.grad(objective, [model.get_parameter(name) for name in names])
    total = {name: g.to_dense() if g.is_sparse else g for name, g in zip(names, found, strict=True)}
    return dict(total), objective.item()


@pytest.mark.parametrize("num_towers", [1, 2, 3])
def test_totals_are_means_over_the_towers(num_towers: int) -> None:
    model = Net()
    expected, objective = by_hand(Net(), num_towers)
    host = make_host(model, num_towers)
    totals = host.outputs.unpacked(run(host, losses, make_batch(num_towers), StepInputs(extras=(7.0,))).total())
    assert sum(totals.losses.values()) == pytest.approx(objective)
    assert list(totals.losses) == ["square", "size"]
    assert list(host.outputs.metrics(totals.others)) == ["mean"]
    assert totals.others[1:] == [7.0]  # of the worker: once, not once a tower
    names = [name for name, _ in model.named_parameters()]
    for name, gradient in zip(names, totals.gradients, strict=True):
        if name not in {"unused", "embedding.weight"}:
            torch.testing.assert_close(gradient, expected[name])


def test_a_sparse_gradient_comes_back_as_its_rows() -> None:
    model = Net()
    expected, _ = by_hand(Net(), 2)
    host = make_host(model, 2)
    totals = host.outputs.unpacked(run(host, losses, make_batch(2)).total())
    index = [name for name, _ in model.named_parameters()].index("embedding.weight")
    assert totals.rows[index].tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(totals.gradients[index], expected["embedding.weight"][:4])


def test_missing_gradients_are_zeros_and_are_counted() -> None:
    model = Net()
    host = make_host(model, 3)
    totals = host.outputs.unpacked(run(host, losses, make_batch(3)).total())
    index = [name for name, _ in model.named_parameters()].index("unused")
    assert totals.absent is None, "a worker that is alone need not be told"
    assert host.absent == {index: 3}
    assert totals.gradients[index].tolist() == [0.0] * 4  # type: ignore[union-attr]


@pytest.mark.parametrize("fails", [False, True])
def test_buffers_and_random_streams_are_left_as_they_were(fails: bool) -> None:
    model = Net()
    host = make_host(model, 2)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    drawn: list[float] = []

    def draws(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        found = losses(model, batch)[0]
        drawn.append(torch.rand(()).item() + random.random() + np.random.rand())
        if fails and len(drawn) == 2:
            raise ValueError("the second tower fails")
        return found

    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    if fails:
        with pytest.raises(ValueError, match="the second tower fails"):
            run(host, draws, make_batch(2))
    else:
        run(host, draws, make_batch(2))
    assert drawn[0] != drawn[1]  # each tower has streams of its own
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]
    assert np.random.get_state()[1].tolist() == streams[2]  # type: ignore[index,union-attr]


def test_a_tower_draws_the_same_whoever_hosts_it() -> None:
    drawn: list[float] = []

    def draws(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        drawn.append(torch.rand(()).item())
        return losses(model, batch)[0]

    run(make_host(Net(), 3), draws, make_batch(3))
    run(make_host(Net(), 3), draws, make_batch(3, first=2))
    assert drawn[2] == drawn[3]
    assert len(set(drawn)) == 3


def test_a_tower_draws_its_own_once_whenever_and_wherever_it_begins_to() -> None:
    """From the third attempt on: in the loss function, where the streams are put back after it, and in a transform."""
    kept: list[object] = []

    def draw() -> None:
        kept.append((random.random(), random.gauss(0.0, 1.0), np.random.randn(), torch.rand(()).item()))

    def put_back() -> None:
        before, numpys = random.getstate(), np.random.get_state()
        draw()
        random.setstate(before)
        np.random.set_state(numpys)

    def drawn(in_losses: Callable[[], None], in_transform: Callable[[], None], idle: int) -> list[object]:
        kept.clear()
        calls: list[int] = []
        model = Net()
        parameters = dict(model.named_parameters())
        transforms = BoundTransforms([lambda gradients, step: in_transform() if step >= idle else None], parameters)
        host = TowerHost(model, parameters, ls.Towers(2), ls.join("cpu"), "model", transforms)
        for step in range(idle + 1):

            def draws(model: nn.Module, batch: ls.Batch, step: int = step) -> dict[str, Tensor]:
                calls.append(step)
                if step >= idle:
                    in_losses()
                return losses(model, batch)[0]

            random.gauss(0.0, 1.0)  # the second one is kept, for the caller
            np.random.randn()
            run(host, draws, make_batch(2), StepInputs(step))
        assert calls == sorted([*range(idle + 1)] * 2)
        return [*kept]

    def nothing() -> None:
        pass

    for ways in ((draw, nothing), (put_back, nothing), (nothing, draw)):
        assert drawn(*ways, idle=2) == drawn(*ways, idle=0)


@pytest.mark.parametrize("count", [0.0, 4.0])
def test_a_counted_loss_is_divided_by_its_count_over_all_towers(count: float) -> None:
    def sums(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        return {"sum": model(batch["tokens"]).square().sum()}

    plain, counted = make_host(Net(), 2), make_host(Net(), 2)
    whole = plain.outputs.unpacked(run(plain, sums, make_batch(2)).total()).losses["sum"]
    inputs = StepInputs(counts={"sum": count})
    found = counted.outputs.unpacked(run(counted, sums, make_batch(2), inputs).total()).losses["sum"]
    assert found == pytest.approx(whole * 2 / (count or 1))


def test_the_loss_scale_multiplies_gradients_alone() -> None:
    plain, scaled = make_host(Net(), 2), make_host(Net(), 2)
    expected = plain.outputs.unpacked(run(plain, losses, make_batch(2)).total())
    found = scaled.outputs.unpacked(run(scaled, losses, make_batch(2), StepInputs(loss_scale=4.0)).total())
    assert found.losses == expected.losses
    for gradient, unscaled in zip(found.gradients, expected.gradients, strict=True):
        assert torch.equal(gradient, unscaled * 4)  # type: ignore[arg-type,operator]


def test_new_statistics_are_means_of_the_changes() -> None:
    model = Net()
    host = make_host(model, 2)
    totals = host.outputs.unpacked(run(host, losses, make_batch(2)).total())
    new = dict(
        zip([name for name, _ in model.named_buffers()], host.statistics.combined(totals.statistics), strict=True)
    )
    means = [model.embedding(part).mean(0) for part in make_batch(2)["tokens"].chunk(2)]
    torch.testing.assert_close(new["norm.running_mean"], 0.1 * torch.stack(means).mean(0))
    assert new["norm.num_batches_tracked"] == 1


class Overlapped:
    """A connection that takes all gradients of the last tower as they come, and keeps what it got."""

    def __init__(self) -> None:
        self.before: list[int] = []
        self.came: dict[int, Tensor] = {}

    def start(self, sums: TreeSum, last: int) -> dict[int, GradientHook]:
        self.before.append(sum(node.span for node, _ in sums.nodes))
        return {index: partial(self.came.__setitem__, index) for index in range(sums.num_gradients)}

    def total(self, sums: TreeSum) -> PartialSum:
        return sums.total()

    def close(self) -> None:
        return


def test_the_tensors_of_a_tower_begin_where_those_of_another_worker_would() -> None:
    """Matrix products give other bits from addresses that are not aligned."""
    rows = torch.randn(6, 10)
    batch = ls.Batch({"x": rows, "name": list("abcdef")}, position=0, batch_size=6, towers=range(3))
    parts = [part.batch for part in make_host(Net(), 3).parts(batch)]
    assert [rows[2 * tower].data_ptr() % 64 != 0 for tower in range(3)] == [False, True, True]
    assert [part["x"].data_ptr() % 64 for part in parts] == [0, 0, 0]
    assert torch.equal(torch.cat([part["x"] for part in parts]), rows)
    assert parts[0]["x"].data_ptr() == rows.data_ptr(), "what is aligned is not copied"


@pytest.mark.parametrize("num_towers", [1, 2, 3])
def test_the_gradients_of_the_last_tower_are_told_as_they_come(num_towers: int) -> None:
    plain, host, overlapped = make_host(Net(), num_towers), make_host(Net(), num_towers), Overlapped()
    expected = run(plain, losses, make_batch(num_towers))
    batch = make_batch(num_towers)
    sums = host.run(losses, host.parts(batch), StepInputs(), overlapped)
    assert overlapped.before == [num_towers - 1]
    node, last = sums.nodes[-1]
    assert (node.start, node.span) == (num_towers - 1, 1), "it is beside the others"
    names = [name for name, _ in Net().named_parameters()]
    assert len(overlapped.came) == len(names) - 1
    for index, gradient in overlapped.came.items():
        assert torch.equal(gradient.to_dense() if gradient.is_sparse else gradient, last.tensors[index])
    assert all(map(torch.equal, sums.total().tensors, expected.total().tensors))


@pytest.mark.parametrize("reason", ["transforms", "joined", "reentrant"])
def test_nothing_is_told_early_where_the_backward_pass_has_to_end_first(reason: str) -> None:
    class Checkpointed(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            output: Tensor = checkpoint(self.linear, self.norm(self.embedding(tokens)), use_reentrant=True)
            return output

    model = Checkpointed() if reason == "reentrant" else Net()
    towers = ls.Towers(2, batch_norm="sync" if reason == "joined" else "mean")
    parameters = dict(model.named_parameters())
    clip = BoundTransforms([ls.optim.ClipValue(1.0)] if reason == "transforms" else [], parameters)
    host = TowerHost(model, parameters, towers, ls.join("cpu"), "model", clip)
    overlapped, batch = Overlapped(), make_batch(2)
    for _ in range(2):
        overlapped.came.clear()
        host.run(losses, host.parts(batch), StepInputs(), overlapped)
        assert overlapped.came == {}


def test_reentrant_checkpointing_that_begins_once_gradients_are_sent_is_refused() -> None:
    class Switched(Net):
        is_checkpointed = False

        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.norm(self.embedding(tokens))
            output: Tensor = (
                checkpoint(self.linear, hidden, use_reentrant=True) if self.is_checkpointed else self.linear(hidden)
            )
            return output

    model = Switched()
    host, batch = make_host(model, 2), make_batch(2)
    host.run(losses, host.parts(batch), StepInputs(), Overlapped())
    model.is_checkpointed = True
    with pytest.raises(ls.InputError, match="begins after the first step"):
        host.run(losses, host.parts(batch)[1:], StepInputs(), Overlapped())
