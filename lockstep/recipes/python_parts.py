"""Parts of a recipe that are code of the user's own: the model, the task, the data, the optimizer and hooks.

Each names a function, and arguments that it gets by name: `{kind = "python", function = "my_net:build", arguments =
{width = 32}}`. What the function has to be, and what it has to return, each part says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

import numpy as np
import torch

from lockstep.checks import Checked, PositiveInt, check_type, wrong_type
from lockstep.errors import DataError, InputError
from lockstep.metrics.metric import Metric, check_metrics
from lockstep.optim.from_torch import Argument, BoundFromTorch, FromTorch, TorchOptimizerByName
from lockstep.optim.schedules import LearningRate
from lockstep.recipes.code import Function
from lockstep.recipes.data import DataOfOneSize, PathData, Split
from lockstep.recipes.parts import CrossEntropy
from lockstep.recipes.tasks import OwnTask

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from lockstep.augmentations.augment import Augment
    from lockstep.readers.reader import Reader
    from lockstep.types import StepReport

Arguments = Mapping[str, Argument]


class _Called(Checked):
    """Base of parts with a function that is called with arguments by name."""

    function: Any
    arguments: Arguments

    @staticmethod
    def named(code: Any) -> tuple[Function, Arguments]:
        """Name a function that a script gives; plain arguments of a partial are those of the part."""
        if isinstance(code, partial) and not code.args and all(map(_is_plain, code.keywords.values())):
            return Function.of(code.func), code.keywords
        return Function.of(code), {}

    def _call(self, *given: Any, function: Function | None = None, arguments: Arguments | None = None) -> Any:
        """Call the function of the part, or another one; arguments that it does not take are an InputError."""
        function = function or self.function
        assert function is not None, "the part has one"
        named = self.arguments if arguments is None else arguments
        called = function.get()
        _check_call(function.full_name, called, given, named)
        return called(*given, **named)


def _check_call(name: str, called: Callable[..., Any], given: Sequence[Any], named: Arguments) -> None:
    """Refuse arguments that a function does not take."""
    try:
        inspect.signature(called).bind(*given, **named)
    except TypeError as error:
        raise InputError(
            f"{name} takes other arguments: {error}.",
            given=", ".join([f"{len(given)} by position"] * bool(given) + [f"{n}={v!r}" for n, v in named.items()])
            or "no arguments",
            expected=f"{name}{inspect.signature(called)}",
            hint="name in arguments what the function takes, and define it with those that it gets by position",
        ) from error
    except ValueError:  # one without a signature says itself what is wrong
        pass


def _is_plain(value: Any) -> bool:
    numbers = isinstance(value, tuple) and all(type(each) in (int, float) for each in value)
    return numbers or type(value) in (bool, int, float, str)


@dataclass(frozen=True)
class PythonModel(_Called):
    """A network of the user's own: what a function, or its class, returns."""

    function: Function
    """`build(**arguments)` returns the module. Its initial weights follow from the recipe's seed: the global random
    streams of torch, numpy and Python are seeded with it, and put back."""
    arguments: Arguments = field(default_factory=dict)
    """What `function` gets by name."""
    num_classes: PositiveInt | None = None
    """Number of classes, for a classifier or detector by a task of Lockstep; the function gets it if it has an argument
    of that name, which is not among `arguments`."""

    smallest_image: ClassVar[int] = 0
    image_size: ClassVar[int] = 0

    def build(self, seed: int) -> nn.Module:
        """Call the function.

        Raises:
            InputError: it cannot be called so, or returns no module.
        """
        from lockstep.workers.random_streams import RandomStreams

        streams = RandomStreams(torch.device("cpu"))
        streams.set_aside()
        try:
            streams.seed(seed)
            made = self._call(arguments={**self._classes(), **self.arguments})
        finally:
            streams.put_back()
        what, hint = f"what {self.function.full_name} returns", "return the network, such as nn.Sequential(...)"
        check_type(what, made, torch.nn.Module, expected="a torch.nn.Module", hint=hint)
        return made  # type: ignore[no-any-return]

    def _classes(self) -> Arguments:
        try:
            takes = "num_classes" in inspect.signature(self.function.get()).parameters
        except ValueError:  # it has none
            takes = False
        return {"num_classes": self.num_classes} if takes and self.num_classes is not None else {}


