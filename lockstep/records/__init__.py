"""Files of records: TFRecord, and the examples in them."""

from lockstep.records.example import parse_example, serialize_example
from lockstep.records.sequence_example import SequenceExample, parse_sequence_example, serialize_sequence_example
from lockstep.records.shards import find_shards
from lockstep.records.template import Integer, Pixels
from lockstep.records.tfrecord import RecordFiles, read_all, write_records

__all__ = [
    "Integer",
    "Pixels",
    "RecordFiles",
    "SequenceExample",
    "find_shards",
    "parse_example",
    "parse_sequence_example",
    "read_all",
    "serialize_example",
    "serialize_sequence_example",
    "write_records",
]
