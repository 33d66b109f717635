"""Device cards: shown values, and the actions that they offer."""

from __future__ import annotations

from math import isnan

import pytest
from PySide6.QtCore import QEvent, QObject, Qt
from PySide6.QtGui import QAction
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QMenu
from pytestqt.qtbot import QtBot

from engine.base.numa import NumaNode
from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import Device, Fault, Findings, make_host
from engine.devices.telemetry.sample import Sample
from engine.planning.memory.estimate import DeviceMemory, Grade
from engine.planning.plan.report import make_row
from engine.planning.speed.speeds import Link
from tests.support.load_specs import holding
from widgets.common.palette import DARK, LIGHT
from widgets.devices.device_card import DeviceCard
from widgets.devices.device_strip import DeviceStrip
from widgets.devices.limits import DeviceLimits
from widgets.devices.memory_plot import WINDOW_S
from widgets.devices.readings import CardAlert, device_subtitle, simulated_text

GPU = Device("CUDA0", "RTX 3090", "CUDA", "gpu", 24 * GIB, pci_bus_id="0000:01:00.0")
REMOTE = Device("RPC0", "attic", "RPC", "gpu", 8 * GIB, endpoint="192.0.2.7:50052", cap_bytes=2 * GIB)
HOST = make_host("Ryzen 7", 64 * GIB)


def make_strip(qtbot: QtBot, *devices: Device) -> DeviceStrip:
    strip = DeviceStrip()
    qtbot.addWidget(strip)
    strip.set_devices(devices or (GPU, REMOTE, HOST))
    strip.resize(1100, 160)
    strip.show()
    return strip


def card_of(strip: DeviceStrip, device_id: str) -> DeviceCard:
    card = strip.card(device_id)
    assert card is not None
    return card


def actions_of(menu: QMenu) -> dict[str, QAction]:
    return {action.text(): action for action in menu.actions()}


def test_the_nodes_of_the_processor_are_parts_of_its_card(qtbot: QtBot) -> None:
    nodes = (
        NumaNode(0, frozenset(range(8)), 32 * GIB, 8 * GIB, (10, 21)),
        NumaNode(1, frozenset(range(8, 16)), 32 * GIB, None, (21, 10)),
    )
    strip = make_strip(qtbot, make_host("Xeon", 64 * GIB, nodes=nodes))
    card = card_of(strip, "CPU")
    assert device_subtitle(card.device) == "Xeon · 2 NUMA nodes"
    tip = card.toolTip()
    assert "node 0: CPUs 0-7, 32.00 GiB, 8.00 GiB free; distances: 21 to node 1" in tip
    assert "node 1: CPUs 8-15, 32.00 GiB; distances: 21 to node 0" in tip
    with qtbot.waitSignal(strip.split_requested):
        actions_of(card.context_menu())["Split by NUMA node…"].trigger()
    one = make_strip(qtbot, make_host("Ryzen", 64 * GIB, nodes=nodes[:1]))
    assert "Split by NUMA node…" not in actions_of(card_of(one, "CPU").context_menu())


def test_a_card_shows_a_reading(qtbot: QtBot) -> None:
    strip = make_strip(qtbot)

    strip.add_samples([Sample("CUDA0", 1.0, 18 * GIB, 24 * GIB, 17 * GIB, 87.0, 64.0, 285.4)])

    card = card_of(strip, "CUDA0")
    assert card.used_text == "18.00"
    assert card.total_text == "/ 24.00 GiB"
    assert card.status_text == "87 % 64 °C 285 W"
    assert card.plot.points() == ((1.0, 18.0 * GIB, 1.0 * GIB),)


