"""Images in files, in batches as the model of a run is scored on them, but for files that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from lockstep.data.loader import EvaluationBatch, Loader
from lockstep.data.showing import Pipeline, examples
from lockstep.errors import DataError, LockstepError
from lockstep.images.augment import Augment
from lockstep.readers.image_list import ImageList
from lockstep.recipes.recipe import Recipe
from lockstep.types import ProgressFunction

if TYPE_CHECKING:
    import torch

_MOST_NAMED = 3


def batches_of_images(
    recipe: Recipe,
    reader: ImageList,
    augment: Sequence[Augment],
    device: torch.device,
    progress: ProgressFunction | None = None,
) -> Iterator[EvaluationBatch]:
    """Yield the images in batches, whose `bad` names files that could not be read.

    Args:
        recipe: of the run: its loaders, and the size of a batch.
        reader: of the files.
        augment: makes of them what the model is scored on.
        device: of the batches.
        progress: called with the number of files that are done, and of all.

    Raises:
        LockstepError: none of the files can be read.
    """
    feed = recipe.feed
    size = min(recipe.evaluate.micro_batch or recipe.batch_size // (recipe.num_towers or 1), len(reader))
    loader = Loader(
        reader,
        batch_size=size,
        order="sequential",
        augment=augment,
        num_processes=feed.num_processes if len(reader) > size else 0,  # for a single batch none are started
        num_threads=feed.num_threads if len(reader) > size else 0,
        prefetch=feed.prefetch,
        bad_examples="skip",
        bad_budget=len(reader),
        timeout_seconds=recipe.watch.hang_seconds,
    )
    try:
        with closing(loader.evaluation_batches(size, device=device)) as batches:
            for batch in batches:
                yield batch
                if progress:
                    progress(min(batch.position + size, len(reader)), len(reader))
    except DataError as error:
        problems = _problems(reader, augment)
        if not all(problems.values()):
            raise
        raise _nothing_read(len(reader), problems) from error


def _problems(reader: ImageList, augment: Sequence[Augment]) -> dict[str, str]:
    """Say of the first files why they cannot be read; "" of those that can."""
    first = range(min(_MOST_NAMED, len(reader)))
    return {
        shown.example_id: shown.problem
        for shown in examples(reader, first, order="sequential", pipeline=Pipeline(augment))
    }


def _nothing_read(num_files: int, problems: Mapping[str, str]) -> LockstepError:
    return LockstepError(
        f"None of the {num_files} files can be read." if num_files > 1 else "The file cannot be read.",
        given="; ".join(f"{name}: {problem}" for name, problem in problems.items()),
        expected="one image at least that can be decoded",
        hint="check the paths, and the kind of the files",
    )
