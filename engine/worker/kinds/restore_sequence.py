"""Restoring a saved conversation into a slot, as a prefix for what comes."""

from __future__ import annotations

import ctypes
from pathlib import Path

from engine.protocol.messages import RestoreSequence, SequenceRestored
from engine.worker.checkpoints import Checkpoint
from engine.worker.loaded_context import LoadedContext
from engine.worker.media import with_numbers
from engine.worker.outcome import failure
from engine.worker.saved_state import refusal
from engine.worker.sequence_file import SequenceFileError, SequenceReader
from engine.worker.slots import Slot, Slots
from engine.worker.tasks import TurnTask


def begin(session: LoadedContext, request: RestoreSequence) -> Restoring:
    """Return the work, once the header says that the file suits.

    Raises:
        EndOfRequest: with a `Failure`: the file is none of ours, is damaged, or of another model or other cache types.
    """
    if not session.makes_text:
        raise failure("argument", "This model does not continue text, so no sequence can be restored.")
    reader = SequenceReader(Path(request.path))
    try:
        header = reader.header()
        refused = refusal(session, header)
    except SequenceFileError as error:
        raise failure("argument", str(error)) from None
    if refused is not None:
        raise failure("argument", f"{Path(request.path).name} cannot be restored. {refused}")
    return Restoring(session, request, reader, header.images)


class Restoring(TurnTask):
    """One turn in one slot."""

    wants = 1

    def __init__(
        self, session: LoadedContext, request: RestoreSequence, reader: SequenceReader, images: tuple[str, ...]
    ) -> None:
        super().__init__(request.id)
        self._session = session
        self._reader = reader
        self._images = images
        self._name = Path(request.path).name

    def turn(self, slots: Slots) -> SequenceRestored:
        try:
            tokens, state, checkpoints = self._reader.content()
        except SequenceFileError as error:
            raise failure("argument", str(error)) from None
        size = self._session.vocabulary_size
        if not all(-len(self._images) <= token < size for token in tokens):
            raise failure("argument", f"{self._name} is damaged: it holds tokens that the model does not have.")
        (slot,) = self.slots
        if not self._restore(slot, state, len(tokens)):
            # what of it has reached the memory cannot be told
            slots.empty_all()
            reason = self._session.log.facts.reason() or "no reason was given"
            raise failure("argument", f"llama.cpp does not take the state in {self._name}: {reason}.")
        numbered = with_numbers(self._session.media, tokens, self._images)
        slots.take_over(slot, numbered, [Checkpoint(count, memoryview(kept)) for count, kept in checkpoints])
        return SequenceRestored(request=self.id, tokens=len(tokens))

    def _restore(self, slot: Slot, state: bytes, count: int) -> bool:
        low, session = self._session.engine.low, self._session
        session.log.begin_computation(lambda _failed: None)
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        taken = int(low.llama_state_seq_set_data(session.context, buffer, len(state), slot.number))
        if taken != len(state):
            return False
        first = int(low.llama_memory_seq_pos_min(session.memory, slot.number))
        last = int(low.llama_memory_seq_pos_max(session.memory, slot.number))
        return 0 <= first <= last == count - 1
