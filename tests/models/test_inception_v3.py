from __future__ import annotations

import copy
import gzip
import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import InputError
from lockstep.models.inception_v3 import (
    AuxiliaryHead,
    InceptionE,
    InceptionLogits,
    InceptionV3,
    InceptionV3Net,
    Layers,
)
from lockstep.weights.assignment import assign_tensors
from lockstep.weights.source import MemorySource
from lockstep.weights.warm_start import Target, WarmStart

NAMES = Path(__file__).parent.parent / "golden" / "weight_names_golden.json.gz"
GOLDEN = json.loads(gzip.decompress(NAMES.read_bytes()))
STD_OF_CUT_NORMAL = 0.8796
SMALL = InceptionV3(num_classes=5, depth_multiplier=0.1)
# By the reference's name of a scope: how its parts are called here, and how many variables they hold.
SCOPES = {
    "conv0": ("Conv2d_1a_3x3.", 4),
    "mixed_35x35x256a": ("Mixed_5b.", 28),
    "mixed_17x17x768b": ("Mixed_6b.", 40),
    "mixed_8x8x2048a": ("Mixed_7b.", 36),
    "logits": ("fc.", 2),
    "aux_logits": ("AuxLogits.", 10),
}
# Channels, and sides for images of 299, 150 and 75 pixels.
ENDPOINTS = {
    "Conv2d_1a_3x3": (32, 149, 74, 37),
    "Conv2d_2a_3x3": (32, 147, 72, 35),
    "Conv2d_2b_3x3": (64, 147, 72, 35),
    "maxpool1": (64, 73, 35, 17),
    "Conv2d_3b_1x1": (80, 73, 35, 17),
    "Conv2d_4a_3x3": (192, 71, 33, 15),
    "maxpool2": (192, 35, 16, 7),
    "Mixed_5b": (256, 35, 16, 7),
    "Mixed_5c": (288, 35, 16, 7),
    "Mixed_5d": (288, 35, 16, 7),
    "Mixed_6a": (768, 17, 7, 3),
    "Mixed_6b": (768, 17, 7, 3),
    "Mixed_6c": (768, 17, 7, 3),
    "Mixed_6d": (768, 17, 7, 3),
    "Mixed_6e": (768, 17, 7, 3),
    "Mixed_7a": (1280, 8, 3, 1),
    "Mixed_7b": (2048, 8, 3, 1),
    "Mixed_7c": (2048, 8, 3, 1),
}


@pytest.fixture(scope="module")
def full() -> InceptionV3Net:
    return InceptionV3().build(seed=1).eval()


@pytest.fixture(scope="module")
def built_small() -> InceptionV3Net:
    return SMALL.build(seed=1)


@pytest.fixture
def small(built_small: InceptionV3Net) -> InceptionV3Net:
    return copy.deepcopy(built_small)


def images(side: int = 75, batch: int = 2, channels: int = 3) -> Tensor:
    return torch.rand(batch, channels, side, side, generator=torch.Generator().manual_seed(side)) * 2 - 1


def variables(net: nn.Module) -> dict[str, Tensor]:
    """The parameters and statistics; torch counts the batches besides, and the reference does not."""
    return {name: value for name, value in net.state_dict().items() if not name.endswith("num_batches_tracked")}


def kind(name: str) -> str:
    """What the reference calls a variable of that name."""
    kinds = {"weight": "gamma", "bias": "beta"} if ".bn." in name else {"weight": "weights", "bias": "biases"}
    last = name.rsplit(".", 1)[1]
    return kinds.get(last, last)


def test_the_variables_are_as_many_as_the_references(full: InceptionV3Net) -> None:
    names = list(variables(full))
    assert len(names) == len(GOLDEN["inception_slim"]) == 388
    assert Counter(map(kind, names)) == {
        "weights": 98,
        "biases": 2,
        "beta": 96,
        "running_mean": 96,
        "running_var": 96,
    }
    assert sum(not name.startswith(("fc.", "AuxLogits.fc.")) for name in names) == 384
    for scope, (prefix, count) in SCOPES.items():
        assert sum(name.startswith(prefix) for name in names) == count, scope


def test_the_base_holds_as_many_values_as_tf_slims(full: InceptionV3Net) -> None:
    base = {name: value for name, value in variables(full).items() if not name.startswith(("fc.", "AuxLogits."))}
    assert sum(value.numel() for value in base.values()) == 21_802_784


