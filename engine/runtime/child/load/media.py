"""Images and sounds in prompts, through llama.cpp's mtmd: what a projector makes of them takes the place of tokens.

Among a sequence's tokens an image is a run of one negative number, as long as the positions that it takes: with M-RoPE
they are fewer than its cells in the memory. A sound is one such run, or one for each half a minute. The number stands
for exactly what was read (projector, file, place, size), so that a cached prefix with images is told from another one
as any other is.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.runtime.child.load.side_files import Projector
from engine.runtime.child.native.failures import failure
from engine.runtime.media.images.pictures import CHANNELS, MAX_SIDE_PX
from engine.runtime.media.sounds.recordings import MAX_LENGTH_MS, sample_count
from engine.runtime.protocol.messages import ImageFile, MediaFile, SoundFile

TEXT_CHUNK = 0
POSITION_SECTIONS = 4
"""Of M-RoPE: time, row, column and one that is not used."""
_FINGERPRINT_BYTES = 1 << 16
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A run of embeddings in a prompt: an image, a tile of one, or a stretch of sound. `chunk`: which part of the
    prompt it is.

    `n_positions` of the sequence and `n_cells` of the memory; `at_once`: it cannot be cut into batches.
    """

    file: MediaFile
    chunk: int
    n_positions: int
    n_cells: int
    at_once: bool


@dataclass(frozen=True, slots=True)
class MediaPrompt:
    """A prompt with images and sounds: `parts` by the number that stands for each among the `tokens`."""

    text: bytes = b""
    files: tuple[MediaFile, ...] = ()
    add_special: bool = False
    tokens: tuple[int, ...] = ()
    parts: Mapping[int, MediaPart] = field(default_factory=dict)

    def cells(self, tokens: Sequence[int]) -> int:
        """Return how many cells of the memory a sequence takes that begins like this prompt."""
        if not self.parts:
            return len(tokens)
        held = set(tokens)
        return len(tokens) + sum(
            part.n_cells - part.n_positions for number, part in self.parts.items() if number in held
        )


NO_MEDIA = MediaPrompt()


@dataclass(frozen=True, slots=True)
class Embeddings:
    """What a projector made of a part: rows of so many numbers, and the positions of all rows, section by section."""

    rows: Any
    width: int
    positions: tuple[tuple[int, ...], ...]


