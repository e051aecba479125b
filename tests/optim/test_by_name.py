from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import lockstep as ls
from lockstep.inline_toml import inline_toml
from lockstep.optim import SGD, AdamW, ByName, ClipGlobalNorm, Cosine, FromTorch, LayerDecay
from lockstep.optim.by_name import layers
from lockstep.optim.gradients import Gradients
from lockstep.optim.schedules import Constant
from lockstep.training.attempt import Attempt

SHAPES = {"stem.weight": (3, 2), "stem.bias": (3,), "head.weight": (2, 3), "head.bias": (2,)}
BOTH = ByName({"bias$": SGD(0.5), "weight$": SGD(0.1, momentum=0.9, weight_decay=0.01)})


def drawn(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradients_of(found: Mapping[str, Tensor | None], **options: Any) -> Gradients:
    return Gradients(list(found), [None if g is None else g.clone() for g in found.values()], **options)


def ending(found: Mapping[str, Tensor], end: str) -> dict[str, Tensor]:
    return {name: each for name, each in found.items() if name.endswith(end)}


def test_the_update_is_that_of_each_optimizer_alone() -> None:
    together, apart = drawn(0), drawn(0)
    bound = BOTH.bind(together)
    alone = {end: optimizer.bind(ending(apart, end[:-1])) for end, optimizer in BOTH.optimizers.items()}
    for step in range(3):
        found = drawn(step + 1)
        bound.update(gradients_of(found), step)
        for end, optimizer in alone.items():
            optimizer.update(gradients_of(ending(found, end[:-1])), step)
    for name, parameter in together.items():
        assert torch.equal(parameter, apart[name])
        assert not torch.equal(parameter, drawn(0)[name])


def test_a_clip_over_all_parameters_reaches_each_optimizer() -> None:
    parameters, found = drawn(0), drawn(1)
    gradients = gradients_of(found)
    norm = gradients.norm
    ClipGlobalNorm(0.1).bind(parameters)(gradients, 0)
    ByName({"bias$": SGD(0.5), "weight$": SGD(0.25)}).bind(parameters).update(gradients, 0)
    for name, parameter in parameters.items():
        lr = 0.5 if name.endswith("bias") else 0.25
        torch.testing.assert_close(parameter, drawn(0)[name] - lr * (0.1 / norm) * found[name])


def test_parameters_of_different_optimizers_may_have_one_gradient() -> None:
    parameters = {"a": torch.zeros(40), "b": torch.zeros(40)}
    one = torch.full((40,), 6.0)
    ByName({"a": SGD(1.0), "b": SGD(1.0)}).bind(parameters).update(Gradients(["a", "b"], [one, one], divisor=2.0), 0)
    assert parameters["a"].tolist() == parameters["b"].tolist() == [-3.0] * 40


def test_a_parameter_without_gradient_stays_untouched() -> None:
    parameters = drawn(0)
    bound = BOTH.bind(parameters)
    bound.update(gradients_of({**drawn(1), "head.weight": None, "head.bias": None}), 0)
    moved = [name for name, parameter in parameters.items() if not torch.equal(parameter, drawn(0)[name])]
    assert moved == ["stem.weight", "stem.bias"]
    assert not bound.slots()["momentum_buffer/head.weight"].any()


def test_rows_of_an_embedding_reach_the_optimizer_that_takes_them() -> None:
    parameters = {"weight": torch.ones(2), "table": torch.zeros(5, 2)}
    rows = {1: torch.tensor([3, 1])}
    found = Gradients(list(parameters), [torch.ones(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])], rows=rows, divisor=2.0)
    ByName({"table": SGD(1.0), "weight": SGD(1.0, momentum=0.9)}).bind(parameters).update(found, 0)
    expected = torch.zeros(5, 2)
    expected[3], expected[1] = torch.tensor([-0.5, -1.0]), torch.tensor([-1.5, -2.0])
    assert torch.equal(parameters["table"], expected)
    assert parameters["weight"].tolist() == [0.5, 0.5]


