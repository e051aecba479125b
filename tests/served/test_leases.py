"""The rule of the served exchanges, by hand and over random orders of everything that can happen."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.served.leases import Futile, Leases, SliceLease


def leases(
    num_workers: int, required: int, staleness: int | None = 0, *, epoch_size: int = 0, slice_size: int = 2
) -> Leases:
    made = Leases(
        count(0, slice_size),
        slice_size=slice_size,
        epoch_size=epoch_size,
        num_workers=num_workers,
        required=required,
        staleness=staleness,
    )
    made.publish()
    return made


def slices(update: Iterable[SliceLease] | None) -> list[int] | None:
    return None if update is None else [lease.slice for lease in update]


# By hand --------------------------------------------------------------------------------------------------------------


def test_where_all_are_required_an_update_is_a_batch_whoever_asks_first():
    rule = leases(3, 3)
    for version, order in enumerate([(2, 3, 1), (1, 2, 3), (3, 1, 2)]):
        starts = {worker: rule.begin(worker) for worker in order}
        assert starts == {worker: 6 * version + 2 * (worker - 1) for worker in order}
        for worker in reversed(order):
            assert rule.take() is None
            assert rule.arrive(worker, starts[worker], version)
            assert rule.begin(worker) is None
        assert slices(rule.take()) == [6 * version, 6 * version + 2, 6 * version + 4]
        assert rule.begin(1) is None, "the parameters of the new version are not published yet"
        rule.publish()


def test_a_late_gradient_is_dropped_and_its_slice_goes_to_whoever_asks_next():
    rule = leases(3, 2)
    assert [rule.begin(worker) for worker in (1, 2, 3)] == [0, 2, 4]
    assert rule.arrive(1, 0, 0)
    assert rule.arrive(3, 4, 0)
    assert slices(rule.take()) == [0, 4]
    assert rule.unfinished() == (6, [2])
    rule.publish()
    assert rule.begin(3) == 2
    assert not rule.arrive(2, 2, 0)
    assert rule.dropped == {2: 1}
    assert rule.used == {1: 1, 3: 1}


def test_a_worker_that_has_done_its_part_waits_for_others_but_not_for_one_that_was_late():
    """Else it would be late for the next update, which waits for it then."""
    rule = leases(3, 2)
    assert [rule.begin(worker) for worker in (1, 2)] == [0, 2]
    assert rule.arrive(1, 0, 0)
    assert rule.begin(1) is None, "worker 2 is about to make the update whole"
    assert rule.begin(3) == 4, "which has done nothing yet"
    assert rule.arrive(2, 2, 0)
    assert slices(rule.take()) == [0, 2]
    rule.publish()
    assert rule.begin(3) == 4, "it was late"
    assert rule.begin(1) == 6
    assert rule.arrive(1, 6, 1)
    assert rule.begin(1) == 8, "worker 3 may be late again"
    assert rule.arrive(1, 8, 1)
    assert slices(rule.take()) == [6, 8]


def test_a_worker_that_has_done_its_part_begins_another_slice_where_others_have_gone():
    rule = leases(4, 3)
    assert [rule.begin(worker) for worker in (1, 2, 3)] == [0, 2, 4]
    assert rule.arrive(1, 0, 0)
    assert rule.begin(1) is None
    assert rule.begin(4) == 6
    rule.leave(2)
    rule.leave(4)
    assert rule.begin(1) == 2


def test_few_workers_compute_several_slices_an_update():
    rule = leases(1, 3)
    for start in (0, 2, 4):
        assert rule.begin(1) == start
        assert rule.arrive(1, start, 0)
    assert rule.begin(1) is None
    assert slices(rule.take()) == [0, 2, 4]


def test_what_was_counted_is_kept_for_those_who_compute_the_rest_of_the_batch():
    rule, batch = leases(2, 4), [0, 2, 4, 6]
    assert rule.begin(1) == 0
    assert rule.uncounted(batch) == batch
    assert rule.uncounted(batch, worker=2) == [2, 6], "those that it expects"
    rule.counts |= {start: {"boxes": 3.0} for start in (0, 2, 4, 6, 8)}
    assert rule.uncounted([*batch, 8, 10]) == [10]
    for worker, start in ((1, 0), (2, 2), (1, 4), (2, 6)):
        assert rule.begin(worker) == start
        rule.arrive(worker, start, 0)
    assert slices(rule.take()) == batch
    rule.publish()
    for worker, start in ((1, 8), (2, 10), (1, 12), (2, 14)):
        assert rule.begin(worker) == start
        rule.arrive(worker, start, 1)
    rule.take()
    assert sorted(rule.counts) == [8], "of batches that are over nothing is kept"


def test_what_a_dead_worker_had_is_computed_by_those_who_are_left():
    rule = leases(2, 2)
    rule.begin(1), rule.begin(2)
    rule.leave(2)
    assert rule.arrive(1, 0, 0)
    assert rule.begin(1) == 2
    assert rule.arrive(1, 2, 0)
    assert slices(rule.take()) == [0, 2]


def test_a_worker_gets_its_first_lease_when_it_has_joined():
    rule = leases(2, 1, staleness=None)
    rule.leave(2)
    assert (rule.begin(2), rule.begin(1)) == (None, 0)
    rule.join(2)
    assert rule.begin(2) == 2


def test_an_asynchronous_gradient_may_be_behind_but_not_too_far():
    rule = leases(2, 1, staleness=1)
    assert (rule.begin(1), rule.begin(2)) == (0, 2)
    for version in range(2):
        start = rule.begin(1) if version else 0
        assert rule.arrive(1, start, version)
        assert rule.begin(1) is None, "it waits until its own gradient is in the parameters"
        rule.take()
        rule.publish()
    assert rule.behind == {0: 2}
    assert not rule.arrive(2, 2, 0)
    assert rule.dropped == {2: 1}
    assert rule.begin(2) == 2


def test_an_asynchronous_worker_waits_for_no_gradient_but_its_own():
    rule = leases(3, 1, staleness=None)
    assert (rule.begin(1), rule.begin(2)) == (0, 2)
    assert rule.arrive(1, 0, 0)
    assert rule.begin(3) == 4
    rule.take()
    assert rule.arrive(2, 2, 0)
    assert [rule.begin(worker) for worker in (1, 2)] == [None, None]
    rule.publish()
    assert rule.begin(1) == 6
    assert rule.begin(2) is None


def test_an_asynchronous_worker_that_is_left_alone_finishes_the_epoch_before_its_own_gradient_is_used():
    rule = leases(3, 1, staleness=1, epoch_size=6)
    for worker, start in {1: 0, 2: 2, 3: 4}.items():
        assert rule.begin(worker) == start
        assert rule.arrive(worker, start, 0)
    assert slices(rule.take()) == [0]
    rule.publish()
    assert rule.begin(1) == 6
    assert rule.arrive(1, 6, 1)
    assert slices(rule.take()) == [2]
    rule.publish()
    assert rule.dropped == {3: 1}, "it waited for two updates"
    rule.leave(2)
    rule.leave(3)
    assert rule.take() is None
    assert rule.begin(1) == 4


def test_the_last_slice_of_an_epoch_is_leased_again_before_the_next_epoch_begins():
    rule = leases(2, 1, staleness=None, epoch_size=4)
    assert (rule.begin(1), rule.begin(2)) == (0, 2)
    assert rule.arrive(1, 0, 0)
    rule.take()
    rule.publish()
    assert rule.begin(1) == 2
    assert rule.arrive(1, 2, 1)
    assert not rule.arrive(2, 2, 0)
    assert slices(rule.take()) == [2]
    rule.publish()
    assert rule.begin(2) == 6
    assert rule.begin(1) == 4


def test_an_update_waits_for_the_last_slice_of_an_epoch_even_if_whoever_expects_it_never_asks():
    rule = leases(4, 3, epoch_size=8)
    for version, starts in enumerate([(0, 2, 4), (8, 10, 12)]):
        assert tuple(rule.begin(worker) for worker in (1, 2, 3)) == starts
        for worker, start in zip((1, 2, 3), starts, strict=True):
            assert rule.arrive(worker, start, version)
        assert slices(rule.take()) == (None if version else [0, 2, 4])
        rule.publish()
    rule.leave(4)
    assert rule.begin(1) == 6
    assert rule.arrive(1, 6, 1)
    assert slices(rule.take()) == [6, 8, 10], "the first that came, but none of the next epoch before all of this one"
    assert rule.dropped == {3: 1}
    assert rule.unfinished() == (12, [])


# Over random orders ---------------------------------------------------------------------------------------------------


class Simulation:
    """Workers that ask, finish, die and come back, and a server that takes updates and publishes."""

    def __init__(self, num_workers: int, required: int, staleness: int | None, epoch_size: int, slice_size: int):
        self.rule = leases(num_workers, required, staleness, epoch_size=epoch_size, slice_size=slice_size)
        self.epoch_size, self.slice_size = epoch_size, slice_size
        self.computing: dict[int, tuple[int, int]] = {}
        self.workers = range(1, num_workers + 1)
        self.done: list[int] = []
        self.sent = 0

    def act(self, worker: int) -> None:
        rule = self.rule
        if worker not in rule.workers:
            rule.join(worker)
        elif worker in self.computing:
            start, version = self.computing.pop(worker)
            self.sent += 1
            held = rule.arrive(worker, start, version)
            assert not held or rule.staleness is None or rule.version - version <= rule.staleness
        else:
            start = rule.begin(worker)
            if start is not None:
                assert start not in self.done
                self.computing[worker] = (start, rule.version)

    def die(self, worker: int) -> None:
        self.computing.pop(worker, None)
        self.rule.leave(worker)

    def serve(self) -> None:
        version = self.rule.version
        update = self.rule.take()
        if update is None:
            return
        assert len(update) == self.rule.required
        for lease in update:
            assert self.rule.staleness is None or version - lease.version <= self.rule.staleness
            assert lease.slice not in self.done
        self.done += [lease.slice for lease in update]
        if self.epoch_size:
            self._assert_epochs_are_kept_apart()
        self._assert_unfinished()

    def _assert_epochs_are_kept_apart(self) -> None:
        epochs = {start // self.epoch_size for start in self.done}
        before = range(0, max(epochs) * self.epoch_size, self.slice_size)
        assert set(before) <= set(self.done)

    def _assert_unfinished(self) -> None:
        end, unfinished = self.rule.unfinished()
        assert end == max(self.done) + self.slice_size
        assert sorted([*self.done, *unfinished]) == list(range(0, end, self.slice_size))


@st.composite
def simulations(draw: st.DrawFn) -> Simulation:
    staleness = draw(st.sampled_from([0, 0, 0, None, 2]))
    required = draw(st.integers(1, 4)) if staleness == 0 else 1
    num_workers = draw(st.integers(1, required + 3))
    return Simulation(num_workers, required, staleness, draw(st.integers(0, 13)), draw(st.integers(1, 3)))


@settings(max_examples=100)
@given(simulations(), st.integers(0, 2**32))
def test_every_slice_is_in_one_update_and_nothing_comes_to_a_halt(simulation: Simulation, seed: int) -> None:
    chance, rule = Random(seed), simulation.rule
    spare = len(simulation.workers) - (rule.required if rule.staleness == 0 else 1)
    for _ in range(6):
        # Some do not answer for a while, as many as can be done without; the others go on in any order, and may die.
        stuck = set(chance.sample(simulation.workers, chance.randint(0, max(0, spare))))
        for worker in simulation.workers:
            rule.join(worker)
        before = len(simulation.done)
        for _ in range(150):
            worker = chance.choice(simulation.workers)
            if worker not in stuck:
                simulation.act(worker)
            elif chance.random() < 0.02:
                simulation.die(worker)
            if chance.random() < 0.5:
                simulation.serve()
                rule.publish()
        assert len(simulation.done) > before + rule.required
    assert sum(rule.used.values()) == len(simulation.done)
    assert sum(rule.used.values()) + sum(rule.dropped.values()) >= simulation.sent - len(rule.held)


def test_a_worker_that_computes_for_nothing_is_found_once() -> None:
    futile = Futile()
    assert futile.find({1: 5}, {2: 2}) == []
    assert futile.find({1: 6}, {1: 1, 2: 3}) == [(2, 3)]
    assert futile.find({1: 6}, {1: 1, 2: 4}) == [], "it is named already"
    assert futile.find({1: 7, 3: 1}, {1: 3, 2: 5, 3: 7}) == [], "worker 3 is of some use"
    assert futile.find({1: 7, 3: 1}, {1: 6, 2: 6, 3: 9}) == [(1, 3)], "worker 1 no longer is"
