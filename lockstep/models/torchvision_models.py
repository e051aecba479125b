"""Classifiers of torchvision and of timm by their names, without their weights: those come from files.

Both libraries are optional, and imported only when a net is built. Torchvision's operators may not load, where its
wheel was built for a torch with CUDA and the torch here has none; then torchvision, and timm with it, cannot be
imported, for the one reason that it registers shapes for operators that are not there. So they are declared for it.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch

from lockstep.checks import Checked, Hint, PositiveInt, check_type
from lockstep.errors import InputError
from lockstep.listing import shorten
from lockstep.models.values import InceptionV3
from lockstep.screen import log

if TYPE_CHECKING:
    from torch import nn

_INCEPTION = "inception_v3"

Option = bool | int | float | str
_FROM_FILES = "leave it out, and warm-start from a file of weights"
_GIVEN_ELSEWHERE = {
    "num_classes": "give it as num_classes of the model",
    "in_chans": "leave it out: images have three channels",
    "features_only": "leave it out: a classifier returns logits",
    **dict.fromkeys(("weights", "weights_backbone", "pretrained", "checkpoint_path"), _FROM_FILES),
}
# Where torchvision would warn, or the net return other than logits and at most one auxiliary set of them.
_DEFAULTS: Mapping[str, Mapping[str, Option]] = {
    "googlenet": {"init_weights": True, "aux_logits": False},
    _INCEPTION: {"init_weights": True},
}

_LEAST: Mapping[str, int] = {
    "alexnet": 63,
    "convnext": 32,
    "densenet": 29,
    "googlenet": 15,
    "squeezenet1_0": 21,
    "squeezenet1_1": 17,
    "swin": 4,
    "vgg": 32,
}
"""Images that are smaller leave a layer of these nets nothing, in pixels, by what their names begin with."""

ModelName = Annotated[str, Hint('write name="resnet50"')]


@dataclass(frozen=True)
class Torchvision(Checked):
    """A classifier of torchvision, by the name that `torchvision.models.get_model` knows it by.

    Its weights are torchvision's initial ones, never downloaded ones.
    """

    name: ModelName
    """As in "resnet50"."""
    num_classes: PositiveInt = 1000
    """Number of classes."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """Other arguments of the function of that name: {"dropout": 0.3}."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_options(self, 'write options={"dropout": 0.3}')

    @property
    def image_size(self) -> int:
        """The usual height and width, in pixels."""
        return InceptionV3.image_size if self.name == _INCEPTION else 224

    @property
    def smallest_image(self) -> int:
        """The least height and width, in pixels; the auxiliary head of Inception-v3 wants the usual size."""
        if self.name != _INCEPTION:
            return next((least for begin, least in _LEAST.items() if self.name.startswith(begin)), 1)
        return InceptionV3.image_size if self.options.get("aux_logits", True) else InceptionV3.smallest_image

    @property
    def only_image(self) -> int | None:
        """The one height and width that a transformer takes, in pixels; None for other nets."""
        if not self.name.startswith(("vit_", "maxvit_")):
            return None
        size = self.options.get("image_size", self.image_size)
        return size if isinstance(size, int) else None

    def check_installed(self) -> None:
        """Refuse the model where torchvision is not installed; it is not imported for it."""
        check_library("torchvision")

    def build(self, seed: int) -> nn.Module:
        """Make the net; its initial weights depend on the seed alone, and no random stream of torch's is touched."""
        models = imported("torchvision.models")
        check_known("torchvision", self.name, models.list_models(module=models), models.list_models())
        options = {**_DEFAULTS.get(self.name, {}), **self.options}
        return built(
            self, seed, lambda: models.get_model(self.name, num_classes=self.num_classes, weights=None, **options)
        )


