"""Slots: the sequences of a context with the tokens in their KV cache, and the choice of a slot for a new request."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from msgspec import Struct, field

from engine.runtime.child.generate.checkpoints import (
    MOST,
    Checkpoint,
    CheckpointTaker,
    checkpoint_to_drop,
    next_checkpoint,
)
from engine.runtime.child.load.loaded_context import LoadedContext

MIN_COPIED_TOKENS = 16
"""Smallest number of tokens that copying a prefix must save, because a copy between streams moves a whole KV cache."""
MOST_COPIED_BYTES = 256 << 20
"""Largest recurrent state in bytes that is copied before a batch with drafts, so that rejected drafts can be undone.

Qwen3-Next has 79 MB, and larger hybrid models two to three times as much. The time of the copy is a part of the step's
measured duration, so that `DraftLengths` drafts nothing if the copy takes longer than the drafts save.
"""


class Slot(Struct, eq=False):
    """A slot: one sequence of the context, with its tokens in the KV cache.

    `number`: sequence id in llama.cpp.
    `tokens`: tokens whose KV state is in the cache.
    `of`: id of the request that used the slot last.
    `taken`: whether that request still runs.
    `copy_pending`: whether llama.cpp still has to copy the state from another stream, as part of the next batch.
    `used`: number that grows with each use, to find the least recently used slot.
    `checkpoints`: copies of the slot's state, ascending by tokens.
    `last_checkpoint`: number of tokens at which a checkpoint was taken last, or could not be taken.
    `exact`: number of leading tokens whose state no context shift has changed; None if there was no shift.
    """

    number: int
    tokens: list[int] = field(default_factory=list)
    of: int | None = None
    taken: bool = False
    copy_pending: bool = False
    used: int = 0
    checkpoints: list[Checkpoint] = field(default_factory=list)
    last_checkpoint: int = 0
    exact: int | None = None

    def hold(self, tokens: Sequence[int]) -> None:
        """Set the list of tokens that are in the KV cache now.

        Checkpoints after the common prefix of the old and the new list are dropped.
        """
        kept = common_prefix(self.tokens, tokens)
        self.tokens[:] = tokens
        self.checkpoints[:] = [checkpoint for checkpoint in self.checkpoints if checkpoint.tokens <= kept]
        self.last_checkpoint = self.checkpoints[-1].tokens if self.checkpoints else 0
        if self.exact is not None and len(self.tokens) <= self.exact:
            self.exact = None


class Slots:
    """All slots of a context: assigns them to requests, cuts, copies and empties them, and takes their checkpoints."""

    def __init__(self, loaded: LoadedContext) -> None:
        self._loaded = loaded
        self._use_numbers = count(1)
        self._whole_only = loaded.has_recurrent_state
        self._window = int(loaded.engine.low.llama_model_n_swa(loaded.model))
        self._taker = CheckpointTaker(loaded)
        self._streams = loaded.n_sequences > 1 and not loaded.settings.kv_unified
        self.all = tuple(Slot(number) for number in range(loaded.n_sequences))

    @property
    def free(self) -> list[Slot]:
        return [slot for slot in self.all if not slot.taken]

    def holding(self, request: int) -> Slot | None:
        """Return the slot that still has the tokens of a request; None if another request used or emptied it since."""
        return next((slot for slot in self.all if slot.of == request and slot.tokens), None)

    def take(self, request: int, wanted: Sequence[int]) -> Slot | None:
        """Assign the best free slot to a request and return it; None if there is none.

        The slot's `tokens` are then the cached prefix of `wanted`, which is not computed again. At least the last token
        of `wanted` is left to compute, because its logits are needed.

        A slot whose KV state was read from a file is chosen in the same way, by the length of its common prefix with
        `wanted` (`_usable`). The prefix is short if old messages were left out or the system prompt was changed.
        """
        free = self.free
        if not free:
            return None
        usable = {slot.number: self._usable(slot, wanted) for slot in self.all}
        copyable = {slot.number: usable[slot.number] if self._can_copy_from(slot, wanted) else 0 for slot in self.all}
        nearest = max(free, key=lambda slot: usable[slot.number])
        # If at least half of a slot's tokens are a prefix of the prompt, it is the same conversation and goes on there.
        # Otherwise the slot unused for longest is taken, so that cached conversations live as long as possible.
        goes_on = 2 * usable[nearest.number] >= len(nearest.tokens) > 0
        slot = nearest if goes_on else self._least_used(free)
        donor = max(self.all, key=lambda other: copyable[other.number])
        if copyable[donor.number] >= usable[slot.number] + MIN_COPIED_TOKENS and slot is not donor:
            self._copy(donor, slot, copyable[donor.number])
        else:
            self._cut(slot, usable[slot.number])
        self._mark(slot, request)
        return slot

    def take_free(self, request: int, number: int) -> list[Slot]:
        """Assign up to `number` free slots to a request, the least recently used ones. Empty them, and return them."""
        # The least used ones, in the order of their numbers, which llama.cpp needs in a batch.
        slots = sorted(sorted(self.free, key=_age)[:number], key=lambda slot: slot.number)
        for slot in slots:
            self.empty(slot)
            self._mark(slot, request)
        return slots

    def release(self, slot: Slot) -> None:
        """Mark a slot as free. Its cached tokens stay for later requests."""
        slot.taken = False
        # A copy that was never made (no batch came) has no state to keep.
        if slot.copy_pending:
            self.empty(slot)

    def empty(self, slot: Slot) -> None:
        """Remove all tokens of a slot from the KV cache."""
        if self._loaded.memory:
            self._loaded.engine.low.llama_memory_seq_rm(self._loaded.memory, slot.number, -1, -1)
        slot.hold(())
        slot.copy_pending = False

    def empty_free(self) -> bool:
        """Empty all free slots; return whether any of them had tokens."""
        held = [slot for slot in self.free if slot.tokens]
        for slot in held:
            self.empty(slot)
        return bool(held)

    def empty_all(self) -> None:
        """Empty all slots. Running requests compute their tokens again."""
        self._loaded.clear()
        for slot in self.all:
            slot.hold(())
            slot.copy_pending = False

    def shift(self, slot: Slot, kept: int) -> int:
        """Remove the older half of the tokens after the first `kept`, and move the newer half to the freed positions.

        Return the number of removed tokens; 0 if llama.cpp cannot remove them.
        """
        low, memory, held = self._loaded.engine.low, self._loaded.memory, len(slot.tokens)
        dropped = max(1, (held - kept) // 2)
        if kept + dropped >= held or not low.llama_memory_seq_rm(memory, slot.number, kept, kept + dropped):
            return 0
        low.llama_memory_seq_add(memory, slot.number, kept + dropped, held, -dropped)
        exact = kept if slot.exact is None else min(kept, slot.exact)
        slot.hold([*slot.tokens[:kept], *slot.tokens[kept + dropped :]])
        slot.exact = exact
        return dropped

    def drop_end(self, slot: Slot) -> None:
        """Remove all KV cells after the last token of a slot. Empty the slot if llama.cpp cannot remove them."""
        low, memory = self._loaded.engine.low, self._loaded.memory
        if not low.llama_memory_seq_rm(memory, slot.number, len(slot.tokens), -1):
            self.empty(slot)

    # ------------------------------------------------------------------ drafts

    def can_roll_back(self, slot: Slot) -> bool:
        """Return whether rejected drafts can be removed from a slot, directly or by restoring a copy of its state."""
        if not self._whole_only:
            return True
        return self._taker.size_bytes(slot.number) <= min(MOST_COPIED_BYTES, self._taker.most_bytes)

    def copy_state(self, slot: Slot) -> Checkpoint | None:
        """Return a copy of a slot's state for `roll_back`; None if no copy is needed, or if copying failed."""
        if not self._whole_only:
            return None
        size_bytes = self._taker.size_bytes(slot.number)
        # Host memory may have become short since `can_roll_back`.
        return (
            None if size_bytes > self._taker.most_bytes else self._taker.take(slot.number, len(slot.tokens), size_bytes)
        )

    def roll_back(self, slot: Slot, copy: Checkpoint | None) -> None:
        """Remove rejected drafts, which follow a slot's tokens in the KV cache.

        If llama.cpp cannot remove them, restore `copy` or else the last checkpoint, or empty the slot. The request then
        computes the lost tokens again.
        """
        low, memory, held = self._loaded.engine.low, self._loaded.memory, len(slot.tokens)
        can_cut = not self._whole_only and self._holds_window(slot, held)
        if can_cut and low.llama_memory_seq_rm(memory, slot.number, held, -1):
            return
        kept = [each for each in (*slot.checkpoints, *([] if copy is None else [copy])) if each.tokens <= held]
        if kept and self._taker.restore(slot.number, kept[-1]):
            slot.hold(slot.tokens[: kept[-1].tokens])
        else:
            self.empty(slot)

    def restore_checkpoints(self) -> None:
        """Set every slot back to its last checkpoint, or empty it, after a failed batch with recurrent state."""
        for slot in self.all:
            # llama.cpp would make a pending copy with the next batch, over the restored state.
            checkpoint = slot.checkpoints[-1] if slot.checkpoints and not slot.copy_pending else None
            if checkpoint is not None and self._taker.restore(slot.number, checkpoint):
                slot.hold(slot.tokens[: checkpoint.tokens])
            else:
                self.empty(slot)

    def reconcile(self, slot: Slot, wanted: Sequence[int]) -> None:
        """After a failed or aborted batch, set a slot's tokens to the prefix of `wanted` that is in the KV cache.

        The last token of `wanted` is removed in any case and computed again, because its logits were not used. Drafts
        are removed too.
        """
        memory = self._loaded.memory
        held = int(self._loaded.engine.low.llama_memory_seq_pos_max(memory, slot.number)) + 1
        slot.hold(wanted[: min(held, len(wanted) - 1)])
        slot.copy_pending = False
        if held > len(slot.tokens):
            self.drop_end(slot)

    # ------------------------------------------------------------------ checkpoints

    @property
    def checkpoint_bytes(self) -> int:
        """Host memory taken by all checkpoints, in bytes.

        A checkpoint that two slots share after a copy counts once.
        """
        return sum(each.size_bytes for each in {each for slot in self.all for each in slot.checkpoints})

    def until_checkpoint(self, slot: Slot, missing: int, positions: Sequence[int]) -> int:
        """Return how many of the `missing` tokens may be computed before a checkpoint is due.

        `positions`: token positions in the prompt at which checkpoints are useful.
        """
        if missing <= 1 or not self._taker.is_needed:
            return missing
        held = len(slot.tokens)
        return min(missing, next_checkpoint(held, positions, slot.last_checkpoint, self._taker.spacing) - held)

    def checkpoint_if_due(self, slot: Slot, wanted: Sequence[int], positions: Sequence[int]) -> None:
        """Take a checkpoint of a slot if one is due at its present length.

        `wanted`: all tokens of the slot's request.
        `positions`: token positions in the prompt at which checkpoints are useful (`checkpoint_positions`).
        """
        held = len(slot.tokens)
        if not self._taker.is_needed or _within_image(wanted, held):
            return
        if held not in positions and held < slot.last_checkpoint + self._taker.spacing:
            return
        slot.last_checkpoint = held
        if any(checkpoint.tokens == held for checkpoint in slot.checkpoints):
            return
        # Set above even if no checkpoint follows: otherwise each later batch would end here again.
        size_bytes = self._taker.size_bytes(slot.number)
        if self._make_room(slot, size_bytes) and (taken := self._taker.take(slot.number, held, size_bytes)):
            slot.checkpoints.append(taken)

    def adopt(self, slot: Slot, tokens: Sequence[int], checkpoints: Sequence[Checkpoint]) -> None:
        """Set the tokens of a slot that was restored from a file, and add its checkpoints as far as memory allows."""
        slot.hold(tokens)
        for checkpoint in checkpoints:
            if self._taker.is_needed and self._make_room(slot, checkpoint.size_bytes):
                slot.checkpoints.append(checkpoint)
                slot.last_checkpoint = checkpoint.tokens

    def _make_room(self, slot: Slot, size_bytes: int) -> bool:
        """Drop checkpoints until a new one of `size_bytes` can be added to `slot`.

        The checkpoints of the least recently used slot are dropped first. Return False if the new one alone is larger
        than the memory for all checkpoints; then none is dropped.
        """
        if size_bytes > self._taker.most_bytes:
            return False
        if len(slot.checkpoints) >= MOST:
            del slot.checkpoints[checkpoint_to_drop(slot.checkpoints)]
        while self.checkpoint_bytes + size_bytes > self._taker.most_bytes:
            holders = [other for other in self.all if other.checkpoints]
            poorest = min(holders, key=lambda other: (other is slot, other.used))
            del poorest.checkpoints[checkpoint_to_drop(poorest.checkpoints)]
        return True

    # ------------------------------------------------------------------ beginnings in common

    def _mark(self, slot: Slot, request: int) -> None:
        slot.taken, slot.of, slot.used = True, request, next(self._use_numbers)

    @staticmethod
    def _least_used(slots: Sequence[Slot]) -> Slot:
        return min(slots, key=_age)

    def _usable(self, slot: Slot, wanted: Sequence[int]) -> int:
        # Without the last token, which is computed in any case. If the slot cannot be cut there, its last checkpoint
        # before that place is what it can offer.
        common = common_prefix(slot.tokens, wanted[:-1])
        if slot.exact is not None:
            common = min(common, slot.exact)
        if self._can_cut(slot, common):
            return common
        return max((checkpoint.tokens for checkpoint in slot.checkpoints if checkpoint.tokens <= common), default=0)

    def _can_cut(self, slot: Slot, kept: int) -> bool:
        """Return whether a slot can be cut to its first `kept` tokens without a checkpoint."""
        return kept == len(slot.tokens) or (not self._whole_only and self._holds_window(slot, kept))

    def _can_copy_from(self, slot: Slot, wanted: Sequence[int]) -> bool:
        """Return whether the usable prefix of a slot can be copied to another slot, which is in another stream.

        A prefix that needs a checkpoint for its sliding window cannot be copied: llama.cpp copies between streams only
        when it computes the next batch, and would overwrite the window that was restored from the checkpoint.
        """
        if not (self._streams and self._window > 0):
            return True
        return self._can_cut(slot, common_prefix(slot.tokens, wanted[:-1]))

    def _holds_window(self, slot: Slot, kept: int) -> bool:
        """Return whether a sliding-window cache still has all positions that are needed after the first `kept` tokens.

        The next token attends to these positions.
        """
        if self._window <= 0 or not kept:
            return True
        # The bound of llama.cpp's server (`pos_min_thold`). The position is -1 if the sequence has no cells.
        low, memory = self._loaded.engine.low, self._loaded.memory
        oldest = int(low.llama_memory_seq_pos_min(memory, slot.number))
        return 0 <= oldest <= max(0, kept - self._window)

    def _copy(self, donor: Slot, slot: Slot, kept: int) -> None:
        """Copy the first `kept` tokens of the slot `donor` to `slot`."""
        # Between streams llama_memory_seq_cp asserts that the whole sequence is copied; it is cut afterwards.
        self.empty(slot)
        low, memory = self._loaded.engine.low, self._loaded.memory
        low.llama_memory_seq_cp(memory, donor.number, slot.number, -1, -1)
        slot.hold(donor.tokens)
        slot.checkpoints[:] = donor.checkpoints
        slot.exact = donor.exact
        slot.copy_pending = True
        self._cut(slot, kept)

    def _cut(self, slot: Slot, kept: int) -> None:
        """Cut a slot to its first `kept` tokens, directly or by a checkpoint; empty it if neither is possible."""
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
    """Return the length of the common prefix of two token lists. It never ends within an image or a sound."""
    length = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        length += 1
    while _within_image(other, length):
        length -= 1
    return length


def _within_image(tokens: Sequence[int], index: int) -> bool:
    return 0 < index < len(tokens) and tokens[index] < 0 and tokens[index] == tokens[index - 1]


def _age(slot: Slot) -> tuple[bool, int, int]:
    # Empty slots come first, then the least recently used.
    return bool(slot.tokens), slot.used, slot.number
