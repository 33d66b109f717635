"""Translates scheduler and allocator states between the layers of two devices, whose lists of backends differ.

ggml's scheduler and allocator are simulated layer by layer. The nodes of one layer are a section of the graph. A state
is what the simulation passes from one section to the next, such as the free blocks of buffers. It contains indices of
backends and names of buffer types.

The sections of one device (`SectionGroup`) have a short list of the backends that their nodes can use. In the list of
the next device, the same backend has another index and its buffer type another name. So a state is translated where
the layers of one device end and those of the next one begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import ClassVar

from msgspec import Struct

from engine.base.values import ComparedWithout, replace
from engine.planning.memory.compute_graph.ggml.allocator import GallocrState, LiveOut, TensorAlloc
from engine.planning.memory.compute_graph.ggml.names import Key, is_placeholder
from engine.planning.memory.compute_graph.ggml.sections import DistantReadError
from engine.planning.memory.compute_graph.ggml.splits import Copy

TensorBackends = tuple[tuple[Key, int], ...]
"""(Name, backend index) of each tensor whose backend the next section of the graph needs."""
State = TensorBackends | LiveOut | GallocrState
"""State of scheduler or allocator: what a pass hands from one section of the graph to the next.

It is the backends of tensors, the tensors that later sections read, or the free blocks of buffers.
"""
_MOST_MAPS = 4096


class BackendMap(ComparedWithout, frozen=True):
    """Translation of backend indices and buffer type names from a first to a second list of backends.

    The first list has the backends that the layers of one device can use, the second list those of another device.

    `numbers`: for each backend in the first list, its index in the second list; -1 if it is not there.
    `names`: name of each buffer type in the second list, by its name in the first list. `==` ignores it, because it
    follows from `numbers`.
    """

    not_compared: ClassVar[str] = "names"
    numbers: tuple[int, ...]
    names: Mapping[str, str]

    def of(self, state: State) -> State:
        """Return `state` with its backend indices, buffer type names and tensor names (`Key`) translated.

        Raises:
            DistantReadError: a backend in `state` is not in the second list of backends.
        """
        if isinstance(state, LiveOut):
            bufts = frozenset(self.names[buft] for buft in state.bufts if buft in self.names)
            return LiveOut(tuple(map(self._copy, state.copies)), self.keys(state.read), bufts)
        if isinstance(state, GallocrState):
            return self._state_of(state)
        return tuple((self._assignable(key), self._backend(backend)) for key, backend in state)

    def backend(self, number: int) -> int:
        """Translate the backend index `number` from the first list of backends to the second; -1 if it is not there."""
        return self.numbers[number] if number >= 0 else -1

    def keys(self, keys: Iterable[Key]) -> frozenset[Key]:
        """Translate names of tensors (`Key`), which may contain a backend index or the name of a buffer type.

        Tensors on backends that are not in the second list are left out.
        """
        return frozenset(found for key in keys if (found := self.key(key)) is not None)

    def key(self, key: Key) -> Key | None:
        """Translate the name of a tensor (`Key`), which may contain a backend index or the name of a buffer type.

        None if the tensor is on a backend that is not in the second list.
        """
        if key[0] == "copy":
            original, backend = self.key(key[1]), self.backend(key[2])  # type: ignore[arg-type]
            return None if original is None or backend < 0 else ("copy", original, backend)
        # Shared weights are named by buffer type, whose name differs between groups. A placeholder refers to a layer
        # and needs no translation.
        if key[0] == "weight" and not is_placeholder(str(key[1])):
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
        # -1 is "not assigned" and stays so. Only a real backend that the other group lacks is an error.
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
        """Return allocated tensors with the names of the tensors (`Key`) and of their buffer types translated.

        Tensors on backends that are not in the second list are left out.
        """
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
    """Return the translation from a first to a second list of backends.

    Each list has the backends that the layers of one device can use. The lists name buffer types by short names of
    their own.

    `names`, `bufts`: short name and real buffer type of each backend in the first list.
    `to_names`, `to`: short name and real buffer type of each backend in the second list.
    """
    numbers = tuple(to.index(buft) if buft in to else -1 for buft in bufts)
    return BackendMap(
        numbers, {name: to_names[number] for name, number in zip(names, numbers, strict=True) if number >= 0}
    )


class SplitState(Struct, frozen=True):
    """State of the scheduler's pass 5, which forms splits, between the nodes of two layers.

    It is the split that may go on in the next layer, and the copies of tensors that were made so far.

    `backend`: index of this split's backend; -1 if there is no split.
    `has_inputs`: whether this split has inputs (copies of tensors on other backends).
    `passing`: names (`Key`) of the copies that only neighbouring layers read: copies of a layer's results.
    `lasting`: (backend index, names of the copies on this backend that any later layer may read), sorted by
    index: copies of the graph's inputs and of shared weights.
    """

    backend: int = -1
    has_inputs: bool = False
    passing: frozenset[Key] = frozenset()
    lasting: tuple[tuple[int, frozenset[Key]], ...] = ()

    def mapped(self, backend_map: BackendMap) -> SplitState:
        """Return this state with its backend indices and tensor names translated by `backend_map`.

        Copies on backends that are not in the second list of `backend_map` are left out.
        """
        lasting = {
            index: backend_map.keys(keys) for old, keys in self.lasting if (index := backend_map.backend(old)) >= 0
        }
        return SplitState(
            backend_map.backend(self.backend), self.has_inputs, backend_map.keys(self.passing), in_order(lasting)
        )


def in_order(lasting: Mapping[int, frozenset[Key]]) -> tuple[tuple[int, frozenset[Key]], ...]:
    """Return the entries of `lasting`, sorted by backend index; entries without names are left out.

    `lasting`: names (`Key`) of the copies on each backend, by backend index.
    """
    return tuple(sorted((index, keys) for index, keys in lasting.items() if keys))
