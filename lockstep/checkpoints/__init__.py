"""Checkpoints: written whole or not at all, verified when read, and readable without Lockstep."""

from lockstep.checkpoints.retention import Retention
from lockstep.checkpoints.store import Store

__all__ = ["Retention", "Store"]
