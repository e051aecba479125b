"""`lockstep import pipeline` as a user runs it, in this process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.recipes.toml import from_toml, load

FIXTURES = Path(__file__).parent.parent / "fixtures" / "odapi_configs"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "object-detection-api.md"
PETS = FIXTURES / "mask_rcnn_resnet101_pets.config"


def test_the_recipe_is_written_and_each_field_has_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "pets.toml"
    assert main(["import", "pipeline", str(PETS), "--to", str(target)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["line", "field", "value", "becomes"]
    assert f"{target}: 68 fields, 66 mapped, 2 without effect here, 0 not mapped" in lines
    rows = {(*line.split(maxsplit=3),) for line in lines}
    assert ("105", "initial_learning_rate", "0.0007", "optimizer.lr.values") in rows
    assert ("108", "learning_rate", "0.00007", "optimizer.lr.values") in rows
    assert "      train_config.optimizer.momentum_optimizer.learning_rate.manual_step_learning_rate.schedule" in lines
    assert any(line.split()[:3] == ["155", "num_readers", "1"] and "no effect: `feed` says" in line for line in lines)
    assert load(target).name == "mask_rcnn_resnet101_pets"


def test_the_table_in_the_docs_is_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = FIXTURES / "ssdlite_mobilenet_v3_small_320x320_coco.config"
    assert main(["import", "pipeline", str(config), "--to", str(tmp_path / "ssdlite.toml")]) == 0
    printed = capsys.readouterr().out.splitlines()
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert set(shown.splitlines()) <= set(printed)


@pytest.mark.process
def test_training_what_cannot_be_trained_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, of_context = str(tmp_path / "camera.toml"), next(FIXTURES.glob("context*.config"))
    assert main(["import", "pipeline", str(of_context), "--to", target]) == 0
    reason = "Context R-CNN is not trained here: a detector sees one image, and no others of the same camera."
    assert f"`lockstep train` refuses it: {reason}\n" in capsys.readouterr().out
    assert main(["train", target, "--workdir", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {reason}")
    assert not (tmp_path / "run").exists()
    assert main(["train", target, "--print-recipe"]) == 0
    assert from_toml(capsys.readouterr().out, target) == load(Path(target))


def test_the_nearest_feature_extractor_is_taken_where_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, target = tmp_path / "ssd.config", tmp_path / "ssd.toml"
    config.write_text((FIXTURES / "ssd_inception_v2_coco.config").read_text().replace("inception_v2", "mobiledet_gpu"))
    assert main(["import", "pipeline", str(config), "--to", str(target)]) == 0
    assert "ssd_mobilenet_v2 is the nearest" in capsys.readouterr().out
    assert main(["import", "pipeline", str(config), "--to", str(target), "--substitute-model", "--force"]) == 0
    printed = capsys.readouterr().out
    assert "substituted: model.feature_extractor.type=ssd_mobilenet_v2\n" in printed
    assert "not mapped: its weights are those of ssd_mobiledet_gpu" in printed
    assert "There is no feature extractor" not in printed
    assert load(target).warm_start is None
    config = next(FIXTURES.glob("context*.config"))
    assert main(["import", "pipeline", str(config), "--to", str(target), "--substitute-model", "--force"]) == 0
    assert "substituted: model.untrained_parts=()\n" in capsys.readouterr().out
    assert load(target).warm_start is not None


def test_a_file_that_is_there_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "pets.toml"
    target.write_text("mine")
    assert main(["import", "pipeline", str(PETS), "--to", str(target)]) == 2
    assert "--force" in capsys.readouterr().err
    assert target.read_text() == "mine"
    assert main(["import", "pipeline", str(PETS), "--to", str(target), "--force"]) == 0
    assert target.read_text() != "mine"


def test_a_wrong_name_of_an_enumeration_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.config"
    wrong.write_text(PETS.read_text().replace("score_converter: SOFTMAX", "score_converter: SOFTMACS"))
    target = tmp_path / "wrong.toml"
    assert main(["import", "pipeline", str(wrong), "--to", str(target)]) == 2
    message = capsys.readouterr().err
    assert f"{wrong}, line 92, column 24: model.faster_rcnn.second_stage_post_processing.score_converter" in message
    assert 'did you mean "SOFTMAX"?' in message
    assert not target.exists()


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "a.config"
    path.write_bytes(b"\xef\xbb\xbf" + PETS.read_bytes())
    assert main(["import", "pipeline", str(path), "--to", str(tmp_path / "a.toml")]) == 0


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("nothing.config", None, "cannot be read"),
        ("binary.config", b"\xff\xfe\x00", "cannot be read"),
        ("/dev/zero", None, "is no pipeline.config"),
        ("large.config", b"#" * ((1 << 20) + 1), "is no pipeline.config"),
        ("other.config", b'{"model": {}}', "is not in protocol buffers' text format"),
        ("empty.config", b"", "model cannot be used"),
    ],
)
def test_another_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None, what: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert main(["import", "pipeline", str(path), "--to", str(tmp_path / "a.toml")]) == 2
    assert what in capsys.readouterr().err
    assert not (tmp_path / "a.toml").exists()
