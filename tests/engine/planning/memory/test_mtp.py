"""MTP heads in plans: their memory by device, models that cannot draft, and the block in the editor."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.base.errors import RuleViolationError
from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.exchange.exporting import export_plan
from engine.planning.exchange.importing import arrange, read_foreign
from engine.planning.fit.proposals import propose_by_forecast
from engine.planning.fit.strategies.catalogue import auto_layout
from engine.planning.fit.strategies.constraints import Constraints
from engine.planning.layout.layout import Layout, make_layout, single_device
from engine.planning.layout.layout_file import DraftEntry
from engine.planning.layout.moves import DraftMove
from engine.planning.memory.drafts import Draft
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.mtp import count_heads, mtp_error
from engine.planning.memory.side_files import SideFiles
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.preview import PreviewCache, make_preview
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.plan_requests import load_request
from tests.support.models import write_tiny_llama
from tests.support.mtp_models import write_mtp_model
from tests.support.plans import make_plan

CONTEXT = ContextSettings(n_ctx=2048, n_seq_max=2, load_mode="none")
CARDS = tuple(Device(f"CUDA{number}", f"card {number}", "CUDA", "gpu", 8 * GIB) for number in range(2))
RIG = Rig(CARDS, make_host("host", 64 * GIB))
APART = make_layout(5, ["CUDA0", "CUDA0", "CUDA0", "CUDA0", "CUDA1"])
FILES = SideFiles(draft=Draft("mtp"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return read_model(write_mtp_model(tmp_path_factory.mktemp("model") / "model.gguf"))


def plan_with(model: ModelFile, layout: Layout = APART, files: SideFiles = FILES) -> Plan:
    return make_plan(model, RIG, Edit(layout, CONTEXT, files))


def test_its_context_and_its_weights_are_on_the_device_of_the_last_layer(model: ModelFile) -> None:
    with_head, without = plan_with(model), plan_with(model, files=SideFiles())
    found, before = ({row.id: row for row in each.forecast} for each in (with_head, without))
    assert found["CUDA0"].draft_bytes == 0
    # K and V of one layer with one head of 32, in F16, and the compute buffer.
    assert found["CUDA1"].draft_bytes > 2 * 2048 * 32 * 2
    head_bytes = sum(tensor.size_bytes for tensor in model.blocks[-1].tensors)
    assert found["CUDA1"].weights_bytes - before["CUDA1"].weights_bytes >= head_bytes
    assert found["CUDA0"].weights_bytes == before["CUDA0"].weights_bytes
    # The hidden state of each token of a batch is in the output buffer, with logits of each drafted token.
    assert found[CPU_ID].output_bytes == 4 * (2 * (4 + 1) * model.n_vocab + 64 * with_head.settings.n_batch)
    assert not with_head.violations
    assert with_head.key != without.key
    source = load_request(with_head).draft
    assert source is not None
    assert (source.kind, source.n_tokens, source.path) == ("mtp", 4, "")


def test_what_cannot_draft_is_said(model: ModelFile, tmp_path: Path) -> None:
    several = read_model(write_mtp_model(tmp_path / "several.gguf", n_heads=2))
    heads = {"llama.nextn_predict_layers": 1}
    foreign = read_model(write_tiny_llama(tmp_path / "foreign.gguf", n_layers=4, extra_metadata=heads))
    bare = replace(model, blocks=(*model.blocks[:-1], replace(model.blocks[-1], tensors=())))
    cases = {
        "has no MTP heads": read_model(write_tiny_llama(tmp_path / "llama.gguf", n_layers=5)),
        "has 2 MTP heads, but llama.cpp can use only one for drafts": several,
        'MTP heads of the architecture "llama" are not supported yet': foreign,
        "does not contain the weights of its MTP heads": bare,
    }
    for words, each in cases.items():
        assert words in mtp_error(each)
        plan = plan_with(each, single_device(each.n_layers, "CUDA0"))
        assert [found.rule for found in plan.violations] == ["draft_heads"]
        assert words in plan.violations[0].message
        with pytest.raises(RuleViolationError, match="MTP"):
            load_request(plan)
    assert mtp_error(model) == ""
    assert (count_heads(model), count_heads(several)) == (1, 2)


@pytest.mark.parametrize("mode", ["tensor", "row"])
def test_a_split_of_tensors_is_refused(model: ModelFile, mode: str) -> None:
    layout = msgspec.convert(mode, str)
    shares = (("CUDA0", 1.0), ("CUDA1", 1.0))
    split = replace(single_device(5, "CUDA0"), split_mode=layout, tensor_split=shares)  # type: ignore[arg-type]
    rules = [(each.rule, each.message) for each in plan_with(model, split).violations]
    assert ("draft_split", f"MTP heads cannot draft in split mode {mode}.") in rules


def test_the_block_of_the_editor_moves_the_last_layer(model: ModelFile) -> None:
    plan = plan_with(model)
    preview = make_preview(PreviewCache(plan.memory), plan)
    assert preview.draft is not None
    assert (preview.draft.name, preview.draft.devices, preview.draft.n_tokens) == ("", ("CUDA1",), 4)
    assert preview.draft.size_bytes == sum(row.draft_bytes for row in plan.forecast)
    moved = plan.edit.after(DraftMove("CUDA0"))
    assert moved.layout.assignment() == ("CUDA0",) * 5
    assert moved.side_files == FILES


def test_it_comes_back_from_a_command_of_llama_server(model: ModelFile) -> None:
    found = export_plan(plan_with(model, files=SideFiles(draft=Draft("mtp", 6))), "llama-server")
    assert "--spec-type draft-mtp --spec-draft-n-max 6" in " ".join(found.text.replace("\\", " ").split())
    assert arrange(read_foreign(found.text), model, RIG).draft == DraftEntry("mtp", n_tokens=6)


def test_a_card_too_small_for_the_head_is_told(model: ModelFile) -> None:
    memory = ModelMemory(model)

    def need(files: SideFiles) -> int:
        plan = Plan(memory, RIG, Edit(single_device(5, "CUDA0"), CONTEXT, files))
        return next(row.need_bytes for row in plan.forecast if row.id == "CUDA0")

    with_head, without = need(FILES), need(SideFiles())
    assert with_head > without
    size = (with_head + without) // 2 + CARDS[0].margin_bytes
    rig = Rig((replace(CARDS[0], total_bytes=size, free_bytes=size),), RIG.host)
    plan = Plan(memory, rig, Edit(single_device(5, "CUDA0"), CONTEXT, FILES))
    assert not plan.report.fits
    assert Plan(memory, rig, Edit(single_device(5, "CUDA0"), CONTEXT)).report.fits
    assert "no_draft" in [each.kind for each in propose_by_forecast(plan)]
    found = auto_layout("fewest", memory, rig, CONTEXT, Constraints(side_files=FILES)).layout
    assert Plan(memory, rig, Edit(found, CONTEXT, FILES)).report.fits
