"""What a detector takes of weights that were trained elsewhere: by which name map, below which prefix, and how much."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from lockstep.weights.assignment import select_variables
from lockstep.weights.name_maps import SHIPPED
from lockstep.weights.names import Destination, NameMap, Rename, apply_renames, find_prefixes, swap_prefix
from lockstep.weights.source import WeightSource
from lockstep.weights.warm_start import Takes, WarmStart

LEAST_SHARE = 0.1
"""Of a detector's parameters, that a start from trained weights loads; less is next to nothing."""


def fitted(
    source: WeightSource,
    names: Collection[str],
    takes: Takes,
    mapping: WarmStart,
    *,
    prefixes: Sequence[str],
    name_maps: Iterable[NameMap] = (),
) -> WarmStart:
    """Say how a detector takes what it can of weights: what the file lacks, or has in another shape, stays fresh.

    Args:
        source: the weights.
        names: of the detector's parameters and buffers.
        takes: all of a detector, or the parameters of the backbone alone.
        mapping: what the user asked for. Where it has no names (a map, renames, prefixes), those are taken of the name
            map and the prefixes by which most tensors are found.
        prefixes: the beginnings of the names of the backbone.
        name_maps: that the detector knows beside the shipped ones.
    """
    of_backbone = [f"^{re.escape(prefix)}" for prefix in prefixes]
    include = () if takes == "detector" else of_backbone
    wanted = [name for name in names if not include or any(re.search(pattern, name) for pattern in include)]
    says_names = mapping.name_map or mapping.rename or mapping.strip_prefix or mapping.add_prefix
    return replace(
        mapping if says_names else _with_names(source, wanted, mapping, [*SHIPPED, *name_maps]),
        include=mapping.include or tuple(include),
        ignore_missing=True,
        mismatch="skip",
        require_loaded=LEAST_SHARE if mapping.require_loaded is None else mapping.require_loaded,
    )


def _with_names(
    source: WeightSource, wanted: Collection[str], mapping: WarmStart, name_maps: Iterable[str | NameMap]
) -> WarmStart:
    """Return the mapping with the name map and the prefixes by which most names are found; of equals, the first."""
    variables, _ = select_variables(source, prefer_average=mapping.prefer_average)
    places = {name: [Destination(name)] for name in variables}
    best, most = mapping, -1
    for name_map in (None, *name_maps):
        candidate = replace(mapping, name_map=name_map)
        mapped, unmatched = apply_renames(places, candidate.resolved_map.renames)
        if name_map is not None and len(unmatched) == len(candidate.resolved_map.renames):
            continue
        named = {place.name for each in mapped.values() for place in each}
        strip, add = find_prefixes(named, wanted)
        found = len({swap_prefix(name, strip, add) for name in named}.intersection(wanted))
        if found > most:
            rename = (Rename(f"^{re.escape(strip)}", ""),) if strip else ()
            best, most = replace(candidate, rename=rename, add_prefix=add), found
    return best


def names_in_words(mapping: WarmStart) -> str:
    """Return the name map and the prefixes of a mapping, for the log; "" where names are taken as they are."""
    name_map = mapping.name_map if isinstance(mapping.name_map, str) else "of the detector" if mapping.name_map else ""
    said = {
        "name map": name_map,
        "rename": ", ".join(f"{each.pattern!r} to {each.to!r}" for each in mapping.rename),
        "strip_prefix": mapping.strip_prefix,
        "add_prefix": mapping.add_prefix,
    }
    return ", ".join(f"{what} {how}" for what, how in said.items() if how)
