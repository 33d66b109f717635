"""JSON records in the log at a child's start and a load's end: bounded, and without secrets."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.planning.layout.engine_parameters import EngineParameters
from engine.planning.plan.placement_check import DeviceDifference
from engine.planning.plan.report import DeviceRow
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.process.records import MAX_RECORD, device_facts, log_record, log_start, logged_environment
from engine.runtime.protocol.requests import DeviceRef, Load
from engine.runtime.session.events import Cancelled, Failed, Loaded, Progress
from engine.runtime.session.load_records import LoadRecorder
from tests.support.fake_worker import fake_worker_argv
from tests.support.load_specs import make_spec, worker_device
from tests.support.session_log import SessionLog

REFS = (
    DeviceRef(id="CUDA0", backend="CUDA"),
    DeviceRef(id="big", backend="CUDA"),
    DeviceRef(id="Vulkan0", backend="Vulkan"),
    DeviceRef(id="attic", backend="RPC", endpoint="192.0.2.7:50052", endpoint_device=3),
)


def records(caplog: pytest.LogCaptureFixture, kind: str) -> list[dict[str, Any]]:
    """Return the records of this kind, read from their lines."""
    lines = [record.getMessage() for record in caplog.records]
    return [msgspec.json.decode(line.removeprefix(f"{kind} ")) for line in lines if line.startswith(f"{kind} {{")]


def a_load(devices: tuple[DeviceRef, ...]) -> Load:
    parameters = EngineParameters(n_gpu_layers=0, devices=(), tensor_split=(), split_mode="layer")
    return Load(path="/home/ada/secret.gguf", devices=devices, parameters=parameters, context=ContextSettings())


def test_a_start_names_versions_devices_and_environment(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("HF_TOKEN", "hf_hidden")
    with caplog.at_level(logging.INFO):
        log_start("worker", 7, "llama-cpp-python 1", {"GGML_OP_OFFLOAD_MIN_BATCH": "64"}, a_load(REFS))
    (start,) = records(caplog, "start")
    assert (start["child"], start["pid"], start["engine"], start["request"]) == (
        "worker", 7, "llama-cpp-python 1", "load",
    )  # fmt: skip
    assert {"layerdeck", "python", "system", "release"} <= start.keys()
    assert [(each["id"], each["backend"], each["index"]) for each in start["devices"]] == [
        ("CUDA0", "CUDA", 0), ("big", "CUDA", 1), ("Vulkan0", "Vulkan", 0), ("attic", "RPC", 3),
    ]  # fmt: skip
    assert start["environment"]["CUDA_VISIBLE_DEVICES"] == "1"
    assert start["environment"]["GGML_OP_OFFLOAD_MIN_BATCH"] == "64"
    for hidden in ("hf_hidden", "192.0.2.7", "secret.gguf"):
        assert hidden not in caplog.text


def test_secrets_and_folders_of_the_user_stay_out() -> None:
    home = str(Path.home())
    shown = logged_environment(
        {
            "GGML_API_KEY": "k", "NVIDIA_AUTH_TOKEN": "t", "LAYERDECK_PASSWORD": "p", "PATH": "/bin",
            "LAYERDECK_PACKS": f"{home}/packs.json", "VK_ICD_FILENAMES": "x" * 5000,
        }
    )  # fmt: skip
    assert shown["LAYERDECK_PACKS"] == "~/packs.json"
    assert shown.keys() == {"LAYERDECK_PACKS", "VK_ICD_FILENAMES"}
    assert len(shown["VK_ICD_FILENAMES"]) <= 120


def test_a_record_stays_json_and_within_its_bound(caplog: pytest.LogCaptureFixture) -> None:
    many = {f"GGML_{number}": "y" * 500 for number in range(500)}
    with caplog.at_level(logging.INFO):
        log_start("worker", 7, "engine", many, a_load(REFS * 100))
        log_record("load", {"plan": "z" * (2 * MAX_RECORD), "ending": "loaded"})
    assert max(len(record.getMessage()) for record in caplog.records) <= MAX_RECORD + 10
    assert records(caplog, "start")[0]["child"] == "worker"
    assert records(caplog, "load")[0]["ending"] == "loaded"
    assert len(device_facts(REFS * 100)) == 32


def test_a_load_records_stages_and_both_sizes(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    recorder, plan = LoadRecorder(lambda: now_s[0]), make_spec([worker_device("attic", "192.0.2.1:50052")]).plan
    measured = tuple(msgspec.structs.replace(row, need_bytes=row.need_bytes + 5) for row in plan.forecast)

    def run(*stages: tuple[Any, float]) -> None:
        for stage, seconds in stages:
            recorder.take(Progress(stage=stage))
            now_s[0] += seconds

    with caplog.at_level(logging.INFO):
        run(("header", 0.5), ("fit", 0.25))
        recorder.begin_child(plan)
        run(("allocate", 1), ("read", 2), ("read", 4), ("warm_up", 1))
        recorder.take(Failed(kind="argument", message="no", request=3))  # about a request
        elsewhere = (DeviceDifference("layer", 3, "RPC0", "CPU"),)
        told = recorder.take(Loaded(devices=measured, forecast=plan.forecast, elsewhere=elsewhere))
        run(("header", 1))
        recorder.take(Cancelled(stage="header"))
    good, cancelled = records(caplog, "load")
    assert good["seconds"] == {"header": 0.5, "fit": 0.25, "allocate": 1, "read": 6, "warm_up": 1}
    assert told.seconds == good["seconds"], "the report has the same times"
    assert good["elsewhere"] == "Layer 3: loaded on CPU, not on RPC0."
    assert good["ending"] == "loaded"
    rows: tuple[DeviceRow, ...] = plan.forecast
    assert good["devices"] == [
        {"id": row.id, "forecast_bytes": row.need_bytes, "measured_bytes": row.need_bytes + 5} for row in rows
    ]
    assert "192.0.2.1" not in caplog.text
    assert (cancelled["ending"], cancelled["seconds"], cancelled["devices"]) == ("cancelled", {"header": 1}, [])


def test_a_session_writes_both_records(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), SessionLog(fake_worker_argv("normal")) as log:
        log.session.load(make_spec())
        log.wait_for_endings(1)
    (start,) = records(caplog, "start")
    (load,) = records(caplog, "load")
    assert (start["engine"], start["request"]) == ("fake", "load")
    assert load["ending"] == "loaded"
    assert {"header", "fit", "allocate", "read", "context", "warm_up"} == load["seconds"].keys()
    assert [each["id"] for each in load["devices"]] == ["CPU"]
    assert all(isinstance(each["measured_bytes"], int) for each in load["devices"])
