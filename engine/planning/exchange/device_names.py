"""Translation between device ids of a rig and the names that llama.cpp's programs use for devices.

Local devices have ggml's names. RPC devices are `RPC<k>`, counted over all devices of all servers of `--rpc`
(`ggml_backend_rpc_add_server`). Names of buffer types count the devices on each server: `RPC0[host:port]`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import sha256

from msgspec import Struct

from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig
from engine.devices.endpoint import parse_endpoint, parse_lent_endpoint

_RPC_DEVICE = re.compile(r"RPC(\d{1,3})", re.ASCII)
_RPC_BUFFER = re.compile(r"RPC(\d{1,3})\[([^\[\]\s]{1,300})\]", re.ASCII)
_GGML_NAME = re.compile(r"[A-Za-z]{2,16}\d{0,3}", re.ASCII)
_NO_ID_CHARACTERS = re.compile(r"[^A-Za-z0-9_.-]+", re.ASCII)


class DeviceNames(Struct, frozen=True):
    """Translates device ids of `rig` to llama.cpp's names and back.

    `servers`: endpoints in the order of option `--rpc`.
    """

    rig: Rig
    servers: tuple[str, ...] = ()

    def device(self, device_id: str) -> str:
        """Return the name of a device in option `-dev`."""
        device = self.rig.device(device_id)
        if device is None or device.endpoint is None:
            return device_id
        before = self.servers.index(device.endpoint)
        return f"RPC{sum(map(self._count, self.servers[:before])) + device.endpoint_device}"

    def buffer(self, device_id: str) -> str:
        """Return the name of a device's buffer type, for option `-ot`."""
        device = self.rig.device(device_id)
        if device is None or device.endpoint is None:
            return device_id
        return f"RPC{device.endpoint_device}[{device.endpoint}]"

    def id_of_device(self, name: str) -> str | None:
        """Return the id of the device with this name in option `-dev`; None for a local device that the rig lacks.

        If the rig lacks an RPC device of one of `servers`, an id is made from the server's endpoint.
        """
        if self.servers and (match := _RPC_DEVICE.fullmatch(name)):
            number = int(match[1])
            *others, last = self.servers
            for endpoint in others:
                if number < self._count(endpoint):
                    return self._remote(endpoint, number) or _missing_id(endpoint, number)
                number -= self._count(endpoint)
            return self._remote(last, number) or _missing_id(last, number)
        found = self.rig.device(name)
        # The host is no entry of -dev, and the ids of RPC devices are ours.
        return found.id if found is not None and not found.is_rpc and not found.is_host else None

    def id_of_buffer(self, name: str) -> str | None:
        """Return the id of the device whose buffer type has this name; None if the rig does not have it."""
        if name == CPU_ID:
            return self.rig.host.id
        if match := _RPC_BUFFER.fullmatch(name):
            return self._remote(match[2], int(match[1]))
        found = self.rig.device(name)
        return found.id if found is not None and not found.is_rpc else None

    def defaults(self) -> tuple[str, ...]:
        """Return the ids of the devices that llama.cpp uses if there is no `-dev` (`llama_prepare_model_devices`).

        An RPC server of which the rig has no device counts as one device, whose id is made from the endpoint.
        """
        remote = [
            device_id
            for endpoint in self.servers
            for device_id in ([each.id for each in self._at(endpoint)] or [_missing_id(endpoint, 0)])
        ]
        local = [device for device in self.rig.devices if not device.is_rpc]
        cards = [device for device in local if device.kind == "gpu"]
        # Integrated GPUs count only where there is no card.
        used = cards or [each for each in local if each.kind == "igpu"]
        return (*remote, *(device.id for device in used))

    def _remote(self, endpoint: str, number: int) -> str | None:
        return next((each.id for each in self._at(endpoint) if each.endpoint_device == number), None)

    def _at(self, endpoint: str) -> list[Device]:
        found = [device for device in self.rig.devices if device.endpoint == endpoint]
        return sorted(found, key=lambda device: device.endpoint_device)

    def _count(self, endpoint: str) -> int:
        """Return the number of devices of an RPC server: the highest device number in the rig plus 1, at least 1."""
        return max((device.endpoint_device + 1 for device in self._at(endpoint)), default=1)


def _missing_id(endpoint: str, number: int) -> str:
    """Return an id for a device that the rig lacks: device `number` of the RPC server at `endpoint`.

    llama.cpp's name `RPC<k>` is not used as id, because the rig may have another device with that id.
    """
    name = _NO_ID_CHARACTERS.sub("-", endpoint)
    # A device id has at most 64 characters, and the number at most 3. A digest tells long endpoints apart.
    if len(name) > 60:
        name = f"{sha256(endpoint.encode()).hexdigest()[:8]}-{name[-51:]}"
    return f"{name}-{number}"


def with_plain_servers(rig: Rig) -> Rig:
    """Return `rig` with plain RPC endpoints (`host:port`) for the devices of paired machines.

    Their own endpoints name a device (`host:port/name`), which other programs cannot use. The devices of a machine get
    the ports after the port of its listener, in the order of the rig.
    """
    ports: Counter[str] = Counter()

    def plain(device: Device) -> Device:
        address, name = parse_lent_endpoint(device.endpoint or "x:1")
        if device.endpoint is None or not name:
            return device
        ports[address] += 1
        host, port = parse_endpoint(address)
        return replace(device, endpoint=f"{host}:{port + ports[address]}")

    return Rig(tuple(map(plain, rig.devices)), rig.host)


def used_servers(rig: Rig, device_ids: Iterable[str]) -> tuple[str, ...]:
    """Return the RPC endpoints of these devices, each once, in the order of the rig."""
    used = set(device_ids)
    return tuple(dict.fromkeys(each.endpoint for each in rig.devices if each.id in used and each.endpoint is not None))


def foreign_names(rig: Rig, device_ids: Sequence[str]) -> tuple[str, ...]:
    """Return the ids of local devices, except the CPU, that cannot be ggml's names.

    llama.cpp's programs do not know a device by such an id.
    """
    found = (rig.device(each) for each in dict.fromkeys(device_ids))
    return tuple(
        device.id
        for device in found
        if device is not None and not device.is_rpc and not device.is_host and not _GGML_NAME.fullmatch(device.id)
    )
