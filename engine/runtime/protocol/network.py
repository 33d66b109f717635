"""Messages between us and the children that use the network: downloads, tunnels, and the search for other machines."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.runtime.protocol.messages import Failure, Hello, Message, Quit, Request

DownloadStage = Literal["fetch", "wait", "verify"]


class TransferFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file to fetch: `target` is where it ends up, whole; `link` a path that is to lead there, where others look.

    `size_bytes`, `sha256` and `etag` are what the hub says of it, None where nobody does. `commit` is for people.
    """

    url: str
    target: str
    size_bytes: int | None = None
    sha256: str | None = None
    etag: str | None = None
    commit: str = ""
    link: str | None = None


class Download(Request, frozen=True, tag="download", kw_only=True):
    """Fetch files, one after another: `DownloadProgress`... and then `Downloaded` or `Failure`.

    `refs`: small files (path, text) to write at the end. `restart`: what was begun of a file that has changed since is
    thrown away. At most `connections` at a time, each with `segment_bytes`, and one more is tried after `trial_s`.
    `block_bytes`: what a kill may cost. `reserve_bytes` of the disk stay free. `tries` in a row without progress, the
    second after about `backoff_s`.
    """

    files: tuple[TransferFile, ...]
    refs: tuple[tuple[str, str], ...] = ()
    token: str | None = None
    restart: bool = False
    connections: int = 4
    segment_bytes: int = 256 << 20
    block_bytes: int = 8 << 20
    trial_s: float = 3.0
    reserve_bytes: int = 1 << 30
    tries: int = 5
    backoff_s: float = 1.0
    timeout_s: float = 30.0


class DownloadProgress(Message, frozen=True, tag="download_progress", kw_only=True):
    """How much of all files is here; sent twice a second, also while it waits. `size_bytes` None: nobody said.

    `note`: why it waits. `connections`: how many are open.
    """

    stage: DownloadStage
    done_bytes: int
    size_bytes: int | None
    file: str
    connections: int = 0
    note: str = ""


class DownloadedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is here, checked where its hash was known."""

    path: str
    size_bytes: int
    sha256: str


class Downloaded(Message, frozen=True, tag="downloaded", kw_only=True):
    """All files are here. `fetched_bytes`: how much of them came over the network this time."""

    files: tuple[DownloadedFile, ...]
    fetched_bytes: int


class OpenTunnel(Request, frozen=True, tag="open_tunnel", kw_only=True):
    """Listen here and pass on what comes to the machine at `endpoint`; answered by `TunnelOpened` or `Failure`.

    `certificate`: base64 of DER, of that machine; `identity`: the file of our own. `port`: 0 for any.
    """

    endpoint: str
    certificate: str
    identity: str
    port: int = 0


class TunnelOpened(Message, frozen=True, tag="tunnel_opened", kw_only=True):
    port: int


class Browse(Request, frozen=True, tag="browse", kw_only=True):
    """Look for machines that announce themselves; answered by a `NearbyMachines` whenever there are others.

    `interfaces`: addresses of this machine to look on; none: all.
    """

    interfaces: tuple[str, ...] = ()


class NearbyMachine(msgspec.Struct, frozen=True):
    """What a machine says of itself, within bounds; nothing of it is sure before it is paired."""

    name: str
    endpoint: str
    device: str
    total_bytes: int
    fingerprint: str


class NearbyMachines(Message, frozen=True, tag="nearby_machines", kw_only=True):
    machines: tuple[NearbyMachine, ...]


DownloadRequest = Download | Quit
DownloadMessage = DownloadProgress | Downloaded | Hello | Failure
TunnelRequest = OpenTunnel | Browse | Quit
TunnelMessage = TunnelOpened | NearbyMachines | Hello | Failure
