from __future__ import annotations

import logging
import os
import subprocess
import tarfile
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import DataError
from lockstep.records import tar_members
from lockstep.records.tar_members import TarIndex, build_tar_index, key_and_ending, tar_index_of

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
FILES = {"0001.jpg": b"first", "0001.cls": b"1", "0002.jpg": bytes(700), "0002.cls": b""}


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache; every index is worth keeping."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tar_members, "_WORTH_KEEPING_BYTES", 1)
    return tmp_path / "cache"


def archive(path: Path, files: dict[str, bytes], tar_format: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, BytesIO(content))
    return path


def archive_of(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w") as tar:
        for member in members:
            tar.addfile(member)
    return path


def member_of(name: str, kind: bytes = tarfile.REGTYPE, **values: object) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = kind
    for key, value in values.items():
        setattr(member, key, value)
    return member


def contents(path: Path, index: TarIndex) -> dict[str, bytes]:
    """Every member that the index names, cut out of the file."""
    data = path.read_bytes()
    spans = zip(index.offsets.tolist(), index.sizes.tolist(), strict=True)
    return {index.name(i).decode(): data[start : start + size] for i, (start, size) in enumerate(spans)}


def samples(index: TarIndex) -> list[list[str]]:
    return [[index.name(i).decode() for i in index.members(sample)] for sample in range(len(index.starts) - 1)]


def same(one: TarIndex, other: TarIndex) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def flipped(path: Path, place: int, new: bytes) -> Path:
    """The archive with other bytes at a place, and the first header's checksum made to fit."""
    data = bytearray(path.read_bytes())
    data[place : place + len(new)] = new
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("tar_format", FORMATS.values(), ids=FORMATS)
def test_samples_are_members_that_follow_one_another_with_one_key(tmp_path: Path, tar_format: int) -> None:
    path = archive(tmp_path / "a.tar", FILES, tar_format)
    index = build_tar_index(path)
    assert contents(path, index) == FILES
    assert samples(index) == [["0001.jpg", "0001.cls"], ["0002.jpg", "0002.cls"]]


@pytest.mark.process
@pytest.mark.parametrize("tar_format", ["v7", "ustar", "oldgnu", "gnu", "pax"])
def test_what_the_systems_tar_writes_is_read(tmp_path: Path, tar_format: str) -> None:
    folder = tmp_path / "files"
    deep = "d" * 60 if tar_format == "v7" else f"{'d' * 60}/{'e' * 60}"
    (folder / deep).mkdir(parents=True)
    for name, content in FILES.items():
        (folder / deep / name).write_bytes(content)
    path = tmp_path / "a.tar"
    subprocess.run(["tar", f"--format={tar_format}", "--sort=name", "-cf", path, "-C", folder, deep], check=True)
    index = build_tar_index(path)
    assert contents(path, index) == {f"{deep}/{name}": content for name, content in FILES.items()}
    assert [len(sample) for sample in samples(index)] == [2, 2]


@pytest.mark.parametrize("tar_format", ["gnu", "pax"])
def test_names_longer_than_a_header_are_read(tmp_path: Path, tar_format: str) -> None:
    files = {f"{'n' * length}é.jpg": b"x" * length for length in (94, 95, 100, 255, 300, 2000)}
    path = archive(tmp_path / "a.tar", files, FORMATS[tar_format])
    assert contents(path, build_tar_index(path)) == files


@settings(max_examples=40, deadline=None)
@given(
    tar_format=st.sampled_from(list(FORMATS.values())),
    names=st.lists(st.text("ab./é", min_size=1, max_size=40), max_size=8),
    size=st.integers(0, 1600),
    window=st.integers(1, 2000),
)
def test_members_lie_where_pythons_tarfile_finds_them(
    tmp_path_factory: pytest.TempPathFactory, tar_format: int, names: list[str], size: int, window: int
) -> None:
    files = {f"{number}{name}x.bin": bytes([number]) * (size * number) for number, name in enumerate(names)}
    path = archive(tmp_path_factory.mktemp("walk") / "a.tar", files, tar_format)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.records.tar_members._WINDOW_BYTES", window)
        index = build_tar_index(path)
    with tarfile.open(path) as tar:
        expected = {member.name: (member.offset_data, member.size) for member in tar.getmembers()}
    found = {index.name(i).decode(): (int(index.offsets[i]), int(index.sizes[i])) for i in range(len(index.offsets))}
    assert found == {name: place for name, place in expected.items() if key_and_ending(name.encode())[1]}


@settings(max_examples=50, deadline=None)
@given(
    tar_format=st.sampled_from(list(FORMATS.values())),
    block=st.integers(0, 6),
    changes=st.lists(st.tuples(st.integers(0, 511), st.binary(min_size=1, max_size=4)), max_size=3),
    size=st.integers(0, 10240),
)
def test_a_header_of_any_bytes_gives_members_within_the_file_or_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory,
    tar_format: int,
    block: int,
    changes: list[tuple[int, bytes]],
    size: int,
) -> None:
    path = archive(
        tmp_path_factory.mktemp("fuzz") / "a.tar", {f"{'d' * 80}/{'é' * 30}1.jpg": b"x", "1.cls": b"1"}, tar_format
    )
    data = bytearray(path.read_bytes())
    header = data[512 * block : 512 * (block + 1)]
    for place, new in changes:
        header[place : place + len(new)] = new
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + 8 * 32 + sum(header[156:512]))
    data[512 * block : 512 * (block + 1)] = header[:512]
    path.write_bytes(data[:size])
    with suppress(DataError):
        assert tar_members._is_sound(build_tar_index(path))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("0001.jpg", ("0001", "jpg")),
        ("a.b/0001.SEG.Png", ("a.b/0001", "seg.png")),
        ("./x/1.tar.gz", ("./x/1", "tar.gz")),
        ("README", ("README", "")),
        ("x/.hidden.jpg", ("x/", "")),
        ("x/1.", ("x/1", "")),
    ],
)
def test_a_name_is_a_key_and_an_ending(name: str, expected: tuple[str, str]) -> None:
    assert tuple(part.decode() for part in key_and_ending(name.encode())) == expected


