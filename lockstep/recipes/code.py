"""Code of the user's own in a recipe: a function or class by its name, which is imported only where it may be.

A recipe names it as `my_net:build`: what my_net.py calls `build`. A saved recipe also says in which file it was, and
the fingerprint of its source: of its syntax, and of all that it names in its file and in the files beside it. So a run
that goes on by other code says so, and comments and line breaks do not matter.

To read, compare or print a recipe imports nothing. `with_code` alone lets what a recipe names be called, and only those
call it who know that the user wants it: where the user gives the recipe, or a run that is the user's own.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
import re
import symtable
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Self, TypeVar

from lockstep.description import described
from lockstep.errors import InputError, NotFoundError
from lockstep.listing import did_you_mean

_T = TypeVar("_T")

MAIN = "__main__"
"""The module of a script that Python was started with."""
_TEXT = re.compile(r"(?P<name>.+?)(?: in (?P<file>.+?))?(?:, source (?P<source>[0-9a-f]+))?")
_WORD = r"[^\W\d]\w*"
_NAME = re.compile(rf"{_WORD}(\.{_WORD})*:{_WORD}(\.{_WORD})*")
_SPOKEN = re.compile(rf"{_WORD}(\.{_WORD})*:({_WORD}|<\w+>)(\.({_WORD}|<\w+>))*(\(\.\.\.\))?")
"""A name, or that of what no name leads to: a lambda, a function within another one, an object."""
_NUM_DIGITS = 16


@dataclass(frozen=True)
class Function:
    """A function or class of the user's own, by name."""

    module: str = field(compare=False)
    """Empty in recipes of before, which named no module."""
    name: str
    """Its name in the module."""
    file: str = field(default="", compare=False)
    """The file that defines it; empty where it is not known, or part of an installed package."""
    source: str = ""
    """Fingerprint of its source; empty where that is not known, or part of an installed package."""
    code: Any = field(default=None, compare=False, repr=False)
    """What a script has given; None where it is imported by its name."""
    may_be_imported: bool = field(default=False, compare=False, repr=False)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `my_net:build`, or the text that `str` makes, which also names file and source."""
        found = _TEXT.fullmatch(text)
        name, file, source = found.group("name", "file", "source") if found else ("", "", "")
        if not name or "\n" in text or not (_SPOKEN.fullmatch(name) or file or ":" not in text):
            raise InputError(
                f"{text!r} names no function.",
                given=text,
                expected='a module and a name in it, such as "my_net:build" for build in my_net.py',
                hint="name the module without .py, and the function after a colon",
            )
        module, _, name = name.rpartition(":")
        return cls(module, name, file or "", source or "")

    @classmethod
    def of(cls, code: Any) -> Self:
        """Name what a script gives: a function, a class, or an object of a class of its own."""
        inner = code.func if isinstance(code, partial) else code
        named = inner if hasattr(inner, "__qualname__") else type(inner)
        name, source, held = _name_of(named), _source_of(named), _held_by(code)
        if held is not None:
            sources = [_source_of(each) for each in held if hasattr(each, "__qualname__")]
            source = _hash([source, *sources, json.dumps(described(held), sort_keys=True)])
            name += "" if "<" in name else "(...)"
        return cls(getattr(named, "__module__", None) or "builtins", name, str(_file_of(named) or ""), source, code)

    def get(self) -> Any:
        """Return the function or class itself.

        Raises:
            InputError: it may not be imported, or cannot be.
        """
        if self.code is not None:
            return self.code
        self.check()
        return _imported(self.module, self.name, self.root)

    def check(self) -> None:
        """Refuse a function that could not be called; nothing is imported for it."""
        if self.code is None and not self.may_be_imported:
            raise self._not_there()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call it; raises what `get` and it raise."""
        return self.get()(*arguments, **named)

    def found_in(self, folders: Sequence[Path]) -> Function:
        """Find it in the first of the folders that has its module, and let it be called.

        Raises:
            InputError: no module of this name is there, or nothing of its name is in it.
        """
        module, name = self.module, self.name
        if self.code is not None or not self.is_in_module:
            return self
        file = next(filter(None, (_module_file(folder, module) for folder in folders)), None)
        if file is None:
            if not _is_package(module.partition(".")[0]):
                raise NotFoundError(
                    f"There is no module {module}.",
                    given=self.full_name,
                    expected=f"{module.replace('.', '/')}.py in {' or '.join(map(str, folders))}, "
                    "or an installed package",
                    hint="put the file there, or correct the name",
                )
            return replace(self, file="", source="", may_be_imported=True)
        source = fingerprint(file, name, _root(module, file))
        if not source:
            known = _Source.of(file).names
            raise NotFoundError(
                f"There is no {name} in {file}.",
                given=self.full_name,
                expected=f"one of {', '.join(known)}" if known else "a function of this name",
                hint=did_you_mean(name, known) or "define it there, or correct the name",
            )
        return replace(self, file=str(file), source=source, may_be_imported=True)

    @property
    def root(self) -> Path | None:
        """The folder in which its module was found; None where that is not known."""
        return _root(self.module, Path(self.file)) if self.file else None

    @property
    def full_name(self) -> str:
        """Module and name: `my_net:build`."""
        return f"{self.module}:{self.name}" if self.module else self.name

    @property
    def is_in_module(self) -> bool:
        """Whether its name leads to it: not where it is of a script that was run, or of another function."""
        return self.module != MAIN and _NAME.fullmatch(self.full_name) is not None

    def _not_there(self) -> InputError:
        if not self.is_in_module:
            script = Path(self.file).name or "SCRIPT"
            return InputError(
                f"{self.name} is a part of the script of this run, which alone can call it.",
                given=str(self),
                expected="that script, or a function of a module",
                hint=f"run the script again: lockstep run {script}; or move {self.name} into a module, and import it; "
                "of what gives images alone, name others: lockstep evaluate RUN --data PATH",
            )
        return InputError(
            f"{self.full_name} is not called: others may have written the run that names it.",
            given=str(self),
            expected="a run that is yours, and that nobody else may write",
            hint="look at its recipe.toml, and add --allow-code (in Python allow_code=True) if you trust it",
        )

    def __str__(self) -> str:
        file = f" in {self.file}" if self.file else ""
        return f"{self.full_name}{file}" + (f", source {self.source}" if self.source else "")


