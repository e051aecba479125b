"""Inception-v3 scores and is trained as TF-Slim's is, from its checkpoints too (see make_inception_golden.py)."""

from __future__ import annotations

import copy
import gzip
import json
from dataclasses import replace
from pathlib import Path

import inception_inputs as inputs
import numpy as np
import numpy.typing as npt
import pytest
import torch
from inception_reference import (
    MAPPING,
    Recorded,
    as_ours,
    changes,
    recorded_run,
    reference_state,
    shrunken_net,
    towers_of,
    train,
)
from safetensors.torch import load_file
from torch import Tensor, nn

import lockstep as ls
from lockstep.cli.main import main
from lockstep.models.inception_v3 import InceptionV3
from lockstep.models.squeezenet import SqueezeNet
from lockstep.towers.towers import BatchNorm, Variance

HERE = Path(__file__).parent
SCORE_TOLERANCE = 1e-4
# Of the objective. TensorFlow's losses of float32 are 7e-5 off those of float64, to which ours come within 3e-15.
# Another processor rounds otherwise, and in float32 may add 2e-5 to that.
LOSS_TOLERANCE = {"float32": 1e-4, "float64": 1e-9}
# Of what a run added to a variable, relative to its norm.
CHANGE_TOLERANCE = {"float32": 5e-2, "float64": 1e-9}
AS_IT_WAS = 1e-12
"""What a change may be where there was none."""


@pytest.fixture(scope="module")
def full_size_net() -> nn.Module:
    """The whole net, with the weights that TF-Slim's was given, imported by their names there."""
    shapes = json.loads(gzip.decompress((HERE / "weight_names_golden.json.gz").read_bytes()))["slim_inception_v3"]
    # Recorded there for 1,000 classes.
    shapes = {name: [inputs.NUM_IMAGENET_CLASSES if n == 1000 else n for n in shape] for name, shape in shapes.items()}
    net = InceptionV3(inputs.NUM_IMAGENET_CLASSES, dropout=0.0).build(seed=0)
    ls.warm_start(ls.TrainState(net, ls.optim.SGD(0.1)), inputs.weights(shapes, inputs.USUAL), MAPPING)
    return net


def logits(name: str) -> npt.NDArray[np.floating]:
    with np.load(inputs.FIXTURES / "logits.npz", allow_pickle=False) as file:
        return file[name]


def furthest(given: Tensor, expected: npt.NDArray[np.floating]) -> float:
    return float(np.abs(given.detach().numpy() - expected).max())


@torch.no_grad()
def test_photos_get_tf_slims_logits(full_size_net: nn.Module) -> None:
    expected = logits("scored")
    assert expected.std(0).mean() > 0.2, "the photos are told apart"
    scored = full_size_net.eval()(as_ours(inputs.full_size_images("float32")))
    assert furthest(scored, expected) <= SCORE_TOLERANCE


@torch.no_grad()
def test_both_heads_give_tf_slims_logits_in_training(full_size_net: nn.Module) -> None:
    net = copy.deepcopy(full_size_net).double().train()  # its statistics move
    outputs = net(as_ours(inputs.full_size_images("float64")))
    assert furthest(outputs.logits, logits("trained")) <= 1e-9
    assert furthest(outputs.auxiliary_logits, logits("auxiliary")) <= 1e-9


# Checkpoints --------------------------------------------------------------------------------------------------------


def score(net: nn.Module) -> Tensor:
    with torch.no_grad():
        scored: Tensor = net.eval()(as_ours(inputs.full_size_images("float32")))
    return scored


@pytest.mark.parametrize(("averages", "expected"), [(False, "checkpoint_weights"), (True, "checkpoint_averages")])
def test_a_checkpoint_of_tf_slim_scores_as_there(averages: bool, expected: str) -> None:
    net = shrunken_net()
    state = ls.TrainState(net, ls.optim.SGD(0.1))
    report = ls.warm_start(state, inputs.CHECKPOINT, replace(MAPPING, prefer_average=averages))
    assert f"loaded        388  388 renamed, 98 transposed{', 388 averages' if averages else ''}" in str(report)
    assert "count of steps: global_step" in str(report)
    assert furthest(score(net), logits(expected)) <= SCORE_TOLERANCE
    assert furthest(score(net), logits("checkpoint_averages" if not averages else "checkpoint_weights")) > 1


@pytest.mark.parametrize(("words", "expected"), [([], "checkpoint_weights"), (["--average"], "checkpoint_averages")])
def test_an_imported_checkpoint_scores_as_there(words: list[str], expected: str, tmp_path: Path) -> None:
    path = tmp_path / "inception.safetensors"
    told = ["import", "checkpoint", str(inputs.CHECKPOINT), "--to", str(path), "--map", "slim_inception_v3"]
    assert main([*told, *words]) == 0
    net = shrunken_net()
    left = net.load_state_dict(load_file(path), strict=False)
    assert not left.unexpected_keys
    assert all(name.endswith("num_batches_tracked") for name in left.missing_keys)
    assert furthest(score(net), logits(expected)) <= SCORE_TOLERANCE


