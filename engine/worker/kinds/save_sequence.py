"""Saving what is cached of a conversation."""

from __future__ import annotations

import ctypes
from pathlib import Path

from engine.protocol.messages import SaveSequence, SequenceSaved
from engine.worker.loaded_context import LoadedContext
from engine.worker.outcome import failure
from engine.worker.saved_state import header_of
from engine.worker.sequence_file import SequenceFileError, write_sequence
from engine.worker.slots import Slots


def answer(session: LoadedContext, slots: Slots, request: SaveSequence) -> SequenceSaved:
    """Write the sequence of an ended request to a file.

    Raises:
        EndOfRequest: with a `Failure`: it still runs, is not cached any more, or cannot be written.
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
    try:
        written_bytes = write_sequence(
            Path(request.path),
            slot.tokens,
            memoryview(state).cast("B"),
            lambda digest: header_of(session, len(slot.tokens), size_bytes, digest),
        )
    except SequenceFileError as error:
        raise failure("argument", str(error)) from None
    return SequenceSaved(request=request.id, tokens=len(slot.tokens), size_bytes=written_bytes)
