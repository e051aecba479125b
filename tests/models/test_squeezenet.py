from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.errors import InputError
from lockstep.models.squeezenet import SqueezeNet, SqueezeNetNet

# By the place of a block: inputs, squeezed and expanded channels, as published.
FIRES = {
    3: (64, 16, 64),
    4: (128, 16, 64),
    6: (128, 32, 128),
    7: (256, 32, 128),
    9: (256, 48, 192),
    10: (384, 48, 192),
    11: (384, 64, 256),
    12: (512, 64, 256),
}


def images(side: int = 33, batch: int = 2) -> Tensor:
    return torch.rand(batch, 3, side, side, generator=torch.Generator().manual_seed(side)) * 2 - 1


@pytest.fixture(scope="module")
def net() -> SqueezeNetNet:
    return SqueezeNet().build(seed=0).eval()


def test_names_and_shapes_are_torchvisions(net: SqueezeNetNet) -> None:
    shapes = {"features.0.weight": (64, 3, 3, 3), "features.0.bias": (64,)}
    for place, (inputs, squeezed, expanded) in FIRES.items():
        for layer, shape in {
            "squeeze": (squeezed, inputs, 1, 1),
            "expand1x1": (expanded, squeezed, 1, 1),
            "expand3x3": (expanded, squeezed, 3, 3),
        }.items():
            shapes |= {f"features.{place}.{layer}.weight": shape, f"features.{place}.{layer}.bias": shape[:1]}
    shapes |= {"classifier.1.weight": (1000, 512, 1, 1), "classifier.1.bias": (1000,)}
    assert {name: tuple(value.shape) for name, value in net.state_dict().items()} == shapes
    assert sum(value.numel() for value in net.parameters()) == 1_235_496


def test_maps_are_as_large_as_published(net: SqueezeNetNet) -> None:
    sides: dict[int, tuple[int, ...]] = {}
    handles = [
        net.features[place].register_forward_hook(
            lambda _m, _i, output, place=place: sides.update({place: tuple(output.shape[1:])})
        )
        for place in (0, 2, 4, 5, 7, 8, 12)
    ]
    with torch.no_grad():
        assert net(images(224, batch=1)).shape == (1, 1000)
    for handle in handles:
        handle.remove()
    assert sides == {
        0: (64, 111, 111),
        2: (64, 55, 55),
        4: (128, 55, 55),
        5: (128, 27, 27),
        7: (256, 27, 27),
        8: (256, 13, 13),
        12: (512, 13, 13),
    }


def test_scores_are_means_of_what_relu_leaves(net: SqueezeNetNet) -> None:
    hidden = torch.nn.functional.conv2d(net.features(images()), net.classifier[1].weight, net.classifier[1].bias)
    torch.testing.assert_close(net(images()), hidden.clamp(min=0).mean((2, 3)))


def test_initial_weights_are_hes_but_for_the_last(net: SqueezeNetNet) -> None:
    weights = net.features[12].expand3x3.weight
    bound = (6 / (64 * 9)) ** 0.5
    assert bound * 0.999 < weights.abs().max() <= bound
    assert net.classifier[1].weight.std().item() == pytest.approx(0.01, rel=0.01)
    assert not any(value.any() for name, value in net.named_parameters() if name.endswith("bias"))


def test_the_seed_alone_decides_the_weights_and_no_random_stream_moves(net: SqueezeNetNet) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    again, other = SqueezeNet().build(seed=0), SqueezeNet().build(seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), again.parameters(), strict=True))
    assert not torch.equal(net.features[0].weight, other.features[0].weight)


def test_channels_last_is_kept_and_gives_the_same_scores(net: SqueezeNetNet) -> None:
    last = SqueezeNet().build(seed=0).eval().to(memory_format=torch.channels_last)
    given = images().to(memory_format=torch.channels_last)
    assert last.features(given).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(last(given), net(images()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "shown", "hint"),
    [
        (torch.zeros(2, 3, 16, 224), r"shape \(2, 3, 16, 224\), torch.float32", "resize or crop .* image_size=17"),
        (torch.zeros(2, 1, 224, 224), r"shape \(2, 1, 224, 224\), torch.float32", "put the channels second"),
        (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), r"shape \(2, 3, 32, 32\), torch.uint8", "scale the pixels"),
    ],
    ids=["small", "grey", "bytes"],
)
def test_other_images_are_refused(net: SqueezeNetNet, given: Tensor, shown: str, hint: str) -> None:
    message = (
        rf"SqueezeNet cannot use these images.\n  given:    {shown}\n"
        r"  expected: shape \(batch, 3, height, width\), each side 17 pixels or more, floating point\n"
        rf"  hint:     {hint}"
    )
    with pytest.raises(InputError, match=message):
        net(given)


def test_the_least_image_leaves_one_place_and_a_smaller_one_none(net: SqueezeNetNet) -> None:
    assert net.features(images(17)).shape == (2, 512, 1, 1)
    with pytest.raises(RuntimeError, match="too small"):
        net.features(images(16))
    assert (SqueezeNet.image_size, SqueezeNet.smallest_image) == (224, 17)


@pytest.mark.parametrize(("fires_seen", "num_means"), [(1, 512), (3, 384 + 512 + 512), (8, 2560)])
def test_the_last_layer_may_see_the_means_of_the_last_blocks(fires_seen: int, num_means: int) -> None:
    net = SqueezeNet(num_classes=5, fires_seen=fires_seen).build(seed=0).eval()
    hidden, means = images(), []
    for place, layer in enumerate(net.features):
        hidden = layer(hidden)
        if place in list(FIRES)[-fires_seen:]:
            means.append(hidden.mean((2, 3)))
    seen = torch.cat(means, 1)
    assert seen.shape == (2, num_means)
    spread = (seen.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    expected = (seen - seen.mean(1, keepdim=True)) / spread @ net.classifier[2].weight.T
    torch.testing.assert_close(net(images()), expected, rtol=1e-4, atol=1e-5)
    assert list(net.state_dict())[-2:] == ["classifier.2.weight", "classifier.2.bias"]
    assert net.classifier[2].weight.std().item() == pytest.approx(0.01, rel=0.05)


def test_the_features_do_not_depend_on_the_last_layer(net: SqueezeNetNet) -> None:
    other = SqueezeNet(fires_seen=2).build(seed=0)
    assert all(torch.equal(p, q) for p, q in zip(net.features.parameters(), other.features.parameters(), strict=True))


@pytest.mark.parametrize("fires_seen", [0, 9])
def test_there_are_eight_blocks_to_see(fires_seen: int) -> None:
    with pytest.raises(InputError, match=f"fires_seen is out of range.*\n.*fires_seen={fires_seen}"):
        SqueezeNet(fires_seen=fires_seen)


@pytest.mark.parametrize("field", ["num_classes", "dropout"])
def test_other_fields_are_refused(field: str) -> None:
    with pytest.raises(InputError, match=f"{field} is out of range.*\n.*{field}=-1"):
        SqueezeNet(**{field: -1})
