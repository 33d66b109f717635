"""Sounds in a real child: their embeddings are part of the prompt, cached, saved and cancelled with it."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from engine.planning.memory.backends import HOST_RULE
from engine.planning.memory.side_files import read_projector
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.settings.sampling_settings import SamplingSettings
from engine.runtime.protocol.messages import (
    Counted,
    Failure,
    Generated,
    LoadedModel,
    Piece,
    Probed,
    Rendered,
    SequenceRestored,
    SequenceSaved,
)
from engine.runtime.protocol.requests import (
    ChatMessage,
    CountTokens,
    Generate,
    Load,
    MediaFile,
    Probe,
    ProjectorFile,
    RenderTemplate,
    RestoreSequence,
    SaveSequence,
    Stop,
)
from tests.engine.runtime.child.raw_child import RawChild, entries
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from tests.support.pictures import image_file, picture
from tests.support.side_models import EarKind, write_tiny_ear, write_tiny_projector
from tests.support.sounds import flac, silent_mp3, sound_file, tone

CONTEXT = ContextSettings(n_ctx=1024, n_batch=64, n_ubatch=64, n_seq_max=2, kv_unified=True, threads=1)
ONE, OTHER = sound_file(tone(1)), sound_file(tone(2))
KINDS: tuple[EarKind, ...] = ("gemma4ua", "ultravox")
NUMBERS = itertools.count(1)
"""Of requests to the one child of these tests."""
TOKENS = {"gemma4ua": 10, "ultravox": 375}
"""Of 400 ms: 640 samples are a token; or half a minute, 3,000 frames, by 2 and then by 4."""
HOLDER = """
import os, signal, sys
from pathlib import Path
if "engine.runtime.media.sounds.recordings" in sys.orig_argv and Path({held!r}).exists():
    Path({begun!r}).write_text(str(os.getpid()))
    signal.pause()
"""
"""Runs before all else in each of our children: a decoder of sounds does nothing for ever while the file lies there."""


class Decoders:
    """Decoders of sounds that are begun while they are held come to no end by themselves."""

    def __init__(self, folder: Path) -> None:
        self._held, self._begun = folder / "held", folder / "begun"
        (folder / "sitecustomize.py").write_text(HOLDER.format(held=str(self._held), begun=str(self._begun)))
        self._held.touch()

    def release(self) -> None:
        """Let those go on that are begun from now on."""
        self._held.unlink()

    def begun(self) -> psutil.Process:
        """Wait for one and return it."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not (self._begun.exists() and self._begun.read_text()):
            assert time.monotonic() < deadline_s, "no decoder was started"
            threading.Event().wait(0.01)
        return psutil.Process(int(self._begun.read_text()))


@pytest.fixture
def held_decoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Decoders:
    folder = tmp_path / "decoders"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    return Decoders(folder)


@pytest.fixture(scope="module")
def child() -> Iterator[RawChild]:
    with RawChild() as child:
        yield child


def load(child: RawChild, folder: Path, projector: Path | None, *, architecture: str = "llama") -> LoadedModel:
    file = None
    if projector is not None:
        header = read_projector(projector)
        file = ProjectorFile(str(projector), "CPU", header.weights_bytes(HOST_RULE), header.plain_bytes)
    sections = {"qwen2vl.rope.dimension_sections": [2, 3, 3, 0]} if architecture == "qwen2vl" else {}
    model = write_tiny_llama(folder / f"{architecture}.gguf", architecture=architecture, extra_metadata=sections)
    loaded = child.ask(Load(path=str(model), devices=(), parameters=entries(), context=CONTEXT, projector=file))
    assert isinstance(loaded, LoadedModel), loaded
    return loaded


def question(*media: MediaFile, text: str = "What?", before: tuple[ChatMessage, ...] = ()) -> Generate:
    messages = (*before, ChatMessage("user", text, media))
    sampling = SamplingSettings(max_tokens=8, temperature=0.0, alternatives=1)
    return Generate(id=next(NUMBERS), messages=messages, sampling=sampling)


