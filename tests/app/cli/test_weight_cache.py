"""`rig kept`: size and removal of the weights that local workers keep; `plan` with a predicted speed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from app.paths import speeds_path, weight_cache_path
from engine.devices.device import CPU_ID, make_host
from engine.planning.fit.speed_book import EMPTY_BOOK, StoredDevice, read_speed_book, write_speed_book
from tests.support.command_line import run_here
from tests.support.models import write_tiny_llama


def test_what_is_kept_is_told_and_removed(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(weight_cache_path(), ignore_errors=True)  # what other tests of this process kept
    folder = weight_cache_path() / "50052"
    folder.mkdir(parents=True)
    (folder / f"{9:016x}").write_bytes(b"w" * 4096)
    told = run_here(capsys, "rig", "kept", "--json").document
    assert (told["size_bytes"], told["files"], told["freed_bytes"]) == (4096, 1, 0)
    assert "4.0 KiB of weights are cached" in run_here(capsys, "rig", "kept").out
    assert run_here(capsys, "rig", "kept", "--empty", "--json").document["freed_bytes"] == 4096
    assert run_here(capsys, "rig", "--json", "kept").document["size_bytes"] == 0


def test_a_plan_tells_the_speed_once_it_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    speeds_path().unlink(missing_ok=True)  # what other tests of this process measured
    model = write_tiny_llama(tmp_path / "tiny.gguf")
    rig = tmp_path / "rig.json"
    rig.write_text(json.dumps({"version": 1, "devices": [], "host": {"total_bytes": "8GiB"}}))
    unknown = run_here(capsys, "plan", model, "--rig", rig, "--json").document["speed"]
    assert (unknown["source"], unknown["tokens_per_second"]) == ("guess", None)
    host = make_host("host", 1)
    write_speed_book(speeds_path(), EMPTY_BOOK.with_device(host, StoredDevice(1e10, 1e-6, 1e9, {"F16": 1e10}, 1e-6)))
    known = run_here(capsys, "plan", model, "--rig", rig, "--json").document["speed"]
    assert known["source"] == "measured"
    (part,) = known["devices"]
    assert part["id"] == CPU_ID
    assert known["tokens_per_second"] == pytest.approx(1e3 / part["token_ms"], rel=0.02)
    assert "tokens/s with" in run_here(capsys, "plan", model, "--rig", rig).out


def test_an_answer_of_load_teaches_the_next_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    speeds_path().unlink(missing_ok=True)  # what other tests of this process measured
    model = write_tiny_llama(tmp_path / "tiny.gguf")
    rig = tmp_path / "rig.json"
    rig.write_text(json.dumps({"version": 1, "devices": [], "host": {"total_bytes": "8GiB"}}))
    options = ("--rig", rig, "--ctx", "256", "--threads", "1", "--json")

    def answered() -> dict[str, Any]:
        load = run_here(capsys, "load", model, *options, "--prompt", "a", "-n", "32")
        done: dict[str, Any] = json.loads(load.out.splitlines()[-1])
        return done

    # An answer teaches nothing if it is far off the prediction, and shows no difference if it is near. Both happen on
    # a machine that is busy during one of the two answers.
    for _ in range(10):
        # An operation takes a hundredth of a token's time on this machine: the prediction is too slow, but not far off.
        token_s = 1 / answered()["generation_tokens_per_second"]
        kept = StoredDevice(1e10, 1e-6, 1e9, {"F16": 1e10}, token_s / 100)
        write_speed_book(speeds_path(), EMPTY_BOOK.with_device(make_host("host", 1), kept))
        before = run_here(capsys, "plan", model, *options).document["speed"]["tokens_per_second"]
        rate = answered()["generation_tokens_per_second"]
        if read_speed_book(speeds_path()).answers and not rate / 2 < before < rate * 2:
            break
    (answer,) = read_speed_book(speeds_path()).answers
    assert answer.seconds == pytest.approx(1 / rate)
    after = run_here(capsys, "plan", model, *options).document["speed"]["tokens_per_second"]
    assert abs(after - rate) < abs(before - rate)
