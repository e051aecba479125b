"""TensorBoard's event files: TFRecord files, each record an `Event` message of the `tensorboard` package."""

from __future__ import annotations

import io
import itertools
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import DataError, InputError
from lockstep.reporting.append import AppendOnly
from lockstep.screen import log, one_line

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

    from lockstep.reporting.histograms import Histogram


class EventFile:
    """A new event file in a folder, named as TensorBoard expects; a written event is safe from a kill."""

    def __init__(self, folder: Path) -> None:
        from lockstep.records.tfrecord import frame

        self._event, self._frame = _event_type(), frame
        self._file = AppendOnly(_new_path(folder))
        self._append(self._event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, summary: Summary, step: int) -> None:
        """Append one event with all the values of a summary."""
        self._append(self._event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        """Have every event on the disk."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, event: Event) -> None:
        self._file.write(self._frame(event.SerializeToString()))


def _event_type() -> type[Event]:
    """Import tensorboard, for those alone who write or read events: the command line needs none for --help."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
    except Exception as error:  # one that is missing, or does not fit its protobuf, fails in many ways
        raise InputError(
            "Summaries for TensorBoard cannot be written: the package tensorboard cannot be imported.",
            given=f"{type(error).__name__}: {one_line(str(error))}",
            expected="tensorboard, and a protobuf that fits it",
            hint="pip install --upgrade tensorboard protobuf; or train a new run without: --set watch.summaries=0",
        ) from error
    event: type[Event] = Event
    return event


def _new_path(folder: Path) -> Path:
    name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
    paths = (folder / f"{name}.{count}" for count in itertools.count())
    return next(path for path in paths if not path.exists())


def event_paths(folder: Path) -> list[Path]:
    """Return the event files directly in a folder, in the order in which TensorBoard reads them."""
    return sorted(path for path in folder.glob("*tfevents*") if path.is_file())


def cut_events(path: Path, from_step: int) -> set[str]:
    """Drop the first event after a step and all that follow it; the tags that the step itself has are returned.

    A torn or damaged record is dropped, with what follows it, since no reader gets past it: the log says so.
    """
    _event_type()
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    tags: set[str] = set()
    size = 0
    try:
        for end, event in _events(path):
            if event.step > from_step:
                break
            size = end
            if event.step == from_step:
                tags.update(value.tag for value in event.summary.value)
    except (DataError, DecodeError) as error:
        log.warning("%s: no event after byte %d can be read (%s)", path, size, str(error).splitlines()[0])
    if 0 < size < path.stat().st_size:
        file = AppendOnly(path)
        file.cut(size)
        file.close()
    return tags


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a file up to the first that is torn or damaged, since no reader gets past it.

    Raises:
        InputError: tensorboard cannot be imported.
    """
    _event_type()
    from google.protobuf.message import DecodeError

    with suppress(DataError, DecodeError, OSError):
        for _, event in _events(path):
            yield event


def _events(path: Path) -> Iterator[tuple[int, Event]]:
    from lockstep.records.tfrecord import read_all

    event = _event_type()
    for end, message in read_all(path):
        yield end, event.FromString(message)


_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def scalar_summary(values: Mapping[str, float]) -> Summary:
    """Make a summary of numbers by tag; TensorBoard keeps them in single precision."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])


def histogram_summary(values: Mapping[str, Histogram]) -> Summary:
    """Make a summary of histograms by tag; one without a finite number is left out."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    shown = {tag: histogram for tag, histogram in values.items() if histogram.num_finite}
    return Summary(value=[Summary.Value(tag=tag, histo=_histogram(histogram)) for tag, histogram in shown.items()])


def text_summary(tag: str, text: str) -> Summary:
    """Make a summary of a text, shown as it is written: a code block for TensorBoard, which reads Markdown."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    block = "\n".join("    " + line for line in text.splitlines())
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", string_val=[block.encode()], tensor_shape=shape)
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])


def image_summary(images: Mapping[str, npt.NDArray[Any]]) -> Summary:
    """Make a summary of images by tag, each of shape (channels, height, width) and of any size.

    1 channel is grey, 3 are RGB, 4 are RGBA. Numbers of type uint8 are shown as they are; floats as `to_uint8` says.
    Another shape or type raises InputError.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary

    for tag, image in images.items():
        if image.ndim != 3 or image.shape[0] not in _MODES or image.dtype.kind not in "uf" or image.size == 0:
            raise InputError(
                f"{tag!r} cannot be shown as an image.",
                given=f"an array of shape {image.shape} and type {image.dtype}",
                expected="shape (channels, height, width) with 1, 3 or 4 channels, of type uint8 or float",
                hint="move the channels before the height, or choose three of them",
            )
    return Summary(value=[_image(tag, to_uint8(image)) for tag, image in images.items()])


def to_uint8(image: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Scale an image to 0 .. 255: zero is black and the largest value white; with negative values, zero is grey.

    What is not finite counts as zero. (The rule of TensorFlow's image summaries.)
    """
    import numpy as np

    if image.dtype == np.uint8:
        return image
    finite = np.where(np.isfinite(image), image, 0).astype(np.float64)
    zero, room = (127, 127) if finite.min() < 0 else (0, 255)
    largest = np.abs(finite).max() or 1.0
    return np.round(zero + finite * (room / largest)).astype(np.uint8)


def _histogram(histogram: Histogram) -> HistogramProto:
    """Return the buckets as TensorFlow writes them: of each row of empty ones, the last."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    from lockstep.reporting.histograms import BUCKET_LIMITS

    is_filled = [count > 0 for count in histogram.counts]
    next_is_filled = [*is_filled[1:], True]
    kept = [i for i, filled in enumerate(is_filled) if filled or next_is_filled[i]]
    return HistogramProto(
        min=histogram.smallest,
        max=histogram.largest,
        num=histogram.num_finite,
        sum=histogram.total,
        sum_squares=histogram.total_of_squares,
        bucket_limit=[BUCKET_LIMITS[i] for i in kept],
        bucket=[histogram.counts[i] for i in kept],
    )


def _image(tag: str, image: npt.NDArray[np.uint8]) -> Any:
    import numpy as np
    from PIL import Image
    from tensorboard.compat.proto.summary_pb2 import Summary

    channels, height, width = image.shape
    png = io.BytesIO()
    pixels = np.ascontiguousarray(image.transpose(1, 2, 0)).squeeze(2 if channels == 1 else ())
    Image.fromarray(pixels, _MODES[channels]).save(png, format="PNG")
    encoded = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=png.getvalue())
    return Summary.Value(tag=tag, image=encoded)
