"""Scalars, histograms, text and images as TensorBoard's `Summary` messages: pure functions.

The `tensorboard` package is imported by the first call, not with this module.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lockstep.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

    from lockstep.reporting.histograms import Histogram

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def scalars(values: Mapping[str, float]) -> Summary:
    """Numbers by tag; TensorBoard keeps them in single precision."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])


def histograms(values: Mapping[str, Histogram]) -> Summary:
    """Histograms by tag; one without a finite number is left out."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    shown = {tag: histogram for tag, histogram in values.items() if histogram.num_finite}
    return Summary(value=[Summary.Value(tag=tag, histo=_histogram(histogram)) for tag, histogram in shown.items()])


def text(tag: str, text: str) -> Summary:
    """A text, shown as it is written: a code block for TensorBoard, which reads Markdown."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    block = "\n".join("    " + line for line in text.splitlines())
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", string_val=[block.encode()], tensor_shape=shape)
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])


def images(tag: str, images: npt.NDArray[Any]) -> Summary:
    """Images (count, channels, height, width), each under a tag of its own: `tag/0`, `tag/1`, ...

    1 channel is grey, 3 are RGB, 4 are RGBA. Numbers of type uint8 are shown as they are; floats as `to_uint8` says.
    Another shape or type raises InputError.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary

    if images.ndim != 4 or images.shape[1] not in _MODES or images.dtype.kind not in "uf" or images.size == 0:
        raise InputError(
            f"{tag!r} cannot be shown as images.",
            given=f"an array of shape {images.shape} and type {images.dtype}",
            expected="shape (count, channels, height, width) with 1, 3 or 4 channels, of type uint8 or float",
            hint="move the channels before the height, or choose three of them",
        )
    pixels = (to_uint8(image) for image in images)
    return Summary(value=[_image(f"{tag}/{index}", image) for index, image in enumerate(pixels)])


def to_uint8(image: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """An image scaled to 0 .. 255: zero is black and the largest value white; with negative values, zero is grey.

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
    """The buckets as TensorFlow writes them: of each row of empty ones, the last."""
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