def test_names_and_shapes_are_torchvisions(full: InceptionV3Net) -> None:
    theirs = {name: tuple(shape) for name, shape in GOLDEN["torchvision_inception_v3"].items()}
    with_scale = InceptionV3Net(InceptionV3(num_classes=1000, batch_norm_scale=True, depth_multiplier=1e-9))
    assert list(with_scale.state_dict()) == list(theirs)
    ours = {name: tuple(value.shape) for name, value in full.state_dict().items()}
    assert {name for name in theirs if name not in ours} == {name for name in theirs if name.endswith(".bn.weight")}
    for name, shape in ours.items():
        expected = (1001, *theirs[name][1:]) if name.rsplit(".", 1)[0] in ("fc", "AuxLogits.fc") else theirs[name]
        assert shape == expected, name


@pytest.mark.parametrize(("side", "place"), [(299, 0), (150, 1), (75, 2)])
def test_endpoints_are_seen_by_hooks(full: InceptionV3Net, side: int, place: int) -> None:
    seen: dict[str, tuple[int, ...]] = {}

    def note(name: str, output: Tensor) -> None:
        seen[name] = tuple(output.shape)

    handles = [
        full.get_submodule(name).register_forward_hook(lambda _m, _i, output, name=name: note(name, output))
        for name in (*ENDPOINTS, "fc")
    ]
    with torch.no_grad():
        logits = full(images(side, batch=1))
    for handle in handles:
        handle.remove()
    assert logits.shape == seen.pop("fc") == (1, 1001)
    assert seen == {name: (1, shape[0], shape[1 + place], shape[1 + place]) for name, shape in ENDPOINTS.items()}


def test_training_returns_both_heads_and_evaluation_the_logits_alone(small: InceptionV3Net) -> None:
    for batch in (2, 3):
        trained = small(images(batch=batch))
        assert isinstance(trained, InceptionLogits)
        assert trained.logits.shape == trained.auxiliary_logits.shape == (batch, 5)
    small.eval()
    scores = small(images(batch=4))
    assert isinstance(scores, Tensor)
    assert scores.argmax(1).shape == (4,)


def test_without_the_auxiliary_head_there_is_none(small: InceptionV3Net) -> None:
    plain = InceptionV3(num_classes=5, depth_multiplier=0.1, auxiliary=False).build(seed=1)
    assert isinstance(plain(images()), Tensor)
    assert set(small.state_dict()) - set(plain.state_dict()) == {
        name for name in small.state_dict() if name.startswith("AuxLogits.")
    }


