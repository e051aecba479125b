from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.convert.imagenet import sort_validation
from lockstep.errors import DataError, InputError

SYNSETS = ["n01751748", "n09193705", "n01751748"]
NAMES = [f"ILSVRC2012_val_0000000{number}.JPEG" for number in (1, 2, 3)]


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    path = tmp_path / "labels.txt"
    path.write_text("".join(f"{synset}\n" for synset in SYNSETS))
    return path


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_bytes(name.encode())
    return folder


def check_sorted(output: Path) -> None:
    paths = [output / synset / name for synset, name in zip(SYNSETS, NAMES, strict=True)]
    assert sorted(path for path in output.rglob("*") if path.is_file()) == sorted(paths)
    assert [path.read_bytes() for path in paths] == [name.encode() for name in NAMES]


@pytest.mark.parametrize(("how", "left", "links"), [("link", 3, 2), ("copy", 3, 1), ("move", 0, 1)])
def test_each_image_goes_to_its_class(
    images: Path, labels: Path, tmp_path: Path, how: str, left: int, links: int
) -> None:
    output = tmp_path / "out"
    for _ in range(2):  # Done twice it is done once.
        assert sort_validation(images, labels, output, how) == 3
        check_sorted(output)
        assert len(list(images.iterdir())) == left
        assert (output / SYNSETS[0] / NAMES[0]).stat().st_nlink == links


def test_they_may_stay_in_their_folder(images: Path, labels: Path) -> None:
    seen: list[tuple[int, int]] = []
    sort_validation(images, labels, images, "move", progress=lambda done, total: seen.append((done, total)))
    check_sorted(images)
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_what_stopped_goes_on(images: Path, labels: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    (output / SYNSETS[0]).mkdir(parents=True)
    (images / NAMES[0]).rename(output / SYNSETS[0] / NAMES[0])
    sort_validation(images, labels, output, "move")
    check_sorted(output)


def test_another_file_in_its_place_is_left_alone(images: Path, labels: Path, tmp_path: Path) -> None:
    taken = tmp_path / "out" / SYNSETS[1] / NAMES[1]
    taken.parent.mkdir(parents=True)
    taken.write_bytes(b"mine")
    with pytest.raises(DataError, match=rf"{NAMES[1]} is another file than .*\n.*with other bytes\n.*\n.*move it away"):
        sort_validation(images, labels, tmp_path / "out")
    assert taken.read_bytes() == b"mine"


def test_nothing_is_done_when_an_image_is_missing(images: Path, labels: Path, tmp_path: Path) -> None:
    (images / NAMES[2]).unlink()
    message = rf"images are missing in .*\n  given:    1 of 3, first {NAMES[2]}\n.*\n.*all of it"
    with pytest.raises(DataError, match=message):
        sort_validation(images, labels, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "given"),
    [("", "no lines"), ("a\n\nb\n", "line 2, ''"), ("../a\n", "line 1, '../a'"), ("..\n", r"line 1, '\.\.'")],
    ids=["empty", "gap", "path", "above"],
)
def test_labels_that_name_no_folders_are_refused(images: Path, labels: Path, text: str, given: str) -> None:
    labels.write_text(text)
    with pytest.raises(DataError, match=rf"labels\.txt does not name the classes .*\n  given:    {given}\n"):
        sort_validation(images, labels, images)


def test_labels_that_are_missing_are_named(images: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"given:    .*No such file"):
        sort_validation(images, tmp_path / "nothing.txt", images)


def test_another_way_is_refused(images: Path, labels: Path) -> None:
    with pytest.raises(InputError, match=r"how cannot be 'steal'\.\n.*\n  expected: 'link' or 'copy' or 'move'"):
        sort_validation(images, labels, images, "steal")


def test_what_the_system_refuses_is_told(images: Path, labels: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / SYNSETS[0]).touch()
    message = r"cannot be put into .*out\.\n  given:    .*(exists|Not a directory).*\n.*\n.*where links cannot be made"
    with pytest.raises(DataError, match=message):
        sort_validation(images, labels, tmp_path / "out")
