"""Slots: the sequences that the engine's memory keeps apart, and what of a new request one of them holds already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from engine.worker.loaded_context import LoadedContext

MIN_COPIED_TOKENS = 16
"""A shorter prefix is read again rather than copied: one bound is not worth a cache's length of memory traffic."""


@dataclass(eq=False, slots=True)
class Slot:
    """A sequence. `tokens` are those whose state the memory holds, `of` is the request that they came with.

    `copied`: a copy that the engine makes with the next batch; until then its bytes are not there.
    """

    number: int
    tokens: list[int] = field(default_factory=list)
    of: int | None = None
    taken: bool = False
    copied: bool = False
    used: int = 0


class Slots:
    """All slots of a context; `taken` ones belong to a request."""

    def __init__(self, loaded: LoadedContext) -> None:
        self._loaded = loaded
        self._turns = count(1)
        self._whole_only = loaded.has_recurrent_state
        self._window = int(loaded.engine.low.llama_model_n_swa(loaded.model))
        self.all = tuple(Slot(number) for number in range(loaded.n_sequences))

    @property
    def free(self) -> list[Slot]:
        return [slot for slot in self.all if not slot.taken]

    def holding(self, request: int) -> Slot | None:
        """Return the slot with the tokens of a request."""
        return next((slot for slot in self.all if slot.of == request and slot.tokens), None)

    def take(self, request: int, wanted: Sequence[int]) -> Slot | None:
        """Take the slot that suits a request for `wanted` tokens best, None if all are taken.

        Its `tokens` are then the part of them that need not be read; at least the last one must be, for its logits.
        """
        free = self.free
        if not free:
            return None
        usable = {slot.number: self._usable(slot, wanted) for slot in self.all}
        nearest = max(free, key=lambda slot: usable[slot.number])
        # the same conversation goes on there; else the caches of others are kept as long as can be
        goes_on = 2 * usable[nearest.number] >= len(nearest.tokens) > 0
        slot = nearest if goes_on else self._least_used(free)
        donor = max(self.all, key=lambda other: usable[other.number])
        if usable[donor.number] >= usable[slot.number] + MIN_COPIED_TOKENS and slot is not donor:
            self._copy(donor, slot, usable[donor.number])
        else:
            self._cut(slot, usable[slot.number])
        self._mark(slot, request)
        return slot

    def take_free(self, request: int, number: int) -> list[Slot]:
        """Take and empty up to `number` slots, the least used ones."""
        slots = sorted(sorted(self.free, key=_age)[:number], key=lambda slot: slot.number)
        for slot in slots:
            self.empty(slot)
            self._mark(slot, request)
        return slots

    def give_back(self, slot: Slot) -> None:
        """End a request's hold; what is cached stays for later ones."""
        slot.taken = False
        if slot.copied:
            self.empty(slot)

    def empty(self, slot: Slot) -> None:
        """Forget what a slot holds."""
        if self._loaded.memory:
            self._loaded.engine.low.llama_memory_seq_rm(self._loaded.memory, slot.number, -1, -1)
        slot.tokens.clear()
        slot.copied = False

    def empty_free(self) -> bool:
        """Forget what slots without a request hold; returns whether that made room."""
        held = [slot for slot in self.free if slot.tokens]
        for slot in held:
            self.empty(slot)
        return bool(held)

    def empty_all(self) -> None:
        """Forget everything, that of running requests too: they read their tokens again."""
        self._loaded.clear()
        for slot in self.all:
            slot.tokens.clear()
            slot.copied = False

    def forget_end(self, slot: Slot) -> None:
        """Take out of the memory what came after the tokens of a slot; all of it where that cannot be."""
        low, memory = self._loaded.engine.low, self._loaded.memory
        if not low.llama_memory_seq_rm(memory, slot.number, len(slot.tokens), -1):
            self.empty(slot)

    def settle(self, slot: Slot, wanted: Sequence[int]) -> None:
        """Find out how many of the `wanted` tokens a slot holds after a batch that failed or was ended."""
        memory = self._loaded.memory
        held = int(self._loaded.engine.low.llama_memory_seq_pos_max(memory, slot.number)) + 1
        slot.tokens[:] = wanted[:held]
        slot.copied = False

    def _mark(self, slot: Slot, request: int) -> None:
        slot.taken, slot.of, slot.used = True, request, next(self._turns)

    @staticmethod
    def _least_used(slots: Sequence[Slot]) -> Slot:
        return min(slots, key=_age)

    def _usable(self, slot: Slot, wanted: Sequence[int]) -> int:
        common = common_prefix(slot.tokens, wanted[:-1])
        if common == len(slot.tokens):
            return common
        return common if not self._whole_only and self._holds_window(slot, common) else 0

    def _holds_window(self, slot: Slot, kept: int) -> bool:
        """Tell whether a sliding-window cache still has all positions that the token after `kept` looks at."""
        if self._window <= 0 or not kept:
            return True
        low, memory = self._loaded.engine.low, self._loaded.memory
        oldest = int(low.llama_memory_seq_pos_min(memory, slot.number))
        return 0 <= oldest <= max(0, kept - self._window)

    def _copy(self, donor: Slot, slot: Slot, kept: int) -> None:
        """Have a slot begin with what another one holds. Streams of their own can only be copied whole."""
        self.empty(slot)
        low, memory = self._loaded.engine.low, self._loaded.memory
        low.llama_memory_seq_cp(memory, donor.number, slot.number, -1, -1)
        slot.tokens[:] = donor.tokens
        slot.copied = True
        self._cut(slot, kept)

    def _cut(self, slot: Slot, kept: int) -> None:
        """Leave the first `kept` tokens of a slot; none where the memory cannot do that."""
        if kept == len(slot.tokens):
            return
        low, memory = self._loaded.engine.low, self._loaded.memory
        if kept and low.llama_memory_seq_rm(memory, slot.number, kept, -1):
            del slot.tokens[kept:]
        else:
            self.empty(slot)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two texts begin with in common; an image, which is negative numbers, counts whole."""
    length = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        length += 1
    while 0 < length < len(other) and other[length] < 0 and other[length] == other[length - 1]:
        length -= 1
    return length


def _age(slot: Slot) -> tuple[bool, int, int]:
    return bool(slot.tokens), slot.used, slot.number
