"""What a suite of disturbed runs promises, by the history of the undisturbed one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.chaos.suite import Suite
from lockstep.exchange.exchange import AllReduce
from lockstep.recipes.shipped import find


@pytest.mark.parametrize(("workers", "promised"), [(1, True), (3, False)])
def test_remarks_may_follow_the_end_of_the_undisturbed_run(tmp_path: Path, workers: int, promised: bool) -> None:
    (tmp_path / "choices.json").write_text('{"device": "cpu"}')
    (tmp_path / "history.jsonl").write_text(
        f'{{"event": "end", "step": 9, "workers": {workers}}}\n{{"event": "straggler", "step": 9, "said": "slow"}}\n'
    )
    recipe = replace(find("mnist"), exchange=AllReduce(transport="gloo"))
    assert Suite(recipe, tmp_path, [], seed=0, minutes=1)._promised(tmp_path) is promised
