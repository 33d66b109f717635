"""Removes libraries from a built wheel that are not to be shipped."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from pathlib import Path


def leave_out(wheel: Path, names: Iterable[str]) -> None:
    """Rewrite the wheel without the libraries called `names`, in any folder, and without their lines in RECORD."""
    unwanted = tuple(names)

    def stays(path: str) -> bool:
        return path.rpartition("/")[2].removeprefix("lib").partition(".")[0] not in unwanted

    unfinished = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            if not stays(member.filename):
                continue
            data = old.read(member)
            if member.filename.endswith(".dist-info/RECORD"):
                lines = data.decode().splitlines(keepends=True)
                data = "".join(line for line in lines if stays(line.partition(",")[0])).encode()
            new.writestr(member, data)
    unfinished.replace(wheel)
