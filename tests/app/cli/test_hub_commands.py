"""`search`, `fit` and `download`: documents, events, exit codes, and the continuation of an interrupted download."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.cli import hub
from engine.library.downloads.transfer import TransferEnd
from engine.runtime.protocol.network import Download, DownloadProgress
from tests.support.command_line import Terminal, run_cli, run_here, start_cli
from tests.support.hub_server import Fault, HubServer, Repo, hub_server, sha256
from tests.support.models import write_tiny_llama
from tests.support.transfers import KIB, some_bytes

RIG = {
    "version": 1,
    "devices": [{"id": "CUDA0", "name": "RTX 3090", "backend": "CUDA", "total_bytes": "24GiB", "free_bytes": "23GiB"}],
    "host": {"name": "host", "total_bytes": "64GiB", "free_bytes": "50GiB"},
}
BIG = some_bytes(400 * KIB)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder = tmp_path_factory.mktemp("models")
    files = {
        f"tiny-{kind}.gguf": write_tiny_llama(folder / f"tiny-{kind}.gguf", file_type=kind).read_bytes()
        for kind in ("F16", "Q8_0")
    }
    seeing = {**files, "mmproj-F16.gguf": bytes(64 * KIB)}
    repos = Repo("org/tiny", dict(files)), Repo("org/seeing", seeing), Repo("org/big", {"big-Q8_0.gguf": BIG})
    with hub_server(*repos) as found:
        yield found


@pytest.fixture(autouse=True)
def environment(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.faults.clear()
    server.sent.clear()
    monkeypatch.setenv("HF_ENDPOINT", server.url)


def test_search(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = run_here(capsys, "search", "tiny", "--json").document["models"]
    assert (found["repo"], found["architecture"], found["gated"]) == ("org/tiny", "llama", False)
    assert "org/tiny" in run_here(capsys, "search", "tiny").out
    assert run_here(capsys, "search", "nothing of that name").code == 0


def test_progress_is_one_line_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    command = hub._Command(Download(files=()), as_json=False)
    command._show(DownloadProgress(stage="verify", done_bytes=KIB, size_bytes=2 * KIB, file="m.gguf"))
    command._show_end(TransferEnd(kind="unreachable", message="The hub does not answer."))
    clear = "\r\x1b[K"
    shown = f"{clear}m.gguf: 1.0 KiB of 2.0 KiB checked{clear}layerdeck-cli: The hub does not answer.\n"
    assert terminal.getvalue() == shown


def test_an_interrupt_before_the_download_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_rest: object, **_named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "list_repo", interrupted)
    answer = run_here(capsys, "download", "org/tiny", "--json")
    assert (answer.code, answer.events) == (130, [{"event": "cancelled", "stage": "fetch"}])
    assert run_here(capsys, "download", "org/tiny").code == 130


def test_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rig = tmp_path / "rig.json"
    rig.write_text(json.dumps(RIG))
    answer = run_here(capsys, "fit", "org/tiny", "--rig", rig, "--json")
    document = answer.document
    assert (answer.code, document["best"], document["n_layer"]) == (0, "tiny-Q8_0", 8)
    assert [(row["quantisation"], row["verdict"], row["grade"]) for row in document["quantisations"]] == [
        ("Q8_0", "cards", "header"), ("F16", "cards", "estimated"),
    ]  # fmt: skip
    layout = tmp_path / "layout.json"
    layout.write_text(json.dumps(document["quantisations"][0]["layout"]))
    text = run_here(capsys, "fit", "org/tiny:F16", "--rig", rig)
    assert "* Q8_0" in text.out
    assert document["why"] in text.out


def test_fit_counts_the_projector_unless_only_text_is_wanted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rig = tmp_path / "rig.json"
    rig.write_text(json.dumps(RIG))
    counted, text_only = (
        run_here(capsys, "fit", "org/seeing", "--rig", rig, "--json", *words).document["quantisations"][0]
        for words in ((), ("--text-only",))
    )
    assert (counted["projector"], text_only["projector"]) == ("mmproj-F16.gguf", None)
    assert counted["need_bytes"] == text_only["need_bytes"] + 64 * KIB
    assert "Projectors are counted; --text-only" in run_here(capsys, "fit", "org/seeing", "--rig", rig).out
    words = ("fit", "org/seeing", "--rig", rig, "--text-only")
    assert "Its projectors are not counted" in run_here(capsys, *words).out


def test_download_and_the_same_call_again(
    capsys: pytest.CaptureFixture[str], server: HubServer, tmp_path: Path
) -> None:
    server.faults.append(Fault("cut", 100 * KIB))
    for fetched in (len(BIG), 0):
        answer = run_here(capsys, "download", "org/big:q8_0", "--to", tmp_path, "--json")
        *progress, last = map(json.loads, answer.out.splitlines())
        assert answer.code == 0
        assert all(event["event"] == "progress" for event in progress)
        assert last == {
            "event": "downloaded", "paths": [str(tmp_path / "big-Q8_0.gguf")], "bytes": len(BIG),
            "sha256": [sha256(BIG)], "fetched_bytes": fetched,
        }  # fmt: skip
    assert (tmp_path / "big-Q8_0.gguf").read_bytes() == BIG


def test_an_interrupt_keeps_what_is_here(server: HubServer, tmp_path: Path) -> None:
    server.faults.append(Fault("stall", 256 * KIB))
    with start_cli("download", "org/big", "--to", tmp_path, "--json") as command:
        while (event := command.event()) is not None and event.get("done_bytes") != 256 * KIB:
            pass
        os.kill(command.process.pid, signal.SIGINT)
        assert (command.finish(), command.events[-1]["event"]) == (130, "cancelled")
    server.sent.clear()
    assert run_cli("download", "org/big", "--to", tmp_path).code == 0
    assert server.bytes_sent("big-Q8_0.gguf") == len(BIG) - 256 * KIB


@pytest.mark.parametrize(
    ("words", "code", "kind"),
    [
        (["download", "org/none", "--json"], 2, "argument"),
        (["download", "org/tiny:Q5_K_M", "--json"], 2, "argument"),
        (["download", "../../etc/passwd", "--json"], 2, "argument"),
        (["fit", "org/big", "--json"], 4, "model_file"),
    ],
)
def test_errors_before_anything_begins(
    capsys: pytest.CaptureFixture[str], words: list[str], code: int, kind: str
) -> None:
    answer = run_here(capsys, *words)
    assert (answer.code, answer.error["kind"]) == (code, kind)


@pytest.mark.parametrize("name", ["HF_HUB_CACHE", "HF_HOME"])
@pytest.mark.parametrize("value", ["~nobody-of-this-name/x", "/" + "a" * 5000])
def test_a_cache_that_cannot_be_is_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv(name, value)
    answer = run_here(capsys, "download", "org/big", "--json")
    assert answer.code == 2
    assert "internal" not in answer.out + answer.err
    assert run_here(capsys, "search", "tiny").code == 0


def test_failures_are_events(capsys: pytest.CaptureFixture[str], server: HubServer, tmp_path: Path) -> None:
    answer = run_here(capsys, "download", "org/big", "--to", tmp_path, "--reserve", "900TiB", "--json")
    last = json.loads(answer.out.splitlines()[-1])
    assert (answer.code, last["event"], last["kind"]) == (2, "failed", "storage")
    server.faults.append(Fault("corrupt"))
    answer = run_here(capsys, "download", "org/big", "--to", tmp_path, "--json")
    assert (answer.code, json.loads(answer.out.splitlines()[-1])["kind"]) == (4, "model_file")
    server.faults.append(Fault("busy", wait_s=0))
    assert run_here(capsys, "search", "x", "--json").error["kind"] == "unreachable"


def test_help_needs_no_hub() -> None:
    answer = run_cli("download", "--help")
    assert (answer.code, "--restart" in answer.out) == (0, True)