@dataclass(frozen=True)
class PythonTask(_Called):
    """What a network of the user's own learns: functions, or one that makes an object with methods of these names."""

    function: Function | None = None
    """`make(**arguments)`, often a class, returns an object with the methods `losses`, and as far as it has them
    `score`, `counts`, `metrics` and `predict`, in place of the functions below."""
    arguments: Arguments = field(default_factory=dict)
    """What `function` gets by name."""
    losses: Function | None = None
    """`losses(model, batch)` returns named scalars whose sum is minimised, means over the batch; or a pair of these and
    of metrics to report."""
    score: Function | None = None
    """`score(model, batch)` returns, by name, a number for each example, of shape (batch,), or the inputs of the metric
    of that name; without it nothing is evaluated."""
    counts: Function | None = None
    """`counts(model, batch)` returns of how many things some of the losses, by name, are sums instead of means."""
    metrics: Function | None = None
    """`metrics()` returns metrics by name."""
    predict: Function | None = None
    """`predict(model, batch)` returns tensors by name, whose first dimension is the batch: what `lockstep predict`
    writes down."""
    main_score: str = ""
    """The score that says which checkpoint is the best, where the recipe asks for one and names none."""
    better: Literal["higher", "lower"] | None = None
    """Whether the best has the highest or the lowest `main_score`, which needs it."""

    unused: ClassVar[Mapping[str, Any]] = {"loss": CrossEntropy(), "evaluate.top": (1,), "evaluate.flip": False}
    score_names: ClassVar[None] = None
    """Its scores are known with the first evaluation alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.function is None) == (self.losses is None):
            raise InputError(
                "A task is one function that makes it, or functions for its parts.",
                given="both" if self.function else "neither task.function nor task.losses",
                expected="losses, and what else there is of score, counts, metrics and predict; or function",
                hint="leave task.function out (task.function=none)"
                if self.function
                else 'set task.losses="my_net:losses"',
            )
        if self.function is None and self.arguments:
            raise InputError(
                "Only a function that makes a task has arguments.",
                given=f"arguments={dict(self.arguments)}, and no function",
                expected="no arguments",
                hint="leave task.arguments out, or give default values to the functions",
            )

    def check(self, num_classes: int | None) -> None:
        """Accept any model."""

    def targets(self) -> Sequence[Augment]:
        """Return nothing: what the losses compare with is in the batch."""
        return ()

    def with_metrics(self, classes: Mapping[int, str], metrics: Mapping[str, Metric]) -> OwnTask:
        """Get the functions, and take the metrics of a script, too.

        Raises:
            InputError: one cannot be imported, or the object has no losses.
        """
        if self.function is None:
            parts: Mapping[str, Any] = {name: getattr(self, name) for name in _OF_TASK}
            parts = {name: part and part.get() for name, part in parts.items()}
            named = self.losses.full_name if self.losses else ""
        else:
            made, named = self._call(), self.function.full_name
            parts = {name: getattr(made, name, None) for name in _OF_TASK}
        if not callable(parts["losses"]):
            raise InputError(
                f"{named} makes no task: it has no losses.",
                given=f"a {type(parts['losses']).__name__}" if parts["losses"] else "an object without losses",
                expected="an object with losses(model, batch)",
                hint="write def losses(self, model, batch): return {'loss': ...}",
            )
        for name in ("losses", "score", "counts", "predict"):
            if parts[name] is not None:
                _check_call(f"{name} of {named}", parts[name], ("model", "batch"), {})
        own = parts["metrics"]
        own = (own() if callable(own) else own) or {}
        check_metrics(own)
        check_metrics(metrics, taken=own.keys())
        return OwnTask(parts["losses"], parts["score"], parts["counts"], {**own, **metrics}, parts["predict"])


_OF_TASK = ("losses", "score", "counts", "metrics", "predict")


@dataclass(frozen=True)
class PythonData(DataOfOneSize, _Called):
    """Examples with any fields, from a function of the user's own."""

    function: Function
    """`reader(split, **arguments)` returns the examples of "train", "validation" or "test": a reader, or what one is
    made of (a torch dataset, a dict of arrays); None where there are none."""
    arguments: Arguments = field(default_factory=dict)
    """What `function` gets by name, beside the split."""
    augment: Function | None = None
    """`augment()` returns a list of the augmentations of training batches, in their order; None: there are none."""
    network_input: Function | None = None
    """`network_input(batch)` returns what a classifier of Lockstep, or `lockstep export`, calls the network with; None:
    the field "image" as float32."""
    split: Split = "train"
    """The examples to train on."""

    image_size: ClassVar[int] = 0
    splits: ClassVar[Sequence[str]] = ()
    """The function alone knows."""

    def found_from(self, folder: Path) -> PythonData:
        """Return the same data: the function finds it."""
        return self

    def path_of(self, split: str) -> None:
        """Return None: the examples have no path that is known."""

    def at(self, split: str, path: str) -> NoReturn:
        """Refuse a path."""
        raise DataError(
            "The examples of this run come from a function, not from a path.",
            given=path,
            expected=f"what {self.function.full_name} returns",
            hint="leave the path out, and choose the examples by --split",
        )

    def given(self, split: str) -> Reader | None:
        """Call the function."""
        from lockstep.readers.reader import reader_from

        return reader_from(self._call(split))

    def labelled(self, source: Reader, num_classes: int | None, *, to_train: bool = False) -> Reader:
        """Return the examples as they are."""
        return source

    def training(self) -> Sequence[Augment]:
        """Return the augmentations of training batches, in their order."""
        if self.augment is None:
            return ()
        made = self._call(function=self.augment, arguments={})
        if not isinstance(made, Sequence) or not all(map(callable, made)):
            raise wrong_type(
                f"what {self.augment.full_name} returns",
                made,
                expected="a list of augmentations",
                hint="return [ls.augmentations.HorizontalFlip()]; [] for none",
            )
        return tuple(made)

    def inputs(self, batch: Mapping[str, Any]) -> Tensor:
        """Make the input of the network."""
        if self.network_input is None and "image" not in batch:
            raise InputError(
                "Nothing says what of a batch the network is called with.",
                given=f"a batch with the fields {', '.join(batch)}, and no data.network_input",
                expected='the field "image", or a function of the batch',
                hint='set data.network_input="my_net:inputs", where inputs(batch) returns what the network gets',
            )
        made: Tensor = batch["image"].to(torch.float32) if self.network_input is None else self.network_input(batch)
        return made

    def blank(self, num_examples: int) -> Tensor:
        """Make an input of the network from the first examples, as there is no telling what others look like."""
        from lockstep.data.batch_reader import read_examples
        from lockstep.data.rows import Rows

        reader = self.given("validation") or self.given(self.split)
        assert reader is not None, "the run was trained on it"
        first = np.arange(num_examples)
        return self.inputs(read_examples(reader, Rows(first, first), seed=0))