def chances(child: RawChild) -> tuple[float, ...]:
    """How probable the tokens of the last answer were: words may be the same by chance, these are not."""
    return tuple(each.probability for piece in child.heard if isinstance(piece, Piece) for each in piece.choices)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_is_part_of_the_prompt_and_stays_cached(child: RawChild, tmp_path: Path, kind: EarKind) -> None:
    load(child, tmp_path, write_tiny_ear(tmp_path / "ear.gguf", kind=kind))
    counted = child.ask(CountTokens(id=next(NUMBERS), media=(msgspec.structs.replace(ONE, data=b""),)))
    first, done = child.generated(question(ONE))
    of_one = chances(child)
    child.generated(question(OTHER))
    of_other = chances(child)
    again, cached = child.generated(question(ONE))
    longer = (ChatMessage("user", "What?", (ONE,)), ChatMessage("assistant", first))
    _, later = child.generated(question(text="And now?", before=longer))
    _, plain = child.generated(question())
    assert isinstance(counted, Counted)
    assert TOKENS[kind] <= counted.media[0] < TOKENS[kind] + 20, "with the marks around it, letter by letter"
    assert done.prompt_tokens == plain.prompt_tokens + counted.media[0]
    assert done.evaluated_tokens == done.prompt_tokens
    assert first == again
    assert len({of_one, of_other, chances(child)}) == 3
    assert cached.cached_tokens == cached.prompt_tokens - 1
    assert later.cached_tokens >= done.prompt_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_dry_run_tells_what_a_load_takes(child: RawChild, tmp_path: Path, kind: EarKind) -> None:
    path = write_tiny_ear(tmp_path / "ear.gguf", kind=kind)
    header = read_projector(path)
    file = ProjectorFile(str(path), "CPU", header.weights_bytes(HOST_RULE), header.plain_bytes)
    loaded = load(child, tmp_path, path)
    model = str(tmp_path / "llama.gguf")
    probed = child.ask(Probe(path=model, devices=(), parameters=entries(), context=CONTEXT, projector=file))
    assert isinstance(probed, Probed), probed
    dry, real = ([part for part in parts if part.buffer_type == "projector"] for parts in (probed.parts, loaded.parts))
    assert sum(part.compute_bytes for part in dry) == sum(part.compute_bytes for part in real) > 0
    assert sum(part.weights_bytes for part in real) == file.weights_bytes


def test_one_projector_may_see_and_hear(child: RawChild, tmp_path: Path) -> None:
    path = write_tiny_projector(tmp_path / "both.gguf", hears=True)
    loaded = load(child, tmp_path, path)
    header = read_projector(path)
    assert (header.sees, header.hears) == (True, True)
    weights_bytes = sum(part.weights_bytes for part in loaded.parts if part.buffer_type == "projector")
    assert weights_bytes == header.weights_bytes(HOST_RULE)
    image = image_file(picture())
    counted = child.ask(CountTokens(id=next(NUMBERS), media=(image, ONE)))
    _, done = child.generated(question(image, ONE))
    _, plain = child.generated(question())
    assert isinstance(counted, Counted)
    assert done.prompt_tokens == plain.prompt_tokens + sum(counted.media)


def test_positions_of_a_sound_go_on_in_all_directions(child: RawChild, tmp_path: Path) -> None:
    load(child, tmp_path, write_tiny_ear(tmp_path / "ear.gguf"), architecture="qwen2vl")
    first, done = child.generated(question(ONE))
    again, cached = child.generated(question(ONE))
    assert first == again
    assert done.generated_tokens
    assert cached.cached_tokens == done.prompt_tokens - 1


def test_all_forms_of_a_sound_are_heard_alike(child: RawChild, tmp_path: Path) -> None:
    load(child, tmp_path, write_tiny_ear(tmp_path / "ear.gguf"))
    said = [child.generated(question(ONE))[0], child.generated(question(sound_file(flac(1))))[0]]
    _, done = child.generated(question(sound_file(silent_mp3(), 522)))
    assert said[0] == said[1]
    assert done.generated_tokens


def test_long_sounds_are_read_in_parts(child: RawChild, tmp_path: Path) -> None:
    long = sound_file(tone(3, 31_000, rate=8_000), 31_000)
    load(child, tmp_path, write_tiny_ear(tmp_path / "ear.gguf", kind="ultravox"))
    _, done = child.generated(question(long))
    counted = child.ask(CountTokens(id=next(NUMBERS), media=(long, ONE)))
    _, cached = child.generated(question(long))
    assert isinstance(counted, Counted)
    assert counted.media == (2 * TOKENS["ultravox"], TOKENS["ultravox"])
    assert done.prompt_tokens > counted.media[0]
    assert cached.cached_tokens == done.prompt_tokens - 1


def test_what_is_cached_of_sounds_is_kept_and_restored(child: RawChild, tmp_path: Path) -> None:
    projector = write_tiny_ear(tmp_path / "ear.gguf")
    other = write_tiny_ear(tmp_path / "other.gguf", seed=9)
    kept = str(tmp_path / "kept.state")
    load(child, tmp_path, projector)
    asked = question(ONE, OTHER)
    first, done = child.generated(asked)
    assert isinstance(child.ask(SaveSequence(id=next(NUMBERS), path=kept, of=asked.id)), SequenceSaved)
    load(child, tmp_path, projector)
    assert isinstance(child.ask(RestoreSequence(id=next(NUMBERS), path=kept)), SequenceRestored)
    again, cached = child.generated(question(ONE, OTHER))
    load(child, tmp_path, other)
    refused = child.ask(RestoreSequence(id=next(NUMBERS), path=kept))
    assert cached.cached_tokens == done.prompt_tokens - 1
    assert again == first
    assert isinstance(refused, Failure)
    assert "another projector" in refused.message


