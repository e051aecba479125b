"""Files of records: TFRecord, and the examples in them."""
