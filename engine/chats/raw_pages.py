"""Rows of a damaged SQLite file, read page by page: its trees are not needed, in which one bad page hides all below it.

The layout is that of https://www.sqlite.org/fileformat2.html: leaves of tables hold cells, a cell one row, and what has
no room in its leaf goes on in a chain of overflow pages. Pages on the list of free ones may hold what was deleted, and
are left out. The file must not be open in this process: closing it drops SQLite's locks of it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_MAGIC = b"SQLite format 3\0"
_USUAL_PAGE_BYTES = 4096
_LEAF_OF_TABLE = 0x0D
_LEAF_HEADER_BYTES = 8
_LINK_BYTES = 4
_INTEGER_BYTES = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}
_REAL, _ZERO, _ONE, _FIRST_TEXT = 7, 8, 9, 12
_LOST = re.compile("\0{8,}")
_GAP = "\ufffd"

Value = int | float | str | bytes | None


@dataclass(frozen=True, slots=True)
class FoundRow:
    """A row by its `number` (SQLite's rowid). Where it is not whole, `values` end early or have a gap in a text."""

    number: int
    values: tuple[Value, ...]
    is_whole: bool


@dataclass(frozen=True, slots=True)
class _Cell:
    """The beginning of a row: its number, its size, what of it is in the leaf, and the page where it goes on, or 0."""

    number: int
    size_bytes: int
    local: bytes
    overflow: int


def read_rows(path: Path) -> Iterator[FoundRow]:
    """Yield the rows of all tables in no order; which table one is of, its values must tell.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        yield from _PageFile(file).rows()


class _PageFile:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        header = file.read(100).ljust(100, b"\0")
        page_bytes = int.from_bytes(header[16:18]) or _USUAL_PAGE_BYTES
        page_bytes = 1 << 16 if page_bytes == 1 else page_bytes
        is_sound = header.startswith(_MAGIC) and page_bytes >= 512 and not page_bytes & (page_bytes - 1)
        self._page_bytes = page_bytes if is_sound else _USUAL_PAGE_BYTES
        self._usable_bytes = self._page_bytes - (header[20] if is_sound else 0)
        size_bytes = file.seek(0, 2)
        self._n_pages = -(-size_bytes // self._page_bytes)
        self._free = self._free_pages(int.from_bytes(header[32:36])) if is_sound else set()

    def rows(self) -> Iterator[FoundRow]:
        taken: set[int] = set()
        broken = []
        for number in range(2, self._n_pages + 1):  # the first one holds the schema, which is known
            if number in self._free:
                continue
            for cell in self._cells(self._page(number)):
                payload, pages = self._whole_payload(cell)
                if len(payload) < cell.size_bytes:
                    broken.append(cell)
                elif (values := _values(payload, cell.size_bytes)) is not None:
                    taken.update(pages)
                    yield FoundRow(cell.number, values, is_whole=True)
        for cell in broken:  # now it is known which pages belong to others
            values = _values(self._partial_payload(cell, taken), cell.size_bytes)
            if values is not None:
                yield FoundRow(cell.number, tuple(map(_with_gaps, values)), is_whole=False)

    def _page(self, number: int) -> bytes:
        self._file.seek((number - 1) * self._page_bytes)
        return self._file.read(self._page_bytes).ljust(self._page_bytes, b"\0")

    def _free_pages(self, trunk: int) -> set[int]:
        """Return the list of free pages, as far as it is sound."""
        found: set[int] = set()
        while self._is_page(trunk) and trunk not in found:
            following, count = struct.unpack_from(">2I", page := self._page(trunk))
            if count > self._usable_bytes // 4 - 2:
                break
            leaves = struct.unpack_from(f">{count}I", page, 8)
            if not all(map(self._is_page, leaves)):
                break
            found |= {trunk, *leaves}
            trunk = following
        return found

    def _is_page(self, number: int) -> bool:
        return 2 <= number <= self._n_pages

    def _cells(self, page: bytes) -> Iterator[_Cell]:
        count = int.from_bytes(page[3:5])
        first = _LEAF_HEADER_BYTES + 2 * count
        if page[0] != _LEAF_OF_TABLE or first > self._usable_bytes:
            return
        for place in struct.unpack_from(f">{count}H", page, _LEAF_HEADER_BYTES):
            cell = self._cell(page, place) if place >= first else None
            if cell is not None:
                yield cell

    def _cell(self, page: bytes, place: int) -> _Cell | None:
        try:
            size_bytes, place = _variable(page, place)
            number, place = _variable(page, place)
        except IndexError:
            return None
        if not 0 < size_bytes <= self._n_pages * self._page_bytes:
            return None
        local_bytes = self._local_bytes(size_bytes)
        end = place + local_bytes
        goes_on = local_bytes < size_bytes
        if end + _LINK_BYTES * goes_on > self._usable_bytes:
            return None
        return _Cell(
            number=number - (1 << 64) if number >> 63 else number,
            size_bytes=size_bytes,
            local=page[place:end],
            overflow=int.from_bytes(page[end : end + _LINK_BYTES]) if goes_on else 0,
        )

    def _local_bytes(self, size_bytes: int) -> int:
        """Return how much of a row of this size is in its leaf ("Cell Payload Overflow Pages" of the format)."""
        most = self._usable_bytes - 35
        if size_bytes <= most:
            return size_bytes
        least = (self._usable_bytes - 12) * 32 // 255 - 23
        local_bytes = least + (size_bytes - least) % (self._usable_bytes - _LINK_BYTES)
        return local_bytes if local_bytes <= most else least

    def _whole_payload(self, cell: _Cell) -> tuple[bytes, list[int]]:
        """Return a row's bytes and its overflow pages, only what is in its leaf where the chain of them is broken."""
        pages = self._chain(cell.overflow, cell.size_bytes - len(cell.local))
        if pages is None:
            return cell.local, []
        parts = [cell.local, *(self._page(page)[_LINK_BYTES : self._usable_bytes] for page in pages)]
        return b"".join(parts)[: cell.size_bytes], pages

    def _chain(self, page: int, left_bytes: int) -> list[int] | None:
        """Return the overflow pages from `page` on; None where they are not as many as so many bytes need."""
        pages: dict[int, None] = {}
        while left_bytes > 0:
            if not self._is_page(page) or page in self._free or page in pages:
                return None
            pages[page] = None
            left_bytes -= self._usable_bytes - _LINK_BYTES
            page = int.from_bytes(self._page(page)[:_LINK_BYTES])
        return list(pages) if page == 0 else None

    def _partial_payload(self, cell: _Cell, taken: set[int]) -> bytes:
        """Return what there is of a row, with zeros in the place of one page that is damaged.

        The page behind it is not known then; pages of a row are written in order, so it is mostly the one behind it in
        the file. It is believed where nothing else has it and exactly as many follow as are missing.
        """
        parts = [cell.local]
        left_bytes, page = cell.size_bytes - len(cell.local), cell.overflow
        page_bytes = self._usable_bytes - _LINK_BYTES
        while left_bytes > 0 and self._is_page(page) and page not in taken and page not in self._free:
            taken.add(page)
            content = self._page(page)
            following = int.from_bytes(content[:_LINK_BYTES])
            left_bytes -= page_bytes
            goes_on = self._is_page(following) and following not in taken and following not in self._free
            if goes_on if left_bytes > 0 else following == 0:
                parts.append(content[_LINK_BYTES : self._usable_bytes])
                page = following
                continue
            parts.append(b"\0" * page_bytes)
            rest = self._chain(page + 1, left_bytes) if left_bytes > 0 else None
            if rest is not None and taken.isdisjoint(rest):
                taken.update(rest)
                parts += (self._page(each)[_LINK_BYTES : self._usable_bytes] for each in rest)
            break
        return b"".join(parts)[: cell.size_bytes]


def _variable(data: bytes, place: int) -> tuple[int, int]:
    """Return an integer of variable length, and where it ends."""
    value = 0
    for _ in range(8):
        byte = data[place]
        place += 1
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, place
    return value << 8 | data[place], place + 1


def _values(payload: bytes, size_bytes: int) -> tuple[Value, ...] | None:
    """Return the values of a row of `size_bytes`, of which the end may be missing; None for what is no row."""
    kinds = []
    try:
        header_bytes, place = _variable(payload, 0)
        while place < header_bytes:
            kind, place = _variable(payload, place)
            kinds.append(kind)
    except IndexError:
        return None
    sizes = [_size_bytes(kind) for kind in kinds]
    if place != header_bytes or header_bytes + sum(sizes) != size_bytes:
        return None
    values = []
    for kind, size in zip(kinds, sizes, strict=True):
        values.append(_value(kind, payload[place : place + size], size))
        place += size
    return tuple(values)


def _size_bytes(kind: int) -> int:
    if kind >= _FIRST_TEXT:
        return (kind - _FIRST_TEXT) // 2
    return 8 if kind == _REAL else _INTEGER_BYTES.get(kind, 0)


def _value(kind: int, data: bytes, size_bytes: int) -> Value:
    if kind >= _FIRST_TEXT:
        return data.decode("utf-8", "replace") if kind % 2 else data
    if kind in (_ZERO, _ONE):
        return kind - _ZERO
    if len(data) < size_bytes or not data:
        return None
    return struct.unpack(">d", data)[0] if kind == _REAL else int.from_bytes(data, signed=True)


def _with_gaps(value: Value) -> Value:
    return _LOST.sub(_GAP, value) if isinstance(value, str) else value
