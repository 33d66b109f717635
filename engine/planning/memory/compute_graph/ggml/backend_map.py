"""Translation of states between two segments of a layout's graph.

A segment numbers only the backends that matter to it. So the same backend has another index in the next segment, and
its buffer type another name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from engine.planning.memory.compute_graph.ggml.allocator import GallocrState, LiveOut, TensorAlloc
from engine.planning.memory.compute_graph.ggml.scheduler import Copy
from engine.planning.memory.compute_graph.ggml.sections import DistantReadError, Key, stands_for_place

Places = tuple[tuple[Key, int], ...]
"""Backend index of each tensor that a section passes on."""
State = Places | LiveOut | GallocrState
"""A state between two sections: backends of tensors, liveness, or buffers."""
_MOST_MAPS = 4096


@dataclass(frozen=True, slots=True)
class BackendMap:
    """`numbers`: for each backend of one segment its index in the other; -1 if it is not there.
    `names`: the same for names of buffer types. They follow from the indices, so they do not count in comparisons."""

    numbers: tuple[int, ...]
    names: Mapping[str, str] = field(compare=False)

    def of(self, state: State) -> State:
        """Return the state in the other segment.

        Raises:
        DistantReadError: the state needs a backend that is not there.
        """
        if isinstance(state, LiveOut):
            bufts = frozenset(self.names[buft] for buft in state.bufts if buft in self.names)
            return LiveOut(tuple(map(self._copy, state.copies)), self.keys(state.read), bufts)
        if isinstance(state, GallocrState):
            return self._state_of(state)
        return tuple((self._assignable(key), self._backend(backend)) for key, backend in state)

    def backend(self, number: int) -> int:
        """Return the index of a backend, -1 if it is not there."""
        return self.numbers[number] if number >= 0 else -1

    def keys(self, keys: Iterable[Key]) -> frozenset[Key]:
        """Return the names in the other segment, except those that mean nothing there."""
        return frozenset(found for key in keys if (found := self.key(key)) is not None)

    def key(self, key: Key) -> Key | None:
        """Return a name in the other segment, None if it means nothing there."""
        if key[0] == "copy":
            original, backend = self.key(key[1]), self.backend(key[2])  # type: ignore[arg-type]
            return None if original is None or backend < 0 else ("copy", original, backend)
        # Shared weights are named by buffer type, whose name differs between segments. A placeholder refers to a layer
        # and needs no translation.
        if key[0] == "weight" and not stands_for_place(str(key[1])):
            buft = self.names.get(str(key[1]))
            return None if buft is None else ("weight", buft)
        return key

    def _assignable(self, key: Key) -> Key:
        found = self.key(key)
        if found is None:
            raise DistantReadError
        return found

    def _backend(self, number: int) -> int:
        found = self.backend(number)
        # -1 is "not assigned" and stays so. Only a real backend that the other segment lacks is an error.
        if found < 0 <= number:
            raise DistantReadError
        return found

    def _name(self, buft: str) -> str:
        found = self.names.get(buft)
        if found is None:
            raise DistantReadError
        return found

    def _copy(self, copy: Copy) -> Copy:
        base_key = None if copy.base_key is None else self._assignable(copy.base_key)
        return replace(copy, key=self._assignable(copy.key), base_key=base_key, backend=self._backend(copy.backend))

    def held(self, held: Iterable[TensorAlloc]) -> tuple[TensorAlloc, ...]:
        """Return allocated tensors with their names in the other segment."""
        return tuple(
            [
                (found, self._name(buft), offset, size)
                for key, buft, offset, size in held
                if (found := self.key(key)) is not None
            ]
        )

    def _state_of(self, state: GallocrState) -> GallocrState:
        buffers = tuple((self._name(buft), *blocks) for buft, *blocks in state.buffers)
        return GallocrState(buffers, self.held(state.held))  # type: ignore[arg-type]


@lru_cache(maxsize=_MOST_MAPS)
def backend_map(
    names: tuple[str, ...], bufts: tuple[str, ...], to_names: tuple[str, ...], to: tuple[str, ...]
) -> BackendMap:
    """Return the map between two segments, given the names of their buffer types and the real buffer types."""
    numbers = tuple(to.index(buft) if buft in to else -1 for buft in bufts)
    return BackendMap(
        numbers, {name: to_names[number] for name, number in zip(names, numbers, strict=True) if number >= 0}
    )
