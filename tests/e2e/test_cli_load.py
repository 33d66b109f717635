"""The main use of the command line: lab rig, demo model, layouts across workers and CPU, real loads."""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import pytest
from msgspec import Struct

from app.paths import chats_path
from engine.base.units import MIB
from engine.chat.store import ChatStore
from engine.model.demo.writer import write_demo_model
from tests.support.command_line import Event, RunningCommand, all_gone, run_cli, run_here, start_cli
from tests.support.models import write_tiny_encoder, write_tiny_llama
from tests.support.unknown_graphs import LOOPED_ARCHITECTURE, LOOPED_METADATA, know_no_graphs

pytestmark = pytest.mark.program

RUNS = [
    {"device": "RPC0", "layers": "0-3"},
    {"device": "CPU", "layers": "4-5"},
    {"device": "RPC1", "layers": "6-8"},
    {"device": "CPU", "layers": "9"},
    {"device": "RPC0", "layers": "10-12"},
    {"device": "RPC2", "layers": "13-15"},
]
STAGES = ["header", "fit", "allocate", "read", "context", "warm_up"]
ALLOCATED_PARTS = ("weights_bytes", "kv_cache_bytes", "recurrent_bytes", "output_bytes")
KV_BYTES_PER_TOKEN_AND_LAYER = 1024


class Lab(Struct, frozen=True):
    """The lab rig that these tests share, the rig file it wrote, and the demo model."""

    command: RunningCommand
    document: dict[str, Any]
    rig: Path
    model: Path


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    model, rig = folder / "demo.gguf", folder / "rig.json"
    write_demo_model(model)
    with start_cli("rig", "lab", "--workers", "256MiB,256MiB,512MiB", "--out", rig) as command:
        document = command.document()
        yield Lab(command, document, rig, model)
        workers = command.children()
        command.process.terminate()
        assert command.wait() == 0
        assert all_gone(workers)
        assert command.err == ""


def write_layout(path: Path, runs: list[dict[str, str]], *, output: str = "RPC1", **context: object) -> Path:
    document = {"version": 1, "runs": runs, "output": output, "context": {"threads": 2, "threads_batch": 2, **context}}
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def by_id(rows: list[Event]) -> dict[str, Event]:
    return {row["id"]: row for row in rows}


def test_the_lab_wrote_its_rig_once(lab: Lab) -> None:
    assert json.loads(lab.rig.read_text(encoding="utf-8")) == lab.document
    assert [device["id"] for device in lab.document["devices"]] == ["RPC0", "RPC1", "RPC2"]
    assert [device["total_bytes"] for device in lab.document["devices"]] == [256 * MIB, 256 * MIB, 512 * MIB]
    assert len({device["endpoint"] for device in lab.document["devices"]}) == 3


def test_layers_across_workers_and_the_cpu_generate(lab: Lab, tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "l.json", RUNS, n_ctx=2048)
    words = (lab.model, "--rig", lab.rig, "--layout", layout)
    answer = run_cli("load", *words, "--prompt", "hi", "-n", "16", "--seed", "7", "--json")
    assert (answer.code, answer.err) == (0, "")
    events = answer.events

    progress = [event for event in events if event["event"] == "progress"]
    assert all(list(event) == ["event", "stage", "fraction", "device"] for event in progress)
    assert list(dict.fromkeys(event["stage"] for event in progress)) == STAGES
    read = [event["fraction"] for event in progress if event["stage"] == "read" and event["fraction"] is not None]
    assert read == sorted(read)
    assert all(0 <= fraction <= 1 for fraction in read)

    (loaded,) = [event for event in events if event["event"] == "loaded"]
    assert list(loaded) == ["event", "devices", "forecast", "elsewhere", "seconds", "sent"]
    assert loaded["elsewhere"] == []
    measured, forecast = by_id(loaded["devices"]), by_id(loaded["forecast"])
    assert list(measured) == list(forecast) == ["RPC0", "RPC1", "RPC2", "CPU"]
    assert {row["grade"] for row in loaded["devices"]} == {"measured"}
    for device_id, row in measured.items():
        for part in ALLOCATED_PARTS:
            assert row[part] == forecast[device_id][part], (device_id, part)
        assert row["compute_bytes"] <= forecast[device_id]["compute_bytes"]
    layers = {"RPC0": 7, "RPC1": 3, "RPC2": 3, "CPU": 3}
    assert {device_id: row["kv_cache_bytes"] for device_id, row in measured.items()} == {
        device_id: count * 2048 * KV_BYTES_PER_TOKEN_AND_LAYER for device_id, count in layers.items()
    }

    text = "".join(event["text"] for event in events if event["event"] == "token")
    done = events[-1]
    assert list(done) == [
        "event", "prompt_tokens", "generated_tokens", "prompt_tokens_per_second", "generation_tokens_per_second",
        "stop_reason",
    ]  # fmt: skip
    assert done["event"] == "done"
    assert done["stop_reason"] in ("length", "end_of_text")
    assert 0 < done["generated_tokens"] <= 16
    assert done["prompt_tokens_per_second"] > 0
    assert done["generation_tokens_per_second"] > 0

    people = run_cli("load", *words, "--prompt", "hi", "-n", "16", "--seed", "7")
    assert people.code == 0
    assert people.out == text + "\n"
    assert people.err.splitlines()[:6] == ["header", "fit", "allocate", "read", "context", "warm up"]
    assert "\r" not in people.err