def test_a_missing_reading_is_a_gap_and_zero_is_not(qtbot: QtBot) -> None:
    strip = make_strip(qtbot)
    card = card_of(strip, "RPC0")

    strip.add_samples([Sample("RPC0", 1.0, 0, 8 * GIB, own_bytes=0)])
    assert (card.used_text, card.status_text) == ("0.00", "idle")

    strip.add_samples([Sample("RPC0", 2.0, None, None, note="remote: no live reading")])
    assert (card.used_text, card.status_text) == ("—", "remote: no live reading")
    assert card.total_text == "/ 8.00 GiB (cap 2.00 GiB)"
    zero, missing = card.plot.points()
    assert zero[1] == 0.0
    assert isnan(missing[1])


def test_the_graph_forgets_what_is_older_than_its_window(qtbot: QtBot) -> None:
    strip = make_strip(qtbot)
    for time_s in range(400):
        strip.add_samples([Sample("CPU", float(time_s), GIB, 64 * GIB)])

    points = card_of(strip, "CPU").plot.points()

    assert points[-1][0] == 399.0
    assert points[0][0] == 399.0 - WINDOW_S


def test_a_limit_is_drawn_once_the_height_of_the_graph_is_known(qtbot: QtBot) -> None:
    strip = make_strip(qtbot)
    plot = card_of(strip, "CPU").plot
    plot.setFixedSize(120, 40)
    plot.set_limit(16 * GIB)
    empty = plot.grab().toImage()
    strip.add_samples([Sample("CPU", 1.0, 0, 64 * GIB)])
    drawn = plot.grab().toImage()
    assert {empty.pixelColor(x, 30).name() for x in range(100)} == {DARK.background}
    assert DARK.dim in {drawn.pixelColor(x, 30).name() for x in range(100)}


def test_the_graph_is_filled_to_the_memory_in_use_but_for_a_gap(qtbot: QtBot) -> None:
    strip = make_strip(qtbot)
    plot = card_of(strip, "CPU").plot
    plot.setFixedSize(120, 40)  # a pixel for each second
    for time_s in range(120):
        used_bytes = None if time_s == 60 else 32 * GIB if time_s < 60 else 16 * GIB
        strip.add_samples([Sample("CPU", float(time_s), used_bytes, 64 * GIB)])
    picture = plot.grab().toImage()
    heights = [
        sum(picture.pixelColor(x, y).name() != DARK.background for y in range(picture.height())) for x in (30, 61, 90)
    ]
    assert [round(height / picture.height(), 1) for height in heights] == [0.5, 0.0, 0.2]


def test_cards_keep_their_graph_when_the_rig_changes(qtbot: QtBot) -> None:
    strip = make_strip(qtbot, GPU, HOST)
    strip.add_samples([Sample("CUDA0", 1.0, GIB, 24 * GIB), Sample("CPU", 1.0, GIB, 64 * GIB)])
    host_card = card_of(strip, "CPU")

    strip.set_devices([REMOTE, HOST])

    assert [card.device.id for card in strip.cards()] == ["RPC0", "CPU"]
    assert card_of(strip, "CPU") is host_card
    assert len(host_card.plot.points()) == 1
    qtbot.waitUntil(lambda: strip.cards()[0].x() < strip.cards()[1].x())
    strip.add_samples([Sample("CUDA0", 2.0, GIB, 24 * GIB)])
    assert strip.card("CUDA0") is None


def test_many_cards_scroll_instead_of_shrinking(qtbot: QtBot) -> None:
    devices = [
        Device(f"RPC{index}", "lab", "RPC", "gpu", GIB, endpoint=f"127.0.0.1:{index + 1}") for index in range(12)
    ]
    strip = make_strip(qtbot, *devices, HOST)
    strip.resize(640, strip.height())

    qtbot.waitUntil(lambda: strip.scroll_bar().maximum() > 0)

    assert all(card.width() >= card.minimumWidth() for card in strip.cards())
    assert strip.scroll_bar().isVisible()
    card = strip.cards()[0]
    qtbot.waitUntil(lambda: strip.height() == card.sizeHint().height() + strip.scroll_bar().height())
    qtbot.waitUntil(lambda: card.height() == card.sizeHint().height())


