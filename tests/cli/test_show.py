"""`lockstep show` as a user runs it, in this process."""

from __future__ import annotations

import base64
import json
import re
import shutil
import uuid
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lockstep import durable
from lockstep.augmentations.resizers import KeepAspectRatioResizer
from lockstep.augmentations.turns import HorizontalFlip, RandomShift
from lockstep.cli.main import main
from lockstep.cli.source import example_stream
from lockstep.convert.detection import convert_voc
from lockstep.convert.sharding import Settings
from lockstep.images.drawing import COLOURS, GREEN, RED, YELLOW
from lockstep.readers.open import open_source
from lockstep.readers.reader import Reader
from lockstep.recipes.data import DetectionData, ImageData, MnistData
from lockstep.recipes.preprocessing import ResizedCrop
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import to_toml
from lockstep.runs.showing import examples
from lockstep.storage.remote_path import RemotePath

FIXTURES = Path(__file__).parent.parent / "fixtures"
INSTANCES = f"{FIXTURES / 'coco' / 'instances.json'}:{FIXTURES / 'coco' / 'images'}"
KEYPOINTS = f"{FIXTURES / 'coco' / 'person_keypoints.json'}:{FIXTURES / 'coco' / 'images'}"
PERSON_FLIPPED = (0, 2, 1, 4, 3, 6, 5, 8, 7, 10, 9, 12, 11, 14, 13, 16, 15)
WIDTH, HEIGHT = 12, 9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of three images each, of noise."""
    for number, name in enumerate(("cat/1", "cat/2", "cat/3", "dog & co/1", "dog & co/2", "dog & co/3")):
        path = tmp_path / "images" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return tmp_path / "images"


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A folder of damaged images, and of some that are whole."""
    names = ("hopper.png", "broken.png", "truncated_jpeg.jpg", "rgb_trns.png")
    (tmp_path / "odd" / "all").mkdir(parents=True)
    for name in names:
        shutil.copy(FIXTURES / "images" / name, tmp_path / "odd" / "all")
    return tmp_path / "odd"


def run(*words: str | Path, code: int = 0) -> None:
    assert main(["show", *map(str, words)]) == code


def articles(page: Path) -> list[str]:
    """The part of a page about each example."""
    return re.findall(r"<article.*?</article>", page.read_text(), re.DOTALL)


def images_in(text: str) -> list[Image.Image]:
    return [Image.open(BytesIO(base64.b64decode(data))) for data in re.findall(r"data:image/png;base64,([^\"]+)", text)]


def captions(text: str) -> list[str]:
    return re.findall(r"<figcaption>(.*?)</figcaption>", text)


def test_a_page_of_a_folder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    run(folder, "--augment", "crop", "--size", "8", "--positions", "0:6", "--to", page)
    assert capsys.readouterr().out == f"{page}: 6 examples\n"
    text = page.read_text()
    found = articles(page)
    assert [article.partition('"')[2].partition('"')[0] for article in found] == [f"position-{n}" for n in range(6)]
    names = [f"{name}/{number}.png" for name in ("cat", "dog &amp; co") for number in (1, 2, 3)]
    assert sorted(re.findall(r"<h2>position \d: (.*?)</h2>", text)) == names
    assert text.count(f"<p>label 0: cat, {WIDTH} x {HEIGHT} pixels</p>") == 3
    assert text.count(f"<p>label 1: dog &amp; co, {WIDTH} x {HEIGHT} pixels</p>") == 3
    for article in found:
        assert captions(article)[:2] == ["original", "RandomResizedCrop, 8 x 8"]
        assert captions(article)[2:] in ([], ["HorizontalFlip, 8 x 8"])
    assert not re.search(r"<script|https?:|src=\"(?!data:)", text), "it loads nothing and runs nothing"


