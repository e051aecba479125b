"""Which tensors of a file are moving averages, and of which of its weights: known by the names that trainers give."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from lockstep.errors import InputError
from lockstep.weights.name_maps import AVERAGE, bookkeeping
from lockstep.weights.names import find_prefixes, swap_prefix
from lockstep.weights.source import WeightSource
from lockstep.weights.warm_start import NotLoaded

AVERAGED_PARTS = ("ema", "ema_state_dict", "state_dict_ema", "model_ema", "ema_model", "averaged_model")
"""What training scripts call the averaged model, in a dict that they save or as a module of theirs."""

ITS_AVERAGE_IS_LOADED = "its moving average is loaded"
"""Why a weight is not."""

_BELOW_A_PART = re.compile(rf"(?:(?:module|_orig_mod)\.)*(?:{'|'.join(AVERAGED_PARTS)})\.")
# torch.optim.swa_utils.AveragedModel has this buffer beside its "module".
_COUNT = re.compile(r"(.*\.)?n_averaged")


def select_variables(source: WeightSource, *, prefer_average: bool) -> tuple[dict[str, str], list[NotLoaded]]:
    """The tensor to load for each variable of the file, and the tensors that are none or are not to be loaded.

    Averages that are preferred have the names of the weights that they are averages of, even where a wrapper's prefix
    stands before one of the two.

    Raises:
        InputError: averages are preferred and there are none.
    """
    own = bookkeeping(source.tensors)
    names = [name for name in source.tensors if name not in own]
    ways = _WAYS if prefer_average else (_by_ending,)
    averages = next(filter(None, (find(names) for find in ways)), {})
    if prefer_average and not averages:
        raise InputError(
            f"{source.path} holds no moving averages.",
            given="prefer_average=True",
            expected=f"names that end with {AVERAGE}, names that begin with {', '.join(AVERAGED_PARTS)} and a dot, "
            "or the n_averaged and module of an AveragedModel",
            hint="leave prefer_average out to load the raw weights",
        )
    averaged = {*averages.values()}
    raw = {name: name for name in names if name not in averaged}
    if not prefer_average:
        left = dict.fromkeys(averages.values(), "moving average")
        return raw, [NotLoaded(*each) for each in (own | left).items()]
    left = {tensor: "count of averaged models" for name, tensor in averages.items() if _COUNT.fullmatch(name)}
    strip, add = find_prefixes(averages, raw)
    averages = {swap_prefix(name, strip, add): tensor for name, tensor in averages.items() if tensor not in left}
    left |= {name: ITS_AVERAGE_IS_LOADED for name in raw if name in averages}
    return raw | averages, [NotLoaded(*each) for each in (own | left).items()]


def _by_ending(names: Sequence[str]) -> dict[str, str]:
    """The averages of TensorFlow and of our own runs, by the names of their weights."""
    return {name.removesuffix(AVERAGE): name for name in names if name.endswith(AVERAGE)}


def _by_part(names: Sequence[str]) -> dict[str, str]:
    """The tensors of a module that is called as an average is, by their names in it."""
    parts = {name: _BELOW_A_PART.match(name) for name in names}
    return {name[part.end() :]: name for name, part in parts.items() if part}


def _by_count(names: Sequence[str]) -> dict[str, str]:
    """The tensors of the AveragedModels of torch, by their names in the model that each averages."""
    averages = {}
    for wrapper in [name.removesuffix("n_averaged") for name in names if _COUNT.fullmatch(name)]:
        for name in names:
            if name.startswith(f"{wrapper}module."):
                averages[wrapper + name.removeprefix(f"{wrapper}module.")] = name
            elif name == f"{wrapper}n_averaged":
                averages[name] = name
    return averages


_WAYS: tuple[Callable[[Sequence[str]], dict[str, str]], ...] = (_by_ending, _by_part, _by_count)
"""How averages are told from other tensors; the first way that finds any counts."""
