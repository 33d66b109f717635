"""The child that reads headers and makes forecasts: all that is asked is answered, whatever a file does to it."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import psutil
import pytest

from engine.base.cancellation import CancelToken
from engine.base.errors import LibraryError
from engine.library.children import read_headers
from engine.library.facts import Facts, read_facts
from tests.support.stores import adapter_bytes, model_bytes, projector_bytes, put

_DIES = """
import os
import engine.library.facts as facts
read = facts.read_facts
facts.read_facts = lambda paths: os._exit(3) if "deadly" in paths[0].name else read(paths)
from engine.library.children import main
main()
"""
_WAITS = "import sys; sys.stdin.buffer.read()"


def contents(folder: Path, n_each: int) -> list[tuple[Path, ...]]:
    every = [model_bytes(), projector_bytes(), adapter_bytes(), b"x"] * n_each
    return [(put(folder / f"{number:03d}.gguf", content),) for number, content in enumerate(every)]


def read(wanted: list[tuple[Path, ...]], argv: list[str] | None = None) -> dict[Path, Facts]:
    found: dict[Path, Facts] = {}
    read_headers(wanted, lambda paths, facts: found.__setitem__(paths[0], facts), CancelToken(), argv=argv)
    return found


def test_a_child_reads_what_this_process_would(tmp_path: Path) -> None:
    wanted = contents(tmp_path, 30)
    wanted.append((put(tmp_path / "no\udcfftext.gguf", model_bytes()),))
    assert read(wanted) == {paths[0]: read_facts(paths) for paths in wanted}


def test_nothing_to_read_starts_nothing() -> None:
    assert read([], ["/no/such/program"]) == {}


def test_files_that_break_the_child_are_found_and_told(tmp_path: Path) -> None:
    wanted = contents(tmp_path, 1)
    deadly = [(put(tmp_path / name, model_bytes()),) for name in ("deadly-1.gguf", "deadly-2.gguf")]
    found = read([deadly[0], *wanted, deadly[1]], [sys.executable, "-c", _DIES])
    assert {paths[0]: found[paths[0]] for paths in wanted} == {paths[0]: read_facts(paths) for paths in wanted}
    for (path,) in deadly:
        assert found[path].error == "broke the process that read it"
        assert found[path].fingerprint


def test_no_process_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match="No process can be started"):
        read(contents(tmp_path, 1), ["/no/such/program"])
    with pytest.raises(LibraryError, match="end before their time"):
        read(contents(tmp_path, 20), [sys.executable, "-S", "-c", ""])


def test_who_waits_no_more_gets_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    token, found = CancelToken(), list[Facts]()
    before = {child.pid for child in psutil.Process().children()}
    wanted, argv = contents(tmp_path, 1), [sys.executable, "-c", _WAITS]
    thread = threading.Thread(
        target=lambda: read_headers(wanted, lambda _paths, facts: found.append(facts), token, argv=argv)
    )
    thread.start()
    token.cancel()
    thread.join(60)
    assert not thread.is_alive()
    assert found == []
    assert {child.pid for child in psutil.Process().children()} <= before
