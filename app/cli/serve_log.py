"""Output of `serve` while it runs: sentences on standard error, or JSON events.

It contains no prompts and no answers.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import asdict

from app.cli.output import print_line, print_notice, print_stderr
from engine.api.server.journal import RequestEntry
from engine.api.server.server import ApiServer
from engine.api.wire.names import ModelEntry
from engine.base.errors import EngineError
from engine.base.texts import escape

MAX_LINES = 1000
"""Maximum number of lines that wait to be written; further lines are dropped and counted."""
CLOSE_S = 2.0
"""Maximum seconds to wait until the last lines are written, when the server ends."""


class ServeLog:
    """Writes lines in its own thread, so that answers do not wait for a program that reads the output too slowly."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._lines: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_LINES)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="serve-log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the waiting lines, within a limited time, and end the thread."""
        try:
            self._lines.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def serving(self, server: ApiServer) -> None:
        """Write the address of the server."""
        url = server.address.url
        self._put(
            {"event": "serving", "url": url, "port": server.address.port},
            f"layerdeck-cli: serving on {url} (OpenAI clients: {url}/v1). End it with Ctrl+C.",
        )

    def loaded(self, entry: ModelEntry) -> None:
        """Write that a model named on the command line was loaded."""
        self._put({"event": "loaded", "model": entry.id}, f"layerdeck-cli: loaded {entry.id}")

    def request(self, entry: RequestEntry) -> None:
        """Write how a request ended. Requests for /health and /metrics are not written."""
        if entry.is_under_way or entry.path in ("/health", "/metrics"):
            return
        speed = "" if entry.tokens_per_second is None else f", {entry.tokens_per_second:.1f} tokens/s"
        tokens = f" {entry.prompt_tokens}+{entry.answer_tokens} tokens{speed}" if entry.prompt_tokens else ""
        self._put(
            {"event": "request", **asdict(entry)},
            f"{entry.client} {entry.path} {entry.model} {entry.status}{tokens} {entry.duration_s or 0:.2f} s",
        )

    def _put(self, event: dict[str, object], sentence: str) -> None:
        def write() -> None:
            if self._as_json:
                print_line(json.dumps(event, ensure_ascii=False, separators=(",", ":")))
            else:
                # A client chooses path and model: a line break in them would begin a line that looks like ours.
                print_stderr(escape(sentence))

        try:
            self._lines.put_nowait(write)
        except queue.Full:
            self._dropped += 1

    def _run(self) -> None:
        while (write := self._lines.get()) is not None:
            try:
                write()
            except (OSError, EngineError):
                continue  # The reader has gone; the server goes on.
            if self._lines.empty():
                self._log_dropped()
        # The end may have been queued before the last line was written: the queue was not empty then.
        self._log_dropped()

    def _log_dropped(self) -> None:
        if self._dropped:
            with suppress(OSError, EngineError):
                print_notice(f"{self._dropped} lines were left out, because nobody read them.")
            self._dropped = 0
