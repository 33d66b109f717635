"""Randomly changed headers in a probe by the real engine: an answer, or a crash that is reported with one error."""

from __future__ import annotations

import gzip
import random
from collections import Counter
from pathlib import Path

import pytest

from engine.base.errors import EngineError
from engine.base.texts import MAX_SENTENCE
from engine.devices.device import CPU_ID, Rig
from engine.machines.rigs.discovery import host_device
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.probing.probe import Probes
from tests.support.headers import write_with_hole
from tests.support.mutation import Header, mutate_header
from tests.support.selection import examples

HEADERS = Path(__file__).parents[1] / "zoo" / "headers"
NAMES = ("llama-dense", "mamba-dense", "gemma3-dense", "qwen2moe-moe", "bert-dense", "rwkv7-dense")
CONTEXT = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64)
PROBE_SECONDS = 20.0


def probed(path: Path) -> str:
    """Return how a probe of the model at `path` ended: `probed`, or the kind of error."""
    try:
        model = read_model(path)
        plan = Plan(ModelMemory(model), Rig((), host_device()), Edit(single_device(model.n_layers, CPU_ID), CONTEXT))
        with Probes(timeout_s=PROBE_SECONDS) as probes:
            rows = probes.probed(plan).probed
    except EngineError as error:
        sentence = error.summary()
        assert sentence.isprintable()
        assert 0 < len(sentence) <= MAX_SENTENCE
        return error.kind
    assert rows is not None
    assert all(row.need_bytes >= 0 for row in rows)
    return "probed"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_the_engine_is_asked_about_a_changed_header(tmp_path: Path, name: str) -> None:
    data = gzip.decompress((HEADERS / f"{name}.gguf.head.gz").read_bytes())
    ends: Counter[str] = Counter()
    for seed in range(examples(40)):
        numbers, header = random.Random(seed), Header(data)
        for _ in range(seed and numbers.choice((1, 1, 2))):
            mutate_header(header, numbers)
        encoded = header.encode()
        ends[
            probed(write_with_hole(tmp_path / "m.gguf", encoded, len(encoded) + 64 + header.size_bytes % (1 << 43)))
        ] += 1
    assert ends["probed"], "what was not changed is probed"
