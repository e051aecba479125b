"""The classes of images by the model of a run: the probabilities, the files that are read, and what is written."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from saved_runs import recipe_of_photos, saved
from tiny_images import image_folder

import lockstep as ls
from lockstep.checkpoints.store import Store
from lockstep.errors import DataError, InputError, LockstepError
from lockstep.images.decode import Decoding
from lockstep.images.normalisation import scale_image
from lockstep.readers.image_folder import ImageFolder
from lockstep.recipes.parts import Evaluate
from lockstep.recipes.recipe import Recipe
from lockstep.runs.build import Examples
from lockstep.runs.predict import predictions_csv, predictions_json
from lockstep.runs.workdir import KnownData, Workdir
from lockstep.types import NonFiniteError

DIGITS = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three photos of each of three classes."""
    return image_folder(tmp_path / "photos", 3)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run for photos, whose data is not there, and which knows the names of two classes."""
    saved(tmp_path / "run", recipe_of_photos(train="gone", validation="gone"))
    KnownData(tmp_path, {0: "blue", 1: "green"}).write(Workdir(tmp_path / "run"))
    return tmp_path / "run"


def test_probabilities_are_the_softmax_of_the_logits(tmp_path: Path, mnist: Recipe) -> None:
    state = saved(tmp_path / "run", mnist)
    for number, digit in enumerate(DIGITS):
        Image.fromarray(digit).save(tmp_path / f"{number}.png")
    found = ls.predict(tmp_path / "run", sorted(tmp_path.glob("*.png")), top=None)
    with torch.no_grad():
        expected = state.model.eval()(scale_image(torch.from_numpy(DIGITS)[:, None])).softmax(1)
    assert found.files == [f"{number}.png" for number in range(5)]
    assert torch.allclose(found.probabilities, expected.gather(1, found.labels), rtol=1e-5)
    assert found.labels.sort(1).values.tolist() == [[*range(10)]] * 5
    assert (found.probabilities.diff(dim=1) <= 0).all()
    assert (found.step, found.weights) == (7, "raw")


def test_digits_may_be_large_and_coloured(tmp_path: Path, mnist: Recipe) -> None:
    """Four pixels of one for each of the net's: shrunk, they are the same."""
    saved(tmp_path / "run", mnist)
    Image.fromarray(DIGITS[0]).save(tmp_path / "small.png")
    large = Image.fromarray(DIGITS[0]).resize((56, 56), Image.Resampling.NEAREST).convert("RGB")
    large.save(tmp_path / "large.png")
    found = ls.predict(tmp_path / "run", [tmp_path / "small.png", tmp_path / "large.png"], top=10)
    small, large = (
        dict(zip(*row, strict=True)) for row in zip(found.labels.tolist(), found.probabilities.tolist(), strict=True)
    )
    assert large == pytest.approx(small, rel=0.05)


def test_the_classes_are_those_that_an_evaluation_finds(run: Path, photos: Path) -> None:
    recipe = recipe_of_photos(validation=str(photos))
    found = ls.predict(run, photos)
    right = ImageFolder(photos).read_batch(np.arange(9))["label"]
    state = ls.TrainState(recipe.model.build(1), recipe.optimizer)
    top1 = ls.evaluate(state, recipe.chosen_task.score, Examples(recipe).held_out("validation")).sums["top1"]
    assert (found.labels[:, 0] == right).sum() == top1 > 0


def test_weights_and_steps_are_chosen(tmp_path: Path, photos: Path) -> None:
    recipe = replace(recipe_of_photos(), average=ls.optim.MovingAverage(0.9), evaluate=Evaluate(weights="average"))
    saved(tmp_path / "averaged", recipe, 3, 7)
    one = photos / "red/0.jpg"
    by_recipe, raw = ls.predict(tmp_path / "averaged", one), ls.predict(tmp_path / "averaged", one, weights="raw")
    assert (by_recipe.weights, by_recipe.step, raw.weights) == ("average", 7, "raw")
    assert not torch.equal(by_recipe.probabilities, raw.probabilities)
    assert ls.predict(f"{tmp_path}/averaged@3", str(one)).step == 3


def test_images_are_turned_where_the_run_turns_them(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 60, 3), dtype=np.uint8))
    image.save(tmp_path / "turned.png", exif=exif)
    image.transpose(Image.Transpose.ROTATE_270).save(tmp_path / "as_seen.png")
    paths = [tmp_path / "turned.png", tmp_path / "as_seen.png"]
    for exif_is_read in (True, False):
        recipe = recipe_of_photos()
        recipe = replace(recipe, data=replace(recipe.data, decoding=Decoding(exif=exif_is_read)))
        saved(tmp_path / f"run-{exif_is_read}", recipe)
        one, other = ls.predict(tmp_path / f"run-{exif_is_read}", paths).probabilities
        assert torch.equal(one, other) == exif_is_read


