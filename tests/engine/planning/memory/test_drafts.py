"""Memory of drafts: the draft model by device, output rows of a batch with drafts, and models that cannot draft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine.base.errors import ModelFileError, RuleViolationError
from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.model.gguf.vocabulary import MOST_DIFFERENCE, header_mismatch
from engine.planning.layout.layout import Layout, single_device, split_evenly
from engine.planning.layout.layout_file import FOLLOWING
from engine.planning.memory.drafts import Draft, draft_context, read_draft
from engine.planning.memory.estimate import DeviceMemory
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.side_files import SideFiles
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.plan_requests import load_request, probe_request
from tests.support.models import write_tiny_encoder, write_tiny_llama
from tests.support.plans import make_plan
from tests.support.side_models import write_tiny_projector

CONTEXT = ContextSettings(n_ctx=2048, n_seq_max=2, load_mode="none")
CARDS = tuple(Device(f"CUDA{number}", f"card {number}", "CUDA", "gpu", 8 * GIB) for number in range(2))
RIG = Rig(CARDS, make_host("host", 64 * GIB))
ON_FIRST = single_device(6, "CUDA0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return read_model(write_tiny_llama(tmp_path_factory.mktemp("model") / "model.gguf", n_layers=6, n_ff=256))


@pytest.fixture(scope="module")
def draft(model: ModelFile, tmp_path_factory: pytest.TempPathFactory) -> Draft:
    return read_draft(write_tiny_llama(tmp_path_factory.mktemp("draft") / "small.gguf", n_layers=2), model)


def plan_with(
    model: ModelFile, draft: Draft | None, layout: Layout = ON_FIRST, rig: Rig = RIG, context: ContextSettings = CONTEXT
) -> Plan:
    return make_plan(model, rig, Edit(layout, context, SideFiles(draft=draft)))


def memory_of(plan: Plan) -> dict[str, DeviceMemory]:
    return {row.id: row.memory for row in plan.forecast}


def on(draft: Draft, *devices: str) -> Draft:
    assert draft.model is not None
    return replace(draft, layout=split_evenly(draft.model.n_layers, devices))


def test_a_draft_model_is_added_to_the_forecast_of_its_device(model: ModelFile, draft: Draft) -> None:
    assert draft.model is not None
    without, plan = memory_of(plan_with(model, None)), plan_with(model, on(draft, "CUDA1"))
    found = memory_of(plan)
    used = msgspec.structs.replace(plan.settings, pipeline="off")
    alone = ModelMemory(draft.model).estimate(single_device(2, "CUDA1"), used, RIG).devices
    added = alone["CUDA1"]
    assert found["CUDA0"].draft_bytes == 0
    assert found["CUDA1"].draft_bytes == added.weights_bytes + added.kv_cache_bytes + added.compute_bytes > 0
    assert found["CUDA1"].overhead_bytes == added.overhead_bytes > 0
    assert found["CUDA0"].weights_bytes == without["CUDA0"].weights_bytes
    of_host = alone[CPU_ID]
    assert found[CPU_ID].draft_bytes == of_host.weights_bytes + of_host.compute_bytes + of_host.output_bytes


def test_the_overhead_of_a_device_of_both_models_counts_once(model: ModelFile, draft: Draft) -> None:
    without, found = memory_of(plan_with(model, None)), memory_of(plan_with(model, on(draft, "CUDA0")))
    assert found["CUDA0"].overhead_bytes == without["CUDA0"].overhead_bytes
    more_bytes = found["CUDA0"].answering_bytes - without["CUDA0"].answering_bytes
    grown_bytes = found["CUDA0"].need_bytes - without["CUDA0"].need_bytes
    assert grown_bytes == found["CUDA0"].draft_bytes + more_bytes


@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_a_batch_has_an_output_row_for_each_drafted_token(model: ModelFile, draft: Draft, kind: str) -> None:
    asked = on(draft, "CUDA0") if kind == "model" else Draft("ngram")
    found = memory_of(plan_with(model, replace(asked, n_tokens=7)))
    assert memory_of(plan_with(model, None))[CPU_ID].output_bytes == 2 * model.n_vocab * 4
    assert found[CPU_ID].output_bytes == 2 * (7 + 1) * model.n_vocab * 4


def test_a_draft_goes_to_the_first_card_with_room_else_to_the_cpu(model: ModelFile, draft: Draft) -> None:
    def device_of(*free_bytes: int) -> tuple[str, ...]:
        cards = tuple(replace(card, free_bytes=size) for card, size in zip(CARDS, free_bytes, strict=True))
        return plan_with(model, draft, single_device(6, CPU_ID), Rig(cards, RIG.host)).draft_devices

    assert device_of(8 * GIB, 8 * GIB) == ("CUDA0",)
    assert device_of(200 * MIB, 8 * GIB) == ("CUDA1",)
    assert device_of(200 * MIB, 200 * MIB) == (CPU_ID,)


def test_its_settings_follow_the_model_but_for_its_own(model: ModelFile, draft: Draft) -> None:
    own = msgspec.structs.replace(FOLLOWING, type_k="q8_0", type_v="q8_0", flash_attn="on", n_ctx=512)
    placed = plan_with(model, replace(on(draft, "CUDA1"), context=own)).resolved.draft
    assert placed is not None
    assert (placed.context.n_ctx_each, placed.context.n_seq_max) == (512, 2)
    assert (placed.context.type_k, placed.context.n_batch) == ("q8_0", CONTEXT.n_batch)
    followed = plan_with(model, on(draft, "CUDA1")).resolved.draft
    assert followed is not None
    assert followed.context.n_ctx == 2048


def test_values_that_suit_the_model_are_not_those_of_its_draft_model_but_of_its_mtp_heads(draft: Draft) -> None:
    main = msgspec.structs.replace(CONTEXT, rope_freq_scale=0.5)
    assert draft_context(draft, main).rope_freq_scale == 0
    assert draft_context(Draft("mtp"), main).rope_freq_scale == 0.5


def test_a_load_names_the_draft_and_may_open_its_file(model: ModelFile, draft: Draft) -> None:
    plan = plan_with(model, on(replace(draft, n_tokens=6), "CUDA1"))
    load = load_request(plan)
    assert load.draft is not None
    assert load.access is not None
    assert (load.draft.kind, load.draft.n_tokens, load.draft.path) == ("model", 6, str(draft.path))
    assert load.draft.parameters is not None
    assert load.draft.parameters.devices == ("CUDA1",)
    assert load.draft.path in load.access.readable
    probe = probe_request(plan)
    assert probe.access is not None
    assert load.draft.path in probe.access.readable
    assert [device.id for device in plan.devices_in_use] == ["CUDA0", "CUDA1"]
    ngram = load_request(plan_with(model, Draft("ngram"))).draft
    assert ngram is not None
    assert (ngram.kind, ngram.path, ngram.parameters) == ("ngram", "", None)


def test_a_draft_that_is_gone_is_named_at_the_load(model: ModelFile, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "gone.gguf", n_layers=1)
    plan = plan_with(model, on(read_draft(path, model), "CUDA0"))
    path.unlink()
    with pytest.raises(ModelFileError, match="the draft model no longer exists"):
        load_request(plan)


@pytest.mark.parametrize("of", [load_request, probe_request])
def test_a_draft_that_has_changed_since_it_was_chosen_is_refused(
    model: ModelFile, tmp_path: Path, of: Callable[[Plan], object]
) -> None:
    """Its layers are not those that were placed."""
    path = write_tiny_llama(tmp_path / "small.gguf", n_layers=2)
    plan = plan_with(model, read_draft(path, model))
    of(plan)
    write_tiny_llama(path, n_layers=3)
    with pytest.raises(ModelFileError, match=r"small.gguf: the draft model has changed .* Choose it again"):
        of(plan)
    path.unlink()
    with pytest.raises(
        ModelFileError, match=r"small.gguf: the file of the draft model no longer exists. Choose another one"
    ):
        of(plan)


def test_a_tokenizer_that_adds_bos_by_itself_is_as_one_whose_header_says_so(model: ModelFile) -> None:
    """By default: `tekken` of Mistral, among others."""
    plain = {**model.metadata, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "tekken"}
    plain.pop("tokenizer.ggml.add_bos_token", None)
    said = {**plain, "tokenizer.ggml.add_bos_token": True}
    assert header_mismatch(replace(model, metadata=said), replace(model, metadata=plain)) == ""
    other = {**plain, "tokenizer.ggml.pre": "qwen2"}
    assert "BOS" in header_mismatch(replace(model, metadata=said), replace(model, metadata=other))


def test_another_draft_is_another_key(model: ModelFile, draft: Draft) -> None:
    drafts = (None, Draft("ngram"), on(draft, "CUDA0"), on(draft, "CUDA1"), replace(on(draft, "CUDA1"), n_tokens=9))
    assert len({plan_with(model, each).key for each in drafts}) == len(drafts)


def test_what_cannot_draft_is_said(model: ModelFile, tmp_path: Path) -> None:
    texts = {
        write_tiny_llama(tmp_path / "wide.gguf", n_layers=1, n_vocab=model.n_vocab + MOST_DIFFERENCE + 1): "tokens",
        write_tiny_projector(tmp_path / "mmproj.gguf"): "projector",
        write_tiny_encoder(tmp_path / "bert.gguf"): "writes no text",
        tmp_path / "none.gguf": "no such file",
    }
    for path, words in texts.items():
        with pytest.raises(ModelFileError, match=words) as caught:
            read_draft(path, model)
        assert path.name in caught.value.summary()


def test_a_few_tokens_more_are_no_other_vocabulary(model: ModelFile, tmp_path: Path) -> None:
    padded = write_tiny_llama(tmp_path / "padded.gguf", n_layers=1, n_vocab=model.n_vocab + 64)
    assert read_draft(padded, model).kind == "model"


def test_a_token_of_another_text_is_named(model: ModelFile, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "changed.gguf", n_layers=1)
    data = path.read_bytes()
    # The byte token of "A" becomes that of "B" in the list of tokens.
    assert data.count(b"<0x41>") == 1
    path.write_bytes(data.replace(b"<0x41>", b"<0xZZ>"))
    with pytest.raises(ModelFileError, match=r"token \d+ is .*ZZ"):
        read_draft(path, model)


def test_rules_of_drafts_have_a_sentence_and_a_remedy(model: ModelFile, draft: Draft) -> None:
    assert draft.model is not None
    rowed = replace(single_device(2, "CUDA0"), split_mode="row", tensor_split=(("CUDA0", 1.0),))
    cases: dict[str, Draft] = {
        "draft_heads": Draft("mtp"),
        "draft_device": on(draft, "CUDA7"),
        "draft_split": replace(draft, layout=rowed),
        "draft_batch": Draft("ngram", n_tokens=60),
    }
    small = msgspec.structs.replace(CONTEXT, n_batch=64, n_ubatch=64)
    for rule, asked in cases.items():
        plan = plan_with(model, asked, context=small)
        assert rule in [each.rule for each in plan.violations]
        with pytest.raises(RuleViolationError):
            load_request(plan)


def test_advice_on_a_draft_that_cannot_gain(model: ModelFile, draft: Draft, tmp_path: Path) -> None:
    assert draft.model is not None
    rules = [each.rule for each in plan_with(model, on(draft, CPU_ID)).advice]
    assert "draft_on_cpu" in rules
    large = read_draft(write_tiny_llama(tmp_path / "large.gguf", n_layers=9, n_ff=256), model)
    assert "draft_larger" in [each.rule for each in plan_with(model, on(large, "CUDA0")).advice]
    assert not [each for each in plan_with(model, Draft("ngram")).advice if each.rule.startswith("draft")]
