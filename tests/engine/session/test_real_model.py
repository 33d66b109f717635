"""A real model in every type of weights: the forecast is the load to the byte, and every layout answers the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.devices.device import Rig
from engine.gguf.reader import read_model
from engine.layout.layout import Layout, Run
from engine.memory.model_memory import ModelMemory
from engine.protocol.messages import ChatMessage, Generate
from engine.rigs.lab import LabRig
from engine.session.events import Done, Loaded, Token
from engine.settings.context_settings import ContextSettings
from engine.units import MIB
from tests.support.orders import order_of
from tests.support.real_model import FILE_TYPES, quantised
from tests.support.selection import some
from tests.support.session_log import SessionLog

EVERYDAY = ("Q4_0", "Q8_0")
KINDS = ("weights_bytes", "mapped_bytes", "kv_cache_bytes", "compute_bytes", "output_bytes")
CONTEXT = ContextSettings(n_ctx=512, n_batch=128, n_ubatch=64, threads=1, threads_batch=1)
QUESTION = ChatMessage(role="user", content="How do plants make food from sunlight?")
LAYOUTS = (
    Layout(30, (Run("CPU", 0, 29),), "CPU"),
    Layout(30, (Run("RPC0", 0, 9), Run("RPC1", 10, 22), Run("RPC2", 23, 29)), "RPC2"),
    Layout(30, (Run("CPU", 0, 4), Run("RPC1", 5, 11), Run("CPU", 12, 14), Run("RPC0", 15, 29)), "RPC1"),
    Layout(30, (Run("RPC2", 0, 3), Run("CPU", 4, 29)), "CPU"),
)


@pytest.fixture(scope="module")
def lab() -> Iterator[LabRig]:
    with LabRig([512 * MIB] * 3) as lab:
        yield lab


@pytest.mark.parametrize(
    "file_type",
    [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.exhaustive) for name in FILE_TYPES],
)
def test_each_type_is_forecast_to_the_byte_and_answers_alike(lab: LabRig, tmp_path: Path, file_type: str) -> None:
    memory = ModelMemory(read_model(quantised(tmp_path, file_type)))
    layouts = some(LAYOUTS)
    answers = [_answer(memory, lab.rig, layout) for layout in layouts]
    assert answers == [answers[0]] * len(layouts)
    assert len(answers[0].split()) > 5, answers[0]


def _answer(memory: ModelMemory, rig: Rig, layout: Layout) -> str:
    """Load, compare with the forecast, and return the likeliest answer."""
    with SessionLog() as log:
        log.session.load(order_of(memory, rig, layout, CONTEXT))
        (loaded,) = log.wait_for_endings(1)
        assert isinstance(loaded, Loaded), loaded
        for kind in KINDS:
            measured = {row.id: getattr(row, kind) for row in loaded.devices}
            assert measured == {row.id: getattr(row, kind) for row in loaded.forecast}, (kind, layout)
        log.session.ask(Generate(messages=(QUESTION,), max_tokens=16, temperature=0.0, seed=1))
        done = log.wait_for_endings(2)[1]
        assert isinstance(done, Done), done
        return "".join(event.text for event in log.events if isinstance(event, Token))
