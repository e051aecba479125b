"""Files of records: TFRecord, and the examples in them."""

from lockstep.records.example import parse_example, serialize_example
from lockstep.records.template import Integer, Pixels
from lockstep.records.tfrecord import read_all, write_records

__all__ = ["Integer", "Pixels", "parse_example", "read_all", "serialize_example", "write_records"]
