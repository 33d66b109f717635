"""The commands `search` and `download`, and the Hugging Face hub that the environment selects."""

from __future__ import annotations

import queue
import sys
import time
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from app.cli import exit_codes
from app.cli.entry import on_interrupt
from app.cli.follow import INTERRUPT_POLL_S
from app.cli.output import check_text, print_compact, print_document, print_line, print_notice, print_stderr
from engine.base.errors import ArgumentError
from engine.base.units import format_bytes, format_duration
from engine.base.values import replace
from engine.library.downloads.connections import RateMeter
from engine.library.downloads.job import Job, hub_job, web_job
from engine.library.downloads.transfer import Transfer, TransferEnd
from engine.library.hub.addresses import HubAddress, WebAddress, parse_address
from engine.library.hub.client import list_repo, search_models
from engine.library.hub.listing import HubModel, SearchQuery
from engine.library.hub.settings import HubSettings, hub_settings
from engine.library.hub.tokens import TokenStore
from engine.runtime.protocol.network import Download, DownloadProgress


def run_search(options: Namespace) -> int:
    """Print the GGUF repositories of the hub that match the words of the command; return the exit code."""
    for text, what in ((options.author, "The author"), *((tag, "A tag") for tag in options.tag)):
        check_text(text or "", what)
    hub = find_hub()
    query = SearchQuery(
        text=" ".join(options.text),
        author=options.author or "",
        tags=tuple(options.tag),
        order=options.sort,
        limit=options.limit,
    )
    found = search_models(query, hub.settings, hub.token)
    if options.json:
        print_document({"models": [_document(model) for model in found]})
    else:
        print_line("\n".join(map(_model_line, found)) or "Nothing was found; try fewer words.")
    return exit_codes.OK


def _document(model: HubModel) -> dict[str, object]:
    return {
        "repo": model.repo,
        "downloads": model.downloads,
        "likes": model.likes,
        "updated": model.updated or None,
        "gated": model.gated,
        "task": model.task or None,
        "licence": model.licence or None,
        "architecture": model.architecture or None,
        "n_ctx_train": model.n_ctx_train,
        "n_parameters": model.n_parameters,
        "tags": list(model.tags),
    }


def _model_line(model: HubModel) -> str:
    facts = [f"{model.downloads:,} downloads", f"{model.likes:,} likes"]
    if model.n_parameters:
        facts.append(f"{model.n_parameters / 1e9:.3g} billion weights")
    facts += [text for text in (model.architecture, model.licence, model.updated) if text]
    if model.gated:
        facts.append("gated")
    return f"{model.repo}\n    {', '.join(facts)}"


_JOB = "command"
# Seconds to wait for the child to end after a stop.
_END_S = 10.0


def run_download(options: Namespace) -> int:
    """Download a model with its projector, print events, and return the exit code."""
    hub = find_hub()
    try:
        job = _job_of(options, hub)
    except KeyboardInterrupt:
        # The child, which handles interrupts, has not started yet: the signal raises.
        if options.json:
            _print(event="cancelled", stage="fetch")
        return exit_codes.INTERRUPTED
    # The token is for the hub only: no other server gets it.
    token = hub.token if job.endpoint else None
    download = Download(files=job.files, refs=job.refs, token=token, restart=options.restart)
    if options.reserve is not None:
        download = replace(download, reserve_bytes=options.reserve)
    return _Command(download, as_json=options.json).run()


def _job_of(options: Namespace, hub: Hub) -> Job:
    address = parse_address(options.address, hub.settings.endpoint)
    folder = None if options.to is None else options.to.absolute()
    if isinstance(address, WebAddress):
        hub.settings.require_online()
        return web_job(_JOB, address, folder or Path.cwd())
    listing = list_repo(address.repo, hub.settings, hub.token, revision=address.revision)
    quantisation = listing.find(address.quantisation, address.path)
    return hub_job(_JOB, listing, quantisation, hub.settings, folder)


