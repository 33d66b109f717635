"""Tokens of a model that is not loaded: a child counts them as the loaded model does, and ends by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import gguf
import psutil
import pytest

from engine.base.errors import ArgumentError, ModelFileError
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.probing.vocabulary import VocabularyCounter
from engine.runtime.protocol.messages import Counted, LoadedModel
from engine.runtime.protocol.requests import ChatMessage, CountTokens, Load
from tests.engine.runtime.child.raw_child import RawChild, entries
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from tests.support.side_models import write_tiny_projector

REQUEST = CountTokens(
    messages=(ChatMessage("system", "Be brief."), ChatMessage("user", "What is a quay?")),
    texts=("print('quay')", "ä" * 9),
)


@pytest.fixture
def counter() -> Iterator[VocabularyCounter]:
    counter = VocabularyCounter()
    yield counter
    counter.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "tiny.gguf", n_layers=2)


def test_it_counts_what_the_loaded_model_counts(counter: VocabularyCounter, model: Path) -> None:
    with RawChild() as child:
        context = ContextSettings(n_ctx=256, threads=1)
        loaded = child.ask(Load(path=str(model), devices=(), parameters=entries(), context=context))
        assert isinstance(loaded, LoadedModel)
        truth = child.ask(REQUEST)
    assert isinstance(truth, Counted)
    found = counter.count(model, REQUEST)
    assert (found.prompt, found.messages, found.texts) == (truth.prompt, truth.messages, truth.texts)
    assert found.n_ctx == 0
    pid = counter.pid
    assert counter.count(model, REQUEST) == found
    assert counter.pid == pid, "the child stays"


def test_the_child_ends_by_itself_and_the_next_count_starts_another(model: Path) -> None:
    counter = VocabularyCounter(idle_s=0.0)
    try:
        first = counter.count(model, REQUEST)
        assert counter.pid is not None
        pid = counter.pid
        with suppress(psutil.NoSuchProcess):  # it has ended already
            psutil.Process(pid).wait(DEADLINE_S)
        assert counter.count(model, REQUEST) == first
        assert counter.pid != pid
    finally:
        counter.close()
    with pytest.raises(ArgumentError):
        counter.count(model, REQUEST)


def test_each_file_has_a_child_of_its_own(counter: VocabularyCounter, model: Path, tmp_path: Path) -> None:
    counter.count(model, REQUEST)
    pid = counter.pid
    other = write_tiny_llama(tmp_path / "other.gguf", n_layers=1, n_vocab=400)
    assert counter.count(other, REQUEST).prompt > 0
    assert counter.pid != pid


def test_a_model_in_parts_is_counted(
    counter: VocabularyCounter, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp opens all parts, so that the child has to reach them."""
    monkeypatch.setattr(gguf, "GGUFWriter", partial(gguf.GGUFWriter, split_max_tensors=10))
    write_tiny_llama(tmp_path / "cut.gguf", n_layers=2)
    first, *others = sorted(tmp_path.glob("cut-*.gguf"))
    assert others
    assert counter.count(first, REQUEST) == counter.count(model, REQUEST)


def test_a_killed_child_is_replaced(counter: VocabularyCounter, model: Path) -> None:
    found = counter.count(model, REQUEST)
    assert counter.pid is not None
    psutil.Process(counter.pid).kill()
    assert counter.count(model, REQUEST) == found


def test_a_file_without_vocabulary_is_refused_in_a_sentence(counter: VocabularyCounter, tmp_path: Path) -> None:
    with pytest.raises((ModelFileError, ArgumentError)) as refused:
        counter.count(write_tiny_projector(tmp_path / "mmproj.gguf"), REQUEST)
    assert "mmproj" in refused.value.summary() or "vocabulary" in refused.value.summary()
    with pytest.raises(ModelFileError, match="No such file"):
        counter.count(tmp_path / "gone.gguf", REQUEST)
    with pytest.raises(ModelFileError, match="UTF-8"):
        counter.count(tmp_path / "no\udcfftext.gguf", REQUEST)


@pytest.mark.skipif(not hasattr(os, "sysconf"), reason="rights are given up on Linux")
def test_no_weights_are_read(counter: VocabularyCounter, tmp_path: Path) -> None:
    """The weights may be missing: a file that ends after its header still has its vocabulary."""
    whole = write_tiny_llama(tmp_path / "whole.gguf", n_layers=8, n_embd=512, n_ff=1024)
    counter.count(whole, REQUEST)
    assert counter.pid is not None
    opened = psutil.Process(counter.pid).memory_maps()
    assert not any("whole.gguf" in each.path for each in opened)
