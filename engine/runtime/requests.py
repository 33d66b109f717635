"""A plan as the child is asked for it: the requests of a probe and of a load, and the environment to ask them in."""

from __future__ import annotations

from pathlib import Path

from engine.base.errors import ModelFileError
from engine.base.language import tr
from engine.devices.device import CPU_ID, Rig
from engine.planning.memory.backends import backend_traits
from engine.planning.memory.side_files import Projector
from engine.planning.plan.plan import Plan
from engine.runtime.protocol.messages import OFFLOAD_VARIABLE, AdapterFile, DeviceRef, Load, Probe, ProjectorFile, Reach


def load_request(plan: Plan, *, sequences: Path | None = None) -> Load:
    """Return the request of a real load; raises as `Plan.parameters` does, and `ModelFileError` for a path.

    `sequences`: the folder in which the child may save sequences, and read them; None: it writes nothing.
    """
    side_files = plan.edit.side_files
    beside = [each.path for each in side_files.adapters]
    beside += [side_files.projector.path] if side_files.projector is not None else []
    writable = () if sequences is None else (_as_text(sequences),)
    return Load(
        path=_as_text(plan.model.paths[0]),
        devices=device_refs(plan.rig),
        parameters=plan.parameters,
        context=plan.settings,
        adapters=tuple(AdapterFile(_as_text(each.path), each.scale) for each in side_files.adapters),
        projector=None if side_files.projector is None else _projector_file(plan, side_files.projector),
        reach=Reach(readable=tuple(map(_as_text, (*plan.model.paths, *beside))), writable=writable),
    )


def probe_request(plan: Plan) -> Probe:
    """Return the request of a no-alloc load; raises as `load_request` does."""
    projector = plan.edit.side_files.projector
    beside = () if projector is None else (projector.path,)
    return Probe(
        path=_as_text(plan.model.paths[0]),
        devices=device_refs(plan.rig),
        parameters=plan.parameters,
        context=plan.settings,
        projector=None if projector is None else _projector_file(plan, projector),
        reach=Reach(readable=tuple(map(_as_text, (*plan.model.paths, *beside)))),
    )


def environment(plan: Plan) -> dict[str, str]:
    """Return what the child's environment has to say: the engine reads some settings nowhere else."""
    tokens = plan.edit.context.op_offload_min_batch
    return {} if tokens is None else {OFFLOAD_VARIABLE: str(tokens)}


def device_refs(rig: Rig) -> tuple[DeviceRef, ...]:
    """Describe the rig's devices to the child. A local device's id is ggml's own name unless somebody renamed it."""
    return tuple(
        DeviceRef(
            id=device.id,
            backend=device.backend,
            name=device.id,
            pci_bus_id=device.pci_bus_id,
            endpoint=device.endpoint,
            endpoint_device=device.endpoint_device,
            address=None if device.fingerprint is None else device.via or "",
        )
        for device in rig.devices
        if device.id != CPU_ID
    )


def _projector_file(plan: Plan, projector: Projector) -> ProjectorFile:
    device_id = plan.resolved.projector_device
    size_rule = backend_traits(plan.rig.device(device_id) or plan.rig.host).size_rule
    weights_bytes = projector.weights_bytes(size_rule)
    return ProjectorFile(_as_text(projector.path), device_id, weights_bytes, projector.plain_bytes)


def _as_text(path: Path) -> str:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ModelFileError(path, tr("its path is not UTF-8 text, and so cannot be loaded; rename it")) from None
    return str(path)
