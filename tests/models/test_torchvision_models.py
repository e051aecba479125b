from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import InputError
from lockstep.models import InceptionV3, SqueezeNet, Timm, Torchvision
from lockstep.models.torchvision_models import imported, size_taken


def loads(library: str) -> bool:
    """Whether the library is there and fits the torch of these tests: there are torches that torchvision refuses."""
    if importlib.util.find_spec(library) is None:
        return False
    try:
        imported(library)
    except InputError:
        return False
    return True


LOADS = {library: loads(library) for library in ("torchvision", "timm")}
needs_torchvision = pytest.mark.skipif(not LOADS["torchvision"], reason="torchvision is not there, or does not load")
needs_timm = pytest.mark.skipif(not LOADS["timm"], reason="timm is not there, or does not load")

Value = Torchvision | Timm


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(Torchvision("resnet18", 4), marks=needs_torchvision),
        pytest.param(Torchvision("mobilenet_v3_small", 4, {"dropout": 0.3}), marks=needs_torchvision),
        pytest.param(Timm("resnet10t", 4), marks=needs_timm),
        pytest.param(Timm("resnet10t.c3_in1k", 4), marks=needs_timm),
    ],
    ids=lambda value: f"{type(value).__name__}-{value.name}",
)
def test_a_net_is_built_from_its_name_and_the_seed_alone(value: Value) -> None:
    torch.manual_seed(5)
    before, of_python = torch.random.get_rng_state(), random.getstate()
    first, other = value.build(seed=1), value.build(seed=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert random.getstate() == of_python
    torch.manual_seed(6)
    again = value.build(seed=1)
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(p, q) for p, q in zip(first.parameters(), other.parameters(), strict=True))
    assert first.eval()(torch.zeros(2, 3, 64, 64)).shape == (2, 4)


@needs_torchvision
def test_options_reach_torchvision() -> None:
    assert Torchvision("mobilenet_v3_small", 4, {"dropout": 0.3}).build(seed=0).get_submodule("classifier.2").p == 0.3


@needs_torchvision
def test_heads_besides_the_last_are_the_two_of_inception() -> None:
    images = torch.zeros(2, 3, 299, 299)
    logits, auxiliary = Torchvision("inception_v3", 4).build(seed=0)(images)
    assert logits.shape == auxiliary.shape == (2, 4)
    assert Torchvision("googlenet", 4).build(seed=0)(images[..., :64, :64]).shape == (2, 4)


@pytest.mark.parametrize(
    ("value", "usual", "least"),
    [
        (Torchvision("resnet50"), 224, 1),
        (Torchvision("inception_v3"), 299, 299),
        (Torchvision("inception_v3", options={"aux_logits": False}), 299, 75),
    ],
    ids=["any", "inception", "without its auxiliary head"],
)
def test_the_auxiliary_head_of_its_inception_wants_large_images(value: Torchvision, usual: int, least: int) -> None:
    assert (value.image_size, value.smallest_image) == (usual, least)


@needs_torchvision
@pytest.mark.parametrize("name", ["alexnet", "densenet121", "vgg11", "squeezenet1_0", "squeezenet1_1", "googlenet"])
def test_the_least_images_of_torchvisions_nets_are_the_least(name: str) -> None:
    value = Torchvision(name, 2)
    net, least = value.build(seed=0).eval(), value.smallest_image
    assert least > 1
    with torch.no_grad():
        net(torch.zeros(1, 3, least, least))
        with pytest.raises(RuntimeError):
            net(torch.zeros(1, 3, least - 1, least - 1))


@pytest.mark.parametrize(
    ("value", "only"),
    [
        (Torchvision("resnet50"), None),
        (Torchvision("vit_b_16"), 224),
        (Torchvision("maxvit_t"), 224),
        (Torchvision("vit_b_32", options={"image_size": 384}), 384),
        (Timm("resnet50"), None),
        (Timm("vit_tiny_patch16_224"), None),
        (Timm("vit_tiny_patch16_224", options={"img_size": 384}), 384),
        (Timm("vit_tiny_patch16_224", options={"img_size": 384, "dynamic_img_size": True}), None),
        (Timm("swin_tiny_patch4_window7_224", options={"img_size": 256, "strict_img_size": False}), None),
    ],
)
def test_transformers_take_images_of_one_size(value: Value, only: int | None) -> None:
    assert value.only_image == only


