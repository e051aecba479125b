"""The detector of a run as a file: one image in, the detections of an evaluation out."""

from __future__ import annotations

import io
import warnings
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_runs import saved
from tiny_detector import tiny_recipe
from torch import Tensor, nn

import lockstep as ls
from lockstep.detection.blocks import BatchNonMaxSuppression, PostProcessing
from lockstep.detection.detector import Detections
from lockstep.detection.nms import NmsLimits, fixed_detections, multiclass_nms, postprocess
from lockstep.detection.values import SqueezeSsd
from lockstep.runs.export import FOUND, IMAGE, encode_model
from lockstep.runs.trained import Trained, trained_model


def image(seed: int) -> Tensor:
    return torch.randint(0, 256, (3, 32, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def exported(trained: Trained, ending: str) -> bytes:
    return b"".join(bytes(part) for part in encode_model(trained, ending))


def found_by_run(trained: Trained, pixels: Tensor) -> Detections:
    task: Any = trained.recipe.chosen_task
    with torch.no_grad():
        (found,) = task.detect(trained.model, {"image": pixels[None]})
    return Detections(found.boxes.clamp(min=0).minimum(torch.tensor([32.0, 48, 32, 48])), *found[1:])


def check(outputs: Any, expected: Detections, most: int) -> None:
    boxes, scores, labels, number = outputs
    assert (len(boxes), len(scores), len(labels)) == (most,) * 3
    assert int(number) == len(expected.scores) > 0
    torch.testing.assert_close(boxes[: int(number)], expected.boxes)
    torch.testing.assert_close(scores[: int(number)], expected.scores)
    assert torch.equal(labels[: int(number)], expected.labels)
    assert not any(rows[int(number) :].any() for rows in (boxes, scores, labels))


def test_a_program_finds_what_the_run_finds(tmp_path: Path) -> None:
    model = SqueezeSsd(2, score_threshold=0.4, max_detections=30)
    saved(tmp_path / "run", replace(tiny_recipe(Path("gone")), model=model))
    trained = trained_model(str(tmp_path / "run"))
    data = exported(trained, ".pt2")
    assert b"/test_export_detector.py" not in data
    with warnings.catch_warnings(action="ignore"):  # of torch, about parts of its own
        program = torch.export.load(io.BytesIO(data)).module()
        for seed in range(2):
            check(program(image(seed)), found_by_run(trained, image(seed)), 30)


@pytest.mark.skipif(find_spec("onnxruntime") is None or find_spec("onnxscript") is None, reason="needs ONNX Runtime")
def test_onnx_runtime_finds_what_the_run_finds(tmp_path: Path) -> None:
    import onnxruntime

    saved(tmp_path / "run", tiny_recipe(Path("gone")))
    trained = trained_model(str(tmp_path / "run"))
    session = onnxruntime.InferenceSession(exported(trained, ".onnx"))
    assert [each.name for each in session.get_outputs()] == [*FOUND]
    outputs = session.run(None, {IMAGE: image(3).numpy()})
    check([torch.from_numpy(each) if each.ndim else each for each in outputs], found_by_run(trained, image(3)), 10)


def test_tensors_are_exported_as_of_any_model(tmp_path: Path) -> None:
    saved(tmp_path / "run", tiny_recipe(Path("gone")))
    assert exported(trained_model(str(tmp_path / "run")), ".safetensors")


def test_what_cannot_be_traced_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "run", tiny_recipe(Path("gone")))
    trained = trained_model(str(tmp_path / "run"))

    def of_first(predictions: Any) -> Any:
        scores = predictions["logits"][0, :, 0]
        found = scores.new_zeros(int((scores > 0).sum()), 4)
        found = found if len(found) > 3 else found[:0]
        return [Detections(found, found[:, 0], found[:, 0])]

    monkeypatch.setattr(trained.model, "postprocess", of_first)
    with pytest.raises(ls.InputError, match=r"(?s)its shapes depend on the image.*safetensors"):
        exported(trained, ".pt2")


def drawn(seed: int, num_boxes: int = 60, classes: int = 3) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    corners = torch.rand(num_boxes, 1 if seed % 2 else classes, 2, generator=draw) * 60 - 10
    sides = torch.rand(num_boxes, corners.shape[1], 2, generator=draw) * 30
    return torch.cat([corners, corners + sides], 2), torch.rand(num_boxes, classes, generator=draw)


class Fixed(nn.Module):
    def __init__(self, limits: NmsLimits, shape: tuple[int, int] | None) -> None:
        super().__init__()
        self.limits, self.shape = limits, shape

    def forward(self, boxes: Tensor, scores: Tensor) -> Any:
        return fixed_detections(boxes, scores, self.limits, self.shape)[:3]


def traced(boxes: Tensor, scores: Tensor, limits: NmsLimits, shape: tuple[int, int] | None = None) -> Any:
    with warnings.catch_warnings(action="ignore"):
        return torch.export.export(Fixed(limits, shape), (boxes, scores)).module()(boxes, scores)


def test_fixed_steps_choose_as_the_loop_does() -> None:
    boxes, scores = drawn(0)
    of_ssd = NmsLimits(0.3, 0.4, max_detections=52, candidates_per_class=20)
    expected = multiclass_nms(boxes, scores, of_ssd)
    config = PostProcessing(BatchNonMaxSuppression(0.3, 0.4, 7, 15))
    (clipped,) = postprocess(config, boxes[None], scores[None], (40, 40), has_background=False)
    of_api = NmsLimits(0.3, 0.4, max_detections=15, max_detections_per_class=7)
    for found, theirs in (
        (traced(boxes, scores, of_ssd), expected),
        (traced(boxes, scores, of_api, (40, 40)), clipped),
    ):
        number = len(theirs.scores)
        assert int((found[2] > 0).sum()) == number > 0
        assert all(torch.equal(ours[:number], each) for ours, each in zip(found, theirs[:3], strict=True))
