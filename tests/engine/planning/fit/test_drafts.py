"""Draft models in automatic layouts, and in proposals for short memory."""

from __future__ import annotations

from math import inf

import pytest

from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.fit.proposals import propose, propose_by_forecast
from engine.planning.fit.strategies.catalogue import STRATEGIES, auto_layout
from engine.planning.fit.strategies.constraints import Constraints
from engine.planning.fit.strategies.fastest import initial_layout
from engine.planning.layout.layout import single_device
from engine.planning.memory.drafts import Draft, read_draft
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.side_files import SideFiles
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from tests.support.models import write_tiny_llama

CONTEXT = ContextSettings(n_ctx=512, n_ubatch=64, n_batch=64, load_mode="none")
N_LAYERS = 8


def card(device_id: str, size_bytes: int, name: str = "card") -> Device:
    return Device(device_id, name, "CUDA", "gpu", size_bytes, size_bytes)


def rig_of(*sizes: int) -> Rig:
    cards = tuple(card(f"CUDA{number}", size) for number, size in enumerate(sizes))
    return Rig(cards, make_host("host", 64 * GIB, 60 * GIB))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return read_model(write_tiny_llama(path, n_layers=N_LAYERS, n_embd=512, n_head=8, n_head_kv=8, n_ff=4096))


@pytest.fixture(scope="module")
def draft(model: ModelFile, tmp_path_factory: pytest.TempPathFactory) -> Draft:
    path = tmp_path_factory.mktemp("draft") / "small.gguf"
    return read_draft(write_tiny_llama(path, n_layers=4, n_embd=512, n_head=8, n_head_kv=8, n_ff=2048), model)


def needed(memory: ModelMemory, device: str, files: SideFiles) -> int:
    """Return the bytes that everything needs on one card of any size, with what a layout leaves free."""
    rig = Rig((replace(card(device, 60 * GIB), id=device),), make_host("host", 64 * GIB, 60 * GIB))
    plan = Plan(memory, rig, Edit(single_device(N_LAYERS, device), CONTEXT, files))
    [row] = [row for row in plan.forecast if row.id == device]
    return row.need_bytes


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "context"])
def test_a_strategy_leaves_room_for_the_draft_on_a_card(model: ModelFile, draft: Draft, strategy: str) -> None:
    memory, files = ModelMemory(model), SideFiles(draft=draft)
    both_bytes = needed(memory, "CUDA0", SideFiles(draft=replace(draft, layout=single_device(4, "CUDA0"))))
    rig = rig_of(both_bytes + 600 * MIB, 8 * GIB)
    found = auto_layout(strategy, memory, rig, CONTEXT, Constraints(side_files=files))
    plan = Plan(memory, rig, Edit(found.layout, found.context, files))
    assert found.fits
    assert plan.report.fits
    assert CPU_ID not in plan.draft_devices


def test_the_draft_takes_a_card_that_the_model_would_share(model: ModelFile, draft: Draft) -> None:
    """Each card alone has room for the model or for the draft, and the faster of them is filled by the model."""
    memory, files = ModelMemory(model), SideFiles(draft=draft)
    alone_bytes = needed(memory, "CUDA0", SideFiles())
    usable = next(
        size
        for size in range(alone_bytes // MIB, alone_bytes // MIB + 4096, 8)
        if auto_layout("fewest", memory, rig_of(size * MIB), CONTEXT, Constraints()).layout.devices == ("CUDA0",)
    )
    rig = rig_of(usable * MIB, usable * MIB)
    found = auto_layout("fewest", memory, rig, CONTEXT, Constraints(side_files=files))
    plan = Plan(memory, rig, Edit(found.layout, found.context, files))
    assert plan.draft_devices == ("CUDA1",)
    assert found.layout.devices == ("CUDA0",)


def test_without_room_on_a_card_the_model_has_the_cards_and_the_draft_the_cpu(model: ModelFile, draft: Draft) -> None:
    memory, files = ModelMemory(model), SideFiles(draft=draft)
    alone = needed(memory, "CUDA0", SideFiles())
    rig = rig_of(alone - 20 * MIB)
    for layout in (
        auto_layout("fewest", memory, rig, CONTEXT, Constraints(side_files=files)).layout,
        initial_layout(memory, rig, CONTEXT, files, seconds=inf),
    ):
        plan = Plan(memory, rig, Edit(layout, CONTEXT, files))
        assert plan.draft_devices == (CPU_ID,)
        assert plan.report.fits
    assert layout == initial_layout(memory, rig, CONTEXT, seconds=inf)


def test_the_fastest_card_gets_the_draft(model: ModelFile, draft: Draft) -> None:
    cards = (card("CUDA0", 8 * GIB, "NVIDIA GeForce GTX 1060"), card("CUDA1", 8 * GIB, "NVIDIA GeForce RTX 4090"))
    rig = Rig(cards, make_host("host", 64 * GIB, 60 * GIB))
    edit = Edit(single_device(N_LAYERS, "CUDA0"), CONTEXT, SideFiles(draft=draft))
    assert Plan(ModelMemory(model), rig, edit).draft_devices == ("CUDA1",)


def test_a_short_device_may_lose_the_draft_or_pass_it_on(model: ModelFile, draft: Draft) -> None:
    memory = ModelMemory(model)
    files = SideFiles(draft=replace(draft, layout=single_device(4, "CUDA0")))
    both_bytes, alone_bytes = needed(memory, "CUDA0", files), needed(memory, "CUDA0", SideFiles())
    rig = rig_of((both_bytes + alone_bytes) // 2 + card("", 0).margin_bytes)
    plan = Plan(memory, rig, Edit(single_device(N_LAYERS, "CUDA0"), CONTEXT, files))
    assert not plan.report.fits
    found = {each.kind: each for each in propose_by_forecast(plan)}
    assert found["no_draft"].text == "Load without the draft (speculative decoding)"
    assert found["no_draft"].edit.side_files.draft is None
    assert found["draft"].text == "Move the draft model from CUDA0 to CPU"
    moved = found["draft"].edit.side_files.draft
    assert moved is not None
    assert moved.layout == single_device(4, CPU_ID)
    assert found["draft"].edit.layout == plan.edit.layout


def test_a_draft_on_another_device_is_no_help(model: ModelFile, draft: Draft) -> None:
    files = SideFiles(draft=replace(draft, layout=single_device(4, "CUDA1")))
    plan = Plan(ModelMemory(model), rig_of(8 * GIB, 8 * GIB), Edit(single_device(N_LAYERS, "CUDA0"), CONTEXT, files))
    kinds = [each.kind for each in propose(plan, {"CUDA0": 10 * MIB})]
    assert "draft" not in kinds
    assert "no_draft" not in kinds
