"""Embeddings equal llama.cpp's own for the same tokens, normalised, also beside other requests."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import pytest

from engine.base.units import GIB
from engine.devices.device import CPU_ID, Rig, make_host
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import Layout, Run
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.messages import AnyMessage, Embedded, Failure, Generated, LoadedModel, Piece, Tokenised
from engine.runtime.protocol.requests import Embed, Generate, Load, Stop, Tokenise
from tests.engine.runtime.child.raw_child import RawChild, entries
from tests.support.bare_embeddings import bare_embeddings
from tests.support.models import write_tiny_encoder, write_tiny_llama

TEXTS = ("hello", "hello there", "there there hello", "hello")


def load(child: RawChild, path: Path, context: ContextSettings) -> None:
    answer = child.ask(Load(path=str(path), devices=(), parameters=entries(), context=context))
    assert isinstance(answer, LoadedModel), answer


def tokens_of(child: RawChild, text: str) -> tuple[int, ...]:
    answer = child.ask(Tokenise(id=0, text=text))
    assert isinstance(answer, Tokenised)
    return answer.tokens


def vectors_of(answer: AnyMessage | None) -> tuple[tuple[float, ...], ...]:
    assert isinstance(answer, Embedded), answer
    return answer.vectors


def assert_like_bare(
    path: Path, child: RawChild, texts: tuple[str, ...], vectors: tuple[tuple[float, ...], ...]
) -> None:
    bare = bare_embeddings(path, [tokens_of(child, text) for text in texts])
    for ours, theirs in zip(vectors, bare, strict=True):
        length = math.sqrt(sum(value * value for value in theirs))
        assert ours == pytest.approx([value / length for value in theirs], abs=2e-3)
        assert math.sqrt(sum(value * value for value in ours)) == pytest.approx(1.0)


@pytest.mark.parametrize("pooling", [gguf.PoolingType.MEAN, gguf.PoolingType.CLS])
@pytest.mark.parametrize("sequences", [1, 4])
def test_an_encoder_s_embeddings_are_the_engine_s(tmp_path: Path, pooling: gguf.PoolingType, sequences: int) -> None:
    path = write_tiny_encoder(tmp_path / "bert.gguf", pooling=pooling)
    with RawChild() as child:
        load(child, path, ContextSettings(n_ctx=256 * sequences, n_ubatch=32, n_seq_max=sequences, threads=1))
        vectors = vectors_of(child.ask(Embed(id=1, texts=TEXTS)))
        assert vectors[0] == pytest.approx(vectors[3], abs=1e-5)
        assert vectors[0] != pytest.approx(vectors[1], abs=1e-2)
        assert_like_bare(path, child, TEXTS, vectors)
        assert vectors_of(child.ask(Embed(id=2, texts=()))) == ()


def test_an_embedding_that_is_not_a_number_is_an_error_and_the_model_stays(tmp_path: Path) -> None:
    path = write_tiny_encoder(tmp_path / "bert.gguf", pooling=gguf.PoolingType.MEAN)
    reader = gguf.GGUFReader(path, "r+")
    next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight").data[...] = math.nan
    reader.data.flush()
    with RawChild() as child:
        load(child, path, ContextSettings(n_ctx=256, n_ubatch=32, threads=1))
        for number in (1, 2):
            answer = child.ask(Embed(id=number, texts=TEXTS))
            assert isinstance(answer, Failure)
            assert (answer.kind, "not a number" in answer.message) == ("argument", True)


def test_several_requests_for_embeddings_take_turns(tmp_path: Path) -> None:
    path = write_tiny_encoder(tmp_path / "bert.gguf", pooling=gguf.PoolingType.MEAN)
    with RawChild() as child:
        load(child, path, ContextSettings(n_ctx=256, n_ubatch=32, threads=1))
        child.send(Embed(id=1, texts=TEXTS * 20))
        child.send(Embed(id=2, texts=TEXTS[:1]))
        child.send(Embed(id=3, texts=TEXTS * 5000))
        child.send(Stop(request=3))
        said = child.last_words(1, 2, 3)
        assert vectors_of(said[1][-1])[0] == pytest.approx(vectors_of(said[2][-1])[0])
        stopped = said[3][-1]
        assert isinstance(stopped, Failure)
        assert stopped.kind == "cancelled"


def test_a_model_that_generates_and_pools_does_both_at_once(tmp_path: Path) -> None:
    path = write_tiny_llama(
        tmp_path / "both.gguf", n_layers=2, extra_metadata={"llama.pooling_type": int(gguf.PoolingType.LAST)}
    )
    texts = ("hello", "something longer than that", "x")
    with RawChild() as child:
        load(child, path, ContextSettings(n_ctx=2048, n_ubatch=64, n_seq_max=4, threads=1))
        greedy = Generate(id=1, prompt="Once upon", max_tokens=60, temperature=0.0)
        child.send(greedy)
        alone = "".join(message.text for message in child.last_words(1)[1] if isinstance(message, Piece))
        child.send(Generate(id=2, prompt="Once upon", max_tokens=60, temperature=0.0))
        child.send(Embed(id=3, texts=texts))
        said = child.last_words(2, 3)
        assert "".join(message.text for message in said[2] if isinstance(message, Piece)) == alone
        assert isinstance(said[2][-1], Generated)
        assert_like_bare(path, child, texts, vectors_of(said[3][-1]))


def test_what_cannot_be_embedded_is_said_plainly(tmp_path: Path) -> None:
    plain = write_tiny_llama(tmp_path / "plain.gguf", n_layers=1)
    ranking = write_tiny_llama(
        tmp_path / "ranking.gguf", n_layers=1, extra_metadata={"llama.pooling_type": int(gguf.PoolingType.RANK)}
    )
    encoder = write_tiny_encoder(tmp_path / "bert.gguf", pooling=gguf.PoolingType.MEAN)
    words = []
    for path, texts in ((plain, ("hello",)), (ranking, ("hello",)), (encoder, ("hello", "hello " * 60))):
        with RawChild() as child:
            load(child, path, ContextSettings(n_ctx=256, n_ubatch=32, threads=1))
            answer = child.ask(Embed(id=5, texts=texts))
            assert isinstance(answer, Failure)
            assert (answer.kind, answer.request) == ("argument", 5)
            words.append(answer.message)
    assert "how to pool" in words[0]
    assert "ranks texts" in words[1]
    assert "Text 2 takes 62 tokens, but a text may take at most 32" in words[2]


@pytest.mark.parametrize(
    "context",
    [
        ContextSettings(n_ctx=64, n_batch=64, n_ubatch=64, threads=1),
        ContextSettings(n_ctx=1024, n_batch=512, n_ubatch=512, n_seq_max=4, threads=1),
        ContextSettings(n_ctx=1024, n_ubatch=300, n_seq_max=4, kv_unified=True, threads=1),
    ],
    ids=["one", "four", "unified"],
)
@pytest.mark.parametrize("generates", [False, True])
def test_what_embedding_takes_is_there_after_the_load_and_was_forecast(
    tmp_path: Path, context: ContextSettings, generates: bool
) -> None:
    path = tmp_path / "m.gguf"
    if generates:
        write_tiny_llama(path, n_layers=2, extra_metadata={"llama.pooling_type": int(gguf.PoolingType.LAST)})
    else:
        write_tiny_encoder(path, pooling=gguf.PoolingType.MEAN)
    host = make_host("host", GIB, GIB)
    model = read_model(path)
    layout = Layout(model.n_layers, (Run(CPU_ID, 0, model.n_layers - 1),), CPU_ID)
    forecast = ModelMemory(model).estimate(layout, context, Rig((), host)).devices[CPU_ID]
    with RawChild() as child:
        answer = child.ask(Load(path=str(path), devices=(), parameters=entries(), context=context))
        assert isinstance(answer, LoadedModel), answer
        output_bytes = sum(part.output_bytes for part in answer.parts)
        assert output_bytes == forecast.output_bytes
        assert output_bytes > 4 * answer.n_vocab * context.n_seq_max
        # what pooling itself adds is not forecast: a row of the micro batch for each sequence at most
        compute_bytes = sum(part.compute_bytes for part in answer.parts)
        most_bytes = 4 * context.n_ubatch * context.n_seq_max
        assert forecast.compute_bytes <= compute_bytes <= forecast.compute_bytes + most_bytes
        assert sum(part.kv_cache_bytes for part in answer.parts) == forecast.kv_cache_bytes
        assert_like_bare(path, child, TEXTS, vectors_of(child.ask(Embed(id=1, texts=TEXTS))))
