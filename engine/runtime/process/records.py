"""Log records about children: a line of JSON at each start, to diagnose a problem from the log of another machine.

A line `start {...}` has the fields `child, pid, layerdeck, engine, python, system, release, request, devices,
environment`. A device has the fields `id`, `backend` and `index`: its number among the devices of the backend or of its
RPC server. A record has neither network addresses nor text of a conversation, and its length is limited.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from engine.base.engine_build import own_version
from engine.base.texts import show
from engine.runtime.process.system import is_secret
from engine.runtime.protocol.requests import DeviceRef, Load, Probe, Request

MAX_RECORD = 6000
"""Longest record, in characters. The log file has 2 MiB."""
MAX_DEVICES = 32
_MAX_VALUE = 120
_LOGGED = (
    "CUDA_", "GGML_", "GPU_", "HIP_", "HSA_", "LAYERDECK_", "LLAMA_", "MALLOC_", "MESA_", "NVIDIA_", "OMP_",
    "OPENBLAS_", "ROCR_", "SYCL_", "VK_", "ZE_",
)  # fmt: skip
"""Prefixes of the environment variables that a record contains: engines, drivers and our children read them."""

_log = logging.getLogger("layerdeck.engine")


def log_start(name: str, pid: int | None, engine: str, environment: Mapping[str, str], request: Request) -> None:
    """Log the start of a child.

    `engine`: name and version of the software in the child, from its first message (`Hello`).
    `environment`: variables that the child gets in addition to those of this process.
    `request`: first request to the child. A `Load` or `Probe` names its devices.
    """
    refs = request.devices if isinstance(request, Load | Probe) else ()
    facts = {
        "child": name,
        "pid": pid,
        "layerdeck": own_version(),
        "engine": engine,
        "python": platform.python_version(),
        "system": sys.platform,
        "release": platform.release(),
        "request": str(request.__struct_config__.tag),
        "devices": device_facts(refs),
    }
    log_record("start", {**facts, "environment": logged_environment({**os.environ, **environment})})


def log_record(kind: str, facts: Mapping[str, object]) -> None:
    """Log one line: `kind`, and `facts` as a JSON object. If the line is too long, its longest values are replaced by
    notes.
    """
    kept = dict(facts)
    while len(text := msgspec.json.encode(kept).decode()) > MAX_RECORD:
        longest = max(kept, key=lambda key: len(msgspec.json.encode(kept[key])))
        kept[longest] = "left out: too long"
    _log.info("%s %s", kind, text)


def device_facts(refs: Iterable[DeviceRef]) -> list[dict[str, object]]:
    """Return id, backend and index of each device for a log record, for at most `MAX_DEVICES` devices.

    The index is the device's number among the devices of its backend or of its RPC server.
    """
    found: list[dict[str, object]] = []
    before: Counter[str] = Counter()
    for ref in refs:
        index = before[ref.backend] if ref.endpoint is None else ref.endpoint_device
        before[ref.backend] += ref.endpoint is None
        found.append({"id": show(ref.id, 40), "backend": show(ref.backend, 40), "index": index})
    return found[:MAX_DEVICES]


def logged_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that engines and drivers read, without secrets, and with `~` for the user's folder."""
    home = str(Path.home())
    return {
        show(name, _MAX_VALUE): show(value.replace(home, "~"), _MAX_VALUE)
        for name, value in sorted(environment.items())
        if name.startswith(_LOGGED) and not is_secret(name)
    }