# Maps of images of 299 pixels and fewer: the pooling leaves 5x5 to 1x1 of them, and TF-Slim's kernel is as large.
@pytest.mark.parametrize("sides", [(17, 17), (14, 14), (11, 11), (8, 8), (5, 5), (8, 14), (17, 5)])
@torch.no_grad()
def test_a_cut_kernel_in_the_middle_of_zeros_scores_as_it_does_alone(
    sides: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(3)
    head = AuxiliaryHead(Layers(SMALL), 7, 5).double()
    head.conv0 = nn.Identity()
    head.conv1.bn.bias.uniform_(-1, 1, generator=generator)  # it has no value before the net draws them all
    head.fc.weight.uniform_(-1, 1, generator=generator)
    outputs, inputs = head.conv1.conv.weight.shape[:2]
    height, width = ((side - 5) // 3 + 1 for side in sides)
    # Whole numbers are summed without rounding: the same function gives the same bits.
    kernel, hidden = (
        torch.randint(-8, 9, shape, generator=generator).double()
        for shape in ((height, width, inputs, outputs), (2, inputs, height, width))
    )
    source = MemorySource({f"InceptionV3/AuxLogits/Conv2d_2a_{height}x{width}/weights": kernel})
    target = {"AuxLogits.conv1.conv.weight": Target((outputs, inputs, 5, 5), "float64", role="kernel")}
    plan = assign_tensors(source, target, WarmStart(name_map="slim_inception_v3"))
    assert ("1 put in the middle of zeros" in str(plan.report)) is ((height, width) != (5, 5))
    head.conv1.conv.weight.copy_(dict(plan.tensors(source))["AuxLogits.conv1.conv.weight"])

    alone = F.conv2d(hidden, kernel.permute(3, 2, 0, 1))
    expected = head.fc(F.relu(head.eval().conv1.bn(alone)).mean((2, 3)))
    assert expected.std() > 1
    monkeypatch.setattr(F, "avg_pool2d", lambda *_, **__: hidden)  # what the pooling leaves of a map with these sides
    assert torch.equal(head(torch.zeros(2, inputs, *sides)), expected)


# Values of all variables, and channels after three blocks: what tf_slim.nets makes with 1001 classes.
@pytest.mark.parametrize(
    ("multiplier", "values", "channels"),
    [
        (0.5, 7_515_554, (128, 384, 1024)),
        (1 / 3, 3_647_487, (90, 255, 682)),
        (0.1, 596_524, (64, 118, 203)),
    ],
)
def test_the_depth_multiplier_thins_every_layer(multiplier: float, values: int, channels: tuple[int, ...]) -> None:
    net = InceptionV3(depth_multiplier=multiplier).build(seed=0)
    assert sum(value.numel() for value in variables(net).values()) == values
    assert (net.Mixed_5b.outputs, net.Mixed_6a.outputs, net.Mixed_7c.outputs) == channels
    assert len(variables(net)) == 388


def test_the_depth_multiplier_widens_too() -> None:
    wide = Layers(InceptionV3(depth_multiplier=2.0))
    with torch.device("meta"):
        assert InceptionE(wide, 2560).outputs == 4096


def test_initial_weights_are_the_references(full: InceptionV3Net) -> None:
    expected = {"AuxLogits.conv1.conv": 0.01, "AuxLogits.fc": 0.001, "fc": 0.01}
    count = 0
    for name, module in full.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            count += 1
            std = expected.get(name, 0.1)
            error_of_std = 1 / math.sqrt(2 * module.weight.numel())
            assert module.weight.std().item() == pytest.approx(STD_OF_CUT_NORMAL * std, rel=5 * error_of_std), name
            assert module.weight.abs().max() <= 2 * std * (1 + 1e-6), name
            assert module.bias is None or not module.bias.any(), name
        elif isinstance(module, nn.BatchNorm2d):
            assert not module.bias.any()
            assert not module.running_mean.any()
            assert (module.running_var == 1).all()
            assert module.num_batches_tracked == 0
            assert module.eps == 0.001
            assert module.momentum == pytest.approx(0.0003)
    assert count == 98


def test_initial_weights_by_the_inputs_are_those_of_the_tf_slim_nets() -> None:
    net = InceptionV3(num_classes=1001, depth_multiplier=0.3, initial_weights="variance_scaling").build(seed=2)
    fixed = {"AuxLogits.conv1.conv": 0.01, "AuxLogits.fc": 0.001}
    for name, module in net.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            inputs = module.weight[0].numel()
            std = fixed.get(name, math.sqrt(2.6 / inputs))
            error_of_std = 1 / math.sqrt(2 * module.weight.numel())
            assert module.weight.std().item() == pytest.approx(STD_OF_CUT_NORMAL * std, rel=5 * error_of_std), name


def test_the_seed_alone_decides_the_weights_and_no_random_stream_moves(small: InceptionV3Net) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    again, other = SMALL.build(seed=1), SMALL.build(seed=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(p, q) for p, q in zip(small.parameters(), again.parameters(), strict=True))
    assert not torch.equal(small.fc.weight, other.fc.weight)


def test_weights_can_be_drawn_anew_and_statistics_forgotten(small: InceptionV3Net) -> None:
    expected = copy.deepcopy(small.state_dict())
    with torch.no_grad():
        for value in small.state_dict().values():
            value.fill_(7)
    small.reset_parameters(torch.Generator().manual_seed(1))
    assert all(torch.equal(value, expected[name]) for name, value in small.state_dict().items())


def test_with_scale_batch_norm_begins_with_ones() -> None:
    net = InceptionV3(num_classes=5, depth_multiplier=0.1, batch_norm_scale=True).build(seed=1)
    scales = [value for name, value in net.state_dict().items() if name.endswith(".bn.weight")]
    assert len(scales) == 96
    assert all((scale == 1).all() for scale in scales)


def test_a_scale_of_ones_changes_nothing(small: InceptionV3Net) -> None:
    scaled = InceptionV3(num_classes=5, depth_multiplier=0.1, batch_norm_scale=True, dropout=0.0).build(seed=9)
    scaled.load_state_dict(small.state_dict(), strict=False)
    small.dropout.p = 0.0
    ours, theirs = small(images(107)), scaled(images(107))
    assert torch.equal(ours.logits, theirs.logits)
    assert torch.equal(ours.auxiliary_logits, theirs.auxiliary_logits)
    ours.logits.square().sum().backward()
    theirs.logits.square().sum().backward()
    assert torch.equal(small.Conv2d_1a_3x3.conv.weight.grad, scaled.Conv2d_1a_3x3.conv.weight.grad)


def test_dropout_is_before_the_last_layer_and_in_training_alone(small: InceptionV3Net) -> None:
    pooled: list[Tensor] = []
    given: list[Tensor] = []
    small.Mixed_7c.register_forward_hook(lambda _m, _i, output: pooled.append(output.mean((2, 3))))
    small.fc.register_forward_hook(lambda _m, inputs, _o: given.append(inputs[0]))
    small(images(batch=8))
    kept = given[0] != 0
    assert kept[pooled[0] > 0].float().mean().item() == pytest.approx(0.8, abs=0.06)
    torch.testing.assert_close(given[0][kept], pooled[0][kept] / 0.8)
    small.eval()
    small(images(batch=8))
    assert torch.equal(given[1], pooled[1])


def test_channels_last_is_kept_and_gives_the_same_scores(small: InceptionV3Net) -> None:
    small.dropout.p = 0.0
    expected = small(images(107, batch=4))
    small = small.to(memory_format=torch.channels_last)
    kept: list[str] = []

    def note(name: str, output: Tensor) -> None:
        if output.is_contiguous(memory_format=torch.channels_last):
            kept.append(name)

    for name in ENDPOINTS:
        small.get_submodule(name).register_forward_hook(lambda _m, _i, output, name=name: note(name, output))
    found = small(images(107, batch=4).to(memory_format=torch.channels_last))
    assert kept == list(ENDPOINTS)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("given", "shown", "hint"),
    [
        (torch.zeros(2, 3, 74, 299), r"shape \(2, 3, 74, 299\), torch.float32", "resize or crop the images, for .*=75"),
        (torch.zeros(2, 299, 299, 3), r"shape \(2, 299, 299, 3\), torch.float32", "put the channels second"),
        (torch.zeros(2, 1, 299, 299), r"shape \(2, 1, 299, 299\), torch.float32", "give as many as the net has"),
        (torch.zeros(3, 299, 299), r"shape \(3, 299, 299\), torch.float32", "put the channels second"),
        (torch.zeros(2, 3, 80, 80, dtype=torch.uint8), r"shape \(2, 3, 80, 80\), torch.uint8", "scale the pixels"),
    ],
    ids=["small", "channels-behind", "grey", "no-batch", "bytes"],
)
def test_other_images_are_refused(small: InceptionV3Net, given: Tensor, shown: str, hint: str) -> None:
    message = (
        rf"Inception-v3 cannot use these images.\n  given:    {shown}\n"
        r"  expected: shape \(batch, 3, height, width\), each side 75 pixels or more, floating point\n"
        rf"  hint:     .*{hint}"
    )
    with pytest.raises(InputError, match=message):
        small(given)


def test_one_pixel_less_than_the_least_would_leave_nothing(small: InceptionV3Net) -> None:
    small.eval()
    assert small(images(75)).shape == (2, 5)
    with pytest.raises(RuntimeError, match="Kernel size"):
        small.Mixed_7a(torch.zeros(1, small.Mixed_6e.outputs, 2, 2))
    assert [hidden.shape[2] for hidden in (small._stem(images(75)), small._stem(images(74)))] == [7, 6]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_classes": 0}, "num_classes is out of range.*\n.*num_classes=0"),
        ({"dropout": 1.0}, "dropout is out of range.*\n.*dropout=1.0"),
        ({"batch_norm_decay": 1.0}, "batch_norm_decay is out of range.*\n.*\n.*\n.*batch_norm_decay=0.9997"),
        ({"batch_norm_epsilon": 0.0}, "batch_norm_epsilon is out of range"),
        ({"depth_multiplier": 0}, "depth_multiplier is out of range.*\n.*depth_multiplier=0\n.*above 0"),
        ({"depth_multiplier": -1.0}, "depth_multiplier is out of range.*\n.*depth_multiplier=-1.0"),
        ({"depth_multiplier": float("inf")}, "depth_multiplier is out of range.*\n.*inf\n.*finite"),
        ({"depth_multiplier": float("nan")}, "depth_multiplier is out of range.*\n.*nan\n.*above 0"),
        ({"initial_weights": "he"}, "initial_weights cannot be 'he'.*\n.*\n.*'truncated_normal' or 'variance_scaling'"),
        ({"auxiliary": 1}, "auxiliary is of the wrong type"),
        ({"batch_norm_scale": "yes"}, "batch_norm_scale is of the wrong type"),
        ({"average_over_padding": None}, "average_over_padding is of the wrong type"),
    ],
    ids=lambda value: "-".join(map(str, *value.items())) if isinstance(value, dict) else "refused",
)
def test_other_fields_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        InceptionV3(**fields)  # type: ignore[arg-type]


def test_sizes_are_those_of_the_value() -> None:
    assert (InceptionV3.image_size, InceptionV3.smallest_image) == (299, 75)
    assert InceptionV3() == InceptionV3(1001)