def test_slots_are_saved_and_loaded_exactly() -> None:
    first, second = drawn(0), drawn(0)
    one, two = BOTH.bind(first), BOTH.bind(second)
    one.update(gradients_of(drawn(1)), 0)
    saved = {name: slot.clone() for name, slot in one.slots().items()}
    assert list(saved) == ["momentum_buffer/stem.weight", "momentum_buffer/head.weight"]
    expected = two.expects(saved)
    assert {n: (t.shape, t.dtype) for n, t in expected.items()} == {n: (t.shape, t.dtype) for n, t in saved.items()}
    for name, parameter in second.items():
        parameter.copy_(first[name])
    two.load(saved, one.values())
    for bound in (one, two):
        bound.update(gradients_of(drawn(2)), 1)
    for name in first:
        assert torch.equal(first[name], second[name])
    assert two.values() == one.values()


def test_learning_rates_are_told_by_pattern() -> None:
    bound = ByName({"bias$": SGD(0.5), "weight$": SGD(Cosine(1.0, 10))}).bind(drawn(0))
    assert bound.learning_rates(0) == {"bias$": 0.5, "weight$": 1.0}
    assert bound.learning_rates(10) == {"bias$": 0.5, "weight$": pytest.approx(0.0)}


def test_epochs_are_resolved_for_each_optimizer_and_each_stream() -> None:
    both = ByName({"bias$": SGD(Constant(0.5)), "weight$": SGD(Cosine(1.0, ls.Epochs(2)))})
    bound = both.bind(drawn(0))
    for batch_size, num_steps in ((20, 10), (50, 4), (20, 10)):
        lines = bound.resolve(100, batch_size)
        assert len(lines) == 1
        assert lines[0].startswith(f"weight$: 2 epochs are {num_steps} steps")
        assert bound.learning_rates(num_steps // 2)["weight$"] == pytest.approx(0.5)


def test_what_all_optimizers_resolve_alike_is_told_once() -> None:
    alike = {name: SGD(Cosine(rate, ls.Epochs(2))) for name, rate in (("bias$", 1.0), ("weight$", 0.5))}
    assert ByName(alike).bind(drawn(0)).resolve(100, 50) == ["2 epochs are 4 steps (100 examples, batches of 50)"]


class Numbered(torch.optim.SGD):
    """Its update is as large as the number of those it has made."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["count"])


def counted(names: Mapping[str, str]) -> ByName:
    """Optimizers with values: SGD under "no values"."""
    return ByName({p: SGD(0.5) if kind == "no values" else FromTorch(Numbered, lr=0.1) for p, kind in names.items()})


def moved_once(optimizer: ByName, **more: Any) -> tuple[Any, dict[str, Any]]:
    bound = optimizer.bind(drawn(0))
    bound.update(gradients_of(drawn(1)), 0)
    return bound, json.loads(json.dumps(bound.values()))


def test_values_stay_with_their_parameters_however_patterns_are_written() -> None:
    _, values = moved_once(counted({"bias$": "a", "stem.weight": "b", "head.weight": "no values"}))
    first, second = drawn(0), drawn(0)
    one = counted({"bias$": "a", "stem.weight": "b", "head.weight": "no values"}).bind(first)
    two = counted({"head[.]weight": "no values", "^stem.w": "b", "[.]bias$": "a"}).bind(second)
    one.load({}, values)
    two.load({}, values)
    for bound in (one, two):
        bound.update(gradients_of(drawn(2)), 1)
    for name in first:
        assert torch.equal(first[name], second[name])
    torch.testing.assert_close(first["stem.weight"], drawn(0)["stem.weight"] - 2.0 * drawn(2)["stem.weight"])


def test_nothing_is_saved_where_no_optimizer_has_anything_to_save() -> None:
    assert moved_once(BOTH)[1] == {}


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"weight$": "a", "stem.bias": "b", "head.bias": "c"}, r"given: *one optimizer of head.bias, stem.bias\n"),
        ({"weight$": "a", "bias$": "no values"}, r"given: *groups, state\n.*those of SGD"),
        (
            {".": "a"},
            r"given: *one optimizer of .*\n.*one of stem.weight, stem.bias, head.weight, head.bias\n.*resume with",
        ),
    ],
)
def test_values_of_other_parameters_are_refused_before_anything_changes(others: dict[str, str], message: str) -> None:
    _, values = moved_once(counted({"weight$": "a", "bias$": "b"}))
    bound, before = moved_once(counted(others))
    for refuse in (bound.check_values, lambda values: bound.load({}, values)):
        with pytest.raises(ls.CheckpointError, match=r"values of another optimizer(.|\n)*" + message):
            refuse(values)
    assert bound.values() == before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, r"given: *none\n.*FromTorch\(Numbered"),
        ({"groups": [{}], "state": {}}, r"given: *groups, state\n.*optimizers by name"),
    ],
)
def test_values_of_an_optimizer_of_all_are_refused(values: dict[str, Any], message: str) -> None:
    bound, _ = moved_once(counted({"weight$": "a", "bias$": "b"}))
    with pytest.raises(ls.CheckpointError, match=message):
        bound.check_values(values)


def test_each_pattern_is_told_with_its_parameters_and_inner_ones_with_those_of_their_optimizer() -> None:
    inner = AdamW(0.1, weight_decay={"weight$": 0.01})
    nested = ByName({"bias$": SGD(0.5), "weight$": inner})
    matched = list(ByName({"^stem": inner, "^head": nested}).bind(drawn(0)).matched())
    assert matched == [
        (f"optimizer '^stem' = {inline_toml(inner)}", ["stem.weight", "stem.bias"]),
        ("optimizer '^stem': AdamW weight_decay 'weight$' = 0.01", ["stem.weight"]),
        (f"optimizer '^head' = {inline_toml(nested)}", ["head.weight", "head.bias"]),
        (f"optimizer '^head': optimizer 'bias$' = {inline_toml(SGD(0.5))}", ["head.bias"]),
        (f"optimizer '^head': optimizer 'weight$' = {inline_toml(inner)}", ["head.weight"]),
        ("optimizer '^head': optimizer 'weight$': AdamW weight_decay 'weight$' = 0.01", ["head.weight"]),
    ]


def test_sparse_gradients_that_one_cannot_take_are_refused_before_anything_moves() -> None:
    parameters = {"weight": torch.ones(2), "table": torch.zeros(5, 2), "other": torch.zeros(5, 2)}
    both = {"weight|table": SGD(1.0), "other": SGD(1.0, momentum=0.9)}
    bound = ByName(both).bind(parameters)
    bound.check_rows(["weight", "table"])
    with pytest.raises(ls.InputError, match="SGD cannot update 'other' from a sparse gradient"):
        bound.check_rows(["table", "other"])
    rows = {1: torch.tensor([3]), 2: torch.tensor([3])}
    found = Gradients(list(parameters), [torch.ones(2), torch.ones(1, 2), torch.ones(1, 2)], rows=rows)
    with pytest.raises(ls.InputError, match="SGD cannot update 'other' from a sparse gradient"):
        bound.update(found, 0)
    assert parameters["weight"].tolist() == [1.0, 1.0]
    assert not parameters["table"].any()


def test_the_rates_of_all_are_checked_before_anything_moves() -> None:
    model = torch.nn.Linear(2, 2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    state = ls.TrainState(model, {"weight": SGD(0.1), "bias": SGD(lambda step: -1.0)})
    with pytest.raises(ls.InputError, match=r"learning rate after 0 updates cannot be used.*\n.*-1.0, from .*lambda"):
        state.apply(Attempt([torch.ones(2, 2), torch.ones(2)], (), {"loss": 1.0}))
    assert state.step == 0
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ByName({"stem": SGD(0.1), "head.bias": SGD(0.2)}),
            r"would have no optimizer.*\n.*patterns 'stem', 'head.bias'; not matched: head.weight\n.*one pattern",
        ),
        (lambda: ByName({}), r"no optimizer.*\n.*\n.*one by pattern, or more"),
        (lambda: ByName({".": SGD(0.1), "bias": SGD(0.2)}), "'stem.bias' is matched by two patterns of optimizer"),
        (lambda: ByName({".": SGD(0.1), "tail": SGD(0.2)}), "A pattern of optimizer matches no parameter"),
        (lambda: ByName([SGD(0.1)]), r"optimizers is of the wrong type.*\n.*list\n.*by pattern\n.*write ByName"),  # type: ignore[arg-type]
        (lambda: ByName({".": SGD}), r"The optimizer of '.' is of the wrong type.*\n.*class SGD\n.*a value"),  # type: ignore[dict-item]
        (lambda: ByName({".": 0.1}), r"The optimizer of '.' is of the wrong type.*\n.*float"),  # type: ignore[dict-item]
        (lambda: ByName({"bias": SGD(0.1)}, rest=0.2), r"rest is of the wrong type.*\n.*float"),  # type: ignore[arg-type]
        (
            lambda: ByName({"bias$": SGD(0.1), "weight$": SGD(0.1)}, rest=SGD(0.2)),
            r"of the rest would update nothing.*\n.*'bias\$', 'weight\$', which match every .*, and rest={kind = .sgd",
        ),
    ],
)
def test_each_parameter_has_exactly_one_optimizer(make: Callable[[], ByName], message: str) -> None:
    with pytest.raises(ls.InputError, match=message):
        make().bind(drawn(0))


def test_the_rest_updates_what_no_pattern_matches() -> None:
    one, two = drawn(0), drawn(0)
    bound = ByName({"^stem": SGD(0.5)}, rest=SGD(0.25)).bind(one)
    bound.update(gradients_of(drawn(1)), 0)
    ByName({"^stem": SGD(0.5), "^head": SGD(0.25)}).bind(two).update(gradients_of(drawn(1)), 0)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert bound.learning_rates(0) == {"^stem": 0.5, "rest": 0.25}
    assert [names for _, names in bound.matched()] == [["stem.weight", "stem.bias"], ["head.weight", "head.bias"]]


# Names as they are in timm (ViT, ResNet), torchvision (ViT), and in nets without numbered blocks
LAYERS = [
    (
        "cls_token pos_embed patch_embed.proj.weight blocks.0.norm1.weight blocks.0.attn.qkv.weight "
        "blocks.1.mlp.fc1.bias norm.weight head.weight",
        {
            "before the blocks": "cls_token pos_embed patch_embed.proj.weight",
            "blocks.0": "blocks.0.norm1.weight blocks.0.attn.qkv.weight",
            "blocks.1": "blocks.1.mlp.fc1.bias",
            "after the blocks": "norm.weight head.weight",
        },
    ),
    (
        "conv1.weight bn1.weight layer1.0.conv1.weight layer1.0.downsample.0.weight layer1.1.conv1.weight "
        "layer2.0.conv1.weight fc.weight",
        {
            "before the blocks": "conv1.weight bn1.weight",
            "layer1.0": "layer1.0.conv1.weight layer1.0.downsample.0.weight",
            "layer1.1": "layer1.1.conv1.weight",
            "layer2.0": "layer2.0.conv1.weight",
            "after the blocks": "fc.weight",
        },
    ),
    (
        "class_token conv_proj.weight encoder.layers.encoder_layer_0.mlp.0.weight "
        "encoder.layers.encoder_layer_1.mlp.0.weight encoder.ln.weight heads.head.weight",
        {
            "before the blocks": "class_token conv_proj.weight",
            "encoder.layers.encoder_layer_0": "encoder.layers.encoder_layer_0.mlp.0.weight",
            "encoder.layers.encoder_layer_1": "encoder.layers.encoder_layer_1.mlp.0.weight",
            "after the blocks": "encoder.ln.weight heads.head.weight",
        },
    ),
    ("0.weight 0.bias bridge.weight 2.weight", {"0": "0.weight 0.bias bridge.weight", "2": "2.weight"}),
    (
        "conv1.weight conv1.bias local3.weight scale",
        {"conv1": "conv1.weight conv1.bias", "local3": "local3.weight", "scale": "scale"},
    ),
    (
        "Conv2d_1a_3x3.conv.weight Mixed_5b.branch5x5_1.conv.weight Mixed_5b.branch1x1.conv.weight fc.weight",
        {
            "Conv2d_1a_3x3": "Conv2d_1a_3x3.conv.weight",
            "Mixed_5b": "Mixed_5b.branch5x5_1.conv.weight Mixed_5b.branch1x1.conv.weight",
            "fc": "fc.weight",
        },
    ),
    (
        "inception3a.branch1.conv.weight inception3a.branch2.0.conv.weight fc.weight",
        {"inception3a": "inception3a.branch1.conv.weight inception3a.branch2.0.conv.weight", "fc": "fc.weight"},
    ),
    (
        "body.0.weight head.regression_head.conv.0.weight head.classification_head.conv.0.weight",
        {
            "body.0": "body.0.weight",
            "after the blocks": "head.regression_head.conv.0.weight head.classification_head.conv.0.weight",
        },
    ),
    ("", {}),
]


@pytest.mark.parametrize(("names", "expected"), LAYERS, ids=range(len(LAYERS)))
def test_layers_are_numbered_blocks_and_what_is_before_and_after_them(names: str, expected: dict[str, str]) -> None:
    assert layers(names.split()) == {layer: members.split() for layer, members in expected.items()}
    assert list(layers(names.split())) == list(expected)


def test_rates_of_layers_within_the_rest_are_all_told() -> None:
    bound = ByName({"^head": SGD(0.2)}, rest=LayerDecay(SGD(0.1), 0.5)).bind(drawn(0))
    assert bound.learning_rates(0) == {"^head": 0.2, "rest: stem": 0.1}
    with pytest.raises(ls.InputError, match=r"'rest' is the name(.|\n)*re\[s\]t"):
        ByName({"rest": SGD(0.2)}, rest=SGD(0.1))


def test_each_layer_below_learns_at_a_lower_rate() -> None:
    shapes = {"stem.weight": (2,), "blocks.0.weight": (2,), "blocks.1.weight": (2,), "head.weight": (2,)}
    parameters = {name: torch.ones(shape) for name, shape in shapes.items()}
    bound = LayerDecay(SGD(Cosine(0.8, 10)), decay=0.5).bind(parameters)
    rates = {"after the blocks": 0.8, "blocks.1": 0.4, "blocks.0": 0.2, "before the blocks": 0.1}
    assert bound.learning_rates(0) == pytest.approx(rates)
    assert next(iter(bound.learning_rates(5).values())) == pytest.approx(0.4)
    bound.update(gradients_of({name: torch.ones(2) for name in parameters}), 0)
    assert [1 - float(each[0]) for each in parameters.values()] == pytest.approx([0.1, 0.2, 0.4, 0.8])


def test_a_decay_of_one_is_one_rate_for_all() -> None:
    one, two = drawn(0), drawn(0)
    LayerDecay(AdamW(0.1), decay=1).bind(one).update(gradients_of(drawn(1)), 0)
    AdamW(0.1).bind(two).update(gradients_of(drawn(1)), 0)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=0)


def test_patterns_of_weight_decay_are_those_of_the_model_not_of_a_layer() -> None:
    parameters = {"blocks.0.weight": torch.ones(2), "blocks.1.weight": torch.ones(2), "scale": torch.ones(2)}
    bound = LayerDecay(SGD(1.0, weight_decay={"blocks.1": 0.25}), decay=1).bind(parameters)
    bound.update(gradients_of({name: torch.zeros(2) for name in parameters}), 0)
    assert [float(each[0]) for each in parameters.values()] == [1.0, 0.75, 1.0]
    with pytest.raises(ls.InputError, match="A pattern of weight_decay matches no parameter"):
        LayerDecay(SGD(1.0, weight_decay={"tail": 0.25})).bind(parameters)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: LayerDecay(SGD),
            r"optimizer is of the wrong type.*\n.*class SGD\n.*learning rate lr\n.*write LayerDecay",
        ),  # type: ignore[arg-type]
        (lambda: LayerDecay(BOTH), r"optimizer is of the wrong type.*\n.*ByName"),
        (
            lambda: LayerDecay(SGD(0.1), decay=1.5),
            r"decay is out of range.*\n.*1.5\n.*above 0, at most 1\n.*such as 0.75",
        ),
    ],
)
def test_what_has_no_rate_by_layer_is_refused(make: Callable[[], LayerDecay], message: str) -> None:
    with pytest.raises(ls.InputError, match=message):
        make()


def test_training_goes_on_exactly_with_rates_by_layer() -> None:
    def net(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))

    def attempt(seed: int) -> Attempt:
        generator = torch.Generator().manual_seed(seed)
        return Attempt([torch.randn(p.shape, generator=generator) for p in net(0).parameters()], (), {"loss": 1.0})

    first = ls.TrainState(net(0), LayerDecay(AdamW(0.1)))
    first.apply(attempt(1))
    second = ls.TrainState(net(1), LayerDecay(AdamW(0.1)))
    second.load(first.sections(), first.values())
    for state in (first, second):
        state.apply(attempt(2))
    for one, two in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, two)
