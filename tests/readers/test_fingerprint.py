from __future__ import annotations

import json
import os
import shutil
import tarfile
import warnings
from collections.abc import Callable
from importlib import import_module
from io import BytesIO
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lockstep import readers
from lockstep.errors import InputError
from lockstep.images.decode import Decoding
from lockstep.readers import fingerprint
from lockstep.readers.classification import ClassificationReader
from lockstep.readers.coco import Coco
from lockstep.readers.combine import Concatenated, OnlyFields, split
from lockstep.readers.combine import Subset as Some
from lockstep.readers.detection import DetectionReader
from lockstep.readers.fingerprint import checksum, fingerprint_changes, fingerprint_of, lines_of, named_parts
from lockstep.readers.image_folder import ImageFolder
from lockstep.readers.image_records import ImageRecords
from lockstep.readers.label_map import Label, LabelMap, write_label_map
from lockstep.readers.reader import Arrays, TorchDataset, reader_of
from lockstep.readers.records import Records
from lockstep.readers.schemas import ImageNetSchema
from lockstep.readers.tar_shards import TarShards
from lockstep.readers.voc import Voc
from lockstep.recipes.data import DetectionData
from lockstep.records.template import Integer
from lockstep.records.tfrecord import write_records
from tests.tiny_images import image_folder, image_record

FIXTURES = Path(__file__).parent.parent / "fixtures"


@pytest.fixture(autouse=True)
def no_user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def fields(**more: Any) -> dict[str, torch.Tensor]:
    return {"image": torch.arange(20.0).reshape(5, 4), "label": torch.arange(5), **more}


# Each writes a data set, and opens it.


def records(folder: Path) -> None:
    folder.mkdir()
    for shard in range(2):
        numbers = range(10 * shard, 10 * shard + 3)
        write_records(folder / f"train-0000{shard}-of-00002", [image_record(1, number) for number in numbers])


def archives(folder: Path) -> None:
    folder.mkdir()
    with tarfile.open(folder / "a.tar", "w") as tar:
        for key in ("1", "2"):
            member = tarfile.TarInfo(f"{key}.cls")
            member.size = 1
            tar.addfile(member, BytesIO(key.encode()))


def coco(folder: Path) -> None:
    shutil.copytree(FIXTURES / "coco", folder)


def voc(folder: Path) -> None:
    shutil.copytree(FIXTURES / "voc" / "bccd", folder)


def open_records(folder: Path) -> ImageRecords:
    return ImageRecords(folder / "train-*", ImageNetSchema())


def open_coco(folder: Path) -> Coco:
    return Coco(folder / "instances.json", folder / "images", masks=True)


SOURCES: list[tuple[Callable[[Path], Any], Callable[[Path], Any]]] = [
    (records, open_records),
    (records, lambda folder: Records(folder / "train-*", {"label": Integer("image/class/label")})),
    (archives, lambda folder: TarShards(folder / "*.tar")),
    (image_folder, ImageFolder),
    (coco, open_coco),
    (voc, Voc),
]


@pytest.mark.parametrize(("write", "opened"), SOURCES)
def test_a_copy_at_another_place_and_of_another_time_is_the_same_data(
    write: Callable[[Path], Any], opened: Callable[[Path], Any], tmp_path: Path
) -> None:
    write(tmp_path / "here")
    (tmp_path / "there").mkdir()
    copy = shutil.copytree(tmp_path / "here", tmp_path / "there" / "copy")
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
    found = fingerprint_of(opened(tmp_path / "here"))
    assert found == fingerprint_of(opened(copy)) == json.loads(json.dumps(found))
    assert str(tmp_path) not in json.dumps(found)


def plain(found: dict[str, Any]) -> dict[str, Any]:
    """A fingerprint as earlier versions wrote it: without the options of readers."""
    return {
        name: plain(value) if isinstance(value, dict) else value
        for name, value in found.items()
        if "options of " not in name
    }


