"""The shipped maps against the names that TensorFlow and torchvision give, as tests/golden has them recorded."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from lockstep.errors import InputError
from lockstep.models.mnist import MnistNet
from lockstep.weights.layouts import infer_layout
from lockstep.weights.name_maps import (
    INCEPTION_SLIM,
    MNIST,
    SHIPPED,
    SLIM_INCEPTION_V3,
    TENSORFLOW,
    bookkeeping,
    get_name_map,
)
from lockstep.weights.names import Destination, NameMap, apply_renames

Shapes = dict[str, tuple[int, ...]]
GOLDEN: dict[str, Shapes] = {
    net: {name: tuple(shape) for name, shape in shapes.items()}
    for net, shapes in json.loads(
        gzip.decompress((Path(__file__).parent.parent / "golden" / "weight_names_golden.json.gz").read_bytes())
    ).items()
}
TORCHVISION = {n: s for n, s in GOLDEN["torchvision_inception_v3"].items() if not n.endswith("num_batches_tracked")}


def place(name: str, name_map: NameMap) -> Destination:
    places, _ = apply_renames({name: [Destination(name)]}, name_map.renames)
    (only,) = places[name]
    return only


def mapped(shapes: Shapes, name_map: NameMap, wanted: Shapes) -> Shapes:
    """The shapes by their names in the model, laid out as there; no two names become one."""
    found: Shapes = {}
    for name, shape in shapes.items():
        end = place(name, name_map)
        layout = end.layout or infer_layout("tensorflow", shape, wanted[end.name])
        laid_out = layout.shape(shape) if layout else shape
        assert laid_out is not None, name
        assert end.name not in found, name
        found[end.name] = laid_out
    return found


@pytest.mark.parametrize(
    ("net", "name_map"), [("slim_inception_v3", SLIM_INCEPTION_V3), ("inception_slim", INCEPTION_SLIM)]
)
def test_inception_gets_every_variable_and_lacks_only_the_scales(net: str, name_map: NameMap) -> None:
    scales = {name for name in TORCHVISION if name.endswith(".bn.weight")}
    assert len(scales) == 96
    wanted = {name: shape for name, shape in TORCHVISION.items() if name not in scales}
    assert mapped(GOLDEN[net], name_map, TORCHVISION) == wanted


def test_scales_have_a_place_where_a_file_has_them() -> None:
    assert place("InceptionV3/Mixed_5b/Branch_0/Conv2d_0a_1x1/BatchNorm/gamma", SLIM_INCEPTION_V3) == Destination(
        "Mixed_5b.branch1x1.bn.weight"
    )


def test_the_two_inceptions_agree_on_every_layer_by_its_place_in_the_net() -> None:
    # Both list their variables in the order in which the layers are made, but for the auxiliary head.
    orders = [
        [end for name in GOLDEN[net] if not (end := place(name, name_map).name).startswith(("AuxLogits", "fc"))]
        for net, name_map in (("slim_inception_v3", SLIM_INCEPTION_V3), ("inception_slim", INCEPTION_SLIM))
    ]
    assert orders[0] == orders[1]


def test_the_recorded_trainer_has_as_many_variables_as_published() -> None:
    names = list(GOLDEN["inception_slim"])
    scopes = ("conv0/", "mixed_35x35x256a/", "mixed_17x17x768b/", "mixed_8x8x2048a/", "logits/", "aux_logits/")
    assert [sum(name.startswith(scope) for name in names) for scope in scopes] == [4, 28, 40, 36, 2, 10]
    ends = ("weights", "biases", "beta", "gamma", "moving_mean", "moving_variance")
    assert [sum(name.endswith(f"/{end}") for name in names) for end in ends] == [98, 2, 96, 0, 96, 96]
    assert len(names) == 388


@pytest.mark.parametrize("kind", ["weights", "weight"])
def test_the_mnist_trainer_has_our_names_whether_it_says_weight_or_weights(kind: str) -> None:
    wanted = {name: tuple(value.shape) for name, value in MnistNet().state_dict().items()}
    own = bookkeeping(GOLDEN["mnist"])
    variables = {
        name.replace("/weights", "/weight").replace("/weight", f"/{kind}"): shape
        for name, shape in GOLDEN["mnist"].items()
        if name not in own and not name.endswith("/ExponentialMovingAverage")
    }
    assert mapped(variables, MNIST, wanted) == wanted


def test_the_features_of_mnist_that_are_flattened_keep_their_order() -> None:
    features, matrix = torch.randn(7, 7, 64), torch.randn(3136, 3)
    layout = place("local3/weights", MNIST).layout
    assert layout is not None
    found = layout.apply(matrix) @ features.permute(2, 0, 1).flatten()
    torch.testing.assert_close(found, features.flatten() @ matrix, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("variable", "ours"),
    [
        ("conv1/weights", "conv1.weight"),
        ("block/unit_1/conv/biases", "block.unit_1.conv.bias"),
        ("dw/depthwise_weights", "dw.weight"),
        ("dense/kernel", "dense.weight"),
        ("dense/bias", "dense.bias"),
        ("conv1/BatchNorm/gamma", "conv1.bn.weight"),
        ("conv1/BatchNorm/beta", "conv1.bn.bias"),
        ("conv1/BatchNorm/moving_mean", "conv1.bn.running_mean"),
        ("conv1/BatchNorm/moving_variance", "conv1.bn.running_var"),
        ("norm/gamma", "norm.weight"),
        ("conv1/alphas", "conv1.alphas"),
        ("W", "W"),
    ],
)
def test_other_nets_get_the_words_of_torch(variable: str, ours: str) -> None:
    assert place(variable, TENSORFLOW) == Destination(ours)


def test_steps_slots_and_powers_are_no_weights() -> None:
    reasons = bookkeeping(GOLDEN["mnist"])
    left = [name for name in GOLDEN["mnist"] if name not in reasons]
    weights = [f"{layer}/weights" for layer in ("conv1", "conv2", "local3")]
    weights += [f"{layer}/weight" for layer in ("local4", "softmax_linear")]
    biases = [f"{layer}/biases" for layer in ("conv1", "conv2", "local3", "local4", "softmax_linear")]
    averages = [f"{name}/ExponentialMovingAverage" for name in weights + biases]
    assert sorted(left) == sorted(weights + biases + averages)
    assert reasons["global_step"] == "count of steps"
    assert reasons["beta1_power"] == "state of an optimizer"
    assert reasons["conv1/weights/RMSProp_1"] == "slot of an optimizer"


@pytest.mark.parametrize(
    "name",
    [
        "local_step",
        "sync_rep_local_step",
        "train/global_step",
        "beta2_power_1",
        "optimizer/conv/weights/Adam",
        "conv0/BatchNorm/moving_mean/biased",
        "conv0/BatchNorm/moving_mean/local_step",
        "save_counter/.ATTRIBUTES/VARIABLE_VALUE",
        "optimizer/iter/.ATTRIBUTES/VARIABLE_VALUE",
        "model/dense/kernel/.OPTIMIZER_SLOT/optimizer/m/.ATTRIBUTES/VARIABLE_VALUE",
        "_CHECKPOINTABLE_OBJECT_GRAPH",
    ],
)
def test_what_trainers_keep_for_themselves_is_known(name: str) -> None:
    assert [*bookkeeping([name])] == [name]


@pytest.mark.parametrize("name", ["Momentum", "Adam/weights", "my_global_step", "step/weights", "power", "biased"])
def test_weights_with_such_words_in_their_names_are_weights(name: str) -> None:
    assert bookkeeping([name]) == {}


def test_maps_have_names() -> None:
    assert {name: get_name_map(name) for name in SHIPPED} == SHIPPED


@pytest.mark.parametrize(
    ("name", "hint"),
    [("minst", "did you mean 'mnist'?"), ("xyz", "give one of these, or a NameMap of your own")],
)
def test_a_map_that_is_not_shipped_is_refused(name: str, hint: str) -> None:
    with pytest.raises(InputError) as refusal:
        get_name_map(name)
    assert str(refusal.value) == (
        f"There is no name map {name!r}.\n"
        f"  given:    name_map={name!r}\n"
        f"  expected: {' or '.join(map(repr, SHIPPED))}\n"
        f"  hint:     {hint}"
    )


@pytest.mark.parametrize(
    ("variable", "parameter"),
    [
        ("FirstStageFeatureExtractor/resnet_v1_50/conv1/BatchNorm/gamma", "backbone.bn1.weight"),
        (
            "FirstStageFeatureExtractor/resnet_v1_50/block3/unit_2/bottleneck_v1/conv2/weights",
            "backbone.layer3.1.conv2.weight",
        ),
        (
            "SecondStageFeatureExtractor/resnet_v1_50/block4/unit_1/bottleneck_v1/shortcut/BatchNorm/beta",
            "second_stage.layer4.0.downsample.1.bias",
        ),
        ("resnet_v1_101/block1/unit_1/bottleneck_v1/conv1/weights", "backbone.layer1.0.conv1.weight"),
        ("resnet_v1_101/block4/unit_3/bottleneck_v1/conv3/weights", "second_stage.layer4.2.conv3.weight"),
        ("Conv/weights", "rpn.conv.weight"),
        ("FirstStageBoxPredictor/ClassPredictor/biases", "rpn.class_predictor.bias"),
        ("SecondStageBoxPredictor/BoxEncodingPredictor/weights", "box_head.box_predictor.weight"),
    ],
)
def test_both_stages_of_a_faster_rcnn_come_from_its_checkpoint_or_from_a_resnets(variable: str, parameter: str) -> None:
    places, _ = apply_renames({variable: [Destination(variable)]}, get_name_map("faster_rcnn_resnet_v1").renames)
    assert [place.name for place in places[variable]] == [parameter]
