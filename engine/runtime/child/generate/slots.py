"""Slots: the sequences that the engine's memory keeps apart, and what of a new request one of them holds already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from engine.runtime.child.generate.checkpoints import MOST, Checkpoint, CheckpointTaker, least_missed, next_checkpoint
from engine.runtime.child.load.loaded_context import LoadedContext

MIN_COPIED_TOKENS = 16
"""A shorter prefix is read again rather than copied: one bound is not worth a cache's length of memory traffic."""


@dataclass(eq=False, slots=True)
class Slot:
    """A sequence. `tokens` are those whose state the memory holds, `of` is the request that they came with.

    `copied`: a copy that the engine makes with the next batch; until then its bytes are not there. `checkpoints` are
    of its tokens, from the first on; `checked_at`: after how many of them one was taken last, or could not be.
    """

    number: int
    tokens: list[int] = field(default_factory=list)
    of: int | None = None
    taken: bool = False
    copied: bool = False
    used: int = 0
    checkpoints: list[Checkpoint] = field(default_factory=list)
    checked_at: int = 0

    def hold(self, tokens: Sequence[int]) -> None:
        """Note which tokens the memory holds now: the same as before, or fewer, or others."""
        kept = common_prefix(self.tokens, tokens)
        self.tokens[:] = tokens
        self.checkpoints[:] = [checkpoint for checkpoint in self.checkpoints if checkpoint.tokens <= kept]
        self.checked_at = self.checkpoints[-1].tokens if self.checkpoints else 0