@dataclass(frozen=True)
class Timm(Checked):
    """A classifier of timm, by the name that `timm.create_model` knows it by, without weights."""

    image_size: ClassVar[int] = 224
    smallest_image: ClassVar[int] = 1

    name: ModelName
    """As in "resnet50", or with the tag of some weights, "resnet50.a1_in1k": it loads none of them."""
    num_classes: PositiveInt = 1000
    """Number of classes."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """Other arguments of `create_model`: {"drop_path_rate": 0.1, "img_size": 384}."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_options(self, 'write options={"drop_path_rate": 0.1}')

    @property
    def only_image(self) -> int | None:
        """The height and width that `img_size` says, in pixels, unless another option lets images have others; or None.

        Without it a net may still take one size alone, which is known when it is built: see `size_taken`.
        """
        size = self.options.get("img_size")
        is_free = self.options.get("dynamic_img_size", False) or not self.options.get("strict_img_size", True)
        return size if isinstance(size, int) and not is_free else None

    def check_installed(self) -> None:
        """Refuse the model where timm is not installed; it is not imported for it."""
        check_library("timm")

    def build(self, seed: int) -> nn.Module:
        """Make the net; its initial weights depend on the seed alone, and no random stream of torch's is touched."""
        timm = imported("timm")
        # Names such as hf-hub:... are none of the list: they would fetch what they name.
        check_known("timm", self.name.partition(".")[0], timm.list_models(include_tags=False))
        make = partial(timm.create_model, self.name, pretrained=False, num_classes=self.num_classes, **self.options)
        return built(self, seed, make)


def size_taken(net: nn.Module) -> int | None:
    """Return the one height and width of images that a net takes, in pixels, where its patches say so as timm's do."""
    patches = getattr(net, "patch_embed", None)
    size = getattr(patches, "img_size", None) if getattr(patches, "strict_img_size", False) else None
    return size[0] if size and size[0] == size[1] else None


def _check_options(model: Torchvision | Timm, hint: str) -> None:
    check_type("options", model.options, Mapping, expected="a table", hint=hint)
    for option in _GIVEN_ELSEWHERE.keys() & model.options:
        raise InputError(
            f"options cannot hold {option!r}.",
            given=f"options={dict(model.options)}",
            expected="another option",
            hint=_GIVEN_ELSEWHERE[option],
        )


def check_library(library: str) -> None:
    """Refuse what needs a library that is not installed; it is not imported for it."""
    if find_spec(library) is None:
        raise _not_usable(library, f"{library} is not installed")


def imported(module: str) -> ModuleType:
    """Import a module, or explain why it cannot be, in any way: its library is missing, or made for another torch."""
    library = module.partition(".")[0]
    try:
        try:
            return import_module(module)
        except RuntimeError as error:
            if str(error) not in _MISSING:
                raise
        declare_operators()
        for name in [name for name in sys.modules if name.partition(".")[0] in (library, "torchvision")]:
            del sys.modules[name]  # half imported
        return import_module(module)
    except Exception as error:
        raise _not_usable(library, f"{type(error).__name__}: {error}") from error


_OPERATORS = ("nms", "qnms")
"""Operators that torchvision takes for granted when it is imported; it asks whether it has the others."""
_MISSING = [f"operator torchvision::{name} does not exist" for name in _OPERATORS]


@cache
def declare_operators() -> Any:
    """Declare the operators of torchvision that its import takes for granted, where its own do not load.

    Returns:
        the torch.library.Library that keeps them declared as long as it lives.
    """
    log.warning(
        "torchvision's own operators do not load, as they were not built for torch %s: classifiers need none, and "
        "detectors take Lockstep's non-maximum suppression",
        torch.__version__,
    )
    library: Any = torch.library  # its classes have no types
    declared = library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return declared


def _not_usable(library: str, given: str) -> InputError:
    return InputError(
        f"This model needs {library}, which cannot be imported.",
        given=given,
        expected=f"a {library} that fits torch {torch.__version__}",
        hint=f"pip install 'lockstep-train[{library}]', from where torch was installed",
    )


def check_known(
    library: str, name: str, known: Sequence[str], models: Sequence[str] = (), kind: str = "classifier"
) -> None:
    """Refuse a name that is not known, or is that of another of a library's models."""
    if name in known:
        return
    close = difflib.get_close_matches(name.lower(), known, n=3)
    raise InputError(
        f"The model {name!r} of {library} is no {kind} of images."
        if name in models
        else f"{library} has no {kind} {name!r}.",
        given=f"name={name!r}",
        expected=f"one of its {len(known)} {kind}s: {shorten(known)}",
        hint=f"did you mean {' or '.join(map(repr, close))}?" if close else "give the name of one of these",
    )


def built(value: Any, seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """Make a module on the CPU, and leave the random stream of torch as it was before."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # Not torch.manual_seed, which would also seed the accelerators' streams.
        torch.default_generator.manual_seed(seed)
        try:
            return make()
        except Exception as error:  # of no one kind: each function checks its arguments in its own way
            raise InputError(
                f"{value.name} cannot be made so.",
                given=f"{value}: {error}",
                expected="fields and options that it takes",
                hint="correct them; the documentation of the library names them",
            ) from error
