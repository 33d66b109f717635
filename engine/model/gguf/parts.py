"""Models that are split into several files, `NAME-00001-of-00003.gguf`."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import Struct

from engine.base.errors import ModelFileError
from engine.base.language import tr
from engine.model.gguf.header import FileHeader

_PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.ASCII | re.DOTALL)
_N_NAMED = 3


class PartName(Struct, frozen=True):
    """File name of one part of a split model: `STEM-NUMBER-of-COUNT.gguf`.

    `number`: number of the file, from 1.
    `count`: number of files of the model.
    """

    stem: str
    number: int
    count: int

    def paths(self, folder: Path) -> tuple[Path, ...]:
        """Return the paths of all files of the split model, in order."""
        return tuple(
            folder / f"{self.stem}-{number:05d}-of-{self.count:05d}.gguf" for number in range(1, self.count + 1)
        )


def parse_part_name(file_name: str) -> PartName | None:
    """Parse the file name of a part of a split model; None if the name has another form."""
    match = _PART_NAME.fullmatch(file_name)
    return PartName(match[1], int(match[2]), int(match[3])) if match else None


def named_parts(path: Path) -> tuple[Path, ...]:
    """Return the paths of all files of a model from the name of one of them. The files need not exist."""
    name = parse_part_name(path.name)
    return (path,) if name is None else name.paths(path.parent)


def split_position(path: Path, header: FileHeader) -> tuple[int, int]:
    """Return (number of this file from 0, number of files of the model) from the header of one file.

    (0, 1) if the model is not split.
    """
    count = header.metadata.get("split.count", 1)
    number = header.metadata.get("split.no", 0)
    if not isinstance(count, int) or not isinstance(number, int):
        raise ModelFileError(path, tr("has a split.count or split.no that is not a number; the file is damaged"))
    if count <= 1:
        return 0, 1
    if not 0 <= number < count:
        raise ModelFileError(
            path,
            tr(
                "is part {number} of {count} according to its header, which is impossible; the file is damaged",
                number=number + 1,
                count=count,
            ),
        )
    return number, count


def part_paths(path: Path, header: FileHeader) -> tuple[Path, ...]:
    """Return all files of the model to which `path` belongs, in order.

    Raises:
        ModelFileError: if files are missing, or name and header disagree.
    """
    number, count = split_position(path, header)
    name = parse_part_name(path.name)
    if count == 1:
        if name is not None and name.count > 1:
            raise ModelFileError(
                path,
                tr(
                    "is named part {number} of {count}, but its header says that the model has one file; rename "
                    "the file",
                    number=name.number,
                    count=name.count,
                ),
            )
        return (path,)
    # llama.cpp derives the names of the other files from this one (`llama_split_prefix`), so the name must be correct.
    if name is None or (name.number, name.count) != (number + 1, count):
        example = f"NAME-{number + 1:05d}-of-{count:05d}.gguf"
        raise ModelFileError(
            path,
            tr(
                "is part {number} of {count} according to its header, but its name does not say so; rename the file "
                "to {example}",
                number=number + 1,
                count=count,
                example=example,
            ),
        )
    paths = name.paths(path.parent)
    missing = [part.name for part in paths if not _is_there(part)]
    if missing:
        more = tr(" and {count} more", count=len(missing) - _N_NAMED) if len(missing) > _N_NAMED else ""
        names = ", ".join(missing[:_N_NAMED])
        raise ModelFileError(
            path,
            tr(
                "is part {number} of {count}; missing in its folder: {names}{more}",
                number=number + 1,
                count=count,
                names=names,
                more=more,
            ),
        )
    return paths


def _is_there(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except OSError:
        return True  # Opening it will say what is wrong with it.
    return True
