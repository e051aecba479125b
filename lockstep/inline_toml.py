"""Parts of a recipe as one line of TOML, for messages: what is as by default is left out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

_KINDS = {
    "AdamW": "adamw",
    "LeNet": "lenet",
    "MixUp": "mixup",
    "RMSProp": "rmsprop",
    "RandomIoUCrop": "random_iou_crop",
    "SqueezeNet": "squeezenet",
    "DataLoading": "feed",
    "Monitoring": "watch",
    "Verification": "verify",
    "TorchOptimizerByName": "from_torch",
    **dict.fromkeys(("PythonModel", "PythonTask", "PythonData", "PythonOptimizer", "PythonHook"), "python"),
}
"""Kinds that are not the class name in snake_case."""
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def kind_name(cls: type) -> str:
    """Return the `kind` of a class in TOML: mostly its name in snake_case."""
    name = cls.__name__
    return _KINDS.get(name) or re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def inline_toml(value: Any) -> str:
    """Show a value as a recipe has it: `{kind = "sgd", lr = 0.1}`; functions of the user's own by name."""
    if is_dataclass(value) and not isinstance(value, type):
        given = {field.name: getattr(value, field.name) for field in fields(value) if _is_given(value, field)}
        return _table({"kind": kind_name(type(value)), **given})
    if isinstance(value, Mapping):
        return _table(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(inline_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return str(getattr(value, "__qualname__", value))


def _is_given(part: Any, field: Any) -> bool:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return field.init and (default is MISSING or bool(getattr(part, field.name) != default))


def _table(table: Mapping[Any, Any]) -> str:
    entries = (
        f"{key if _BARE_KEY.fullmatch(str(key)) else json.dumps(str(key))} = {inline_toml(value)}"
        for key, value in table.items()
    )
    return f"{{{', '.join(entries)}}}"
