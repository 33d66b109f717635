"""Reading the images and sounds of one prompt into the memory, part by part, as its turn comes."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from typing import Any

from engine.base.errors import ChatError
from engine.runtime.child.load.loaded_context import ABORTED, DECODED, LoadedContext
from engine.runtime.child.load.media import NO_MEDIA, Embeddings, Media, MediaPart, MediaPrompt, identity_of
from engine.runtime.child.native.failures import failure
from engine.runtime.child.native.stop import StopRequest
from engine.runtime.media.images.pictures import pixels_of
from engine.runtime.media.sounds.recordings import samples_of
from engine.runtime.protocol.messages import SoundFile

_FLOAT_BYTES = ctypes.sizeof(ctypes.c_float)


class MediaReader:
    """One prompt's. A file is decoded by a process of its own, and only where the memory does not hold it."""

    def __init__(self, loaded: LoadedContext, prompt: MediaPrompt = NO_MEDIA) -> None:
        self._loaded = loaded
        self.prompt = prompt
        self._lent = ExitStack()
        self._lent_for: tuple[str | int, ...] = ()
        self._chunks: Any = None
        self._last_chunk = max((part.chunk for part in prompt.parts.values()), default=0)

    def read(self, part: MediaPart, position: int, sequence: int, stop: StopRequest) -> int:
        """Append a part to a sequence; return llama.cpp's status, which is `ABORTED` where a stop came while it was
        decoded, be it another request's: the loop sees to that one, and comes back to this part.

        Raises:
            EndOfRequest: with a `Failure`: the image or sound cannot be read.
        """
        media = self._loaded.media
        assert media is not None
        chunks = self._chunks_with(media, part, stop)
        if chunks is None:
            return ABORTED
        made = media.embeddings(chunks, part, position)
        if stop.requested:
            return ABORTED
        if made is None:
            reason = self._loaded.log.facts.reason() or "no reason was given"
            raise failure("internal", f"The projector could not read an image or a sound: {reason}.")
        low = self._loaded.engine.low
        if part.at_once:
            low.llama_set_causal_attn(self._loaded.context, False)
        try:
            return self._append(part, made, sequence)
        finally:
            if part.at_once:
                low.llama_set_causal_attn(self._loaded.context, True)

    def _append(self, part: MediaPart, made: Embeddings, sequence: int) -> int:
        size = self._loaded.batch_tokens
        for begin in range(0, part.n_cells, size):
            end = min(begin + size, part.n_cells)
            status = self._loaded.compute(_batch(self._loaded.engine.low, made, begin, end, sequence))
            if status != DECODED:
                return status
        if part.chunk == self._last_chunk:
            # the answer may be long, and samples of minutes are many
            self.free()
        return DECODED

    def _chunks_with(self, media: Media, part: MediaPart, stop: StopRequest) -> Any:
        """Return the prompt's parts with what a part's file holds; those of one file come one after another. None: a
        stop came first."""
        if identity_of(part.file) != self._lent_for:
            self.free()
            decoded = _decoded(media, part, stop)
            if decoded is None:
                return None
            self._chunks = self._lent.enter_context(media.chunks(self.prompt, part.file, decoded))
            self._lent_for = identity_of(part.file)
        return self._chunks

    def free(self) -> None:
        """Forget what was decoded."""
        self._lent.close()
        self._lent_for = ()


def _decoded(media: Media, part: MediaPart, stop: StopRequest) -> bytes | None:
    file = part.file
    if not file.data:
        raise failure(
            "internal", "An image or a sound did not come with the question; load the model again, and ask again."
        )
    try:
        if isinstance(file, SoundFile):
            return samples_of(file.data, "A sound", file.length_ms, media.sample_rate, lambda: stop.pending)
        picture = pixels_of(file.data, "An image", lambda: stop.pending)
    except ChatError as error:
        if stop.pending:
            return None
        raise failure("argument", error.summary()) from None
    if (picture.width_px, picture.height_px) != (file.width_px, file.height_px):
        raise failure("argument", "An image has another size than was said; attach it again.")
    return picture.pixels


def _batch(low: Any, made: Embeddings, begin: int, end: int, sequence: int) -> Any:
    """Return a `llama_batch` of these rows. What it points to lives as long as it does."""
    count = end - begin
    positions = (ctypes.c_int32 * (count * len(made.positions)))(
        *(place for section in made.positions for place in section[begin:end])
    )
    sequences = (ctypes.c_int32 * 1)(sequence)
    first = ctypes.cast(sequences, ctypes.POINTER(ctypes.c_int32))
    return low.llama_batch(
        n_tokens=count,
        token=None,
        embd=ctypes.cast(
            ctypes.addressof(made.rows) + begin * made.width * _FLOAT_BYTES, ctypes.POINTER(ctypes.c_float)
        ),
        pos=positions,
        n_seq_id=(ctypes.c_int32 * count)(*([1] * count)),
        seq_id=(ctypes.POINTER(ctypes.c_int32) * count)(*([first] * count)),
        logits=(ctypes.c_int8 * count)(),
    )