class Media:
    """What a loaded projector reads. `width`: numbers of an embedding."""

    def __init__(self, projector: Projector, width: int) -> None:
        self._projector = projector
        self._library: Any = projector.library
        self._width = width
        self._identity = _fingerprint(projector.path)
        self._counts: dict[tuple[str | int, ...], int] = {}
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []

    @property
    def marker(self) -> str:
        """What stands in a text where an image or a sound goes; nobody can guess it."""
        return self._projector.marker

    @property
    def sees(self) -> bool:
        """Whether it reads images, and not only sound."""
        return bool(self._library.mtmd_support_vision(self._projector.handle))

    @property
    def hears(self) -> bool:
        """Whether it reads sound."""
        return bool(self._library.mtmd_support_audio(self._projector.handle))

    @property
    def sample_rate(self) -> int:
        """How many samples of a second it reads; less than 1 where it hears nothing."""
        return int(self._library.mtmd_get_audio_sample_rate(self._projector.handle))

    def name_of(self, number: int) -> str:
        """Return what a negative number among tokens stands for."""
        return self._names[-number - 1]

    def number_of(self, name: str) -> int:
        """Return the number that stands for this."""
        if name not in self._numbers:
            self._names.append(name)
            self._numbers[name] = -len(self._names)
        return self._numbers[name]

    def is_ours(self, name: str) -> bool:
        """Return whether a name is of what this projector read."""
        return name.startswith(f"{self._identity}:")

    def prompt(self, text: str, files: Sequence[MediaFile], *, add_special: bool) -> MediaPrompt:
        """Return the prompt of a text with as many markers as there are files. None is decoded for that.

        Raises:
            EndOfRequest: with a `Failure`, where the projector refuses one.
        """
        empty = MediaPrompt(text.encode("utf-8", "replace"), tuple(files), add_special)
        tokens: list[int] = []
        parts: dict[int, MediaPart] = {}
        with self.chunks(empty) as chunks:
            for place in range(self._library.mtmd_input_chunks_size(chunks)):
                chunk = self._library.mtmd_input_chunks_get(chunks, place)
                if self._library.mtmd_input_chunk_get_type(chunk) == TEXT_CHUNK:
                    count = ctypes.c_size_t()
                    found = self._library.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
                    tokens += found[: count.value]
                    continue
                part = self._part(chunk, files[int(self._library.mtmd_input_chunk_get_id(chunk))], place)
                name = f"{self._identity}:{part.file.sha256}:{place}:{part.n_positions}:{part.n_cells}"
                parts[self.number_of(name)] = part
                tokens += [self.number_of(name)] * part.n_positions
        return MediaPrompt(empty.text, empty.files, add_special, tuple(tokens), parts)

    def count(self, file: MediaFile) -> int:
        """Return how many tokens an image or a sound takes, with the marks around it; raises as `prompt` does.

        It is kept: a sound's spectrum is computed for that, and a window asks at each pause of who types.
        """
        key = identity_of(file)
        if key not in self._counts:
            prompt = self.prompt(self.marker, (file,), add_special=False)
            self._counts[key] = prompt.cells(prompt.tokens)
        return self._counts[key]

    def embeddings(self, chunks: Any, part: MediaPart, position: int) -> Embeddings | None:
        """Have the projector make embeddings of a part of `chunks`, in which its file is decoded; None where it failed.

        `position`: that of the part's beginning in its sequence.
        """
        handle = self._projector.handle
        chunk = self._library.mtmd_input_chunks_get(chunks, part.chunk)
        if self._library.mtmd_encode_chunk(handle, chunk) != 0:
            return None
        rows = (ctypes.c_float * (part.n_cells * self._width))()
        ctypes.memmove(rows, self._library.mtmd_get_output_embd(handle), _FLOAT_BYTES * len(rows))
        return Embeddings(rows, self._width, self._positions(chunk, part, position))

    @contextmanager
    def chunks(self, prompt: MediaPrompt, file: MediaFile | None = None, decoded: bytes = b"") -> Iterator[Any]:
        """Lend the parts of a prompt; only this file has what it holds: pixels, or samples at the projector's rate.

        Raises:
            EndOfRequest: with a `Failure`, where the projector refuses one, or a file is not what is said of it.
        """
        key = None if file is None else identity_of(file)
        with ExitStack() as stack:
            bitmaps = [
                self._bitmap(stack, place, each, decoded if identity_of(each) == key else b"")
                for place, each in enumerate(prompt.files)
            ]
            pointers = (ctypes.c_void_p * len(bitmaps))(*bitmaps)
            chunks = self._library.mtmd_input_chunks_init()
            stack.callback(self._library.mtmd_input_chunks_free, chunks)
            text = _library_text(self._library, prompt)
            status = self._library.mtmd_tokenize(
                self._projector.handle, chunks, ctypes.byref(text), pointers, len(bitmaps)
            )
            if status != 0:
                raise failure("argument", "The projector does not take one of the images or sounds; leave it out.")
            yield chunks

    def _part(self, chunk: Any, file: MediaFile, place: int) -> MediaPart:
        return MediaPart(
            file,
            place,
            int(self._library.mtmd_input_chunk_get_n_pos(chunk)),
            int(self._library.mtmd_input_chunk_get_n_tokens(chunk)),
            bool(self._library.mtmd_decode_use_non_causal(self._projector.handle, chunk)),
        )

    def _positions(self, chunk: Any, part: MediaPart, position: int) -> tuple[tuple[int, ...], ...]:
        count = part.n_cells
        in_turn = tuple(range(position, position + count))
        if not self._library.mtmd_decode_use_mrope(self._projector.handle):
            return (in_turn,)
        if isinstance(part.file, SoundFile):
            return (in_turn,) * POSITION_SECTIONS
        tokens = self._library.mtmd_input_chunk_get_tokens_image(chunk)
        places = [self._library.mtmd_image_tokens_get_decoder_pos(tokens, position, each) for each in range(count)]
        sections = ((place.t, place.y, place.x, place.z) for place in places)
        return tuple(zip(*sections, strict=True))

    def _bitmap(self, stack: ExitStack, place: int, file: MediaFile, decoded: bytes) -> Any:
        bitmap = self._sound(file, decoded) if isinstance(file, SoundFile) else self._image(file, decoded)
        stack.callback(self._library.mtmd_bitmap_free, bitmap)
        self._library.mtmd_bitmap_set_id(bitmap, b"%d" % place)
        return bitmap

    def _image(self, file: ImageFile, pixels: bytes) -> Any:
        if not (0 < file.width_px <= MAX_SIDE_PX and 0 < file.height_px <= MAX_SIDE_PX):
            raise failure("argument", "An image has a size that none can have; attach it again.")
        # the engine copies as much as the size says
        if pixels and len(pixels) != CHANNELS * file.width_px * file.height_px:
            raise failure("argument", "An image has another size than was said; attach it again.")
        copied = (ctypes.c_uint8 * len(pixels)).from_buffer_copy(pixels) if pixels else None
        return self._library.mtmd_bitmap_init(file.width_px, file.height_px, copied)

    def _sound(self, file: SoundFile, samples: bytes) -> Any:
        if not 0 < file.length_ms <= MAX_LENGTH_MS:
            raise failure("argument", "A sound has a length that none can have; attach it again.")
        count = sample_count(file.length_ms, self.sample_rate)
        if samples and len(samples) != _FLOAT_BYTES * count:
            raise failure("argument", "A sound has another length than was said; attach it again.")
        copied = (ctypes.c_float * count).from_buffer_copy(samples) if samples else None
        return self._library.mtmd_bitmap_init_from_audio(count, copied)


