"""Differences between forecast and engine: tolerated ones, and the report of others."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import Device, Rig, make_host
from engine.model.gguf.model_file import MetadataValue
from engine.planning.fit.defects import defect_text, disagreements
from engine.planning.layout.layout import single_device
from engine.planning.memory.estimate import DeviceMemory, Grade
from engine.planning.plan.report import DeviceRow, make_row
from engine.planning.settings.context_settings import ContextSettings
from tests.support.load_specs import N_LAYERS, made_up_model, plan_of

REMOTE = Device("RPC0", "secret-name", "RPC", "gpu", GIB, endpoint="10.1.2.3:50052")
RIG = Rig((REMOTE,), make_host("secret-host", GIB))


def row(weights_bytes: int, overhead_bytes: int = 0, grade: Grade = Grade.ESTIMATED) -> DeviceRow:
    return make_row(REMOTE, DeviceMemory(weights_bytes=weights_bytes, overhead_bytes=overhead_bytes), grade)


@pytest.mark.parametrize(
    ("estimated_bytes", "reported_bytes", "agree"),
    [
        (100 * MIB, 108 * MIB, True),
        (100 * MIB, 108 * MIB + 1, False),
        (108 * MIB + 1, 100 * MIB, False),
        (97 * GIB, 100 * GIB, True),
        (97 * GIB - 1, 100 * GIB, False),
    ],
)
def test_three_percent_or_eight_mebibytes_are_tolerated(estimated_bytes: int, reported_bytes: int, agree: bool) -> None:
    found = disagreements([row(estimated_bytes, overhead_bytes=GIB)], [row(reported_bytes, grade=Grade.PROBED)])
    assert found == (() if agree else ("RPC0",))


def test_a_report_reproduces_without_telling_where_things_are() -> None:
    metadata: dict[str, MetadataValue] = {"llama.block_count": N_LAYERS, "llama.long": tuple(range(1000))}
    metadata |= {"general.url": "https://secret", "x": 1}
    model = replace(made_up_model(Path("/home/secret/model.gguf")), name="secret", metadata=metadata)
    plan = plan_of(model, RIG, single_device(N_LAYERS, "RPC0"), ContextSettings(n_ctx=512))
    text = defect_text(plan, [row(0)], [row(9 * MIB)], "engine 1")
    assert "secret" not in text
    assert "10.1.2.3" not in text
    assert "\n" not in text
    document = msgspec.json.decode(text)
    assert document["devices"] == ["RPC0"]
    assert document["architecture"] == "llama"
    assert document["hyper_parameters"]["block_count"] == N_LAYERS
    assert len(document["hyper_parameters"]["long"]) == 256
    assert document["layout"]["context"]["n_ctx"] == 512
    assert document["estimated"]["RPC0"]["weights_bytes"] == 0
    assert document["engine_says"]["RPC0"]["weights_bytes"] == 9 * MIB
    assert document["rig"][0]["backend"] == "RPC"
    assert document["engine"] == "engine 1"
