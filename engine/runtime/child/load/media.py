"""Images and sounds in prompts, through llama.cpp's mtmd: the projector's embeddings take the place of tokens.

In a slot's token list an image is one negative number, repeated for each position that the image takes. With M-RoPE an
image takes fewer positions than KV cells. A sound has one such number, or one for each 30 s. The number identifies what
was computed: projector, file, place in the prompt and size. So cached prefixes with images are compared as token lists.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from engine.runtime.child.load.side_files import Projector
from engine.runtime.child.native.failures import failure
from engine.runtime.media.images.pictures import CHANNELS, MAX_SIDE_PX
from engine.runtime.media.sounds.recordings import MAX_LENGTH_MS, sample_count
from engine.runtime.protocol.requests import ImageFile, MediaFile, SoundFile

TEXT_CHUNK = 0
POSITION_SECTIONS = 4
"""Number of position values of a token with M-RoPE: time, row, column, and one that is not used."""
_FINGERPRINT_BYTES = 1 << 16
_FLOAT_BYTES = 4


class MediaChunk(Struct, frozen=True):
    """An image, a tile of an image, or a stretch of sound in a prompt, which becomes consecutive embeddings.

    `chunk`: index of its mtmd chunk in the prompt.
    `n_positions`: positions that it takes in the sequence.
    `n_cells`: KV cells that it takes.
    `at_once`: whether it must be computed in one batch, because it has non-causal attention.
    """

    file: MediaFile
    chunk: int
    n_positions: int
    n_cells: int
    at_once: bool


class MediaPrompt(Struct, frozen=True):
    """A prompt as tokens, perhaps with images and sounds.

    `text`: the text with a marker for each file; empty if there are no files.
    `add_special`: whether BOS and EOS were added.
    `tokens`: the tokens; an image or sound part is one negative number, repeated for each position that it takes.
    `parts`: the image and sound parts, by their negative numbers.
    """

    text: bytes = b""
    files: tuple[MediaFile, ...] = ()
    add_special: bool = False
    tokens: tuple[int, ...] = ()
    parts: Mapping[int, MediaChunk] = field(default_factory=dict)

    def cells(self, tokens: Sequence[int]) -> int:
        """Return the number of KV cells that `tokens`, a prefix or continuation of this prompt, take."""
        if not self.parts:
            return len(tokens)
        # Each position of a part is one token, so only its further cells are added.
        held = set(tokens)
        return len(tokens) + sum(
            part.n_cells - part.n_positions for number, part in self.parts.items() if number in held
        )


NO_MEDIA = MediaPrompt()


class Embeddings(Struct, frozen=True):
    """The embeddings of a part.

    `rows`: float32 array with one row of `width` numbers for each KV cell.
    `positions`: positions of all rows in the sequence. With M-RoPE a row has four position values: the tuple has the
    first value of all rows, then the second value of all rows, and so on. Otherwise it has one value for each row.
    """

    rows: Any
    width: int
    positions: tuple[tuple[int, ...], ...]


class Media:
    """Turns images and sounds into parts of a prompt and into embeddings, with the loaded projector.

    Use it in the main thread only.
    `width`: number of values in an embedding.
    """

    def __init__(self, projector: Projector, width: int) -> None:
        self._projector = projector
        self._library: Any = projector.library
        self._width = width
        # With other limits the same image has other embeddings.
        self._identity = _fingerprint(projector.path) + projector.limits
        self._counts: dict[tuple[str | int, ...], int] = {}
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []

    @property
    def marker(self) -> str:
        """Text that marks the place of an image or sound in a prompt.

        It is random, so that no message can contain it.
        """
        return self._projector.marker

    @property
    def reads_images(self) -> bool:
        """Whether the projector reads images."""
        return bool(self._library.mtmd_support_vision(self._projector.handle))

    @property
    def reads_sound(self) -> bool:
        """Whether the projector reads sound."""
        return bool(self._library.mtmd_support_audio(self._projector.handle))

    @property
    def sample_rate(self) -> int:
        """Samples per second of the sound that the projector reads; less than 1 if it reads none."""
        return int(self._library.mtmd_get_audio_sample_rate(self._projector.handle))

    def name_of(self, number: int) -> str:
        """Return the name of the image or sound part that a negative token stands for.

        The name consists of projector, file, place in the prompt and size.
        """
        return self._names[-number - 1]

    def number_of(self, name: str) -> int:
        """Return the negative token that stands for the image or sound part with this name.

        A new name gets the next number.
        """
        if name not in self._numbers:
            self._names.append(name)
            self._numbers[name] = -len(self._names)
        return self._numbers[name]

    def was_made_here(self, name: str) -> bool:
        """Return whether the loaded projector has computed the image or sound part with this name."""
        return name.startswith(f"{self._identity}:")

    def prompt(self, text: str, files: Sequence[MediaFile], *, add_special: bool) -> MediaPrompt:
        """Return the prompt of a text that has a marker for each file. No file is decoded.

        `add_special`: whether to add BOS and EOS if the vocabulary requires them.

        Raises:
            RequestError: the projector refuses a file.
        """
        empty = MediaPrompt(text.encode("utf-8", "replace"), tuple(files), add_special)
        tokens: list[int] = []
        parts: dict[int, MediaChunk] = {}
        with self.chunks(empty) as chunks:
            for index in range(self._library.mtmd_input_chunks_size(chunks)):
                chunk = self._library.mtmd_input_chunks_get(chunks, index)
                # mtmd_tokenize gives chunks of text, and one for each image, tile or stretch of sound.
                if self._library.mtmd_input_chunk_get_type(chunk) == TEXT_CHUNK:
                    count = ctypes.c_size_t()
                    found = self._library.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
                    tokens += found[: count.value]
                    continue
                part = self._part(chunk, files[int(self._library.mtmd_input_chunk_get_id(chunk))], index)
                name = f"{self._identity}:{part.file.sha256}:{index}:{part.n_positions}:{part.n_cells}"
                parts[self.number_of(name)] = part
                tokens += [self.number_of(name)] * part.n_positions
        return MediaPrompt(empty.text, empty.files, add_special, tuple(tokens), parts)

    def count(self, file: MediaFile) -> int:
        """Return the number of KV cells that an image or sound takes, together with the tokens that enclose it.

        The result is cached, because the window asks for it while a user types. For a sound, mtmd computes the whole
        spectrum to count the cells.

        Raises:
            RequestError: the projector refuses the file.
        """
        key = identity_of(file)
        if key not in self._counts:
            with self._projector.preparing(file):
                prompt = self.prompt(self.marker, (file,), add_special=False)
            self._counts[key] = prompt.cells(prompt.tokens)
        return self._counts[key]

    def embeddings(self, chunks: Any, part: MediaChunk, position: int) -> Embeddings | None:
        """Compute the embeddings of an image or sound part; return None if the projector failed.

        `chunks`: chunks of the prompt, with the part's file decoded. `position`: first position in the sequence.
        """
        handle = self._projector.handle
        chunk = self._library.mtmd_input_chunks_get(chunks, part.chunk)
        with self._projector.computing():
            if self._library.mtmd_encode_chunk(handle, chunk) != 0:
                return None
        rows = (ctypes.c_float * (part.n_cells * self._width))()
        ctypes.memmove(rows, self._library.mtmd_get_output_embd(handle), _FLOAT_BYTES * len(rows))
        return Embeddings(rows, self._width, self._positions(chunk, part, position))

    @contextmanager
    def chunks(self, prompt: MediaPrompt, file: MediaFile | None = None, decoded: bytes = b"") -> Iterator[Any]:
        """Context manager: yield the chunks of a prompt (`mtmd_input_chunks`), and free them at the end.

        `file`: the image or sound whose content mtmd gets. Other files are placeholders of their size. None: all are.
        `decoded`: the content of `file`: the pixels of an image, or the samples of a sound at the projector's rate.

        Raises:
            RequestError: the projector refuses a file, or the size of `decoded` does not match `file`.
        """
        key = None if file is None else identity_of(file)
        with ExitStack() as stack:
            bitmaps = [
                self._bitmap(stack, index, each, decoded if identity_of(each) == key else b"")
                for index, each in enumerate(prompt.files)
            ]
            pointers = (ctypes.c_void_p * len(bitmaps))(*bitmaps)
            chunks = self._library.mtmd_input_chunks_init()
            stack.callback(self._library.mtmd_input_chunks_free, chunks)
            text = _library_text(self._library, prompt)
            # Without `file` all are placeholders of the same size, under the tokenizer's limit (`prompt_of`).
            with nullcontext() if file is None else self._projector.preparing(file):
                status = self._library.mtmd_tokenize(
                    self._projector.handle, chunks, ctypes.byref(text), pointers, len(bitmaps)
                )
            if status != 0:
                raise failure("argument", "The projector cannot use one of the images or sounds; leave it out.")
            yield chunks

    def _part(self, chunk: Any, file: MediaFile, index: int) -> MediaChunk:
        return MediaChunk(
            file,
            index,
            int(self._library.mtmd_input_chunk_get_n_pos(chunk)),
            int(self._library.mtmd_input_chunk_get_n_tokens(chunk)),
            bool(self._library.mtmd_decode_use_non_causal(self._projector.handle, chunk)),
        )

    def _positions(self, chunk: Any, part: MediaChunk, position: int) -> tuple[tuple[int, ...], ...]:
        count = part.n_cells
        in_turn = tuple(range(position, position + count))
        # As mtmd_helper_decode_image_chunk sets them: one number for each row, or with M-RoPE four sections.
        if not self._library.mtmd_decode_use_mrope(self._projector.handle):
            return (in_turn,)
        if isinstance(part.file, SoundFile):
            return (in_turn,) * POSITION_SECTIONS
        tokens = self._library.mtmd_input_chunk_get_tokens_image(chunk)
        found = [self._library.mtmd_image_tokens_get_decoder_pos(tokens, position, number) for number in range(count)]
        sections = ((each.t, each.y, each.x, each.z) for each in found)
        return tuple(zip(*sections, strict=True))

    def _bitmap(self, stack: ExitStack, index: int, file: MediaFile, decoded: bytes) -> Any:
        bitmap = self._sound(file, decoded) if isinstance(file, SoundFile) else self._image(file, decoded)
        stack.callback(self._library.mtmd_bitmap_free, bitmap)
        self._library.mtmd_bitmap_set_id(bitmap, b"%d" % index)
        return bitmap

    def _image(self, file: ImageFile, pixels: bytes) -> Any:
        if not (0 < file.width_px <= MAX_SIDE_PX and 0 < file.height_px <= MAX_SIDE_PX):
            raise failure("argument", "An image has an invalid size; attach it again.")
        # mtmd_bitmap_init copies as many bytes as the size says, whatever it is given.
        if pixels and len(pixels) != CHANNELS * file.width_px * file.height_px:
            raise failure("argument", "An image has another size than expected; attach it again.")
        copied = (ctypes.c_uint8 * len(pixels)).from_buffer_copy(pixels) if pixels else None
        return self._library.mtmd_bitmap_init(file.width_px, file.height_px, copied)

    def _sound(self, file: SoundFile, samples: bytes) -> Any:
        if not 0 < file.length_ms <= MAX_LENGTH_MS:
            raise failure("argument", "A sound has an invalid length; attach it again.")
        count = sample_count(file.length_ms, self.sample_rate)
        if samples and len(samples) != _FLOAT_BYTES * count:
            raise failure("argument", "A sound has another length than expected; attach it again.")
        copied = (ctypes.c_float * count).from_buffer_copy(samples) if samples else None
        return self._library.mtmd_bitmap_init_from_audio(count, copied)


def identity_of(file: MediaFile) -> tuple[str | int, ...]:
    """Return a key that is equal for equal files: SHA-256, and length of a sound or width and height of an image."""
    if isinstance(file, SoundFile):
        return file.sha256, file.length_ms
    return file.sha256, file.width_px, file.height_px


def without_numbers(media: Media | None, tokens: Sequence[int]) -> tuple[list[int], tuple[str, ...]]:
    """Return a token list for a saved KV state, and the names of the images and sounds in it.

    In `tokens` a negative number stands for an image or sound; the number is valid in this process only. The returned
    list has -1 for the first name, -2 for the second, and so on.
    """
    names: list[str] = []
    numbers: dict[int, int] = {}
    for token in tokens:
        if token < 0 and token not in numbers and media is not None:
            names.append(media.name_of(token))
            numbers[token] = -len(names)
    return [numbers.get(token, token) for token in tokens], tuple(names)


def with_numbers(media: Media | None, tokens: Sequence[int], names: Sequence[str]) -> list[int]:
    """Return the token list of a saved KV state for use in this process.

    In `tokens`, -1 stands for the image or sound with the first of `names`, -2 for the second, and so on. Each is
    replaced by the negative number that stands for this image or sound in this process. The reverse of
    `without_numbers`.
    """
    if media is None or not names:
        return list(tokens)
    numbers = [media.number_of(name) for name in names]
    return [numbers[-token - 1] if token < 0 else token for token in tokens]


def _library_text(library: Any, prompt: MediaPrompt) -> Any:
    return library.mtmd_input_text(prompt.text, len(prompt.text), prompt.add_special, True)


def _fingerprint(path: Path) -> str:
    """Return a digest that identifies a projector's file, from the file's size, its first bytes and its last bytes."""
    # The whole file may have gigabytes; its header, with all metadata, is at the beginning.
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_FINGERPRINT_BYTES))
        size_bytes = path.stat().st_size
        file.seek(max(0, size_bytes - _FINGERPRINT_BYTES))
        digest.update(file.read(_FINGERPRINT_BYTES))
    digest.update(str(size_bytes).encode())
    return digest.hexdigest()[:32]