def functions_of(value: Any) -> Iterator[Function]:
    """Yield all functions that a recipe, or a part of one, names."""
    if isinstance(value, Function):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from functions_of(getattr(value, each.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from functions_of(item)


def with_code(recipe: _T, folder: Path | None = None) -> _T:
    """Find what a recipe names, and let it be called.

    It is looked for in `folder`, where the recipe says that it was, in the current folder and in installed packages.

    The caller vouches for the recipe: the user has given it, or it is of a run that nobody else may write.

    Raises:
        InputError: something is not there; a file cannot be read as Python.
    """
    return _found(recipe, folder)  # type: ignore[no-any-return]


def _found(value: Any, folder: Path | None) -> Any:
    if isinstance(value, Function):
        places = (folder and folder.absolute(), value.root, Path.cwd())
        return value.found_in([*dict.fromkeys(place for place in places if place)])
    if isinstance(value, tuple):
        return tuple(_found(item, folder) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        given = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
        changed = {name: _found(inner, folder) for name, inner in given.items() if next(functions_of(inner), None)}
        return replace(value, **changed) if changed else value
    return value


@cache
def _imported(module_name: str, name: str, root: Path | None) -> Any:
    """Import a module, and return what it calls so; `root` is the folder to look in."""
    if root is not None and str(root) not in sys.path:
        sys.path.insert(0, str(root))  # for good: loader processes look there, too
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:
        raise InputError(
            f"The module {module_name} cannot be imported.",
            given=f"{type(error).__name__}: {error}",
            expected=f"a module with {name}",
            hint=f'see where it fails: python -c "import {module_name}"' + (f", in {root}" if root else ""),
        ) from error
    file = Path(module.__file__ or "") if getattr(module, "__file__", None) else None
    if root is not None and (file is None or not file.is_relative_to(root)):
        raise InputError(
            f"Another module is called {module_name}, and was imported before.",
            given=f"{file or 'a built-in module'}",
            expected=f"the one in {root}",
            hint="give your file another name",
        )
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise InputError(
            f"{module_name}:{name} is no function.",
            given="nothing of this name" if found is None else f"a {type(found).__name__}",
            expected="a function or a class",
            hint=f"define it in {module_name}",
        )
    return found


# Where code is, and what it says ------------------------------------------------------------------------------------


def _name_of(named: Any) -> str:
    """Return the name by which its module knows it; a lambda, or what a function has made, may have been given one."""
    name = str(named.__qualname__)
    known = vars(sys.modules[named.__module__]) if "<" in name and named.__module__ in sys.modules else {}
    return next((each for each, value in known.items() if value is named), name)


def _held_by(code: Any) -> list[Any] | None:
    """Return what belongs to code beside its source; None where a name leads to all of it.

    It is the arguments of a partial, the fields of an object, or the functions among the variables and default values
    of a function within another one. Its other variables may differ between workers, as their ranks do.
    """
    if isinstance(code, partial):
        return [*code.args, *_items(code.keywords), *(_held_by(code.func) or ())]
    if not hasattr(code, "__qualname__"):
        return [code, *_items(getattr(code, "__dict__", {}))]
    owner = getattr(code, "__self__", None)
    if owner is not None and not isinstance(owner, type | ModuleType):  # a method of an object
        return _held_by(owner)
    if "<" not in _name_of(code) or not inspect.isfunction(code):
        return None
    variables = [_content(cell) for cell in code.__closure__ or ()]
    held = [*variables, *(code.__defaults__ or ()), *_items(code.__kwdefaults__ or {})]
    return [each for each in held if hasattr(each, "__qualname__")]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # what it is for is yet to be defined
        return None


def _items(values: Mapping[str, Any]) -> list[Any]:
    return [item for name in sorted(values) for item in (name, values[name])]


def _source_of(named: Any) -> str:
    """Return the fingerprint of a function or class; "" where it is installed, or its file is not known."""
    file, name = _file_of(named), _name_of(named)
    if file is None or _is_installed(file):
        return ""
    code = getattr(inspect.unwrap(named), "__code__", None) if "<" in name else None
    return fingerprint(file, name, _root(named.__module__, file), code and code.co_firstlineno)


def _file_of(named: Any) -> Path | None:
    named = inspect.unwrap(named)  # what a decorator has made of a function is in the file of the decorator
    try:
        file = inspect.getsourcefile(named)
    except TypeError:  # built in, or of a module that is gone, such as that of a script that was run by its path
        methods = (vars(named) if isinstance(named, type) else {}).values()
        file = next((each.__code__.co_filename for each in methods if inspect.isfunction(each)), None)
    return Path(file).absolute() if file and Path(file).is_file() else None


def _root(module: str, file: Path | None) -> Path | None:
    """Return the folder from which a module of this name is imported out of this file."""
    if file is None:
        return None
    depth = 0 if module == MAIN else module.count(".") + (file.name == "__init__.py")
    return file.parents[min(depth, len(file.parents) - 1)]


def _module_file(root: Path, module: str) -> Path | None:
    path = root.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _is_package(name: str) -> bool:
    try:
        return name in sys.builtin_module_names or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _is_installed(file: Path) -> bool:
    """Whether a file is part of Python or of an installed package, which has a version of its own."""
    names = {each for each in ("site-packages", "dist-packages") if each in file.parts}
    return bool(names) or file.is_relative_to(sysconfig.get_path("stdlib"))


class _Import(NamedTuple):
    """What an import makes known: a module, or a name in one."""

    module: str
    name: str | None
    level: int


@dataclass(frozen=True)
class _Source:
    """What a file of Python defines and imports at its top level, by name."""

    names: Mapping[str, Sequence[ast.stmt]]
    imports: Mapping[str, Sequence[_Import]]
    stars: Sequence[_Import]
    functions: Mapping[int, Sequence[ast.AST]]
    """All functions and lambdas, by the line in which they begin."""

    @classmethod
    def of(cls, file: Path) -> _Source:
        """Parse a file; nothing of it runs."""
        return _parsed(file, file.stat().st_mtime_ns)


@cache
def _parsed(file: Path, _: int) -> _Source:
    try:
        tree = ast.parse(file.read_bytes(), file.name)
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise InputError(
            f"{file} cannot be read as Python.", given=error, expected="a module", hint="correct the file"
        ) from error
    for each in ast.walk(tree):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(each):
            each.body[0] = ast.Pass()
    names: dict[str, list[ast.stmt]] = {}
    imports: dict[str, list[_Import]] = {}
    stars: list[_Import] = []
    for statement in _top_level(tree.body):
        if isinstance(statement, ast.ImportFrom):
            for each in statement.names:
                found = _Import(statement.module or "", each.name, statement.level)
                if each.name == "*":
                    stars.append(found)
                else:
                    imports.setdefault(each.asname or each.name, []).append(found)
        elif isinstance(statement, ast.Import):
            for each in statement.names:
                known_as = each.asname or each.name.partition(".")[0]
                imports.setdefault(known_as, []).append(_Import(each.name, None, 0))
        else:
            for name in _defined(statement):
                if name not in imports or not isinstance(statement, ast.Expr):  # ls.run(...) changes nothing in ls
                    names.setdefault(name, []).append(statement)
    return _Source(names, imports, stars, _functions(tree))


def _functions(tree: ast.Module) -> dict[int, list[ast.AST]]:
    found: dict[int, list[ast.AST]] = {}
    for each in ast.walk(tree):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            found.setdefault(min(part.lineno for part in (each, *getattr(each, "decorator_list", ()))), []).append(each)
    return found


def _top_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.If | ast.Try | ast.With):
            inner = (*statement.body, *getattr(statement, "orelse", ()), *getattr(statement, "finalbody", ()))
            handled = [each for handler in getattr(statement, "handlers", ()) for each in handler.body]
            yield from _top_level([*inner, *handled])
        else:
            yield statement


def _defined(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
    elif isinstance(statement, ast.For | ast.While):
        yield from (name for inner in statement.body for name in _defined(inner))
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):  # settings.update(...)
        called = statement.value.func
        while isinstance(called, ast.Attribute):
            called = called.value
            if isinstance(called, ast.Name):
                yield called.id


def fingerprint(file: Path, name: str, root: Path | None, line: int | None = None) -> str:
    """Hash the syntax of a definition, and of all that it names in its file, and in files below `root`.

    Returns:
        16 hexadecimal digits, of the functions that begin in the `line` if there is one; "" where the file defines
        nothing of this name.
    """
    source, first = _Source.of(file), name.partition(".")[0]
    if first not in source.names and first not in source.imports and not source.stars and line is None:
        return ""
    found: dict[tuple[Path, str], str] = {}
    left = [(file, first)]
    while left:
        here, wanted = left.pop()
        if (here, wanted) in found:
            continue
        source = _Source.of(here)
        statements: Sequence[ast.AST] = source.names.get(wanted, [])
        if (here, wanted) == (file, first):
            statements = source.functions.get(line or 0, statements)
        found[here, wanted] = "\n".join(map(ast.unparse, statements))
        used = {each for part in statements for each in _used(part)} - {wanted}
        left += [(here, each) for each in used if each in source.names]
        if not statements:
            used.add(wanted)  # which comes from elsewhere
        imported = [given for each in {*used, wanted} for given in source.imports.get(each, ())]
        left += [place for given in (*imported, *source.stars) for place in _places(given, here, root, used)]
    return _hash(sorted({f"{defined} {text}" for (_, defined), text in found.items() if text}))


def _used(part: ast.AST) -> Iterator[str]:
    """Yield the names that a part of a module looks up there: not those of its arguments and variables."""
    try:
        tables = [symtable.symtable(ast.unparse(part), "", "exec")]
    except SyntaxError:  # nonlocal, in a function within another one
        yield from (each.id for each in ast.walk(part) if isinstance(each, ast.Name))
        return
    while tables:
        table = tables.pop()
        is_outer = table.get_type() == "module"
        yield from (each.get_name() for each in table.get_symbols() if is_outer or each.is_global())
        tables += table.get_children()


def _places(given: _Import, here: Path, root: Path | None, used: set[str]) -> Iterator[tuple[Path, str]]:
    """Yield what an import leads to: definitions in files below `root`; installed packages are left aside."""
    above = here.parents[given.level - 1] if given.level else root
    if above is None:
        return
    if given.name not in (None, "*"):
        module = f"{given.module}.{given.name}".lstrip(".")
        inner = _module_file(above, module)
        if inner is None and given.module and (file := _module_file(above, given.module)):
            yield file, str(given.name)
    else:
        inner = _module_file(above, given.module)
    if inner is not None:
        yield from ((inner, each) for each in _Source.of(inner).names if given.name != "*" or each in used)


def _hash(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_NUM_DIGITS]