def test_every_card_is_seen_whole(qtbot: QtBot) -> None:
    strip = make_strip(qtbot)

    qtbot.waitUntil(lambda: strip.height() == strip.cards()[0].sizeHint().height())

    assert not strip.scroll_bar().isVisible()


def test_limits_are_edited_from_the_menu(qtbot: QtBot) -> None:
    strip = make_strip(qtbot)
    dialog = strip.edit_limits(REMOTE)
    assert dialog.cap_edit.text() == "2GiB"

    dialog.cap_edit.setText("512MiB")
    dialog.margin_edit.setText("64 MiB")
    with qtbot.waitSignal(strip.limits_edited) as edited:
        QTest.keyClick(dialog.margin_edit, Qt.Key.Key_Return)

    assert edited.args == [DeviceLimits("RPC0", 512 * MIB, 64 * MIB)]
    assert not dialog.isVisible()


def test_a_size_that_cannot_be_used_keeps_the_dialog_open(qtbot: QtBot) -> None:
    strip = make_strip(qtbot)
    dialog = strip.edit_limits(GPU)
    dialog.cap_edit.setText("a lot")

    with qtbot.assertNotEmitted(strip.limits_edited):
        QTest.keyClick(dialog.cap_edit, Qt.Key.Key_Return)

    assert dialog.isVisible()
    assert '"a lot" is not a size' in dialog.problem_label.text()
    with qtbot.waitSignal(dialog.finished):
        dialog.reject()


def test_the_menu_opens_the_limits_of_its_card(qtbot: QtBot) -> None:
    strip = make_strip(qtbot)
    card = card_of(strip, "CUDA0")

    with qtbot.waitSignal(card.limits_requested) as requested:
        actions_of(card.context_menu())["Memory cap and margin…"].trigger()

    assert requested.args == [GPU]


@pytest.mark.qt_log_ignore("plugin does not support", extend=True)  # no window manager takes popups to the front
def test_the_button_on_a_card_opens_its_menu(qtbot: QtBot) -> None:
    strip = make_strip(qtbot)
    opened: list[QMenu] = []

    class Watcher(QObject):
        def eventFilter(self, watched: QObject, event: QEvent) -> bool:
            if event.type() is QEvent.Type.Show and isinstance(watched, QMenu):
                opened.append(watched)
            return False

    watcher = Watcher()
    application = QApplication.instance()
    assert application is not None
    application.installEventFilter(watcher)
    QTest.mouseClick(card_of(strip, "RPC0").menu_button, Qt.MouseButton.LeftButton)
    application.removeEventFilter(watcher)

    assert len(opened) == 1
    assert "Remove RPC0 from the rig" in actions_of(opened[0])
    opened[0].close()


def test_only_rpc_devices_can_be_removed(qtbot: QtBot) -> None:
    strip = make_strip(qtbot)
    remove = actions_of(card_of(strip, "RPC0").context_menu())["Remove RPC0 from the rig"]

    with qtbot.waitSignal(strip.remove_requested) as removed:
        remove.trigger()

    assert removed.args == ["RPC0"]
    assert list(actions_of(card_of(strip, "CUDA0").context_menu())) == ["Details…", "Memory cap and margin…"]


def test_details_are_asked_for_by_a_click_and_in_the_menu(qtbot: QtBot) -> None:
    strip = make_strip(qtbot)
    card = card_of(strip, "CUDA0")
    with qtbot.waitSignal(strip.details_requested) as asked:
        QTest.mouseClick(card, Qt.MouseButton.LeftButton)
    assert asked.args == [card.device]
    with qtbot.waitSignal(strip.details_requested):
        actions_of(card.context_menu())["Details…"].trigger()
    with qtbot.assertNotEmitted(strip.details_requested):
        QTest.mouseClick(card, Qt.MouseButton.RightButton)


