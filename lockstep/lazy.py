"""Imports that wait until they are used: public names of a package, and whole libraries.

Each package lists its public names once, in the block `if TYPE_CHECKING:` of its `__init__.py`: type checkers and
editors read it, and so does `lazy_names`. Each line is `from home import Name as Name`; ruff keeps them in order.

torch takes 1.4 s to import. A command, which may end without a tensor as it refuses what it was given, calls
`import_lazily("torch")` first; scripts and workers import libraries as usual. So that it helps, modules that recipes
and checks need ask torch for nothing while they are imported: `from torch import Tensor` stands under
`if TYPE_CHECKING:`, and no constant or decorator at the top level is torch's.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import ModuleType


def lazy_names(package: str, see: str = "") -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Make the `__getattr__`, `__dir__` and `__all__` of a package whose names are loaded on first use.

    `see` says in errors where else a name that is not there may be.
    """
    module = sys.modules[package]
    homes = _homes(module.__spec__.loader.get_source(package))  # type: ignore[union-attr]

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{f'; {see}' if see else ''}")
        home = homes[name]
        value = import_module(f"{home}.{name}") if home == package else getattr(import_module(home), name)
        setattr(module, name, value)
        return value

    return load, lambda: sorted({*vars(module), *homes}), sorted(homes)


def _homes(source: str) -> dict[str, str]:
    """Find the lines `    from home import Name as Name` of a source; returns home by name."""
    lines = [line.split() for line in source.splitlines() if line.startswith("    from ")]
    return {words[3]: words[1] for words in lines if words[4:] == ["as", words[3]]}


def import_lazily(*libraries: str) -> None:
    """Have each of these libraries loaded when the first of its attributes is used, not when it is imported.

    A library that is loaded already, or is not there, is left as it is. Threads wait for the one that loads it.
    """
    for name in libraries:
        spec = None if name in sys.modules else find_spec(name)
        if spec is not None:
            sys.modules[name] = module = module_from_spec(spec)
            # Asked for by the import of a submodule, which needs the library itself.
            del module.__path__
            module.__class__ = _LazyLibrary


_LOADING = threading.RLock()


class _LazyLibrary(ModuleType):
    """A library that loads itself; it stays the same object, and becomes a plain module.

    The LazyLoader of importlib does not do: a second `import torch` looks at `__spec__`, which there is a use.
    """

    def __getattr__(self, name: str) -> object:
        with _LOADING:
            if "__path__" not in vars(self):
                self._load()
                if name == "__path__":
                    sys.meta_path.insert(0, _LoadedSubmodule(self.__name__))
            elif type(self) is _LazyLibrary:
                raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} while it is being loaded")
        return getattr(self, name)

    def _load(self) -> None:
        spec = self.__spec__
        assert spec is not None, "made of one"
        assert spec.loader is not None, "it was found"
        assert spec.submodule_search_locations is not None, "it is a package"
        self.__path__ = spec.submodule_search_locations
        try:
            spec.loader.exec_module(self)
        except BaseException:
            del self.__path__  # the next use says again what is wrong
            raise
        self.__class__ = ModuleType  # type: ignore[assignment]


class _LoadedSubmodule(Loader):
    """Finds the submodule whose import has loaded its library, if the library has imported it meanwhile.

    After the library, Python would run the submodule in any case: some of torch's cannot be run twice.
    """

    def __init__(self, library: str) -> None:
        self._prefix = f"{library}."

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find it, once: this is asked for the very next import alone."""
        sys.meta_path.remove(self)
        is_loaded = name.startswith(self._prefix) and name in sys.modules
        return ModuleSpec(name, self) if is_loaded else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that is there."""
        module = sys.modules[spec.name]
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing; the module keeps the specification it was loaded by."""
        assert module.__spec__ is not None, "set by the import"
        module.__spec__ = module.__spec__.loader_state
