"""Calibration: values learnt from a load, values that are not, corrected forecasts, and its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.base.errors import DocumentError
from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import Device, Rig, device_key, make_host
from engine.planning.fit.calibration import (
    MAX_LOADS,
    MAX_OVERHEAD_BYTES,
    MAX_STORED_DEVICES,
    NO_CALIBRATION,
    Calibration,
    computing_need,
    read_calibration,
    write_calibration,
)
from engine.planning.layout.layout import single_device
from engine.planning.memory.estimate import DeviceMemory, Grade, MemoryEstimate
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import DeviceRow, check_fit, make_row, with_measured_overhead
from engine.planning.settings.context_settings import ContextSettings
from tests.support.load_specs import N_LAYERS, made_up_model, plan_of, worker_device

CARD = Device("CUDA0", "card", "CUDA", "gpu", 24 * GIB, pci_bus_id="0000:0A:00.0")
REMOTE = worker_device("RPC0", "attic:50052", GIB)
RIG = Rig((CARD, REMOTE), make_host("host", 64 * GIB))


def forecast(card_bytes: int, remote_bytes: int, overhead_bytes: int = 400 * MIB) -> tuple[DeviceRow, ...]:
    return (
        make_row(CARD, DeviceMemory(weights_bytes=card_bytes, overhead_bytes=overhead_bytes), Grade.ESTIMATED),
        make_row(REMOTE, DeviceMemory(weights_bytes=remote_bytes), Grade.ESTIMATED),
    )


def measured(card_bytes: int, remote_bytes: int) -> tuple[DeviceRow, ...]:
    return tuple(replace_grade(row) for row in forecast(card_bytes, remote_bytes, overhead_bytes=0))


def replace_grade(row: DeviceRow) -> DeviceRow:
    return make_row(
        CARD if row.id == "CUDA0" else REMOTE, DeviceMemory(weights_bytes=row.weights_bytes), Grade.MEASURED
    )


def test_cards_learn_from_their_growth_and_remote_devices_from_the_engine() -> None:
    learned = NO_CALIBRATION.with_load(
        RIG, forecast(GIB, GIB), measured(GIB, GIB + 5 * MIB), {"CUDA0": GIB + 600 * MIB}
    )
    card, remote = learned.apply(RIG).devices
    assert (card.overhead_bytes, remote.overhead_bytes) == (600 * MIB, 5 * MIB)
    assert learned.apply(RIG).host.overhead_bytes is None


def test_what_was_learned_replaces_the_overhead_where_the_device_is_used() -> None:
    rig = NO_CALIBRATION.with_load(RIG, forecast(GIB, GIB), measured(GIB, GIB), {"CUDA0": GIB + 600 * MIB}).apply(RIG)
    used = {"CUDA0": DeviceMemory(weights_bytes=GIB, overhead_bytes=400 * MIB)}
    card, remote, _ = check_fit(MemoryEstimate(used, Grade.ESTIMATED), rig).rows
    assert (card.overhead_bytes, card.need_bytes) == (600 * MIB, GIB + 600 * MIB)
    assert remote.need_bytes == 0
    assert check_fit(MemoryEstimate(used, Grade.ESTIMATED), RIG).rows[0].overhead_bytes == 400 * MIB


def test_the_middle_of_the_last_loads_counts() -> None:
    learned = NO_CALIBRATION
    for size in (900, 100, 300, 200, 500, 400):
        learned = learned.with_load(RIG, forecast(GIB, GIB), measured(GIB, GIB), {"CUDA0": GIB + size * MIB})
    assert len(learned.overheads[device_key(CARD)]) == MAX_LOADS
    assert learned.overhead_bytes(CARD) == 300 * MIB


@pytest.mark.parametrize(
    ("grown_bytes", "expected"), [(GIB - 1, 0), (GIB + MAX_OVERHEAD_BYTES, MAX_OVERHEAD_BYTES), (8 * GIB, None)]
)
def test_wrong_forecasts_are_no_overhead(grown_bytes: int, expected: int | None) -> None:
    learned = NO_CALIBRATION.with_load(RIG, forecast(GIB, GIB), measured(GIB, GIB), {"CUDA0": grown_bytes})
    assert learned.overhead_bytes(CARD) == expected


def test_devices_without_a_forecast_and_unused_ones_teach_nothing() -> None:
    assert NO_CALIBRATION.with_load(RIG, (), measured(GIB, GIB), {}) == NO_CALIBRATION
    assert NO_CALIBRATION.with_load(RIG, forecast(0, 0), measured(GIB, GIB), {}) == NO_CALIBRATION
    assert NO_CALIBRATION.with_load(RIG, forecast(GIB, GIB), measured(0, 0), {}) == NO_CALIBRATION


def test_a_device_is_known_by_where_it_is() -> None:
    learned = NO_CALIBRATION.with_load(RIG, forecast(GIB, GIB), measured(GIB, GIB), {"CUDA0": GIB + MIB})
    assert learned.overhead_bytes(replace(CARD, id="CUDA7", pci_bus_id="0000:0a:00.0")) == MIB
    assert learned.overhead_bytes(replace(CARD, backend="Vulkan")) is None
    assert learned.overhead_bytes(replace(REMOTE, endpoint_device=1)) is None


def test_the_file_is_bounded_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "data" / "calibration.json"
    many = Calibration({f"CUDA {number}": (number * MIB,) for number in range(MAX_STORED_DEVICES + 3)})
    write_calibration(path, many)
    found = read_calibration(path)
    assert list(found.overheads)[-1] == f"CUDA {MAX_STORED_DEVICES + 2}"
    assert len(found.overheads) == MAX_STORED_DEVICES
    write_calibration(path, NO_CALIBRATION)
    assert read_calibration(path) == NO_CALIBRATION
    assert [each.name for each in path.parent.iterdir()] == ["calibration.json"]


def test_a_folder_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DocumentError, match="cannot be created"):
        write_calibration(tmp_path / "file" / "calibration.json", NO_CALIBRATION)


@given(st.binary(max_size=200) | st.sampled_from([b'{"version": 2, "overhead_bytes": {}}', b"[]", b"x" * 70000]))
def test_a_damaged_file_is_none(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("damaged") / "calibration.json"
    assert read_calibration(path) == NO_CALIBRATION
    path.write_bytes(data)
    assert read_calibration(path) == NO_CALIBRATION


def test_what_computing_took_is_kept_and_planned_with_for_the_same_and_larger_settings(tmp_path: Path) -> None:
    def plan(rig: Rig, **changes: Any) -> Plan:
        context = ContextSettings(n_ctx=4096, n_ubatch=512, flash_attn="off")
        layout = single_device(N_LAYERS, "CUDA0")
        return plan_of(made_up_model(), rig, layout, msgspec.structs.replace(context, **changes))

    card = replace(CARD, free_bytes=20 * GIB, total_bytes=24 * GIB)
    found = plan(Rig((card,), RIG.host))
    row = found.forecast[0]
    need = computing_need(found, "CUDA0")
    assert need is not None
    # All that was left besides weights, state and buffers was not enough.
    assert need.overhead_bytes == 20 * GIB - (row.need_bytes - row.overhead_bytes) + 1
    assert computing_need(found, "CPU") is None
    need = msgspec.structs.replace(need, overhead_bytes=3 * GIB)
    write_calibration(tmp_path / "calibration.json", NO_CALIBRATION.with_need(need))
    kept = read_calibration(tmp_path / "calibration.json")
    assert kept.computing == (need,)
    rig = kept.apply(Rig((card,), RIG.host))
    with_weights = DeviceMemory(weights_bytes=GIB, overhead_bytes=400 * MIB)

    def of(plan: Plan) -> int:
        return with_measured_overhead(plan.learned_rig.devices[0], with_weights).overhead_bytes

    assert of(plan(rig)) == of(plan(rig, n_ctx=8192)) == of(plan(rig, n_ubatch=1024)) == 3 * GIB
    assert of(plan(rig, flash_attn="on")) == of(plan(rig, n_ctx=2048)) == of(plan(rig, n_ubatch=256)) == 400 * MIB
    assert of(plan(rig, type_k="q8_0")) == 400 * MIB
    assert kept.with_need(need).computing == (need,)
    # More than any computing takes: another program took the memory.
    assert kept.with_need(msgspec.structs.replace(need, overhead_bytes=20 * GIB)) == kept
