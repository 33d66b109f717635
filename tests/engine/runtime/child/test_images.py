"""Images in a real child: their embeddings are part of the prompt, cached, saved and cancelled with it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.planning.memory.backends import HOST_RULE
from engine.planning.memory.side_files import read_projector
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.messages import (
    Counted,
    Failure,
    Generated,
    LoadedModel,
    Piece,
    Reading,
    Rendered,
    SequenceRestored,
    SequenceSaved,
)
from engine.runtime.protocol.requests import (
    ChatMessage,
    CountTokens,
    DeviceRef,
    Generate,
    ImageFile,
    Load,
    ProjectorFile,
    RenderTemplate,
    RestoreSequence,
    SaveSequence,
    Stop,
)
from tests.engine.runtime.child.raw_child import RawChild, entries, rpc_workers
from tests.support.models import write_tiny_llama
from tests.support.pictures import image_file, picture
from tests.support.side_models import ProjectorKind, write_tiny_projector

CONTEXT = ContextSettings(n_ctx=512, n_batch=64, n_ubatch=64, n_seq_max=2, kv_unified=True, threads=1)
ONE, OTHER = image_file(picture(1)), image_file(picture(3))
WIDE = image_file(picture(3, (200, 120)), (200, 120))
KINDS: tuple[ProjectorKind, ...] = ("mlp", "gemma3", "qwen2vl_merger")


def write_model(folder: Path, kind: ProjectorKind = "mlp") -> tuple[Path, Path]:
    image_px = 64 if kind == "gemma3" else 16
    projector = write_tiny_projector(folder / f"{kind}.gguf", kind=kind, image_px=image_px)
    if kind == "qwen2vl_merger":
        sections = {"qwen2vl.rope.dimension_sections": [2, 3, 3, 0]}
        # A prompt that is read at once and one that is read in parts differ in the last bits, by processor. With 8
        # layers and seed 0 two tokens are so close that this decides between them; here the answers are the same.
        path = folder / "m.gguf"
        return write_tiny_llama(path, n_layers=4, architecture="qwen2vl", extra_metadata=sections), projector
    return write_tiny_llama(folder / "m.gguf", n_layers=4), projector


def load(
    child: RawChild,
    model: Path,
    projector: Path | None,
    *,
    context: ContextSettings = CONTEXT,
    device: str = "CPU",
    devices: tuple[DeviceRef, ...] = (),
) -> None:
    file = None
    if projector is not None:
        file = ProjectorFile(str(projector), device, read_projector(projector).weights_bytes(HOST_RULE))
    parameters = entries(("W0", 3)) if devices else entries()
    loaded = child.ask(Load(path=str(model), devices=devices, parameters=parameters, context=context, projector=file))
    assert isinstance(loaded, LoadedModel), loaded


def question(number: int, *images: ImageFile, text: str = "What?", before: tuple[ChatMessage, ...] = ()) -> Generate:
    messages = (*before, ChatMessage("user", text, images))
    return Generate(id=number, messages=messages, max_tokens=8, temperature=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_is_part_of_the_prompt_and_stays_cached(tmp_path: Path, kind: ProjectorKind) -> None:
    with RawChild() as child:
        load(child, *write_model(tmp_path, kind))
        counted = child.ask(CountTokens(media=(msgspec.structs.replace(ONE, data=b""),)))
        first, done = child.generated(question(1, ONE))
        said = [each.read_tokens for each in child.heard if isinstance(each, Reading)]
        second, _ = child.generated(question(2, OTHER))
        again, cached = child.generated(question(3, ONE))
        longer = (ChatMessage("user", "What?", (ONE,)), ChatMessage("assistant", first))
        _, later = child.generated(question(4, text="And now?", before=longer))
        without, plain = child.generated(question(5))
    assert isinstance(counted, Counted)
    assert done.prompt_tokens == plain.prompt_tokens + counted.media[0]
    assert done.evaluated_tokens == done.prompt_tokens
    assert said[-1] == done.prompt_tokens
    assert len(said) >= 3, "before the image, with it, behind it"
    assert first == again
    assert len({first, second, without}) == 3
    assert cached.cached_tokens == cached.prompt_tokens - 1
    assert later.cached_tokens >= done.prompt_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_cached_of_images_is_kept_and_restored(tmp_path: Path, kind: ProjectorKind) -> None:
    model, projector = write_model(tmp_path, kind)
    other = write_tiny_projector(tmp_path / "other.gguf", seed=9, kind=kind, image_px=64 if kind == "gemma3" else 16)
    kept = str(tmp_path / "kept.state")
    with RawChild() as child:
        load(child, model, projector)
        first, done = child.generated(question(1, ONE, WIDE))
        assert isinstance(child.ask(SaveSequence(id=2, path=kept, of=1)), SequenceSaved)
    with rpc_workers(None) as (_, refs), RawChild() as child:
        load(child, model, projector, device="W0", devices=refs)
        child.generated(question(3, OTHER))
        assert isinstance(child.ask(RestoreSequence(id=4, path=kept)), SequenceRestored)
        again, cached = child.generated(question(5, ONE, WIDE))
        load(child, model, other)
        refused = child.ask(RestoreSequence(id=6, path=kept))
    assert cached.cached_tokens == done.prompt_tokens - 1
    assert again == first
    assert isinstance(refused, Failure)
    assert "another projector" in refused.message


def test_without_a_projector_there_is_a_sentence(tmp_path: Path) -> None:
    model, _ = write_model(tmp_path)
    with RawChild() as child:
        load(child, model, None)
        for request in (question(1, ONE), CountTokens(id=2, media=(ONE,))):
            refused = child.ask(request)
            assert isinstance(refused, Failure)
            assert "Choose the model's projector" in refused.message
        child.generated(question(3))


def test_an_image_that_cannot_be_cut_wants_a_batch_as_large(tmp_path: Path) -> None:
    with RawChild() as child:
        load(child, *write_model(tmp_path, "gemma3"), context=msgspec.structs.replace(CONTEXT, n_ubatch=2))
        refused = child.ask(question(1, ONE))
        child.generated(question(2))
    assert isinstance(refused, Failure)
    assert "n_ubatch of 16 at least" in refused.message


def test_a_damaged_image_costs_the_question_alone(tmp_path: Path) -> None:
    damaged = msgspec.structs.replace(ONE, data=ONE.data[:80])
    of_another_size = msgspec.structs.replace(OTHER, width_px=41)
    with RawChild() as child:
        load(child, *write_model(tmp_path))
        for number, image in enumerate((damaged, of_another_size), start=1):
            refused = child.ask(question(number, image))
            assert isinstance(refused, Failure), refused
            assert refused.kind == "argument"
        child.generated(question(3, ONE))


def test_files_of_one_name_and_two_sizes_are_refused(tmp_path: Path) -> None:
    larger = msgspec.structs.replace(ONE, width_px=2000, height_px=2000)
    with RawChild() as child:
        load(child, *write_model(tmp_path))
        for number, images in enumerate(((larger, ONE), (ONE, larger)), start=1):
            refused = child.ask(question(number, *images))
            assert isinstance(refused, Failure), refused
            assert refused.kind == "argument"
            assert "another size than expected; attach it again" in refused.message
        child.generated(question(3, ONE))


def test_a_stop_ends_a_prompt_with_images_between_them(tmp_path: Path) -> None:
    with RawChild() as child:
        load(child, *write_model(tmp_path), context=msgspec.structs.replace(CONTEXT, n_ctx=2048))
        child.send(question(1, *[image_file(picture(seed)) for seed in range(6)]))
        while not isinstance(child.message(), Reading):
            pass
        child.send(Stop(request=1))
        stopped = child.answer()
        _, done = child.generated(question(2, image_file(picture(0))))
    assert isinstance(stopped, Generated)
    assert stopped.stop_reason == "stopped"
    assert stopped.evaluated_tokens < stopped.prompt_tokens
    assert done.generated_tokens


def test_answers_go_on_beside_an_image(tmp_path: Path) -> None:
    with RawChild() as child:
        load(child, *write_model(tmp_path))
        alone, _ = child.generated(question(1, ONE))
        child.send(msgspec.structs.replace(question(2, text="Tell me everything"), max_tokens=100))
        child.send(question(3, ONE, text="What? "))
        child.send(question(4, ONE))
        said = child.last_words(2, 3, 4)
    assert "".join(each.text for each in said[4] if isinstance(each, Piece)) == alone
    assert all(isinstance(each[-1], Generated) for each in said.values())


def test_the_prompt_says_where_images_are(tmp_path: Path) -> None:
    with RawChild() as child:
        load(child, *write_model(tmp_path))
        message = ChatMessage("user", "What?", (ONE, OTHER))
        rendered = child.ask(RenderTemplate(messages=(message,), tokenise=True))
    assert isinstance(rendered, Rendered)
    assert rendered.text == "<s><|user|>[image][image]What?<|end|><|assistant|>"
    assert rendered.pieces.count("[image]") == 2
