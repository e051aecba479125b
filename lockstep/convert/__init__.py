"""Converters: data sets in the formats they come in, made into sharded records."""
