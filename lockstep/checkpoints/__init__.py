"""Checkpoints: written whole or not at all, verified when read, and readable without Lockstep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.checkpoints.retention import Retention as Retention
    from lockstep.checkpoints.store import Store as Store
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
