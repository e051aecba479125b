"""`tf.train.SequenceExample`: an example whose further features are lists with a feature for each step, as for videos.

The messages, field numbers in brackets; `Features` and `Feature` are those of `tf.train.Example`:

    SequenceExample:    context, Features [1]; FeatureLists [2]
    FeatureLists:       map entry [1] (repeated):   key [1], FeatureList [2]
    FeatureList:        Feature [1] (repeated)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lockstep.records.example import Values, entries_bytes, entries_of, feature_at, feature_bytes, values_of
from lockstep.records.wire import FIRST, SECOND, Buffer, MalformedError, Span, field_bytes, fields_of

_MESSAGE = "tf.train.SequenceExample"


class SequenceExample(NamedTuple):
    """The values of a `tf.train.SequenceExample`: each a list of bytes, or an array of int64 or float32."""

    context: dict[str, Values]
    """Of the whole, by name."""
    feature_lists: dict[str, list[Values]]
    """Of each step in turn, by name; their numbers of steps may differ."""


def parse_sequence_example(data: Buffer, source: str = "The example") -> SequenceExample:
    """The values of every feature, and of every step of every feature list.

    As in `parse_example`; but a step that has no values of any kind is an empty list, for each step has its place.

    Args:
        data: the serialised message.
        source: what to call it in an error.

    Raises:
        DataError: these are not the bytes of a sequence example.
    """
    try:
        entries = dict(entries_of(data, FIRST))  # the last of one name counts
        features = {name: feature_at(data, spans) for name, spans in entries.items()}
        context = {name: values_of(data, feature) for name, feature in features.items() if feature.kind}
        lists = {name: _steps(data, spans) for name, spans in dict(entries_of(data, SECOND)).items()}
        return SequenceExample(context, lists)
    except MalformedError as fault:
        raise fault.of(source, _MESSAGE) from None


def serialize_sequence_example(context: Mapping[str, Values], feature_lists: Mapping[str, Sequence[Values]]) -> bytes:
    """A sequence example of these features: the same bytes for the same features, whatever their order.

    Raises:
        InputError: values that are neither a list of bytes nor a one-dimensional array of int64 or float32.
    """
    of_all = {name: feature_bytes(name, values) for name, values in context.items()}
    of_steps = {
        name: b"".join(field_bytes(1, feature_bytes(name, values)) for values in steps)
        for name, steps in feature_lists.items()
    }
    return entries_bytes(1, of_all) + entries_bytes(2, of_steps)


def _steps(data: Buffer, spans: Sequence[Span]) -> list[Values]:
    steps = []
    for start, stop in spans:
        features = [(first, end) for tag, first, end in fields_of(data, start, stop) if tag == FIRST]
        steps += [values_of(data, feature_at(data, [feature])) for feature in features]
    return steps
