from __future__ import annotations

import io
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from worker_processes import HANG_SECONDS

from lockstep.errors import InputError, WorkdirError
from lockstep.reporting.events import to_uint8
from lockstep.reporting.summaries import Summaries
from lockstep.types import Interval


def read(folder: Path) -> EventAccumulator:
    everything = {"scalars": 0, "tensors": 0, "images": 0}
    return EventAccumulator(str(folder), size_guidance=everything).Reload()


def steps(folder: Path, tag: str = "losses/total") -> list[int]:
    events = read(folder)
    return [event.step for event in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []


def test_scalars_of_a_step(tmp_path: Path, make_report) -> None:
    summaries = Summaries(tmp_path, from_step=0, interval=Interval(1))
    summaries(
        make_report(
            1,
            losses={"cross_entropy": 0.5, "l2": 0.25},
            smoothed={"cross_entropy": 0.4, "l2": 0.2, "total": 0.6},
            metrics={"top1": 0.125},
            gradient_norm=float("nan"),
        )
    )
    summaries.close()
    events = read(tmp_path)
    values = {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"]}
    assert np.isnan(values.pop("gradient_norm"))
    assert values == pytest.approx(
        {
            "losses/cross_entropy": 0.5,
            "losses/l2": 0.25,
            "losses/total": 0.75,
            "losses_smoothed/cross_entropy": 0.4,
            "losses_smoothed/l2": 0.2,
            "losses_smoothed/total": 0.6,
            "metrics/top1": 0.125,
            "learning_rate": 0.05,
            "examples_per_second": 1280.0,
            "steps_per_second": 10.0,
            "data_wait_share": 0.01,
            "input/bad_examples": 0.0,
        }
    )


def test_each_of_several_optimizers_has_its_learning_rate(tmp_path: Path, make_report) -> None:
    summaries = Summaries(tmp_path, from_step=0, interval=Interval(1))
    summaries(make_report(1, learning_rate=0.5, learning_rates={"^body": 0.5, "^head": 0.25}))
    summaries(make_report(2, learning_rate=0.125, learning_rates={"": 0.125}))
    summaries.close()
    events = read(tmp_path)
    rates = {tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"] if "learning_rate" in tag}
    assert rates == {"learning_rate": [0.5, 0.125], "learning_rate/^body": [0.5], "learning_rate/^head": [0.25]}


def test_rates_are_means_over_the_interval(tmp_path: Path, make_report) -> None:
    summaries = Summaries(tmp_path, from_step=0, interval=Interval(2))
    for step, step_seconds in enumerate([1.0, 1.0, 0.3, 0.1], start=1):
        summaries(make_report(step, step_seconds=step_seconds))
    summaries.close()
    rates = read(tmp_path).Scalars("examples_per_second")
    assert [(event.step, event.value) for event in rates] == [(2, 128.0), (4, pytest.approx(640.0))]


def test_every_two_minutes_and_at_the_end(tmp_path: Path, make_report) -> None:
    summaries = Summaries(tmp_path, from_step=0)
    for step in range(1, 8):
        summaries(make_report(step, elapsed_seconds=50.0 * step))
    summaries.close()
    assert steps(tmp_path) == [3, 5, 7]


def test_an_interval_of_zero_writes_no_scalars(tmp_path: Path, make_report) -> None:
    summaries = Summaries(tmp_path, from_step=0, interval=Interval(0))
    summaries(make_report(1))
    summaries.close()
    assert steps(tmp_path) == []


def test_a_refused_attempt_waits_for_the_next_step(tmp_path: Path, make_report) -> None:
    summaries = Summaries(tmp_path, from_step=0, interval=Interval(1, "seconds"))
    summaries(make_report(1, elapsed_seconds=0.4))
    summaries(make_report(1, position=256, elapsed_seconds=1.2, losses={"loss": float("nan")}, skipped=True))
    summaries(make_report(2, position=384, elapsed_seconds=1.3))
    summaries(make_report(2, position=512, elapsed_seconds=1.4, skipped=True))
    summaries.close()
    events = read(tmp_path)
    assert steps(tmp_path) == [2]
    assert events.Scalars("steps_per_second")[0].value == pytest.approx(2 / 0.3)


def test_after_a_resume_no_step_appears_twice(tmp_path: Path, make_report) -> None:
    for first, last in [(0, 9), (4, 12), (7, 15)]:
        summaries = Summaries(tmp_path, from_step=first, interval=Interval(1))
        summaries.write_text("run", f"from step {first}", first)
        for step in range(first + 1, last + 1):
            summaries(make_report(step, learning_rate=0.1 * first))
        summaries.close()
    assert steps(tmp_path) == list(range(1, 16))
    rates = [round(event.value, 1) for event in read(tmp_path).Scalars("learning_rate")]
    assert rates == [0.0] * 4 + [0.4] * 3 + [0.7] * 8
    assert [event.step for event in read(tmp_path).Tensors("run")] == [0, 4, 7]


def test_evaluations_stand_once_for_a_step(tmp_path: Path, make_report) -> None:
    for _ in range(2):
        summaries = Summaries(tmp_path, from_step=2, interval=Interval(1))
        summaries.write_evaluation(2, "validate", {"top1": 0.5})
        summaries.write_evaluation(2, "validate", {"top1": 0.5, "top5": 0.75})
        summaries.write_evaluation(3, "validate", {"top1": 0.625})
        summaries.close()
    found = read(tmp_path)
    assert [(event.step, event.value) for event in found.Scalars("evaluation/validate/top1")] == [(2, 0.5), (3, 0.625)]
    assert [(event.step, event.value) for event in found.Scalars("evaluation/validate/top5")] == [(2, 0.75)]


def test_text_is_shown_as_it_is(tmp_path: Path) -> None:
    summaries = Summaries(tmp_path, from_step=0)
    summaries.write_text("recipe", '[data]\ntrain = "*_é"\n', 7)
    summaries.close()
    (event,) = read(tmp_path).Tensors("recipe")
    assert event.step == 7
    assert event.tensor_proto.string_val[0].decode() == '    [data]\n    train = "*_é"'
    assert read(tmp_path).SummaryMetadata("recipe").plugin_data.plugin_name == "text"


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_come_back(tmp_path: Path, channels: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, channels, 4, 5), dtype=np.uint8)
    summaries = Summaries(tmp_path, from_step=0)
    summaries.write_images({"input/0": images[0], "input/1": images[1]}, 3)
    summaries.close()
    for index, image in enumerate(images):
        (event,) = read(tmp_path).Images(f"input/{index}")
        assert (event.step, event.height, event.width) == (3, 4, 5)
        pixels = np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))
        np.testing.assert_array_equal(pixels.reshape(4, 5, channels).transpose(2, 0, 1), image)


