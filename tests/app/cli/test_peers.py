"""`rig serve --secure`, `rig pair` and `rig peers`: a machine paired with itself, and a load through the tunnel."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.paths import pairings_path
from tests.support.command_line import RunningCommand, all_gone, run_here, start_cli
from tests.support.models import write_tiny_llama
from tests.support.ports import free_port

CODE = re.compile(r"Pairing code: (\w{4}(?:-\w{4}){3})")


@pytest.fixture(autouse=True)
def nobody_paired() -> Iterator[None]:
    pairings_path().unlink(missing_ok=True)
    yield
    pairings_path().unlink(missing_ok=True)


def said(command: RunningCommand, pattern: re.Pattern[str]) -> re.Match[str]:
    """Wait for a line on standard error that matches."""
    while line := command.error_line():
        if match := pattern.search(line):
            return match
    raise AssertionError(f"standard error ended without {pattern.pattern}: {command.err}")


def test_a_load_through_the_tunnel_from_the_first_code_to_the_last_pairing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    port = free_port()
    endpoint = f"127.0.0.1:{port}"
    words = ("rig", "serve", "--secure", "--announce", "--port", str(port), "--name", "attic", "--keep", "0")
    with start_cli(*words) as server:
        announced = said(server, re.compile("The worker is announced (.*)")).group(1)
        assert announced.startswith("on this computer only, because 127.0.0.1 cannot be reached from elsewhere.")
        assert "--host" in announced
        code = said(server, CODE).group(1)
        wrong = run_here(capsys, "rig", "pair", endpoint, "AAAA-AAAA-AAAA-AAAA", "--json")
        assert (wrong.code, wrong.error["kind"]) == (2, "argument")
        assert wrong.error["message"].startswith(f"{endpoint} did not accept the code")

        paired = run_here(capsys, "rig", "pair", endpoint, code, "--name", "laptop", "--json")
        assert paired.code == 0, paired.err
        fingerprint = paired.document["fingerprint"]
        assert (paired.document["role"], paired.document["name"]) == ("server", "attic")
        said(server, re.compile(r"Paired with laptop \("))
        peers = run_here(capsys, "rig", "peers", "--json").document
        assert {each["role"] for each in peers["peers"]} == {"client", "server"}
        assert peers["fingerprint"] == fingerprint

        rig = tmp_path / "rig.json"
        rig.write_text(run_here(capsys, "devices", "--peer", "attic").out, encoding="utf-8")
        assert f'"fingerprint": "{fingerprint}"' in rig.read_text(encoding="utf-8")
        loaded = run_here(capsys, "load", path, "--rig", rig, "--ctx", "256", "--prompt", "x", "-n", "4", "--json")
        assert loaded.code == 0, loaded.out
        rows = {row["id"]: row for row in next(each for each in loaded.events if each["event"] == "loaded")["devices"]}
        assert rows["attic-CPU"]["weights_bytes"] > 0

        assert run_here(capsys, "rig", "peers", "--forget", "attic").code == 0
        refused = run_here(capsys, "load", path, "--rig", rig, "--ctx", "256", "--json")
        assert refused.code == 6
        assert "not paired with this computer" in refused.error["message"]
        children = server.children()
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 0
        assert all_gone(children)


def test_what_belongs_to_the_tunnel_needs_it(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("--pair",), ("--announce",), ("--name", "attic")):
        answer = run_here(capsys, "rig", "serve", "--port", "1", *words, "--json")
        assert (answer.code, answer.error["kind"]) == (2, "argument")
        assert "need --secure" in answer.error["message"]


def test_what_cannot_be_paired_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for endpoint, code, words in (
        ("attic", "K7QM-3XHD-9RWP-T2FV", "is not an endpoint"),
        (f"127.0.0.1:{free_port()}", "K7QM", "A pairing code has 16"),
    ):
        answer = run_here(capsys, "rig", "pair", endpoint, code, "--json")
        assert (answer.code, answer.error["kind"]) == (2, "argument")
        assert words in answer.error["message"]
    nobody = run_here(capsys, "rig", "pair", f"127.0.0.1:{free_port()}", "K7QM-3XHD-9RWP-T2FV", "--json")
    assert (nobody.code, nobody.error["kind"]) == (6, "unreachable")
    unknown = run_here(capsys, "devices", "--peer", "garden", "--json")
    assert (unknown.code, unknown.error["kind"]) == (2, "argument")
    assert "No computer is paired under" in unknown.error["message"]


def test_a_port_in_use_is_told_before_a_worker_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        answer = run_here(capsys, "rig", "serve", "--secure", "--port", str(port), "--json")
    assert answer.code != 0
    assert f"Cannot listen on 127.0.0.1:{port}" in answer.error["message"]


@pytest.mark.parametrize(
    ("secure", "words"),
    [
        (("--secure",), "--host 198.51.100.7: no interface of this computer has this address; it has "),
        ((), "Cannot listen on 198.51.100.7:50999: "),
    ],
)
def test_an_address_that_is_not_of_this_machine_cannot_be_listened_on(
    capsys: pytest.CaptureFixture[str], secure: tuple[str, ...], words: str
) -> None:
    answer = run_here(capsys, "rig", "serve", "--host", "198.51.100.7", "--port", "50999", *secure, "--json")
    assert answer.code != 0
    assert words in answer.error["message"]


def test_a_rig_file_with_a_machine_that_is_not_paired_is_told_at_the_load(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = write_tiny_llama(tmp_path / "m.gguf", n_layers=2)
    lent = {
        "id": "attic-CUDA0",
        "name": "attic: a card",
        "backend": "RPC",
        "endpoint": "127.0.0.1:1/CUDA0",
        "fingerprint": "ab" * 32,
        "total_bytes": "1GiB",
    }
    rig, layout = tmp_path / "rig.json", tmp_path / "layout.json"
    rig.write_text(json.dumps({"version": 1, "devices": [lent], "host": {"total_bytes": "8GiB"}}))
    runs = [{"device": "attic-CUDA0", "layers": "0-1"}]
    document = {"version": 1, "model": {"name": "m", "layers": 2}, "split_mode": "layer", "runs": runs}
    layout.write_text(json.dumps(document))
    answer = run_here(capsys, "load", str(model), "--rig", str(rig), "--layout", str(layout), "--json")
    assert answer.code != 0
    assert "attic-CUDA0" in answer.error["message"]
    assert "not paired with this computer" in answer.error["message"]
