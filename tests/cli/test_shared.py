"""The file that a command writes, and what one of several hosts refuses."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.main import main, parse
from lockstep.cli.shared import check_target, choose_num_workers, given_seat, in_words_of_flags
from lockstep.errors import InputError, LockstepError
from lockstep.launcher.rendezvous import Seat

WHAT = "Plans are drawn as one PNG or as a page."
ENDINGS = (".png", ".html")


def refused(path: Path, *, overwrite: bool = False) -> str:
    with pytest.raises(InputError) as caught:
        check_target(path, ENDINGS, WHAT, overwrite=overwrite)
    return str(caught.value)


def test_another_ending(tmp_path: Path) -> None:
    said = refused(tmp_path / "plan.pdf")
    assert said.startswith(WHAT)
    assert "ends in .png or .html" in said
    assert f"--to {tmp_path / 'plan.png'}" in said


def test_no_name() -> None:
    assert "name a file" in refused(Path())


def test_no_folder(tmp_path: Path) -> None:
    assert f"mkdir -p {tmp_path / 'gone'}" in refused(tmp_path / "gone" / "plan.png")


def test_a_file_that_is_there_may_be_overwritten_on_request_alone(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    path.touch()
    assert "--force to overwrite it" in refused(path)
    check_target(path, ENDINGS, WHAT, overwrite=True)


def test_a_folder_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "plan.png").mkdir()
    assert "There is a folder" in refused(tmp_path / "plan.png", overwrite=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("size is out of range.\n  given:    size=0", "--size is out of range.\n  given:    --size 0"),
        ("give size a value, or leave size out", "give --size a value, or leave size out"),
        (
            "The size is out of range: image_size=0, a.size=1",
            "The size is out of range: image_size=0, a.size=1",
        ),
        ("size differs", "size differs"),
    ],
)
def test_errors_speak_of_flags(text: str, said: str) -> None:
    assert in_words_of_flags(text, {"size": "--size"}) == said


@pytest.mark.parametrize(
    "words", [["train", "mnist", "--fork-from", "nowhere"], ["evaluate", "nowhere"], ["run", "no.py"]]
)
def test_what_one_host_alone_refuses_is_refused_as_it_plans(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else the others would wait for it.
    monkeypatch.chdir(tmp_path)  # where there is no runs/mnist
    plans = []

    def launch(argv: list[str], *, plan: Callable[[list[str]], Any], seat: Seat | None, **options: Any) -> int:
        assert seat
        plans.append((argv, plan))
        return 0

    monkeypatch.setattr("lockstep.launcher.launch.launch_command", launch)
    assert main([*words, "--hosts", "2", "--host-rank", "1", "--chief", "node0:29500"]) == 0
    [(argv, plan)] = plans
    with pytest.raises(LockstepError, match=words[-1]):
        plan(argv)


@pytest.mark.parametrize(("number", "shares"), [(8, [3, 3, 2]), (3, [1, 1, 1]), (9, [3, 3, 3])])
def test_hosts_take_even_shares_of_the_workers(number: int, shares: list[int]) -> None:
    seats = [Seat(3, rank, "node0", 29500) for rank in range(3)]
    assert [choose_num_workers(number, "cpu", None, seat=seat) for seat in seats] == shares
    with pytest.raises(InputError, match="fewer workers than hosts"):
        choose_num_workers(2, "cpu", None, seat=seats[0])


@pytest.mark.parametrize("chief", ["a..b:29500", f"{'n' * 64}:29500", ":29500", "node0:0", "node0"])
def test_a_place_that_no_host_can_have_is_refused(chief: str) -> None:
    with pytest.raises(InputError, match="cannot be used") as error:
        given_seat(Namespace(hosts=2, host_rank=1, chief=chief), {})
    assert error.value.given == f"--hosts 2 --host-rank 1 --chief {chief}"


@pytest.mark.parametrize(
    ("chief", "name"), [("[::1]:29500", "::1"), ("10.0.0.1:29500", "10.0.0.1"), ("n-0.x:29500", "n-0.x")]
)
def test_a_chief_may_be_a_name_or_an_address(chief: str, name: str) -> None:
    assert given_seat(Namespace(hosts=2, host_rank=1, chief=chief), {}) == Seat(2, 1, name, 29500)


@pytest.mark.parametrize(
    ("line", "old", "new", "value"),
    [
        ("chaos mnist --report=report.json", "--report", "--to", Path("report.json")),
        ("convert images photos --to shards --overwrite", "--overwrite", "--force", True),
        ("convert boxes photos --to boxes.csv --overwrite", "--overwrite", "--force", True),
    ],
)
def test_an_old_flag_does_what_the_new_one_does_and_names_it(
    line: str, old: str, new: str, value: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOCKSTEP_OLD_NAMES", "")
    assert getattr(parse(line.split()), new.removeprefix("--")) == value
    assert caplog.messages == [f"{old} is called {new} now"]
    assert parse(line.replace(old, new).split()) == parse(line.split())