def test_what_belongs_to_no_sample_is_named_each_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ["README", ".hidden.txt", *(f"other{number}" for number in range(5))]
    devices = [member_of("pipe.jpg", tarfile.FIFOTYPE), member_of("console.jpg", tarfile.CHRTYPE)]
    others = [member_of("folder", tarfile.DIRTYPE), *devices, *map(member_of, names)]
    path = archive_of(tmp_path / "a.tar", *others, member_of("1.cls"))
    for _ in range(2):
        caplog.clear()
        assert samples(tar_index_of(path)) == [["1.cls"]]
        assert caplog.messages == [f"Not read in {path}: pipe.jpg, console.jpg, README, .hidden.txt, other0 and 4 more"]


def test_a_name_that_is_not_utf8_is_escaped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = archive_of(tmp_path / "a.tar", member_of("caf\udce9", pax_headers={}))
    with caplog.at_level(logging.WARNING, "lockstep"):
        flipped(path, 0, b"caf\xe9")
        tar_index_of(path)
    assert caplog.messages == [f"Not read in {path}: caf\\xe9"]


def test_a_name_of_several_lines_is_logged_on_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = archive_of(tmp_path / "a.tar", member_of("one\nERROR all is lost\x1b[31m é"), member_of("1.cls"))
    tar_index_of(path)
    assert caplog.messages == [f"Not read in {path}: one\\nERROR all is lost\\x1b[31m é"]


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (tarfile.LNKTYPE, "a hard link"),
        (tarfile.SYMTYPE, "a symbolic link"),
        (tarfile.GNUTYPE_SPARSE, "a sparse file"),
        (b"M", "a member of type 'M'"),
    ],
    ids=["hard-link", "symbolic-link", "sparse", "multi-volume"],
)
def test_members_without_their_content_are_refused(tmp_path: Path, kind: bytes, what: str) -> None:
    path = archive(tmp_path / "a.tar", {"0.jpg": b"", "1.jpg": b""})
    with pytest.raises(DataError) as caught:
        build_tar_index(flipped(path, 156, kind))
    assert caught.value.what == f"'0.jpg' in {path} is {what}."
    assert caught.value.given == "member 0, at byte 0, whose content is not stored as it is"
    assert "--dereference --hard-dereference" in caught.value.hint