def test_several_prompts_are_answered_at_a_time(lab: Lab, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(["hi", "Once upon a time", "x"]), encoding="utf-8")
    layout = write_layout(tmp_path / "l.json", [{"device": "RPC1", "layers": "0-15"}])
    words = (lab.model, "--rig", lab.rig, "--layout", layout, "--prompts", prompts, "--parallel", "2", "--ctx", "256")
    answer = run_cli("load", *words, "-n", "6", "--seed", "7", "--json")
    assert (answer.code, answer.err) == (0, "")
    events = [json.loads(line) for line in answer.out.splitlines()]
    loaded = next(index for index, event in enumerate(events) if event["event"] == "loaded")
    assert not any("request" in event for event in events[: loaded + 1])
    (*answers, last) = events[loaded + 1 :]
    assert all(list(event)[-1] == "request" for event in answers)
    for request in range(3):
        own = [event for event in answers if event["request"] == request]
        assert [event["event"] for event in own[:-1]] == ["token"] * (len(own) - 1)
        assert own[-1]["event"] == "done"
    ends = [event for event in answers if event["event"] == "done"]
    assert len(ends) == 3
    assert list(last) == [key for key in ends[0] if key != "request"]
    for key in ("prompt_tokens", "generated_tokens"):
        assert last[key] == sum(event[key] for event in ends)


@pytest.mark.exhaustive
def test_texts_are_embedded_on_a_worker_as_on_the_processor(lab: Lab, tmp_path: Path) -> None:
    encoder = write_tiny_encoder(tmp_path / "bert.gguf", pooling=gguf.PoolingType.MEAN)
    texts = ("hello", "hello there", "there there hello")
    vectors = []
    for device in ("RPC1", "CPU"):
        layout = write_layout(tmp_path / f"{device}.json", [{"device": device, "layers": "0"}], output=device, n_ctx=64)
        words = ("--rig", lab.rig, "--layout", layout, "--parallel", "2", "--json")
        answer = run_cli("embed", encoder, *texts, *words)
        assert (answer.code, answer.err) == (0, "")
        vectors.append(answer.document["embeddings"])
    assert len(vectors[0]) == len(texts)
    for remote, local in zip(*vectors, strict=True):
        assert math.hypot(*remote) == pytest.approx(1.0)
        assert remote == pytest.approx(local, abs=1e-3)
    plain = run_cli("embed", lab.model, "hello", "--rig", lab.rig, "--ctx", "64", "--json")
    assert plain.code == 2
    assert plain.error["kind"] == "argument"


@pytest.mark.exhaustive
def test_an_interrupt_ends_embedding(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "m.gguf", n_embd=512, n_ff=2048, extra_metadata={"llama.pooling_type": 3})
    texts = ("hello there " * 20,) * 2000
    with start_cli("embed", model, *texts, "--threads", "1") as command:
        while (line := command.error_line()) is not None and line.strip() != "loaded":
            pass
        children = command.children()
        command.process.send_signal(signal.SIGINT)
        assert command.wait() == 130
        assert all_gone(children)
    assert command.err.splitlines()[-1] == "layerdeck-cli: cancelled"


