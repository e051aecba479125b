"""What scripts reach through `import lockstep as ls`."""

from __future__ import annotations

import inspect

import pytest

import lockstep as ls

PACKAGES = ["data", "images", "losses", "metrics", "models", "optim", "recipes", "records", "weights"]


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_exports_its_names_documented(package: str) -> None:
    module = getattr(ls, package)
    assert all(inspect.getdoc(getattr(module, name)) for name in ["__class__", *module.__all__])
