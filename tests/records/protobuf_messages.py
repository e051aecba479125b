"""`tf.train.Example` and `tf.train.SequenceExample` as the protobuf library reads and writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_KINDS = descriptor_pb2.FieldDescriptorProto


def _file() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, int, str, bool]) -> Any:
        added = file.message_type.add(name=name)
        for field, number, kind, type_name, repeated in fields:
            label = _KINDS.LABEL_REPEATED if repeated else _KINDS.LABEL_OPTIONAL
            added.field.add(name=field, number=number, type=kind, type_name=type_name or None, label=label)
        return added

    def mapping(name: str, field: str, value: str) -> None:
        added = message(name, (field, 1, _KINDS.TYPE_MESSAGE, f".t.{name}.{field.title()}Entry", True))
        entry = added.nested_type.add(name=f"{field.title()}Entry")
        entry.field.add(name="key", number=1, type=_KINDS.TYPE_STRING, label=_KINDS.LABEL_OPTIONAL)
        entry.field.add(
            name="value", number=2, type=_KINDS.TYPE_MESSAGE, type_name=f".t.{value}", label=_KINDS.LABEL_OPTIONAL
        )
        entry.options.map_entry = True

    message("BytesList", ("value", 1, _KINDS.TYPE_BYTES, "", True))
    message("FloatList", ("value", 1, _KINDS.TYPE_FLOAT, "", True))
    message("Int64List", ("value", 1, _KINDS.TYPE_INT64, "", True))
    lists = ["BytesList", "FloatList", "Int64List"]
    feature = message(
        "Feature", *((f"f{i + 1}", i + 1, _KINDS.TYPE_MESSAGE, f".t.{lists[i]}", False) for i in range(3))
    )
    feature.oneof_decl.add(name="kind")
    for field in feature.field:
        field.oneof_index = 0
    mapping("Features", "feature", "Feature")
    message("FeatureList", ("feature", 1, _KINDS.TYPE_MESSAGE, ".t.Feature", True))
    mapping("FeatureLists", "list", "FeatureList")
    message("Example", ("features", 1, _KINDS.TYPE_MESSAGE, ".t.Features", False))
    message(
        "SequenceExample",
        ("context", 1, _KINDS.TYPE_MESSAGE, ".t.Features", False),
        ("lists", 2, _KINDS.TYPE_MESSAGE, ".t.FeatureLists", False),
    )
    return file


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_file())
Example: Any = message_factory.GetMessageClass(_pool.FindMessageTypeByName("t.Example"))
SequenceExample: Any = message_factory.GetMessageClass(_pool.FindMessageTypeByName("t.SequenceExample"))


def example_values(data: bytes) -> dict[str, Any]:
    """The same as `parse_example`, by the protobuf library."""
    return _named(Example.FromString(data).features)


def sequence_values(data: bytes) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The same as `parse_sequence_example`, by the protobuf library."""
    message = SequenceExample.FromString(data)
    lists = {name: [_values(feature) for feature in each.feature] for name, each in message.lists.list.items()}
    return _named(message.context), lists


def _named(features: Any) -> dict[str, Any]:
    return {name: _values(feature) for name, feature in features.feature.items() if feature.WhichOneof("kind")}


def _values(feature: Any) -> Any:
    kind = feature.WhichOneof("kind")
    if kind in (None, "f1"):
        return list(feature.f1.value)
    return np.array(getattr(feature, kind).value, dtype=np.float32 if kind == "f2" else np.int64)


def plain(values: Any) -> Any:
    """Values, or dicts, lists and pairs of them, so that equal ones compare equal: NaN too."""
    if isinstance(values, np.ndarray):
        return str(values.dtype), values.tobytes()
    if isinstance(values, dict):
        return {name: plain(each) for name, each in values.items()}
    if isinstance(values, tuple | list):
        return [plain(each) for each in values]
    return values
