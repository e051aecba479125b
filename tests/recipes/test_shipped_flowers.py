"""`flowers_small`: SqueezeNet fine-tuned on a few photographs, from the weights that Caffe has trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import InputError
from lockstep.models.squeezenet import SqueezeNet
from lockstep.recipes.parts import CrossEntropy
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.shipped import find
from lockstep.recipes.tasks import Classification
from lockstep.recipes.toml import with_settings
from lockstep.runs.build import build_state
from lockstep.runs.inputs import check_inputs
from lockstep.runs.run import run
from lockstep.training.warm_start import warm_start
from lockstep.types import Batch
from lockstep.workers.rank import join

ROOT = Path(__file__).parent.parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
WEIGHTS = ROOT / "data" / "squeezenet" / "squeezenet1_1_imagenet_features.safetensors"
PHOTOGRAPHS = ("hopper.jpg", "padlock-406986_640_rotate_90.jpg")


@pytest.fixture
def small(tmp_path: Path) -> Recipe:
    """The recipe, told to learn two photographs of two kinds by heart."""
    for kind in PHOTOGRAPHS:
        (tmp_path / "photos" / kind).mkdir(parents=True)
        (tmp_path / "photos" / kind / "1.jpg").symlink_to(FIXTURES / "images" / kind)
    photos = str(tmp_path / "photos")
    told = [f"data.train={photos}", f"data.test={photos}", f"warm_start.path={WEIGHTS}"]
    smaller = ["data.image_size=48", "batch_size=2", "model.num_classes=2", "feed.num_processes=0", "device=cpu"]
    return with_settings(find("flowers_small"), told + smaller)


def test_two_photographs_are_known_after_a_few_steps_and_a_run_resumed_is_one_run(
    small: Recipe, tmp_path: Path
) -> None:
    # Exact runs have one thread a worker: they do not wait for each other where the machine is busy.
    small = with_settings(small, ["end.kind=steps", "end.count=8", "average.decay=0.5", "exchange.exact=true"])
    straight = run(small, tmp_path / "straight")
    assert straight.evaluation is not None
    assert (straight.step, straight.evaluation["top1"], straight.evaluation.weights) == (8, 1.0, "average")
    run(with_settings(small, ["end.count=5"]), tmp_path / "resumed")
    assert run(small, tmp_path / "resumed").evaluation == straight.evaluation
    files = [
        (tmp_path / name / "checkpoints" / "step-00000008").glob("*.safetensors") for name in ("straight", "resumed")
    ]
    one, other = ({path.name: path.read_bytes() for path in folder} for folder in files)
    assert one
    assert one == other


def test_the_first_layers_stay_the_last_learn_slowly_and_the_classifier_is_new(small: Recipe) -> None:
    state = build_state(small, join("cpu"))
    report = warm_start(state, small.warm_start.path or "", small.warm_start.mapping) if small.warm_start else None
    assert report is not None
    assert "50 of 52 tensors of the model" in str(report)
    assert "features.7.squeeze.weight" in state.frozen.parameters
    assert {"features.9.squeeze.weight", "features.12.expand3x3.bias", "classifier.2.weight"} <= {*state.parameters}


def test_where_data_and_weights_are_must_be_told(small: Recipe) -> None:
    given = find("flowers_small")
    with pytest.raises(InputError, match="has not been told where its train images are"):
        check_inputs(given, None)
    with pytest.raises(InputError, match="starts from trained weights, and has not been told which"):
        check_inputs(replace(small, warm_start=given.warm_start), None)


def test_images_come_as_caffe_has_them() -> None:
    """Blue first, from 0 to 255 less the mean colour: https://github.com/BVLC/caffe, of its models of ImageNet."""
    grey = find("flowers_small").data.inputs({"image": torch.full((1, 3, 2, 2), 128, dtype=torch.uint8)})
    torch.testing.assert_close(grey[0, :, 0, 0], torch.tensor([128 - 103.939, 128 - 116.779, 128 - 123.68]))
    red = torch.zeros(1, 3, 2, 2, dtype=torch.uint8)
    red[:, 0] = 255
    torch.testing.assert_close(
        find("flowers_small").data.inputs({"image": red})[0, 2], torch.full((2, 2), 255 - 123.68)
    )


class Corners(nn.Module):
    """Scores of two classes: the upper left and the upper right pixel."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.stack([images[:, 0, 0, 0], images[:, 0, 0, -1]], 1)


def test_with_flip_an_image_is_scored_with_its_mirror_image() -> None:
    images = torch.tensor([[3.0, 1.0], [1.0, 5.0]]).view(2, 1, 1, 2)
    batch = Batch({"image": images, "label": torch.tensor([0, 0])}, position=0, batch_size=2, towers=range(1))
    scored = Classification(lambda batch: batch["image"], CrossEntropy())
    assert scored.score(Corners(), batch)["top1"].tolist() == [1.0, 0.0]
    loss, *_ = replace(scored, flip=True).score_in_detail(Corners(), batch)["mistakes"]
    torch.testing.assert_close(loss, torch.full((2,), 2.0).log())


def test_the_recipe_says_whether_images_are_flipped() -> None:
    given = find("flowers_small")
    assert given.chosen_task.flip
    assert not with_settings(given, ["evaluate.flip=false"]).chosen_task.flip


def test_the_model_is_squeezenet_with_means_of_its_last_blocks() -> None:
    assert find("flowers_small").model == SqueezeNet(num_classes=5, fires_seen=3)
