"""The journal of a server: for each request its client, model, tokens, times and status.

Entries contain no text of requests or answers. This text is in `RequestText`, which is kept in memory only, and only
while the user has enabled it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from msgspec import Struct

from engine.base.values import replace
from engine.runtime.session.events import Done

MAX_ENTRIES = 500
"""Largest number of ended requests in the journal; the oldest are removed."""
MAX_TEXTS = 50
"""Largest number of requests whose texts are kept, if the user has enabled that."""
MAX_TEXT = 1 << 16
"""Largest number of characters that are kept of a request's text, and of its answer's text."""


class RequestEntry(Struct, frozen=True):
    """One request in the journal.

    `number`: number of the request since the server began, from 1.
    `began_s`: time of the request in seconds since 1970.
    `client`: IP address of the client.
    `path`: path of the endpoint.
    `model`: id of the model; empty until it is known.
    `status`: HTTP status; 0 until the request has ended, 499 if the client closed the connection.
    `prompt_tokens`, `cached_tokens`: number of prompt tokens, and of those that were in the KV cache already.
    `answer_tokens`: number of generated tokens.
    `tokens_per_second`: speed of the last answer; None: not known.
    `first_token_s`, `duration_s`: seconds from the request to its first token and to its end; None: not known yet.
    `code`: error code; empty if there was no error.
    """

    number: int
    began_s: float
    client: str
    path: str
    model: str = ""
    status: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    tokens_per_second: float | None = None
    first_token_s: float | None = None
    duration_s: float | None = None
    code: str = ""

    @property
    def is_under_way(self) -> bool:
        return self.duration_s is None


class RequestText(Struct, frozen=True):
    """The text of a request and of its answer, each cut at `MAX_TEXT`.

    `asked`: the body as it was received.
    `answered`: all text that the model wrote.
    """

    asked: str = ""
    answered: str = ""


class Totals(Struct, frozen=True):
    """Numbers of requests and tokens, added up over all requests that have ended since the server began.

    `failed`: number of requests with an HTTP status of 400 or more, or whose stream ended with an error.
    `prompt_tokens`, `answer_tokens`: tokens of all prompts, and of all answers.
    `cached_tokens`: tokens of prompts that were in the KV cache already.
    """

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0


class Record:
    """Updates the journal's entry of one request until the request ends. Used in the server's thread only."""

    def __init__(self, journal: Journal, entry: RequestEntry) -> None:
        self._journal, self.entry, self._begun_s = journal, entry, time.monotonic()

    def name_model(self, model: str) -> None:
        """Record the id of the model that answers."""
        self.entry = replace(self.entry, model=model)
        self._journal.put(self.entry)

    def note_first_token(self) -> None:
        """Record the time of the first token. Later calls have no effect."""
        if self.entry.first_token_s is None:
            self.entry = replace(self.entry, first_token_s=time.monotonic() - self._begun_s)
            self._journal.put(self.entry)

    def note_done(self, done: Done, *, has_own_prompt: bool) -> None:
        """Add the token counts of one answer; a request may have several answers.

        `has_own_prompt`: whether to add the tokens of the prompt too; False if an earlier answer has the same prompt.
        """
        entry = self.entry
        self.entry = replace(
            entry,
            prompt_tokens=entry.prompt_tokens + done.prompt_tokens * has_own_prompt,
            cached_tokens=entry.cached_tokens + done.cached_tokens * has_own_prompt,
            answer_tokens=entry.answer_tokens + done.generated_tokens,
            tokens_per_second=done.generation_tokens_per_second or None,
        )

    def note_prompt(self, tokens: int) -> None:
        """Record the number of prompt tokens of a request that generates no text."""
        self.entry = replace(self.entry, prompt_tokens=tokens)

    def note_asked(self, body: bytes) -> None:
        """Store the first `MAX_TEXT` characters of the request's body, if the user has enabled that."""
        # A character has up to 4 bytes in UTF-8.
        self._journal.keep_text(self.entry.number, asked=body[: 4 * MAX_TEXT].decode(errors="replace")[:MAX_TEXT])

    def note_answered(self, text: str) -> None:
        """Append `text`, a piece of an answer, to the stored text of the request, if the user has enabled that."""
        self._journal.keep_text(self.entry.number, answered=text)

    def end(self, status: int, code: str = "") -> None:
        """Record that the request has ended, with its HTTP status and error code. Later calls have no effect."""
        if self.entry.is_under_way:
            duration_s = time.monotonic() - self._begun_s
            self.entry = replace(self.entry, status=status, code=code, duration_s=duration_s)
            self._journal.put(self.entry)