class _Command:
    """Runs the download of the command `download`, and prints its progress until it has ended.

    An interrupt stops the download. The bytes fetched so far stay on the disk, and a later download resumes from them.
    """

    def __init__(self, download: Download, *, as_json: bool) -> None:
        self._as_json = as_json
        self._news: queue.SimpleQueue[DownloadProgress | TransferEnd] = queue.SimpleQueue()
        self._transfer = Transfer(download, self._news.put, self._news.put)
        self._rate = RateMeter()
        self._stage = "fetch"
        self._interrupted = False
        self._on_terminal = sys.stderr.isatty()

    def run(self) -> int:
        """Run the download, and return the exit code. All child processes have ended when the call returns."""
        with on_interrupt(self._interrupt):
            self._transfer.start()
            try:
                end = self._follow()
            finally:
                self._transfer.stop()
                self._transfer.wait(_END_S)
        return self._show_end(end)

    def _interrupt(self) -> None:
        self._interrupted = True

    def _follow(self) -> TransferEnd:
        stopping = False
        while True:
            if self._interrupted and not stopping:
                stopping = True
                self._transfer.stop()
            with suppress(queue.Empty):
                news = self._news.get(timeout=INTERRUPT_POLL_S)
                if isinstance(news, TransferEnd):
                    return news
                self._show(news)

    def _show(self, progress: DownloadProgress) -> None:
        if progress.stage != self._stage:
            # Fetching and verifying have different speeds.
            self._rate.clear()
            self._stage = progress.stage
        self._rate.add(time.monotonic(), progress.done_bytes)
        size_bytes = progress.size_bytes
        rate = self._rate.bytes_per_second
        left_s = None if size_bytes is None else self._rate.left_s(size_bytes - progress.done_bytes)
        if self._as_json:
            _print(
                event="progress",
                stage=progress.stage,
                fraction=None if not size_bytes else min(1.0, progress.done_bytes / size_bytes),
                done_bytes=progress.done_bytes,
                size_bytes=size_bytes,
                bytes_per_second=None if rate is None else round(rate),
                left_seconds=None if left_s is None else round(left_s),
                file=progress.file,
                connections=progress.connections,
                note=progress.note or None,
            )
        elif self._on_terminal:
            print_stderr(_progress_line(progress, rate, left_s), end="", over=True)
        elif progress.note:
            print_stderr(progress.note)

    def _show_end(self, end: TransferEnd) -> int:
        if self._on_terminal and not self._as_json:
            print_stderr("", end="", over=True)
        # A download that was complete before the interrupt took effect is a success.
        if self._interrupted and not end.succeeded:
            end = TransferEnd(kind="cancelled", message=end.message)
        if self._as_json:
            self._print_end(end)
        elif end.succeeded:
            print_line("\n".join(file.path for file in end.files))
        else:
            print_notice(end.message)
        return exit_codes.OK if end.succeeded else exit_codes.exit_code(end.kind)

    def _print_end(self, end: TransferEnd) -> None:
        if end.succeeded:
            _print(
                event="downloaded",
                paths=[file.path for file in end.files],
                bytes=sum(file.size_bytes for file in end.files),
                sha256=[file.sha256 for file in end.files],
                fetched_bytes=end.fetched_bytes,
            )
        elif end.kind == "cancelled":
            _print(event="cancelled", stage=self._stage)
        else:
            _print(event="failed", kind=end.kind, message=end.message)


def _print(**event: object) -> None:
    print_compact(event)


def _progress_line(progress: DownloadProgress, rate: float | None, left_s: float | None) -> str:
    of = "" if progress.size_bytes is None else f" of {format_bytes(progress.size_bytes)}"
    text = f"{progress.file}: {format_bytes(progress.done_bytes)}{of}"
    if progress.stage == "verify":
        return f"{text} checked"
    if progress.note:
        return f"{text}, waiting: {progress.note}"
    if rate is not None:
        text += f", {format_bytes(round(rate))}/s"
    return text if left_s is None else f"{text}, {format_duration(left_s)} left"


class Hub(Struct, frozen=True):
    """The settings of the hub, and its access token, which is None if the user has set none."""

    settings: HubSettings
    token: str | None


def find_hub() -> Hub:
    """Return the hub that the environment selects; raises `ArgumentError` if its address is not valid."""
    settings = hub_settings()
    return Hub(settings, TokenStore().find(settings))


def repo_of(text: str, hub: Hub) -> HubAddress:
    """Return the repository of the hub that `text` names; raises `ArgumentError` if it does not name one."""
    address = parse_address(text, hub.settings.endpoint)
    if not isinstance(address, HubAddress):
        raise ArgumentError(f"{address} is not a repository of the hub; write owner/name.")
    return address
