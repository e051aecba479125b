"""`two_networks.py` as a user runs it: alone, resumed, on two workers, and stopped by Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process

SCRIPT, STEPS = "two_networks.py", 20


@pytest.mark.slow
def test_a_run_that_was_stopped_ends_with_the_bytes_of_one_that_was_not(examples: Any, tmp_path: Path) -> None:
    undisturbed, stopped = tmp_path / "undisturbed", tmp_path / "stopped"
    said = examples.run(SCRIPT, examples.alone, undisturbed, "--steps", str(STEPS))
    examples.run(SCRIPT, examples.alone, stopped, "--steps", "9")
    examples.run(SCRIPT, examples.on_two_workers, stopped, "--steps", str(STEPS))

    found = re.fullmatch(rf"step {STEPS}: discriminator (\d\.\d+), generator (\d\.\d+)", said[-1])
    assert found, said
    # Both are 2 log 2 and log 2 where neither network wins.
    assert 0.3 < float(found[1]) < 2
    assert 0.3 < float(found[2]) < 4
    expected = examples.checkpoint(undisturbed, STEPS)
    assert {"generator.parameters.safetensors", "discriminator.parameters.safetensors"} < expected.keys()
    assert examples.checkpoint(stopped, STEPS) == expected
    samples = (undisturbed / "samples.pgm").read_bytes()
    assert samples == (stopped / "samples.pgm").read_bytes()
    assert len(set(samples[15:])) > 100, "the generator draws one grey"


@pytest.mark.slow
def test_ctrl_c_ends_it_after_a_whole_step_with_both_networks_saved(examples: Any, tmp_path: Path) -> None:
    with examples.start(SCRIPT, examples.on_two_workers, tmp_path) as process:
        first = next(line for line in process.stdout if line.startswith("step"))
        process.send_signal(signal.SIGINT)
        rest = examples.end(process)
    assert first.startswith("step 20: "), first
    assert process.returncode == 130, rest
    assert "Traceback" not in rest
    (folder,) = (tmp_path / "checkpoints").iterdir()
    values = json.loads((folder / "values.json").read_text())
    step = int(folder.name.removeprefix("step-"))
    assert [state["step"] for state in values["states"].values()] == [step, step]
    assert values["loader"]["position"] == step * 128
