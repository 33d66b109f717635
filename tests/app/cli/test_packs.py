"""`layerdeck-cli packs`: list, install, switch and remove, as text and as JSON."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.cli import exit_codes
from app.paths import pack_book_path, packs_path
from engine.base.engine_build import engine_version
from engine.devices.packs.signing import PackKeys
from engine.devices.packs.store import NO_PACKS, PACKS_VARIABLE, PackStore
from tests.support.command_line import Terminal, run_here
from tests.support.packs import IS_NO_BACKEND, compiled, no_packs, write_pack, write_signed_pack


@pytest.fixture(autouse=True)
def without_packs() -> Iterator[None]:
    with no_packs():
        yield


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    answer = run_here(capsys, "packs", *words)
    return answer.code, answer.out


def test_nothing_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys) == (
        exit_codes.OK,
        "No engine packs are installed. `layerdeck-cli packs install FILE` installs one.\n",
    )
    code, out = told(capsys, "list", "--json")
    assert (code, json.loads(out)) == (exit_codes.OK, {"version": 1, "engine": engine_version(), "packs": []})


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_pack_comes_is_switched_and_goes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    archive = write_pack(tmp_path / "tiny.tar.gz", "tiny", compiled(IS_NO_BACKEND, tmp_path))
    code, out = told(capsys, "install", str(archive), "--yes")
    assert (code, out) == (
        exit_codes.CRASHED,
        "tiny  Vulkan  Not used. Its library is not a backend for this engine.\n",
    )
    code, out = told(capsys, "off", "tiny", "--json")
    (pack,) = json.loads(out)["packs"]
    assert (code, pack["name"], pack["state"], pack["devices"]) == (exit_codes.OK, "tiny", "off", [])
    assert (pack["removable"], Path(pack["folder"])) == (True, packs_path() / "tiny")
    code, out = told(capsys, "check", "tiny")
    assert (code, "Turned off" in out) == (exit_codes.OK, True)
    assert told(capsys, "remove", "tiny")[0] == exit_codes.OK
    assert list(packs_path().iterdir()) == []


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_pack_that_came_by_itself_is_checked_before_devices_are_looked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = write_pack(tmp_path / "tiny.tar.gz", "tiny", compiled(IS_NO_BACKEND, tmp_path))
    PackStore(packs_path()).install(archive, engine_version())
    monkeypatch.setenv(PACKS_VARIABLE, NO_PACKS)
    assert "engine packs" not in run_here(capsys, "devices").err
    monkeypatch.setenv(PACKS_VARIABLE, str(pack_book_path()))
    first = run_here(capsys, "devices")
    assert first.code == exit_codes.OK
    assert first.err.splitlines() == [
        "Checking new engine packs: tiny",
        "tiny is not used. Its library is not a backend for this engine.",
    ]
    assert run_here(capsys, "devices").err == ""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["remove", "none"], "There is no engine pack none; there are: none."),
        (["on", "none"], "There is no engine pack none"),
        (["install", "none.tar.gz"], "none.tar.gz cannot be unpacked: No such file or directory."),
        (["install"], "required: FILE"),
        (["trust", "hello"], "hello is not the key of a publisher"),
        (["shine"], "invalid choice"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(capsys: pytest.CaptureFixture[str], words: list[str], sentence: str) -> None:
    answer = run_here(capsys, "packs", *words)
    assert answer.code == exit_codes.ARGUMENT
    assert sentence in answer.err.splitlines()[-1]


def test_installing_says_who_made_it_and_asks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = write_pack(tmp_path / "tiny.tar.gz", "tiny")
    answer = run_here(capsys, "packs", "install", archive)
    assert (answer.code, "Add --yes" in answer.err) == (exit_codes.ARGUMENT, True)
    assert "tiny.tar.gz: It is unsigned, so its publisher is unknown." in answer.err
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    answer = run_here(capsys, "packs", "install", archive)
    assert (answer.code, "Install it? [y/N]" in answer.err) == (exit_codes.INTERRUPTED, True)
    assert not (packs_path() / "tiny").exists()

    class Slow(Terminal):
        def isatty(self) -> bool:
            write_pack(archive, "tiny", b"another")
            return True

    monkeypatch.setattr("sys.stdin", Slow("y\n"))
    answer = run_here(capsys, "packs", "install", archive)
    assert (answer.code, "replaced by another pack" in answer.err) == (exit_codes.ARGUMENT, True)
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert run_here(capsys, "packs", "install", archive).code == exit_codes.CRASHED
    assert (packs_path() / "tiny").exists()


def test_a_trusted_publisher_is_not_asked_about(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    publisher = PackKeys(tmp_path / "key.pem", tmp_path / "ring.json")
    archive = write_signed_pack(tmp_path / "tiny.tar.gz", "tiny", publisher)
    assert "No keys" in told(capsys, "trust")[1]
    code, out = told(capsys, "trust", publisher.own(), "--name", "Ada")
    assert (code, out) == (exit_codes.OK, f"{publisher.own()}  Ada, trusted\n")
    answer = run_here(capsys, "packs", "install", archive)
    assert (answer.code, "signed by Ada, a publisher that you trust" in answer.err) == (exit_codes.CRASHED, True)
    code, out = told(capsys, "distrust", publisher.own(), "--json")
    assert json.loads(out) == {"version": 1, "own": None, "trusted": []}
