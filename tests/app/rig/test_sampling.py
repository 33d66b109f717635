"""The headroom monitor: it watches the devices of loaded models, warns once, and withdraws the warning."""

from __future__ import annotations

import pytest
from msgspec import Struct, field
from pytestqt.qtbot import QtBot

from app.rig.device_list import DeviceList
from app.rig.live_rig import LiveRig
from app.rig.sampling import HeadroomMonitor
from engine.base.units import GIB, MIB
from engine.devices.device import Device, Rig, make_host
from engine.devices.telemetry.sample import Sample
from widgets.devices.readings import CardAlert

CARDS = tuple(Device(name, "card", "CUDA", "gpu", 8 * GIB, margin_bytes=512 * MIB) for name in ("CUDA0", "CUDA1"))
RIG = Rig(CARDS, make_host("host", 32 * GIB))


class Watched(Struct, dict=True):
    live: LiveRig
    headroom_monitor: HeadroomMonitor
    alerts: list[dict[str, CardAlert]] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def read(self, time_s: float, **free_bytes: int) -> None:
        samples = (Sample(each.id, time_s, 8 * GIB - free_bytes[each.id], 8 * GIB) for each in CARDS)
        self.live.samples_arrived.emit(tuple(samples))


@pytest.fixture
def watched(qtbot: QtBot) -> Watched:
    live = LiveRig()
    live.set_devices(DeviceList(RIG))
    made = Watched(live, HeadroomMonitor(live))
    made.headroom_monitor.alerts_changed.connect(made.alerts.append)
    made.headroom_monitor.alarmed.connect(made.alarms.append)
    made.headroom_monitor.alarm_ended.connect(made.ended.append)
    return made


def test_nothing_is_watched_while_nothing_is_loaded(watched: Watched) -> None:
    for time_s in range(5):
        watched.read(time_s, CUDA0=MIB, CUDA1=MIB)
    assert watched.alerts == []


def test_an_alarm_is_given_once_and_its_alert_stays_until_there_is_room(watched: Watched) -> None:
    watched.headroom_monitor.watch(["CUDA0"])
    for time_s in range(6):
        watched.read(time_s, CUDA0=100 * MIB, CUDA1=MIB)
    assert [set(alerts) for alerts in watched.alerts] == [{"CUDA0"}]
    assert watched.alerts[0]["CUDA0"].words == "memory is low"
    (alarm,) = watched.alarms
    assert alarm.startswith("CUDA0 has only 100.0 MiB of memory left")
    for time_s in range(6, 12):
        watched.read(time_s, CUDA0=3 * GIB, CUDA1=MIB)
    assert watched.alerts[-1] == {}
    assert len(watched.alarms) == 1
    assert watched.ended == [alarm]


def test_what_is_unloaded_is_not_worried_about(watched: Watched) -> None:
    watched.headroom_monitor.watch(["CUDA0"])
    for time_s in range(3):
        watched.read(time_s, CUDA0=100 * MIB, CUDA1=MIB)
    watched.headroom_monitor.watch([])
    assert watched.alerts[-1] == {}
    watched.read(4, CUDA0=100 * MIB, CUDA1=MIB)
    assert watched.alerts[-1] == {}
