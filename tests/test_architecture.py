"""The shape of the house: imports point down, modules and functions stay small."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lockstep"
LAYERS = {
    0: {""},
    1: {"workers", "storage", "images", "losses", "metrics", "optim"},
    2: {"records", "launcher", "exchange"},
    3: {"augmentations", "readers", "models", "checkpoints", "weights", "reporting"},
    4: {"data", "convert", "detection", "loggers", "served", "towers"},
    5: {"training", "evaluation"},
    6: {"recipes"},
    7: {"runs", "chaos", "doctor"},
    8: {"planning", "report"},
    9: {"cli"},
}
LAYER_OF = {package: layer for layer, packages in LAYERS.items() for package in packages}
# Evaluation is handed a TrainState: the one arrow between packages of a layer.
ALLOWED = {("evaluation", "training")}
# The two doors: they name everything, and are imported by nobody (but for the version).
DOORS = {"__init__.py", "__main__.py"}
MAX_MODULE_LINES, MAX_FUNCTION_LINES = 600, 45
TESTS = Path(__file__).parent
# Tests of several modules at once, by what they are about.
TOPICS = {
    "": {
        "architecture",
        "coming_from",
        "coming_from_rows",
        "coverage_table",
        "deploy",
        "device_calls",
        "document_commands",
        "documents",
        "naming",
        "notebooks",
        "packaging",
        "public_names",
        "site_pages",
        "suite",
        "systems",
        "tutorials",
    },
    "cli": {"commands", "first_commands", "names_on_screen", "photo_commands", "staged_run"},
    "models": {"backbones"},
    "training": {"wrong_arguments"},
}


@cache
def trees() -> dict[Path, ast.Module]:
    """Of all modules: parsed when a test asks for them, once."""
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def package_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def imported_packages(tree: ast.Module) -> set[str]:
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    inside = [name.split(".") for name in names if name.startswith("lockstep.")]
    return {parts[1] if (PACKAGE / parts[1]).is_dir() else "" for parts in inside}


def test_imports_point_down() -> None:
    for path, tree in trees().items():
        here = package_of(path)
        if not here and path.name in DOORS:
            continue
        for other in imported_packages(tree) - {here}:
            assert LAYER_OF[other] < LAYER_OF[here] or (here, other) in ALLOWED, f"{path} imports lockstep.{other}"


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(tree: ast.Module, modules: set[str]) -> set[str]:
    """Modules of Lockstep that a module imports, also within functions and for types alone."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {name if (name := f"{node.module}.{a.name}") in modules else node.module for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules


def test_no_modules_import_each_other() -> None:
    """The one exception are the doors, whose names are imported when they are asked for."""
    names = {module_name(path) for path in trees()}
    graph = {module_name(path): imported_modules(tree, names) for path, tree in trees().items()}
    inside = {name: imported for name, imported in graph.items() if name != "lockstep"}
    assert [name for name, imported in inside.items() if "lockstep" in imported] == [], "they import the front door"
    assert len([*TopologicalSorter(inside).static_order()]) == len(inside)  # raises CycleError, which names the circle


def fields_of_state() -> set[str]:
    tree = trees()[PACKAGE / "training" / "state.py"]
    [state] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainState"]
    named = {node.id for node in ast.walk(state) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return named | {target.attr for target in changed_attributes(state) if ast.unparse(target.value) == "self"}


def changed_attributes(tree: ast.AST) -> list[ast.Attribute]:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return [node for node in found if isinstance(node.ctx, ast.Store | ast.Del)]


def test_only_the_state_changes_its_fields() -> None:
    """Two of them are settings, which scripts may change, too; what others call `state` has other fields."""
    fields = fields_of_state() - {"compare_steps", "replay_steps"}
    assert {"step", "is_settled", "trained_with", "num_skipped", "loss_scale", "smoothed"} <= fields
    for path, tree in trees().items():
        if path.relative_to(PACKAGE).as_posix() == "training/state.py":
            continue
        changed = [ast.unparse(each) for each in changed_attributes(tree) if each.attr in fields]
        assert [name for name in changed if name.split(".")[-2].endswith("state")] == [], path


def test_every_package_has_a_layer() -> None:
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert packages | {""} == set(LAYER_OF)


def test_test_files_are_named_after_modules() -> None:
    """For `training/step.py`: `test_step.py`, `test_step_buffers.py`, or `test_training_step.py` where names meet."""

    def has_module(package: str, name: str) -> bool:
        modules = {path.stem for path in (PACKAGE / package).glob("*.py")}
        words = name.removeprefix(f"{package}_").split("_"), name.split("_")
        return any("_".join(some[:end]) in modules for some in words for end in range(1, len(some) + 1))

    for package in LAYER_OF:
        files = {path.stem.removeprefix("test_") for path in (TESTS / package).glob("test_*.py")}
        assert {name for name in files if not has_module(package, name)} == TOPICS.get(package, set()), package


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports each by its name alone."""
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert len(set(names)) == len(names)


def test_two_levels_never_three() -> None:
    assert all(len(path.relative_to(PACKAGE).parts) <= 2 for path in trees())


def num_lines(function: ast.FunctionDef) -> int:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_modules_and_functions_are_small() -> None:
    for path, tree in trees().items():
        assert path.read_text().count("\n") <= MAX_MODULE_LINES, path
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        assert [each.name for each in functions if num_lines(each) > MAX_FUNCTION_LINES] == [], path


def test_only_one_module_names_an_accelerator() -> None:
    naming = {
        path.relative_to(PACKAGE).as_posix()
        for path, tree in trees().items()
        if any(isinstance(node, ast.Constant) and node.value == "cuda" for node in ast.walk(tree))
    }
    assert naming <= {"workers/devices.py", "optim/rules.py"}


def loads_weights_only(call: ast.Call) -> bool:
    """Whether a call of torch.load is one that calls nothing that a file names."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    only = given.get("weights_only")
    return isinstance(only, ast.Constant) and only.value is True and {"pickle_module", None}.isdisjoint(given)


def calls_that_run_code(tree: ast.Module, *, may_load_weights: bool = False) -> set[str]:
    forbidden = {"eval", "exec", "pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "os.system"}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = [call for call in calls if not call.args or not all(isinstance(each, ast.Constant) for each in call.args)]
    return forbidden & {
        name
        for call in calls
        if not ((name := ast.unparse(call.func)) == "torch.load" and may_load_weights and loads_weights_only(call))
    }


def test_nothing_read_from_a_file_can_run_code() -> None:
    for path, tree in trees().items():
        may_load_weights = path.relative_to(PACKAGE).as_posix() == "weights/torch_file.py"
        assert not calls_that_run_code(tree, may_load_weights=may_load_weights), path


@pytest.mark.parametrize(
    ("call", "is_allowed"),
    [
        ("torch.load(path, weights_only=True)", True),
        ("torch.load(path, mmap=True, weights_only=True)", True),
        ("torch.load(path)", False),
        ("torch.load(path, weights_only=False)", False),
        ("torch.load(path, weights_only=safe)", False),
        ("torch.load(path, weights_only=True, pickle_module=dill)", False),
        ("torch.load(path, weights_only=True, **more)", False),
        ("pickle.load(file)", False),
    ],
)
def test_torch_loads_weights_alone(call: str, is_allowed: bool) -> None:
    assert bool(calls_that_run_code(ast.parse(call), may_load_weights=True)) != is_allowed
    assert calls_that_run_code(ast.parse(call))
