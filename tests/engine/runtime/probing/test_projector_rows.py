"""Compute buffers of a projector stay a part of its device's forecast, and are not reported as a difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import Device, Rig, device_key, make_host
from engine.planning.fit.calibration import NO_CALIBRATION
from engine.planning.layout.layout import Layout, Run
from engine.planning.memory.estimate import DeviceMemory, Grade
from engine.planning.memory.side_files import Projector, SideFiles
from engine.planning.plan.report import DeviceRow, check_fit, make_row
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.probing.device_rows import rows_from_buffers
from engine.runtime.probing.probe import _completed
from engine.runtime.protocol.messages import PROJECTOR, BufferMemory
from tests.support.load_specs import plan_of
from tests.support.truth import truth_model

CARDS = tuple(Device(f"CUDA{number}", "card", "CUDA", "gpu", 24 * GIB, free_bytes=24 * GIB) for number in (0, 1))
RIG = Rig(CARDS, make_host("host", 64 * GIB))
LAYOUT = Layout(32, (Run("CUDA0", 0, 15), Run("CUDA1", 16, 31)), "CUDA1")
LARGE_BYTES = 2 * GIB


def with_projector(row: DeviceRow) -> DeviceRow:
    if row.id != "CUDA1":
        return row
    memory = replace(row.memory, compute_bytes=row.compute_bytes + LARGE_BYTES, projector_bytes=LARGE_BYTES)
    return make_row(CARDS[1], memory, Grade.PROBED)


def test_a_probe_of_several_cuda_devices_keeps_what_the_projector_computes_in(caplog: pytest.LogCaptureFixture) -> None:
    """There a probe takes the compute buffers from the arithmetic, which knows nothing of projectors."""
    files = SideFiles(Projector(Path("mmproj.gguf"), (), "CUDA1"))
    plan = plan_of(truth_model("llama-3.1-8b"), RIG, LAYOUT, ContextSettings(n_ctx=4096), files)
    alone = check_fit(plan.resolved.model_estimate, RIG).rows
    completed = _completed(plan, tuple(map(with_projector, alone)))
    for before, after in zip(alone, completed, strict=True):
        more_bytes = LARGE_BYTES if after.id == "CUDA1" else 0
        assert (after.projector_bytes, after.compute_bytes) == (more_bytes, before.compute_bytes + more_bytes)
    assert not caplog.records, "a forecast without the projector is no defect"


def test_a_member_of_a_tensor_split_has_its_projector_besides_the_common_buffer() -> None:
    parts = [
        BufferMemory(device="", buffer_type="Meta(CUDA0,CUDA1)", compute_bytes=5 * MIB),
        BufferMemory(device="CUDA1", buffer_type=PROJECTOR, compute_bytes=2 * MIB),
    ]
    estimate = {"CUDA0": DeviceMemory(weights_bytes=MIB), "CUDA1": DeviceMemory(weights_bytes=MIB)}
    first, second, _ = rows_from_buffers(parts, RIG, Grade.PROBED, estimate)
    assert (first.compute_bytes, first.projector_bytes) == (5 * MIB, 0)
    assert (second.compute_bytes, second.projector_bytes) == (7 * MIB, 2 * MIB)


def test_a_load_that_was_not_probed_teaches_no_overhead_of_the_projector() -> None:
    card = CARDS[0]
    forecast = make_row(card, DeviceMemory(weights_bytes=GIB, compute_bytes=10 * MIB), Grade.ESTIMATED)
    measured = make_row(
        card, DeviceMemory(weights_bytes=GIB, compute_bytes=60 * MIB, projector_bytes=50 * MIB), Grade.MEASURED
    )
    grown = {card.id: GIB + 60 * MIB + 7 * MIB}
    learnt = NO_CALIBRATION.with_load(RIG, [forecast], [measured], grown)
    assert learnt.overheads == {device_key(card): (7 * MIB,)}
