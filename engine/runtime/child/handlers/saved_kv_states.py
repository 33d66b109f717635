"""Handlers of `SaveSequence` and `RestoreSequence`, which write a slot's KV state to a file and read it back.

The parent chooses a file of the same conversation, model and cache types. A restored slot is an ordinary slot with
cached tokens: the next request whose prompt begins with these tokens continues from them (`Slots.take`).
"""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path

from engine.base.units import format_bytes
from engine.base.values import replace
from engine.devices.host_memory import read_host_memory
from engine.runtime.child.generate.checkpoints import Checkpoint
from engine.runtime.child.generate.saved_kv_state import (
    PIECE_BYTES,
    DamagedSequenceError,
    SequenceFileError,
    SequenceHeader,
    SequenceReader,
    StoredCheckpoint,
    header_of,
    loaded_identity,
    refusal,
    write_sequence,
)
from engine.runtime.child.generate.slots import Slot, Slots
from engine.runtime.child.generate.tasks import StandaloneTask
from engine.runtime.child.load.loaded_context import LoadedContext
from engine.runtime.child.load.media import with_numbers, without_numbers
from engine.runtime.child.native.failures import RequestError, failure
from engine.runtime.protocol.messages import Saving, SequenceRestored, SequenceSaved
from engine.runtime.protocol.requests import RestoreSequence, SaveSequence

KEPT_CHECKPOINTS = 2
"""Number of checkpoints saved with a sequence: the last two, before and after the last question.

With them a restored conversation can continue, answer the last question again, or replace it.
"""
WAIT_S = 0.05
"""Seconds for which `run_slice` waits for the writing thread if no other request is running."""
SLICE_S = 0.5
"""Seconds after which a part of restoring ends, so that answers continue and a stop is handled.

Reading 10 GB from a hard disk takes a minute.
"""
SILENT_S = 10.0
"""Longest time in seconds without progress (`PIECE_BYTES`), after which a save fails.

A disk that does not answer may never do so, and a saved KV state is only a cache. An unload, another load and the
closing window wait until all saves have ended, so only this limit ends their wait. Closing a session waits at most
12 s.
"""

_hung: list[threading.Thread] = []
"""Writing threads that made no progress in `SILENT_S`. Each still holds the state that it writes."""


def begin_saving(loaded: LoadedContext, slots: Slots, request: SaveSequence) -> SaveTask:
    """Copy the KV state of an ended request out of the context, and return the task that writes it.

    Raises:
        RequestError: the request still runs, its tokens are no longer cached, its context was shifted, the state is
            larger than the limit of the request, host memory is short, or the disk did not answer an earlier save.
    """
    slot = slots.holding(request.of)
    if slot is None:
        raise failure("argument", f"Nothing of request {request.of} is cached any more; repeat the request, then save.")
    if slot.taken:
        raise failure("argument", f"Request {request.of} is still in progress; save it when it has ended.")
    if slot.exact is not None:
        raise failure(
            "argument",
            f"The context was shifted during request {request.of}, so its KV state does not match its text and is "
            "not saved.",
        )
    if any(thread.is_alive() for thread in _hung):
        raise _no_answer(Path(request.path))
    low, context = loaded.engine.low, loaded.context
    size_bytes = int(low.llama_state_seq_get_size(context, slot.number))
    checkpoints = slot.checkpoints[-KEPT_CHECKPOINTS:]
    whole_bytes = size_bytes + sum(each.size_bytes for each in checkpoints)
    if request.most_bytes is not None and whole_bytes > request.most_bytes:
        raise failure(
            "does_not_fit",
            f"The KV state has {format_bytes(whole_bytes)}, and the limit for saved KV states is "
            f"{format_bytes(request.most_bytes)}; it is not saved.",
        )
    _check_memory(size_bytes, "Saving the KV state")
    state = (ctypes.c_uint8 * size_bytes)()
    if not size_bytes or int(low.llama_state_seq_get_data(context, state, size_bytes, slot.number)) != size_bytes:
        raise failure("internal", "llama.cpp did not give the state of the sequence.")
    # Negative tokens of images count in the order of this process. The file gets numbers of its own, with names.
    tokens, images = without_numbers(loaded.media, slot.tokens)
    kept = tuple(StoredCheckpoint(each.tokens, each.size_bytes) for each in checkpoints)
    states = [memoryview(state).cast("B"), *(each.state for each in checkpoints)]
    header = replace(header_of(loaded, len(tokens), size_bytes, "", kept), images=images)
    return SaveTask(request, tokens, states, header)


