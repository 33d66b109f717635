"""The requests of a server: who asked which model, and how it went; never a word of what was said."""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.runtime.session.events import Done

MAX_ENTRIES = 500
"""Ended requests that are remembered."""
MAX_TEXTS = 50
"""Requests whose texts are kept, if any are."""
MAX_TEXT = 1 << 16
"""Characters of a request, and of its answer, that are kept."""


@dataclass(frozen=True, slots=True)
class RequestEntry:
    """One request.

    `began_s`: seconds since 1970. `client`: address of the caller. `status`: of HTTP; 0 while it is under way, and 499
    if the client went away. `first_token_s`, `duration_s`: since it came; None while unknown.
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


@dataclass(frozen=True, slots=True)
class RequestText:
    """What was said, cut at `MAX_TEXT`. `asked`: the body as it came. `answered`: all that the model wrote."""

    asked: str = ""
    answered: str = ""


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums since the server began, for metrics."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0


class Record:
    """One request that is under way; for the thread of the server."""

    def __init__(self, journal: Journal, entry: RequestEntry) -> None:
        self._journal, self.entry, self._begun_s = journal, entry, time.monotonic()

    def name_model(self, model: str) -> None:
        """Note which model answers."""
        self.entry = replace(self.entry, model=model)
        self._journal.put(self.entry)

    def note_first_token(self) -> None:
        """Note that the answer begins."""
        if self.entry.first_token_s is None:
            self.entry = replace(self.entry, first_token_s=time.monotonic() - self._begun_s)
            self._journal.put(self.entry)

    def note_done(self, done: Done, *, has_own_prompt: bool) -> None:
        """Note the tokens of an answer; there may be several. `has_own_prompt`: its prompt was not counted yet."""
        entry = self.entry
        self.entry = replace(
            entry,
            prompt_tokens=entry.prompt_tokens + done.prompt_tokens * has_own_prompt,
            cached_tokens=entry.cached_tokens + done.cached_tokens * has_own_prompt,
            answer_tokens=entry.answer_tokens + done.generated_tokens,
            tokens_per_second=done.generation_tokens_per_second or None,
        )

    def note_prompt(self, tokens: int) -> None:
        """Note the tokens of a request that generates none."""
        self.entry = replace(self.entry, prompt_tokens=tokens)

    def note_asked(self, body: bytes) -> None:
        """Keep the beginning of a request, if the journal keeps texts."""
        self._journal.keep_text(self.entry.number, asked=body[:MAX_TEXT].decode(errors="replace"))

    def note_answered(self, text: str) -> None:
        """Keep a piece of an answer, if the journal keeps texts."""
        self._journal.keep_text(self.entry.number, answered=text)

    def end(self, status: int, code: str = "") -> None:
        """Note how it ended; the first call counts."""
        if self.entry.is_under_way:
            duration_s = time.monotonic() - self._begun_s
            self.entry = replace(self.entry, status=status, code=code, duration_s=duration_s)
            self._journal.put(self.entry)


class Journal:
    """All of them. `changed` is called with each entry that is another one, in the server's thread.

    `keeps_texts`: whether the texts of requests that come from now on are kept, in memory only; for any thread.
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
        """Return the record of a request that has come."""
        entry = RequestEntry(next(self._numbers), time.time(), client, path)
        self.put(entry)
        return Record(self, entry)

    def put(self, entry: RequestEntry) -> None:
        """Take a new state of a request."""
        with self._lock:
            if entry.is_under_way:
                self._under_way[entry.number] = entry
            else:
                self._under_way.pop(entry.number, None)
                self._ended.append(entry)
                before = self._totals
                self._totals = Totals(
                    before.requests + 1,
                    before.failed + (entry.status >= 400),
                    before.prompt_tokens + entry.prompt_tokens,
                    before.cached_tokens + entry.cached_tokens,
                    before.answer_tokens + entry.answer_tokens,
                )
        if self._changed is not None:
            self._changed(entry)

    def keep_text(self, number: int, *, asked: str = "", answered: str = "") -> None:
        """Add to the text of a request, up to `MAX_TEXT` each; those of the last `MAX_TEXTS` requests are kept."""
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
        """Return the text of a request, None if it was not kept; for any thread."""
        with self._lock:
            return self._texts.get(number)

    def forget_texts(self) -> None:
        """Keep no more texts, and drop those that were kept; for any thread."""
        with self._lock:
            self.keeps_texts = False
            self._texts.clear()

    @property
    def under_way(self) -> tuple[RequestEntry, ...]:
        """Requests that have not ended, the oldest first; for any thread."""
        with self._lock:
            return tuple(self._under_way.values())

    @property
    def ended(self) -> tuple[RequestEntry, ...]:
        """The last that have ended, the oldest first; for any thread."""
        with self._lock:
            return tuple(self._ended)

    @property
    def totals(self) -> Totals:
        """Sums over all that have ended; for any thread."""
        with self._lock:
            return self._totals
