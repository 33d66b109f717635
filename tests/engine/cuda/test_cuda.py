"""Loads on simulated CUDA cards: memory requests, refusals, and contexts only on used cards."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cuda.cards import BLOCK_BYTES, Account
from tests.engine.cuda.conftest import CONTEXT_MIB, Cards
from tests.engine.cuda.layouts import layout_file
from tests.support.command_line import run_cli, start_cli
from tests.support.patience import DEADLINE_S

pytestmark = pytest.mark.engine("cuda")

PARTS = ("weights_bytes", "kv_cache_bytes", "compute_bytes", "output_bytes")


def events_of(model: Path, layout: Path, *words: str) -> list[dict[str, Any]]:
    return run_cli("load", str(model), "--layout", str(layout), "--json", *words).events


def loader(cards: Cards) -> dict[int, Account]:
    return cards.ledger().of_loader()


def test_a_load_takes_what_was_forecast_on_the_cards_of_its_layout_only(
    cards: Cards, model: Path, tmp_path: Path
) -> None:
    layout = layout_file(tmp_path, ("CUDA2", "0-2"), ("CPU", "3-3"), ("CUDA0", "4-7"))
    (loaded,) = [event for event in events_of(model, layout) if event["event"] == "loaded"]
    forecast = {row["id"]: row for row in loaded["forecast"]}
    rows = {row["id"]: row for row in loaded["devices"]}
    assert {name: [row[part] for part in PARTS] for name, row in rows.items()} == {
        name: [row[part] for part in PARTS] for name, row in forecast.items()
    }
    accounts = loader(cards)
    assert accounts.keys() == {0, 2}
    for number, account in accounts.items():
        assert account.context_bytes == CONTEXT_MIB << 20
        assert account.buffer_peak_bytes >= sum(rows[f"CUDA{number}"][part] for part in PARTS)


def test_a_layout_on_the_processor_makes_no_context(cards: Cards, model: Path, tmp_path: Path) -> None:
    rig = tmp_path / "rig.json"
    rig.write_text(run_cli("devices").out, encoding="utf-8")
    before = set(cards.ledger().accounts)
    events = events_of(model, layout_file(tmp_path, ("CPU", "0-7")), "--rig", str(rig))
    assert events[-1]["event"] == "loaded"
    accounts = cards.ledger().accounts
    assert [pid for pid in accounts.keys() - before if accounts[pid]] == []


def test_a_card_without_room_refuses_and_is_named(cards: Cards, model: Path, tmp_path: Path) -> None:
    cards.insert("RTX 3090=8.6=24576, RTX 5070=12.0=480")
    events = events_of(model, layout_file(tmp_path, ("CUDA0", "0-3"), ("CUDA1", "4-7")))
    assert events[-1]["event"] == "out_of_memory"
    assert events[-1]["device"] == "CUDA1"
    assert events[-1]["requested_bytes"] > (events[-1]["free_bytes"] or 0)


def test_memory_that_runs_out_in_the_first_long_prompt_is_told_as_such(
    cards: Cards, model: Path, tmp_path: Path
) -> None:
    layout = layout_file(tmp_path, ("CUDA1", "0-7"), flash_attn="off", n_ubatch=2048)
    cards.insert("RTX 5070=12.0=12288, RTX 3090=8.6=24576")
    assert events_of(model, layout)[-1]["event"] == "loaded"
    loaded_bytes = loader(cards)[1].peak_bytes
    cards.insert("RTX 5070=12.0=12288, RTX 3090=8.6=24576")
    prompt = ("--prompt", "a b c d e f " * 250, "-n", "2")
    assert events_of(model, layout, *prompt)[-1]["event"] == "done"
    answered_bytes = loader(cards)[1].peak_bytes
    assert answered_bytes > loaded_bytes + 2 * BLOCK_BYTES
    cards.insert(f"RTX 5070=12.0=12288, RTX 3090=8.6={(answered_bytes - BLOCK_BYTES) >> 20}")
    events = events_of(model, layout, *prompt)
    loaded = next(event for event in events if event["event"] == "loaded")
    ending = events[-1]
    assert (ending["event"], ending["device"], ending["stage"]) == ("out_of_memory", "CUDA1", "prompt")
    assert ending["requested_bytes"] is None
    (measured,) = [row for row in loaded["devices"] if row["id"] == "CUDA1"]
    assert 0 <= ending["free_bytes"] < answered_bytes - BLOCK_BYTES - measured["need_bytes"]
    assert [row["id"] for row in ending["allocated"]] == ["CUDA1", "CPU"]
    assert ending["proposals"]
    # It was learned: the same layout is known to need more there, and other settings are not blamed.
    with_flash = layout_file(tmp_path, ("CUDA1", "0-7"), flash_attn="on", n_ubatch=2048)
    usual_bytes = overhead_of(model, with_flash)
    layout = layout_file(tmp_path, ("CUDA1", "0-7"), flash_attn="off", n_ubatch=2048)
    assert overhead_of(model, layout) > max(usual_bytes, ending["free_bytes"])


def test_an_answer_goes_on_in_another_layout_after_memory_ran_out(cards: Cards, model: Path, tmp_path: Path) -> None:
    layout = layout_file(tmp_path, ("CUDA1", "0-7"), flash_attn="off", n_ubatch=2048)
    prompt = ("--prompt", "a b c d e f " * 250, "-n", "4")
    big = "RTX 5070=12.0=12288, RTX 3090=8.6=24576"
    cards.insert(big)
    assert events_of(model, layout, *prompt)[-1]["event"] == "done"
    answered_bytes = loader(cards)[1].peak_bytes
    cards.insert(f"RTX 5070=12.0=12288, RTX 3090=8.6={(answered_bytes - BLOCK_BYTES) >> 20}")
    words = (*prompt, "--retry", "--rig", str(generous_rig(tmp_path)))
    events = [event for event in events_of(model, layout, *words) if event["event"] != "progress"]
    kinds = [event["event"] for event in events if event["event"] not in ("token", "attempt")]
    assert kinds == ["loaded", "loaded", "done"]
    second = next(event for event in events if event["event"] == "attempt" and event["number"] == 2)
    assert second["reason"].startswith("CUDA1 ran out of memory while the prompt was read")


def generous_rig(folder: Path) -> Path:
    """Write a rig that says more memory than there is, so that the forecast does not step back before the load."""
    rig = run_cli("devices").document
    for device in rig["devices"]:
        device.update(free_bytes=None, margin_bytes=0, total_bytes=24 << 30)
    path = folder / "rig.json"
    path.write_text(json.dumps(rig), encoding="utf-8")
    return path


def overhead_of(model: Path, layout: Path) -> int:
    """Return what is forecast beyond buffers on CUDA1."""
    rows = run_cli("plan", str(model), "--layout", str(layout), "--json").document["devices"]
    return next(int(row["overhead_bytes"]) for row in rows if row["id"] == "CUDA1")


def test_a_chat_goes_on_in_another_layout_after_memory_ran_out(cards: Cards, model: Path, tmp_path: Path) -> None:
    layout = layout_file(tmp_path, ("CUDA1", "0-7"), flash_attn="off", n_ubatch=2048)
    big = "RTX 5070=12.0=12288, RTX 3090=8.6=24576"
    prompt = ("--prompt", "a b c d e f " * 250, "--max-tokens", "4")
    words = ("chat", str(model), "--layout", str(layout), "--json", *prompt)
    cards.insert(big)
    assert run_cli(*words).events[-1]["event"] == "done"
    answered_bytes = loader(cards)[1].peak_bytes
    cards.insert(f"RTX 5070=12.0=12288, RTX 3090=8.6={(answered_bytes - BLOCK_BYTES) >> 20}")
    events = run_cli(*words, "--retry", "--rig", str(generous_rig(tmp_path))).events
    kinds = [event["event"] for event in events if event["event"] not in ("token", "attempt", "progress", "thinking")]
    assert kinds == ["loaded", "conversation", "loaded", "done"]


def test_a_server_learns_what_an_answer_needed(cards: Cards, model: Path, tmp_path: Path) -> None:
    layout = layout_file(tmp_path, ("CUDA1", "0-7"), flash_attn="off", n_ubatch=2048)
    text = "a b c d e f " * 250
    cards.insert("RTX 5070=12.0=12288, RTX 3090=8.6=24576")
    assert events_of(model, layout, "--prompt", text, "-n", "2")[-1]["event"] == "done"
    size_bytes = loader(cards)[1].peak_bytes - BLOCK_BYTES
    cards.insert(f"RTX 5070=12.0=12288, RTX 3090=8.6={size_bytes >> 20}")
    before_bytes = overhead_of(model, layout)
    with start_cli("serve", model, "--layout", layout, "--port", "0", "--json") as server:
        port = server.wait_for_event("serving")["port"]
        server.wait_for_event("loaded")
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)) as client:
            client.request("POST", "/v1/completions", json.dumps({"prompt": text, "max_tokens": 2}))
            reply = client.getresponse()
            assert (reply.status, json.loads(reply.read())["error"]["code"]) == (503, "does_not_fit")
        server.process.send_signal(signal.SIGINT)
        assert server.finish() == 0
    assert overhead_of(model, layout) > before_bytes


READ = """
import ctypes, json
from engine.base.pci import parse_pci_id
from engine.devices.telemetry.cards import Nvml, NvmlReader, list_nvidia_cards
cuda, nvml = ctypes.CDLL("libcudart.so.13"), Nvml()
before = [card.free_bytes for card in list_nvidia_cards()]
taken = ctypes.c_void_p()
assert cuda.cudaSetDevice(2) == 0
assert cuda.cudaMalloc(ctypes.byref(taken), ctypes.c_size_t(100 << 20)) == 0
slots = [card.slot for card in list_nvidia_cards()]
samples = [NvmlReader(f"CUDA{at}", slot, nvml).read(0.0) for at, slot in enumerate(slots)]
print(json.dumps({"before": before, "used": [each.used_bytes for each in samples],
                  "total": [each.total_bytes for each in samples]}))