def test_more_devices_are_asked_for_at_the_end(qtbot: QtBot) -> None:
    strip = make_strip(qtbot)
    actions = actions_of(strip.add_button.menu())

    with qtbot.waitSignal(strip.add_remote_requested):
        actions["Remote worker…"].trigger()
    with qtbot.waitSignal(strip.add_lab_requested):
        actions["Lab rig…"].trigger()


def test_rows_tell_what_the_layout_needs(qtbot: QtBot) -> None:
    strip = make_strip(qtbot)
    memory = DeviceMemory(weights_bytes=3 * GIB, kv_cache_bytes=512 * MIB)

    strip.set_rows([make_row(GPU, memory, Grade.PROBED), make_row(HOST, DeviceMemory(), Grade.ESTIMATED)])

    assert "needs 3.50 GiB on this device (probed)" in card_of(strip, "CUDA0").toolTip()
    assert "KV cache 512.0 MiB" in card_of(strip, "CUDA0").toolTip()
    assert "The layout places nothing on this device." in card_of(strip, "CPU").toolTip()
    assert "layout" not in card_of(strip, "RPC0").toolTip()


def test_what_the_engine_cannot_do_on_a_device_is_told(qtbot: QtBot) -> None:
    strip = make_strip(qtbot)
    fault = Fault("flash_attention", "It dies (SIGSEGV) with flash attention with a q4_0 cache.", "q4_0")
    card_of(strip, "CUDA0").set_device(replace(GPU, findings=Findings((fault,))))
    assert (
        "Feature not used on this device: It dies (SIGSEGV) with flash attention" in card_of(strip, "CUDA0").toolTip()
    )


def test_the_palette_reaches_graphs_of_old_and_new_cards(qtbot: QtBot) -> None:
    strip = make_strip(qtbot, GPU)
    strip.apply_palette(LIGHT)
    strip.set_devices([GPU, HOST])

    for card in strip.cards():
        color = card.plot.grab().toImage().pixelColor(2, 2).name()
        assert color == LIGHT.background
        assert color != DARK.background


def test_an_alert_takes_the_place_of_the_readings_and_goes_again(qtbot: QtBot) -> None:
    strip = make_strip(qtbot)
    strip.add_samples([Sample("CUDA0", 1.0, 18 * GIB, 24 * GIB, 17 * GIB, 87.0, 64.0, 285.4)])
    card = card_of(strip, "CUDA0")

    strip.set_alerts({"CUDA0": CardAlert("memory is low", "CUDA0 has only 90.0 MiB left. Close what uses it.")})
    strip.add_samples([Sample("CUDA0", 2.0, 23 * GIB, 24 * GIB, 17 * GIB, 87.0, 64.0, 285.4)])

    assert card.status_text == "memory is low"
    assert "CUDA0 has only 90.0 MiB left." in card.toolTip()
    assert card_of(strip, "CPU").property("role") == "panel"
    strip.set_alerts({})
    assert card.status_text == "87 % 64 °C 285 W"
    assert "left" not in card.toolTip()
    assert card.property("role") == "panel"


def test_a_card_names_the_other_models_that_hold_memory_there(qtbot: QtBot) -> None:
    strip = make_strip(qtbot)
    held = replace(GPU, holdings=(holding("mix <b>ture</b>", 3 * GIB), holding("tiny", 5 * MIB)))
    strip.set_devices((held, REMOTE, HOST))
    assert "mix &lt;b&gt;ture&lt;/b&gt; uses 3.00 GiB<br>tiny uses 5.0 MiB" in card_of(strip, "CUDA0").toolTip()
    assert "holds" not in card_of(strip, "CPU").toolTip()


def test_a_compact_strip_has_no_graphs_and_is_lower(qtbot: QtBot) -> None:
    strip = make_strip(qtbot)
    full_px = strip.height()
    strip.set_compact(True)
    qtbot.waitUntil(lambda: strip.height() < full_px)
    strip.set_devices((GPU, replace(GPU, id="CUDA1"), HOST))
    assert not any(card.plot.isVisible() for card in strip.cards())
    strip.set_compact(False)
    qtbot.waitUntil(lambda: strip.height() == full_px)
    assert all(card.plot.isVisible() for card in strip.cards())