def test_pictures_are_those_of_the_stream(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    run(folder, "--seed", "3", "--positions", "2", "--to", page)
    (picture,) = images_in(page.read_text())
    reader = example_stream(str(folder), None).reader
    (shown,) = examples(reader, [2], seed=3)
    assert shown.original is not None
    times = 448 // WIDTH
    assert picture.size == (WIDTH * times, HEIGHT * times)
    middles = np.array(picture)[times // 2 :: times, times // 2 :: times]
    assert np.array_equal(middles, shown.original.pixels.permute(1, 2, 0).numpy())


@pytest.mark.parametrize("ending", ["html", "png"])
@pytest.mark.parametrize("words", [["--augment", "inception", "--size", "16"], ["--augment", "crop", "--repeat", "2"]])
def test_the_same_command_gives_the_same_bytes(folder: Path, tmp_path: Path, words: list[str], ending: str) -> None:
    pages = [tmp_path / f"{name}.{ending}" for name in ("first", "second", "other")]
    for page, seed in zip(pages, ("0", "0", "1"), strict=True):
        run(folder, "--positions", "0:2", "--seed", seed, *words, "--to", page)
    first, second, other = (page.read_bytes() for page in pages)
    assert first == second
    assert first != other


def test_a_sheet_of_a_folder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sheet = tmp_path / "sheet.png"
    run(folder, "--positions", "7", "--order", "sequential", "--to", sheet)
    assert capsys.readouterr().out == f"{sheet}: 1 example\n"
    with Image.open(sheet) as image, Image.open(folder / "cat/2.png") as original:
        times = 300 // WIDTH
        assert image.size == (300 + 2 * 8, 16 + 2 * 8 + HEIGHT * times + 3 * 16 + 2 * 8)
        enlarged = original.resize((WIDTH * times, HEIGHT * times), Image.Resampling.NEAREST)
        top = 16 + 2 * 8 + 2 * 16
        assert np.array_equal(np.array(image)[top : top + HEIGHT * times, 8 : 8 + WIDTH * times], np.array(enlarged))


def test_bad_examples_are_tiles_that_say_why(odd: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, sheet = tmp_path / "page.html", tmp_path / "sheet.png"
    for path in (page, sheet):
        run(odd, "--order", "sequential", "--positions", "0:4", "--augment", "crop", "--to", path)
        assert capsys.readouterr().out == f"{path}: 4 examples, 2 with a problem\n"
    broken, hopper, _, truncated = articles(page)
    assert 'class="problem">' in broken
    assert "all/broken.png cannot be decoded." in broken
    assert not images_in(broken)
    assert len(images_in(hopper)) >= 2
    assert "problem" not in hopper
    assert "truncated" in truncated
    with Image.open(sheet) as image:
        pixels = np.array(image)
    assert (pixels == (255, 228, 225)).all(-1).sum() > 300 * 300, "the ground of two tiles"
    assert (pixels == (178, 34, 34)).all(-1).sum() > 1000, "their text"


def test_boxes_are_drawn_with_their_names_and_decide_where_inception_crops(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    run(INSTANCES, "--augment", "inception", "--size", "16", "--positions", "0:2", "--to", page)
    assert all(captions(article)[1] == "DistortedCrop, 16 x 16" for article in articles(page))
    original, *augmented = images_in(articles(page)[0])
    assert has_box(original)
    assert not any(map(has_box, augmented))
    assert example_stream(INSTANCES, "inception").pipeline.augment[0].boxes_field == "boxes"  # type: ignore[attr-defined]


def has_box(image: Image.Image) -> bool:
    """Whether the box of an object is drawn."""
    pixels = np.array(image)
    return any((pixels == colour).all(-1).sum() > 8 for colour in COLOURS)


def test_a_preset_takes_the_objects_along(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    run(INSTANCES, "--augment", "crop", "--size", "64", "--positions", "0:2", "--seed", "3", "--to", page)
    assert all(has_box(image) for article in articles(page) for image in images_in(article))
    assert example_stream(KEYPOINTS, "vgg").pipeline.fields == (
        "image", "boxes", "labels", "is_crowd", "area", "class_text", "masks"
    )  # fmt: skip


def test_a_recipe_of_a_detector_is_shown_with_what_it_makes_of_objects(tmp_path: Path) -> None:
    page, recipe = tmp_path / "page.html", tmp_path / "detector.toml"
    flip = HorizontalFlip(p=1.0, keypoint_flip_permutation=PERSON_FLIPPED)
    resizer = KeepAspectRatioResizer(100, 400)
    data = DetectionData(train=KEYPOINTS, masks=True, num_keypoints=17, augment=(flip,), resizer=resizer)
    recipe.write_text(to_toml(replace(find("mnist"), data=data)))
    run(recipe, "--positions", "0:2", "--order", "sequential", "--to", page)
    empty, persons = articles(page)
    for article in (empty, persons):
        stages = [caption.partition(",")[0] for caption in captions(article)]
        assert stages == ["original", "HorizontalFlip", "KeepAspectRatioResizer"]
    assert [has_box(image) for image in images_in(empty)] == [False] * 3
    assert [has_box(image) for image in images_in(persons)] == [True] * 3
    original, flipped = ((np.array(image) == COLOURS[0]).all(-1).any(0) for image in images_in(persons)[:2])
    assert np.flatnonzero(original)[0] == pytest.approx(np.flatnonzero(flipped[::-1])[0], abs=1)


def results_of(path: Path, *entries: tuple[int, int, list[float], float]) -> Path:
    """A file of detections: the place of the image, the category, the box in pixels and the score of each."""
    names = ("image_id", "category_id", "bbox", "score")
    images = (159269, 229358)
    path.write_text(json.dumps([dict(zip(names, (images[e[0]], *e[1:]), strict=True)) for e in entries]))
    return path


PERSON, SINK = [487.33, 2.87, 152.67, 417.14], [306.83, 363.06, 248.63, 59.94]


def test_detections_are_shown_beside_the_objects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    annotations = json.loads((FIXTURES / "coco" / "instances.json").read_text())["annotations"]
    of_image = [each for each in annotations if each["image_id"] == 229358]
    person, other = (next(each for each in of_image if each["category_id"] == number) for number in (1, 32))
    results = results_of(
        tmp_path / "results.json",
        (1, 1, person["bbox"], 0.9),
        (1, 1, [0, 0, 20, 20], 0.8),
        (1, 32, other["bbox"], 0.4),
    )
    words = ["--detections", results, "--positions", "0:2", "--order", "sequential", "--to", page, "--force"]
    run(INSTANCES, *words)
    num_objects = [
        sum(not each["iscrowd"] and each["image_id"] == image for each in annotations) for image in (159269, 229358)
    ]
    first, second = articles(page)
    assert captions(first) == ["original", f"detections: 0 right, 0 wrong, {num_objects[0]} missed"]
    assert captions(second) == ["original", f"detections: 1 right, 1 wrong, {num_objects[1] - 1} missed"]
    total = sum(num_objects) - 1
    assert capsys.readouterr().out == f"{page}: 2 examples; detections: 1 right, 1 wrong, {total} objects missed\n"
    _, detected = images_in(second)
    for colour in (GREEN, RED, YELLOW):
        assert (np.array(detected) == colour).all(-1).any()
    run(INSTANCES, *words, "--min-score", "0.3", "--augment", "crop")
    assert "1 wrong" in captions(articles(page)[1])[1]
    assert "2 right" in captions(articles(page)[1])[1]
    assert captions(articles(page)[1])[2].startswith("RandomResizedCrop")
    run(INSTANCES, *words, "--min-score", "0.95")
    assert captions(articles(page)[1])[1] == f"detections: 0 right, 0 wrong, {num_objects[1]} missed"


def test_detections_of_voc_and_of_records_have_the_ids_that_are_there(tmp_path: Path) -> None:
    page, results, shards = tmp_path / "page.html", tmp_path / "results.json", tmp_path / "shards"
    folder = FIXTURES / "voc" / "raccoon"
    fields = open_source(folder, truth=True).read_batch(np.array([0]))
    entry = {"image_id": fields["source_id"][0], "category_id": 1, "score": 1}
    results.write_text(json.dumps([{**entry, "bbox": fields["truth_boxes"][0][0].tolist()}]))
    convert_voc(folder, shards, split=None, base="all", settings=Settings(num_processes=1))
    for source in (folder, shards):
        run(source, "--detections", results, "--positions", "0", "--to", page, "--force")
        assert captions(page.read_text())[1] == "detections: 1 right, 0 wrong, 0 missed"


@pytest.mark.parametrize(
    ("words", "what", "rest"),
    [
        (["--min-score", "0.5"], "Only detections have a least score to be shown.", "--min-score 0.5 without"),
        (["--detections", "good.json", "--min-score", "nan"], "--min-score", "nan"),
        (["--detections", "gone.json"], "gone.json cannot be read.", "No such file"),
        (["--detections", "bad.json"], "Entry 0 of bad.json cannot be used", "negative width"),
        (["--detections", "unknown.json"], "Entry 1 of unknown.json cannot be used", "image_id 5"),
        (["--detections", "category.json"], "Entry 0 of category.json cannot be used", "category_id 999"),
    ],
    ids=lambda value: "_".join(value).strip("-") if isinstance(value, list) else "",
)
def test_detections_that_cannot_be_shown_leave_nothing_behind(
    words: list[str],
    what: str,
    rest: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    results_of(Path("good.json"), (0, 1, PERSON, 0.5))
    results_of(Path("bad.json"), (0, 1, [1, 2, -3, 4], 0.5))
    results_of(Path("category.json"), (0, 999, PERSON, 0.5))
    Path("unknown.json").write_text(Path("good.json").read_text()[:-1] + ", " + json.dumps(
        {"image_id": 5, "category_id": 1, "bbox": SINK, "score": 0.1}) + "]")  # fmt: skip
    run(INSTANCES, *words, "--to", "page.html", code=2)
    said = capsys.readouterr()
    assert what in said.err
    assert rest in said.err
    assert not said.out
    assert not Path("page.html").exists()


def test_detections_belong_to_data_with_objects(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = results_of(tmp_path / "results.json", (0, 1, PERSON, 0.5))
    for source, what in (
        ("mnist", "so they are shown beside the objects of a path"),
        (folder, "There are no objects in"),
    ):
        run(source, "--detections", results, "--to", tmp_path / "page.html", code=2)
        assert what in capsys.readouterr().err
        assert not (tmp_path / "page.html").exists()


def test_a_recipe_is_shown_as_it_trains(tmp_path: Path) -> None:
    page, mine = tmp_path / "page.html", tmp_path / "mine.toml"
    shifted = replace(find("mnist"), seed=4, data=MnistData(augment=(RandomShift(2),)))
    mine.write_text(to_toml(shifted))
    run(mine, "--positions", "0:2", "--to", page)
    assert [captions(article) for article in articles(page)] == [["original", "RandomShift, 28 x 28"]] * 2
    assert "seed 4" in page.read_text()
    run("mnist", "--positions", "0:2", "--to", page, "--force")
    assert [captions(article) for article in articles(page)] == [["original"]] * 2
    run("mnist", "--augment", mine, "--positions", "0:2", "--to", page, "--force")
    assert [captions(article) for article in articles(page)] == [["original", "RandomShift, 28 x 28"]] * 2


def test_what_the_device_will_do_is_shown_step_by_step(folder: Path, tmp_path: Path) -> None:
    page, mine = tmp_path / "page.html", tmp_path / "mine.toml"
    shown = []
    for where in ("host", "device"):
        data = ImageData(str(folder), image_size=28, preprocessing=ResizedCrop(), preprocess_on=where)  # type: ignore[arg-type]
        mine.write_text(to_toml(replace(find("mnist"), data=data)))
        run(mine, "--positions", "0:2", "--to", page, "--force")
        shown.append(articles(page))
    assert shown[0] == shown[1]
    assert captions(shown[0][0])[:2] == ["original", "RandomResizedCrop, 28 x 28"]


def test_several_draws_of_one_example(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    run(folder, "--augment", "crop", "--size", "8", "--repeat", "3", "--positions", "1", "--to", page)
    assert captions(page.read_text()) == [
        "original", "1: as at position 1, 8 x 8", "2: as at position 7, 8 x 8", "3: as at position 13, 8 x 8"
    ]  # fmt: skip


def test_names_of_files_cannot_change_the_page(tmp_path: Path) -> None:
    evil = tmp_path / "images" / "<script>alert(1)<"
    evil.mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(evil / 'a"\n.png')
    page, sheet = tmp_path / "page.html", tmp_path / "sheet.png"
    run(tmp_path / "images", "--positions", "0", "--to", page)
    assert "<script" not in page.read_text()
    assert "&lt;script&gt;alert(1)&lt;/a&quot;?.png" in page.read_text()
    run(tmp_path / "images", "--positions", "0", "--to", sheet)
    unreadable = (tmp_path / "images").rename(tmp_path / "caf\udce9")  # a name that is no UTF-8
    run(unreadable, "--positions", "0", "--to", page, "--force")
    assert "/caf?, shuffled, seed 0" in page.read_text()


def test_nothing_is_overwritten_without_being_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine")
    run(folder, "--positions", "0", "--to", page, code=2)
    assert page.read_text() == "mine"
    error = capsys.readouterr().err
    assert f"There is a file {page} already." in error
    assert "give another name, or --force to overwrite it" in error
    run(folder, "--positions", "0", "--to", page, "--force")
    assert len(articles(page)) == 1


@pytest.mark.parametrize(
    ("words", "what", "rest"),
    [
        (["--to", "page.pdf"], "Examples are shown as a page of HTML or as one PNG.", "--to page.html"),
        (["--to", "gone/page.html"], "There is no folder gone to write to.", "mkdir -p gone"),
        (["--to", "folder.html"], "There is a folder folder.html already.", "give another name"),
        (["--positions", "4:4"], "These positions cannot be shown.", "--positions 4:4"),
        (["--positions=-1:4"], "These positions cannot be shown.", "from 0 on"),
        (["--positions", "first"], "These positions cannot be shown.", "FIRST:END"),
        (["--positions", "0:1001"], "These positions cannot be shown.", "at most 1000 pictures"),
        (["--repeat", "100"], "These positions cannot be shown.", "--positions 0:16, 100 draws of each"),
        (["--repeat", "0"], "--repeat is out of range.", "--repeat 0"),
        (["--augment", "incepton"], "There is no augmentation called 'incepton'.", 'did you mean "inception"?'),
        (["--augment", "x"], "There is no augmentation called 'x'.", "crop, lenet, cifarnet, vgg, inception, mnist"),
        (["--size", "8"], "Only a preset has a size to choose.", "--size 8 without --augment"),
        (["--size", "8", "--augment", "mnist"], "Only a preset has a size to choose.", "--size 8 with --augment mnist"),
        (["--size", "0", "--augment", "crop"], "size is out of range.", "--size 0"),
        (["--size", "0", "--augment", "vgg"], "size is out of range.", "--size 0"),
    ],
    ids=lambda value: "_".join(value).strip("-") if isinstance(value, list) else "",
)
def test_what_cannot_be_shown_is_refused_before_any_work(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    what: str,
    rest: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.html").mkdir()
    run(folder, *words, *([] if "--to" in words else ["--to", "page.html"]), code=2)
    said = capsys.readouterr()
    assert what in said.err
    assert rest in said.err
    assert "given:" in said.err
    assert not said.out
    assert not Path("page.html").exists()


@pytest.mark.parametrize(
    ("source", "what", "rest"),
    [
        ("mnits", "There is neither a recipe nor data called mnits.", 'did you mean "mnist"?'),
        ("nowhere", "There is neither a recipe nor data called nowhere.", "check the path"),
        ("mine.toml", "mine.toml: the recipe cannot be read.", "No such file"),
        ("nothing/*.tfrecord", "nothing/*.tfrecord", "given:"),
    ],
)
def test_a_source_that_is_none_is_refused(
    source: str,
    what: str,
    rest: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run(source, "--to", "page.html", code=2)
    said = capsys.readouterr().err
    assert what in said
    assert rest in said


def test_a_disk_that_refuses_is_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable.os, "fsync", full)
    run(folder, "--positions", "0", "--to", tmp_path / "page.html", code=2)
    said = capsys.readouterr().err
    assert "page.html cannot be written." in said
    assert "No space left on device" in said
    assert "make room, or name another folder" in said


def test_ctrl_c_leaves_nothing_behind(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(reader: Reader, *rest: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lockstep.runs.showing.examples", stopped)
    run(folder, "--to", tmp_path / "page.html", code=130)
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


def test_all_that_is_known_of_an_example_is_shown(tmp_path: Path) -> None:
    coco = FIXTURES / "coco"
    fields = example_stream(f"{coco / 'person_keypoints.json'}:{coco / 'images'}", None).reader.read_batch(
        np.array([0])
    )
    assert {"boxes", "masks", "keypoints"} <= fields.keys()
    run(f"{coco / 'person_keypoints.json'}:{coco / 'images'}", "--to", tmp_path / "page.html", "--positions", "0:1")
    assert len(articles(tmp_path / "page.html")) == 1


def test_images_of_an_object_store_are_shown(folder: Path, tmp_path: Path) -> None:
    bucket = RemotePath(f"memory://{uuid.uuid4().hex}")
    for file in folder.rglob("*.png"):
        (bucket / file.relative_to(folder).as_posix()).upload(file)
    run(folder, "--to", tmp_path / "local.html", "--order", "sequential")
    run(bucket, "--to", tmp_path / "stored.html", "--order", "sequential")
    assert [images_in(page) for page in articles(tmp_path / "stored.html")] == [
        images_in(page) for page in articles(tmp_path / "local.html")
    ]
    run(f"{bucket}/none-*", "--to", tmp_path / "none.html", code=2)