"""


def test_telemetry_reads_the_same_ledger_and_makes_no_context(cards: Cards) -> None:
    environ = os.environ | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    done = subprocess.run(
        [sys.executable, "-c", READ], capture_output=True, text=True, timeout=DEADLINE_S, check=True, env=environ
    )
    read = json.loads(done.stdout)
    sizes = [24576 << 20, 24576 << 20, 12288 << 20, 64 << 20]
    assert (read["before"], read["total"]) == (sizes, sizes)
    # Three cards are only looked at. The engine's process has a context and a buffer on the other one.
    assert read["used"] == [0, 0, (CONTEXT_MIB + 100) << 20, 0]
    assert cards.ledger().used_cards() == {2}


@pytest.mark.parametrize("flash", ["on", "off"])
def test_an_answer_takes_no_more_than_the_forecast(cards: Cards, model: Path, tmp_path: Path, flash: str) -> None:
    layout = layout_file(tmp_path, ("CUDA1", "0-7"), flash_attn=flash, n_ubatch=2048)
    events = events_of(model, layout, "--prompt", "a b c d e f " * 330, "-n", "2")
    (loaded,) = [event for event in events if event["event"] == "loaded"]
    assert events[-1]["event"] == "done"
    (row,) = [row for row in loaded["forecast"] if row["id"] == "CUDA1"]
    account = loader(cards)[1]
    taken_bytes = account.peak_bytes - account.context_bytes
    assert taken_bytes <= row["need_bytes"] - row["overhead_bytes"]
    assert row["answering_bytes"] > row["late_bytes"]
    assert (row["late_bytes"] > 0) == (flash == "off")


@pytest.mark.parametrize("flash", ["on", "off"])
def test_cards_without_virtual_memory_answer_with_a_tenth_more(
    cards: Cards, monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path, flash: str
) -> None:
    """ggml's other pool keeps buffers of 5 % more than was asked for, and frees unused ones when memory runs out."""
    monkeypatch.setenv("STAND_IN_LEGACY", "1")
    layout = layout_file(tmp_path, ("CUDA1", "0-7"), flash_attn=flash, n_ubatch=2048)
    rows = run_cli("plan", str(model), "--layout", str(layout), "--json").document["devices"]
    (row,) = [row for row in rows if row["id"] == "CUDA1"]
    size_bytes = row["need_bytes"] + row["answering_bytes"] // 10 + (16 << 20)
    context_mib = row["overhead_bytes"] >> 20
    prompt = ("--prompt", "a b c d e f " * 330, "-n", "2", "--rig", str(generous_rig(tmp_path)))
    cards.insert(f"RTX 5070=12.0=12288, RTX 3090=8.6={size_bytes >> 20}", context_mib)
    assert events_of(model, layout, *prompt)[-1]["event"] == "done"
    assert loader(cards)[1].pool_peak_bytes == 0
    # Memory that runs out in this pool is told as such too.
    cards.insert(f"RTX 5070=12.0=12288, RTX 3090=8.6={(row['need_bytes'] - row['answering_bytes']) >> 20}", context_mib)
    assert events_of(model, layout, *prompt)[-1]["event"] == "out_of_memory"
