"""Saving what is cached of a conversation."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import msgspec

from engine.protocol.messages import SaveSequence, SequenceSaved
from engine.worker.loaded_context import LoadedContext
from engine.worker.media import without_numbers
from engine.worker.outcome import failure
from engine.worker.saved_state import header_of
from engine.worker.sequence_file import KeptCheckpoint, SequenceFileError, SequenceHeader, write_sequence
from engine.worker.slots import Slots
from engine.worker.tasks import TurnTask

KEPT_CHECKPOINTS = 2
"""The last ones, around the last question: what is on the disk is to go on, to be answered anew or asked otherwise."""
WAIT_S = 0.05
"""How long a turn waits for the file where nobody else wants one."""


def begin(session: LoadedContext, slots: Slots, request: SaveSequence) -> Saving:
    """Take the sequence of an ended request out of the memory, and begin to write it.

    Raises:
        EndOfRequest: with a `Failure`: it still runs, or is not cached any more.
    """
    slot = slots.holding(request.of)
    if slot is None:
        raise failure("argument", f"Nothing of request {request.of} is cached any more; ask again and save then.")
    if slot.taken:
        raise failure("argument", f"Request {request.of} is still under way; save it when it has ended.")
    low, context = session.engine.low, session.context
    size_bytes = int(low.llama_state_seq_get_size(context, slot.number))
    state = (ctypes.c_uint8 * size_bytes)()
    if not size_bytes or int(low.llama_state_seq_get_data(context, state, size_bytes, slot.number)) != size_bytes:
        raise failure("internal", "llama.cpp did not give the state of the sequence.")
    tokens, images = without_numbers(session.media, slot.tokens)
    checkpoints = slot.checkpoints[-KEPT_CHECKPOINTS:]
    kept = tuple(KeptCheckpoint(each.tokens, each.size_bytes) for each in checkpoints)
    states = [memoryview(state).cast("B"), *(each.state for each in checkpoints)]
    header = msgspec.structs.replace(header_of(session, len(tokens), size_bytes, "", kept), images=images)
    return Saving(request, tokens, states, header)


class Saving(TurnTask):
    """Digest and file are made in a thread of their own: answers go on meanwhile."""

    def __init__(
        self, request: SaveSequence, tokens: list[int], states: list[memoryview], header: SequenceHeader
    ) -> None:
        super().__init__(request.id)
        self._path, self._tokens, self._states, self._header = Path(request.path), tokens, states, header
        self._written_bytes = 0
        self._fault = ""
        self._thread = threading.Thread(target=self._write, name="save a sequence", daemon=True)
        self._thread.start()

    def turn(self, slots: Slots) -> SequenceSaved | None:
        self._thread.join(0 if any(slot.taken for slot in slots.all) else WAIT_S)
        if self._thread.is_alive():
            return None
        if self._fault:
            raise failure("argument", self._fault)
        return SequenceSaved(request=self.id, tokens=len(self._tokens), size_bytes=self._written_bytes)

    def _write(self) -> None:
        try:
            self._written_bytes = write_sequence(
                self._path,
                self._tokens,
                self._states,
                lambda digest: msgspec.structs.replace(self._header, digest=digest),
            )
        except SequenceFileError as error:
            self._fault = str(error)
