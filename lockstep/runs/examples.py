"""The loaders of a recipe: of the examples that it trains on, and of those that are scored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.data.loader import Loader
from lockstep.errors import DataError
from lockstep.listing import shorten
from lockstep.readers.combine import Subset
from lockstep.readers.reader import Reader, reader_of
from lockstep.recipes.data import ImageData
from lockstep.recipes.recipe import Recipe

SCORED = ("validation", "test")

ReaderFunction = Callable[[str], Reader | None]
"""`reader(split)` gives the examples of "train", "validation" or "test", with the fields "image" and "label"; None,
where there are none."""


class Examples:
    """The examples of a run, split by split; what they come from is opened once.

    Args:
        recipe: whose data it is.
        function: gives the examples in place of the recipe's paths.
    """

    def __init__(self, recipe: Recipe, function: ReaderFunction | None = None) -> None:
        self._recipe, self._function = recipe, function
        self._readers: dict[tuple[str, bool], Reader] = {}

    def prepare(self) -> None:
        """Have on the disk what the readers need; the chief alone calls it."""
        self._recipe.data.prepare()

    def training(self) -> Loader:
        """Those to train on, in their order, augmented."""
        data = self._recipe.data
        reader = self.reader(data.split, to_train=True)
        return self._loader(reader, order=self._recipe.feed.order, augment=data.training())

    def held_out(self, split: str) -> Loader:
        """Those of a split to score, one after another, not augmented; the data must be prepared.

        Raises:
            DataError: there are fewer than are to be scored.
        """
        reader, wanted = self.reader(split), self._recipe.evaluate.examples
        if wanted is not None:
            reader = Subset(reader, slice(_checked(wanted, len(reader), split)))
        return self._loader(reader, order="sequential", augment=self._recipe.data.evaluation())

    def check_held_out(self) -> None:
        """Open all that is to be scored: better refused now than after the first epoch, or the last.

        Raises:
            DataError: it cannot be read, there are fewer examples than are to be scored, or their classes have other
                numbers than those that are trained on.
        """
        for split in SCORED:
            if self.has(split):
                self.held_out(split)
                self._check_classes(split)

    def counts(self) -> dict[str, int]:
        """How many there are to train on, and of each split that is scored."""
        counts = {"to train on": len(self.reader(self._recipe.data.split, to_train=True))}
        return counts | {split: len(self.reader(split)) for split in SCORED if self.has(split)}

    def _check_classes(self, split: str) -> None:
        """Refuse a folder that numbers its classes in its own way: one of those to train on is missing in it."""
        trained = getattr(self.reader(self._recipe.data.split, to_train=True), "classes", ())
        scored = getattr(self.reader(split), "classes", ())
        for label, (theirs, ours) in enumerate(zip(scored, trained, strict=False)):
            if theirs != ours:
                raise DataError(
                    f"The classes of the {split} examples have other numbers than those to train on.",
                    given=f"class {label} is {theirs!r}, and {ours!r} to train on",
                    expected=f"the same folders for both: {shorten(trained)}",
                    hint="have a folder with at least one image for each class in both",
                )

    def reader(self, split: str, *, to_train: bool = False) -> Reader:
        """The reader of a split, to score it, or to train on it with all that its augmentations need."""
        key = (split, to_train)
        if key not in self._readers:
            self._readers[key] = self._opened(split, to_train)
        return self._readers[key]

    def _opened(self, split: str, to_train: bool) -> Reader:
        data, num_classes = self._recipe.data, self._recipe.model.num_classes
        if self._function is not None and isinstance(data, ImageData):
            given = self._function(split)
            if given is None:
                raise _not_given(split)
            return data.labelled(reader_of(given), num_classes, to_train=to_train)
        return data.reader(split, num_classes, to_train=to_train)

    def has(self, split: str) -> bool:
        """Whether there are examples of a split, as far as is known before they are read."""
        if self._function is not None:
            return self._function(split) is not None
        return split in self._recipe.data.splits

    def _loader(self, reader: Reader, **more: Any) -> Loader:
        feed = self._recipe.feed
        return Loader(
            reader,
            batch_size=self._recipe.batch_size,
            seed=self._recipe.seed,
            num_processes=feed.num_processes,
            num_threads=feed.num_threads,
            prefetch=feed.prefetch,
            bad_examples=feed.bad_examples,
            bad_budget=feed.bad_budget,
            timeout_seconds=self._recipe.watch.hang_seconds,
            **more,
        )


def _not_given(split: str) -> DataError:
    return DataError(
        f"The function of this run gives no {split} examples.",
        given=f"reader({split!r}) is None",
        expected="a reader",
        hint=f"return a reader for {split!r}",
    )


def _checked(wanted: int, there: int, split: str) -> int:
    if wanted > there:
        raise DataError(
            f"There are fewer {split} examples than are to be scored.",
            given=f"{there} examples, {wanted} asked for",
            expected=f"at most {there}",
            hint=f"set evaluate.examples to {there} or less, or leave it out to score all of them",
        )
    return wanted