def test_floats_become_pixels() -> None:
    positive = np.array([[[0.0, 0.25, 0.5]]], dtype=np.float32)
    assert to_uint8(positive).tolist() == [[[0, 128, 255]]]
    signed = np.array([[[-2.0, 0.0, 1.0]]], dtype=np.float32)
    assert to_uint8(signed).tolist() == [[[0, 127, 190]]]
    odd = np.array([[[np.nan, np.inf, 0.5]]], dtype=np.float16)
    assert to_uint8(odd).tolist() == [[[0, 0, 255]]]
    assert to_uint8(np.zeros((1, 1, 2))).tolist() == [[[0, 0]]]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 4, 4), "uint8"), ((4, 4), "uint8"), ((3, 4, 4), "int64"), ((1, 0, 4), "uint8")],
)
def test_what_is_no_image_is_refused(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    summaries = Summaries(tmp_path, from_step=0)
    with pytest.raises(InputError) as error:
        summaries.write_images({"input": np.zeros(shape, dtype)}, 0)
    summaries.close()
    assert error.value.what == "'input' cannot be shown as an image."
    assert error.value.given == f"an array of shape {shape} and type {dtype}"
    assert error.value.expected == "shape (channels, height, width) with 1, 3 or 4 channels, of type uint8 or float"
    assert "channels before the height" in error.value.hint


@pytest.mark.process
def test_a_kill_loses_the_last_interval_at_most(tmp_path: Path) -> None:
    program = (
        "import os, sys, signal, pathlib\n"
        "from lockstep.types import Interval, Progress\n"
        "from lockstep.types import StepReport\n"
        "from lockstep.reporting.summaries import Summaries\n"
        "summaries = Summaries(pathlib.Path(sys.argv[1]), from_step=0, interval=Interval(10))\n"
        "for step in range(1, 39):\n"
        "    summaries(StepReport(Progress(step, step, 0), {'loss': 1.0}, {}, {}, 0.1, 1.0, 1, 0.1, 0.0))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, str(tmp_path)], timeout=HANG_SECONDS, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    assert steps(tmp_path) == [10, 20, 30]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkdirError) as error:
        Summaries(tmp_path / "file" / "summaries", from_step=0)
    assert error.value.what == f"{tmp_path}/file/summaries cannot be made: Not a directory."
    assert "give another workdir" in error.value.hint
    assert "a folder" in str(error.value.expected)


def test_the_folder_is_made_and_flushed(tmp_path: Path, make_report) -> None:
    folder = tmp_path / "deep" / "summaries"
    summaries = Summaries(folder, from_step=0, interval=Interval(1))
    summaries(make_report(1))
    summaries.flush()
    assert steps(folder) == [1]
    summaries.close()


def test_a_tensorboard_that_cannot_be_imported_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(InputError, match="tensorboard cannot be imported") as caught:
        Summaries(tmp_path, from_step=0)
    assert "pip install" in caught.value.hint
    assert "watch.summaries=0" in caught.value.hint
    assert not [*tmp_path.iterdir()]


def test_without_summaries_no_tensorboard_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    summaries = Summaries(tmp_path, from_step=0, interval=Interval(0, "steps"))
    summaries.flush()
    summaries.close()
    assert not [*tmp_path.iterdir()]
