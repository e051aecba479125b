"""A word has one meaning: a public name has one home, and what a docstring names exists."""

from __future__ import annotations

import ast
import builtins
import functools
import keyword
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "lockstep"
FOREIGN = {
    # TensorFlow, TF-Slim and its Object Detection
    *("tf", "EncodeTensorNameSlice", "StringIntLabelMap", "central_crop", "clip_gradient_norm"),
    *("per_image_standardization", "resize_image_with_crop_or_pad", "resize_images", "sample_distorted_bounding_box"),
    *("truncated_normal_initializer", "variance_scaling_initializer", "xavier_initializer"),
    # torch, torchvision, torchmetrics, pycocotools, Pillow, Python
    *("ColorJitter", "DataLoader", "ImageOps", "RandomGrayscale", "checkpoint", "equalize", "rleFrPoly", "rleToString"),
    *("COCOeval", "bbIou", "computeOks", "evaluateImg", "rleIou"),
    *(
        "__init__",
        "compat",
        "image",
        "py",
        "serialization",
        "set_crc32_options",
        "tarfile",
        "tensorboard",
        "torchmetrics",
        "utils",
        "v1",
    ),
}

# A docstring that begins so is a fragment: only the line above it says what it is about.
FRAGMENTS = {"And", "By", "Else", "From", "In", "Of", "That", "Those", "Until", "Which", "Whose"}


@functools.cache  # not when pytest imports the module, which each of its processes does
def trees() -> dict[Path, ast.Module]:
    return {path.relative_to(PACKAGE): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def test_a_public_name_is_defined_in_one_module() -> None:
    homes = defaultdict(list)
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                homes[node.name].append(path)
    # Each command is a module with `add_arguments` and `run`.
    homes["run"] = [path for path in homes["run"] if path.parent.name != "cli"]
    homes["add_arguments"] = []
    assert not {name: [path.as_posix() for path in paths] for name, paths in homes.items() if len(paths) > 1}


def test_names_in_back_ticks_exist() -> None:
    known = (
        FOREIGN
        | set(dir(builtins))
        | set(keyword.kwlist)
        | {part for path in trees() for part in (*path.parts, path.stem)}
    )
    for tree in trees().values():
        known.update(names_in(tree))
    missing = {
        f"{path}:{node.lineno} `{quoted}`"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for quoted in re.findall(r"`([^`\n]+)`", node.value.value)
        if (name := re.fullmatch(r"([A-Za-z_][\w.]*)(\(.*\))?", quoted)) and not known.issuperset(name[1].split("."))
    }
    assert not missing


def test_docstrings_begin_with_what_they_describe() -> None:
    assert not [
        f"{path}:{node.lineno} {node.value.value[:40]}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if re.split(r"\W", node.value.value.strip(), maxsplit=1)[0] in FRAGMENTS
    ]


def names_in(tree: ast.Module) -> Iterator[str]:
    """The names that a module defines or uses, its words in text without spaces among them: flags, keys, values."""
    for node in ast.walk(tree):
        for field in ("name", "id", "attr", "arg"):
            if isinstance(name := getattr(node, field, None), str):
                yield from name.split(".")
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w./:-]+", node.value):
            yield from re.split(r"[./:-]", node.value)
