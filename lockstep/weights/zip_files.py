"""Zip archives: how they begin, and what reading a damaged one raises."""

from __future__ import annotations

import struct
import zipfile
import zlib

MAGIC, EMPTY = b"PK\x03\x04", b"PK\x05\x06"

FAULTS = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, RuntimeError)
"""Beside OSError. The library has an error of its own, and raises these too."""
