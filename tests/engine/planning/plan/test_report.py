"""Forecast rows, plans and previews."""

from __future__ import annotations

from engine.base.units import GIB
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.planning.layout.layout import Layout, Run, Violation
from engine.planning.memory.estimate import DeviceMemory, Grade, MemoryEstimate
from engine.planning.plan.plan_document import plan_document, plan_text
from engine.planning.plan.preview import PreviewCache, make_preview
from engine.planning.plan.report import check_fit
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.probing.device_rows import rows_from_buffers
from engine.runtime.protocol.messages import BufferMemory
from tests.support.load_specs import plan_of
from tests.support.truth import truth_model

CARD = Device("CUDA0", "card", "CUDA", "gpu", 8 * GIB, free_bytes=6 * GIB, margin_bytes=GIB)
SPARE = Device("CUDA1", "spare", "CUDA", "gpu", 0)
RIG = Rig((CARD, SPARE), make_host("host", 64 * GIB))
CONTEXT = ContextSettings(n_ctx=4096)
MODEL = truth_model("llama-3.1-8b")
LAYOUT = Layout(32, (Run(CPU_ID, 0, 15), Run("CUDA0", 16, 31)), "CUDA0")
ROW_KEYS = {
    "id",
    "weights_bytes",
    "mapped_bytes",
    "kv_cache_bytes",
    "recurrent_bytes",
    "compute_bytes",
    "output_bytes",
    "overhead_bytes",
    "need_bytes",
    "total_bytes",
    "free_bytes",
    "margin_bytes",
    "shortfall_bytes",
    "grade",
    "pipeline_bytes",
    "projector_bytes",
    "answering_bytes",
    "late_bytes",
    "draft_bytes",
}


def test_a_row_for_every_device_with_the_host_last() -> None:
    report = check_fit(MemoryEstimate({"CUDA0": DeviceMemory(weights_bytes=4 * GIB)}, Grade.ESTIMATED), RIG)
    assert [row.id for row in report.rows] == ["CUDA0", "CUDA1", CPU_ID]
    assert report.rows[0].shortfall_bytes == -GIB
    assert report.fits


def test_a_shortfall_is_need_and_margin_less_what_is_free() -> None:
    report = check_fit(MemoryEstimate({"CUDA0": DeviceMemory(weights_bytes=5 * GIB + 1)}, Grade.ESTIMATED), RIG)
    assert report.rows[0].shortfall_bytes == 1
    assert not report.fits


def test_mapped_bytes_are_no_need() -> None:
    report = check_fit(MemoryEstimate({CPU_ID: DeviceMemory(mapped_bytes=900 * GIB)}, Grade.ESTIMATED), RIG)
    assert report.rows[-1].need_bytes == 0
    assert report.fits


def test_a_broken_rule_does_not_fit() -> None:
    assert not check_fit(MemoryEstimate({}, Grade.ESTIMATED), RIG, (Violation("rule", "No.", "Yes."),)).fits


def test_the_plan_document_has_the_keys_of_the_contract() -> None:
    document = plan_document(plan_of(MODEL, RIG, LAYOUT, CONTEXT))
    assert set(document) == {"layout", "devices", "fits", "violations", "decisions"}
    rows = document["devices"]
    assert isinstance(rows, list)
    assert [row["id"] for row in rows] == ["CUDA0", "CUDA1", CPU_ID]
    assert set(rows[0]) == ROW_KEYS
    assert rows[0]["grade"] == "estimated"
    assert document["fits"] is True


def test_the_text_names_layers_sizes_and_what_is_short() -> None:
    small = Rig((Device("CUDA0", "card", "CUDA", "gpu", GIB),), make_host("host", 64 * GIB))
    text = plan_text(plan_of(MODEL, small, LAYOUT, CONTEXT))
    assert "16-31  CUDA0" in text
    assert "CUDA0 is short by" in text
    assert text.endswith("It does not fit.")


def test_the_text_says_what_only_a_probe_can_tell() -> None:
    wrong = Layout(2, (Run(CPU_ID, 0, 1),), CPU_ID)
    text = plan_text(plan_of(MODEL, RIG, wrong, CONTEXT))
    assert "Not everything could be forecast: the layout is for 2 layers" in text
    assert text.endswith("It cannot be loaded.")


def test_a_preview_adds_up() -> None:
    tables = PreviewCache(MODEL)
    preview = make_preview(tables, plan_of(tables.memory, RIG, LAYOUT, CONTEXT))
    assert preview.layout == LAYOUT
    assert [layer.index for layer in preview.layers] == list(range(32))
    assert all(layer.kv_bytes == 4096 * 2 * 2 * 1024 for layer in preview.layers)
    row = preview.report.rows[0]
    expected = sum(layer.weights_bytes for layer in preview.layers[16:]) + preview.output_weights_bytes
    rope_tables_bytes = 256
    assert row.weights_bytes == expected + rope_tables_bytes
    assert row.kv_cache_bytes == sum(layer.kv_bytes for layer in preview.layers[16:])


def test_a_preview_follows_the_context() -> None:
    tables = PreviewCache(MODEL)
    short = make_preview(tables, plan_of(tables.memory, RIG, LAYOUT, CONTEXT))
    long = make_preview(tables, plan_of(tables.memory, RIG, LAYOUT, ContextSettings(n_ctx=8192)))
    again = make_preview(tables, plan_of(tables.memory, RIG, LAYOUT, ContextSettings(n_ctx=4096)))
    assert long.layers[0].kv_bytes == 2 * short.layers[0].kv_bytes
    assert again == short


def test_parts_are_folded_into_rows() -> None:
    parts = [
        BufferMemory(device="CUDA0", buffer_type="CUDA0", weights_bytes=5, kv_cache_bytes=4, compute_bytes=3),
        BufferMemory(device=CPU_ID, buffer_type="CPU_Mapped", weights_bytes=100, mapped=True),
        BufferMemory(device=CPU_ID, buffer_type="CPU_REPACK", weights_bytes=7),
        BufferMemory(device=CPU_ID, buffer_type="CUDA_Host", compute_bytes=2, output_bytes=1, recurrent_bytes=6),
        BufferMemory(device="gone", buffer_type="X", weights_bytes=1),
    ]
    card, spare, host = rows_from_buffers(parts, RIG, Grade.MEASURED)
    assert (card.weights_bytes, card.kv_cache_bytes, card.compute_bytes, card.need_bytes) == (5, 4, 3, 12)
    assert spare.need_bytes == 0
    assert (host.weights_bytes, host.mapped_bytes, host.recurrent_bytes, host.need_bytes) == (7, 100, 6, 16)
    assert host.grade is Grade.MEASURED


def test_a_span_mapped_for_a_device_is_a_need() -> None:
    part = BufferMemory(device="CUDA0", buffer_type="MTL0_Mapped", weights_bytes=9, mapped=True)
    assert rows_from_buffers([part], RIG, Grade.MEASURED)[0].need_bytes == 9
