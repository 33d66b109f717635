"""From one segment of a layout's graph to another: the same backends have other numbers, their memories other names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from engine.planning.memory.compute_graph.ggml.allocator import Ahead, Filled, Held
from engine.planning.memory.compute_graph.ggml.scheduler import Copy
from engine.planning.memory.compute_graph.ggml.sections import FarReachError, Key, stands_for_place

Places = tuple[tuple[Key, int], ...]
"""Backends of tensors that a section passes on."""
State = Places | Ahead | Filled
_MOST_MAPS = 4096


@dataclass(frozen=True, slots=True)
class BackendMap:
    """`numbers`: for each backend of one segment its number in the other, -1 where it is not there; `names`: the same
    for names of memories, which follow from the numbers in segments of the same kinds."""

    numbers: tuple[int, ...]
    names: Mapping[str, str] = field(compare=False)

    def of(self, state: State) -> State:
        """Return the state in the other segment.

        Raises:
            FarReachError: it tells of a backend that is not there.
        """
        if isinstance(state, Ahead):
            memories = frozenset(self.names[memory] for memory in state.memories if memory in self.names)
            return Ahead(tuple(map(self._copy, state.copies)), self.keys(state.read), memories)
        if isinstance(state, Filled):
            return self._filled(state)
        return tuple((self._certain(key), self._backend(backend)) for key, backend in state)

    def backend(self, number: int) -> int:
        """Return the number of a backend, -1 where it is not there."""
        return self.numbers[number] if number >= 0 else -1

    def keys(self, keys: Iterable[Key]) -> frozenset[Key]:
        """Return those names that mean something in the other segment."""
        return frozenset(found for key in keys if (found := self.key(key)) is not None)

    def key(self, key: Key) -> Key | None:
        """Return a name in the other segment, None where it means nothing there."""
        if key[0] == "copy":
            original, backend = self.key(key[1]), self.backend(key[2])  # type: ignore[arg-type]
            return None if original is None or backend < 0 else ("copy", original, backend)
        if key[0] == "weight" and not stands_for_place(str(key[1])):
            home = self.names.get(str(key[1]))
            return None if home is None else ("weight", home)
        return key

    def _certain(self, key: Key) -> Key:
        found = self.key(key)
        if found is None:
            raise FarReachError
        return found

    def _backend(self, number: int) -> int:
        found = self.backend(number)
        if found < 0 <= number:
            raise FarReachError
        return found

    def _name(self, memory: str) -> str:
        found = self.names.get(memory)
        if found is None:
            raise FarReachError
        return found

    def _copy(self, copy: Copy) -> Copy:
        root_key = None if copy.root_key is None else self._certain(copy.root_key)
        return replace(copy, key=self._certain(copy.key), root_key=root_key, backend=self._backend(copy.backend))

    def held(self, held: Iterable[Held]) -> tuple[Held, ...]:
        """Return what lies in buffers by its names in the other segment."""
        return tuple(
            [
                (found, self._name(memory), offset, size)
                for key, memory, offset, size in held
                if (found := self.key(key)) is not None
            ]
        )

    def _filled(self, state: Filled) -> Filled:
        buffers = tuple((self._name(memory), *blocks) for memory, *blocks in state.buffers)
        return Filled(buffers, self.held(state.held))  # type: ignore[arg-type]


@lru_cache(maxsize=_MOST_MAPS)
def backend_map(
    names: tuple[str, ...], memories: tuple[str, ...], to_names: tuple[str, ...], to: tuple[str, ...]
) -> BackendMap:
    """Return the way from a segment, given the names of its memories there and what they really are, to another."""
    numbers = tuple(to.index(memory) if memory in to else -1 for memory in memories)
    return BackendMap(
        numbers, {name: to_names[number] for name, number in zip(names, numbers, strict=True) if number >= 0}
    )
