"""Public names of a package that are loaded on first use, so that importing the package loads no torch.

The block `if TYPE_CHECKING:` in the package's `__init__.py` is the only list of its names: type checkers and editors
read it, and so does this module. Each line is `from home import Name as Name`; ruff keeps them in order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module


def lazy_names(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Make the `__getattr__`, `__dir__` and `__all__` of a package whose names are loaded on first use."""
    module = sys.modules[package]
    homes = _homes(module.__spec__.loader.get_source(package))  # type: ignore[union-attr]

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        value = import_module(f"{home}.{name}") if home == package else getattr(import_module(home), name)
        setattr(module, name, value)
        return value

    return load, lambda: sorted({*vars(module), *homes}), sorted(homes)


def _homes(source: str) -> dict[str, str]:
    """Find the lines `    from home import Name as Name` of a source; returns home by name."""
    lines = [line.split() for line in source.splitlines() if line.startswith("    from ")]
    return {words[3]: words[1] for words in lines if words[4:] == ["as", words[3]]}
