"""A buffer of several, as the allocator makes it where a device gives out none that is large enough."""

from __future__ import annotations

from engine.memory.compute_graph.ggml.allocator import Buffer

_MOST_PARTS = 16
"""`GGML_VBUFFER_MAX_CHUNKS`: the last part takes all that is left."""
_APART = 1 << 62
"""Between the first bytes of two parts."""


def n_parts(buffer: Buffer) -> int:
    """Return of how many buffers one is made."""
    return len(buffer.parts) if isinstance(buffer, DividedBuffer) else 1


class DividedBuffer(Buffer):
    """Parts of at most `most_bytes` each; one is larger only for a tensor that is. An offset tells the part too."""

    __slots__ = ("_most_bytes", "parts")

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self._most_bytes = most_bytes
        self.parts: list[Buffer] = []

    def take(self, size: int) -> int:
        """Return the offset of a new block: one that fits between others, the last such part's smallest; else the end
        of the part that has to grow least; else a new part."""
        number = self._with_gap(size)
        if number is None:
            number = self._with_end(size)
        if number is None:
            number = len(self.parts)
            is_last = number == _MOST_PARTS - 1
            self.parts.append(Buffer(sizes=(_APART // 2 if is_last else max(size, self._most_bytes),)))
        offset = self.parts[number].take(size)
        self.size_bytes = sum(part.size_bytes for part in self.parts)
        return number * _APART + offset

    def give_back(self, offset: int, size: int) -> None:
        """Return a block to its part."""
        number, inside = divmod(offset, _APART)
        self.parts[number].give_back(inside, size)

    def _with_gap(self, size: int) -> int | None:
        numbers = range(len(self.parts) - 1, -1, -1)
        return next((each for each in numbers if any(free >= size for free in self.parts[each].sizes[:-1])), None)

    def _with_end(self, size: int) -> int | None:
        found: int | None = None
        best = -_APART
        for number, part in enumerate(self.parts):
            if not part.sizes or part.sizes[-1] < size:
                continue
            left = part.size_bytes - part.offsets[-1] - size
            if (best < 0 and left > best) or 0 <= left < best:
                found, best = number, left
        return found
