"""Drafts in exported and imported commands of llama-server, and in exports that cannot express them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.exchange.exporting import export_plan
from engine.planning.exchange.importing import arrange, read_foreign
from engine.planning.layout.layout import Layout, make_layout, single_device
from engine.planning.layout.layout_file import FOLLOWING, DraftEntry
from engine.planning.memory.drafts import Draft, draft_of_file, read_draft
from engine.planning.memory.side_files import SideFiles
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from tests.support.models import write_tiny_llama
from tests.support.plans import make_plan

CARDS = tuple(Device(f"CUDA{number}", f"card {number}", "CUDA", "gpu", 8 * GIB, 8 * GIB) for number in range(2))
RIG = Rig(CARDS, make_host("host", 64 * GIB, 60 * GIB))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_llama(folder / "it's small.gguf", n_layers=3)
    return read_model(write_tiny_llama(folder / "m.gguf", n_layers=5, n_ff=256))


@pytest.fixture(scope="module")
def draft(model: ModelFile) -> Draft:
    return read_draft(model.paths[0].with_name("it's small.gguf"), model, 6)


def plan_of(model: ModelFile, draft: Draft) -> Plan:
    return make_plan(model, RIG, Edit(single_device(5, "CUDA0"), ContextSettings(), SideFiles(draft=draft)))


@pytest.mark.parametrize(
    "layout", [single_device(3, CPU_ID), single_device(3, "CUDA1"), make_layout(3, [CPU_ID, "CUDA1", "CUDA1"])]
)
def test_a_draft_model_comes_back_as_it_was(model: ModelFile, draft: Draft, layout: Layout) -> None:
    context = msgspec.structs.replace(FOLLOWING, type_k="f32", type_v="bf16")
    asked = replace(draft, layout=layout, context=context)
    text = export_plan(plan_of(model, asked), "llama-server").text
    found = arrange(read_foreign(text), model, RIG)
    assert draft_of_file(found.draft, model, Path()) == asked
    assert not [note for note in found.notes if "spec" in note]


def test_n_gram_comes_back_with_its_tokens(model: ModelFile) -> None:
    found = export_plan(plan_of(model, Draft("ngram", 9)), "llama-server")
    assert arrange(read_foreign(found.text), model, RIG).draft == DraftEntry("ngram", n_tokens=9)
    assert any("finds repeated text" in note for note in found.notes)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("-md small.gguf", DraftEntry("model", "small.gguf")),
        ("--model-draft small.gguf --draft-max 5", DraftEntry("model", "small.gguf", 5)),
        ("--spec-type draft-mtp", DraftEntry("mtp")),
        ("--spec-type ngram-mod,draft-simple --draft 900", DraftEntry("ngram", n_tokens=64)),
        ("-md small.gguf --spec-type none", None),
        ("-md eagle.gguf --spec-type draft-eagle3", None),
        ("-ngld 4", None),
    ],
)
def test_options_of_drafts(model: ModelFile, options: str, expected: DraftEntry | None) -> None:
    assert arrange(read_foreign(f"llama-server -m m.gguf -ngl 0 {options}"), model, RIG).draft == expected


@pytest.mark.parametrize("target", ["ollama", "lmstudio", "python"])
def test_a_program_that_cannot_draft_is_told(model: ModelFile, target: str) -> None:
    plan = plan_of(model, Draft("ngram"))
    notes = export_plan(plan, target).notes  # type: ignore[arg-type]
    assert any(note.startswith("The draft model was not exported") for note in notes)