OPTIONS: list[tuple[Callable[[Path], Any], Callable[[Path], Any], Callable[[Path], Any], str]] = [
    (
        records,
        lambda folder: ImageRecords(folder / "train-*", ImageNetSchema()),
        lambda folder: ImageRecords(folder / "train-*", ImageNetSchema(label_offset=1)),
        "options of ImageRecords: schema.label_offset: saved 0, given 1",
    ),
    (
        records,
        lambda folder: Concatenated({"one": ImageRecords(folder / "train-*", ImageNetSchema())}),
        lambda folder: Concatenated(
            {"one": ImageRecords(folder / "train-*", ImageNetSchema(), decoding=Decoding(exif=True))}
        ),
        "one: options of ImageRecords: decoding.exif: saved False, given True",
    ),
    (
        records,
        lambda folder: Records(folder / "train-*", {"label": Integer("image/class/label")}),
        lambda folder: Records(folder / "train-*", {"label": Integer("image/height")}),
        "options of Records: fields['label'].key: saved 'image/class/label', given 'image/height'",
    ),
    (
        archives,
        lambda folder: TarShards(folder / "*.tar", {"label": "cls"}),
        lambda folder: TarShards(folder / "*.tar", {"label": "coarse.cls"}),
        "options of TarShards: fields['label']: saved 'cls', given 'coarse.cls'",
    ),
    (
        coco,
        lambda folder: DetectionReader(open_coco(folder), 80),
        lambda folder: DetectionReader(open_coco(folder), 90, max_number_of_boxes=1),
        "options of DetectionReader: num_classes: saved 80, given 90",
    ),
    (
        image_folder,
        lambda folder: ClassificationReader(ImageFolder(folder), 5),
        lambda folder: ClassificationReader(ImageFolder(folder, background=True), 6, offset=1),
        "options of ClassificationReader: num_classes: saved 5, given 6",
    ),
]