class Patches(nn.Module):
    def __init__(self, *size: int, strict: bool = True) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 4, 16)
        vars(self.patch_embed).update(img_size=size or None, strict_img_size=strict)


@pytest.mark.parametrize(
    ("net", "size"),
    [
        (nn.Linear(1, 1), None),
        (Patches(224, 224), 224),
        (Patches(224, 224, strict=False), None),
        (Patches(224, 448), None),
        (Patches(), None),
    ],
)
def test_a_net_says_by_its_patches_what_images_it_takes(net: nn.Module, size: int | None) -> None:
    assert size_taken(net) == size


@needs_timm
def test_nets_of_timm_say_by_their_patches_what_images_they_take() -> None:
    assert size_taken(Timm("vit_tiny_patch16_224", 4).build(0)) == 224
    assert size_taken(Timm("vit_tiny_patch16_224", 4, {"dynamic_img_size": True}).build(0)) is None
    assert size_taken(Timm("resnet10t", 4).build(0)) is None


@needs_torchvision
@pytest.mark.parametrize("options", [{}, {"aux_logits": False}], ids=["with", "without"])
def test_the_least_image_of_its_inception_is_the_least(options: dict[str, Any]) -> None:
    value = Torchvision("inception_v3", 2, options)
    net = value.build(seed=0)
    net(torch.zeros(2, 3, value.smallest_image, value.smallest_image))
    with pytest.raises(RuntimeError, match="size"):
        net(torch.zeros(2, 3, value.smallest_image - 1, value.smallest_image - 1))


@needs_torchvision
def test_inception_is_torchvisions_with_its_weights() -> None:
    theirs = Torchvision("inception_v3", 5, {"transform_input": False, "dropout": 0.0}).build(seed=0)
    same = InceptionV3(
        num_classes=5, dropout=0.0, batch_norm_decay=0.9, batch_norm_scale=True, average_over_padding=True
    )
    ours = same.build(seed=1)
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 299, 299, generator=torch.Generator().manual_seed(0)).double()
    theirs, ours = theirs.double(), ours.double()
    expected, found = theirs(images), ours(images)
    torch.testing.assert_close(tuple(found), tuple(expected))
    (expected[0].square().sum() + 0.4 * expected[1].square().sum()).backward()
    (found[0].square().sum() + 0.4 * found[1].square().sum()).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-12)
    statistics = dict(theirs.named_buffers())
    assert all(torch.allclose(value, statistics[name]) for name, value in ours.named_buffers())


@needs_torchvision
def test_squeezenet_is_torchvisions_with_its_weights() -> None:
    theirs, ours = Torchvision("squeezenet1_1").build(seed=0).eval(), SqueezeNet().build(seed=1).eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 65, 65, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(images), theirs(images))


@needs_torchvision
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet81", "torchvision has no classifier 'resnet81'.*\n.*name='resnet81'\n.*classifiers.*\n.*'resnet18'"),
        ("ResNet18", "torchvision has no classifier 'ResNet18'.*\n.*\n.*\n.*did you mean 'resnet18'"),
        ("fcn_resnet50", "'fcn_resnet50' of torchvision is no classifier of images.*\n.*\n.*alexnet"),
        ("fasterrcnn_resnet50_fpn", "is no classifier of images"),
        ("quantized_resnet50", "is no classifier of images.*\n.*\n.*\n.*'resnet50'"),
        ("r3d_18", "is no classifier of images.*\n.*\n.*\n.*give the name of one of these"),
    ],
)
def test_other_names_of_torchvision_are_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Torchvision(name).build(seed=0)


@needs_torchvision
@pytest.mark.parametrize("options", [{"dropuot": 0.3}, {"norm_layer": "batch"}], ids=["unknown", "wrong"])
def test_options_that_torchvision_refuses_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(
        InputError, match=f"resnet18 cannot be made so.*\n.*{next(iter(options))}.*\n.*takes\n.*correct"
    ):
        Torchvision("resnet18", 4, options).build(seed=0)