def test_what_cannot_hear_says_what_to_do(child: RawChild, tmp_path: Path) -> None:
    eyes = write_tiny_projector(tmp_path / "eyes.gguf")
    for projector in (None, eyes):
        load(child, tmp_path, projector)
        for request in (question(ONE), CountTokens(id=next(NUMBERS), media=(ONE,))):
            refused = child.ask(request)
            assert isinstance(refused, Failure)
            assert "sound, but no projector that reads sound is loaded. Choose the model's projector" in refused.message
        child.generated(question())
    load(child, tmp_path, write_tiny_ear(tmp_path / "ear.gguf"))
    refused = child.ask(question(image_file(picture())))
    assert isinstance(refused, Failure)
    assert "images, but no projector that reads images is loaded" in refused.message


def test_a_damaged_sound_costs_the_question_alone(child: RawChild, tmp_path: Path) -> None:
    damaged = msgspec.structs.replace(ONE, data=b"RIFF" + bytes(400))
    of_another_length = msgspec.structs.replace(OTHER, length_ms=900)
    load(child, tmp_path, write_tiny_ear(tmp_path / "ear.gguf"))
    for sound in (damaged, of_another_length, sound_file(tone(3), 0)):
        refused = child.ask(question(sound))
        assert isinstance(refused, Failure), refused
        assert refused.kind == "argument"
    child.generated(question(ONE))


def test_files_of_one_name_and_two_lengths_are_refused(child: RawChild, tmp_path: Path) -> None:
    longer = msgspec.structs.replace(ONE, length_ms=3_000)
    load(child, tmp_path, write_tiny_ear(tmp_path / "ear.gguf"))
    for sounds in ((longer, ONE), (ONE, longer)):
        refused = child.ask(question(*sounds))
        assert isinstance(refused, Failure), refused
        assert refused.kind == "argument"
        assert "another length than expected; attach it again" in refused.message
    child.generated(question(ONE))


def test_a_name_is_believed_of_its_own_kind_alone(child: RawChild, tmp_path: Path) -> None:
    image = msgspec.structs.replace(image_file(picture()), sha256=ONE.sha256)
    load(child, tmp_path, write_tiny_projector(tmp_path / "both.gguf", hears=True), architecture="qwen2vl")
    for files in ((image, ONE), (ONE, image)):
        _, done = child.generated(question(*files))
        assert done.generated_tokens


def test_a_stop_ends_the_decoding_and_costs_nothing_else(tmp_path: Path, held_decoders: Decoders) -> None:
    with RawChild() as child:
        load(child, tmp_path, write_tiny_ear(tmp_path / "ear.gguf"))
        child.send(question(ONE))
        decoder = held_decoders.begun()
        held_decoders.release()
        child.send(Stop())
        stopped = child.answer()
        assert is_gone(decoder)
        _, done = child.generated(question(ONE))
    assert isinstance(stopped, Generated), stopped
    assert (stopped.stop_reason, stopped.generated_tokens) == ("stopped", 0)
    assert done.generated_tokens


def test_a_stop_of_another_request_does_not_wait_for_the_decoder(tmp_path: Path, held_decoders: Decoders) -> None:
    with RawChild() as child:
        load(child, tmp_path, write_tiny_ear(tmp_path / "ear.gguf"))
        asked, other = question(ONE), question(OTHER)
        child.send(asked)
        held_decoders.begun()
        held_decoders.release()
        child.send(other)
        child.send(Stop(request=other.id))
        said = child.last_words(asked.id, other.id)
    done, stopped = said[asked.id][-1], said[other.id][-1]
    assert isinstance(done, Generated), done
    assert done.generated_tokens
    assert not isinstance(stopped, Generated) or stopped.stop_reason == "stopped"


def test_no_decoder_outlives_the_group_of_its_worker(tmp_path: Path, held_decoders: Decoders) -> None:
    with RawChild(own_group=True) as child:
        load(child, tmp_path, write_tiny_ear(tmp_path / "ear.gguf"))
        child.send(question(ONE))
        decoder = held_decoders.begun()
        os.killpg(child.process.pid, signal.SIGKILL)
        assert child.ended() == -signal.SIGKILL
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_gone(decoder) and time.monotonic() < deadline_s:
        threading.Event().wait(0.01)
    assert is_gone(decoder)


def is_gone(process: psutil.Process) -> bool:
    """Say whether it has ended; nobody may have collected it yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_prompt_says_where_sounds_are(child: RawChild, tmp_path: Path) -> None:
    load(child, tmp_path, write_tiny_ear(tmp_path / "ear.gguf", kind="ultravox"))
    message = ChatMessage("user", "What?", (ONE, OTHER))
    rendered = child.ask(RenderTemplate(id=next(NUMBERS), messages=(message,), tokenise=True))
    assert isinstance(rendered, Rendered)
    assert rendered.text == "<s><|user|>[sound][sound]What?<|end|><|assistant|>"
    assert rendered.pieces.count("[sound]") == 2
    assert rendered.n_tokens == len(rendered.pieces) + 2 * (TOKENS["ultravox"] - 1)