class Slots:
    """All slots of a context; `taken` ones belong to a request."""

    def __init__(self, loaded: LoadedContext) -> None:
        self._loaded = loaded
        self._turns = count(1)
        self._whole_only = loaded.has_recurrent_state
        self._window = int(loaded.engine.low.llama_model_n_swa(loaded.model))
        self._taker = CheckpointTaker(loaded)
        self._streams = loaded.n_sequences > 1 and not loaded.settings.kv_unified
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
        lent = {slot.number: usable[slot.number] if self._lends(slot, wanted) else 0 for slot in self.all}
        nearest = max(free, key=lambda slot: usable[slot.number])
        # the same conversation goes on there; else the caches of others are kept as long as can be
        goes_on = 2 * usable[nearest.number] >= len(nearest.tokens) > 0
        slot = nearest if goes_on else self._least_used(free)
        donor = max(self.all, key=lambda other: lent[other.number])
        if lent[donor.number] >= usable[slot.number] + MIN_COPIED_TOKENS and slot is not donor:
            self._copy(donor, slot, lent[donor.number])
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
        slot.hold(())
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
            slot.hold(())
            slot.copied = False

    def forget_end(self, slot: Slot) -> None:
        """Take out of the memory what came after the tokens of a slot; all of it where that cannot be."""
        low, memory = self._loaded.engine.low, self._loaded.memory
        if not low.llama_memory_seq_rm(memory, slot.number, len(slot.tokens), -1):
            self.empty(slot)

    def go_back(self) -> None:
        """Bring everything back to where it is known to be sound, after a batch that may have harmed every sequence."""
        for slot in self.all:
            checkpoint = slot.checkpoints[-1] if slot.checkpoints and not slot.copied else None
            if checkpoint is not None and self._taker.restore(slot.number, checkpoint):
                slot.hold(slot.tokens[: checkpoint.tokens])
            else:
                self.empty(slot)

    def settle(self, slot: Slot, wanted: Sequence[int]) -> None:
        """Find out how many of the `wanted` tokens a slot holds after a batch that failed or was ended."""
        memory = self._loaded.memory
        held = int(self._loaded.engine.low.llama_memory_seq_pos_max(memory, slot.number)) + 1
        slot.hold(wanted[:held])
        slot.copied = False

    # ------------------------------------------------------------------ checkpoints

    @property
    def checkpoint_bytes(self) -> int:
        """What all checkpoints take of the computer's memory."""
        return sum(each.size_bytes for each in {each for slot in self.all for each in slot.checkpoints})

    def until_checkpoint(self, slot: Slot, missing: int, positions: Sequence[int]) -> int:
        """Return how many of the `missing` tokens may be read before a checkpoint is due."""
        if missing <= 1 or not self._taker.is_needed:
            return missing
        held = len(slot.tokens)
        return min(missing, next_checkpoint(held, positions, slot.checked_at, self._taker.spacing) - held)

    def checkpoint_if_due(self, slot: Slot, wanted: Sequence[int], positions: Sequence[int]) -> None:
        """Take a checkpoint if one is due on the way to `wanted`, but not inside an image, which is read whole."""
        held = len(slot.tokens)
        if not self._taker.is_needed or _within_image(wanted, held):
            return
        if held not in positions and held < slot.checked_at + self._taker.spacing:
            return
        slot.checked_at = held
        if any(checkpoint.tokens == held for checkpoint in slot.checkpoints):
            return
        size_bytes = self._taker.size_bytes(slot.number)
        if self._make_room(slot, size_bytes) and (taken := self._taker.take(slot.number, held, size_bytes)):
            slot.checkpoints.append(taken)

    def take_over(self, slot: Slot, tokens: Sequence[int], checkpoints: Sequence[Checkpoint]) -> None:
        """Note what a slot was given from elsewhere, with as many of its checkpoints as there is room for."""
        slot.hold(tokens)
        for checkpoint in checkpoints:
            if self._taker.is_needed and self._make_room(slot, checkpoint.size_bytes):
                slot.checkpoints.append(checkpoint)
                slot.checked_at = checkpoint.tokens

    def _make_room(self, slot: Slot, size_bytes: int) -> bool:
        """Forget checkpoints until another one of `slot` has room: those of sequences unused for long go first."""
        if size_bytes > self._taker.most_bytes:
            return False
        if len(slot.checkpoints) >= MOST:
            del slot.checkpoints[least_missed(slot.checkpoints)]
        while self.checkpoint_bytes + size_bytes > self._taker.most_bytes:
            holders = [other for other in self.all if other.checkpoints]
            poorest = min(holders, key=lambda other: (other is slot, other.used))
            del poorest.checkpoints[least_missed(poorest.checkpoints)]
        return True

    # ------------------------------------------------------------------ beginnings in common

    def _mark(self, slot: Slot, request: int) -> None:
        slot.taken, slot.of, slot.used = True, request, next(self._turns)

    @staticmethod
    def _least_used(slots: Sequence[Slot]) -> Slot:
        return min(slots, key=_age)

    def _usable(self, slot: Slot, wanted: Sequence[int]) -> int:
        common = common_prefix(slot.tokens, wanted[:-1])
        if self._can_cut(slot, common):
            return common
        return max((checkpoint.tokens for checkpoint in slot.checkpoints if checkpoint.tokens <= common), default=0)

    def _can_cut(self, slot: Slot, kept: int) -> bool:
        """Tell whether a slot can go on after its first `kept` tokens without a checkpoint."""
        return kept == len(slot.tokens) or (not self._whole_only and self._holds_window(slot, kept))

    def _lends(self, slot: Slot, wanted: Sequence[int]) -> bool:
        """Tell whether the usable beginning of a slot can be copied: a copy between caches of their own is made with
        the next batch, and would be over the windows of a checkpoint."""
        if not (self._streams and self._window > 0):
            return True
        return self._can_cut(slot, common_prefix(slot.tokens, wanted[:-1]))

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
        slot.hold(donor.tokens)
        slot.checkpoints[:] = donor.checkpoints
        slot.copied = True
        self._cut(slot, kept)

    def _cut(self, slot: Slot, kept: int) -> None:
        """Leave the first `kept` tokens of a slot; none where the memory cannot do that."""
        if kept == len(slot.tokens):
            return
        low, memory = self._loaded.engine.low, self._loaded.memory
        if not kept:
            done = False
        elif self._can_cut(slot, kept):
            done = bool(low.llama_memory_seq_rm(memory, slot.number, kept, -1))
        else:
            checkpoint = next(each for each in slot.checkpoints if each.tokens == kept)
            done = self._taker.restore(slot.number, checkpoint)
        if done:
            slot.hold(slot.tokens[:kept])
        else:
            self.empty(slot)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two texts begin with in common; an image, which is negative numbers, counts whole."""
    length = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        length += 1
    while _within_image(other, length):
        length -= 1
    return length


def _within_image(tokens: Sequence[int], place: int) -> bool:
    return 0 < place < len(tokens) and tokens[place] < 0 and tokens[place] == tokens[place - 1]


def _age(slot: Slot) -> tuple[bool, int, int]:
    return bool(slot.tokens), slot.used, slot.number