@needs_timm
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet_50", "timm has no classifier 'resnet_50'.*\n.*\n.*\n.*did you mean 'resnet50'"),
        ("hf-hub:timm/resnet18", "timm has no classifier 'hf-hub:timm/resnet18'"),
        ("local-dir:/tmp", "timm has no classifier 'local-dir:/tmp'"),
        ("resnet50.nobodys", "resnet50.nobodys cannot be made so.*\n.*nobodys"),
    ],
    ids=["misspelt", "hub", "folder", "tag"],
)
def test_other_names_of_timm_are_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Timm(name).build(seed=0)


@pytest.mark.parametrize("value", [Torchvision("resnet18"), Timm("resnet18")], ids=["torchvision", "timm"])
def test_a_library_that_is_not_there_is_named(value: Value, monkeypatch: pytest.MonkeyPatch) -> None:
    library = type(value).__name__.lower()
    for module in (library, f"{library}.models"):
        monkeypatch.setitem(sys.modules, module, None)  # as Python marks what cannot be imported
    message = (
        rf"This model needs {library}, which cannot be imported.\n  given:    ModuleNotFoundError: .*\n"
        rf"  expected: a {library} that fits torch {torch.__version__.split('+')[0]}.*\n"
        rf"  hint:     pip install 'lockstep-train\[{library}\]'"
    )
    with pytest.raises(InputError, match=message):
        value.build(seed=0)


@pytest.mark.parametrize("kind", [Torchvision, Timm])
@pytest.mark.parametrize(
    ("option", "hint"),
    [
        *(
            (name, "warm-start from a file")
            for name in ("weights", "weights_backbone", "pretrained", "checkpoint_path")
        ),
        ("num_classes", "num_classes of the model"),
        ("in_chans", "three channels"),
        ("features_only", "returns logits"),
    ],
)
def test_options_said_elsewhere_are_refused(option: str, hint: str, kind: type[Value]) -> None:
    with pytest.raises(InputError, match=f"options cannot hold '{option}'.*\n.*\n.*\n.*{hint}"):
        kind("resnet18", options={option: 1})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": 18}, "name is of the wrong type"),
        ({"name": "resnet18", "num_classes": 0}, "num_classes is out of range"),
    ],
    ids=["name", "classes"],
)
@pytest.mark.parametrize("kind", [Torchvision, Timm])
def test_other_fields_are_refused(kind: type[Value], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        kind(**fields)


@pytest.mark.parametrize("kind", [Torchvision, Timm])
def test_options_are_a_table(kind: type[Value]) -> None:
    with pytest.raises(InputError, match=r"options is of the wrong type.*\n.*list\n.*a table"):
        kind("resnet18", options=["dropout"])  # type: ignore[arg-type]


@needs_timm
def test_options_of_timm_are_arguments_of_its_function() -> None:
    model: Any = Timm("vit_tiny_patch16_224", 4, options={"img_size": 32, "drop_path_rate": 0.1}).build(0)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 4)


@pytest.mark.process
@needs_torchvision
def test_it_loads_where_its_operators_do_not() -> None:
    """As beside a torch without CUDA: the file of its operators is not found, which its import takes for granted."""
    code = (
        "import importlib.machinery as m, torch\n"
        "find = m.FileFinder.find_spec\n"
        "def found(self, name, *more):\n"
        "    return None if name == '_C' and 'torchvision' in self.path else find(self, name, *more)\n"
        "m.FileFinder.find_spec = found\n"
        "from lockstep.models import Torchvision\n"
        "from lockstep.detection.values import TorchvisionDetector\n"
        "print(Torchvision('resnet18', 4).build(0)(torch.zeros(1, 3, 64, 64)).shape)\n"
        "net = TorchvisionDetector('fasterrcnn_mobilenet_v3_large_320_fpn', 2).build(0).eval()\n"
        "print(len(net.postprocess(net(torch.rand(1, 3, 64, 64)))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "torch.Size([1, 4])\n1\n"
    assert "operators do not load" in done.stderr
