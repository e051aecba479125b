"""Every tensor and every parameter gets one fate, decided before anything is read, and nothing happens silently."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.errors import CheckpointError, InputError
from lockstep.weights.assignment import Assignment, assign_tensors, can_convert
from lockstep.weights.layouts import Layout
from lockstep.weights.names import NameMap, Rename
from lockstep.weights.source import MemorySource, TensorInfo
from lockstep.weights.warm_start import NotLoaded, Target, WarmStart


class Listing:
    """A source that is never read."""

    kind = "list of names"
    path = Path("weights.ckpt")

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: str = "float32") -> None:
        self.tensors = {name: TensorInfo(shape, dtype, 4) for name, shape in shapes.items()}

    def read(self, name: str) -> Tensor:
        raise AssertionError(f"{name} is read")


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)


def wanted(**shapes: tuple[int, ...]) -> dict[str, Target]:
    return {name.replace("__", "."): Target(shape, "float32") for name, shape in shapes.items()}


def loaded(found: Assignment) -> dict[str, str]:
    return {each.target: each.source for each in found.report.loaded}


def given_names(*names: str, **fields: Any) -> Assignment:
    """A plan for a model with parameters a.weight, a.bias and b.weight."""
    return assign_tensors(
        Listing(dict.fromkeys(names, (2,))), wanted(a__weight=(2,), a__bias=(2,), b__weight=(2,)), WarmStart(**fields)
    )


OURS = ("a.weight", "a.bias", "b.weight")


def test_values_in_memory_are_assigned_exactly() -> None:
    tensors = {"v0": values(1, 3, 1), "scope.v1": values(2, 1, 2)}
    source = MemorySource({name: value.numpy() for name, value in tensors.items()})
    found = assign_tensors(source, {"v0": Target((1, 3, 1), "float32"), "scope.v1": Target((2, 1, 2), "float32")})
    assigned = dict(found.tensors(source))
    assert assigned.keys() == tensors.keys()
    assert all(torch.equal(assigned[name], tensors[name]) for name in tensors)


def test_names_of_the_file_become_those_of_the_model() -> None:
    source = MemorySource({"v0": values(2), "v1": 1 + values(2)})
    renames = (Rename("^v0$", "scope.my_var0"), Rename("^v1$", "my_var1"))
    found = assign_tensors(source, wanted(scope__my_var0=(2,), my_var1=(2,)), WarmStart(rename=renames))
    assert loaded(found) == {"scope.my_var0": "v0", "my_var1": "v1"}
    assert torch.equal(dict(found.tensors(source))["my_var1"], torch.tensor([1.0, 2.0]))


def test_one_tensor_may_go_to_several_parameters_and_is_read_once() -> None:
    class Counting(MemorySource):
        reads = 0

        def read(self, name: str) -> Tensor:
            self.reads += 1
            return super().read(name)

    source = Counting({"v0": values(2, 3)})
    mapping = WarmStart(rename=(Rename("v0", ("left", "right")),), reshape=True)
    assigned = dict(assign_tensors(source, wanted(left=(2, 3), right=(3, 2)), mapping).tensors(source))
    assert torch.equal(assigned["left"], values(2, 3))
    assert torch.equal(assigned["right"], values(3, 2))
    assert source.reads == 1


def test_nothing_is_read_before_it_is_asked_for() -> None:
    assert loaded(given_names(*OURS)) == {name: name for name in OURS}


def test_prefixes_map_and_renames_come_in_this_order() -> None:
    source = Listing({"module.net/a/weights": (2,)})
    mapping = WarmStart(
        strip_prefix="module.",
        name_map=NameMap((Rename("^net/a/weights$", "net.a.weight"),)),
        rename=(Rename(r"^net\.a\.", "features.0."),),
        add_prefix="backbone.",
    )
    assert loaded(assign_tensors(source, {"backbone.features.0.weight": Target((2,), "float32")}, mapping)) == {
        "backbone.features.0.weight": "module.net/a/weights"
    }


@pytest.mark.parametrize(
    ("scope", "mapping"),
    [
        ("FeatureExtractor/InceptionV3/", WarmStart(strip_prefix="FeatureExtractor/", add_prefix="backbone.")),
        ("InceptionV3/", WarmStart(add_prefix="backbone.")),
    ],
    ids=["of a detector", "of a classifier"],
)
def test_a_backbone_comes_from_a_detector_or_from_a_classifier(scope: str, mapping: WarmStart) -> None:
    source = Listing({f"{scope}Conv2d_1a_3x3/weights": (3, 3, 3, 32), "BoxPredictor_0/biases": (4,)})
    targets = {"backbone.Conv2d_1a_3x3.conv.weight": Target((32, 3, 3, 3), "float32")}
    found = assign_tensors(source, targets, WarmStart(**{**vars(mapping), "name_map": "slim_inception_v3"}))
    assert loaded(found) == {"backbone.Conv2d_1a_3x3.conv.weight": f"{scope}Conv2d_1a_3x3/weights"}
    assert found.report.unexpected == ("BoxPredictor_0/biases",)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"strip_prefix": "module."}, "strip_prefix='module.' matches no tensor of weights.ckpt."),
        ({"name_map": "mnist"}, "name_map='mnist' matches no tensor of weights.ckpt."),
        ({"name_map": NameMap((Rename("z", "y"),))}, "The name map matches no tensor of weights.ckpt."),
        (
            {"rename": (Rename("a", "c"), Rename("z", "y"), Rename("x", "y"))},
            "Rename(pattern='z', to='y', layout=None), Rename(pattern='x', to='y', layout=None) "
            "matches no tensor of weights.ckpt.",
        ),
        ({"include": ["a", "z"]}, "A pattern of include matches no parameter."),
        ({"skip": "z"}, "A pattern of skip matches no parameter."),
        ({"prefer_average": True}, "weights.ckpt holds no moving averages."),
    ],
    ids=["prefix", "map", "own map", "renames", "include", "skip", "averages"],
)
def test_what_would_do_nothing_is_refused(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(InputError) as refusal:
        given_names(*OURS, **fields)
    assert refusal.value.what == what


def test_a_refusal_shows_the_names_that_there_are() -> None:
    with pytest.raises(InputError) as refusal:
        given_names(*OURS, "c", "d", rename=(Rename("z", "y"),))
    assert refusal.value.expected == "what is found in one of a.weight, a.bias, b.weight, c, d"


def test_two_tensors_for_one_parameter_are_refused() -> None:
    with pytest.raises(InputError) as refusal:
        given_names(*OURS, "c.weight", rename=(Rename("^c", "a"),))
    assert str(refusal.value) == (
        "Two tensors of weights.ckpt would go to 'a.weight'.\n"
        "  given:    'a.weight' and 'c.weight'\n"
        "  expected: one tensor for each parameter\n"
        "  hint:     make a rename narrower, or skip one of the two by its name in the file"
    )


def test_skipping_one_of_two_tensors_leaves_the_other() -> None:
    found = given_names("old/weight", "new/weight", "a.bias", "b.weight", skip="^old/", rename=(Rename("^.*/", "a."),))
    assert loaded(found)["a.weight"] == "new/weight"
    assert found.report.ignored == (NotLoaded("old/weight", "skip"),)


@pytest.mark.parametrize("pattern", ["^b", "b.weight", "^head/"])
def test_what_is_skipped_by_its_name_in_the_file_or_the_model_stays_as_it_is(pattern: str) -> None:
    found = given_names("a.weight", "a.bias", "head/weight", skip=pattern, rename=(Rename("^head/", "b."),))
    assert found.report.skipped == (NotLoaded("b.weight", "skip"),)
    assert found.report.ignored == (NotLoaded("head/weight", "skip"),)
    assert found.report.missing == found.report.unexpected == ()


def test_what_is_skipped_may_be_missing_or_of_another_shape() -> None:
    source = Listing({"a": (2,), "b": (3,)})
    found = assign_tensors(source, wanted(a=(2,), b=(2,), c=(2,)), WarmStart(skip=("b", "c")))
    assert [each.name for each in found.report.skipped] == ["b", "c"]


def test_only_what_is_included_is_loaded_and_skip_wins() -> None:
    found = given_names(*OURS, include=r"^a\.", skip="bias")
    assert loaded(found) == {"a.weight": "a.weight"}
    assert found.report.skipped == (NotLoaded("a.bias", "skip"), NotLoaded("b.weight", "not in include"))


def test_all_that_is_missing_is_named_with_what_is_close_to_it() -> None:
    with pytest.raises(CheckpointError) as refusal:
        given_names("a.weights", "b.weight")
    assert str(refusal.value) == (
        "The model does not get all it needs from weights.ckpt (list of names).\n"
        "  given:    missing: a.weight (close to 'a.weights' in the file), a.bias\n"
        "  expected: a tensor that fits, for every parameter and buffer of the model\n"
        "  hint:     give rename=..., a name_map or system, skip=... what is to stay as it is, "
        "or ignore_missing=True, reshape=True or mismatch='skip'"
    )


def test_what_is_missing_may_be_ignored() -> None:
    found = given_names("a.weight", "c", ignore_missing=True)
    assert loaded(found) == {"a.weight": "a.weight"}
    assert found.report.missing == ("a.bias", "b.weight")
    assert found.report.unexpected == ("c",)


@pytest.mark.parametrize(
    ("names", "fields"),
    [(("c",), {"ignore_missing": True}), ((), {"ignore_missing": True}), (OURS, {"skip": "."})],
    ids=["other names", "no names", "all skipped"],
)
def test_a_warm_start_that_loads_nothing_is_refused(names: tuple[str, ...], fields: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as refusal:
        given_names(*names, **fields)
    assert refusal.value.what == "Too little of the model would be loaded from weights.ckpt (list of names)."
    assert str(refusal.value.given).startswith("0 of 3 tensors, 0.00 % of the parameters; ")
    assert refusal.value.expected == "at least one tensor"


def test_less_than_what_is_required_is_refused() -> None:
    source = Listing({"body.weight": (3, 8), "body.bias": (4,), "fc.weights": (2,), "old": (2,)})
    targets = wanted(body__weight=(3, 8), body__bias=(3,), fc__weight=(2,), old=(2,))
    mapping = WarmStart(ignore_missing=True, mismatch="skip", skip="old", require_loaded=0.95)
    with pytest.raises(CheckpointError) as refusal:
        assign_tensors(source, targets, mapping)
    assert str(refusal.value) == (
        "Too little of the model would be loaded from weights.ckpt (list of names).\n"
        "  given:    1 of 4 tensors, 77.42 % of the parameters; "
        "missing: fc.weight (close to 'fc.weights' in the file); mismatched: body.bias; skipped: old\n"
        "  expected: at least 95 % (require_loaded=0.95)\n"
        "  hint:     correct the names with rename=..., prefixes or a name_map, or choose more"
    )
    assert (
        assign_tensors(source, targets, WarmStart(**{**vars(mapping), "require_loaded": 0.77})).report.share == 24 / 31
    )


def test_the_share_counts_values_of_parameters_and_no_buffers() -> None:
    targets = {
        "weight": Target((3, 2), "float32"),
        "bias": Target((2,), "float32"),
        "mean": Target((90,), "float32", "buffer"),
    }
    report = assign_tensors(Listing({"weight": (3, 2)}), targets, WarmStart(ignore_missing=True)).report
    assert (report.num_values, report.num_values_loaded, report.share) == (8, 6, 0.75)


@pytest.mark.parametrize("mismatch", ["error", "skip"])
def test_another_shape_is_an_error_unless_it_is_to_be_skipped(mismatch: str) -> None:
    source = Listing({"a": (1, 2, 3), "b": (2,)})
    reason = "shape (1, 2, 3) in the file, (2, 1, 3) in the model"
    mapping = WarmStart(mismatch=mismatch)  # type: ignore[arg-type]
    if mismatch == "skip":
        (found,) = assign_tensors(source, wanted(a=(2, 1, 3), b=(2,)), mapping).report.mismatched
        assert (found.target, found.source, found.reason) == ("a", "a", reason)
        return
    with pytest.raises(CheckpointError) as refusal:
        assign_tensors(source, wanted(a=(2, 1, 3), b=(2,)), mapping)
    assert refusal.value.given == f"'a' does not fit 'a': {reason}"


def test_missing_and_misfits_are_named_together() -> None:
    with pytest.raises(CheckpointError) as refusal:
        assign_tensors(Listing({"a": (1,)}), wanted(a=(2,), b=(2,)))
    assert refusal.value.given == ("missing: b; 'a' does not fit 'a': shape (1,) in the file, (2,) in the model")


def test_values_are_read_off_into_another_shape_on_request() -> None:
    source = MemorySource({"a": values(2, 3)})
    found = assign_tensors(source, wanted(a=(3, 2)), WarmStart(reshape=True))
    assert torch.equal(dict(found.tensors(source))["a"], values(3, 2))
    assert found.report.loaded[0].reshaped
    with pytest.raises(CheckpointError, match=r"shape \(2, 3\) in the file, \(3, 3\) in the model"):
        assign_tensors(source, wanted(a=(3, 3)), WarmStart(reshape=True))


def test_a_matrix_of_tensorflow_is_not_transposed_by_guess() -> None:
    source = MemorySource({"a": values(2, 3)})
    with pytest.raises(CheckpointError, match="it would fit as TensorFlow lays it out: system='tensorflow'"):
        assign_tensors(source, wanted(a=(3, 2)))
    found = assign_tensors(source, wanted(a=(3, 2)), WarmStart(system="tensorflow"))
    assert torch.equal(dict(found.tensors(source))["a"], values(2, 3).t())


def test_a_square_matrix_is_transposed_where_it_is_of_tensorflow() -> None:
    source = MemorySource({"a/weights": values(2, 2)})
    as_tensorflow = assign_tensors(source, wanted(a__weight=(2, 2)), WarmStart(name_map="tensorflow"))
    assert torch.equal(dict(as_tensorflow.tensors(source))["a.weight"], values(2, 2).t())
    as_torch = assign_tensors(source, wanted(a__weight=(2, 2)), WarmStart(name_map="tensorflow", system="torch"))
    assert torch.equal(dict(as_torch.tensors(source))["a.weight"], values(2, 2))


def test_the_layout_of_a_rename_comes_before_that_of_the_shapes() -> None:
    source = MemorySource({"a": values(2, 2)})
    mapping = WarmStart(rename=(Rename("^a$", "a", Layout("v d -> v d")),), system="tensorflow")
    assert torch.equal(dict(assign_tensors(source, wanted(a=(2, 2)), mapping).tensors(source))["a"], values(2, 2))
    with pytest.raises(CheckpointError, match=r"shape \(2,\) as 'v d -> v d' in the file, \(2,\) in the model"):
        assign_tensors(Listing({"a": (2,)}), wanted(a=(2,)), mapping)


def test_averages_are_left_unless_they_are_preferred() -> None:
    source = MemorySource(
        {
            "a": torch.zeros(1),
            "a/ExponentialMovingAverage": torch.ones(1),
            "b": torch.zeros(1),
            "c/ExponentialMovingAverage": torch.ones(1),
        }
    )
    raw = assign_tensors(source, wanted(a=(1,), b=(1,)))
    assert [value.item() for _, value in raw.tensors(source)] == [0, 0]
    assert raw.report.ignored == tuple(NotLoaded(f"{name}/ExponentialMovingAverage", "moving average") for name in "ac")
    averaged = assign_tensors(source, wanted(a=(1,), b=(1,), c=(1,)), WarmStart(prefer_average=True))
    assert [value.item() for _, value in averaged.tensors(source)] == [1, 0, 1]
    assert [each.averaged for each in averaged.report.loaded] == [True, False, True]
    assert averaged.report.ignored == (NotLoaded("a", "its moving average is loaded"),)


def test_patterns_and_renames_see_the_variable_of_an_average() -> None:
    source = Listing({"a/weights": (1,), "a/weights/ExponentialMovingAverage": (1,), "b/weights": (1,)})
    mapping = WarmStart(prefer_average=True, rename=(Rename("/weights$", ".weight"),), skip="^b/weights$")
    assert loaded(assign_tensors(source, wanted(a__weight=(1,), b__weight=(1,)), mapping)) == {
        "a.weight": "a/weights/ExponentialMovingAverage"
    }


def test_the_step_and_slots_are_never_loaded() -> None:
    source = Listing({"a": (), "global_step": (), "a/Momentum": ()})
    found = assign_tensors(source, {"a": Target((), "float32")})
    assert found.report.ignored == (
        NotLoaded("global_step", "count of steps"),
        NotLoaded("a/Momentum", "slot of an optimizer"),
    )
    with pytest.raises(CheckpointError, match="missing: global_step"):
        assign_tensors(source, wanted(a=(), global_step=()))


def test_counts_of_batches_and_scales_that_a_system_has_not_may_be_missing() -> None:
    targets = wanted(conv0__bn__weight=(1,), conv0__bn__bias=(1,)) | {
        "conv0.bn.num_batches_tracked": Target((), "int64", "buffer")
    }
    found = assign_tensors(Listing({"conv0/BatchNorm/beta": (1,)}), targets, WarmStart(name_map="tensorflow"))
    assert found.report.skipped == (
        NotLoaded("conv0.bn.weight", "not in such files"),
        NotLoaded("conv0.bn.num_batches_tracked", "not in such files"),
    )


@pytest.mark.parametrize(
    ("file", "model", "fits"),
    [
        ("float32", "float32", True),
        ("float16", "float32", True),
        ("bfloat16", "float32", True),
        ("float64", "float32", True),
        ("float32", "bfloat16", True),
        ("int64", "int64", True),
        ("int32", "int64", True),
        ("uint8", "int16", True),
        ("int64", "int32", False),
        ("int8", "uint8", False),
        ("int64", "float32", False),
        ("float32", "int64", False),
        ("bool", "bool", True),
        ("bool", "int64", False),
        ("uint8", "bool", False),
        ("complex64", "float32", False),
        ("float32", "complex64", False),
        ("string", "string", False),
        ("string", "float32", False),
    ],
)
def test_which_dtype_becomes_which(file: str, model: str, fits: bool) -> None:
    assert can_convert(file, model) is fits


def test_a_conversion_is_told() -> None:
    source = Listing({"a": (1,), "b": (1,)}, dtype="float16")
    found = assign_tensors(source, {"a": Target((1,), "float32"), "b": Target((1,), "float16")})
    assert [each.converted for each in found.report.loaded] == ["float16 -> float32", None]


def test_whole_numbers_for_a_parameter_are_an_error() -> None:
    with pytest.raises(CheckpointError, match="'a' does not fit 'a': int64 in the file, float32 in the model"):
        assign_tensors(Listing({"a": (1,)}, dtype="int64"), wanted(a=(1,)))


def test_values_change_their_dtype_and_may_not_overflow() -> None:
    source = MemorySource({"a": torch.tensor([1.5, 1e300, float("inf")], dtype=torch.float64)})
    found = assign_tensors(source, wanted(a=(3,)))
    with pytest.raises(CheckpointError) as refusal:
        dict(found.tensors(source))
    assert str(refusal.value) == (
        "'a' in memory has values that are too large for 'a'.\n"
        "  given:    1e+300 as torch.float64\n"
        "  expected: at most 3.40282e+38, for torch.float32\n"
        "  hint:     leave this tensor out with skip=..., or train with a wider dtype"
    )
    source = MemorySource({"a": torch.tensor([1.5, -2.0, float("inf")], dtype=torch.float64)})
    (value,) = dict(found.tensors(source)).values()
    assert torch.equal(value, torch.tensor([1.5, -2.0, float("inf")]))


def test_a_source_that_has_changed_since_is_refused() -> None:
    found = assign_tensors(MemorySource({"a": values(2)}), wanted(a=(2,)))
    with pytest.raises(CheckpointError) as refusal:
        dict(found.tensors(MemorySource({"a": values(3)})))
    assert str(refusal.value) == (
        "'a' in memory is not what it was.\n"
        "  given:    shape (3,)\n"
        "  expected: shape (2,), as when the warm start was planned\n"
        "  hint:     do not write to the file while it is used, and plan with the source that is read"
    )


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"rename": "a"}, "rename is of the wrong type."),
        ({"rename": ("a",)}, "rename[0] is of the wrong type."),
        ({"strip_prefix": None}, "strip_prefix is of the wrong type."),
        ({"add_prefix": 1}, "add_prefix is of the wrong type."),
        ({"ignore_missing": 1}, "ignore_missing is of the wrong type."),
        ({"reshape": "yes"}, "reshape is of the wrong type."),
        ({"prefer_average": None}, "prefer_average is of the wrong type."),
        ({"mismatch": "warn"}, "mismatch cannot be 'warn'."),
        ({"system": "caffe"}, "system cannot be 'caffe'."),
        ({"name_map": 3}, "name_map is of the wrong type."),
        ({"name_map": "minst"}, "There is no name map 'minst'."),
        ({"require_loaded": 95}, "require_loaded is out of range."),
        ({"require_loaded": True}, "require_loaded is of the wrong type."),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(InputError) as refusal:
        WarmStart(**fields)
    assert refusal.value.what == what


FILE = {"a": (1,), "a/Momentum": (1,), "b": (2,), "c": (3,), "d/a": (1,), "d/b": (2,), "global_step": ()}
MODEL = {"a": (1,), "b": (2,), "c": (1,), "d/a": (1,), "e.a": (1,), "e.b": (3,), "f.num_batches_tracked": ()}


@settings(max_examples=50, deadline=None)
@given(
    st.sets(st.sampled_from([*FILE]), min_size=4),
    st.sets(st.sampled_from([*MODEL]), min_size=4),
    st.sampled_from([(), (Rename("^d/", "e."),), (Rename("^", "e."),), (Rename("^(a|b)$", (r"\1", r"e.\1")),)]),
    st.sampled_from([(), "a", ["b", "."]]),
    st.sampled_from([(), "^a$|^b$|e"]),
)
def test_each_parameter_and_each_tensor_has_one_fate(
    in_file: set[str], in_model: set[str], rename: tuple[Rename, ...], include: Any, skip: Any
) -> None:
    files, models = {name: FILE[name] for name in sorted(in_file)}, {name: MODEL[name] for name in sorted(in_model)}
    mapping = WarmStart(rename=rename, include=include, skip=skip, ignore_missing=True, mismatch="skip")
    try:
        report = assign_tensors(
            Listing(files), {name: Target(shape, "float32") for name, shape in models.items()}, mapping
        ).report
    except (InputError, CheckpointError):
        reject()  # a pattern that matches nothing, two tensors for one place, or nothing to load
    fates = [each.target for each in (*report.loaded, *report.mismatched)]
    fates += [*report.missing, *(each.name for each in report.skipped)]
    assert sorted(fates) == sorted(models)
    used = {each.source for each in (*report.loaded, *report.mismatched)}
    unused = [*report.unexpected, *(each.name for each in report.ignored)]
    assert sorted([*used, *unused]) == sorted(files)
    assert report.num_targets == len(models)
    assert report.num_values_loaded == sum(torch.Size(models[each.target]).numel() for each in report.loaded)
    assert all(files[each.source] == models[each.target] for each in report.loaded)


@pytest.mark.parametrize(
    ("role", "wanted_values"), [("kernel", values(2, 2).t()), ("table", values(2, 2)), ("other", values(2, 2).t())]
)
def test_what_a_matrix_is_for_decides_how_it_lies(role: Any, wanted_values: Tensor) -> None:
    source = MemorySource({"a": values(2, 2)})
    found = assign_tensors(source, {"a": Target((2, 2), "float32", role=role)}, WarmStart(system="tensorflow"))
    assert torch.equal(dict(found.tensors(source))["a"], wanted_values)


@pytest.mark.parametrize("reshape", [False, True])
def test_a_kernel_of_tensorflow_is_never_taken_as_it_lies(reshape: bool) -> None:
    targets = {"a": Target((5, 3), "float32", role="kernel")}
    source = MemorySource({"a": values(5, 3)})
    with pytest.raises(CheckpointError) as refusal:
        assign_tensors(source, targets, WarmStart(system="tensorflow", reshape=reshape))
    assert refusal.value.given == (
        "'a' does not fit 'a': shape (5, 3) in the file, (5, 3) in the model, a kernel, "
        "which no layout of TensorFlow's becomes; a Rename can name its layout"
    )
    get_name_map = WarmStart(system="tensorflow", rename=(Rename("^a$", "a", Layout("o i -> o i")),))
    assert torch.equal(dict(assign_tensors(source, targets, get_name_map).tensors(source))["a"], values(5, 3))
    assert torch.equal(dict(assign_tensors(source, targets).tensors(source))["a"], values(5, 3))


TIED = {"a": Target((2,), "float32", other_names=("b", "c")), "d": Target((2,), "float32")}


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_tied_parameter_may_come_under_any_of_its_names(name: str) -> None:
    source = MemorySource({"d": values(2), name: 1 + values(2)})
    found = assign_tensors(source, TIED)
    assert torch.equal(dict(found.tensors(source))["a"], 1 + values(2))
    assert loaded(found) == {"a": name, "d": "d"}
    assert found.report.missing == found.report.unexpected == found.report.ignored == ()


def test_a_tied_parameter_may_come_under_several_names_with_the_same_values() -> None:
    tied = torch.tensor([1.0, float("nan")])
    source = MemorySource({"c": tied, "a": tied.double().float(), "d": values(2)})
    found = assign_tensors(source, TIED)
    assert dict(found.tensors(source)).keys() == {"a", "d"}
    assert found.report.ignored == (NotLoaded("a", "another name of a"),)


def test_two_values_for_a_tied_parameter_are_refused() -> None:
    source = MemorySource({"a": values(2), "b": 1 + values(2), "d": values(2)})
    with pytest.raises(CheckpointError) as refusal:
        dict(assign_tensors(source, TIED).tensors(source))
    assert str(refusal.value) == (
        "The tied parameter 'a' would get two values from memory.\n"
        "  given:    'a', and 'b', which has other values\n"
        "  expected: the same values under all of its names\n"
        "  hint:     skip one of the two by its name, or untie the parameters of the model"
    )
    chosen = assign_tensors(source, TIED, WarmStart(skip="^a$"))
    assert torch.equal(dict(chosen.tensors(source))["a"], 1 + values(2))


def test_two_shapes_for_a_tied_parameter_are_refused() -> None:
    with pytest.raises(CheckpointError) as refusal:
        assign_tensors(Listing({"a": (2,), "b": (3,), "d": (2,)}), TIED, WarmStart(mismatch="skip"))
    assert refusal.value.given == ("'a', and 'b', which does not fit: shape (3,) in the file, (2,) in the model")


@pytest.mark.parametrize("value", [57344.0, -512.0, float("inf")])
def test_values_of_8_bits_may_not_overflow_either(value: float) -> None:
    source = MemorySource({"a": torch.tensor([value]).to(torch.float8_e5m2)})
    found = assign_tensors(source, {"a": Target((1,), "float8_e4m3fn")})
    with pytest.raises(
        CheckpointError, match=rf"{value:g} as torch\.float8_e5m2\n.*at most 448, for torch\.float8_e4m3fn"
    ):
        dict(found.tensors(source))


def test_values_of_8_bits_become_others() -> None:
    source = MemorySource({"a": torch.tensor([1.5, -2.0, float("nan")]).to(torch.float8_e5m2)})
    (value,) = dict(assign_tensors(source, {"a": Target((3,), "float8_e4m3fn")}).tensors(source)).values()
    assert torch.equal(value.float().nan_to_num(9), torch.tensor([1.5, -2.0, 9.0]))


def test_what_is_too_large_is_told_to_the_last_bit() -> None:
    source = MemorySource({"a": torch.tensor([65536.0], dtype=torch.bfloat16)})
    with pytest.raises(CheckpointError, match=r"65536 as torch\.bfloat16"):
        dict(assign_tensors(source, {"a": Target((1,), "float16")}).tensors(source))
    source = MemorySource({"a": torch.tensor([65504.0, -65504.0, float("-inf")], dtype=torch.float64)})
    (value,) = dict(assign_tensors(source, {"a": Target((3,), "float16")}).tensors(source)).values()
    assert value.tolist() == [65504.0, -65504.0, float("-inf")]


BLOCKS = ("5b", "5c", "5d", "6b", "6c", "6d", "6e", "7b", "7c")
IN_SLIM = {f"InceptionV3/Mixed_{block}/Branch_0/Conv2d_0a_1x1/weights": (1, 1, 8, 8) for block in BLOCKS}
IN_OURS = {f"Mixed_{block}.branch1x1.conv.weight": Target((8, 8, 1, 1), "float32") for block in BLOCKS}


def test_the_map_that_knows_the_names_is_named() -> None:
    with pytest.raises(CheckpointError) as refusal:
        assign_tensors(Listing(IN_SLIM), IN_OURS)
    assert refusal.value.hint == "give name_map='slim_inception_v3', which knows these names"
    assert (
        loaded(assign_tensors(Listing(IN_SLIM), IN_OURS, WarmStart(name_map="slim_inception_v3"))).keys()
        == IN_OURS.keys()
    )


def test_of_very_many_that_are_missing_or_do_not_fit_the_first_are_named() -> None:
    many = {f"layer{index}": Target((2,), "float32") for index in range(50)}
    with pytest.raises(CheckpointError) as refusal:
        assign_tensors(Listing({"layer0": (2,)}), many)
    assert refusal.value.given.startswith("missing: layer1, layer2,")
    assert refusal.value.given.endswith(", layer8 and 41 more")
    with pytest.raises(CheckpointError) as refusal:
        assign_tensors(Listing(dict.fromkeys(many, (3,))), many)
    assert refusal.value.given.count("does not fit") == 8
    assert refusal.value.given.endswith(" and 42 more")


def test_where_no_name_is_found_it_may_be_of_another_model() -> None:
    with pytest.raises(CheckpointError) as refusal:
        given_names("features.0.weight")
    assert refusal.value.hint.startswith("check that it is of this model; give rename=..., ")


CUT = NameMap((Rename("^k$", "kernel", Layout("h w i o -> o i h w")),), "tensorflow", may_be_cut=("^kernel$",))


@pytest.mark.parametrize("shape", [(2, 3, 3, 4), (1, 1, 3, 4), (5, 4, 3, 4)])
def test_a_kernel_that_may_be_cut_is_put_in_the_middle_of_zeros(shape: tuple[int, ...]) -> None:
    source = MemorySource({"k": 1 + values(*shape)})
    found = assign_tensors(source, wanted(kernel=(4, 3, 5, 5)), WarmStart(name_map=CUT))
    kernel = dict(found.tensors(source))["kernel"]
    height, width = shape[:2]
    top, left = (5 - height) // 2, (5 - width) // 2
    assert torch.equal(kernel[:, :, top : top + height, left : left + width], (1 + values(*shape)).permute(3, 2, 0, 1))
    assert kernel.count_nonzero() == source.read("k").numel()
    assert found.report.loaded[0].padded
    assert "1 put in the middle of zeros" in str(found.report)


@pytest.mark.parametrize("shape", [(6, 5, 3, 4), (2, 2, 2, 4), (2, 2, 3, 5), (0, 2, 3, 4)])
def test_a_kernel_that_is_no_cut_one_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match=r"'k' does not fit 'kernel'"):
        assign_tensors(Listing({"k": shape}), wanted(kernel=(4, 3, 5, 5)), WarmStart(name_map=CUT))


def test_a_smaller_kernel_is_refused_where_none_may_be_cut() -> None:
    mapping = WarmStart(name_map=NameMap(CUT.renames, "tensorflow"))
    with pytest.raises(CheckpointError, match=r"'k' does not fit 'kernel'"):
        assign_tensors(Listing({"k": (2, 2, 3, 4)}), wanted(kernel=(4, 3, 5, 5)), mapping)