class SaveTask(StandaloneTask):
    """Task that writes a saved KV state in a thread of its own, so that answers do not wait for the disk."""

    def __init__(
        self, request: SaveSequence, tokens: list[int], states: list[memoryview], header: SequenceHeader
    ) -> None:
        super().__init__(request.id)
        self._path, self._tokens, self._states, self._header = Path(request.path), tokens, states, header
        self._written_bytes = 0
        # The digest and the disk take each piece.
        self._steps = 2 * sum(-(-len(state) // PIECE_BYTES) for state in states)
        self._steps_done = 0
        self._fault = ""
        self._given_up = False
        self._moved_s = time.monotonic()
        self._thread = threading.Thread(target=self._write, name="save a sequence", daemon=True)
        self._thread.start()

    @property
    def reading(self) -> Saving:
        """Message about the progress of the save."""
        size_bytes = sum(state.nbytes for state in self._states)
        return Saving(
            request=self.id, saved_bytes=size_bytes * self._steps_done // max(self._steps, 1), size_bytes=size_bytes
        )

    def run_slice(self, slots: Slots) -> SequenceSaved | None:
        self._thread.join(0 if any(slot.taken for slot in slots.all) else WAIT_S)
        if self._thread.is_alive():
            if time.monotonic() - self._moved_s > SILENT_S:
                _hung.append(self._thread)
                self._given_up = True
                raise _no_answer(self._path)
            return None
        if self._fault:
            raise failure("argument", self._fault)
        return SequenceSaved(request=self.id, tokens=len(self._tokens), size_bytes=self._written_bytes)

    def free(self) -> None:
        self._given_up = True

    def _write(self) -> None:
        try:
            self._written_bytes = write_sequence(
                self._path,
                self._tokens,
                self._states,
                lambda digest: replace(self._header, digest=digest),
                self._move,
            )
        except SequenceFileError as error:
            self._fault = str(error)

    def _move(self) -> None:
        if self._given_up:
            # The save was reported as failed, so that no file of it may appear later.
            raise SequenceFileError(f"{self._path.name} was given up.")
        self._steps_done += 1
        self._moved_s = time.monotonic()


def _no_answer(path: Path) -> RequestError:
    return failure("argument", f"{path.name} cannot be written: the disk does not answer.")


def _check_memory(size_bytes: int, what: str) -> None:
    """Raise `RequestError` if `size_bytes` of host memory are not free. `what`: what needs them, for the message."""
    free_bytes = read_host_memory().free_bytes
    if size_bytes > free_bytes:
        raise failure(
            "argument",
            f"{what} takes {format_bytes(size_bytes)} of host memory, but {format_bytes(free_bytes)} are free.",
        )


def begin_restoring(loaded: LoadedContext, request: RestoreSequence) -> RestoreTask:
    """Check the header of the file, and return the task that restores it.

    Raises:
        RequestError: with a `Failure`. Kind `model_file`: no load of this model can ever restore the file, because it
            is damaged or belongs to another model. Kind `argument`: a load with other settings, or with more free host
            memory, may restore it.
    """
    if not loaded.makes_text:
        raise failure("argument", "This model does not continue text, so no sequence can be restored.")
    reader = SequenceReader(Path(request.path))
    try:
        header = reader.header()
        refused = refusal(loaded, header)
    except SequenceFileError as error:
        raise _failure_of(error) from None
    if refused is not None:
        kind = "argument" if header.model == loaded_identity(loaded) else "model_file"
        raise failure(kind, f"{Path(request.path).name} cannot be restored. {refused}")
    _check_memory(header.content_bytes, "Restoring the KV state")
    return RestoreTask(loaded, request, reader, header.images)


def _failure_of(error: SequenceFileError) -> RequestError:
    return failure("model_file" if isinstance(error, DamagedSequenceError) else "argument", str(error))


class RestoreTask(StandaloneTask):
    """Task that reads a saved KV state into one slot: between two batches, for about `SLICE_S` seconds at a time."""

    n_slots = 1

    def __init__(
        self, loaded: LoadedContext, request: RestoreSequence, reader: SequenceReader, images: tuple[str, ...]
    ) -> None:
        super().__init__(request.id)
        self._loaded = loaded
        self._reading = reader.content()
        self._images = images
        self._name = Path(request.path).name

    def run_slice(self, slots: Slots) -> SequenceRestored | None:
        until_s = time.monotonic() + SLICE_S
        try:
            while (content := next(self._reading)) is None:
                if time.monotonic() >= until_s:
                    return None
        except SequenceFileError as error:
            raise _failure_of(error) from None
        tokens, state, checkpoints = content
        size = self._loaded.vocabulary_size
        if not all(-len(self._images) <= token < size for token in tokens):
            raise failure("model_file", f"{self._name} is damaged: it contains tokens that the model does not have.")
        (slot,) = self.slots
        if not self._restore(slot, state, len(tokens)):
            # llama_state_seq_set_data may have changed cells before it failed, and does not say which.
            slots.empty_all()
            reason = self._loaded.log.facts.reason() or "no reason was given"
            raise failure("model_file", f"llama.cpp rejects the state in {self._name}: {reason}.")
        numbered = with_numbers(self._loaded.media, tokens, self._images)
        slots.adopt(slot, numbered, [Checkpoint(count, memoryview(kept)) for count, kept in checkpoints])
        return SequenceRestored(request=self.id, tokens=len(tokens))

    def _restore(self, slot: Slot, state: bytearray, count: int) -> bool:
        low, loaded = self._loaded.engine.low, self._loaded
        loaded.log.begin_computation(lambda _failed: None)
        buffer = (ctypes.c_uint8 * len(state)).from_buffer(state)
        taken = int(low.llama_state_seq_set_data(loaded.context, buffer, len(state), slot.number))
        if taken != len(state):
            return False
        # The bytes are untrusted. Positions that do not match the tokens would corrupt later batches.
        first = int(low.llama_memory_seq_pos_min(loaded.memory, slot.number))
        last = int(low.llama_memory_seq_pos_max(loaded.memory, slot.number))
        return 0 <= first <= last == count - 1
