from __future__ import annotations

import math
import sys
from bisect import bisect_right
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep.reporting import histograms as module
from lockstep.reporting.events import histogram_summary
from lockstep.reporting.histograms import BUCKET_LIMITS, Histogram, compute_histograms
from lockstep.reporting.summaries import Summaries

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def histogram_of(tensor: torch.Tensor) -> Histogram:
    return compute_histograms({"it": tensor})["it"]


def by_the_book(values: list[float]) -> list[int]:
    """One number at a time, as TensorFlow's Histogram::Add."""
    counts = [0] * len(BUCKET_LIMITS)
    for value in values:
        counts[bisect_right(BUCKET_LIMITS, value)] += 1
    return counts


def test_buckets_are_those_that_tensorflow_wrote() -> None:
    """Recorded from `tf.raw_ops.HistogramSummary` of TensorFlow 2.21 for the same numbers."""
    values = torch.tensor([-1.5, -0.0, 0.0, 1e-13, 2e-12, 0.25, 0.25, 3.0, 1e30])
    (value,) = histogram_summary({"it": histogram_of(values)}).value
    assert list(value.histo.bucket_limit) == [
        -1.624957930213695,
        -1.47723448201245,
        0.0,
        1e-12,
        1.9487171000000014e-12,
        2.1435888100000016e-12,
        0.24153964213356663,
        0.2656936063469233,
        2.8787120958073054,
        3.1665833053880363,
        9.920775621859783e19,
        1.7976931348623157e308,
    ]
    assert list(value.histo.bucket) == [0, 1, 0, 3, 0, 1, 0, 2, 0, 1, 0, 1]
    numbers = value.histo.min, value.histo.max, value.histo.num, value.histo.sum, value.histo.sum_squares
    assert numbers == (-1.5, 1.0000000150474662e30, 9.0, 1.0000000150474662e30, 1.0000000300949327e60)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_at_the_limits_are_in_the_bucket_above(dtype: torch.dtype) -> None:
    limits = torch.tensor(BUCKET_LIMITS[1:-1], dtype=torch.float64).to(dtype)
    limits = limits[limits.isfinite()]
    info = torch.finfo(dtype)
    infinity = torch.tensor(math.inf, dtype=dtype)
    around = [limits, torch.nextafter(limits, infinity), torch.nextafter(limits, -infinity)]
    values = torch.cat([*around, torch.tensor([info.min, info.max, 0.0, -0.0], dtype=dtype)])
    values = values[values.isfinite()]
    if dtype == torch.float64:
        values = values[values.abs() < sys.float_info.max]  # TensorFlow itself has no bucket for its last limit
    assert list(histogram_of(values).counts) == by_the_book(values.tolist())


@settings(max_examples=50)
@given(st.data())
def test_any_numbers_are_counted_one_by_one(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    drawn = data.draw(st.lists(st.floats(width=16), min_size=1, max_size=30))
    tensor = torch.tensor(drawn, dtype=torch.float64).to(dtype)
    values = [value for value in tensor.tolist() if math.isfinite(value)]
    histogram = histogram_of(tensor)
    assert list(histogram.counts) == by_the_book(values)
    assert histogram.num_finite == len(values)
    assert histogram.num_nonfinite == len(drawn) - len(values)
    assert histogram.num_zeros == values.count(0.0)
    assert histogram.smallest == min(values, default=math.inf)
    assert histogram.largest == max(values, default=-math.inf)
    assert histogram.total == pytest.approx(math.fsum(values), rel=1e-12, abs=1e-6)
    assert histogram.total_of_squares == pytest.approx(math.fsum(value * value for value in values), rel=1e-12)


def test_the_largest_numbers_of_double_precision_have_a_bucket() -> None:
    histogram = histogram_of(torch.tensor([-sys.float_info.max, sys.float_info.max], dtype=torch.float64))
    assert histogram.counts[1] == histogram.counts[-1] == 1
    assert histogram.num_nonfinite == 0


def test_a_large_tensor_is_counted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    whole = histogram_of(tensor)
    monkeypatch.setattr(module, "_PIECE", 4)
    pieces = histogram_of(tensor)
    assert pieces.counts == whole.counts
    assert (pieces.smallest, pieces.largest) == (whole.smallest, whole.largest)
    assert pieces.total == pytest.approx(whole.total, rel=1e-12)
    assert pieces.norm == pytest.approx(whole.norm, rel=1e-12)


def test_how_a_tensor_lies_in_memory_does_not_matter() -> None:
    dense = torch.arange(48.0).reshape(2, 4, 2, 3)
    assert histogram_of(dense.to(memory_format=torch.channels_last)) == histogram_of(dense)
    assert histogram_of(dense[:, ::2]) == histogram_of(dense[:, ::2].clone())
    assert histogram_of(torch.tensor(2.0).expand(3)) == histogram_of(torch.full((3,), 2.0))
    assert histogram_of(torch.tensor(2.0)).num_finite == 1


def test_norm_and_sparsity() -> None:
    histogram = histogram_of(torch.tensor([3.0, 0.0, -0.0, -4.0, 1e-30]))
    assert histogram.norm == pytest.approx(5.0)
    assert histogram.sparsity == 0.4
    assert math.isnan(histogram_of(torch.tensor([3.0, math.inf])).norm)
    assert histogram_of(torch.tensor([0.0, math.nan])).sparsity == 0.5


def test_what_has_no_floating_number_is_left_out() -> None:
    shown = compute_histograms({"int": torch.ones(3, dtype=torch.int64), "empty": torch.ones(0), "one": torch.ones(1)})
    assert list(shown) == ["one"]


def test_tensorboard_reads_them_back(tmp_path: Path) -> None:
    parts = {"gradients/weight": torch.tensor([1.0, math.nan, 4.0]), "gradients/all": torch.tensor([math.inf])}
    summaries = Summaries(tmp_path, from_step=0)
    summaries.write_histograms(compute_histograms(parts), {"gradient_norms/weight": 0.5}, 7)
    summaries.close()
    events = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0, "scalars": 0}).Reload()
    assert events.Tags()["histograms"] == ["gradients/weight"]
    (event,) = events.Histograms("gradients/weight")
    assert event.step == 7
    value = event.histogram_value
    assert (value.min, value.max, value.num, value.sum, value.sum_squares) == (1.0, 4.0, 2.0, 5.0, 17.0)
    assert sum(value.bucket) == 2
    assert len(value.bucket) == len(value.bucket_limit)
    scalars = {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"]}
    assert scalars == {
        "gradient_norms/weight": 0.5,
        "nonfinite/gradients/weight": 1.0,
        "nonfinite/gradients/all": 1.0,
    }
