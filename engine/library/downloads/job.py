"""A download: its entry in the queue file (`Job`) and its state for the window (`JobView`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from msgspec import Struct

from engine.base.files import require_hugging_face_cache
from engine.library.downloads.placing import from_web, in_cache, in_folder
from engine.library.hub.addresses import WebAddress
from engine.library.hub.listing import HubFile, Quantisation, RepoListing
from engine.library.hub.settings import HubSettings
from engine.runtime.protocol.network import DownloadStage, TransferFile

QUEUE_VERSION = 1


class JobState(StrEnum):
    """State of a download.

    WAITING: queued. RUNNING: in progress. DONE: complete.
    PAUSED: paused by the user, or after a temporary failure (then the job has a `reason`).
    CHANGED: the file on the server has changed; the user has to restart the download.
    FAILED: stopped by an error for which a retry may be pointless.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    CHANGED = "changed"
    FAILED = "failed"
    DONE = "done"


class JobView(Struct, frozen=True):
    """State of a download for the window. The fields from `stage` to `left_s` are set only while it runs.

    `size_bytes`: size of all files, None if the server did not state it.
    `kind`, `reason`: kind and sentence of the error that ended the download, else empty.
    `note`: reason why a running download waits, else empty.
    `left_s`: estimated seconds left, None if the rate is not steady.
    `paths`: paths of the complete files.
    `retry_s`: seconds until a paused download is retried automatically, None if no retry is scheduled.
    """

    id: str
    title: str
    state: JobState
    done_bytes: int
    size_bytes: int | None
    kind: str = ""
    reason: str = ""
    stage: DownloadStage | None = None
    note: str = ""
    rate_bytes_per_second: float | None = None
    left_s: float | None = None
    paths: tuple[str, ...] = ()
    retry_s: float | None = None


class Job(Struct, frozen=True, kw_only=True):
    """A download of all parts of a model and its projector, as stored in the queue file.

    `refs`: (path, text) of small files to write into the Hugging Face cache: each is named after a branch or tag, and
    its text is the commit to which that points.
    `endpoint`: address of the hub, empty for any other server.
    `kind`: name of the error in `reason`, as listed in `docs/contract.md`; empty for none.
    `paths`: paths of the files after the download is complete.
    `restart`: whether to discard the bytes of a file that has changed on the server.
    """

    id: str
    title: str
    files: tuple[TransferFile, ...]
    refs: tuple[tuple[str, str], ...] = ()
    endpoint: str = ""
    repo: str = ""
    quantisation: str = ""
    state: JobState = JobState.WAITING
    kind: str = ""
    reason: str = ""
    done_bytes: int = 0
    paths: tuple[str, ...] = ()
    restart: bool = False

    @property
    def size_bytes(self) -> int | None:
        """Size of all files in bytes; None if the size of one is unknown."""
        sizes = [file.size_bytes for file in self.files]
        return None if None in sizes else sum(size or 0 for size in sizes)


class QueueFile(Struct, frozen=True, kw_only=True):
    """The file that stores the download queue between two runs of the program, as JSON."""

    version: int = QUEUE_VERSION
    jobs: tuple[Job, ...] = ()


def files_of(listing: RepoListing, quantisation: Quantisation) -> tuple[HubFile, ...]:
    """Return the files to download for a quantisation: all its parts, and its projector if the repository has one."""
    projector = listing.projector_of(quantisation)
    return (*quantisation.files, *([projector] if projector else []))


def hub_job(
    job_id: str, listing: RepoListing, quantisation: Quantisation, hub: HubSettings, folder: Path | None = None
) -> Job:
    """Return a job that downloads a quantisation into `folder`, or into the Hugging Face cache if `folder` is None.

    `job_id`: id for the new job.

    Raises:
        ArgumentError: if a file name is not safe.
    """
    files = files_of(listing, quantisation)
    transfers, refs = _placed(listing, files, hub, folder)
    return Job(
        id=job_id,
        title=f"{listing.repo}:{quantisation.label}",
        files=transfers,
        refs=refs,
        endpoint=hub.endpoint,
        repo=listing.repo,
        quantisation=quantisation.label,
    )


def web_job(job_id: str, address: WebAddress, folder: Path) -> Job:
    """Return a job that downloads a file from any server into `folder`.

    `job_id`: id for the new job.

    Raises:
        ArgumentError: if the file name is not safe.
    """
    return Job(id=job_id, title=address.name, files=(from_web(address, folder),))


def _placed(
    listing: RepoListing, files: Sequence[HubFile], hub: HubSettings, folder: Path | None
) -> tuple[tuple[TransferFile, ...], tuple[tuple[str, str], ...]]:
    if folder is None:
        return in_cache(listing, files, hub, require_hugging_face_cache(os.environ))
    return in_folder(listing, files, hub, folder), ()
