"""The JSON schema of recipes takes every recipe that is one, and marks what none of them may hold."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from lockstep.recipes.schema import recipe_schema
from lockstep.recipes.shipped import find, names
from lockstep.recipes.toml import to_tables, to_toml

Edit = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    made = recipe_schema()
    jsonschema.Draft202012Validator.check_schema(made)
    return jsonschema.Draft202012Validator(json.loads(json.dumps(made, allow_nan=False)))


def test_every_shipped_recipe_fits(schema: jsonschema.Draft202012Validator) -> None:
    for name in names():
        assert list(schema.iter_errors(tomllib.loads(to_toml(find(name))))) == [], name


@pytest.mark.parametrize(
    "spoil",
    [
        lambda mnist: mnist.update(batch_sise=3),
        lambda mnist: mnist.update(batch_size=0),
        lambda mnist: mnist.update(batch_size="many"),
        lambda mnist: mnist.update(nonfinite="go"),
        lambda mnist: mnist.pop("model"),
        lambda mnist: mnist["model"].pop("kind"),
        lambda mnist: mnist["model"].update(kind="minst"),
        lambda mnist: mnist["optimizer"].update(momentum=1.0),
        lambda mnist: mnist["optimizer"]["lr"].update(power=2.0),
        lambda mnist: mnist["evaluate"].update(top=[0]),
        lambda mnist: mnist["evaluate"].update(every="often"),
    ],
)
def test_what_does_not_fit_is_marked(spoil: Edit, schema: jsonschema.Draft202012Validator) -> None:
    mnist = to_tables(find("mnist"))
    assert schema.is_valid(mnist)
    spoil(mnist)
    assert not schema.is_valid(mnist)


def test_editors_are_told_what_fields_mean(schema: jsonschema.Draft202012Validator) -> None:
    batch_size = schema.schema["properties"]["batch_size"]
    assert batch_size == {
        "description": "Examples an update, over all towers.",
        "type": "integer",
        "minimum": 1,
        "exclusiveMaximum": 2**63,
        "default": 128,
    }
    assert schema.schema["$defs"]["Monitoring"]["properties"]["on_loss"] == {"deprecated": True}
