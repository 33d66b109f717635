"""The default margin of workers, and the stated source of a margin."""

from __future__ import annotations

import pytest

from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import Device, margin_text, remote_margin_bytes

WORKER = Device("RPC0", "attic", "RPC", "gpu", 24 * GIB, endpoint="192.0.2.7:50052")


@pytest.mark.parametrize(
    ("endpoint", "total_bytes", "margin_bytes"),
    [
        ("192.0.2.7:50052", 24 * GIB, 256 * MIB),
        ("192.0.2.7:50052", 2 * GIB, 2 * GIB // 20),
        ("127.0.0.1:50052", 24 * GIB, 0),
        ("[::1]:50052", 24 * GIB, 0),
        (None, 24 * GIB, 0),
    ],
)
def test_only_workers_of_other_machines_have_one(endpoint: str | None, total_bytes: int, margin_bytes: int) -> None:
    assert remote_margin_bytes(replace(WORKER, endpoint=endpoint, total_bytes=total_bytes)) == margin_bytes


def test_it_is_told_where_a_margin_is_from() -> None:
    assert margin_text(WORKER) == ""
    usual = margin_text(replace(WORKER, margin_bytes=256 * MIB))
    assert usual == "Layerdeck keeps 256.0 MiB of memory free (the default for an RPC worker on another computer)."
    assert "as set" in margin_text(replace(WORKER, margin_bytes=300 * MIB))
    assert margin_text(Device("CUDA0", "card", "CUDA", "gpu", GIB, margin_bytes=256 * MIB)) == ""