def test_batch_norm_with_a_scale_keeps_its_ones() -> None:
    net = shrunken_net(batch_norm_scale=True)
    report = ls.warm_start(ls.TrainState(net, ls.optim.SGD(0.1)), inputs.CHECKPOINT, replace(MAPPING, require_loaded=0))
    assert "not in such files: Conv2d_1a_3x3.bn.weight" in str(report)
    assert furthest(score(net), logits("checkpoint_weights")) <= SCORE_TOLERANCE


def test_a_net_of_other_average_pools_scores_otherwise() -> None:
    net = shrunken_net(average_over_padding=True)
    ls.warm_start(ls.TrainState(net, ls.optim.SGD(0.1)), inputs.CHECKPOINT, MAPPING)
    assert furthest(score(net), logits("checkpoint_weights")) > 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"num_classes": 8},
            r"'InceptionV3/Logits/Conv2d_1c_1x1/biases' does not fit 'fc\.bias': shape \(9,\) in the file, \(8,\) in",
        ),
        (
            {"depth_multiplier": 0.5},
            r"'InceptionV3/Conv2d_2b_3x3/BatchNorm/beta' does not fit 'Conv2d_2b_3x3\.bn\.bias': shape \(4,\) in",
        ),
    ],
    ids=["classes", "filters"],
)
def test_a_checkpoint_of_another_size_is_refused(settings: dict[str, int], message: str) -> None:
    state = ls.TrainState(shrunken_net(**settings), ls.optim.SGD(0.1))
    with pytest.raises(ls.CheckpointError, match=message):
        ls.warm_start(state, inputs.CHECKPOINT, MAPPING)


@pytest.mark.parametrize(
    ("kind", "path", "message"),
    [
        ("squeezenet", "inception/model.ckpt-6", r"missing: features\.0\.weight"),
        ("inception", "tf_ckpt/mtcnn/PNet-18", r"missing: Conv2d_1a_3x3\.conv\.weight"),
        ("inception", "tf_ckpt/sugyan_mnist/v2/regression.ckpt", "matches no tensor of .*regression/W, regression/b"),
    ],
)
def test_a_checkpoint_of_another_architecture_is_refused(kind: str, path: str, message: str) -> None:
    net = SqueezeNet(inputs.NUM_CLASSES).build(0) if kind == "squeezenet" else shrunken_net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises((ls.CheckpointError, ls.InputError), match=f"(?s){message}"):
        ls.warm_start(ls.TrainState(net, ls.optim.SGD(0.1)), inputs.FIXTURES.parent / path, MAPPING)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


# Training -----------------------------------------------------------------------------------------------------------


def check_losses(recorded: Recorded, losses: npt.NDArray[np.float64], dtype: str) -> None:
    """Fail unless they are the recorded ones: at each step their sum within the tolerance, each alone within twice."""
    errors, tolerance = np.abs(losses - recorded.losses), LOSS_TOLERANCE[dtype]
    assert (errors.sum(axis=1) / recorded.losses.sum(axis=1)).max() <= tolerance
    assert (errors / recorded.losses).max() <= 2 * tolerance


def unlike(
    recorded: Recorded, expected: npt.NDArray[np.float64], given: npt.NDArray[np.float64], dtype: str
) -> set[str]:
    """The variables whose change is not the recorded one."""
    allowed = CHANGE_TOLERANCE[dtype] * expected[:, 0] + AS_IT_WAS
    far = np.abs(given - expected).max(axis=1) > allowed
    return {name for name, is_far in zip(recorded.shapes, far, strict=True) if is_far}


@pytest.mark.parametrize("name", ["float32", pytest.param("float64", marks=pytest.mark.slow), "two_towers"])
def test_training_goes_as_in_tf_slim(name: str) -> None:
    run, recorded = inputs.RUNS[name], recorded_run(name)
    state = reference_state(shrunken_net(), recorded.shapes, run)
    assert len(state.penalised) == recorded.num_penalties == 98
    losses = train(state, run)
    assert losses.shape == (run.num_steps, 3)
    check_losses(recorded, losses, run.dtype)
    trained = changes({**state.parameters, **state.buffers}, recorded.shapes, run)
    assert not unlike(recorded, recorded.changes, trained, run.dtype)
    averaged = changes(state.averaged(), recorded.shapes, run)
    assert not unlike(recorded, recorded.average_changes, averaged, run.dtype)


@pytest.mark.parametrize(
    ("batch_norm", "variance", "differ"),
    [("last", "unbiased", {"moving_variance"}), ("first", "biased", {"moving_mean", "moving_variance"})],
)
def test_other_statistics_are_seen(batch_norm: BatchNorm, variance: Variance, differ: set[str]) -> None:
    run, recorded = inputs.RUNS["two_towers"], recorded_run("two_towers")
    state = reference_state(shrunken_net(), recorded.shapes, run)
    losses = train(state, run, replace(towers_of(run), batch_norm=batch_norm, variance=variance))
    check_losses(recorded, losses, run.dtype)
    trained = changes({**state.parameters, **state.buffers}, recorded.shapes, run)
    found = unlike(recorded, recorded.changes, trained, run.dtype)
    assert {name.rpartition("/")[2] for name in found} == differ
    # All but that of the auxiliary head, whose inputs have the same mean in any batch.
    assert len(found) >= 94 * len(differ) - 1
