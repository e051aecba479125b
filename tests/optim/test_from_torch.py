from __future__ import annotations

import inspect
import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import lockstep as ls
from lockstep.optim.by_name import ByName
from lockstep.optim.from_torch import FromTorch, TorchOptimizerByName
from lockstep.optim.gradients import Gradients
from lockstep.optim.schedules import Warmup
from lockstep.training.attempt import Attempt

SHAPES = {"weight": (4, 3), "other": (2, 5)}
NAMES = list(SHAPES)


class Counting(torch.optim.Optimizer):
    """Of another package: changes gradients in place, counts in its state and in its group."""

    def __init__(self, params: Any, lr: float = 0.1, count: int = 0) -> None:
        super().__init__(params, {"lr": lr, "count": count})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            group["seen"] = True
            for p in group["params"]:
                state = self.state[p]
                state["updates"] = state.get("updates", 0) + group["count"]
                state["nothing"] = None
                p.grad.mul_(state["updates"])
                p.data.add_(p.grad, alpha=-group["lr"])


class Keeping(torch.optim.SGD):
    """Keeps what cannot be saved."""

    kept: tuple[Any, dict[Any, Any]] = (None, {})
    """For what, and the state; None: for the first parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        owner, state = self.kept
        self.state[owner or self.param_groups[0]["params"][0]] = state


class Preconditioned(torch.optim.Optimizer):
    """Of another package: its state has other shapes than the parameters."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        for p in self.param_groups[0]["params"]:
            self.state[p]["history"] = torch.zeros(7)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state, rows = self.state[p], p.grad.flatten(1)
            state["left"] = 0.9 * state.get("left", 0.0) + rows @ rows.t()
            state["history"] = torch.cat([state["history"][-6:], p.grad.norm().view(1)])
            state["norms"] = torch.cat([state.get("norms", p.new_zeros(0)), p.grad.norm().view(1)])
            step = torch.linalg.solve(state["left"] + torch.eye(len(rows)), rows)
            p.data.add_(
                step.view_as(p), alpha=-0.1 / (1.0 + state["history"].sum().item() + state["norms"].sum().item())
            )


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"speed": 1.0})


CLASSES: dict[str, FromTorch] = {
    "sgd": FromTorch(torch.optim.SGD, lr=0.1),
    "momentum": FromTorch(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": FromTorch(torch.optim.Adam, lr=0.1, amsgrad=True),
    "adamw": FromTorch(torch.optim.AdamW, lr=0.1),
    "adamw_fused": FromTorch(torch.optim.AdamW, lr=0.1, fused=True),
    "adamw_foreach": FromTorch(torch.optim.AdamW, lr=0.1, foreach=True),
    "adagrad": FromTorch(torch.optim.Adagrad, lr=0.1, lr_decay=0.1),
    "adadelta": FromTorch(torch.optim.Adadelta),
    "adamax": FromTorch(torch.optim.Adamax, lr=0.1),
    "asgd": FromTorch(torch.optim.ASGD, lr=0.1, t0=2.0),
    "nadam": FromTorch(torch.optim.NAdam, lr=0.1),
    "radam": FromTorch(torch.optim.RAdam, lr=0.1),
    "rmsprop": FromTorch(torch.optim.RMSprop, lr=0.1, momentum=0.9, centered=True),
    "rprop": FromTorch(torch.optim.Rprop, lr=0.1),
    "adafactor": FromTorch(torch.optim.Adafactor, lr=0.1),
    "muon": FromTorch(torch.optim.Muon, lr=0.1, momentum=0.9),
    "preconditioned": FromTorch(Preconditioned),
    "scheduled": FromTorch(torch.optim.NAdam, lr=ls.optim.Cosine(0.1, 8)),
}
every_class = pytest.mark.parametrize("value", CLASSES.values(), ids=CLASSES)


def start() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=random)) for name, shape in SHAPES.items()}


def drawn(num_steps: int) -> list[list[Tensor]]:
    random = torch.Generator().manual_seed(2)
    return [[torch.randn(shape, generator=random) for shape in SHAPES.values()] for _ in range(num_steps)]