@dataclass(frozen=True)
class PythonOptimizer(_Called):
    """An optimizer class of torch's kind from a module of the user's own: see `FromTorch`."""

    function: Function
    """The class: a subclass of torch.optim.Optimizer."""
    lr: LearningRate
    """The learning rate: a number, or a schedule of the step."""
    arguments: Arguments = field(default_factory=dict)
    """Arguments of the class, without the parameters and `lr`."""

    def bind(self, parameters: Mapping[str, Tensor]) -> BoundFromTorch:
        """Build the optimizer of these parameters."""
        return FromTorch(self.function.get(), lr=self.lr, **self.arguments).bind(parameters)


@dataclass(frozen=True)
class PythonHook(_Called):
    """A function that is called with the report of each attempt, on every worker."""

    function: Function
    """`hook(report, **arguments)`."""
    arguments: Arguments = field(default_factory=dict)
    """What the function gets by name, beside the report."""

    def get(self) -> Callable[[StepReport], Any]:
        """Return what is called with each report."""
        hook = self.function.get()
        _check_call(self.function.full_name, hook, ("report",), self.arguments)
        return partial(hook, **self.arguments)


def as_model(given: Any, num_classes: int | None) -> Any:
    """Make the model of a recipe of what a script gives: a function or class that makes the network, or such a part.

    Raises:
        InputError: it cannot be called; a network itself would not be made anew for each start.
    """
    if isinstance(given, Checked):
        return given
    expected = "a class, or a function that returns a torch.nn.Module"
    if not callable(given):
        hint = "write model=Net, the class itself, or def build(): return Net(...)"
        raise wrong_type("model", given, expected=expected, hint=hint)
    if isinstance(given, torch.nn.Module):
        name = type(given).__name__
        raise InputError(
            "A run makes its network itself, the same at each start, on each worker.",
            given=f"model=a {name}",
            expected=expected,
            hint=f"write model={name}, or def build(): return {name}(...)",
        )
    return PythonModel(*PythonModel.named(given), num_classes)


