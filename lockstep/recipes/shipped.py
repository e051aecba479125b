"""The recipes that come with Lockstep, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from lockstep.errors import RecipeError
from lockstep.models import LeNet, Mnist
from lockstep.optim import SGD, Cosine
from lockstep.parallel.towers import Towers
from lockstep.progress import Epochs, Steps
from lockstep.recipes import inception, squeezenet
from lockstep.recipes.data import MnistData
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.toml import load
from lockstep.recipes.wording import suggestion


def recipe(name: str) -> Recipe:
    """A shipped recipe, or the one in a file whose name ends in .toml.

    Raises:
        RecipeError: there is no such recipe, or the file describes none.
    """
    if name.endswith(".toml"):
        return load(Path(name))
    if name not in _SHIPPED:
        raise RecipeError(
            f"{name}: there is no such recipe.",
            given=name,
            expected=f"{', '.join(names())}, or a file that ends in .toml",
            hint=suggestion(name, names()) or "give one of these",
        )
    return _SHIPPED[name]()


def names() -> list[str]:
    """The shipped recipes."""
    return list(_SHIPPED)


def mnist() -> Recipe:
    """The reference convnet on MNIST, to 99 %: cosine from 0.05 over 4 epochs, Nesterov momentum 0.9."""
    epochs = Epochs(4)
    return Recipe(
        name="mnist",
        model=Mnist(),
        data=MnistData(),
        optimizer=SGD(Cosine(0.05, epochs), momentum=0.9, nesterov=True),
        batch_size=128,
        towers=Towers(channels_last=True),
        end=epochs,
    )


def mnist_reference() -> Recipe:
    """The same net as the reference trained it: a constant rate of 0.1, for 10 epochs.

    At this rate the net is fragile: one seed in a few dies at once and stays at 10 %, since the last hidden layer has
    ten ReLU units, and when all of them are off no gradient comes back. Use `mnist` to get a good model.
    """
    optimizer = SGD(0.1, momentum=0.9, nesterov=True)
    return replace(mnist(), name="mnist_reference", optimizer=optimizer, end=Epochs(10))


def lenet() -> Recipe:
    """Slim's LeNet on MNIST, as its script trains it: 20,000 steps of 50 images at a constant rate of 0.01."""
    return Recipe(
        name="lenet",
        model=LeNet(),
        data=MnistData(scale="one"),
        optimizer=SGD(0.01),
        batch_size=50,
        towers=Towers(channels_last=True),
        end=Steps(20_000),
    )


_SHIPPED: Mapping[str, Callable[[], Recipe]] = {
    "mnist": mnist,
    "mnist_reference": mnist_reference,
    "lenet": lenet,
    "inception_v3": inception.inception_v3,
    "inception_v3_distributed": inception.inception_v3_distributed,
    "flowers": inception.flowers,
    "flowers_two_stages": inception.flowers_two_stages,
    "flowers_small": squeezenet.flowers_small,
}
