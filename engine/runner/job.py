"""What is to be loaded where, and its translation to requests."""

from __future__ import annotations

from dataclasses import dataclass

from engine.devices.device import CPU_ID, Device, Rig
from engine.errors import ModelFileError, RuleViolationError
from engine.fit.report import DeviceRow
from engine.gguf.model_file import ModelFile
from engine.layout.context_settings import ContextSettings
from engine.layout.engine_parameters import EngineParameters, engine_parameters, used_devices
from engine.layout.layout import Layout
from engine.layout.rules import violations
from engine.runner.protocol import DeviceRef, Load, Probe


@dataclass(frozen=True, slots=True)
class LoadJob:
    """One load: a model, a layout of it on a rig, context options, and the forecast that the result is shown beside."""

    model: ModelFile
    rig: Rig
    layout: Layout
    context: ContextSettings
    forecast: tuple[DeviceRow, ...] = ()

    def parameters(self) -> EngineParameters:
        """Return what the engine is told.

        Raises:
            RuleViolationError: with every rule that the layout breaks.
            LayoutError: for what has no translation.
        """
        broken = violations(self.layout, self.model, self.rig, self.context)
        if broken:
            raise RuleViolationError(tuple((each.rule, each.message, each.remedy) for each in broken))
        return engine_parameters(self.layout, self.model.n_layers)

    def load_request(self) -> Load:
        """Return the request of a real load; raises as `parameters` does, and `ModelFileError` for its path."""
        parameters = self.parameters()
        return Load(path=self._path(), devices=device_refs(self.rig), parameters=parameters, context=self.context)

    def probe_request(self) -> Probe:
        """Return the request of a no-alloc load; raises as `load_request` does."""
        parameters = self.parameters()
        return Probe(path=self._path(), devices=device_refs(self.rig), parameters=parameters, context=self.context)

    def _path(self) -> str:
        path = self.model.paths[0]
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise ModelFileError(path, "its path is not UTF-8 text, and so cannot be loaded; rename it") from None
        return str(path)

    def used_endpoints(self) -> dict[str, tuple[Device, ...]]:
        """Return the RPC devices that the layout uses, by endpoint."""
        used = used_devices(self.layout)
        endpoints: dict[str, tuple[Device, ...]] = {}
        for device in self.rig.devices:
            if device.endpoint is not None and device.id in used:
                endpoints[device.endpoint] = (*endpoints.get(device.endpoint, ()), device)
        return endpoints


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
