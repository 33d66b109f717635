"""Downloads from hostile servers: only a file with the right hash is put in place; otherwise there is an error."""

from __future__ import annotations

from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from threading import Barrier
from urllib.parse import urlsplit

import pytest
from msgspec.structs import replace

from engine.library.downloads.transfer import TransferEnd
from engine.runtime.protocol.messages import Message
from engine.runtime.protocol.network import DownloadProgress, TransferFile
from tests.support.hub_server import XET_PATH, Asked, Fault, HubServer, Repo, hub_server, sha256
from tests.support.patience import DEADLINE_S
from tests.support.transfers import KIB, Running, download_of, fetch, hub_file, some_bytes

DATA = some_bytes(400 * KIB)
OTHER = some_bytes(400 * KIB, seed=1)


@pytest.fixture
def server() -> Iterator[HubServer]:
    with hub_server(
        Repo("org/m", {"m.gguf": DATA, "p.gguf": OTHER}), Repo("org/g", {"m.gguf": DATA}, gated=True)
    ) as it:
        it.plain["m.gguf"] = DATA
        yield it


def _is_placed(end: TransferEnd, folder: Path, data: bytes = DATA) -> bool:
    assert end.succeeded, end
    assert [file.sha256 for file in end.files] == [sha256(data)]
    return (folder / "m.gguf").read_bytes() == data and [path.name for path in folder.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize(
    "faults",
    [
        [Fault("cut", 100 * KIB), Fault("cut", 0), Fault("cut", 7)],
        [Fault("busy", wait_s=0), Fault("broken"), Fault("expired"), Fault("range_refused")],
        [Fault("cut", 150 * KIB), Fault("no_ranges")],
        [Fault("cut", 150 * KIB), Fault("no_length")],
        [Fault("web_page"), Fault("short"), Fault("cut", 5), Fault("long")],
    ],
)
@pytest.mark.parametrize("connections", [1, 3])
def test_what_passes_is_tried_again(server: HubServer, tmp_path: Path, faults: list[Fault], connections: int) -> None:
    server.faults.extend(faults)
    end = fetch(download_of(hub_file(server, "org/m", "m.gguf", tmp_path), connections=connections, tries=9))
    assert _is_placed(end, tmp_path)
    assert len(server.faults) < len(faults)


def test_several_connections_fetch_each_byte_once(server: HubServer, tmp_path: Path) -> None:
    end = fetch(download_of(hub_file(server, "org/m", "m.gguf", tmp_path), connections=3))
    assert _is_placed(end, tmp_path)
    assert end.fetched_bytes == len(DATA) == server.bytes_sent("m.gguf")
    assert len(server.sent) == 4, "segments of 128 KiB"


def test_a_file_that_lies_in_pieces_comes_over_http(server: HubServer, tmp_path: Path) -> None:
    file = hub_file(server, "org/m", "m.gguf", tmp_path)
    connection = HTTPConnection(urlsplit(server.url).netloc)
    connection.request("HEAD", urlsplit(file.url).path)
    said = connection.getresponse().headers
    connection.close()
    assert said["X-Xet-Hash"] == sha256(DATA)
    assert 'rel="xet-auth"' in said["Link"]
    server.faults.append(Fault("cut", 100 * KIB))
    assert _is_placed(fetch(download_of(file)), tmp_path)
    assert not any(asked.path.startswith(XET_PATH) for asked in server.asked)


def test_a_line_that_says_nothing_is_left(server: HubServer, tmp_path: Path) -> None:
    server.faults.append(Fault("stall", 100 * KIB))
    assert _is_placed(fetch(download_of(hub_file(server, "org/m", "m.gguf", tmp_path), timeout_s=0.5)), tmp_path)


def test_a_drip_ends_by_itself(server: HubServer, tmp_path: Path) -> None:
    server.faults.extend([Fault("drip", 100 * KIB), Fault("drip"), Fault("drip")])
    end = fetch(download_of(hub_file(server, "org/m", "m.gguf", tmp_path), timeout_s=0.5, tries=2))
    assert (end.kind, end.message) == (
        "unreachable", f"{server.url[7:]} does not answer; check the network, or try again later.",
    )  # fmt: skip


def test_after_five_tries_it_is_left_with_what_is_here(server: HubServer, tmp_path: Path) -> None:
    server.faults.append(Fault("cut", 200 * KIB))
    server.faults.extend([Fault("broken")] * 5)
    file = hub_file(server, "org/m", "m.gguf", tmp_path)
    told: list[Message] = []
    end = fetch(download_of(file), told)
    assert (end.kind, "503" in end.message) == ("unreachable", True)
    assert len(server.faults) == 1, "five tries without progress"
    assert any(isinstance(each, DownloadProgress) and each.stage == "wait" and each.note for each in told)
    server.faults.clear()
    server.sent.clear()
    assert _is_placed(fetch(download_of(file)), tmp_path)
    assert server.bytes_sent("m.gguf") == 200 * KIB


def test_an_outage_of_several_connections_is_one_try(server: HubServer, tmp_path: Path) -> None:
    connections, refused = Barrier(3), iter(range(6))

    class AskedTogether(list[Asked]):
        def append(self, asked: Asked) -> None:
            super().append(asked)
            # All three connections have begun before the first one fails.
            if next(refused, None) is not None:
                connections.wait(DEADLINE_S)

    server.asked = AskedTogether()
    server.faults.extend([Fault("broken")] * 6)
    end = fetch(download_of(hub_file(server, "org/m", "m.gguf", tmp_path), connections=3, tries=3))
    assert _is_placed(end, tmp_path)


def test_a_damaged_byte_is_found_and_the_file_thrown_away(server: HubServer, tmp_path: Path) -> None:
    server.faults.append(Fault("corrupt"))
    file = hub_file(server, "org/m", "m.gguf", tmp_path)
    end = fetch(download_of(file))
    assert (end.kind, "SHA-256" in end.message) == ("model_file", True)
    assert list(tmp_path.iterdir()) == []
    assert _is_placed(fetch(download_of(file)), tmp_path)


def test_a_damaged_byte_of_what_was_here_before_is_found(server: HubServer, tmp_path: Path) -> None:
    server.faults.extend([Fault("cut", 200 * KIB), *[Fault("broken")] * 5])
    file = hub_file(server, "org/m", "m.gguf", tmp_path)
    fetch(download_of(file))
    server.faults.clear()
    with (tmp_path / "m.gguf.part").open("r+b") as part:
        part.seek(1000)
        part.write(b"\0\1")
    assert fetch(download_of(file)).kind == "model_file"


def test_a_file_that_changed_asks(server: HubServer, tmp_path: Path) -> None:
    server.faults.extend([Fault("cut", 200 * KIB), *[Fault("broken")] * 5])
    fetch(download_of(hub_file(server, "org/m", "m.gguf", tmp_path)))
    server.faults.clear()
    server.repos["org/m"].files["m.gguf"] = OTHER
    file = hub_file(server, "org/m", "m.gguf", tmp_path)
    end = fetch(download_of(file))
    assert (end.kind, "start the download over" in end.message) == ("changed", True)
    assert (tmp_path / "m.gguf.part").stat().st_size == 200 * KIB
    assert _is_placed(fetch(download_of(file, restart=True)), tmp_path, OTHER)


def test_a_file_of_unknown_hash_that_changed_begins_anew_on_request(server: HubServer, tmp_path: Path) -> None:
    url = TransferFile(url=f"{server.url}/plain/m.gguf", target=str(tmp_path / "m.gguf"))
    server.faults.extend([Fault("cut", 200 * KIB), *[Fault("broken")] * 5])
    fetch(download_of(url))
    server.faults.clear()
    assert fetch(download_of(url, restart=True, reserve_bytes=1 << 60)).kind == "storage"
    assert (tmp_path / "m.gguf.part").stat().st_size == 200 * KIB, "an unchanged file goes on"
    server.plain["m.gguf"], server.plain_etag = OTHER, '"second"'
    assert fetch(download_of(url)).kind == "changed"
    assert _is_placed(fetch(download_of(url, restart=True)), tmp_path, OTHER)


def test_a_file_that_changes_under_its_transfer_asks(server: HubServer, tmp_path: Path) -> None:
    url = TransferFile(url=f"{server.url}/plain/m.gguf", target=str(tmp_path / "m.gguf"))
    server.faults.append(Fault("cut", 100 * KIB))

    def change(sent: int) -> None:
        if sent >= 90 * KIB:
            server.plain["m.gguf"], server.plain_etag = OTHER, '"second"'

    server.at_bytes = change
    assert fetch(download_of(url)).kind == "changed"


@pytest.mark.parametrize("faults", [[], [Fault("no_length")], [Fault("no_ranges"), Fault("cut", 0)], [Fault("cut", 9)]])
def test_a_file_of_which_nothing_is_known(server: HubServer, tmp_path: Path, faults: list[Fault]) -> None:
    server.faults.extend(faults)
    url = TransferFile(url=f"{server.url}/plain/m.gguf", target=str(tmp_path / "m.gguf"))
    assert _is_placed(fetch(download_of(url)), tmp_path)


def test_a_page_to_sign_in_is_no_model(server: HubServer, tmp_path: Path) -> None:
    server.faults.append(Fault("web_page"))
    end = fetch(download_of(TransferFile(url=f"{server.url}/plain/m.gguf", target=str(tmp_path / "m.gguf"))))
    assert (end.kind, "web page" in end.message) == ("model_file", True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", ["http://192.0.2.1/m.gguf", "file:///etc/hostname"])
def test_redirects_to_anything_but_https_end_it(server: HubServer, tmp_path: Path, target: str) -> None:
    server.faults.append(Fault("redirect", target=target))
    end = fetch(download_of(hub_file(server, "org/m", "m.gguf", tmp_path)))
    assert (end.kind, "https" in end.message) == ("unreachable", True)


def test_a_gated_file_needs_a_token(server: HubServer, tmp_path: Path) -> None:
    file = hub_file(server, "org/g", "m.gguf", tmp_path)
    end = fetch(download_of(file))
    assert (end.kind, "token" in end.message) == ("argument", True)
    assert _is_placed(fetch(download_of(file, token="hf_right")), tmp_path)
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"hf_right" in path.read_bytes() for path in kept)


def test_a_full_disk_keeps_what_is_here(server: HubServer, tmp_path: Path) -> None:
    file = hub_file(server, "org/m", "m.gguf", tmp_path)
    later = replace(hub_file(server, "org/m", "p.gguf", tmp_path), size_bytes=1 << 60)
    for download in (download_of(file, reserve_bytes=1 << 60), download_of(file, later)):
        end = fetch(download)
        assert (end.kind, "Free some space" in end.message) == ("storage", True)
    assert server.sent == [], "neither one file nor a part of several was begun"
    assert _is_placed(fetch(download_of(file)), tmp_path)


def test_what_is_there_already_is_checked_and_not_fetched(server: HubServer, tmp_path: Path) -> None:
    file = hub_file(server, "org/m", "m.gguf", tmp_path)
    (tmp_path / "m.gguf").write_bytes(DATA)
    end = fetch(download_of(file))
    assert (_is_placed(end, tmp_path), end.fetched_bytes, server.sent) == (True, 0, [])
    (tmp_path / "m.gguf").write_bytes(OTHER)
    assert fetch(download_of(file)).kind == "argument"
    assert (tmp_path / "m.gguf").read_bytes() == OTHER


@pytest.mark.parametrize("there", [DATA, OTHER[:-1], None])
def test_a_file_of_unknown_size_is_compared_with_what_is_there(
    server: HubServer, tmp_path: Path, there: bytes | None
) -> None:
    target = tmp_path / "m.gguf"
    if there is None:
        target.mkdir()
    else:
        target.write_bytes(there)
    end = fetch(download_of(TransferFile(url=f"{server.url}/plain/m.gguf", target=str(target))))
    assert (end.kind, end.fetched_bytes) == ("" if there == DATA else "argument", 0)
    assert server.bytes_sent("m.gguf") <= 1
    assert there is None or target.read_bytes() == there


def test_the_end_of_the_parent_and_a_stop_end_the_child(server: HubServer, tmp_path: Path) -> None:
    file = hub_file(server, "org/m", "m.gguf", tmp_path)
    server.faults.append(Fault("stall", 100 * KIB))
    running = Running(download_of(file), lambda progress: running.transfer.stop() if progress.done_bytes else None)
    assert running.end().kind == "cancelled"
    server.sent.clear()
    assert _is_placed(fetch(download_of(file)), tmp_path)
    assert server.bytes_sent("m.gguf") == 300 * KIB, "what was here when it was stopped stayed"
