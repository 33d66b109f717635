"""The host as a device of this machine."""

from __future__ import annotations

import psutil

from engine.rigs.host import host_device


def test_the_host_is_this_machine() -> None:
    host = host_device()
    assert host.id == "CPU"
    assert host.name
    assert 0 < host.total_bytes <= psutil.virtual_memory().total
    assert host.free_bytes is not None
    assert 0 < host.free_bytes <= host.total_bytes
