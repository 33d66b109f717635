"""Four simulated CUDA cards of three sizes (`cards.c`); no card and no driver is needed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.cuda.cards import Ledger, build, read_ledger
from tests.engine.cuda.layouts import N_LAYERS
from tests.support.models import write_tiny_llama

CARDS = "RTX 3090=8.6=24576, RTX 3090=8.6=24576, RTX 5070=12.0=12288, RTX 3060=8.6=64"
"""The last one is full: a context takes more than it has."""
CONTEXT_MIB = 450


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stand-in."""
    folder = tmp_path_factory.mktemp("cards")
    build(folder)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of about 60 MB."""
    folder = tmp_path_factory.mktemp("models")
    return write_tiny_llama(
        folder / "tiny.gguf", n_layers=N_LAYERS, n_embd=512, n_head=8, n_ff=1024, n_vocab=8192, n_ctx_train=8192
    )


class Cards:
    """The cards of one test: all children that start from now on see them."""

    def __init__(self, patch: pytest.MonkeyPatch, library: Path, ledger: Path) -> None:
        self._patch, self._ledger = patch, ledger
        before = os.environ.get("LD_LIBRARY_PATH")
        patch.setenv("LD_LIBRARY_PATH", os.pathsep.join(filter(None, [str(library), before])))
        patch.setenv("STAND_IN_LEDGER", str(ledger))
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        self.insert(CARDS)

    def insert(self, cards: str, context_mib: int = CONTEXT_MIB) -> None:
        """Have these cards in place of the ones before; what was counted is forgotten."""
        self._ledger.unlink(missing_ok=True)
        self._patch.setenv("STAND_IN_CARDS", cards)
        self._patch.setenv("STAND_IN_CONTEXT", str(context_mib))

    def ledger(self) -> Ledger:
        """Return what was taken so far."""
        return read_ledger(self._ledger)


@pytest.fixture
def cards(library: Path, tmp_path: Path) -> Iterator[Cards]:
    with pytest.MonkeyPatch.context() as patch:
        yield Cards(patch, library, tmp_path / "ledger")
