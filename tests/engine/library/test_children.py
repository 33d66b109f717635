"""The child that reads headers and makes forecasts: every request is answered, also after a crash."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import psutil
import pytest

from engine.base.cancellation import CancelToken
from engine.base.errors import LibraryError
from engine.devices.device import Rig, make_host
from engine.library.child_messages import plan_request, read_request
from engine.library.children import _folders, read_headers
from engine.library.facts import Facts, read_facts
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS
from tests.support.stores import DIES_OF_SOME_FILES, adapter_bytes, model_bytes, projector_bytes, put

_COUNTS = """
import engine.library.facts as facts
from engine.runtime.protocol.heartbeat import current_use
def counted(paths):
    use = current_use()
    return facts.Facts(name=str(use.resident_bytes > 0 and use.read_bytes > 0))
facts.read_facts = counted
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
    found = read([deadly[0], *wanted, deadly[1]], [sys.executable, "-c", DIES_OF_SOME_FILES])
    assert {paths[0]: found[paths[0]] for paths in wanted} == {paths[0]: read_facts(paths) for paths in wanted}
    for (path,) in deadly:
        assert found[path].error == "crashed the process that read it"
        assert found[path].fingerprint


def test_no_process_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match="cannot be started"):
        read(contents(tmp_path, 1), ["/no/such/program"])
    with pytest.raises(LibraryError, match="keep crashing"):
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has these counters")
def test_the_heartbeat_sees_what_is_read_after_rights_are_given_up(tmp_path: Path) -> None:
    """Otherwise a slow disk that gives bytes all the time would look stuck."""
    (wanted,) = read(contents(tmp_path, 1)[:1], [sys.executable, "-c", _COUNTS]).values()
    assert wanted.name == "True"


def test_parts_and_projectors_may_be_links_into_other_folders(tmp_path: Path) -> None:
    names = [f"a\udcff-0000{number}-of-00002.gguf" for number in (1, 2)]
    shown = tmp_path / "shown"
    for number, name in enumerate(names):
        blob = put(tmp_path / f"disk {number}" / f"blob{number}", model_bytes(part=(number, 2)))
        link = shown / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(f"../disk {number}/{blob.name}")
    projector = shown / "mmproj.gguf"
    projector.symlink_to(put(tmp_path / "disk 2" / "blob", projector_bytes()))
    request = plan_request([(shown / names[0], projector)], Rig((), make_host("host", 1)), "fewest", NO_CONSTRAINTS)
    assert _folders(request) == {shown, *(tmp_path / f"disk {number}" for number in range(3))}
    assert _folders(read_request([[shown / name for name in names]])) == {
        shown,
        tmp_path / "disk 0",
        tmp_path / "disk 1",
    }
