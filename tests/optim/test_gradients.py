from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

import lockstep as ls
from lockstep.optim.gradients import Gradients

DOUBLE = torch.float64
SHAPES: list[tuple[int, ...] | None] = [(3,), None, (2, 2), (), (1, 4)]
"""Of the gradients in these tests; there is none at the second place."""


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=DOUBLE)


def started(seed: int = 0) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    return [None if s is None else torch.randn(s, generator=generator, dtype=DOUBLE) for s in SHAPES]


def gradients_of(tensors: list[Tensor | None], **options: Any) -> Gradients:
    return Gradients([f"p{i}" for i in range(len(tensors))], tensors, **options)


def assert_same(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    assert [g is None for g in found] == [g is None for g in expected]
    for one, other in zip(found, expected, strict=True):
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def norms_of(tensors: Sequence[Tensor | None]) -> list[float]:
    return [0.0 if g is None else float(g.square().sum().sqrt()) for g in tensors]


places = st.sampled_from([i for i, shape in enumerate(SHAPES) if shape is not None])
operations = st.lists(
    st.one_of(
        st.tuples(st.just("divide"), st.floats(0.01, 100)),
        st.tuples(st.just("multiply"), st.dictionaries(st.integers(0, len(SHAPES) - 1), st.floats(-3, 3))),
        st.tuples(st.just("put"), st.dictionaries(places, st.integers(1, 99), max_size=3)),
        st.tuples(st.sampled_from(["tensors", "norms", "norm"]), st.none()),
    ),
    max_size=8,
)


def perform(plain: list[Tensor | None], name: str, argument: Any) -> list[Tensor | None]:
    """What an operation does, on a plain list."""
    if name == "divide":
        return [None if g is None else g / argument for g in plain]
    if name == "multiply":
        return [None if g is None else g * argument.get(i, 1.0) for i, g in enumerate(plain)]
    if name == "put":
        return [started(argument[i])[i] if i in argument else g for i, g in enumerate(plain)]
    return plain


@settings(max_examples=50, deadline=None)
@given(operations, st.floats(0.01, 100), st.booleans())
def test_any_sequence_of_changes_is_that_of_a_plain_list(
    steps: list[tuple[str, Any]], divisor: float, owned: bool
) -> None:
    given_, untouched = started(), started()
    gradients = gradients_of(given_, divisor=divisor, owned=owned)
    plain = perform(started(), "divide", divisor)
    for name, argument in steps:
        plain = perform(plain, name, argument)
        if name == "put":
            gradients.put({i: g for i, seed in argument.items() if (g := started(seed)[i]) is not None})
        elif argument is not None:
            getattr(gradients, name)(argument)
        elif name == "tensors":
            assert_same(gradients.tensors, plain)
        elif name == "norms":
            assert gradients.norms == pytest.approx(norms_of(plain), rel=1e-12, abs=1e-15)
        else:
            assert gradients.norm == pytest.approx(math.hypot(*norms_of(plain)), rel=1e-12, abs=1e-15)
    some = gradients.subset([4, 1, 0])
    assert some.norms == pytest.approx([norms_of(plain)[i] for i in (4, 1, 0)], rel=1e-12, abs=1e-15)
    tensors, left, _ = some.to_divide()
    assert_same([None if g is None else g / left for g in tensors], [plain[i] for i in (4, 1, 0)])
    assert gradients.norms == pytest.approx(norms_of(plain), rel=1e-12, abs=1e-15)
    assert_same(gradients.tensors, plain)
    for before, after in zip(untouched, given_, strict=True):
        assert after is None if before is None else torch.equal(before, after)  # type: ignore[arg-type]


@pytest.mark.parametrize("read", ["norms", "norm"])
def test_norms_that_were_read_before_follow_every_change(read: str) -> None:
    gradients = gradients_of([tensor(3.0, 4.0), tensor(12.0)])
    getattr(gradients, read)
    gradients.divide(2.0)
    assert gradients.norms == [2.5, 6.0]
    assert gradients.norm == 6.5
    _ = gradients.tensors  # the division is made
    assert gradients.norms == [2.5, 6.0]
    gradients.multiply({0: -2.0})
    assert gradients.norms == [5.0, 6.0]
    gradients.put({1: tensor(1.0)})
    assert gradients.norms == [5.0, 1.0]
    gradients.divide(5.0)
    gradients.multiply({1: 10.0})
    assert gradients.norms == pytest.approx([1.0, 2.0])


def test_a_division_of_tensors_that_nobody_else_holds_is_kept_back_until_they_are_wanted() -> None:
    given_ = tensor(2.0)
    gradients = gradients_of([given_], owned=True)
    gradients.divide(4.0)
    gradients.divide(2.0)
    gradients.multiply({})
    tensors, divisor, owned = gradients.to_divide()
    assert tensors[0] is given_
    assert (divisor, owned) == (8.0, True)
    assert gradients.subset([0]).to_divide() == ((given_,), 8.0, True)
    assert gradients.tensors[0].tolist() == [0.25]  # type: ignore[union-attr]
    assert gradients.to_divide()[1] == 1.0
    assert given_.tolist() == [2.0]


@pytest.mark.parametrize("pick", [lambda gradients: gradients, lambda gradients: gradients.subset([0, 1])])
def test_gradients_that_somebody_else_may_hold_are_not_to_be_used_up(pick: Callable[[Gradients], Any]) -> None:
    held = tensor(2.0)
    picked = pick(gradients_of([held, held], divisor=4.0))
    assert picked.to_divide() == ((held, held), 4.0, False)
    assert_same(picked.tensors, [tensor(0.5), tensor(0.5)])
    assert held.tolist() == [2.0]


def divided_by_two(gradients: Gradients) -> tuple[Sequence[Tensor | None], float, bool]:
    gradients.divide(2.0)
    return gradients.to_divide()


@pytest.mark.parametrize("change", ["divide", "multiply", "put"])
def test_what_we_have_made_ourselves_may_be_used_up(change: str) -> None:
    held = tensor(6.0)
    gradients = gradients_of([held, None, held])
    if change == "divide":
        gradients.divide(3.0)
        assert gradients.tensors[0].tolist() == [2.0]  # type: ignore[union-attr]
    elif change == "multiply":
        gradients.multiply({0: 1 / 3, 1: 5.0, 2: 1 / 3})
    else:
        gradients.put({0: tensor(2.0), 2: tensor(2.0)}, owned=True)
    assert divided_by_two(gradients) == ((tensor(2.0), None, tensor(2.0)), 2.0, True)


@pytest.mark.parametrize("change", ["multiply", "put"])
def test_beside_what_others_may_hold_what_we_have_made_is_not_used_up(change: str) -> None:
    held = tensor(6.0)
    gradients = gradients_of([held, held])
    if change == "multiply":
        gradients.multiply({0: 1 / 3})
    else:
        gradients.put({0: tensor(2.0)}, owned=True)
    assert divided_by_two(gradients) == ((tensor(2.0), held), 2.0, False)
    assert_same(gradients.tensors, [tensor(1.0), tensor(3.0)])
    assert held.tolist() == [6.0]


def test_what_a_transform_has_put_is_its_own() -> None:
    whole = tensor(1.0, 2.0, 3.0)
    gradients = gradients_of([tensor(0.0, 0.0), tensor(0.0, 0.0)], owned=True)
    gradients.put({0: whole[:2], 1: whole[1:]})
    gradients.divide(2.0)
    assert not gradients.to_divide()[2]
    assert_same(gradients.tensors, [tensor(0.5, 1.0), tensor(1.0, 1.5)])
    assert whole.tolist() == [1.0, 2.0, 3.0]


def test_no_item_of_the_tensors_can_be_assigned() -> None:
    gradients: Any = gradients_of([tensor(1.0)])
    with pytest.raises(TypeError, match="does not support item assignment"):
        gradients.tensors[0] = tensor(2.0)


def test_what_is_changed_in_place_while_watched_is_named() -> None:
    gradients = gradients_of([tensor(1.0), None, tensor(2.0), tensor(3.0)], divisor=2.0)
    gradients.tensors[0].add_(1.0)  # type: ignore[union-attr]
    gradients.watch()
    assert gradients.changed() == []
    gradients.watch()
    gradients.tensors[2].add_(1.0)  # type: ignore[union-attr]
    new = tensor(5.0)
    gradients.put({3: new.mul_(2.0)})
    gradients.multiply({0: 3.0})
    assert gradients.changed() == ["p2"]
    gradients.tensors[2].add_(1.0)  # type: ignore[union-attr]
    assert gradients.changed() == []
    gradients.watch()
    gradients.divide(2.0)
    gradients.tensors[0].zero_()  # type: ignore[union-attr]
    assert gradients.changed() == ["p0"]


def test_of_what_was_made_in_inference_mode_no_change_is_known() -> None:
    with torch.inference_mode():
        made = tensor(1.0)
        gradients = gradients_of([made, tensor(1.0)])
        gradients.watch()
        _ = gradients.tensors
        made.mul_(2.0)
        assert gradients.changed() == []


@pytest.mark.parametrize("tensors", [[], [None, None]])
def test_there_may_be_no_gradient_at_all(tensors: list[Tensor | None]) -> None:
    gradients = gradients_of(tensors, divisor=2.0)
    gradients.multiply(dict.fromkeys(range(len(tensors)), 3.0))
    assert gradients.norm == 0.0
    assert gradients.norms == [0.0] * len(tensors)
    assert gradients.tensors == tuple(tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_16_bits_are_taken_in_more(dtype: torch.dtype) -> None:
    large = torch.full((16,), 30000.0).to(dtype)
    gradients = gradients_of([large, torch.full((1000,), 1.0078125).to(dtype), torch.ones(4)], divisor=2.0)
    expected = [2.0 * float(large[0]), 1.0078125 * math.sqrt(1000) / 2.0, 1.0]
    assert gradients.norms == pytest.approx(expected, rel=1e-6)
    assert gradients.norm == pytest.approx(math.hypot(*expected), rel=1e-6)


def strided(name: str) -> Tensor:
    """More elements than are added up at once, in float32."""
    values = torch.rand(600_000, generator=torch.Generator().manual_seed(0)) + 0.1
    if name == "channels_last":
        return values[: 64 * 600 * 9].view(64, 600, 3, 3).to(memory_format=torch.channels_last)
    if name == "transposed":
        return values[:300_000].view(600, 500).t()
    return values.view(300_000, 2)[:, 1] if name == "every second" else values[3 : 3 + 2**18 + int(name)]


@pytest.mark.parametrize("name", ["0", "1", "2048", "2049", "channels_last", "transposed", "every second"])
def test_the_norm_of_a_large_tensor_is_right_in_any_layout(name: str) -> None:
    large = strided(name)
    tensors: list[Tensor | None] = [large, torch.full((3,), 2.0), None]
    for found in (tensors, [*tensors, large.bfloat16()]):
        expected = norms_of([None if g is None else g.double() for g in found])
        gradients = gradients_of(found)
        assert gradients.norms == pytest.approx(expected, rel=2e-5 if name == "0" else 2e-6)
        assert gradients.norm == pytest.approx(math.hypot(*expected), rel=2e-5 if name == "0" else 2e-6)


@pytest.mark.parametrize("name", ["2048", "channels_last", "transposed"])
def test_a_large_tensor_is_not_copied_for_its_norm(name: str) -> None:
    places: list[int] = []

    class Measured(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.linalg.vector_norm:
                places.append(args[0].data_ptr())
            return func(*args, **(kwargs or {}))

    large = strided(name)
    with Measured():
        assert gradients_of([large]).norm > 0.0
    assert [0 <= place - large.data_ptr() < large.nbytes for place in places] == [True]


def test_norms_of_many_elements_do_not_drift() -> None:
    tenths = torch.full((4_000_000,), 0.1)
    assert gradients_of([tenths]).norm == pytest.approx(2000.0 * float(tenths[0]), rel=1e-6)


def test_a_large_tensor_that_is_not_finite_has_no_finite_norm() -> None:
    for value in (math.inf, math.nan):
        large = torch.zeros(2**18 + 5)
        large[-1] = value
        assert not math.isfinite(gradients_of([large]).norm)


def test_rows_follow_their_parameters_into_a_subset() -> None:
    rows = torch.tensor([4, 7])
    gradients = Gradients(["a", "b", "c"], [tensor(1.0), tensor(2.0, 3.0), tensor(4.0)], divisor=2.0, rows={1: rows})
    subset = gradients.subset([2, 1])
    assert list(subset.names) == ["c", "b"]
    assert list(subset.rows) == [1]
    assert subset.rows[1] is rows
    assert_same(subset.tensors, [tensor(2.0), tensor(1.0, 1.5)])
    assert gradients.subset([0]).rows == {}


def test_what_is_put_gets_the_memory_layout_of_the_gradient_it_replaces() -> None:
    gradient = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    gradients = gradients_of([gradient, torch.zeros(40)])
    new = torch.randn(2, 3, 4, 5)
    gradients.put({0: new, 1: torch.ones(1).expand(40)})
    found, spread = gradients.tensors
    assert found is not None
    assert spread is not None
    assert found.stride() == gradient.stride()
    assert torch.equal(found, new)
    assert spread.is_contiguous()
    assert spread.tolist() == [1.0] * 40


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: {0: tensor(1.0)}, r"in the place of the gradient of 'p0'.*\n.*shape \(1,\).*\n.*shape \(2,\)"),
        (
            lambda: {0: torch.zeros(2)},
            r"'p0'.*\n.*torch\.float32.*\n.*torch\.float64.*\n.*same shape, dtype and device",
        ),
        (lambda: {0: torch.zeros(2, dtype=DOUBLE, device="meta")}, r"'p0'.*\n.*on meta\n.*on cpu"),
        (lambda: {0: torch.zeros(2, dtype=DOUBLE).to_sparse()}, r"'p0'.*\n.*torch\.sparse_coo.*\n.*torch\.strided"),
        (lambda: {1: tensor(1.0)}, r"'p1'.*\n.*\n.*nothing, for it has no gradient in this update"),
    ],
)
def test_what_does_not_fit_is_not_put(make: Callable[[], dict[int, Tensor]], message: str) -> None:
    with pytest.raises(ls.InputError, match=message):
        gradients_of([tensor(1.0, 2.0), None]).put(make())