class TestFilesThatCannotBeRead:
    @pytest.fixture(autouse=True)
    def _damaged(self, photos: Path) -> None:
        (photos / "green/0.jpg").write_bytes(b"no image")
        (photos / "red/1.jpg").write_bytes((photos / "red/1.jpg").read_bytes()[:300])

    def test_unreadable_files_are_skipped_and_named(self, run: Path, photos: Path) -> None:
        found = ls.predict(run, photos)
        assert [bad.example_id for bad in found.skipped] == ["green/0.jpg", "red/1.jpg"]
        assert "the first bytes" in found.skipped[0].reason
        assert len(found) == 7
        assert found.files[2:5] == ["blue/2.jpg", "green/1.jpg", "green/2.jpg"]
        alone = [ls.predict(run, photos / file) for file in found.files]
        assert torch.allclose(found.probabilities, torch.cat([each.probabilities for each in alone]))

    def test_all_of_them_cannot(self, run: Path, photos: Path) -> None:
        broken = [photos / "green/0.jpg", photos / "red/1.jpg"]
        with pytest.raises(
            LockstepError, match=r"None of the 2 files can be read\.\n.*green/0\.jpg: .*red/1\.jpg"
        ) as one:
            ls.predict(run, broken)
        assert not isinstance(one.value, InputError), "the command ends with 1"

    def test_a_table_of_predictions_names_unreadable_files(self, run: Path, photos: Path) -> None:
        found = ls.predict(run, photos, top=2)
        header, *rows = csv.reader(predictions_csv(found).splitlines())
        assert header == [
            "file",
            "problem",
            *["label_1", "class_1", "probability_1", "label_2", "class_2", "probability_2"],
        ]
        assert [row[0] for row in rows] == [found.reader.example_id(place) for place in range(9)]
        assert rows[3][0] == "green/0.jpg"
        assert "cannot be decoded" in rows[3][1]
        assert rows[3][2:] == [""] * 6
        facts = json.loads(predictions_json(found))
        assert [*facts] == ["step", "weights", "folder", "predictions", "skipped"]
        assert [each["file"] for each in facts["skipped"]] == ["green/0.jpg", "red/1.jpg"]
        first = facts["predictions"][0]
        assert first["file"] == rows[0][0]
        assert [*first["classes"][0]] == ["label", "class", "probability"]
        cells = [str(cell) for each in first["classes"] for cell in each.values()]
        assert cells == rows[0][2:]
        assert float(cells[2]) == pytest.approx(float(found.probabilities[0, 0]), rel=1e-5)


def test_classes_have_names_where_the_run_knows_them(run: Path, photos: Path) -> None:
    found = ls.predict(run, photos / "red/0.jpg", top=None).classes(0)
    assert {each.label: each.name for each in found} == {0: "blue", 1: "green", 2: "2"}


def test_odd_names_of_files_are_quoted_and_are_no_formula(run: Path, photos: Path) -> None:
    names = ["=1+1.jpg", "-2.jpg", "a,b.jpg", 'c"d.jpg', "e\nf.jpg", "g\rh.jpg"]
    for name in names:
        shutil.copy(photos / "red/0.jpg", photos / name)
    found = ls.predict(run, [photos / name for name in names], top=1)
    rows = [row[0] for row in csv.reader(StringIO(predictions_csv(found), newline=""), strict=True)]
    assert rows == ["file", "./=1+1.jpg", "./-2.jpg", *names[2:]]
    assert [each["file"] for each in json.loads(predictions_json(found))["predictions"]] == names


def test_logits_that_are_not_finite_are_no_prediction(run: Path, photos: Path) -> None:
    state = ls.TrainState(recipe_of_photos().model.build(1), ls.optim.SGD(0.1))
    with torch.no_grad():
        for parameter in [*state.model.parameters()][2:]:
            parameter.fill_(1e30)
    Store(run / "checkpoints").write(8, state.sections(), {"loader": {"epoch_size": 100}})
    with pytest.raises(NonFiniteError, match=r"gives red/0\.jpg no probabilities"):
        ls.predict(run, [photos / "red/0.jpg", photos / "blue"])


def test_predicting_missing_images_or_runs_is_refused(run: Path, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="phtos cannot be read"):
        ls.predict(run, tmp_path / "phtos")
    with pytest.raises(InputError, match="top is out of range"):
        ls.predict(run, photos, top=0)
    with pytest.raises(LockstepError, match="rn"):
        ls.predict(tmp_path / "rn", photos)