@pytest.mark.parametrize(("write", "before", "now", "said"), OPTIONS)
@pytest.mark.parametrize("most", [1 << 20, 10])
def test_other_options_of_a_reader_are_other_data_unless_an_earlier_version_saved(
    write: Callable[[Path], Any],
    before: Callable[[Path], Any],
    now: Callable[[Path], Any],
    said: str,
    most: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(tmp_path / "data")
    with monkeypatch.context() as context:
        context.setattr(fingerprint, "_MOST_CHARACTERS", most)  # of more the checksum is kept
        saved, found = (json.loads(json.dumps(fingerprint_of(opened(tmp_path / "data")))) for opened in (before, now))
    assert said in [line.removeprefix("source: ") for line in fingerprint_changes(saved, found)]
    assert fingerprint_changes(saved, saved) == []
    assert not [line for line in fingerprint_changes(plain(saved), found) if "options" in line]


def test_options_that_change_no_example_are_not_told(tmp_path: Path) -> None:
    records(tmp_path / "data")
    one = ImageRecords(tmp_path / "data/train-*", ImageNetSchema())
    careful = Decoding(decoder="pillow", max_pixels=9)
    other = ImageRecords(
        str(tmp_path / "data/train-*"), ImageNetSchema(), verify=False, decoding=careful, cache=tmp_path / "kept"
    )
    assert fingerprint_of(one) == fingerprint_of(other)


def test_a_label_map_at_another_place_is_the_same_data(tmp_path: Path) -> None:
    """A run that is resumed from another folder reads its label map by another path."""
    found = []
    for folder in ("here", "there"):
        write_label_map(tmp_path / folder / "map.pbtxt", LabelMap((Label(1, "cat"), Label(18, "dog"))))
        recipe = DetectionData(str(FIXTURES / "coco/instances.json"), label_map=str(tmp_path / folder / "map.pbtxt"))
        found.append(fingerprint_of(recipe.labelled(open_coco(FIXTURES / "coco"), 20, to_train=True)))
    assert found[0] == found[1]
    assert str(tmp_path) not in json.dumps(found)


def test_every_reader_tells_its_options() -> None:
    """But for those that have none: base classes, arrays, wrappers, and one that its base tells of."""
    modules = [import_module(f"lockstep.readers.{found.name}") for found in iter_modules(readers.__path__)]
    classes = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
    found = {each for each in classes if hasattr(each, "fingerprint") and hasattr(each, "read_batch")}
    silent = {each.__name__ for each in found if not hasattr(each.__init__, "__wrapped__")}
    bases = {"AnnotatedImages", "BoxedImages"}
    assert silent == {*bases, "Arrays", "_Mnist", "TorchDataset", "OneByOne", "_NamedSubset"}


def what_changes(
    write: Callable[[Path], Any], opened: Callable[[Path], Any], folder: Path, change: Callable[[Path], Any]
) -> list[str]:
    write(folder)
    before = fingerprint_of(opened(folder))
    change(folder)
    return fingerprint_changes(before, fingerprint_of(opened(folder)))


def test_a_shard_that_was_rewritten_is_named(tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        numbers = (10, 12, 11)  # of the same sizes, since the same images, in another order
        write_records(folder / "train-00001-of-00002", [image_record(1, number) for number in numbers])

    (line,) = what_changes(records, open_records, tmp_path / "data", change)
    assert line.startswith("train-00001-of-00002 was 3 records, ")


def test_shards_that_changed_places_are_named(tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        (folder / "train-00000-of-00002").rename(folder / "spare")
        (folder / "train-00001-of-00002").rename(folder / "train-00000-of-00002")
        (folder / "spare").rename(folder / "train-00001-of-00002")

    first, second = what_changes(records, open_records, tmp_path / "data", change)
    assert first.startswith("train-00000-of-00002 was 3 records, ")
    assert second.startswith("train-00001-of-00002 was 3 records, ")


def test_the_same_files_in_another_order_are_other_data(tmp_path: Path) -> None:
    records(tmp_path / "data")
    paths = sorted((tmp_path / "data").glob("train-*"))
    one, other = (fingerprint_of(ImageRecords(each, ImageNetSchema())) for each in (paths, paths[::-1]))
    assert fingerprint_changes(one, other) == [
        "the order of the parts: train-00001-of-00002 stands where train-00000-of-00002 stood"
    ]
    assert lines_of(one)[:2] == lines_of(other)[:2][::-1]


def test_files_of_one_name_in_two_folders_are_told_apart(tmp_path: Path) -> None:
    for name in ("one", "two"):
        records(tmp_path / name)
    found = fingerprint_of(ImageRecords(sorted(tmp_path.glob("*/train-*")), ImageNetSchema()))
    assert [name.removeprefix("train-0000") for name in plain(found)] == [
        "0-of-00002",
        "1-of-00002",
        "0-of-00002 (2)",
        "1-of-00002 (2)",
    ]


def test_an_image_that_was_moved_to_another_class_is_noticed(tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        (folder / "red" / "0.jpg").rename(folder / "green" / "7.jpg")

    red, green = sorted(what_changes(image_folder, ImageFolder, tmp_path / "data", change), reverse=True)
    assert red.startswith("red was label 2, 2 images, crc32c ")
    assert " and is label 2, 1 images, crc32c " in red
    assert green.startswith("green was label 1, 2 images, crc32c ")
    assert " and is label 1, 3 images, crc32c " in green


def test_an_image_of_another_size_is_noticed(tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        path = folder / "blue" / "1.jpg"
        path.write_bytes(path.read_bytes() + b"\0")

    (line,) = what_changes(image_folder, ImageFolder, tmp_path / "data", change)
    assert line.startswith("blue was label 0, 2 images, ")


def test_a_broken_link_among_images_is_no_hindrance(tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        (folder / "blue" / "1.jpg").unlink()
        (folder / "blue" / "1.jpg").symlink_to("gone")

    assert len(what_changes(image_folder, ImageFolder, tmp_path / "data", change)) == 1


def test_many_classes_are_put_together() -> None:
    found = named_parts([(f"class {number}", "1 image") for number in range(5)], most=2)
    assert [*found] == ["class 0 to class 2", "class 3 to class 4"]
    changed = named_parts([(f"class {number}", "2 images" if number == 4 else "1 image") for number in range(5)], 2)
    assert [line.split(" was ")[0] for line in fingerprint_changes(found, changed)] == ["class 3 to class 4"]
    assert len(named_parts((str(number), "") for number in range(30_000))) <= 1024


@pytest.mark.parametrize("name", ["labels", "boxes", "outlines"])
def test_annotations_of_coco_that_were_changed_are_noticed(name: str, tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        path = folder / "instances.json"
        document = json.loads(path.read_text())
        first = next(each for each in document["annotations"] if each["image_id"] == 229358 and not each["iscrowd"])
        if name == "labels":
            first["category_id"] = next(each["id"] for each in document["categories"] if each["id"] != 1)
        elif name == "boxes":
            first["bbox"][2] += 1
        else:
            first["segmentation"][0][0] += 1
        path.write_text(json.dumps(document))

    (line,) = what_changes(coco, open_coco, tmp_path / "data", change)
    assert line.startswith("outlines was crc32c" if name == "outlines" else "000000229358.jpg was 1 images, ")


def test_an_annotation_of_voc_that_was_changed_is_noticed(tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        (path,) = (folder / "Annotations").glob("*00338.xml")
        path.write_text(path.read_text().replace("<name>RBC</name>", "<name>WBC</name>", 1))

    opened = lambda folder: Voc(folder, "val")  # noqa: E731
    (line,) = what_changes(voc, opened, tmp_path / "data", change)
    assert line.startswith("BloodImage_00338.jpg was 1 images, ")


def test_an_archive_that_was_packed_anew_is_named(tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        with tarfile.open(folder / "a.tar", "w") as tar:
            for key in ("1", "3"):
                member = tarfile.TarInfo(f"{key}.cls")
                member.size = 1
                tar.addfile(member, BytesIO(key.encode()))

    opened = lambda folder: TarShards(folder / "a.tar")  # noqa: E731
    (line,) = what_changes(archives, opened, tmp_path / "data", change)
    assert line.startswith("a.tar was 2 samples, 10240 bytes, crc32c ")


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (fields(label=torch.tensor([0, 1, 2, 4, 3])), "label was torch.int64 of shape (5,), crc32c "),
        (fields(image=torch.arange(20).reshape(5, 4)), "image was torch.float32 of shape (5, 4), crc32c "),
        (fields(more=torch.zeros(5)), "more was not there, and is torch.float32 of shape (5,), crc32c "),
    ],
)
def test_arrays_are_compared_by_their_values(other: dict[str, torch.Tensor], line: str) -> None:
    (found,) = fingerprint_changes(Arrays(fields()).fingerprint(), Arrays(other).fingerprint())
    assert found.startswith(line)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.uint8], ids=str)
def test_arrays_of_every_kind_have_a_checksum(dtype: torch.dtype) -> None:
    values = torch.arange(24).reshape(4, 6).to(dtype)
    columns = values[:, ::2]  # not side by side in memory
    found = Arrays({"a": columns}).fingerprint()
    assert found == Arrays({"a": columns.clone()}).fingerprint()
    assert found != Arrays({"a": values[:, 1::2].flip(0)}).fingerprint()


def test_of_very_large_arrays_some_rows_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_MOST_CHECKED_BYTES", 80)
    values = torch.zeros(101, 4)
    before = Arrays({"a": values}).fingerprint()
    assert before["a"].startswith("torch.float32 of shape (101, 4), 5 rows crc32c ")
    values[1] = 1  # none of the rows 0, 25, 50, 75, 100
    assert fingerprint_changes(before, Arrays({"a": values}).fingerprint()) == []
    values[50] = 1
    assert len(fingerprint_changes(before, Arrays({"a": values}).fingerprint())) == 1


def test_sources_within_sources_are_named() -> None:
    def joined(last: int) -> Concatenated:
        inner = Arrays({"label": torch.tensor([0, 1, last])})
        labelled = ClassificationReader(inner, num_classes=9)
        return Concatenated({"a": OnlyFields(Arrays(fields()), ["label"]), "b": Some(labelled, [0, 2])})

    before, now = joined(2).fingerprint(), joined(3).fingerprint()
    (line,) = fingerprint_changes(before, now)
    assert line.startswith("b: source: label was torch.int64 of shape (3,), crc32c ")
    assert lines_of(before)[0].startswith("a: image: torch.float32 of shape (5, 4), crc32c ")


def test_another_choice_of_examples_is_noticed() -> None:
    reader = Arrays(fields())
    one, same, other = (Some(reader, indices).fingerprint() for indices in ([0, 1], np.array([0, 1]), [1, 0]))
    assert fingerprint_changes(one, same) == []
    (line,) = fingerprint_changes(one, other)
    assert line.startswith("indices was 2, crc32c ")
    parts = (split(Arrays({"a": torch.arange(100)}), {"x": 0.5, "y": 0.5}, seed=seed)["x"] for seed in (0, 1))
    assert fingerprint_changes(*(part.fingerprint() for part in parts))


class Squares(Dataset[Any]):
    """A dataset without a fingerprint."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return {"square": index * index}


class Versioned(Squares):
    version = "1"

    def fingerprint(self) -> str:
        return self.version


def test_what_torchs_own_datasets_hold_is_compared() -> None:
    images, labels = torch.arange(5.0), torch.arange(5)
    whole = TensorDataset(images, labels)
    joined = TorchDataset(ConcatDataset([whole, Subset(whole, [2, 0])])).fingerprint()
    assert joined["0"] == Arrays({"0": images, "1": labels}).fingerprint()
    assert joined["1"] == {"indices": f"2, {checksum(np.array([2, 0]))}", "source": joined["0"]}
    assert TorchDataset(Subset(Squares(), [1])).fingerprint()["source"] == {"source": "Squares of 5 examples"}


def test_a_dataset_says_itself_what_it_is_made_of() -> None:
    dataset = Versioned()
    before = TorchDataset(dataset).fingerprint()
    dataset.version = "2"
    assert fingerprint_changes(before, TorchDataset(dataset).fingerprint()) == ["source was 1, and is 2"]


class Own:
    def __init__(self, made_of: Any = None) -> None:
        self.made_of = made_of

    def __len__(self) -> int:
        return 3

    def read(self, index: int) -> Any:
        return {"number": index}

    def fingerprint(self) -> Any:
        return self.made_of


def test_a_reader_of_ones_own_says_what_it_is_made_of() -> None:
    one, other = (fingerprint_of(reader_of(Own({"a.bin": size, "b.bin": [1, 2]}))) for size in (7, 8))
    assert fingerprint_changes(one, other) == ["a.bin was 7, and is 8"]
    assert fingerprint_of(reader_of(Own((1, 2)))) == {"source": [1, 2]}


@pytest.mark.parametrize("made_of", [{"a": torch.zeros(1)}, b"bytes", float("nan"), {(1, 2): 3}])
def test_what_is_no_json_is_refused(made_of: Any) -> None:
    with pytest.raises(InputError, match=r"^fingerprint\(\) of Own does not return JSON\.(.|\n)*a dict of them"):
        fingerprint_of(reader_of(Own(made_of)))


def test_a_fingerprint_that_fails_is_named() -> None:
    class Broken(Own):
        def fingerprint(self) -> Any:
            raise TypeError("of mine")

    with pytest.raises(InputError, match=r"^fingerprint\(\) of Broken does not return JSON\.\n.*TypeError: of mine"):
        fingerprint_of(reader_of(Broken()))


class OfAnExample(Squares):
    """Its `fingerprint` is another one: that of an example."""

    def fingerprint(self, index: int) -> str:
        raise AssertionError("nobody calls it")


def test_a_fingerprint_that_needs_arguments_is_another_one() -> None:
    for reader in (OfAnExample(), TorchDataset(OfAnExample()), OnlyFields(TorchDataset(OfAnExample()), ["square"])):
        assert plain(fingerprint_of(reader, 5)) == {"source": "OfAnExample of 5 examples"}
    tensors = TensorDataset(torch.arange(3))
    tensors.fingerprint = lambda index: index  # type: ignore[attr-defined]
    assert TorchDataset(tensors).fingerprint() == Arrays({"0": torch.arange(3)}).fingerprint()


def test_tensors_of_other_kinds_are_compared_by_what_they_hold() -> None:
    def of(values: torch.Tensor) -> Any:
        return fingerprint_of(TorchDataset(TensorDataset(values)))

    numbers = torch.arange(1, 7).reshape(2, 3) * (1 + 2j)
    assert of(numbers.conj()) == of(numbers.conj().resolve_conj()) != of(numbers)
    assert of(numbers.conj().imag) == of(-numbers.imag.clone()) != of(numbers.imag)  # a negative view
    rows = torch.eye(3)
    assert of(rows.to_sparse()) == of(rows.to_sparse()) != of((2 * rows).to_sparse())
    assert of(rows.to_sparse()) != of(torch.cat([rows, torch.zeros(3, 1)], dim=1).to_sparse())
    with warnings.catch_warnings(action="ignore"):  # torch calls its support of this layout a beta
        compressed = rows.to_sparse_csr()
    assert of(compressed) == {"0": "torch.float32 of shape (3, 3), torch.sparse_csr"}


def test_a_failure_in_a_reader_of_lockstep_is_not_reported_as_the_users() -> None:
    with pytest.raises(NotImplementedError, match="meta"):
        fingerprint_of(TorchDataset(TensorDataset(torch.zeros(3, device="meta"))))


def test_a_very_long_fingerprint_is_kept_as_its_checksum() -> None:
    one, other = (fingerprint_of(Own([number] * 1_000_000)) for number in (1, 2))
    assert len(json.dumps(one)) < 100
    (line,) = fingerprint_changes(one, other)
    assert line.startswith("source was 3000000 characters, crc32c ")


def test_without_a_word_of_its_own_a_reader_is_known_by_its_class_and_its_length() -> None:
    assert fingerprint_of(reader_of(Numbers())) == {"source": "Numbers of 4 examples"}


class Numbers:
    def __len__(self) -> int:
        return 4

    def read(self, index: int) -> Any:
        return {"number": index}


def test_of_many_changes_the_first_are_named() -> None:
    before, now = ({str(number): f"{size} bytes" for number in range(15)} for size in (1, 2))
    lines = fingerprint_changes(before, now)
    assert (len(lines), lines[0], lines[-1]) == (11, "0 was 1 bytes, and is 2 bytes", "5 more changes")
    assert fingerprint_changes(before, {"0": "1 bytes"})[0] == "1 was 1 bytes, and is gone"