@pytest.mark.process
def test_a_sparse_file_of_the_systems_tar_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "1.npy").open("wb") as file:
        file.truncate(1 << 20)
    for number, tar_format in enumerate(("gnu", "pax")):
        path = tmp_path / f"{number}.tar"
        subprocess.run(["tar", f"--format={tar_format}", "-Scf", path, "-C", tmp_path, "1.npy"], check=True)
        with pytest.raises(DataError, match=r"1\.npy.* is a sparse file\."):
            build_tar_index(path)


def test_two_members_of_one_ending_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar", {"1.jpg": b"", "1.cls": b"", "1.JPG": b""})
    with pytest.raises(DataError) as caught:
        build_tar_index(path)
    assert caught.value.what == f"{path} holds two members of one key and ending."
    assert caught.value.given == "'1.JPG' at byte 1024, after another one in the sample '1'"
    assert caught.value.hint == "rename one of them"


def test_an_archive_cut_short_anywhere_is_named_with_its_member(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar", FILES, tarfile.PAX_FORMAT)
    data = path.read_bytes()
    end = build_tar_index(path).offsets[-1]
    for size in [1, 511, 512, 513, 517, 1023, 1024, 1500, int(end) - 600, int(end) - 1, int(end)]:
        path.write_bytes(data[:size])
        with pytest.raises(
            DataError, match=rf"{path} is cut short: member \d( \('.*'\))?, at byte \d+, is not whole\."
        ):
            build_tar_index(path)
    path.write_bytes(data[: end + 512])
    assert len(build_tar_index(path).offsets) == 4


def test_the_error_of_an_archive_cut_short_says_where(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar", {"0.cls": b"1", "1.jpg": bytes(600)})
    data = path.read_bytes()
    path.write_bytes(data[:2000])
    with pytest.raises(DataError) as caught:
        build_tar_index(path)
    assert caught.value.what == f"{path} is cut short: member 1 ('1.jpg'), at byte 1024, is not whole."
    assert (caught.value.given, caught.value.expected) == (
        "464 bytes up to the end of the file",
        "600 bytes of content",
    )
    path.write_bytes(data[:1024])
    with pytest.raises(DataError) as caught:
        build_tar_index(path)
    assert caught.value.what == f"{path} is cut short: member 1, at byte 1024, is not whole."
    assert caught.value.given == "the end of the file after 1 members"
    assert caught.value.hint == "copy the file again; where its writer has not closed it, pack it anew"


@pytest.mark.parametrize(
    "size",
    [b"77777777777\0", b"\x80" + b"\x7f" * 11, b"\x80" + b"\0" * 7 + b"\xff\xff\xff\xff"],
    ids=["8", "256", "4G"],
)
def test_a_size_that_lies_is_refused_before_memory_is_taken(tmp_path: Path, size: bytes) -> None:
    path = flipped(archive(tmp_path / "a.tar", {"0.jpg": b"x"}), 124, size)
    with pytest.raises(DataError, match=r"cut short: member 0 \('0\.jpg'\), at byte 0"):
        build_tar_index(path)
    # The same before a name that is said to be long.
    with pytest.raises(DataError, match="cut short: member 0"):
        build_tar_index(flipped(path, 156, tarfile.GNUTYPE_LONGNAME))


def test_a_name_of_megabytes_is_refused(tmp_path: Path) -> None:
    path = flipped(archive(tmp_path / "a.tar", {"0.jpg": bytes((1 << 20) + 1)}), 156, tarfile.GNUTYPE_LONGNAME)
    with pytest.raises(DataError, match=r"given: +an extension of 1048577 bytes, where 1048576 is the most"):
        build_tar_index(path)


def test_a_damaged_header_is_named(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar", FILES)
    data = bytearray(path.read_bytes())
    data[1024] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        build_tar_index(path)
    assert caught.value.what == f"Member 1 of {path}, at byte 1024, has no valid header."
    assert str(caught.value.given).startswith("a header with the checksum ")
    assert caught.value.hint == "copy the file again, or pack it anew"


@pytest.mark.parametrize(
    ("place", "new", "given_"),
    [
        (124, b"12x45678901\0", "a header with the size b'12x45678901'"),
        (124, b"\xff" * 12, "a header with a negative size"),
    ],
    ids=["letters", "negative"],
)
def test_a_number_that_is_none_is_refused(tmp_path: Path, place: int, new: bytes, given_: str) -> None:
    path = flipped(archive(tmp_path / "a.tar", FILES), place, new)
    with pytest.raises(DataError) as caught:
        build_tar_index(path)
    assert caught.value.given == given_


@pytest.mark.parametrize(
    ("pax", "given_"),
    [
        (b"12 path=ab\n", "a pax header with the line b'12 path=ab\\n'"),
        (b"0 path=ab\n", "a pax header with the line b'0 path=ab\\n'"),
        (b"path=ab\n", "a pax header with the line b'path=ab\\n'"),
        (b"11 pathxab\n", "a pax header with the line b'11 pathxab\\n'"),
        (b"11 size=-1\n", "a pax header with the size b'-1'"),
        (b"11 path=ab\n", None),
    ],
    ids=["too-long", "no-length", "no-number", "no-keyword", "negative", "sound"],
)
def test_a_pax_header_that_is_none_is_refused(tmp_path: Path, pax: bytes, given_: str | None) -> None:
    path = archive(tmp_path / "a.tar", {"x": pax, "0.jpg": b""})
    flipped(path, 156, tarfile.XHDTYPE)
    if given_ is None:
        assert samples(build_tar_index(path)) == []
    else:
        with pytest.raises(DataError) as caught:
            build_tar_index(path)
        assert caught.value.given == given_


def test_pax_sizes_and_global_headers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "made by hand"}) as tar:
        member = member_of("0.jpg", size=600, pax_headers={"size": "600"})
        tar.addfile(member, BytesIO(bytes(600)))
        tar.addfile(member_of("1.jpg"))
    assert build_tar_index(path).sizes.tolist() == [600, 0]
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={"path": "all"}) as tar:
        tar.addfile(member_of("0.jpg"))
    with pytest.raises(DataError, match="a global pax header that gives all members one path or size"):
        build_tar_index(path)


