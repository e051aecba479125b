"""Images with boxes, written as the tools of detection write them."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.readers.boxed_images import BoxedImage

Images = Sequence[BoxedImage]
DATA = Path(__file__).parent.parent / "data"


def names_of(images: Images) -> list[str]:
    return sorted({found.name for image in images for found in image.objects})


def copied(images: Images, source: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for image in images:
        shutil.copy(source / image.file_name, folder)
    return folder


def xml_of(image: BoxedImage, folder: Path, file_name: str) -> None:
    edges = ("ymin", "xmin", "ymax", "xmax")
    objects = "".join(
        f"<object><name>{found.name}</name><bndbox>"
        + "".join(f"<{edge}>{value!r}</{edge}>" for edge, value in zip(edges, found.box, strict=True))
        + "</bndbox></object>"
        for found in image.objects
    )
    size = f"<size><width>{image.width}</width><height>{image.height}</height><depth>3</depth></size>"
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / image.file_name).with_suffix(".xml")
    path.write_text(f"<annotation><filename>{file_name}</filename>{size}{objects}</annotation>")


def pascal(images: Images, source: Path, folder: Path) -> Path:
    """Pascal's folders, without ImageSets."""
    copied(images, source, folder / "JPEGImages")
    for image in images:
        xml_of(image, folder / "Annotations", image.file_name)
    return folder


def labelimg(images: Images, source: Path, folder: Path) -> Path:
    """Images and XML in one folder; an old labelImg leaves the ending of a file's name out."""
    copied(images, source, folder)
    for image in images:
        xml_of(image, folder, Path(image.file_name).stem)
    return folder


def xml_beside(images: Images, source: Path, folder: Path) -> Path:
    """A folder of XML alone, beside that of the images."""
    copied(images, source, folder / "images")
    for image in images:
        xml_of(image, folder / "annots", image.file_name)
    return folder / "annots"


def yolo_line(image: BoxedImage, number: int, box: Sequence[float], polygon: bool) -> str:
    top, left, bottom, right = (edge / side for edge, side in zip(box, (image.height, image.width) * 2, strict=True))
    values = (left + right) / 2, (top + bottom) / 2, right - left, bottom - top
    if polygon:
        values = left, top, right, top, right, bottom, left, bottom  # type: ignore[assignment]
    return " ".join(map(repr, (number, *values)))


def yolo_texts(images: Images, folder: Path, names: Sequence[str], *, polygon: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for image in images:
        lines = [yolo_line(image, names.index(found.name), found.box, polygon) for found in image.objects]
        if lines:  # an image without objects has no text, or an empty one
            (folder / image.file_name).with_suffix(".txt").write_text("\n".join(lines) + "\n")


def ultralytics(images: Images, source: Path, folder: Path) -> Path:
    """A data.yaml above images/train and labels/train; its path is that of another machine."""
    copied(images, source, folder / "images/train")
    yolo_texts(images, folder / "labels/train", names_of(images))
    names = "".join(f"  {number}: {name}\n" for number, name in enumerate(names_of(images)))
    (folder / "data.yaml").write_text(f"path: ../datasets/here  # not here\ntrain: images/train\nnames:\n{names}")
    return folder


def roboflow_yolo(images: Images, source: Path, folder: Path) -> Path:
    """A data.yaml whose paths go up a folder too far, and polygons."""
    copied(images, source, folder / "train/images")
    yolo_texts(images, folder / "train/labels", names_of(images), polygon=True)
    names = names_of(images)
    (folder / "data.yaml").write_text(f"train: ../train/images\nval: ''\n\nnc: {len(names)}\nnames: {names}\n")
    return folder / "data.yaml"


def darknet(images: Images, source: Path, folder: Path) -> Path:
    """Images and texts in one folder, with classes.txt, as labelImg writes them."""
    copied(images, source, folder)
    yolo_texts(images, folder, names_of(images))
    (folder / "classes.txt").write_text("\n".join(names_of(images)))
    return folder


def coco(images: Images, source: Path, folder: Path, first_id: int = 1, name: str = "annotations/all.json") -> Path:
    names, annotations = names_of(images), []
    for number, image in enumerate(images):
        for found in image.objects:
            top, left, bottom, right = found.box
            of = {"id": len(annotations), "image_id": number, "category_id": names.index(found.name) + first_id}
            annotations.append(of | {"bbox": [left, top, right - left, bottom - top]})
    listed = [
        {"id": number, "file_name": image.file_name, "width": image.width, "height": image.height}
        for number, image in enumerate(images)
    ]
    categories = [{"id": number, "name": name} for number, name in enumerate(names, first_id)]
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"images": listed, "annotations": annotations, "categories": categories}))
    copied(images, source, folder / ("images" if "/" in name else ""))
    return folder


def roboflow_coco(images: Images, source: Path, folder: Path) -> Path:
    """Annotations among the images, with categories from 0 on."""
    return coco(images, source, folder, 0, "_annotations.coco.json")


def table(images: Images, source: Path, folder: Path, *, sizes: bool = True, images_in: str = "") -> Path:
    copied(images, source, folder / images_in)
    with (folder / "labels.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        of_size = ["width", "height"] if sizes else []
        lines.writerow(["filename", *of_size, "class", "xmin", "ymin", "xmax", "ymax"])
        for image in images:
            size = [image.width, image.height] if sizes else []
            for found in image.objects:
                top, left, bottom, right = found.box
                lines.writerow([image.file_name, *size, found.name, left, top, right, bottom])
            if not image.objects:
                lines.writerow([image.file_name, *size, "", "", "", "", ""])
    return folder / "labels.csv"


def table_in_folder(images: Images, source: Path, folder: Path) -> Path:
    """A table without sizes, above the folder of the images."""
    return table(images, source, folder, sizes=False, images_in="images").parent


FORMATS: Sequence[Callable[[Images, Path, Path], Path]] = (
    pascal, labelimg, xml_beside, ultralytics, roboflow_yolo, darknet, coco, roboflow_coco, table, table_in_folder
)  # fmt: skip
