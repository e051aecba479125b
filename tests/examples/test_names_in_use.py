"""What scripts reach through `import lockstep as ls`."""

from __future__ import annotations

import inspect

import pytest

import lockstep as ls

IN_USE = {
    "data": [
        "Arrays",
        "Augment",
        "Integer",
        "Loader",
        "Pixels",
        "RandomShift",
        "Reader",
        "Records",
        "TorchDataset",
        "mnist_reader",
    ],
    "metrics": ["in_top_k"],
    "models": ["Mnist", "MnistNet"],
}


@pytest.mark.parametrize("package", IN_USE)
def test_each_package_exports_its_names_documented(package: str) -> None:
    module = getattr(ls, package)
    assert sorted(module.__all__) == IN_USE[package]
    assert all(inspect.getdoc(getattr(module, name)) for name in ["__class__", *module.__all__])
