"""The rights of a download's child: its own folders and the network, nothing else of the user."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.base.landlock import landlock_version
from engine.library.downloads.job import hub_job
from engine.library.downloads.part_file import StorageError
from engine.library.downloads.rights import writable_folders
from engine.library.hub.client import list_repo
from engine.library.hub.settings import HubSettings
from tests.support.hub_server import HubServer, Repo, hub_server
from tests.support.transfers import KIB, Running, download_of, hub_file, some_bytes

DATA = some_bytes(100 * KIB)
needs_landlock = pytest.mark.skipif(not landlock_version(), reason="this system has no Landlock")

CHILD = """
import sys, threading
from pathlib import Path
import msgspec
from engine.library.downloads.file_transfer import carry_out
from engine.library.downloads.rights import give_up_rights
from engine.runtime.protocol.network import Download, Downloaded

order, other = msgspec.json.decode(sys.argv[1], type=Download), Path(sys.argv[2])
assert give_up_rights(order)
new = other.with_name("new")
for act in (other.read_text, other.unlink, new.touch, lambda: list(Path.home().iterdir())):
    try:
        act()
    except PermissionError:
        continue
    raise AssertionError(act)
done = carry_out(order, lambda _message: None, threading.Event())
assert isinstance(done, Downloaded), done
print("done")
"""


@pytest.fixture
def server() -> Iterator[HubServer]:
    with hub_server(Repo("org/m", {"Q8_0/m-Q8_0.gguf": DATA, "m.gguf": DATA})) as found:
        yield found


@needs_landlock
@pytest.mark.parametrize("begun", [False, True])
def test_a_confined_download_fills_the_cache_and_reaches_nothing_else(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, begun: bool
) -> None:
    home, cache, other = tmp_path / "home", tmp_path / "home" / "cache", tmp_path / "others" / "diary"
    for folder in (home, other.parent):
        folder.mkdir()
    other.write_text("mine")
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    hub = HubSettings(server.url)
    listing = list_repo("org/m", hub)
    job = hub_job("1", listing, listing.find("Q8_0"), hub)
    repo = cache / "models--org--m"
    if begun:
        # Folders of the cache may be links to another disk.
        (tmp_path / "disk").mkdir()
        repo.mkdir(parents=True)
        (repo / "blobs").symlink_to(tmp_path / "disk")
    download = download_of(*job.files, refs=job.refs)
    child = subprocess.run(
        [sys.executable, "-P", "-c", CHILD, msgspec.json.encode(download).decode(), str(other)],
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[4])},
        check=False,
    )
    assert child.stdout == "done\n", child.stderr
    assert (repo / "snapshots" / listing.commit / "Q8_0/m-Q8_0.gguf").read_bytes() == DATA
    assert (repo / "refs" / "main").read_text() == listing.commit
    assert other.read_text() == "mine"


@needs_landlock
def test_the_child_is_confined(server: HubServer, tmp_path: Path) -> None:
    seen: list[str] = []

    def look(_answered: int) -> None:
        server.at_bytes = None
        seen.append(Path(f"/proc/{running.transfer.pid}/status").read_text())

    server.at_bytes = look
    running = Running(download_of(hub_file(server, "org/m", "m.gguf", tmp_path)))
    assert running.end().succeeded
    assert "NoNewPrivs:\t1" in seen[0]


def test_a_folder_that_cannot_be_made_is_an_error_of_storage(tmp_path: Path, server: HubServer) -> None:
    (tmp_path / "file").write_text("")
    download = download_of(hub_file(server, "org/m", "m.gguf", tmp_path / "file" / "folder"))
    with pytest.raises(StorageError):
        list(writable_folders(download))
    end = Running(download).end()
    assert (end.kind, end.succeeded) == ("storage", False)