def test_a_probe_tells_what_the_load_then_measures(lab: Lab, tmp_path: Path) -> None:
    runs = [{"device": "CPU", "layers": "0-3"}, {"device": "RPC1", "layers": "4-15"}]
    words = (lab.model, "--rig", lab.rig, "--layout", write_layout(tmp_path / "l.json", runs, n_ctx=1024))
    plan = run_cli("plan", *words, "--probe", "--json")
    assert plan.code == 0
    probed = plan.document["devices"]
    assert {row["grade"] for row in probed} == {"probed"}
    load = run_cli("load", *words, "--json")
    assert load.code == 0
    assert load.events[-1]["event"] == "loaded"
    measured = load.events[-1]["devices"]
    assert [row | {"grade": ""} for row in probed] == [row | {"grade": ""} for row in measured]


@pytest.mark.exhaustive
def test_a_context_too_large_for_one_worker(lab: Lab, tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "l.json", RUNS, n_ctx=40960)
    words = (lab.model, "--rig", lab.rig, "--layout", layout, "--json")
    plan = run_cli("plan", *words)
    assert plan.code == 3
    short = {row["id"] for row in plan.document["devices"] if row["shortfall_bytes"] > 0}
    assert "RPC0" in short

    load = run_cli("load", *words, "--prompt", "hi")
    assert load.code == 3
    ending = load.events[-1]
    assert list(ending) == [
        "event", "stage", "device", "requested_bytes", "free_bytes", "allocated", "proposals", "message",
        "holders",
    ]  # fmt: skip
    assert (ending["event"], ending["stage"], ending["device"]) == ("out_of_memory", "context", "RPC0")
    assert ending["requested_bytes"] == 7 * 40960 * KV_BYTES_PER_TOKEN_AND_LAYER
    assert ending["free_bytes"] is None or ending["free_bytes"] < ending["requested_bytes"]
    assert by_id(ending["allocated"])["RPC0"]["weights_bytes"] > 0
    assert "RPC0" in ending["message"]
    # The whole context comes first; a shorter one is the last resort.
    assert ending["proposals"][0].startswith("Place layers ")
    assert ending["proposals"][-1].startswith("Shorten the context to ")

    # The workers are as free as before.
    assert run_cli("load", lab.model, "--rig", lab.rig, "--json").code == 0


def test_people_read_which_worker_is_too_small(lab: Lab, tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "l.json", RUNS, n_ctx=40960)
    load = run_cli("load", lab.model, "--rig", lab.rig, "--layout", layout)
    assert (load.code, load.out) == (3, "")
    lines = load.err.splitlines()
    failure = next(index for index, line in enumerate(lines) if "RPC0 ran out of memory" in line)
    assert "280.0 MiB" in lines[failure]
    assert lines[failure + 1] == "What should fit:"
    assert "Place layers " in lines[failure + 2]
    assert any("Move layer" in line for line in lines[failure + 2 :])


@pytest.mark.exhaustive
def test_a_load_with_retries_steps_back_and_tells_each_attempt(lab: Lab, tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "l.json", [{"device": "RPC0", "layers": "0-15"}], output="RPC0", n_ctx=24576)
    words = ("load", lab.model, "--rig", lab.rig, "--layout", layout)
    load = run_cli(*words, "--retry", "3", "--json")
    assert load.code == 0, load.events
    names = [event["event"] for event in load.events]
    attempts = [event for event in load.events if event["event"] == "attempt"]
    assert names[-1] == "loaded"
    assert names.count("loaded") == 1
    assert [event["number"] for event in attempts] == list(range(1, len(attempts) + 1))
    assert 2 <= len(attempts) <= 4
    assert all(list(event) == ["event", "number", "layout", "reason"] for event in attempts)
    assert attempts[0]["layout"] == "layers 0-15 on RPC0"
    assert "RPC0" in attempts[1]["reason"]
    assert by_id(load.events[-1]["devices"])["RPC2"]["weights_bytes"] > 0

    chat = run_cli("chat", *words[1:], "--retry", "3", "--prompt", "Hi", "--max-tokens", "1", "--json")
    last = [event for event in chat.events if event["event"] == "attempt"][-1]
    conversation = next(event for event in chat.events if event["event"] == "conversation")
    with closing(ChatStore(chats_path())) as store:
        written = store.tree(conversation["id"]).path[-1].layout
    loaded = re.sub(r"layers? ([\d-]+) on (\w+)", r"\2 \1", last["layout"]).replace("-", "–")
    assert written == loaded != "RPC0 0–15"

    people = run_cli(*words, "--retry")
    assert people.code == 0
    assert "attempt 2: " in people.err
    assert run_cli(*words).code == 3


