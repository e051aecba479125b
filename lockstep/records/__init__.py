"""Files of records: TFRecord, and the examples in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.records.example import parse_example as parse_example
    from lockstep.records.example import serialize_example as serialize_example
    from lockstep.records.template import Integer as Integer
    from lockstep.records.template import Pixels as Pixels
    from lockstep.records.tfrecord import read_all as read_all
    from lockstep.records.tfrecord import write_records as write_records
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
