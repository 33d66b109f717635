"""The demo model in every type of weights: loads equal the forecast to the byte, and all layouts answer the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import Struct

from engine.base.units import MIB
from engine.base.values import replace
from engine.devices.device import Fault, Findings, Rig
from engine.machines.rigs.engine_checks import TOLERANCE
from engine.machines.rigs.lab import LabRig
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import Layout, Run
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.child.load.quantise import FILE_TYPES
from engine.runtime.plan_requests import load_request
from engine.runtime.protocol.messages import Generated, LoadedModel, LogitDigest, Piece
from engine.runtime.protocol.requests import ChatMessage, Generate, Logits
from engine.runtime.session.reports import loaded_event
from tests.support.conversation import Conversation
from tests.support.load_specs import plan_of
from tests.support.real_model import quantised

EVERYDAY = ("Q4_0",)
KINDS = ("weights_bytes", "mapped_bytes", "kv_cache_bytes", "compute_bytes", "output_bytes")
CONTEXT = ContextSettings(n_ctx=512, n_batch=128, n_ubatch=64, threads=1, threads_batch=1, load_mode="mmap")
QUESTION = ChatMessage(role="user", content="How do plants make food from sunlight?")
TOKENS = tuple(range(100, 132))
LAYOUTS = (
    Layout(30, (Run("RPC0", 0, 9), Run("RPC1", 10, 22), Run("RPC2", 23, 29)), "RPC2"),
    Layout(30, (Run("CPU", 0, 4), Run("RPC1", 5, 11), Run("CPU", 12, 14), Run("RPC0", 15, 29)), "RPC1"),
    Layout(30, (Run("CPU", 0, 29),), "CPU"),
)
NO_COPIES = Fault("extra_buffers", "Left out for a comparison.")


@pytest.fixture(scope="module")
def lab() -> Iterator[LabRig]:
    with LabRig([512 * MIB] * 3) as lab:
        yield lab


class Outcome(Struct, frozen=True):
    """What a load computes. `has_copies`: with weights in the CPU's own order, where sums are rounded otherwise."""

    answer: str
    logits: tuple[float, ...]
    has_copies: bool


@pytest.mark.parametrize(
    "file_type",
    [
        name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in FILE_TYPES
        if not name.endswith("_S")  # The small ones of a type differ from the middle ones in few tensors.
    ],
)
def test_each_type_is_forecast_to_the_byte_and_answers_alike(lab: LabRig, tmp_path: Path, file_type: str) -> None:
    memory = ModelMemory(read_model(quantised(tmp_path, file_type)))
    plain = Rig(lab.rig.devices, replace(lab.rig.host, findings=Findings((NO_COPIES,))))
    with Conversation() as child:
        first, *others = [_load(child, memory, plain, layout) for layout in LAYOUTS]
        assert len(first.answer.split()) > 5, first.answer
        assert not first.has_copies
        assert [(each.answer, each.logits, each.has_copies) for each in others] == [
            (first.answer, first.logits, False)
        ] * len(others)
        copied = _load(child, memory, lab.rig, LAYOUTS[-1])
    if copied.has_copies:
        assert _difference(first.logits, copied.logits) < TOLERANCE
    else:
        assert (copied.answer, copied.logits) == (first.answer, first.logits)


def _load(child: Conversation, memory: ModelMemory, rig: Rig, layout: Layout) -> Outcome:
    """Load, compare with the forecast, and return what is computed."""
    plan = plan_of(memory, rig, layout, CONTEXT)
    message = child.ask(load_request(plan))
    assert isinstance(message, LoadedModel), message
    loaded = loaded_event(plan, message)
    for kind in KINDS:
        measured = {row.id: getattr(row, kind) for row in loaded.devices}
        assert measured == {row.id: getattr(row, kind) for row in loaded.forecast}, (kind, layout)
    digest = child.ask(Logits(tokens=TOKENS))
    assert isinstance(digest, LogitDigest), digest
    done = child.ask(Generate(id=id(plan), messages=(QUESTION,), max_tokens=10, temperature=0.0, seed=1))
    assert isinstance(done, Generated), done
    answer = "".join(each.text for each in child.heard if isinstance(each, Piece))
    return Outcome(answer, digest.sample, has_copies=loaded.devices[-1].weights_bytes > 0)


def _difference(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    mean = sum(one) / len(one)
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) / sum((a - mean) ** 2 for a in one)
