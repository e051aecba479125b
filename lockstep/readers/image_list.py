"""Reads images without labels, named as files or by the folders that they are in."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import DataError
from lockstep.images.decode import AS_STORED, Decoding
from lockstep.images.pillow import FORMATS
from lockstep.listing import hint_for_path, shorten
from lockstep.readers.fingerprint import tells_options
from lockstep.readers.image_files import FileNames, load_decoder
from lockstep.readers.image_folder import images_below
from lockstep.readers.reader import Cost, Int64s
from lockstep.records.shards import check_local
from lockstep.screen import log


@tells_options
class ImageList:
    """Images without labels, in files and folders.

    Files come in the order in which they are given, whatever their names end in. Of a folder these are all files with
    the ending of an image in it and below, in the order of their paths; anything else there is named in the log. A
    file that is named twice comes once.

    A batch is {"image": a list of `EncodedImage`}.

    Args:
        paths: files, folders, or both; one of them, or several.
        decoding: how images are decoded when they are asked for.

    Raises:
        DataError: a path is not there, or there is no image.
    """

    cost: Cost = "decode"

    def __init__(self, paths: str | Path | Sequence[str | Path], decoding: Decoding = AS_STORED) -> None:
        several = [paths] if isinstance(paths, str | Path) else paths
        for path in several:
            check_local(path)
        given = [*map(Path, several)]
        files = [*dict.fromkeys(file for path in given for file in _files_at(path))]
        if not files:
            raise DataError(
                "There are no images.",
                given=f"no image in {shorten([*map(str, given)])}" if given else "no path",
                expected=f"files of {FORMATS}, or folders with some",
                hint="check the path; of folders, files are read by their endings, such as .jpg",
            )
        places = [path.absolute() for path in given]
        above = os.path.commonpath([place if place.is_dir() else place.parent for place in places])
        self.folder = above if any(path.is_absolute() for path in given) else os.path.relpath(above)
        """The folder that all files are in or below: relative to the current one, if all paths given were."""
        self._decoding = decoding
        self.decoder = load_decoder(decoding)
        self._names = FileNames(self.folder, (file.relative_to(above).as_posix() for file in files))

    def __len__(self) -> int:
        return len(self._names)

    def read_batch(self, indices: Int64s) -> dict[str, Any]:
        """Return the images of these files, not decoded."""
        return {"image": [self._names.read(index, self._decoding) for index in indices.tolist()]}

    def example_id(self, index: int) -> str:
        """Return the path of the file within `folder`."""
        return self._names[index]


def _files_at(path: Path) -> Iterator[Path]:
    """Yield the absolute path of a file, or those of the images in a folder."""
    place = path.absolute()
    try:
        if not place.is_dir():
            place.stat()
            yield place
            return
        images, others = images_below(place)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read.",
            given=f"{path}: {error.strerror}",
            expected="image files, and folders of them",
            hint=hint_for_path(path),
        ) from error
    if others:
        log.warning("Not read in %s: %s", path, shorten(others))
    for name in images:
        yield place / name
