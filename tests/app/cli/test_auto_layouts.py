"""The options `plan --auto` and `load --auto`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.cli import devices, inputs
from app.cli.auto_options import STRATEGIES as HELP_NAMES
from app.cli.devices import find_machine
from app.paths import speeds_path
from engine.base.units import MIB
from engine.devices.device import CPU_ID, MeasuredChoice, Rig
from engine.machines.rigs.lab import LabRig
from engine.model.gguf.reader import read_model
from engine.planning.fit.speed_book import (
    EMPTY_BOOK,
    SpeedBook,
    StoredDevice,
    machine_key,
    read_speed_book,
    write_speed_book,
)
from engine.planning.fit.strategies.catalogue import STRATEGIES
from engine.planning.layout.layout import single_device
from engine.planning.plan.decisions.decision import load_key
from tests.support.command_line import run_here
from tests.support.models import write_header_only, write_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the header of an 8B model with a short vocabulary."""
    path = tmp_path_factory.mktemp("models") / "eight.gguf"
    return write_header_only(path, n_layers=32, n_embd=4096, n_head=32, n_ff=14336, n_vocab=4096)


@pytest.fixture
def rig(tmp_path: Path) -> Path:
    """Return a rig of two cards that hold the model together only."""
    cards = [{"id": f"CUDA{index}", "backend": "CUDA", "total_bytes": "4GiB"} for index in range(2)]
    path = tmp_path / "rig.json"
    path.write_text(json.dumps({"version": 1, "devices": cards, "host": {"total_bytes": "32GiB"}}))
    return path