@torch.no_grad()
def train(bound: Any, steps: Sequence[Sequence[Tensor | None]], first: int = 0) -> None:
    for step, gradients in enumerate(steps, first):
        bound.update(Gradients(NAMES, gradients), step)


def assert_equal(first: Any, second: Any) -> None:
    torch.testing.assert_close(first, second, rtol=0.0, atol=0.0)


def copied(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.nn.Parameter(p.detach().clone()) for name, p in parameters.items()}


def saved_of(bound: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What comes back from a file: tensors one after the other in memory, and JSON."""
    slots = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in bound.slots().items()}
    return slots, json.loads(json.dumps(bound.values(), allow_nan=False))


def fits(bound: Any, slots: dict[str, Tensor]) -> bool:
    expected = bound.expects(slots)
    return expected.keys() == slots.keys() and all(
        (expected[n].shape, expected[n].dtype) == (t.shape, t.dtype) for n, t in slots.items()
    )


@every_class
def test_updates_have_the_bits_of_the_class_itself(value: FromTorch) -> None:
    ours, theirs, steps = start(), start(), drawn(6)
    arguments = dict(value.arguments)
    schedule = arguments.get("lr") if callable(arguments.get("lr")) else None
    if schedule:
        arguments["lr"] = 1.0
    optimizer: Any = value.cls(list(theirs.values()), **arguments)
    for step, gradients in enumerate(steps):
        for parameter, gradient in zip(theirs.values(), gradients, strict=True):
            parameter.grad = gradient.clone()
        if schedule:
            optimizer.param_groups[0]["lr"] = schedule(step)
        optimizer.step()
    train(value.bind(ours), steps)
    assert_equal(ours, theirs)
    assert_equal(steps, drawn(6))  # other workers may be reading the gradients
    assert all(parameter.grad is None for parameter in ours.values())


@every_class
@pytest.mark.parametrize("num_before", [0, 3])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(value: FromTorch, num_before: int) -> None:
    parameters, steps = start(), drawn(8)
    bound = value.bind(parameters)
    train(bound, steps[:num_before])
    (slots, values), copies = saved_of(bound), copied(parameters)
    train(bound, steps[num_before:], first=num_before)
    again = value.bind(copies)
    assert fits(again, slots)
    again.load(slots, values)
    train(again, steps[num_before:], first=num_before)
    assert_equal(copies, parameters)
    assert_equal(again.slots(), bound.slots())
    assert again.values() == bound.values()


@every_class
def test_a_run_that_goes_back_to_a_checkpoint_forgets_what_came_after(value: FromTorch) -> None:
    parameters, steps = start(), drawn(4)
    bound = value.bind(parameters)
    slots, values = saved_of(bound)
    train(bound, steps)
    first = copied(parameters)
    with torch.no_grad():
        for name, tensor in start().items():
            parameters[name].copy_(tensor)
    assert fits(bound, slots)
    bound.load(slots, values)
    train(bound, steps)
    assert_equal(parameters, first)


def test_muon_with_another_optimizer_for_vectors_resumes_with_the_same_bits() -> None:
    optimizer = ByName({"weight$": CLASSES["muon"], "bias$": CLASSES["adamw"]})
    random = torch.Generator().manual_seed(3)
    steps = [[torch.randn(4, 3, generator=random), torch.randn(4, generator=random)] for _ in range(6)]
    names = ["fc.weight", "fc.bias"]
    parameters: dict[str, Tensor] = {n: torch.nn.Parameter(g.clone()) for n, g in zip(names, steps[0], strict=True)}

    def update(bound: Any, indices: range) -> None:
        with torch.no_grad():
            for step in indices:
                bound.update(Gradients(names, steps[step]), step)

    bound = optimizer.bind(parameters)
    update(bound, range(3))
    (slots, values), copies = saved_of(bound), copied(parameters)
    update(bound, range(3, 6))
    again = optimizer.bind(copies)
    assert fits(again, slots)
    again.load(slots, values)
    update(again, range(3, 6))
    assert_equal(copies, parameters)
    assert set(slots) == {"Muon.momentum_buffer/fc.weight"} | {
        f"AdamW.{key}/fc.bias" for key in ("step", "exp_avg", "exp_avg_sq")
    }


def test_a_class_of_another_package_gets_copies_and_its_numbers_are_saved() -> None:
    value, steps = FromTorch(Counting, lr=0.01), drawn(6)
    parameters = start()
    bound = value.bind(parameters)
    train(bound, steps[:3])
    assert_equal(steps, drawn(6))
    (slots, values), copies = saved_of(bound), copied(parameters)
    assert values == {
        "groups": [{"count": 3, "seen": True}],
        "state": {name: {"updates": 6, "nothing": None} for name in NAMES},
    }
    train(bound, steps[3:], first=3)
    again = value.bind(copies)
    again.load(slots, values)
    train(again, steps[3:], first=3)
    assert_equal(copies, parameters)


def test_parameters_without_a_gradient_are_left_alone() -> None:
    parameters = start()
    bound = CLASSES["adamw"].bind(parameters)
    train(bound, [[None, gradients[1]] for gradients in drawn(2)])
    assert_equal(parameters["weight"], start()["weight"])
    assert not torch.equal(parameters["other"], start()["other"])
    assert {name.partition("/")[2] for name in bound.slots()} == {"other"}


def test_slots_come_back_in_the_memory_format_of_the_parameter() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
    bound = CLASSES["adamw"].bind({"weight": weight})
    with torch.no_grad():
        bound.update(Gradients(["weight"], [torch.ones_like(weight)]), 0)
    strides = {name: tensor.stride() for name, tensor in bound.slots().items()}
    slots, values = saved_of(bound)
    bound.load(slots, values)
    assert {name: tensor.stride() for name, tensor in bound.slots().items()} == strides
    assert strides["AdamW.exp_avg/weight"] == weight.stride() != slots["AdamW.exp_avg/weight"].stride()
    assert_equal(bound.slots(), slots)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda slots: {name.replace("AdamW", "Adam"): t for name, t in slots.items()},
        lambda slots: {name.replace("weight", "unknown"): t for name, t in slots.items()},
    ],
    ids=["another class", "another parameter"],
)
def test_slots_that_do_not_fit_are_not_expected(spoil: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    bound = CLASSES["adamw"].bind(start())
    train(bound, drawn(1))
    slots, _ = saved_of(bound)
    assert fits(CLASSES["adamw"].bind(start()), slots)
    assert not fits(CLASSES["adamw"].bind(start()), spoil(slots))


def test_slots_that_the_class_has_from_the_start_must_be_there() -> None:
    assert "Adagrad.sum/weight" in CLASSES["adagrad"].bind(start()).expects({})
    assert not CLASSES["adamw"].bind(start()).expects({})


def test_lengths_in_epochs_are_resolved_for_each_stream() -> None:
    bound = FromTorch(torch.optim.SGD, lr=Warmup(0.1, ls.Epochs(2))).bind(start())
    for batch_size, num_steps in ((10, 20), (50, 4), (10, 20)):
        lines = bound.resolve(100, batch_size)
        assert any(f"{num_steps} steps" in line for line in lines), lines
        assert bound.learning_rates(num_steps // 2) == {"": pytest.approx(0.05)}


def test_what_a_schedule_gives_is_checked_before_anything_changes() -> None:
    parameters = start()
    bound = FromTorch(torch.optim.AdamW, lr=lambda step: math.nan if step else 0.1).bind(parameters)
    train(bound, drawn(1))
    before = copied(parameters)
    with pytest.raises(ls.InputError, match="learning rate after 1 updates"):
        bound.learning_rates(1)
    with pytest.raises(ls.InputError, match="learning rate after 1 updates"):
        train(bound, drawn(1), first=1)
    assert_equal(parameters, before)


def test_the_rate_is_that_of_the_class_where_none_is_given() -> None:
    assert FromTorch(torch.optim.Adadelta).bind(start()).learning_rates(7) == {"": 1.0}


def test_values_compare_and_print_as_they_were_written() -> None:
    value = FromTorch(torch.optim.Muon, lr=0.02, momentum=0.95)
    assert repr(value) == "FromTorch(Muon, lr=0.02, momentum=0.95)"
    assert value == FromTorch(torch.optim.Muon, lr=0.02, momentum=0.95)
    assert value != FromTorch(torch.optim.Muon, lr=0.02, momentum=0.9)
    assert repr(FromTorch(torch.optim.Adadelta)) == "FromTorch(Adadelta)"


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        ((None, {"history": [1.0]}), "'history', which is list"),
        (("all", {"history": 1.0}), "state of 'all', which is no parameter"),
        ((None, {0: torch.zeros(2)}), "state with the key 0"),
        ((None, {0: 1.0}), "state with the key 0"),
        ((None, {"left/right": torch.zeros(2)}), "state with the key 'left/right'"),
    ],
)
def test_what_cannot_be_saved_is_said(kept: Any, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = FromTorch(Keeping, lr=0.1).bind(start())
    assert bound.values() == {"groups": [{}], "state": {}}
    monkeypatch.setattr(Keeping, "kept", kept)
    train(bound, drawn(1))
    with pytest.raises(ls.InputError, match=rf"keeps cannot be saved.*\n.*{expected}\n.*by text without slashes"):
        bound.values()


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"parts": []},
        {"groups": [], "state": {}},
        {"groups": [{}], "state": {"unknown": {"updates": 1}}},
    ],
)
def test_the_values_of_another_optimizer_are_refused_before_anything_changes(values: dict[str, Any]) -> None:
    bound = FromTorch(Counting).bind(start())
    train(bound, drawn(2))
    before = bound.values()
    for refuse in (bound.check_values, lambda values: bound.load({}, values)):
        with pytest.raises(
            ls.CheckpointError, match=r"values of another optimizer.*\n.*\n.*FromTorch\(Counting, \.\.\."
        ):
            refuse(values)
    assert bound.values() == before != FromTorch(Counting).bind(start()).values()


def test_sparse_gradients_are_refused_beforehand_and_in_the_update() -> None:
    bound = CLASSES["adamw"].bind({"table": torch.zeros(5, 2), "weight": torch.zeros(2)})
    bound.check_rows([])
    bound.check_rows(["another"])
    refused = r"AdamW cannot update 'table' from a sparse gradient.*\n.*\n.*dense"
    with pytest.raises(ls.InputError, match=refused):
        bound.check_rows({"table", "another"})
    with pytest.raises(ls.InputError, match=refused):
        bound.update(Gradients(["table"], [torch.ones(1, 2)], rows={0: torch.tensor([2])}), 0)


@pytest.mark.parametrize(
    ("value", "kernels"),
    [(CLASSES["adamw_fused"], "AdamW of torch"), (FromTorch(Counting), "Counting of test_from_torch")],
)
def test_kernels_are_named_by_the_class(value: FromTorch, kernels: str) -> None:
    assert value.bind(start()).kernels == kernels


def test_a_torch_optimizer_has_no_patterns() -> None:
    assert list(CLASSES["adamw"].bind(start()).matched()) == []


SWITCHES = {"weight_decay": 0.1} | dict.fromkeys(
    ("foreach", "fused", "nesterov", "maximize", "amsgrad", "centered", "decoupled_weight_decay", "capturable"), True
)
TORCHS = [
    cls
    for cls in vars(torch.optim).values()
    if isinstance(cls, type)
    and issubclass(cls, torch.optim.Optimizer)
    and cls not in (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)
]
every_class_of_torch = pytest.mark.parametrize("cls", TORCHS, ids=lambda cls: cls.__name__)


def ways_of(cls: type[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """Arguments that each switch on one or two of the things that the class can do."""
    known = inspect.signature(cls).parameters
    momentum = {"momentum": 0.9} if "momentum" in known else {}
    switches = [name for name in SWITCHES if name in known]
    chosen = [*[()], *[(s,) for s in switches], *itertools.combinations(switches, 2)]
    return [momentum | {name: SWITCHES[name] for name in names} for names in chosen if names != ("foreach", "fused")]


@every_class_of_torch
def test_the_gradients_stay_as_they_are_whatever_the_class_does(cls: type[torch.optim.Optimizer]) -> None:
    """Other workers may be reading them, and two parameters may have one."""
    one = drawn(1)[0][0]
    for arguments in ways_of(cls):
        found = one.clone()
        parameters = {name: torch.nn.Parameter(torch.ones(4, 3)) for name in NAMES}
        try:
            bound = FromTorch(cls, lr=0.1, **arguments).bind(parameters)
            train(bound, [[found, found]] * 3)
        except (ls.InputError, AssertionError, RuntimeError):  # capturable is for a GPU, fused not for everything
            assert arguments.keys() & {"capturable", "fused"}
        assert_equal(found, one)
        assert_equal(parameters["weight"], parameters["other"])


@every_class_of_torch
def test_every_class_of_torch_trains_and_resumes_in_a_state(cls: type[torch.optim.Optimizer]) -> None:
    """Muon takes matrices alone: so the model has one."""

    def made() -> ls.TrainState:
        model = torch.nn.Linear(3, 2, bias=False)
        torch.nn.init.ones_(model.weight)
        return ls.TrainState(model, FromTorch(cls, lr=0.1), average=ls.optim.MovingAverage(0.9))

    def step(state: ls.TrainState, gradient: Tensor) -> None:
        state.apply(Attempt([gradient.clone()], (), {"loss": 1.0}))

    steps = torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(5))
    first, second = made(), made()
    for gradient in steps[:3]:
        step(first, gradient)
    sections = {section: {n: t.clone() for n, t in tensors.items()} for section, tensors in first.sections().items()}
    second.load(sections, json.loads(json.dumps(first.values())))
    for gradient in steps[3:]:
        step(first, gradient)
        step(second, gradient)
    assert_equal(dict(second.model.named_parameters()), dict(first.model.named_parameters()))
    assert not torch.equal(second.model.weight, made().model.weight)  # type: ignore[arg-type]
    assert first.kernels == f"{cls.__name__} of torch"
    assert first.matches == []


def test_parameters_that_the_class_refuses_are_said_when_it_is_bound() -> None:
    with pytest.raises(ls.InputError, match=r"Muon cannot be built: Muon only supports 2D(.|\n)*ByName"):
        CLASSES["muon"].bind({"bias": torch.zeros(3)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: FromTorch(torch.optim.AdamW, lr=0.1, moment=0.9),
            r"unexpected keyword argument 'moment'\n.*moment=0.9",
        ),
        (lambda: FromTorch(torch.optim.AdamW, lr=0.1, betas=(2.0, 0.9)), r"Invalid beta(.|\n)*hint: *correct the arg"),
        (lambda: FromTorch(torch.optim.AdamW, lr="fast"), "lr is of the wrong type"),
        (lambda: FromTorch(torch.optim.AdamW, lr=-1.0), "lr is out of range"),
        (lambda: FromTorch(torch.optim.AdamW, lr=True), r"lr is of the wrong type.*\n.*lr is bool"),
        (lambda: FromTorch(torch.optim.AdamW, lr=math.nan), "lr is out of range"),
        (
            lambda: FromTorch("AdamW", lr=0.1),
            r"cls is of the wrong type.*\n.*cls is str\n.*subclass of torch.optim.Opt",
        ),
        (lambda: FromTorch(torch.nn.Linear), "cls is the class Linear"),
        (lambda: FromTorch(torch.optim.SGD([torch.zeros(1)], 0.1)), "cls is SGD"),
        (lambda: FromTorch(torch.optim.LBFGS, lr=0.1), r"LBFGS needs its step given 'closure'.*\n.*\n.*dense ones"),
        (lambda: FromTorch(torch.optim.SparseAdam, lr=0.1), "SparseAdam needs sparse gradients"),
        (lambda: FromTorch(WithoutRate), r"WithoutRate has no learning rate.*\n.*\n.*number `lr`"),
    ],
)
def test_what_is_no_class_or_no_argument_of_it_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ls.InputError, match=message):
        make()


@pytest.mark.parametrize("name", ["NAdam", "RAdam", "Adamax", "Rprop", "ASGD", "Adafactor", "Muon"])
def test_a_name_is_the_class_of_torch(name: str) -> None:
    one, two = ({"weight": torch.ones(4, 3), "other": torch.ones(2, 5)} for _ in range(2))
    bound = [
        TorchOptimizerByName(name, lr=0.01).bind(one),
        FromTorch(getattr(torch.optim, name), lr=0.01).bind(two),
    ]
    for step in range(2):
        for each in bound:
            each.update(Gradients(NAMES, [torch.full((4, 3), 0.5), torch.full((2, 5), -0.5)]), step)
    assert all(
        torch.equal(one[each], two[each]) and not torch.equal(one[each], torch.ones_like(one[each])) for each in one
    )


def test_a_named_class_takes_arguments_and_a_schedule() -> None:
    bound = TorchOptimizerByName("NAdam", Warmup(0.1, 2), {"momentum_decay": 0.5, "betas": (0.5, 0.9)}).bind(
        {"weight": torch.ones(4, 3)}
    )
    assert bound.learning_rates(0) != bound.learning_rates(2) == {"": 0.1}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: TorchOptimizerByName("Nadam", 0.1),
            r"has no optimizer 'Nadam'.*\n.*\n.*one of ASGD, .*\n.*did you mean 'NAdam'",
        ),
        (lambda: TorchOptimizerByName("lr_scheduler", 0.1), "has no optimizer 'lr_scheduler'"),
        (lambda: TorchOptimizerByName("Optimizer", 0.1), "Optimizer"),
        (lambda: TorchOptimizerByName("SparseAdam", 0.1), "SparseAdam needs sparse gradients"),
        (lambda: TorchOptimizerByName("LBFGS", 0.1), "LBFGS needs its step given 'closure'"),
        (lambda: TorchOptimizerByName("NAdam", 0.1, {"momentum": 0.9}), "NAdam cannot be built: .*momentum"),
        (
            lambda: TorchOptimizerByName("NAdam", 0.1, {"lr": 0.9}),
            r"learning rate is no argument.*\n.*\n.*\n.*give it as lr",
        ),
        (lambda: TorchOptimizerByName("NAdam", -0.1), "lr is out of range"),
    ],
)
def test_a_name_that_torch_does_not_know_is_refused(make: Callable[[], TorchOptimizerByName], message: str) -> None:
    with pytest.raises(ls.InputError, match=message):
        make().bind({"weight": torch.ones(4, 3)})


# Held back by a flag on the device


FUSED = {
    "momentum": FromTorch(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adam": FromTorch(torch.optim.Adam, lr=0.1, amsgrad=True, fused=True),
    "adamw": FromTorch(torch.optim.AdamW, lr=0.1, fused=True),
}


@pytest.mark.parametrize("value", FUSED.values(), ids=FUSED)
def test_a_flag_on_the_device_holds_back_a_fused_class(value: FromTorch) -> None:
    def updated(flags: Sequence[float | None]) -> dict[str, Tensor]:
        parameters = start()
        bound = value.bind(parameters)
        assert bound.takes_found_inf
        good = iter(drawn(3))
        for flag in flags:
            tensors = [torch.full(shape, math.nan) for shape in SHAPES.values()] if flag else next(good)
            gradients = Gradients(NAMES, tensors)
            gradients.found_inf = None if flag is None else torch.tensor(flag)
            with torch.no_grad():
                bound.update(gradients, 0)
            bound.values()
        return {**{n: p.detach() for n, p in parameters.items()}, **bound.slots()}

    torch.testing.assert_close(updated([1.0, 1.0]), updated([]), rtol=0, atol=0)
    torch.testing.assert_close(updated([1.0, 0.0, 1.0, 0.0, 0.0, 1.0]), updated([None] * 3), rtol=0, atol=0)


class AskingTheScaler(torch.optim.SGD):
    """As classes were before torch's gradient scaler told them of its flag."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self._step_supports_amp_scaling = True

    def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("value", [CLASSES["adamw"], FromTorch(AskingTheScaler), CLASSES["rmsprop"]], ids=str)
def test_a_class_that_looks_at_no_flag_says_so(value: FromTorch) -> None:
    assert not value.bind(start()).takes_found_inf
