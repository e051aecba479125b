"""The zip archive that torch.save writes: its records have checksums, which torch.load does not look at."""

from __future__ import annotations

import zipfile
from pathlib import Path

from lockstep.errors import CheckpointError
from lockstep.weights import zip_files
from lockstep.weights.file_errors import damaged, unreadable

_PICKLE, _PROGRAM, _STORAGES = "data.pkl", "constants.pkl", "/data/"


def holds_torch(names: list[str]) -> bool:
    """Whether an archive with these names is one of torch.save's, or a program of TorchScript's."""
    return any(name.rpartition("/")[2] == _PICKLE for name in names)


class TorchRecords:
    """The records of one file. All but the values of tensors are verified when it is opened.

    A file that was written without checksums (`torch.serialization.set_crc32_options(False)`) has zeros in their place,
    and nothing is verified.

    Raises:
        CheckpointError: the archive is cut short or damaged, holds more than it can, or is a program.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_verified = False
        self._check(whole=False)

    def verify(self) -> None:
        """Verify the values of all tensors, the first time that this is called.

        Raises:
            CheckpointError: they are damaged.
        """
        if not self._is_verified:
            self._check(whole=True)
            self._is_verified = True

    def _check(self, *, whole: bool) -> None:
        try:
            with zipfile.ZipFile(self._path) as archive:
                records = archive.infolist()
                self._check_records(records)
                if any(record.CRC for record in records):
                    for record in records:
                        if whole or _STORAGES not in record.filename:
                            _check_checksum(archive, record)
        except OSError as error:
            raise unreadable(self._path, error) from error
        except zip_files.FAULTS as error:
            raise damaged(
                self._path, "is damaged or cut short", given=str(error), expected="what torch.save has written"
            ) from error

    def _check_records(self, records: list[zipfile.ZipInfo]) -> None:
        if any(record.filename.rpartition("/")[2] == _PROGRAM for record in records):
            raise CheckpointError(
                f"{self._path} is a program of TorchScript, which has code.",
                given="a file of torch.jit.save",
                expected="tensors, as of torch.save(model.state_dict(), FILE)",
                hint="where you trust it, torch.save(torch.jit.load(FILE).state_dict(), NEW_FILE)",
            )
        claimed, there = sum(record.file_size for record in records), self._path.stat().st_size
        if claimed > there:
            raise damaged(
                self._path,
                "is damaged",
                given=f"records of {claimed} bytes",
                expected=f"no more than the {there} of the file, which is not compressed",
            )


def _check_checksum(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    with archive.open(record) as file:
        while file.read(1 << 20):
            pass
