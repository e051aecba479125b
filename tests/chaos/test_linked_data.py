from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.chaos.linked_data import LinkedData, linked
from lockstep.recipes.data import ImageData, MnistData
from lockstep.recipes.shipped import find

MNIST = Path(__file__).parent.parent.parent / "data" / "mnist"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("roses/1.jpg", "roses/2.jpg", "tulips/3.jpg"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() * 10)
    return tmp_path / "photos"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_damage_is_in_copies_alone_and_mended(photos: Path, tmp_path: Path) -> None:
    before = contents(photos)
    data = LinkedData(str(photos), tmp_path / "links")
    there = Path(data.path)
    assert contents(there) == before
    assert data.damage(random.Random(0)).endswith("and 2 more files of the training data cut short")
    assert {name: 2 * len(content) for name, content in contents(there).items()} == {
        name: len(content) for name, content in before.items()
    }
    assert contents(photos) == before
    data.mend()
    assert contents(there) == before
    assert all(path.is_symlink() for path in there.rglob("*.jpg"))


def test_a_pattern_leads_to_the_links(photos: Path, tmp_path: Path) -> None:
    data = LinkedData(str(photos / "roses/?.jpg"), tmp_path / "links")
    assert data.path == str(tmp_path / "links/?.jpg")
    assert sorted(contents(tmp_path / "links")) == ["1.jpg", "2.jpg"]


def test_recipes_read_the_links(photos: Path, tmp_path: Path) -> None:
    recipe = replace(find("flowers_small"), data=ImageData(str(photos), image_size=224))
    of_photos, data = linked(recipe, tmp_path)
    assert data is not None
    assert (of_photos.data.train, of_photos.data.cache) == (data.path, str(tmp_path / "cache"))  # type: ignore[union-attr]
    mnist = replace(find("mnist"), data=MnistData(str(MNIST)))
    of_mnist, data = linked(mnist, tmp_path / "mnist")
    assert data is not None
    assert of_mnist.data == MnistData(data.path)
    assert "train-images-idx3-ubyte.gz" in contents(Path(data.path))


def test_annotations_are_not_linked(tmp_path: Path) -> None:
    recipe = replace(find("flowers_small"), data=ImageData("annotations.json:images", image_size=224))
    assert linked(recipe, tmp_path) == (recipe, None)
    assert list(tmp_path.iterdir()) == []
