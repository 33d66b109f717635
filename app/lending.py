"""The devices that this computer lends to paired computers, with their measured speeds; for command line and window."""

from __future__ import annotations

from collections.abc import Sequence

from app.packs import find_all_devices
from app.paths import calibration_path, engine_checks_path, self_test_path, speeds_path
from engine.base.values import replace
from engine.machines.rigs.secure_serving import Lending, choose_lendings
from engine.machines.tunnel.offers import OfferedSpeed
from engine.planning.fit.calibration import read_calibration
from engine.planning.fit.speed_book import read_speed_book, speed_key


def find_lendings(
    *,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    caps: Sequence[tuple[str, int]] = (),
    margins: Sequence[tuple[str, int]] = (),
) -> tuple[Lending, ...]:
    """Find the devices of this computer, and return the devices to lend with their limits and speeds.

    `only`, `without`: ids of devices to lend, and not to lend. If `only` is empty, all devices but `without` are lent.
    `caps`, `margins`: pairs of a device id and bytes. An empty id means the only device.

    The search for devices takes time: not for the GUI thread.

    Raises:
        EngineError: the engine cannot list its devices, or an argument is not valid, such as an unknown id.
    """
    found = find_all_devices(self_test_path(), checks=engine_checks_path())
    rig = read_calibration(calibration_path()).apply(found)
    measured = read_speed_book(speeds_path()).devices
    chosen = choose_lendings(rig.all_devices, only=only, without=without, caps=caps, margins=margins)

    def with_speed(lending: Lending) -> Lending:
        kept = measured.get(speed_key(lending.device))
        if kept is None:
            return lending
        speed = OfferedSpeed(
            read_bytes_per_second=kept.read_bytes_per_second,
            by_type=kept.by_type,
            op_s=kept.op_s,
            products=kept.products,
        )
        return replace(lending, speed=speed)

    return tuple(map(with_speed, chosen))
