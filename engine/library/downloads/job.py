"""A download: as the queue keeps it in its file, and as it is shown."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from engine.base.files import hugging_face_cache
from engine.library.downloads.placing import from_web, in_cache, in_folder
from engine.library.hub.addresses import WebAddress
from engine.library.hub.listing import HubFile, Quantisation, RepoListing
from engine.library.hub.settings import HubSettings
from engine.runtime.protocol.network import DownloadStage, TransferFile

QUEUE_VERSION = 1


class JobState(StrEnum):
    """waiting for its turn; running; paused by somebody, or after a fault that passes (`reason`); changed: the file is
    another one now, and somebody has to say whether to begin anew; failed: trying again may make no sense; done."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    CHANGED = "changed"
    FAILED = "failed"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class JobView:
    """A job now. `stage`, `file`, `connections`, `note` (why it waits) and the rate are those of a running one.

    `retry_s`: in how many seconds a paused job is tried again by itself, None: it is not.
    `left_s` is None while the rate is not steady; `size_bytes` None where nobody said.
    """

    id: str
    title: str
    state: JobState
    done_bytes: int
    size_bytes: int | None
    kind: str = ""
    reason: str = ""
    stage: DownloadStage | None = None
    file: str = ""
    connections: int = 0
    note: str = ""
    rate_bytes_per_second: float | None = None
    left_s: float | None = None
    paths: tuple[str, ...] = ()
    retry_s: float | None = None


def time_words(seconds: float) -> str:
    """Return how long something takes, for people: "2 h 5 min", "3 min 20 s", "8 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """All parts of a model, and its projector. `endpoint`: the hub it comes from, "" for any other server.

    `kind` is the contract's word for the fault that `reason` is about, "" for none; `paths` are the files once they are
    here. `restart`: what was begun of a file that has changed is to be thrown away.
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
        """What all files take, None where nobody said."""
        sizes = [file.size_bytes for file in self.files]
        return None if None in sizes else sum(size or 0 for size in sizes)


class QueueFile(msgspec.Struct, frozen=True, kw_only=True):
    """The queue between two runs."""

    version: int = QUEUE_VERSION
    jobs: tuple[Job, ...] = ()


def files_of(listing: RepoListing, quantisation: Quantisation, *, projector: bool = True) -> tuple[HubFile, ...]:
    """Return what belongs together: all parts, and the projector where there is one and it is wanted."""
    beside = listing.projector_of(quantisation) if projector else None
    return (*quantisation.files, *([beside] if beside else []))


def hub_job(
    job_id: str, listing: RepoListing, quantisation: Quantisation, hub: HubSettings, folder: Path | None = None
) -> Job:
    """Return the job of a quantisation with all that belongs to it; without a folder it goes into the cache.

    Raises:
        ArgumentError: for names that are not safe.
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
    """Return the job of a file of any server; raises as `hub_job`."""
    return Job(id=job_id, title=address.name, files=(from_web(address, folder),))


def _placed(
    listing: RepoListing, files: Sequence[HubFile], hub: HubSettings, folder: Path | None
) -> tuple[tuple[TransferFile, ...], tuple[tuple[str, str], ...]]:
    if folder is None:
        return in_cache(listing, files, hub, hugging_face_cache(os.environ))
    return in_folder(listing, files, hub, folder), ()
