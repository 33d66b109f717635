"""Processor time and memory of the window while it shows eight cards, with a reading of each per second.

    python -m benchmarks.device_readings [--seconds 60]

The whole window runs in this process, and starts with the readings of an hour. The cards and their readings are
simulated; the sampler thread is the real one, and the details of one card are open. Printed are:

`core_percent`: processor time of the process, in percent of one core. Goal: less than 2.
`resident_mb`: resident memory at the end, in megabytes. Goal: less than 250.
`grown_mb`: growth of it in the second half of the time. Goal: less than 1.

`ok` is true if all goals are met. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import psutil

N_CARDS = 8
HOUR_S = 3600
WARM_UP_S = 5.0
SIZE = 1440, 900
MB = 1_000_000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    with tempfile.TemporaryDirectory() as home:
        for name in ("CONFIG", "DATA", "STATE", "CACHE"):
            os.environ[f"XDG_{name}_HOME"] = home
        print(json.dumps(_measure(Path(home), options.seconds)))


def _measure(home: Path, seconds: float) -> dict[str, float | bool]:
    from PySide6.QtCore import QEventLoop, QObject, Qt, QTimer, Signal
    from PySide6.QtWidgets import QApplication

    from app.rig.device_list import DeviceList
    from app.settings import Settings
    from app.theme import Theme
    from app.wiring import make_window
    from engine.base.units import GIB
    from engine.devices.device import Device, Rig, make_host
    from engine.devices.telemetry.sample import CardState, Sample
    from engine.devices.telemetry.sampler import Sampler

    cards = tuple(
        Device(f"CUDA{number}", "RTX 3090", "CUDA", "gpu", total_bytes=24 * GIB, free_bytes=23 * GIB)
        for number in range(N_CARDS)
    )
    rig = Rig(cards, make_host("made up", 64 * GIB, 48 * GIB))

    def samples(time_s: float) -> tuple[Sample, ...]:
        used_bytes = GIB + int(time_s * 977) % (20 * GIB)
        load = time_s % 100
        return tuple(
            Sample(
                each.id, time_s, used_bytes, each.total_bytes, 0, load, 40 + load / 2, 100 + load, card=CardState(350)
            )
            for each in rig.all_devices
        )

    class MadeUp:
        def read(self) -> tuple[Sample, ...]:
            return samples(time.monotonic())

        def close(self) -> None:
            pass

    class Arrival(QObject):
        arrived = Signal(object)  # tuple[Sample, ...]

    application = QApplication([])
    window = make_window(Settings(home / "settings.ini"), Theme(application, "dark"))
    window.main.resize(*SIZE)
    window.main.show()
    live = window.desk.rig.live
    live.set_devices(DeviceList(rig))
    now = time.monotonic()
    for past in range(HOUR_S, 0, -1):
        live.take_samples(samples(now - past))
    window.main.device_strip.details_requested.emit(live.rig.devices[0])
    arrival = Arrival()
    arrival.arrived.connect(live.take_samples, Qt.ConnectionType.QueuedConnection)
    sampler = Sampler(MadeUp(), arrival.arrived.emit)

    def run(duration_s: float) -> None:
        loop = QEventLoop()
        QTimer.singleShot(int(duration_s * 1000), loop.quit)
        loop.exec()

    sampler.start()
    run(WARM_UP_S)
    process = psutil.Process()
    begun, before = time.monotonic(), process.cpu_times()
    run(seconds / 2)
    half_mb = process.memory_info().rss / MB
    run(seconds / 2)
    after, resident_mb = process.cpu_times(), process.memory_info().rss / MB
    used_s = after.user + after.system - before.user - before.system
    core_percent = 100 * used_s / (time.monotonic() - begun)
    sampler.stop()
    window.main.close()
    return {
        "core_percent": round(core_percent, 2),
        "resident_mb": round(resident_mb, 1),
        "grown_mb": round(resident_mb - half_mb, 1),
        "ok": core_percent < 2 and resident_mb < 250 and resident_mb - half_mb < 1,
    }


if __name__ == "__main__":
    main()
