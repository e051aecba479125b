"""The report says what became of everything: a few lines for the screen, all of it for programs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch

from lockstep.weights.assignment import assign_tensors
from lockstep.weights.source import MemorySource
from lockstep.weights.warm_start import (
    Loaded,
    Mismatch,
    NonFinite,
    NotLoaded,
    Target,
    WarmStart,
    WarmStartReport,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "weight_names_golden.json.gz"


def use(target: str, source: str, *, layout: str | None = None, converted: str | None = None) -> Loaded:
    return Loaded(target, source, (2, 3), layout, reshaped=False, converted=converted, averaged=False)


REPORT = WarmStartReport(
    origin="model.ckpt-5 (a checkpoint)",
    loaded=(
        use("fc.weight", "fc/weights", layout="i o -> o i"),
        use("fc.bias", "fc/biases", converted="float64 -> float32"),
        use("scale", "scale"),
    ),
    missing=tuple(f"layer{index}.weight" for index in range(16)),
    skipped=(
        NotLoaded("head.weight", "skip"),
        NotLoaded("head.bias", "skip"),
        NotLoaded("bn.weight", "not in such files"),
    ),
    mismatched=(Mismatch("conv.weight", "conv/weights", "shape (1,) in the file, (2,) in the model"),),
    unexpected=("old/weights",),
    ignored=(NotLoaded("global_step", "count of steps"),),
    num_values=2000,
    num_values_loaded=1501,
)


def test_the_screen_shows_counts_and_cuts_long_lists() -> None:
    assert str(REPORT) == (
        "Weights from model.ckpt-5 (a checkpoint): 3 of 23 tensors of the model, 75.0 % of its parameters\n"
        "  loaded          3  2 renamed, 1 transposed, 1 converted\n"
        "  missing        16  layer0.weight, layer1.weight, layer2.weight, layer3.weight, layer4.weight and 11 more\n"
        "  mismatched      1  conv.weight (shape (1,) in the file, (2,) in the model)\n"
        "  skipped         3  skip: head.weight, head.bias; not in such files: bn.weight\n"
        "  unexpected      1  old/weights\n"
        "  ignored         1  count of steps: global_step"
    )


def test_what_did_not_happen_is_a_zero() -> None:
    source = MemorySource({"a": torch.zeros(2)})
    assert str(assign_tensors(source, {"a": Target((2,), "float32")}).report) == (
        "Weights from memory (values in memory): 1 of 1 tensors of the model, 100.0 % of its parameters\n"
        "  loaded          1\n"
        "  missing         0\n"
        "  mismatched      0\n"
        "  skipped         0\n"
        "  unexpected      0\n"
        "  ignored         0"
    )


def test_what_is_not_finite_is_counted_once_it_was_read() -> None:
    nan, inf = float("nan"), float("inf")
    source = MemorySource(
        {
            "a": torch.tensor([nan, nan, inf, 1.0]),
            "b": torch.tensor([1.0, -inf]).to(torch.float8_e5m2),
            "c": torch.tensor([1j, complex(nan, inf)]),
            "d": torch.tensor([1, 2]),
        }
    )
    kinds = {name: (tuple(source.tensors[name].shape), source.tensors[name].dtype) for name in "abcd"}
    planned = assign_tensors(source, {name: Target(*kind) for name, kind in kinds.items()})
    assert planned.report.nonfinite is None
    report = planned.report.after(dict(planned.tensors(source)))
    assert report.nonfinite == (NonFinite("a", 2, 1), NonFinite("b", 0, 1), NonFinite("c", 1, 1))
    assert str(report).endswith("\n  nonfinite       3  a (2 NaN, 1 infinite), b (1 infinite), c (1 NaN, 1 infinite)")
    assert report.as_json()["nonfinite"][0] == {"target": "a", "num_nan": 2, "num_infinite": 1}
    assert planned.report.as_json()["nonfinite"] is None


def test_programs_get_everything_as_json() -> None:
    found = json.loads(json.dumps(REPORT.as_json()))
    assert found["share"] == 0.7505
    assert found["counts"] == {
        "loaded": 3,
        "missing": 16,
        "mismatched": 1,
        "skipped": 3,
        "unexpected": 1,
        "ignored": 1,
    }
    assert found["loaded"][0] == {
        "target": "fc.weight",
        "source": "fc/weights",
        "shape": [2, 3],
        "layout": "i o -> o i",
        "reshaped": False,
        "converted": None,
        "averaged": False,
        "padded": False,
        "subtracted": None,
        "doubt": None,
    }
    assert len(found["missing"]) == 16
    assert found["ignored"] == [{"name": "global_step", "reason": "count of steps"}]


def test_a_model_without_parameters_has_no_share() -> None:
    assert WarmStartReport("file", (), (), (), (), (), (), 0, 0).share == 0


def test_fine_tuning_inception_leaves_the_four_variables_of_its_heads() -> None:
    golden = json.loads(gzip.decompress(GOLDEN.read_bytes()))
    source = MemorySource(
        {name: torch.zeros(1).expand(shape) for name, shape in golden["inception_slim"].items()}, "model.ckpt"
    )
    targets = {
        name: Target(tuple(shape), "int64" if name.endswith("tracked") else "float32")
        for name, shape in golden["torchvision_inception_v3"].items()
    }
    mapping = WarmStart(name_map="inception_slim", skip=("^logits/", "^aux_logits/FC/"), require_loaded=0.85)
    report = assign_tensors(source, targets, mapping).report
    assert len(report.loaded) == 384
    heads = ["AuxLogits.fc.weight", "AuxLogits.fc.bias", "fc.weight", "fc.bias"]
    assert [each.name for each in report.skipped if each.reason == "skip"] == heads
    assert "384 renamed, 96 transposed" in str(report)
