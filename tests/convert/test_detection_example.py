from __future__ import annotations

import hashlib
import math
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from lockstep.convert.detection import detection_example
from lockstep.errors import DataError, InputError
from lockstep.images.decode import Decoding, EncodedImage
from lockstep.records.example import Values, parse_example


class Masks:
    """What readers give: masks that are decoded on demand."""

    def __init__(self, masks: Tensor) -> None:
        self._masks = masks

    def __len__(self) -> int:
        return len(self._masks)

    def decode(self) -> Tensor:
        return self._masks


def file_of(kind: str, width: int = 6, height: int = 4, mode: str = "RGB") -> bytes:
    pixels = np.arange(width * height * 3, dtype=np.uint8).reshape(height, width, 3) * 3
    file = BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, kind)
    return file.getvalue()


def fields(objects: int = 0, data: bytes | None = None, **others: Any) -> dict[str, Any]:
    image = EncodedImage(file_of("JPEG") if data is None else data, "/data/images/cat.jpg")
    return {"image": image, "boxes": torch.rand(objects, 4), **others}


def features_of(**given: Any) -> dict[str, Values]:
    return parse_example(detection_example(fields(**given)))


def plain(features: dict[str, Values], start: str) -> dict[str, list[Any]]:
    """The features below a name, as lists."""
    return {name.removeprefix(start): list(values) for name, values in features.items() if name.startswith(start)}


def test_an_image_is_told_by_the_names_of_the_object_detection_api() -> None:
    data = file_of("JPEG")
    assert plain(features_of(data=data, source_id="7"), "image/") == {
        "encoded": [data],
        "format": [b"jpeg"],
        "filename": [b"cat.jpg"],
        "key/sha256": [hashlib.sha256(data).hexdigest().encode()],
        "source_id": [b"7"],
        "height": [4],
        "width": [6],
        **{f"object/bbox/{edge}": [] for edge in ("ymin", "xmin", "ymax", "xmax")},
    }


def test_height_and_width_are_those_of_the_raster_as_it_is_stored() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = BytesIO()
    Image.new("RGB", (6, 4)).save(file, "JPEG", exif=exif)
    turned = EncodedImage(file.getvalue(), "turned.jpg", Decoding(exif=True))
    assert turned.size == (4, 6)
    features = parse_example(detection_example({**fields(), "image": turned}))
    assert (features["image/width"], features["image/height"]) == (6, 4)


def test_without_a_source_id_the_file_gives_its_name() -> None:
    assert features_of()["image/source_id"] == [b"cat.jpg"]


def test_every_field_of_objects_has_its_feature() -> None:
    features = features_of(
        objects=2,
        labels=torch.tensor([3, -1]),
        class_text=["cat", "süß"],
        area=torch.tensor([12.5, 3.0]),
        is_crowd=torch.tensor([True, False]),
        difficult=torch.tensor([False, True]),
        truncated=torch.tensor([True, True]),
        group_of=torch.tensor([False, False]),
        view=["Frontal", ""],
        weights=torch.tensor([1.0, 0.5]),
        keypoints=torch.tensor([[[0.5, 0.25], [0.0, 1.0]], [[0.75, 0.125], [0.0, 0.5]]]),
        keypoint_visibility=torch.tensor([[2, 1], [2, 0]]),
        keypoint_names=["left", "right"],
    )
    boxes = [name for name in features if name.startswith("image/object/bbox/")]
    assert plain({name: features[name] for name in features if name not in boxes}, "image/object/") == {
        "class/label": [3, -1],
        "class/text": [b"cat", "süß".encode()],
        "area": [12.5, 3.0],
        "is_crowd": [1, 0],
        "difficult": [0, 1],
        "truncated": [1, 1],
        "group_of": [0, 0],
        "view": [b"Frontal", b""],
        "weight": [1.0, 0.5],
        "keypoint/y": [0.5, 0.0, 0.75, 0.0],
        "keypoint/x": [0.25, 1.0, 0.125, 0.5],
        "keypoint/visibility": [2, 1, 2, 0],
    }


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(*[st.floats(0, 1, width=32)] * 4, st.floats(width=32) | st.just(math.nan), st.integers(-1, 2**62)),
        max_size=20,
    )
)
def test_numbers_come_back_to_the_bit(objects: list[tuple[float, ...]]) -> None:
    columns = [[row[column] for row in objects] for column in range(6)]
    boxes = torch.tensor(columns[:4]).T.reshape(-1, 4)
    points = torch.tensor(columns[4]).reshape(-1, 1, 1).repeat(1, 1, 2)
    labels = torch.tensor([int(label) for label in columns[5]], dtype=torch.int64)
    given_fields = {**fields(), "boxes": boxes, "keypoints": points, "labels": labels}
    found = parse_example(detection_example(given_fields))
    edges = [found[f"image/object/bbox/{edge}"] for edge in ("ymin", "xmin", "ymax", "xmax")]
    np.testing.assert_array_equal(np.stack(edges, axis=1), boxes)
    np.testing.assert_array_equal(found["image/object/keypoint/y"], points[:, 0, 0])
    assert list(found["image/object/class/label"]) == labels.tolist()


