"""What is known of a plan whose load or answer crashed: what the engine's check of itself said of its devices."""

from __future__ import annotations

from engine.devices.device import names_of
from engine.language import tr
from engine.layout.engine_parameters import used_devices
from engine.plan.plan import Plan


def known_words(plan: Plan) -> str:
    """Return a sentence on what is known of the engine on the devices that the plan uses."""
    used = used_devices(plan.edit.layout)
    devices = [device for device in plan.rig.all_devices if device.id in used]
    known = [f"{device.id}: {fault.reason}" for device in devices for fault in device.findings.faults]
    unchecked = [device for device in devices if not device.findings.is_checked]
    if known:
        return tr("Known of it: {names}", names=" ".join(known))
    if unchecked:
        return tr("The engine has not been checked on {names_of} yet.", names_of=names_of(unchecked))
    return tr(
        "An earlier check found nothing wrong with the engine on {names_of}: report this with a new one.",
        names_of=names_of(devices),
    )
