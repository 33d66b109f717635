"""Encodes images and sounds of a prompt, and decodes their embeddings into the KV cache, part by part."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from typing import Any

from engine.base.errors import ChatError
from engine.runtime.child.load.loaded_context import ABORTED, DECODED, LoadedContext
from engine.runtime.child.load.media import NO_MEDIA, Embeddings, Media, MediaChunk, MediaPrompt, identity_of
from engine.runtime.child.native.failures import failure
from engine.runtime.child.native.stop import StopFlag
from engine.runtime.media.images.pictures import pixels_of
from engine.runtime.media.sounds.recordings import samples_of
from engine.runtime.protocol.requests import SoundFile

_FLOAT_BYTES = ctypes.sizeof(ctypes.c_float)


class MediaReader:
    """Encodes images and sounds of one prompt, and decodes their embeddings into the KV cache.

    A file whose embeddings are all in the KV cache already is not decoded.
    """

    def __init__(self, loaded: LoadedContext, prompt: MediaPrompt = NO_MEDIA) -> None:
        self._loaded = loaded
        self.prompt = prompt
        self._lent = ExitStack()
        self._lent_for: tuple[str | int, ...] = ()
        self._chunks: Any = None
        self._last_chunk = max((part.chunk for part in prompt.parts.values()), default=0)

    def read(self, part: MediaChunk, position: int, sequence: int, stop: StopFlag) -> int:
        """Encode an image or sound part, decode its embeddings at the end of a sequence, and return the status of
        llama_decode.

        The status is `ABORTED` if any request was stopped during the call. Call again with the same
        part if the stopped request was another one.

        `position`: position of the part's first token in the sequence.

        Raises:
            RequestError: the image or sound cannot be read.
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
        # Some projectors (Gemma 3) need non-causal attention within an image, as in mtmd_helper_decode_image_chunk.
        if part.at_once:
            low.llama_set_causal_attn(self._loaded.context, False)
        try:
            return self._append(part, made, sequence)
        finally:
            if part.at_once:
                low.llama_set_causal_attn(self._loaded.context, True)

    def _append(self, part: MediaChunk, made: Embeddings, sequence: int) -> int:
        size = self._loaded.decoded_tokens
        for begin in range(0, part.n_cells, size):
            end = min(begin + size, part.n_cells)
            status = self._loaded.compute(_batch(self._loaded.engine.low, made, begin, end, sequence))
            if status != DECODED:
                return status
        if part.chunk == self._last_chunk:
            # The decoded files are not needed any more, and a sound of minutes takes much memory.
            self.free()
        return DECODED

    def _chunks_with(self, media: Media, part: MediaChunk, stop: StopFlag) -> Any:
        """Decode the file of `part`, and return the prompt's mtmd chunks with it; None if a stop came meanwhile.

        The decoded file is kept until a part of another file is read, so several parts of one file decode it once.
        """
        if identity_of(part.file) != self._lent_for:
            self.free()
            decoded = _decoded(media, part, stop)
            if decoded is None:
                return None
            self._chunks = self._lent.enter_context(media.chunks(self.prompt, part.file, decoded))
            self._lent_for = identity_of(part.file)
        return self._chunks

    def free(self) -> None:
        """Free the decoded file and the chunks."""
        self._lent.close()
        self._lent_for = ()


def _decoded(media: Media, part: MediaChunk, stop: StopFlag) -> bytes | None:
    file = part.file
    if not file.data:
        raise failure(
            "internal", "An image or a sound was not sent with the question; load the model again, then ask again."
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
        raise failure("argument", "An image has another size than expected; attach it again.")
    return picture.pixels


def _batch(low: Any, made: Embeddings, begin: int, end: int, sequence: int) -> Any:
    """Return a `llama_batch` of embedding rows `begin` to `end`. ctypes keeps the arrays alive with the batch.

    `low`: the module `llama_cpp.llama_cpp`.
    `made`: the embeddings of an image, a tile of one, or a stretch of sound.
    """
    count = end - begin
    positions = (ctypes.c_int32 * (count * len(made.positions)))(
        *(position for section in made.positions for position in section[begin:end])
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
        # No logits: text always follows an image (see `read_prompt`).
        logits=(ctypes.c_int8 * count)(),
    )