def as_task(task: Any, losses: Any, score: Any) -> PythonTask | None:
    """Make the task of a recipe of what a script gives: an object with methods, or functions; None of nothing."""
    if isinstance(task, PythonTask) or (task is losses is score is None):
        return task
    if task is not None and (losses is not None or score is not None):
        raise InputError(
            "A task has its losses and scores.",
            given="task, and losses or score",
            expected="task alone, or functions",
            hint="leave task out, or make losses and score its methods",
        )
    if task is not None:
        said = {name: getattr(task, name) for name in ("main_score", "better") if hasattr(task, name)}
        return PythonTask(*_naming(task), **said)
    for name, given in {"losses": losses, "score": score}.items():
        if given is not None and not callable(given):
            hint = f"write def {name}(model, batch): return {{...}}"
            raise wrong_type(name, given, expected="a function of the model and the batch", hint=hint)
    if losses is None:
        raise InputError(
            "A score of your own needs losses of your own.",
            given="score without losses",
            expected="both, or neither",
            hint="give losses too; more scores of a classifier are metrics: metrics={...}",
        )
    return PythonTask(losses=Function.of(losses), score=None if score is None else Function.of(score))


def _naming(made: Any) -> tuple[Function, Arguments]:
    """Name what makes an object: its class, with the fields of a dataclass, if these are all that it holds."""
    if hasattr(made, "__qualname__") or isinstance(made, partial):
        return PythonTask.named(made)
    own = {each.name: getattr(made, each.name) for each in fields(made)} if is_dataclass(made) else {}
    if own.keys() == getattr(made, "__dict__", {}).keys() and all(map(_is_plain, own.values())):
        return Function.of(type(made)), own
    return replace(Function.of(made), code=lambda: made), {}


def as_data(reader: Any, data: Any, *, has_task: bool) -> Any:
    """Make the data of a recipe of a function that gives its examples.

    Images of classes and of objects keep what the recipe says of them; a task of the script's own takes any fields.
    """
    if isinstance(reader, PythonData):
        return reader
    if not callable(reader):
        raise wrong_type(
            "reader",
            reader,
            expected="a function of the split that returns a reader",
            hint='write def reader(split): return ls.data.ImageFolder(f"photos/{split}")',
        )
    if isinstance(data, PathData):
        return replace(data, function=Function.of(reader))  # type: ignore[type-var]
    if has_task or isinstance(data, PythonData):
        return PythonData(*PythonData.named(reader))
    raise InputError(
        f"A function can give no examples to {type(data).__name__}.",
        given=f"data of {type(data).__name__}, and reader={reader!r}",
        expected="a recipe with ImageData, or losses of your own",
        hint="replace(recipe, data=ls.recipes.ImageData(image_size=224)); or leave reader out",
    )


def as_optimizer(given: Any) -> Any:
    """Make the optimizer of a recipe: one of torch's classes, or of a script's own, is named."""
    if not isinstance(given, FromTorch):
        return given
    arguments = {name: value for name, value in given.arguments.items() if name != "lr"}
    lr = given.lr
    if getattr(torch.optim, given.cls.__name__, None) is given.cls:
        return TorchOptimizerByName(given.cls.__name__, lr, arguments)
    return PythonOptimizer(Function.of(given.cls), lr, arguments)


def as_hook(given: Any) -> PythonHook:
    """Make the hook of a recipe of a function."""
    if isinstance(given, PythonHook):
        return given
    if not callable(given):
        hint = "write def hook(report): print(report.step, report.losses)"
        raise wrong_type("a hook", given, expected="a function of the report of an attempt", hint=hint)
    return PythonHook(*PythonHook.named(given))
