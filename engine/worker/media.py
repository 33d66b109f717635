"""Images in prompts, through llama.cpp's mtmd: what a projector makes of them takes the place of tokens.

Among a sequence's tokens an image is a run of one negative number, as long as the positions that it takes: with M-RoPE
they are fewer than its cells in the memory. The number stands for exactly what was read (projector, file, place, size),
so that a cached prefix with images is told from another one as any other is.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.images.reader import MAX_SIDE_PX
from engine.protocol.messages import ImageFile
from engine.worker.outcome import failure
from engine.worker.side_files import Projector

TEXT_CHUNK, IMAGE_CHUNK = 0, 1
_FINGERPRINT_BYTES = 1 << 16
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class ImagePart:
    """A run of embeddings in a prompt: an image, or a tile of one. `chunk`: which part of the prompt it is.

    `n_positions` of the sequence and `n_cells` of the memory; `at_once`: it cannot be cut into batches.
    """

    image: ImageFile
    chunk: int
    n_positions: int
    n_cells: int
    at_once: bool


@dataclass(frozen=True, slots=True)
class MediaPrompt:
    """A prompt with images: `parts` by the number that stands for each among the `tokens`."""

    text: bytes = b""
    images: tuple[ImageFile, ...] = ()
    add_special: bool = False
    tokens: tuple[int, ...] = ()
    parts: Mapping[int, ImagePart] = field(default_factory=dict)

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
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []

    @property
    def marker(self) -> str:
        """What stands in a text where an image goes; nobody can guess it."""
        return self._projector.marker

    @property
    def sees(self) -> bool:
        """Whether it reads images, and not only sound."""
        return bool(self._library.mtmd_support_vision(self._projector.handle))

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

    def prompt(self, text: str, images: Sequence[ImageFile], *, add_special: bool) -> MediaPrompt:
        """Return the prompt of a text with as many markers as there are images. No pixels are needed for that.

        Raises:
            EndOfRequest: with a `Failure`, where the projector refuses one.
        """
        empty = MediaPrompt(text.encode("utf-8", "replace"), tuple(images), add_special)
        files = {image.sha256: image for image in images}
        tokens: list[int] = []
        parts: dict[int, ImagePart] = {}
        with self._chunks(empty) as chunks:
            for place in range(self._library.mtmd_input_chunks_size(chunks)):
                chunk = self._library.mtmd_input_chunks_get(chunks, place)
                if self._library.mtmd_input_chunk_get_type(chunk) == TEXT_CHUNK:
                    count = ctypes.c_size_t()
                    found = self._library.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
                    tokens += found[: count.value]
                    continue
                sha256 = (self._library.mtmd_input_chunk_get_id(chunk) or b"").decode("ascii", "replace")
                part = self._part(chunk, files[sha256], place)
                name = f"{self._identity}:{sha256}:{place}:{part.n_positions}:{part.n_cells}"
                parts[self.number_of(name)] = part
                tokens += [self.number_of(name)] * part.n_positions
        return MediaPrompt(empty.text, empty.images, add_special, tuple(tokens), parts)

    def count(self, image: ImageFile) -> int:
        """Return how many tokens an image takes, with the marks around it; raises as `prompt` does."""
        prompt = self.prompt(self.marker, (image,), add_special=False)
        return prompt.cells(prompt.tokens)

    def embeddings(self, prompt: MediaPrompt, part: ImagePart, rgb: bytes, position: int) -> Embeddings | None:
        """Have the projector make embeddings of a part, whose image has these pixels; None where it failed.

        `position`: that of the part's beginning in its sequence.
        """
        handle = self._projector.handle
        with self._chunks(prompt, part.image.sha256, rgb) as chunks:
            chunk = self._library.mtmd_input_chunks_get(chunks, part.chunk)
            if self._library.mtmd_encode_chunk(handle, chunk) != 0:
                return None
            rows = (ctypes.c_float * (part.n_cells * self._width))()
            ctypes.memmove(rows, self._library.mtmd_get_output_embd(handle), _FLOAT_BYTES * len(rows))
            return Embeddings(rows, self._width, self._positions(chunk, position, part.n_cells))

    def _part(self, chunk: Any, image: ImageFile, place: int) -> ImagePart:
        return ImagePart(
            image,
            place,
            int(self._library.mtmd_input_chunk_get_n_pos(chunk)),
            int(self._library.mtmd_input_chunk_get_n_tokens(chunk)),
            bool(self._library.mtmd_decode_use_non_causal(self._projector.handle, chunk)),
        )

    def _positions(self, chunk: Any, position: int, count: int) -> tuple[tuple[int, ...], ...]:
        if not self._library.mtmd_decode_use_mrope(self._projector.handle):
            return (tuple(range(position, position + count)),)
        tokens = self._library.mtmd_input_chunk_get_tokens_image(chunk)
        places = [self._library.mtmd_image_tokens_get_decoder_pos(tokens, position, each) for each in range(count)]
        sections = ((place.t, place.y, place.x, place.z) for place in places)
        return tuple(zip(*sections, strict=True))

    @contextmanager
    def _chunks(self, prompt: MediaPrompt, sha256: str = "", rgb: bytes = b"") -> Iterator[Any]:
        """Lend the parts of a prompt; only the image of this SHA-256 has its pixels."""
        with ExitStack() as stack:
            bitmaps = [self._bitmap(stack, image, rgb if image.sha256 == sha256 else b"") for image in prompt.images]
            pointers = (ctypes.c_void_p * len(bitmaps))(*bitmaps)
            chunks = self._library.mtmd_input_chunks_init()
            stack.callback(self._library.mtmd_input_chunks_free, chunks)
            text = _library_text(self._library, prompt)
            status = self._library.mtmd_tokenize(
                self._projector.handle, chunks, ctypes.byref(text), pointers, len(bitmaps)
            )
            if status != 0:
                raise failure("argument", "The projector does not take one of the images; leave it out.")
            yield chunks

    def _bitmap(self, stack: ExitStack, image: ImageFile, rgb: bytes) -> Any:
        pixels = (ctypes.c_uint8 * len(rgb)).from_buffer_copy(rgb) if rgb else None
        if not (0 < image.width_px <= MAX_SIDE_PX and 0 < image.height_px <= MAX_SIDE_PX):
            raise failure("argument", "An image has a size that none can have; attach it again.")
        bitmap = self._library.mtmd_bitmap_init(image.width_px, image.height_px, pixels)
        stack.callback(self._library.mtmd_bitmap_free, bitmap)
        self._library.mtmd_bitmap_set_id(bitmap, image.sha256.encode("ascii", "replace"))
        return bitmap


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