@pytest.mark.exhaustive
def test_a_prompt_that_is_longer_than_the_context(lab: Lab, tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "l.json", [{"device": "CPU", "layers": "0-15"}], output="CPU", n_ctx=256)
    answer = run_cli("load", lab.model, "--layout", layout, "--prompt", "long " * 200, "--json")
    ending = answer.events[-1]
    assert (answer.code, ending["event"], ending["kind"]) == (2, "failed", "argument")
    assert "256" in ending["message"]


@pytest.mark.exhaustive
def test_text_fills_the_context(lab: Lab, tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "l.json", [{"device": "CPU", "layers": "0-15"}], output="CPU", n_ctx=256)
    answer = run_cli("load", lab.model, "--layout", layout, "--prompt", "x" * 230, "--seed", "1", "--json")
    assert answer.code == 0
    done = answer.events[-1]
    assert done["stop_reason"] in ("context_full", "end_of_text")
    assert 230 < done["prompt_tokens"] + done["generated_tokens"] <= 257


def test_devices_asks_the_workers(lab: Lab, tmp_path: Path) -> None:
    endpoints = [device["endpoint"] for device in lab.document["devices"]]
    answer = run_cli("devices", "--rpc", endpoints[2], "--rpc", endpoints[0])
    assert answer.code == 0
    workers = [device for device in answer.document["devices"] if device["backend"] == "RPC"]
    assert [(device["id"], device["endpoint"]) for device in workers] == [
        ("RPC0", endpoints[2]),
        ("RPC1", endpoints[0]),
    ]
    rig = tmp_path / "rig.json"
    rig.write_text(answer.out, encoding="utf-8")
    layout = write_layout(tmp_path / "l.json", [{"device": "RPC1", "layers": "0-15"}], n_ctx=512)
    load = run_cli("load", lab.model, "--rig", rig, "--layout", layout, "--json")
    assert load.code == 0
    assert by_id(load.events[-1]["devices"])["RPC1"]["kv_cache_bytes"] > 0


@pytest.mark.exhaustive
def test_layers_that_run_twice_are_forecast_probed_and_loaded_alike(lab: Lab, tmp_path: Path) -> None:
    model = write_tiny_llama(
        tmp_path / "odd.gguf", n_layers=4, architecture=LOOPED_ARCHITECTURE, extra_metadata=LOOPED_METADATA
    )
    layout = write_layout(tmp_path / "l.json", [{"device": "RPC0", "layers": "0-3"}], output="RPC0", n_ctx=512)
    words = (model, "--rig", lab.rig, "--layout", layout)
    plan, probed = (run_cli("plan", *words, *more, "--json") for more in ((), ("--probe",)))
    rows = [by_id(each.document["devices"])["RPC0"] for each in (plan, probed)]
    assert [row["grade"] for row in rows] == ["estimated", "probed"]
    assert [row["kv_cache_bytes"] for row in rows] == [512 * 2 * 2 * 16 * 2 * 4 * 2] * 2

    load = run_cli("load", *words, "--json")
    assert load.code == 0
    assert load.events[-1]["forecast"] == plan.document["devices"]
    assert {row["need_bytes"] for row in (*rows, by_id(load.events[-1]["devices"])["RPC0"])} == {rows[0]["need_bytes"]}


def test_an_architecture_without_arithmetic_is_probed_on_workers(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    know_no_graphs(monkeypatch)
    model = write_tiny_llama(tmp_path / "model.gguf", n_layers=4)
    layout = write_layout(tmp_path / "l.json", [{"device": "RPC0", "layers": "0-3"}], output="RPC0", n_ctx=512)
    plan = run_here(capsys, "plan", model, "--rig", lab.rig, "--layout", layout, "--json")
    assert plan.code == 0
    row = by_id(plan.document["devices"])["RPC0"]
    assert row["grade"] == "probed"

    load = run_cli("load", model, "--rig", lab.rig, "--layout", layout, "--json")
    assert load.code == 0
    assert by_id(load.events[-1]["devices"])["RPC0"]["need_bytes"] == row["need_bytes"]
