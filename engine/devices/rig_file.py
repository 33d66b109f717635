"""The rig file: a JSON description of devices and host for planning. They need not be the devices of this machine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from engine.base.errors import RigError
from engine.base.json_file import JsonObject, encode_document, parse_document, read_file, write_file
from engine.base.language import tr
from engine.base.numa import NumaNode, numbers_text
from engine.base.processor import parse_list
from engine.base.texts import clean
from engine.base.units import format_bytes
from engine.base.values import replace
from engine.devices.device import (
    CPU_ID,
    DEVICE_KINDS,
    FEATURES,
    BufferFacts,
    Capabilities,
    Device,
    Fault,
    Findings,
    RemoteFacts,
    Rig,
    find_id_error,
    is_on_this_machine,
    make_host,
    remote_margin_bytes,
)
from engine.devices.endpoint import MAX_ALIGNMENT_BYTES, parse_lent_endpoint

VERSION = 1
MAX_ENDPOINT_DEVICE = 63
MAX_DEVICES = 256
"""Largest number of devices in a rig. It is limited because each device is compared with all others.

The engine uses at most 16 devices at once.
"""
_BUFFER_KEYS = ("alignment_bytes", "host_alignment_bytes", "largest_tensor_bytes", "largest_buffer_bytes")
MAX_BACKEND_LENGTH = 60
MAX_SPEED = 1e15
MAX_NODE = 1023
_SAME_SHARE = 0.02
"""Relative difference of total memory up to which two devices count as the same: drivers reserve different amounts."""
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


def parse_rig(data: bytes | str, *, source: str = "") -> Rig:
    """Return the rig in the text of a rig file.

    Raises:
        RigError: the message names the faulty key, and begins with `source`, the file's name.
    """
    return rig_of(parse_document(data, what="rig", source=source, version=VERSION, fail=RigError))


def rig_of(root: JsonObject) -> Rig:
    """Return the rig in a JSON object that has the keys of a rig file.

    Raises:
        EngineError: a value is invalid. The caller chose the class of the error with the argument `fail` of
            `JsonObject`.
    """
    root.allow("version", "devices", "host")
    items = root.nested_list("devices")
    if len(items) > MAX_DEVICES:
        root.refuse(
            tr(
                "a rig has at most {most} devices; remove some of these {count} devices",
                most=MAX_DEVICES,
                count=len(items),
            ),
            "devices",
        )
    devices = tuple(_parse_device(item) for item in items)
    for index, device in enumerate(devices):
        for earlier in devices[:index]:
            _check_different(items[index], device, earlier)
    return Rig(devices, _parse_host(root.nested("host")))


def read_rig(path: Path) -> Rig:
    """Return the rig in the file at `path`.

    Raises:
        RigError: the file cannot be read, or is not a valid rig file; the message names the file and the faulty key.
    """
    return parse_rig(read_file(path, what="rig", fail=RigError), source=path.name)


def rig_document(rig: Rig) -> dict[str, object]:
    """Return the rig as a JSON document. Rarely used keys are left out if they have their default values."""
    host = rig.host
    return {
        "version": VERSION,
        "devices": [_device_document(device) for device in rig.devices],
        "host": {
            "name": host.name,
            "total_bytes": host.total_bytes,
            "free_bytes": host.free_bytes,
            **({"swap_bytes": host.swap_bytes} if host.swap_bytes else {}),
            **_fault_documents(host),
            **({"numa_nodes": [_node_document(node) for node in host.nodes]} if host.nodes else {}),
        },
    }


def without_addresses(rig: Rig) -> Rig:
    """Return a copy of `rig` for a file that goes to other people: no addresses of other computers, no fingerprints.

    Devices keep their ids and order. Remote devices get endpoints in the domain `.invalid` (RFC 2606), one for each
    computer.
    """
    counts: dict[str, int] = {}

    def without(device: Device) -> Device:
        if device.endpoint is None or (device.fingerprint is None and is_on_this_machine(device)):
            return device
        address, _ = parse_lent_endpoint(device.endpoint)
        # A device with a name at its endpoint needs a fingerprint; a number tells it apart as well.
        number = counts[address] = counts.get(address, -1) + 1
        name = f"computer-{list(counts).index(address) + 1}.invalid:50052"
        return replace(device, endpoint=name, endpoint_device=number, fingerprint=None)

    return replace(rig, devices=tuple(map(without, rig.devices)))


def encode_rig(rig: Rig) -> bytes:
    """Return the rig as the bytes of a rig file."""
    return encode_document(rig_document(rig))


def rig_changes(made: Rig, now: Rig, used: Iterable[str]) -> tuple[str, ...]:
    """Return a text for each device that has changed since a layout was made.

    `made`: the rig for which the layout was made. `now`: the present rig.
    `used`: ids of the devices that are compared. Free memory and small differences of total memory are ignored.
    """
    found = []
    for device_id in dict.fromkeys(used):
        before, after = made.device(device_id), now.device(device_id)
        if before is None or before.is_host:
            continue
        old = f"{device_id} ({before.name}, {format_bytes(before.total_bytes)})"
        if after is None:
            found.append(tr("{device} is missing", device=old))
        elif (
            before.name != after.name or abs(before.total_bytes - after.total_bytes) > _SAME_SHARE * before.total_bytes
        ):
            new = f"{after.name}, {format_bytes(after.total_bytes)}"
            found.append(tr("{device} is now {new}", device=old, new=new))
    return tuple(found)


def write_rig(path: Path, rig: Rig) -> None:
    """Write a rig file atomically; raises `RigError` if it cannot be written."""
    write_file(path, encode_rig(rig), what="rig", fail=RigError)


def _parse_device(item: JsonObject) -> Device:
    item.allow(
        "id", "name", "backend", "total_bytes", "free_bytes", "kind", "pci_bus_id", "endpoint", "endpoint_device",
        "cap_bytes", "margin_bytes", "alignment_bytes", "host_alignment_bytes",
        "largest_tensor_bytes", "largest_buffer_bytes", "mixes_streams", "capabilities", "faults", "fingerprint",
        "remote", "unified_memory",
    )  # fmt: skip
    device_id = _parse_id(item)
    backend = item.text("backend")
    if not backend.strip() or not backend.isprintable() or len(backend) > MAX_BACKEND_LENGTH:
        item.refuse(tr("a device needs the name of its backend, such as CUDA or RPC"), "backend")
    kind = item.maybe("kind", lambda key: item.choice(key, DEVICE_KINDS), "cpu" if backend == "CPU" else "gpu")
    # Accelerators such as BLAS work in the host's memory and report none of their own.
    total_bytes, free_bytes = _parse_memory(item, zero_allowed=kind == "accel")
    unified = item.maybe("unified_memory", item.flag, False)
    device = Device(
        id=device_id,
        name=item.maybe("name", lambda key: clean(item.text(key)), device_id),
        backend=backend,
        kind=kind,
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        pci_bus_id=item.nullable("pci_bus_id", lambda key: clean(item.text(key)), None),
        endpoint=_parse_endpoint(item, backend),
        endpoint_device=item.maybe("endpoint_device", lambda key: item.integer(key, 0, MAX_ENDPOINT_DEVICE), 0),
        cap_bytes=item.nullable("cap_bytes", item.size, None),
        buffers=BufferFacts(
            alignment_bytes=_parse_alignment(item, "alignment_bytes"),
            host_alignment_bytes=_parse_alignment(item, "host_alignment_bytes"),
            largest_tensor_bytes=item.nullable("largest_tensor_bytes", item.size, None),
            largest_buffer_bytes=item.nullable("largest_buffer_bytes", item.size, None),
            mixes_streams=item.maybe("mixes_streams", item.flag, True),
        ),
        capabilities=_parse_capabilities(item.nested("capabilities"))
        if "capabilities" in item.keys
        else Capabilities(),
        findings=Findings(_parse_faults(item)),
        fingerprint=_parse_fingerprint(item, backend),
        remote=_parse_remote(item, backend),
        unified=unified,
    )
    margin_bytes = item.nullable("margin_bytes", item.size, None)
    device = replace(device, margin_bytes=remote_margin_bytes(device) if margin_bytes is None else margin_bytes)
    # The workers of this machine's NUMA nodes share its memory.
    if unified and device.is_rpc and (device.fingerprint is not None or not is_on_this_machine(device)):
        item.refuse(
            tr("this worker does not use the memory of this computer; remove the key unified_memory"), "unified_memory"
        )
    return device


def _parse_id(item: JsonObject) -> str:
    device_id = item.text("id")
    fault = find_id_error(device_id)
    if fault:
        item.refuse(fault, "id")
    if device_id == CPU_ID:
        item.refuse(
            tr('"{cpu_id}" is the host; describe it under "host" and give this device another id', cpu_id=CPU_ID), "id"
        )
    return device_id


def _parse_memory(item: JsonObject, *, zero_allowed: bool) -> tuple[int, int | None]:
    total_bytes = item.size("total_bytes")
    free_bytes = item.nullable("free_bytes", item.size, None)
    if total_bytes == 0 and not zero_allowed:
        item.refuse(
            tr(
                "the device has no memory, so nothing can be placed on it; enter the size of its memory or remove the "
                "device"
            ),
            "total_bytes",
        )
    if free_bytes is not None and free_bytes > total_bytes:
        item.refuse(
            tr(
                "{free} free bytes are more than the device's total of {total} bytes; correct one of the numbers",
                free=free_bytes,
                total=total_bytes,
            ),
            "free_bytes",
        )
    return total_bytes, free_bytes


def _parse_alignment(item: JsonObject, key: str) -> int | None:
    alignment_bytes = item.nullable(key, item.size, None)
    if alignment_bytes is not None and (alignment_bytes.bit_count() != 1 or alignment_bytes > MAX_ALIGNMENT_BYTES):
        item.refuse(
            tr(
                "an alignment must be a power of two and at most {max_alignment_bytes} bytes",
                max_alignment_bytes=MAX_ALIGNMENT_BYTES,
            ),
            key,
        )
    return alignment_bytes


def _parse_endpoint(item: JsonObject, backend: str) -> str | None:
    endpoint = item.nullable("endpoint", item.text, None)
    if backend != "RPC":
        if endpoint is not None:
            item.refuse(
                tr(
                    "only devices of backend RPC have an endpoint, not devices of {backend}; remove the key",
                    backend=backend[:40],
                ),
                "endpoint",
            )
        return None
    if endpoint is None:
        item.refuse(tr('an RPC device needs its endpoint, such as "192.0.2.7:50052"'), "endpoint")
    try:
        address, name = parse_lent_endpoint(endpoint)
    except ValueError as error:
        item.refuse(str(error), "endpoint")
    if name and item.nullable("fingerprint", item.text, None) is None:
        item.refuse(
            tr(
                "only paired computers have endpoints with a device name (HOST:PORT/NAME); add the fingerprint of "
                "the computer"
            ),
            "endpoint",
        )
    return f"{address}/{name}" if name else address


def _parse_fingerprint(item: JsonObject, backend: str) -> str | None:
    fingerprint = item.nullable("fingerprint", item.text, None)
    if fingerprint is None:
        return None
    if backend != "RPC":
        item.refuse(
            tr(
                "only devices of backend RPC have a fingerprint, not devices of {backend}; remove the key",
                backend=backend[:40],
            ),
            "fingerprint",
        )
    if _FINGERPRINT.fullmatch(fingerprint) is None:
        item.refuse(
            tr("a fingerprint has 64 digits from 0-9 and a-f; `layerdeck-cli rig peers` shows it"), "fingerprint"
        )
    return fingerprint


def _parse_remote(item: JsonObject, backend: str) -> RemoteFacts | None:
    if "remote" not in item.keys:
        return None
    if backend != "RPC":
        item.refuse(
            tr(
                'only devices of backend RPC have the key "remote", not devices of {backend}; remove the key',
                backend=backend[:40],
            ),
            "remote",
        )
    remote = item.nested("remote")
    remote.allow("backend", "overhead_bytes", "read_bytes_per_second", "by_type", "op_s", "products")
    name = remote.maybe("backend", remote.text, "")
    if not name.isprintable() or len(name) > MAX_BACKEND_LENGTH:
        remote.refuse(tr("a device needs the name of its backend, such as CUDA or RPC"), "backend")
    return RemoteFacts(
        backend=name,
        overhead_bytes=remote.nullable("overhead_bytes", remote.size, None),
        read_bytes_per_second=remote.nullable("read_bytes_per_second", lambda key: _parse_speed(remote, key), None),
        by_type=_parse_speeds(remote, "by_type"),
        op_s=remote.nullable("op_s", lambda key: _parse_speed(remote, key), None),
        products=_parse_speeds(remote, "products"),
    )


def _parse_speeds(item: JsonObject, key: str) -> tuple[tuple[str, float], ...]:
    if key not in item.keys:
        return ()
    speeds = item.nested(key)
    return tuple((clean(name), _parse_speed(speeds, name)) for name in speeds.keys)


def _parse_speed(item: JsonObject, key: str) -> float:
    speed = item.number(key)
    if not 0.0 < speed <= MAX_SPEED:
        item.refuse(tr("a speed must be above 0 and at most 1e15 (bytes or operations per second)"), key)
    return speed


def _parse_capabilities(item: JsonObject) -> Capabilities:
    item.allow("row_split", "tensor_split", "repeatable")
    default = Capabilities()
    return Capabilities(
        row_split=item.maybe("row_split", item.flag, default.row_split),
        tensor_split=item.maybe("tensor_split", item.flag, default.tensor_split),
        repeatable=item.maybe("repeatable", item.flag, default.repeatable),
    )


def _parse_faults(item: JsonObject) -> tuple[Fault, ...]:
    return tuple(map(_parse_fault, item.nested_list("faults"))) if "faults" in item.keys else ()


def _parse_fault(item: JsonObject) -> Fault:
    item.allow("feature", "of", "reason")
    return Fault(item.choice("feature", FEATURES), item.text("reason"), item.maybe("of", item.text, ""))


def _check_different(item: JsonObject, device: Device, earlier: Device) -> None:
    if device.id == earlier.id:
        item.refuse(tr('the id "{id}" occurs twice; give each device its own id', id=device.id), "id")
    same_endpoint = device.endpoint is not None and device.endpoint == earlier.endpoint
    if same_endpoint and device.fingerprint != earlier.fingerprint:
        words = tr(
            "{id} and {other_id} are on the same computer ({endpoint}), so the same certificate belongs to both",
            id=device.id,
            other_id=earlier.id,
            endpoint=device.endpoint,
        )
        item.refuse(tr("{words}; use the same fingerprint for both devices", words=words), "fingerprint")
    if same_endpoint and device.endpoint_device == earlier.endpoint_device:
        item.refuse(
            tr(
                "{id} and {other_id} are the same device of {endpoint}; remove one of them",
                id=device.id,
                other_id=earlier.id,
                endpoint=device.endpoint,
            ),
            "endpoint",
        )


def _parse_host(item: JsonObject) -> Device:
    item.allow("name", "total_bytes", "free_bytes", "swap_bytes", "faults", "numa_nodes")
    total_bytes, free_bytes = _parse_memory(item, zero_allowed=False)
    name = item.maybe("name", lambda key: clean(item.text(key)), CPU_ID)
    nodes = _parse_nodes(item.nested_list("numa_nodes")) if "numa_nodes" in item.keys else ()
    swap_bytes = item.nullable("swap_bytes", item.size, None)
    host = make_host(name, total_bytes, free_bytes, nodes=nodes, swap_bytes=swap_bytes)
    return replace(host, findings=Findings(_parse_faults(item)))


def _parse_nodes(items: Iterable[JsonObject]) -> tuple[NumaNode, ...]:
    nodes: list[NumaNode] = []
    seen: set[int] = set()
    for item in items:
        node = _parse_node(item)
        # It also bounds the memory that many nodes with long lists take.
        if not seen.isdisjoint(node.processors):
            item.refuse(
                tr("another NUMA node lists a processor of this node too; remove the processor from one of the nodes"),
                "processors",
            )
        seen |= node.processors
        nodes.append(node)
    return tuple(nodes)


def _parse_node(item: JsonObject) -> NumaNode:
    item.allow("number", "processors", "total_bytes", "free_bytes", "distances")
    # A node may have processors alone.
    total_bytes, free_bytes = _parse_memory(item, zero_allowed=True)
    numbers, distances = item.text("processors"), item.maybe("distances", item.text, "")
    processors = parse_list(numbers)
    if numbers and not processors:
        item.refuse(tr('the processors of a NUMA node must be written as in "0-7,16-23"'), "processors")
    if not all(each.isascii() and each.isdecimal() and len(each) < 5 for each in distances.split()):
        item.refuse(
            tr('distances between NUMA nodes are whole numbers with a space between, as in "10 21"'), "distances"
        )
    number = item.integer("number", 0, MAX_NODE)
    return NumaNode(number, processors, total_bytes, free_bytes, tuple(map(int, distances.split())))


def _node_document(node: NumaNode) -> dict[str, object]:
    return {
        "number": node.number,
        "processors": numbers_text(node.processors),
        "total_bytes": node.total_bytes,
        "free_bytes": node.free_bytes,
        "distances": " ".join(map(str, node.distances)),
    }


def _device_document(device: Device) -> dict[str, object]:
    document: dict[str, object] = {
        "id": device.id,
        "name": device.name,
        "backend": device.backend,
        "total_bytes": device.total_bytes,
        "free_bytes": device.free_bytes,
        "kind": device.kind,
    }
    if device.pci_bus_id is not None:
        document["pci_bus_id"] = device.pci_bus_id
    if device.endpoint is not None:
        document["endpoint"] = device.endpoint
        document["endpoint_device"] = device.endpoint_device
    if device.fingerprint is not None:
        document["fingerprint"] = device.fingerprint
    if device.remote is not None:
        document["remote"] = _remote_document(device.remote)
    return {
        **document,
        "cap_bytes": device.cap_bytes,
        "margin_bytes": device.margin_bytes,
        # Older programs refuse keys that they do not know, so rare ones are only written if they are needed.
        **{key: size for key in _BUFFER_KEYS if (size := getattr(device.buffers, key)) is not None},
        **({} if device.buffers.mixes_streams else {"mixes_streams": False}),
        **({"unified_memory": True} if device.unified else {}),
        "capabilities": {
            "row_split": device.capabilities.row_split,
            "tensor_split": device.capabilities.tensor_split,
            **({"repeatable": True} if device.capabilities.repeatable else {}),
        },
        **_fault_documents(device),
    }


def _remote_document(remote: RemoteFacts) -> dict[str, object]:
    facts = {
        "backend": remote.backend or None,
        "overhead_bytes": remote.overhead_bytes,
        "read_bytes_per_second": remote.read_bytes_per_second,
        "by_type": dict(remote.by_type) or None,
        "op_s": remote.op_s,
        "products": dict(remote.products) or None,
    }
    return {key: value for key, value in facts.items() if value is not None}


def _fault_documents(device: Device) -> dict[str, object]:
    if not device.findings.faults:
        return {}
    return {
        "faults": [{"feature": each.feature, "of": each.of, "reason": each.reason} for each in device.findings.faults]
    }