class Journal:
    """The requests of a server: those that are being answered, and the last `MAX_ENTRIES` that have ended.

    `changed`: called with each new state of an entry, in the server's thread.
    `keeps_texts`: whether to store the texts of requests that begin from now on. They are stored in memory only. May be
    set in any thread.
    """

    def __init__(self, changed: Callable[[RequestEntry], None] | None = None) -> None:
        self._changed = changed
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._under_way: dict[int, RequestEntry] = {}
        self._ended: deque[RequestEntry] = deque(maxlen=MAX_ENTRIES)
        self._totals = Totals()
        self._texts: OrderedDict[int, RequestText] = OrderedDict()
        self.keeps_texts = False

    def begin(self, client: str, path: str) -> Record:
        """Add a new request to the journal, and return its record."""
        entry = RequestEntry(next(self._numbers), time.time(), client, path)
        self.put(entry)
        return Record(self, entry)

    def put(self, entry: RequestEntry) -> None:
        """Replace the stored entry of a request by `entry`. If the request has ended, add it to the totals."""
        with self._lock:
            if entry.is_under_way:
                self._under_way[entry.number] = entry
            else:
                self._under_way.pop(entry.number, None)
                self._ended.append(entry)
                before = self._totals
                self._totals = Totals(
                    before.requests + 1,
                    before.failed + (entry.status >= 400 or bool(entry.code)),
                    before.prompt_tokens + entry.prompt_tokens,
                    before.cached_tokens + entry.cached_tokens,
                    before.answer_tokens + entry.answer_tokens,
                )
        if self._changed is not None:
            self._changed(entry)

    def keep_text(self, number: int, *, asked: str = "", answered: str = "") -> None:
        """Append to the stored text of request `number`; do nothing if `keeps_texts` is off.

        Only the last `MAX_TEXTS` requests keep their text.

        `asked`: more text of the request. `answered`: more text of its answer, which is cut at `MAX_TEXT` characters.
        """
        with self._lock:
            before = self._texts.get(number)
            # A request that came before texts were kept, or whose text was dropped, has no half of one.
            if not self.keeps_texts or (before is None and not asked):
                return
            before = before or RequestText()
            if len(before.answered) >= MAX_TEXT and not asked:
                return
            self._texts[number] = RequestText(before.asked + asked, (before.answered + answered)[:MAX_TEXT])
            while len(self._texts) > MAX_TEXTS:
                self._texts.popitem(last=False)

    def text_of(self, number: int) -> RequestText | None:
        """Return the stored texts of request `number` and of its answer; None if they were not stored. Thread-safe."""
        with self._lock:
            return self._texts.get(number)

    def forget_texts(self) -> None:
        """Stop storing the texts of requests, and delete those that were stored. Thread-safe."""
        with self._lock:
            self.keeps_texts = False
            self._texts.clear()

    @property
    def under_way(self) -> tuple[RequestEntry, ...]:
        """The requests that have not ended, oldest first. Thread-safe."""
        with self._lock:
            return tuple(self._under_way.values())

    @property
    def ended(self) -> tuple[RequestEntry, ...]:
        """The last `MAX_ENTRIES` requests that have ended, oldest first. Thread-safe."""
        with self._lock:
            return tuple(self._ended)

    @property
    def totals(self) -> Totals:
        """Numbers of requests and tokens, added up over all requests that have ended. Thread-safe."""
        with self._lock:
            return self._totals