def plan(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> dict[str, Any]:
    answer = run_here(capsys, "plan", *words, "--json")
    assert answer.code == code, answer.err
    document: dict[str, Any] = answer.document
    return document


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plan_finds_a_layout_and_says_why(
    strategy: str, model: Path, rig: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = plan(capsys, model, "--rig", rig, "--auto", strategy)
    assert document["fits"] is True
    assert len(document["explanation"].split()) > 5
    kept = tmp_path / "layout.json"
    kept.write_text(json.dumps(document["layout"]))
    again = plan(capsys, model, "--rig", rig, "--layout", kept)
    assert (again["layout"], again["devices"]) == (document["layout"], document["devices"])
    assert "explanation" not in again


def test_context_goes_no_further_than_was_asked(model: Path, rig: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = plan(capsys, model, "--rig", rig, "--auto", "context", "--ctx", "5000", "--type-k", "q8_0")
    assert document["layout"]["context"]["n_ctx"] == 5000
    assert document["layout"]["context"]["type_k"] == "q8_0"
    longest = plan(capsys, model, "--rig", rig, "--auto", "context")
    assert longest["layout"]["context"]["n_ctx"] > 8192


def test_the_explanation_is_for_people_too(model: Path, rig: Path, capsys: pytest.CaptureFixture[str]) -> None:
    explanation = plan(capsys, model, "--rig", rig, "--auto", "balanced")["explanation"]
    assert f"\n{explanation}\n" in run_here(capsys, "plan", model, "--rig", rig, "--auto", "balanced").out


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_split_that_was_asked_for_is_one(
    strategy: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"CUDA0": "24GiB", "CUDA1": "12GiB"}
    cards = [{"id": name, "backend": "CUDA", "total_bytes": size} for name, size in sizes.items()]
    rig = tmp_path / "unequal.json"
    rig.write_text(json.dumps({"version": 1, "devices": cards, "host": {"total_bytes": "32GiB"}}))
    document = plan(capsys, model, "--rig", rig, "--auto", strategy, "--split")
    assert {run["device"] for run in document["layout"]["runs"]} == set(sizes)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_where_no_device_may_be_used_the_explanation_says_so(
    strategy: str, model: Path, rig: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = plan(capsys, model, "--rig", rig, "--auto", strategy, "--off", "CUDA0,CUDA1")
    assert "Every device is excluded" in document["explanation"]
    assert "no device" not in document["explanation"].casefold()


def test_layers_that_are_pinned_to_the_cpu_are_not_said_to_lack_room(
    model: Path, rig: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    explanation = plan(capsys, model, "--rig", rig, "--auto", "fewest", "--pin", "0-20=CPU")["explanation"]
    assert "room" not in explanation
    assert "not pinned elsewhere" in explanation


def test_load_takes_a_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = write_tiny_llama(tmp_path / "tiny.gguf", n_layers=2)
    rig = tmp_path / "rig.json"
    rig.write_text(json.dumps({"version": 1, "devices": [], "host": {"total_bytes": "8GiB"}}))
    answer = run_here(capsys, "load", tiny, "--rig", rig, "--auto", "fastest", "--json")
    assert answer.code == 0
    assert json.loads(answer.out.splitlines()[-1])["event"] == "loaded"


def test_help_names_every_strategy() -> None:
    assert tuple(STRATEGIES) == HELP_NAMES


REFUSED = {
    "--off CUDA9": 'no device "CUDA9" here; the devices are CUDA0, CUDA1, CPU',
    "--off CPU": "CPU cannot be excluded",
    "--off CUDA0,": "is not a list of device ids",
    "--order CUDA0 --auto fewest": "--order needs --auto priority",
    "--order CUDA0,CUDA0 --auto priority": "CUDA0 is in the device order twice",
    "--order CPU --auto priority": "The CPU cannot be in the device order",
    "--pin 0-3": "is not a pin; write LAYERS=ID",
    "--pin x=CUDA0": "is not a pin; write LAYERS=ID",
    "--pin 3-1=CUDA0": "is in reverse order; write the lower layer first: 1-3",
    "--pin 30-32=CUDA0": "Layers 30-32 cannot be pinned: the model has layers 0-31",
    "--pin 1=CUDA7": 'no device "CUDA7"',
    "--pin 0-3=CUDA0 --pin 3=CUDA1": "Layer 3 is pinned to both CUDA0 and CUDA1",
    "--pin output=CUDA0 --pin output=CPU": "The output layer is pinned to CUDA0 and to CPU",
    "--pin 1=CUDA0 --off CUDA0": "CUDA0 is excluded but has pinned layers",
    "--kv-types q8_0": "--kv-types needs --auto context",
    "--kv-types q9 --auto context": '"q9" is not a KV cache type; use f32',
    "--kv-types f16,f16 --auto context": "Cache type f16 is listed twice",
    "--margin CUDA0": "is not a margin; write ID=SIZE",
    "--margin CUDA5=1GiB": 'no device "CUDA5"',
    "--margin CUDA0=1GiB --margin CUDA0=2GiB": "CUDA0 has 2 margins; give one",
    "--kv-types f16,q8_0 --type-k f16 --auto context": "--type-k and --type-v contradict --kv-types",
}


@pytest.mark.parametrize("words", REFUSED)
def test_nonsense_is_answered_with_a_sentence(
    words: str, model: Path, rig: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    auto = () if "--auto" in words else ("--auto", "fewest")
    answer = run_here(capsys, "plan", model, "--rig", rig, *auto, *words.split(), "--json")
    assert answer.code == 2
    assert answer.error["kind"] == "argument"
    assert REFUSED[words] in answer.error["message"]


@pytest.mark.parametrize(
    "words", ["--off CUDA0", "--order CUDA0", "--pin 0=CUDA0", "--split", "--one-backend", "--kv-types f16"]
)
def test_without_auto_there_is_nothing_to_constrain(
    words: str, model: Path, rig: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = run_here(capsys, "plan", model, "--rig", rig, *words.split(), "--json")
    assert answer.code == 2
    assert f"{words.split(maxsplit=1)[0]} needs an automatic layout" in answer.error["message"]


def test_constraints_are_kept(model: Path, rig: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--auto", "fewest", "--off", "CUDA0", "--pin", "2-3=CPU", "--pin", "output=CPU")
    layout = plan(capsys, model, "--rig", rig, *words)["layout"]
    devices = {run["device"] for run in layout["runs"]}
    assert devices == {"CPU", "CUDA1"}
    assert layout["output"] == "CPU"
    held = [run["layers"] for run in layout["runs"] if run["device"] == "CPU"]
    assert any(int(layers.split("-")[0]) <= 2 and int(layers.split("-")[-1]) >= 3 for layers in held)


def test_the_order_of_priority(model: Path, rig: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (model, "--rig", rig, "--auto", "priority", "--order")
    for order in ("CUDA1,CUDA0", "CUDA0,CUDA1"):
        layout = plan(capsys, *words, order)["layout"]
        devices = list(dict.fromkeys([*(run["device"] for run in layout["runs"]), layout["output"]]))
        assert devices == [device for device in order.split(",") if device in devices]
        assert layout["runs"][0]["device"] == order.split(",")[0]


def test_margins_are_left_free(model: Path, rig: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for auto in ((), ("--auto", "balanced")):
        rows = plan(capsys, model, "--rig", rig, *auto, "--margin", "CUDA0=1GiB")["devices"]
        assert [row["margin_bytes"] for row in rows] == [1 << 30, 0, 0]
        assert rows[0]["need_bytes"] <= 3 << 30


def test_smaller_cache_types_where_they_are_allowed(model: Path, rig: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = plan(capsys, model, "--rig", rig, "--auto", "context", "--kv-types", "f16,q4_0", "--off", "CUDA1")
    assert document["layout"]["context"]["type_k"] in ("f16", "q4_0")
    assert document["layout"]["context"]["type_k"] == document["layout"]["context"]["type_v"]


def test_load_says_why_to_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = write_tiny_llama(tmp_path / "tiny.gguf", n_layers=2)
    rig = tmp_path / "rig.json"
    rig.write_text(json.dumps({"version": 1, "devices": [], "host": {"total_bytes": "8GiB"}}))
    answer = run_here(capsys, "load", tiny, "--rig", rig, "--auto", "fewest")
    assert answer.code == 0
    explanation = plan(capsys, tiny, "--rig", rig, "--auto", "fewest")["explanation"]
    assert explanation in answer.err.splitlines()


@pytest.mark.exhaustive
def test_speeds_are_measured_on_request_and_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each type takes half a second of each device, and more with a large matrix.
    monkeypatch.setattr("engine.machines.rigs.speeds._TYPES", {"Q4_K": 12})
    monkeypatch.setattr("engine.machines.rigs.speeds.MAX_BYTES", 8 * MIB)
    with LabRig([64 * MIB]) as lab:
        answer = run_here(capsys, "devices", "--rpc", str(lab.rig.devices[0].endpoint), "--measure")
    assert answer.code == 0
    assert [device["id"] for device in answer.document["devices"]] == ["RPC0"]
    said = [line.partition(":")[0] for line in answer.err.splitlines()]
    assert {"CPU", "RPC0"} <= set(said)
    assert "GB/s" in answer.err
    kept = read_speed_book(speeds_path())
    assert len(kept.devices) == 2
    assert all(each.read_bytes_per_second > 1e8 for each in kept.devices.values())
    assert all(each.by_type["Q4_K"] > 1e7 and each.op_s for each in kept.devices.values())


def test_what_is_learnt_during_a_measurement_of_devices_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "speeds.json"
    monkeypatch.setattr(devices, "speeds_path", lambda: path)
    theirs = MeasuredChoice("n_ubatch", 1024, 512, 1.3, 1.2, 1.4, "here", "load")

    def measuring(rig: Rig, book: SpeedBook) -> tuple[SpeedBook, tuple[str, ...]]:
        write_speed_book(path, book.with_choices([theirs]))
        return book.with_device(rig.host, StoredDevice(1e11, 1e-4, 1e9)), ()

    monkeypatch.setattr(devices, "measured_book", measuring)
    monkeypatch.setattr(devices, "with_threads", lambda book, _host: (book, ()))
    assert run_here(capsys, "devices", "--measure").code == 0
    kept = read_speed_book(path)
    assert (len(kept.devices), kept.choices) == (1, (theirs,))


def test_speeds_that_cannot_be_kept_are_shown_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "speeds_path", lambda: tmp_path)
    measured = StoredDevice(1e11, 1e-4, 1e9)
    monkeypatch.setattr(
        devices, "measured_book", lambda rig, book: (book.with_device(rig.host, measured), ("A card fell silent.",))
    )
    monkeypatch.setattr(devices, "with_threads", lambda book, _host: (book, ("threads: 4",)))
    answer = run_here(capsys, "devices", "--measure", "--json")
    assert answer.code == 2
    assert answer.document["host"]["total_bytes"] > 0
    assert {"A card fell silent.", "threads: 4"} <= set(answer.err.splitlines())
    assert "speeds file cannot be written" in answer.err


def test_one_backend_mixes_no_devices(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cards = [
        {"id": name, "backend": name[:-1], "total_bytes": size}
        for name, size in {"CUDA0": "4000MiB", "Vulkan0": "3200MiB", "Vulkan1": "3200MiB"}.items()
    ]
    rig = tmp_path / "mixed.json"
    rig.write_text(json.dumps({"version": 1, "devices": cards, "host": {"total_bytes": "32GiB"}}))
    mixed = plan(capsys, model, "--rig", rig, "--auto", "fewest")
    assert "CUDA0" in {run["device"] for run in mixed["layout"]["runs"]}
    document = plan(capsys, model, "--rig", rig, "--auto", "fewest", "--one-backend")
    assert {run["device"] for run in document["layout"]["runs"]} == {"Vulkan0", "Vulkan1"}
    assert "Only Vulkan is used: its devices hold" in document["explanation"]
    assert len(document["devices"]) == 4, "all devices have their rows"


def test_what_was_measured_here_is_used_where_nothing_is_chosen(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "speeds.json"
    monkeypatch.setattr(inputs, "speeds_path", lambda: path)
    rig = find_machine()
    machine = machine_key(rig.host)
    layout = single_device(read_model(model).n_layers, CPU_ID)
    load = load_key(read_model(model), layout, rig)
    choices = [
        MeasuredChoice("threads", 3, 2, 1.2, 1.1, 1.3, machine),
        MeasuredChoice("threads_batch", 2, 2, 1.0, 1.0, 1.0, machine),
        MeasuredChoice("n_ubatch", 1024, 512, 1.2, 1.1, 1.3, machine, load),
    ]
    write_speed_book(path, EMPTY_BOOK.with_choices(choices))
    found = plan(capsys, model, "--device", "CPU", "--ctx", "2048")
    decided = {each["setting"]: each for each in found["decisions"]}
    assert (decided["threads"]["value"], decided["threads_batch"]["value"]) == (3, 2)
    assert ", as measured: 1.20 times as fast as with 2 " in decided["threads"]["reason"]
    assert decided["n_ubatch"]["reason"].startswith("Chosen by measuring prompt speed: 1.20 times")
    assert found["layout"]["context"]["n_ubatch"] == 1024
    chosen = plan(capsys, model, "--device", "CPU", "--ctx", "2048", "--threads", "1", "--ubatch", "256")
    decided = {each["setting"]: each["value"] for each in chosen["decisions"]}
    assert (decided["threads"], chosen["layout"]["context"]["n_ubatch"]) == (1, 256)
