"""What is to be loaded where, and its translation to requests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from engine.devices.device import CPU_ID, Device, Rig
from engine.errors import ModelFileError, RuleViolationError
from engine.fit.decisions.resolve import Resolved, resolve
from engine.fit.report import DeviceRow
from engine.fit.side_file_rules import side_file_violations
from engine.fit.strategies.constraints import NO_CONSTRAINTS, Constraints
from engine.gguf.model_file import ModelFile
from engine.layout.context_settings import ContextSettings
from engine.layout.engine_parameters import EngineParameters, engine_parameters, used_devices
from engine.layout.layout import Layout
from engine.layout.rules import violations
from engine.layout.unlisted_layers import count_unlisted_layers
from engine.memory.backends import backend_traits
from engine.memory.model_memory import ModelMemory
from engine.memory.side_files import NO_SIDE_FILES, Projector, SideFiles
from engine.runner.protocol import OFFLOAD_VARIABLE, AdapterFile, DeviceRef, Load, Probe, ProjectorFile

DEFAULT_RETRIES = 10
"""Where other layouts may be tried and nobody said how many."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Whether other layouts may be tried when one does not fit, and how many; with pinned layers and devices off."""

    retries: int = 0
    constraints: Constraints = NO_CONSTRAINTS


@dataclass(frozen=True)
class LoadJob:
    """One load: a model, a layout of it on a rig, context options, and the forecast that the result is shown beside.

    `context` is what was asked for; what is used is decided for the layout (`resolved`).
    """

    model: ModelFile
    rig: Rig
    layout: Layout
    context: ContextSettings
    forecast: tuple[DeviceRow, ...] = ()
    retry: RetryPolicy = RetryPolicy()
    side_files: SideFiles = NO_SIDE_FILES

    def resolved(self) -> Resolved:
        """Return the settings that are used, with what was decided and why."""
        return self._resolved

    @cached_property
    def _resolved(self) -> Resolved:
        # Several steps of a probe or a load ask, and it takes a whole estimate.
        return resolve(ModelMemory(self.model), self.rig, self.layout, self.context, self.side_files)

    def parameters(self) -> EngineParameters:
        """Return what the engine is told.

        Raises:
            RuleViolationError: with every rule that the layout breaks.
            LayoutError: for what has no translation.
        """
        broken = (
            *violations(self.layout, self.model, self.rig, self.context),
            *side_file_violations(self.side_files, self.layout, self.rig),
        )
        if broken:
            raise RuleViolationError(tuple((each.rule, each.message, each.remedy) for each in broken))
        return engine_parameters(self.layout, self.model.n_layers, count_unlisted_layers(self.model))

    def load_request(self) -> Load:
        """Return the request of a real load; raises as `parameters` does, and `ModelFileError` for its path."""
        parameters, resolved = self.parameters(), self.resolved()
        projector = self.side_files.projector
        return Load(
            path=_as_text(self.model.paths[0]),
            devices=device_refs(self.rig),
            parameters=parameters,
            context=resolved.context,
            adapters=tuple(AdapterFile(_as_text(each.path), each.scale) for each in self.side_files.adapters),
            projector=None if projector is None else self._projector_file(projector, resolved.projector_device),
        )

    def _projector_file(self, projector: Projector, device_id: str) -> ProjectorFile:
        size_rule = backend_traits(self.rig.device(device_id) or self.rig.host).size_rule
        return ProjectorFile(_as_text(projector.path), device_id, projector.weights_bytes(size_rule))

    def probe_request(self) -> Probe:
        """Return the request of a no-alloc load; raises as `load_request` does."""
        return Probe(
            path=_as_text(self.model.paths[0]),
            devices=device_refs(self.rig),
            parameters=self.parameters(),
            context=self.resolved().context,
        )

    def environment(self) -> dict[str, str]:
        """Return what the child's environment has to say: the engine reads some settings nowhere else."""
        tokens = self.context.op_offload_min_batch
        return {} if tokens is None else {OFFLOAD_VARIABLE: str(tokens)}

    def possible_endpoints(self) -> frozenset[str]:
        """Return the workers that this load may turn to: its layout's, and every one where other layouts are tried."""
        if not self.retry.retries:
            return frozenset(self.used_endpoints())
        # One that works for another model of ours has nothing free, so that no step back leads there.
        idle = (device.endpoint for device in self.rig.devices if device.endpoint is not None and not device.holdings)
        return frozenset((*self.used_endpoints(), *idle))

    def used_endpoints(self) -> dict[str, tuple[Device, ...]]:
        """Return the RPC devices that the layout uses, by endpoint."""
        used = set(used_devices(self.layout))
        if self.side_files.projector is not None and self.side_files.projector.device is not None:
            used.add(self.side_files.projector.device)
        endpoints: dict[str, tuple[Device, ...]] = {}
        for device in self.rig.devices:
            if device.endpoint is not None and device.id in used:
                endpoints[device.endpoint] = (*endpoints.get(device.endpoint, ()), device)
        return endpoints


def _as_text(path: Path) -> str:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ModelFileError(path, "its path is not UTF-8 text, and so cannot be loaded; rename it") from None
    return str(path)


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
        )
        for device in rig.devices
        if device.id != CPU_ID
    )
