"""Messages of the children that use the network: downloads, tunnels, and the search for machines nearby."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from engine.runtime.protocol.messages import Failure, Hello, Message
from engine.runtime.protocol.requests import Quit, Request

DownloadStage = Literal["fetch", "wait", "verify"]


class TransferFile(Struct, frozen=True, kw_only=True):
    """A file to download.

    `target`: path at which the complete file is stored.
    `link`: path of a link to the file, as in the Hugging Face cache; None for no link.
    `size_bytes`, `sha256`, `etag`: size, hash and version tag that the hub reports; None if it does not.
    `commit`: commit of the repository, only to be shown.
    """

    url: str
    target: str
    size_bytes: int | None = None
    sha256: str | None = None
    etag: str | None = None
    commit: str = ""
    link: str | None = None


class Download(Request, frozen=True, tag="download", kw_only=True):
    """Download files one after another; answered by `DownloadProgress`s, then `Downloaded` or `Failure`.

    `refs`: path and text of small files to write at the end.
    `token`: access token of the hub; None for anonymous access.
    `restart`: whether to discard a partial file if the hub's file has changed since.
    `connections`: largest number of connections at the same time.
    `segment_bytes`: size of the segment that one connection fetches.
    `trial_s`: seconds after which one more connection is tried.
    `block_bytes`: bytes between two records of the progress on disk; a kill loses at most one block of each connection.
    `reserve_bytes`: disk space that stays free.
    `tries`: attempts in a row without progress before the download fails.
    `backoff_s`: wait before the second attempt, in seconds.
    `timeout_s`: time limit of connecting and of each read, in seconds.
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
    """Progress over all files, sent twice a second, also while the download waits.

    `size_bytes`: size of all files; None if the hub did not report it.
    `connections`: number of open connections.
    `note`: why the download waits; empty if it does not.
    """

    stage: DownloadStage
    done_bytes: int
    size_bytes: int | None
    file: str
    connections: int = 0
    note: str = ""


class DownloadedFile(Struct, frozen=True, kw_only=True):
    """A downloaded file. Its hash was verified if the hub reported one."""

    path: str
    size_bytes: int
    sha256: str


class Downloaded(Message, frozen=True, tag="downloaded", kw_only=True):
    """The download is complete. `fetched_bytes`: bytes that were received over the network in this run."""

    files: tuple[DownloadedFile, ...]
    fetched_bytes: int


class OpenTunnel(Request, frozen=True, tag="open_tunnel", kw_only=True):
    """Forward connections from a local port to a paired machine over TLS.

    Answered by `TunnelOpened` or `TunnelFailed`.

    The request may be repeated for further devices of the same machine.
    `endpoint`: `host:port` of the machine.
    `certificate`: pinned certificate of the machine, base64 of DER.
    `identity`: path of our own certificate and key.
    `port`: local port; 0: any free port.
    `device`: name of the device on that machine; empty for the only device of a machine with an older version.
    """

    endpoint: str
    certificate: str
    identity: str
    port: int = 0
    device: str = ""


class TunnelOpened(Message, frozen=True, tag="tunnel_opened", kw_only=True):
    """The tunnel accepts connections to `device` at this local port."""

    port: int
    device: str = ""


class TunnelFailed(Message, frozen=True, tag="tunnel_failed", kw_only=True):
    """Answer to `OpenTunnel`: there is no tunnel to `device`. `message`: the reason, as sentences for the user."""

    message: str
    device: str = ""


class Browse(Request, frozen=True, tag="browse", kw_only=True):
    """Search for machines that announce themselves (mDNS); answered by `NearbyMachines` whenever the list changes.

    `interfaces`: addresses of the network interfaces to use; empty for all.
    """

    interfaces: tuple[str, ...] = ()


class NearbyMachine(Struct, frozen=True):
    """A machine as it announces itself by mDNS.

    Texts are limited in length and numbers in size. Nothing is verified before pairing.
    """

    name: str
    endpoint: str
    device: str
    total_bytes: int
    fingerprint: str


class NearbyMachines(Message, frozen=True, tag="nearby_machines", kw_only=True):
    """All machines that announce themselves now."""

    machines: tuple[NearbyMachine, ...]


# A union for each child: anything else that arrives on its pipe is refused when it is decoded.
DownloadRequest = Download | Quit
DownloadMessage = DownloadProgress | Downloaded | Hello | Failure
TunnelRequest = OpenTunnel | Browse | Quit
TunnelMessage = TunnelOpened | TunnelFailed | NearbyMachines | Hello | Failure
