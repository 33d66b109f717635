"""The details of a device: readings, holders, graphs, values at the pointer, and the saved file."""

from __future__ import annotations

import csv
import io

import pytest
from pytestqt.qtbot import QtBot

from engine.base.units import GIB, MIB
from engine.devices.device import Device
from engine.devices.telemetry.sample import CardState, Sample, gap
from widgets.common.palette import DARK
from widgets.devices.device_details import SPANS_MIN, DeviceDetails, reading_lines
from widgets.devices.readings import HolderLine, PlotEvent

GPU = Device("CUDA0", "RTX 3090", "CUDA", "gpu", 24 * GIB, pci_bus_id="0000:01:00.0")
STATE = CardState(350.0, 1695.0, 9751.0, 4, 16, ("power limit",))


def sample(time_s: float, used_gib: float = 5.0, power_w: float = 200.0) -> Sample:
    return Sample("CUDA0", time_s, round(used_gib * GIB), 24 * GIB, GIB, 87.0, 64.0, power_w, card=STATE)


@pytest.fixture
def details(qtbot: QtBot) -> DeviceDetails:
    made = DeviceDetails(GPU, DARK)
    qtbot.addWidget(made)
    return made


def test_all_readings_of_a_card_are_named_with_their_units() -> None:
    assert dict(reading_lines(GPU, sample(1.0))) == {
        "Memory": "5.00 GiB of 24.00 GiB",
        "Used by Layerdeck": "1.00 GiB",
        "Utilisation": "87 %",
        "Temperature": "64 °C",
        "Power": "200 W / 350 W",
        "Clocks (core, memory)": "1695 MHz, 9751 MHz",
        "PCIe": "generation 4, 16 lanes",
        "Clocks reduced because of": "power limit",
    }


def test_what_is_not_read_has_no_line() -> None:
    assert dict(reading_lines(GPU, Sample("CUDA0", 1.0, GIB, None))) == {"Memory": "1.00 GiB of 24.00 GiB"}
    assert dict(reading_lines(GPU, gap("CUDA0", 1.0, "the card was removed"))) == {"Readings": "the card was removed"}
    assert len(reading_lines(GPU, None)) == 1


def test_graphs_without_values_are_hidden(details: DeviceDetails) -> None:
    details.set_history([Sample("CUDA0", 1.0, GIB, 24 * GIB, temperature_c=40.0)], ())
    assert details.shown_graphs == ("Memory", "Temperature")
    details.add_sample(sample(2.0))
    assert len(details.shown_graphs) == 4
    assert "Power: 200 W / 350 W" in details.reading_text


def test_the_memory_of_a_small_device_is_not_scaled_by_a_factor(details: DeviceDetails) -> None:
    details.show()
    details.set_history([Sample("CUDA0", second, MIB << 7, 160 * MIB) for second in (1.0, 2.0)], ())
    (_, plot, _), *_ = details._plots
    assert "x0.001" not in plot.getAxis("left").labelString()


def test_the_pointer_shows_the_nearest_reading_and_what_happened(details: DeviceDetails) -> None:
    readings = [sample(float(second), used_gib=second) for second in range(1, 11)]
    details.set_history(readings, [PlotEvent(4.2, "Qwen3 loaded")])
    details.point_at(6.0)
    assert details.pointed_text == "6 s ago  4.00 GiB  87 %  64 °C  200 W  Qwen3 loaded"
    details.point_at(None)
    assert details.pointed_text == ""


def test_a_pause_stops_the_graphs_and_no_reading_is_lost(details: DeviceDetails) -> None:
    details.set_history([sample(1.0)], ())
    details.pause_button.click()
    details.add_sample(sample(2.0, power_w=300.0))
    assert "300 W" in details.reading_text
    assert len(list(csv.reader(io.StringIO(details.csv_text())))) == 3
    details.pause_button.click()
    assert not details.is_paused


def test_readings_older_than_the_longest_span_go(details: DeviceDetails) -> None:
    details.set_history([sample(0.0), sample(10.0)], [PlotEvent(1.0, "old")])
    details.add_sample(sample(60.0 * SPANS_MIN[-1] + 5.0))
    rows = list(csv.DictReader(io.StringIO(details.csv_text())))
    assert [row["seconds"] for row in rows] == ["0.0", f"{60.0 * SPANS_MIN[-1] - 5.0:.1f}"]


def test_csv_has_readings_and_marks_in_the_order_of_time(details: DeviceDetails) -> None:
    details.set_history([sample(100.0), gap("CUDA0", 102.0, "")], [PlotEvent(101.0, 'out of memory, "Qwen3"')])
    rows = list(csv.DictReader(io.StringIO(details.csv_text())))
    assert [(row["seconds"], row["used_bytes"], row["mark"]) for row in rows] == [
        ("0.0", str(5 * GIB), ""),
        ("1.0", "", 'out of memory, "Qwen3"'),
        ("2.0", "", ""),
    ]
    assert rows[0]["throttled_by"] == "power limit"


def test_holders_and_the_picture(details: DeviceDetails) -> None:
    details.set_holders([HolderLine("Qwen3 (loaded here)", 2 * GIB), HolderLine("firefox (12)", None)])
    cells = [details.holders.item(row, column) for row in range(2) for column in range(2)]
    assert [cell.text() for cell in cells if cell is not None] == [
        "Qwen3 (loaded here)",
        "2.00 GiB",
        "firefox (12)",
        "—",
    ]
    details.set_history([sample(1.0), sample(2.0)], [PlotEvent(1.5, "answer")])
    assert details.picture().startswith(b"\x89PNG")


def test_a_mark_with_braces_is_drawn_as_it_is(details: DeviceDetails) -> None:
    """Names of models come from files; pyqtgraph takes labels of lines for format strings."""
    details.set_history([sample(0.0), sample(10.0)], [PlotEvent(5.0, "{model} {0.real} {")])
    _, plot, _ = details._plots[0]
    (label,) = [each.label.toPlainText() for each in plot.items if getattr(each, "is_mark", False)]
    assert label == "{model} {0.real} {"


def test_labels_of_close_marks_are_below_each_other(details: DeviceDetails) -> None:
    times = (0.0, 1.0, 2.0, 200.0)
    details.set_history([sample(0.0), sample(210.0)], [PlotEvent(time_s, "answer") for time_s in times])
    _, plot, _ = details._plots[0]
    heights = {each.value(): each.label.orthoPos for each in plot.items if getattr(each, "is_mark", False)}
    assert [round(heights[time_s - 210.0], 2) for time_s in times] == [0.95, 0.79, 0.63, 0.95]