def identity_of(file: MediaFile) -> tuple[str | int, ...]:
    """Return what is said of a file, by which it is the same as another: its SHA-256, and its length or its sides."""
    if isinstance(file, SoundFile):
        return file.sha256, file.length_ms
    return file.sha256, file.width_px, file.height_px


def without_numbers(media: Media | None, tokens: Sequence[int]) -> tuple[list[int], tuple[str, ...]]:
    """Return tokens in which images are numbered anew, and what -1, -2... stand for then: for a file."""
    names: list[str] = []
    numbers: dict[int, int] = {}
    for token in tokens:
        if token < 0 and token not in numbers and media is not None:
            names.append(media.name_of(token))
            numbers[token] = -len(names)
    return [numbers.get(token, token) for token in tokens], tuple(names)


def with_numbers(media: Media | None, tokens: Sequence[int], names: Sequence[str]) -> list[int]:
    """Return tokens as `without_numbers` took them."""
    if media is None or not names:
        return list(tokens)
    numbers = [media.number_of(name) for name in names]
    return [numbers[-token - 1] if token < 0 else token for token in tokens]


def _library_text(library: Any, prompt: MediaPrompt) -> Any:
    return library.mtmd_input_text(prompt.text, len(prompt.text), prompt.add_special, True)


def _fingerprint(path: Path) -> str:
    """Return what tells a projector's file from others: a digest of its size and both ends."""
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_FINGERPRINT_BYTES))
        size_bytes = path.stat().st_size
        file.seek(max(0, size_bytes - _FINGERPRINT_BYTES))
        digest.update(file.read(_FINGERPRINT_BYTES))
    digest.update(str(size_bytes).encode())
    return digest.hexdigest()[:32]
