from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from written_runs import event, metrics_line, timing_line, write_run

from lockstep.cli.main import main
from tests.saved_runs import recipe_of_photos


def content_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """The files of a folder, with the times at which they were changed."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


def test_a_page_is_written_into_the_current_folder_and_nothing_into_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(Path("runs/mine"), metrics=[metrics_line(1)], history=[event("start", 0, 0)])
    before = content_of(run)
    assert main(["report", "runs/mine"]) == 0
    assert capsys.readouterr().out == "report.html: runs/mine; open it in a browser\n"
    assert content_of(run) == before
    assert b"<title>mine" in Path("report.html").read_bytes()


def test_a_report_is_written_anew_and_another_file_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, page = write_run(tmp_path / "run"), tmp_path / "page.html"
    words = ["report", str(run), "--to", str(page)]
    page.write_text("<title>mine</title>")
    assert main(words) == 2
    assert "expected: a name that is free" in caplog.text
    assert "hint:     give another name, or --force to overwrite it" in caplog.text
    assert page.read_text() == "<title>mine</title>"
    assert main([*words, "--force"]) == main(words) == 0
    assert "<title>run" in page.read_text()


def test_the_folder_of_the_run_is_written_to_if_it_is_named_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (write_run(tmp_path / "run") / "below").mkdir()
    monkeypatch.chdir(tmp_path / "run/below")
    assert main(["report", ".."]) == 2
    assert "The current folder is that of the run, which a report leaves as it is." in caplog.text
    assert "hint:     --to ../report.html" in caplog.text
    assert main(["report", "..", "--to", "../report.html"]) == 0


@pytest.mark.parametrize("is_there", [True, False])
def test_a_folder_that_holds_no_run_is_refused(
    tmp_path: Path, is_there: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if is_there:
        (tmp_path / "run").mkdir()
    assert main(["report", str(tmp_path / "run"), "--to", str(tmp_path / "page.html")]) == 2
    assert f"There is no run in {tmp_path / 'run'}." in caplog.text
    assert not (tmp_path / "page.html").exists()


def test_a_folder_that_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_run(tmp_path / "run")
    monkeypatch.setattr(os, "access", lambda *_: False)  # no mode keeps root out
    assert main(["report", str(tmp_path / "run"), "--to", str(tmp_path / "page.html")]) == 2
    assert "is not the folder of a run that can be read." in caplog.text
    assert "not a folder that this user may read" in caplog.text


def test_files_that_cannot_be_read_are_named_on_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for name in ("metrics.jsonl", "history.jsonl", "choices.json", "confusion.csv", "mistakes.png"):
        (run / name).mkdir()
    assert main(["report", str(run), "--to", str(tmp_path / "page.html")]) == 0
    for name in ("metrics.jsonl", "history.jsonl", "choices.json", "confusion.csv", "mistakes.png"):
        assert f"{name} cannot be read: it is no plain file" in (tmp_path / "page.html").read_text()


def test_links_out_of_the_folder_show_nothing_of_where_they_lead(tmp_path: Path) -> None:
    run, page = write_run(tmp_path / "run"), tmp_path / "page.html"
    (tmp_path / "private").write_text("a,secret\nsecret,1\n")
    for name in ("confusion.csv", "warm_start.json", "history.jsonl"):
        (run / name).symlink_to(tmp_path / "private")
    kept = tmp_path / "elsewhere/position-000000001"
    kept.mkdir(parents=True)
    (kept / "report.json").write_text('{"step": 1, "position": 1, "reasons": ["secret"]}')
    (run / "refused").symlink_to(kept.parent)
    assert main(["report", str(run), "--to", str(page)]) == 0
    assert "secret" not in page.read_text()
    assert "confusion.csv cannot be read: it is a link" in page.read_text()
    assert "refused is a link to a folder, and left out" in page.read_text()


def test_a_page_that_cannot_be_read_is_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, page = write_run(tmp_path / "run"), tmp_path / "page.html"
    page.touch()
    opened = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == page:
            raise PermissionError(13, "Permission denied", str(path))  # no mode keeps root out
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    assert main(["report", str(run), "--to", str(page)]) == 2
    assert "--force to overwrite it" in caplog.text


def test_a_run_that_is_being_written_is_shown_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last line of each file is torn, another one damaged."""
    run = write_run(tmp_path / "run", metrics=[metrics_line(1, "nan")], timings=[timing_line(9, 1)])
    for name in ("metrics", "timings", "history", "evaluations", "quarantine"):
        with (run / f"{name}.jsonl").open("a") as file:
            file.write('damaged\n{"step": 2, "posit')
    (run / "checkpoints/step-00000001").mkdir(parents=True)
    (run / "result.json").write_text("{")
    (run / "data.json").write_text("[]")
    assert main(["report", str(run), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["runs"]
    assert told["overview"]["step"] == 9
    assert "metrics.jsonl, line 2 cannot be read, and is left out" in told["problems"]
    assert "manifest.json" in told["checkpoints"][0]["problem"]
    assert main(["report", str(run), "--to", str(tmp_path / "page.html")]) == 0
    assert "metrics.jsonl, line 2 cannot be read" in (tmp_path / "page.html").read_text()


def test_runs_of_one_name_are_called_by_their_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(write_run(tmp_path / place / "run")) for place in ("a", "b")]
    again = runs[0].replace("/a/run", "/./a/run")
    assert main(["report", *runs, again, "--json"]) == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]] == runs


def test_examples_are_shown_as_the_run_augments_them(tmp_path: Path) -> None:
    run, page = write_run(tmp_path / "run"), tmp_path / "page.html"
    assert main(["report", str(run), "--examples", "2", "--to", str(page)]) == 0
    text = page.read_text()
    assert text.count('<figure class="picture example">') == 2  # nothing augments mnist's
    assert "position 1, label " in text


def test_examples_that_are_not_there_are_a_line_of_the_page(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, page = write_run(tmp_path / "run", recipe_of_photos(train="no/photos")), tmp_path / "page.html"
    assert main(["report", str(run), "--examples", "2", "--to", str(page)]) == 0
    assert "<li>No examples are shown: " in page.read_text()
    assert main(["report", str(run), "--examples", "0"]) == 2
    assert "--examples 0" in caplog.text
