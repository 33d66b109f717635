"""How often llama.cpp is asked to encode an image or a sound, and how long it holds one.

Neither can be seen from outside, so a preloaded library records the calls.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

from engine.runtime.child.generate.media_reader import MediaReader
from engine.runtime.child.load.largest_media import ProjectorLimits
from engine.runtime.child.load.loaded_context import DECODED, LoadedContext
from engine.runtime.child.load.media import Media, MediaPrompt
from engine.runtime.child.load.side_files import Projector
from engine.runtime.child.native import failures
from engine.runtime.child.native.failures import RequestError, StepLimit
from engine.runtime.child.native.stop import StopFlag
from engine.runtime.protocol.requests import MediaFile, SoundFile
from tests.support.pictures import image_file, picture
from tests.support.sounds import RATE, sound_file, tone

AUDIO_CHUNK = 2
SOUND, IMAGE = sound_file(tone()), image_file(picture())


class Library:
    """As much of mtmd as is called here: each file of a prompt is one part of one token. `calls` by name."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._ids: list[bytes] = []
        self._output = (ctypes.c_float * 1)()

    def __getattr__(self, name: str) -> Any:
        def note(*_: object) -> int:
            self.calls[name] += 1
            return 0

        return note

    def mtmd_get_audio_sample_rate(self, _: int) -> int:
        return RATE

    def mtmd_bitmap_set_id(self, _: object, name: bytes) -> None:
        self._ids.append(name)

    def mtmd_input_chunks_init(self) -> int:
        self.calls["mtmd_input_chunks_init"] += 1
        return 1

    def mtmd_input_chunks_size(self, _: object) -> int:
        return len(self._ids)

    def mtmd_input_chunks_free(self, _: object) -> None:
        self.calls["mtmd_input_chunks_free"] += 1
        self._ids.clear()

    def mtmd_input_chunks_get(self, _: object, place: int) -> int:
        return place

    def mtmd_input_chunk_get_type(self, _: int) -> int:
        return AUDIO_CHUNK

    def mtmd_input_chunk_get_id(self, place: int) -> bytes:
        return self._ids[place]

    def mtmd_input_chunk_get_n_pos(self, _: int) -> int:
        return 1

    def mtmd_input_chunk_get_n_tokens(self, _: int) -> int:
        return 1

    def mtmd_get_output_embd(self, _: int) -> Any:
        return self._output

    def mtmd_input_text(self, *_: object) -> Any:
        return ctypes.c_int()


def media_with(library: Library, folder: Path) -> Media:
    path = folder / "projector"
    path.write_bytes(b"GGUF")
    return Media(Projector(library, 1, path, "<mark>", None), 1)


def test_a_file_is_counted_once(tmp_path: Path) -> None:
    library = Library()
    media = media_with(library, tmp_path)
    longer, other = sound_file(tone(), 500), sound_file(tone(2))
    for _ in range(3):
        assert [media.count(file) for file in (SOUND, longer, other, IMAGE)] == [1, 1, 1, 1]
    assert library.calls["mtmd_tokenize"] == 4


@pytest.mark.parametrize("file", [SOUND, IMAGE], ids=["sound", "image"])
def test_the_engine_is_handed_as_much_as_it_copies(file: MediaFile, tmp_path: Path) -> None:
    library = Library()
    media = media_with(library, tmp_path)
    with (
        pytest.raises(RequestError, match="than expected; attach it again"),
        media.chunks(MediaPrompt(files=(file,)), file, bytes(12)),
    ):
        raise AssertionError("it was taken")
    assert not library.calls["mtmd_tokenize"]


@pytest.mark.parametrize("file", [SOUND, IMAGE], ids=["sound", "image"])
def test_mtmd_divides_each_file_within_the_limits_of_a_step(file: MediaFile, tmp_path: Path) -> None:
    limits: list[str] = []

    class Bounded(Library):
        def mtmd_tokenize(self, *_: object) -> int:
            limits.append("" if (step := failures._watch._running) is None else step._what)
            return 0

    class Limits:
        def preparing(self, size_bytes: int) -> StepLimit:
            return StepLimit(print, f"{size_bytes} bytes")

    library = Bounded()
    (tmp_path / "projector").write_bytes(b"GGUF")
    projector = Projector(library, 1, tmp_path / "projector", "<mark>", cast(ProjectorLimits, Limits()))
    media = Media(projector, 1)
    media.count(file)
    size_bytes = (
        4 * RATE * file.length_ms // 1000 if isinstance(file, SoundFile) else 3 * file.width_px * file.height_px
    )
    with media.chunks(MediaPrompt(files=(file,)), file, bytes(size_bytes)):
        pass
    assert limits == [f"{size_bytes} bytes"] * 2


class Loaded:
    """What a reader wants of a loaded model: all is computed."""

    decoded_tokens = 8

    def __init__(self, media: Media) -> None:
        self.media = media
        self.engine = self
        self.low = self

    def llama_batch(self, **_: object) -> None:
        return None

    def compute(self, _: object) -> int:
        return DECODED


def test_what_was_decoded_is_held_until_the_last_part_is_read(tmp_path: Path) -> None:
    library = Library()
    media = media_with(library, tmp_path)
    prompt = media.prompt("", (SOUND, SOUND, sound_file(tone(2))), add_special=False)
    reader = MediaReader(cast(LoadedContext, Loaded(media)), prompt)
    held, made = [], []
    for place, part in enumerate(prompt.parts.values()):
        assert reader.read(part, place, 0, StopFlag()) == DECODED
        held.append(library.calls["mtmd_input_chunks_init"] - library.calls["mtmd_input_chunks_free"])
        made.append(library.calls["mtmd_tokenize"])
    assert held == [1, 1, 0]
    assert made == [2, 2, 3], "once for the prompt, and once for each file"