@pytest.mark.parametrize(("kind", "name"), [("JPEG", b"jpeg"), ("PNG", b"png")])
def test_jpegs_and_pngs_go_in_as_they_are_whatever_their_name(kind: str, name: bytes) -> None:
    data = file_of(kind)
    features = features_of(data=data)
    assert (features["image/encoded"], features["image/format"]) == ([data], [name])


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF"])
def test_images_of_other_formats_become_pngs_of_the_same_pixels(kind: str) -> None:
    data = file_of(kind, mode="L" if kind == "GIF" else "RGB")
    features = features_of(data=data)
    assert features["image/format"] == [b"png"]
    (stored,) = features["image/encoded"]
    assert isinstance(stored, bytes)
    assert stored.startswith(b"\x89PNG")
    assert features["image/key/sha256"] == [hashlib.sha256(stored).hexdigest().encode()]
    torch.testing.assert_close(EncodedImage(stored, "").decode(), EncodedImage(data, "").decode(), rtol=0, atol=0)


def test_an_image_that_is_none_is_refused_by_its_name() -> None:
    with pytest.raises(DataError, match=r"^/data/images/cat.jpg cannot be decoded\."):
        features_of(data=b"no image")


def test_a_mask_becomes_a_png_of_one_bit_a_pixel() -> None:
    masks = torch.tensor([[[0, 1, 1], [0, 0, 1]], [[1, 0, 0], [0, 0, 0]]], dtype=torch.uint8)
    files = features_of(objects=2, masks=Masks(masks))["image/object/mask"]
    assert isinstance(files, list)
    images = [Image.open(BytesIO(file)) for file in files]
    assert [image.mode for image in images] == ["1", "1"]
    np.testing.assert_array_equal(np.stack([np.asarray(image) for image in images]), masks.bool())


def test_an_image_without_objects_has_no_masks() -> None:
    assert features_of(masks=Masks(torch.zeros(0, 4, 6, dtype=torch.uint8)))["image/object/mask"] == []


@pytest.mark.parametrize(
    ("name", "values"), [("labels", torch.tensor([1])), ("class_text", []), ("keypoints", torch.zeros(3, 1, 2))]
)
def test_a_field_that_does_not_fit_the_boxes_is_refused(name: str, values: Any) -> None:
    with pytest.raises(InputError) as caught:
        detection_example(fields(2, **{name: values}))
    assert caught.value.what == f"The field {name!r} of /data/images/cat.jpg does not fit its boxes."
    assert caught.value.given == f"{len(values)} values"
    assert caught.value.expected == "2, one for each box"