def test_an_announced_member_has_to_come(tmp_path: Path) -> None:
    path = flipped(archive(tmp_path / "a.tar", {"0.jpg": b"long-name.jpg\0"}), 156, tarfile.GNUTYPE_LONGNAME)
    with pytest.raises(DataError, match="an end mark, where a member was announced"):
        build_tar_index(path)


def test_archives_joined_by_cat_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar", {"0.jpg": b""})
    path.write_bytes(2 * path.read_bytes())
    with pytest.raises(DataError) as caught:
        build_tar_index(path)
    assert caught.value.what == f"{path} holds more after its end mark."
    assert caught.value.given == "1 members, an end mark at byte 512, and not only zeros after it"
    assert caught.value.hint == "give the archives themselves, or join them by tar --concatenate"


def test_more_zeros_than_any_program_pads_are_not_looked_through(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar", {"0.jpg": b""})
    os.truncate(path, 512 + (1 << 24))
    assert len(build_tar_index(path).offsets) == 1
    os.truncate(path, 20 << 30)
    with pytest.raises(DataError) as caught:
        build_tar_index(path)
    assert caught.value.what == f"{path} is cut short: member 1, at byte 512, is not whole."
    assert caught.value.given == f"zeros in its place, and {(20 << 30) - 512} bytes up to the end of the file"
    assert caught.value.expected == "its header"


@pytest.mark.parametrize("compression", ["gz", "bz2", "xz"])
def test_a_compressed_archive_is_refused_with_what_to_do(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, f"w:{compression}") as tar:  # type: ignore[call-overload]
        tar.addfile(member_of("0.jpg"))
    name = {"gz": "gzip", "bz2": "bzip2", "xz": "xz"}[compression]
    with pytest.raises(DataError) as caught:
        build_tar_index(path)
    assert caught.value.what == f"{path} is compressed, so its samples cannot be read in any order."
    assert caught.value.given == f"a file that begins as those of {name} do"
    assert caught.value.hint == f"decompress it ({name} -d), and give the path of the plain file"


@pytest.mark.parametrize("data", [b"", b"\xff" * 600, b"a text\n" * 100], ids=["empty", "binary", "text"])
def test_a_file_that_is_no_archive_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"Member 0 of {path}, at byte 0, has no valid header") as caught:
        build_tar_index(path)
    assert caught.value.hint == "check that this is a tar archive"
    with pytest.raises(DataError, match=r"none\.tar cannot be opened"):
        tar_index_of(tmp_path / "none.tar")