def test_a_worker_tells_how_far_away_it_is(qtbot: QtBot) -> None:
    strip = make_strip(qtbot)
    assert "not measured" in card_of(strip, "RPC0").toolTip()
    strip.set_links({"RPC0": Link(0.0012, 1.1e8), "CUDA0": Link(1e-5, 1e10)})
    strip.add_samples([Sample("RPC0", 1.0, GIB, 8 * GIB, 0, None, None, None), Sample("CUDA0", 1.0, GIB, 24 * GIB)])
    assert card_of(strip, "RPC0").status_text == "idle · 1.2 ms, 110 MB/s"
    assert "1.2 ms; weights are sent at 110 MB/s" in card_of(strip, "RPC0").toolTip()
    assert "ms" not in card_of(strip, "CUDA0").status_text, "a card of this machine"
    strip.set_devices([replace(REMOTE, id="RPC1"), REMOTE])
    strip.set_links({"RPC1": Link(0.5, 1e6)})
    assert card_of(strip, "RPC1").status_text.endswith("500 ms, 1 MB/s")
    assert card_of(strip, "RPC0").status_text == "idle"


def test_a_worker_of_another_machine_tells_where_its_margin_is_from(qtbot: QtBot) -> None:
    strip = make_strip(qtbot, replace(REMOTE, margin_bytes=256 * MIB))
    assert "Layerdeck keeps 256.0 MiB of memory free (the default" in card_of(strip, "RPC0").toolTip()


def test_a_line_explains_the_devices_of_a_lab(qtbot: QtBot) -> None:
    strip = make_strip(qtbot)
    height = strip.height()
    words = simulated_text(["RPC0", "RPC1", "RPC2"])
    assert words == "RPC0 to RPC2 are three simulated devices on this computer."
    assert simulated_text(("RPC0", "RPC1")) == "RPC0 and RPC1 are two simulated devices on this computer."
    assert simulated_text(["RPC0"]) == "RPC0 is a simulated device on this computer."
    strip.set_note(words)
    assert strip.note_label.isVisible()
    assert strip.height() > height
    strip.set_line(True)
    assert not strip.note_label.isVisible()
    strip.set_line(False)
    assert strip.note_label.isVisible()
    strip.set_note(simulated_text([]))
    assert strip.height() == height


def test_a_device_that_is_away_is_greyed_and_says_so(qtbot: QtBot) -> None:
    lent = Device("attic-CPU", "attic", "RPC", "gpu", 8 * GIB, endpoint="192.0.2.7:50052/CPU", fingerprint="ab" * 32)
    strip = make_strip(qtbot, replace(lent, away="used by garden"))
    card = card_of(strip, "attic-CPU")
    assert card.status_text == "used by garden"
    assert "checks it again automatically" in card.toolTip()
    assert card._id_label.property("role") == "dim"
    assert "Remove attic-CPU from the rig" in actions_of(card.context_menu())
    strip.set_devices((lent,))
    assert card.status_text != "used by garden"
    assert card._id_label.property("role") == "strong"


def test_a_small_window_shows_all_devices_until_it_is_closed(qtbot: QtBot) -> None:
    strip = make_strip(qtbot)
    strip.show_on_top(True)
    assert strip.on_top.isVisible()
    strip.add_samples([Sample("CUDA0", 1.0, 6 * GIB, 24 * GIB)])
    told = strip.on_top.line.accessibleDescription()
    assert told == strip.line.accessibleDescription()
    assert "CUDA0 6.00 / 24.00 GiB" in told
    with qtbot.waitSignal(strip.on_top.closed):
        strip.on_top.close()
    strip.show_on_top(True)
    with qtbot.assertNotEmitted(strip.on_top.closed):
        strip.show_on_top(False)
    assert not strip.on_top.isVisible()
