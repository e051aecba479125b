"""What a batch size costs: which sizes are measured, where that ends, and the command as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_detector import tiny_recipe, write_coco

from lockstep.cli.batch_size_benchmark import Measurement, Sweep, measure_while_it_fits, with_largest_images
from lockstep.cli.main import main
from lockstep.detection.values import SqueezeSsd
from lockstep.errors import InputError
from lockstep.optim import SGD, Cosine
from lockstep.recipes.parts import Stage
from lockstep.recipes.shipped import find
from lockstep.recipes.toml import to_toml
from lockstep.types import Epochs, Steps

GB = 10**9


def of_memory(bytes_an_example: int, most: int = 10**6, tried: list[int] | None = None) -> Callable[[int], Measurement]:
    """Steps of a thousandth of a second that need so much, and fail beyond `most` examples as an allocator does."""

    def measured(batch_size: int) -> Measurement:
        if tried is not None:
            tried.append(batch_size)
        if batch_size > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 has 80 GiB.")
        return Measurement(batch_size, 0.001, GB + batch_size * bytes_an_example)

    return measured


def sizes_of(found: list[Measurement]) -> list[int]:
    return [each.batch_size for each in found]


def test_sizes_double_until_the_epoch_is_one_batch() -> None:
    found, ended = measure_while_it_fits(of_memory(0), least=2, most=101, memory=None, seconds=60)
    assert sizes_of(found) == [4, 8, 16, 32, 64, 100]
    assert ended == "There are no more than 100 examples in an epoch."


def test_between_one_that_fits_and_one_that_does_not_others_are_tried() -> None:
    tried: list[int] = []
    found, ended = measure_while_it_fits(
        of_memory(0, most=90, tried=tried), least=2, most=10**6, memory=None, seconds=60
    )
    assert tried == [4, 8, 16, 32, 64, 128, 96, 80, 88]
    assert sizes_of(found) == [4, 8, 16, 32, 64, 80, 88]
    assert ended == "The memory is not enough for 96 examples: CUDA out of memory. Tried to allocate 2 GiB."


@pytest.mark.parametrize("least", [1, 3, 7])
@pytest.mark.parametrize("most", [1, 2, 7, 22, 100, 1001])
def test_every_size_is_a_multiple_and_the_last_is_within_an_eighth_of_the_most(least: int, most: int) -> None:
    fits = max(most, least)
    found, _ = measure_while_it_fits(of_memory(0, most=fits), least=least, most=10**6, memory=None, seconds=60)
    sizes = sizes_of(found)
    assert sizes == sorted({*sizes})
    assert all(size % least == 0 for size in sizes)
    assert sizes[-1] <= fits < sizes[-1] + max(2 * least, sizes[-1] // 4)


def test_where_the_system_would_end_the_process_nothing_is_tried_that_is_expected_to_need_too_much() -> None:
    tried: list[int] = []
    measured = of_memory(GB // 10, tried=tried)
    found, ended = measure_while_it_fits(measured, least=1, most=10**6, memory=10 * GB, seconds=60, before=GB)
    assert tried == sizes_of(found)
    assert max(each.peak_bytes for each in found) <= 9 * GB
    assert sizes_of(found)[-1] >= 70
    assert "would be needed, of 10.0 GB that there are" in ended


def test_a_peak_of_before_hides_no_growth() -> None:
    """What an example takes shows at first where more is held than was held before."""
    tried: list[int] = []
    grows = of_memory(GB // 4, tried=tried)

    def measured(batch_size: int) -> Measurement:
        return replace(grows(batch_size), peak_bytes=max(5 * GB, grows(batch_size).peak_bytes))

    measure_while_it_fits(measured, least=1, most=10**6, memory=20 * GB, seconds=60, before=GB)
    assert all(GB + batch_size * GB // 4 <= 18 * GB for batch_size in tried)


def test_it_ends_in_time() -> None:
    found, ended = measure_while_it_fits(of_memory(0), least=1, most=10**9, memory=None, seconds=1e-9)
    assert sizes_of(found) == [2]
    assert ended == "4 examples would take longer than what is left of 1e-09 s; --seconds gives more."


def test_one_example_a_tower_is_measured_where_two_do_not_fit() -> None:
    found, ended = measure_while_it_fits(of_memory(0, most=3), least=3, most=100, memory=None, seconds=60)
    assert sizes_of(found) == [3]
    assert ended.startswith("The memory is not enough for 6 examples: ")


def test_of_stages_the_largest_images_count() -> None:
    staged = replace(find("flowers_two_stages"), stages=())
    stages = (Stage(Steps(2), image_size=96), Stage(Steps(2)))
    assert with_largest_images(replace(staged, stages=stages)).data.image_size == staged.data.image_size
    larger = (Stage(Steps(2)), Stage(Steps(2), image_size=2 * staged.data.image_size))
    found = with_largest_images(replace(staged, stages=larger))
    assert (found.data.image_size, found.stages) == (2 * staged.data.image_size, ())


def test_what_does_not_fit_at_all_is_an_error_that_says_what_needs_less() -> None:
    with pytest.raises(InputError) as caught:
        measure_while_it_fits(of_memory(0, most=1), least=2, most=100, memory=None, seconds=60)
    assert caught.value.given == "2 examples: CUDA out of memory. Tried to allocate 2 GiB"
    assert "num_towers" in caught.value.hint


def test_other_errors_come_out() -> None:
    def fails(batch_size: int) -> Measurement:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        measure_while_it_fits(fails, least=1, most=4, memory=None, seconds=60)


def test_the_verdict_names_the_largest_and_the_smallest_that_is_about_as_fast() -> None:
    sizes = tuple(Measurement(size, size / rate, GB) for size, rate in [(4, 10), (8, 19.2), (16, 20), (32, 19.5)])
    found = Sweep("Net", "cpu", batch_size=8, num_towers=4, usable_bytes=GB, sizes=sizes, ended="")
    assert found.verdict == (
        "The largest batch measured: 32 examples, 4 towers of 8. 8 examples are within 5 % of the best speed."
    )


def run(*words: str, code: int = 0) -> None:
    assert main(["benchmark", "batch-size", *words, "--device", "cpu"]) == code


def test_a_recipe_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    run("mnist", "--seconds", "1")
    said, log = capsys.readouterr()
    lines = said.splitlines()
    assert lines[0].startswith("mnist: MnistNet, 2 towers, fp32; one worker on cpu with ")
    assert lines[2].split() == ["ms", "a", "step", "examples/s", "GB", "of", "memory"]
    assert lines[3].startswith("4 examples ")
    assert all(float(cell) > 0 for cell in lines[3].split()[2:])
    assert "; --seconds gives more." in said
    assert "The largest batch measured: " in said
    assert lines[-1].startswith("- To train with the largest: lockstep train mnist --set batch_size=")
    assert "measuring batches of 4" in log
    assert torch.get_num_threads() == threads


def test_json_of_a_detector(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "detector.toml"
    schedule = Cosine(0.01, Epochs(12), warmup_steps=10)  # longer than the run would be with batches of a few more
    tiny = tiny_recipe(write_coco(tmp_path, 4))
    recipe.write_text(to_toml(replace(tiny, model=SqueezeSsd(2), optimizer=SGD(schedule))))
    run(str(recipe), "--json")
    found = json.loads(capsys.readouterr().out)
    assert (found["what"], found["device"], found["largest"]) == (str(recipe), "cpu", 4)
    assert found["ended"] == "There are no more than 4 examples in an epoch."
    peaks = [each["peak_bytes"] for each in found["sizes"]]
    assert peaks == sorted(peaks)
    for each in found["sizes"]:
        assert each["examples_per_second"] == pytest.approx(each["batch_size"] / each["seconds"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["images"], ["A path to data has no training step.", "lockstep benchmark input images"]),
        (
            ["mnist", "--batch-size", "8"],
            ["measured without what reads ahead", "given:    --batch-size", "leave it out"],
        ),
        (["mnist", "--threads", "1"], ["given:    --threads"]),
        (["mnist", "--seconds", "0"], ["--seconds is out of range"]),
        (["mnst"], ['did you mean "mnist"?']),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_measured_is_refused(
    words: list[str],
    message: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "images").mkdir()
    monkeypatch.chdir(tmp_path)
    run(*words, code=2)
    said, log = capsys.readouterr()
    assert said == ""
    for part in message:
        assert part in log