def test_an_archive_without_members_has_no_samples(tmp_path: Path) -> None:
    index = tar_index_of(archive(tmp_path / "a.tar", {}))
    assert (index.starts.tolist(), len(index.offsets)) == ([0], 0)
    assert same(tar_index_of(tmp_path / "a.tar"), index)


def test_an_index_is_kept_and_read_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archive(tmp_path / "a.tar", {**FILES, "none": b""})
    first = tar_index_of(path)
    with monkeypatch.context() as patch:
        patch.setattr(tar_members, "build_tar_index", None)
        assert same(tar_index_of(path), first)
    archive(path, {"3.jpg": b"another"})
    assert samples(tar_index_of(path)) == [["3.jpg"]]


def test_the_index_of_a_small_archive_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user_cache: Path
) -> None:
    path = archive(tmp_path / "a.tar", FILES)
    monkeypatch.setattr(tar_members, "_WORTH_KEEPING_BYTES", path.stat().st_size + 1)
    tar_index_of(path)
    assert [found.name for found in tmp_path.iterdir()] == ["a.tar"]


@pytest.mark.parametrize(
    "change",
    [
        {"offsets": np.array([512, 1536, 2560, 1 << 40])},
        {"sizes": np.array([5, 1, 700, -1])},
        {"sizes": np.array([5, 2000, 700, 0])},
        {"starts": np.array([0, 3, 2])},
        {"starts": np.array([0, 2, 5])},
        {"name_stops": np.array([8, 16, 24, 33])},
        {"name_stops": np.array([8, 16, 24, 30]), "names": b"short"},
    ],
    ids=["beyond", "negative", "overlap", "falling", "more-members", "more-names", "few-names"],
)
def test_a_kept_index_that_names_what_is_not_there_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, object]
) -> None:
    path = archive(tmp_path / "a.tar", FILES)
    index = tar_index_of(path)
    content = tar_members._encoded(index._replace(**change))  # type: ignore[arg-type]
    tar_members.save_index(path, b"LSTARIX2", index.version, content)
    with caplog.at_level(logging.WARNING, "lockstep"):
        assert same(tar_index_of(path), index)
    (kept,) = (tmp_path / "cache" / "lockstep" / "record-index").iterdir()
    assert caplog.messages == [f"{kept} is damaged: the index of {path} is made again"]


@pytest.mark.parametrize("content", [b"", b"\xff" * 32, b"\x01" + bytes(31), bytes(33)], ids=len)
def test_a_kept_index_of_another_length_is_made_again(tmp_path: Path, content: bytes) -> None:
    path = archive(tmp_path / "a.tar", FILES)
    index = tar_index_of(path)
    tar_members.save_index(path, b"LSTARIX2", index.version, content)
    assert same(tar_index_of(path), index)
