"""A document that follows streamed text: parsed in another thread, and updated at most every 50 ms."""

from __future__ import annotations

import time

from msgspec import Struct
from PySide6.QtCore import QObject, Signal
from shiboken6 import isValid

from widgets.common.delayed_call import DelayedCall
from widgets.markdown.stream import MarkdownStream, Parsed
from widgets.markdown.typesetter import Typesetter

DRAW_INTERVAL_MS = 50
PARSE_SHARE = 3
"""Duration of the pause after parsing, as a multiple of the duration of parsing. During the pause the parsing thread is
free for other texts.
"""
AT_ONCE_CHARACTERS = 1_500
"""Maximum length in characters of a text that is parsed at once in the GUI thread, before it is first painted."""


class _Answer(Struct, frozen=True):
    stream: MarkdownStream
    parsed: Parsed
    seconds: float


class LiveMarkdown(QObject):
    """Keeps a Markdown document up to date with a text that may be streamed. `text`: the source so far."""

    drawn = Signal()

    def __init__(self, typesetter: Typesetter, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._typesetter = typesetter
        self.document = typesetter.make_document(self)
        self._pieces: list[str] = []
        self._waiting: list[str] = []
        self._stream = MarkdownStream()
        self._is_parsing = False
        self._timer = DelayedCall(self, self._parse)
        typesetter.restyled.connect(self._restyle)

    @property
    def text(self) -> str:
        # Joined when somebody asks: joining for each piece of a stream would copy the whole text each time.
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def is_drawn(self) -> bool:
        """Whether the document shows the whole text."""
        return not self._waiting and not self._is_parsing

    def set_text(self, text: str) -> None:
        """Replace the text and the contents of the document."""
        # A new stream: results of the old one are recognised and dropped in `_on_parsed`.
        self._stream = MarkdownStream()
        self._is_parsing = False
        self._timer.stop()
        self._pieces, self._waiting = [text], [text]
        self.document.reset()
        if len(text) <= AT_ONCE_CHARACTERS:
            self._stream.append("".join(self._waiting))
            self._waiting = []
            self._draw(self._stream.parse())
        else:
            self._parse()

    def append(self, text: str) -> None:
        """Append a piece of streamed text."""
        self._pieces.append(text)
        self._waiting.append(text)
        if not self._is_parsing and not self._timer.isActive():
            self._timer.start(DRAW_INTERVAL_MS)

    def finish(self) -> None:
        """Parse the remaining text now, since no more text follows."""
        if self._waiting and not self._is_parsing:
            self._timer.stop()
            self._parse()

    def _parse(self) -> None:
        stream, text = self._stream, "".join(self._waiting)
        self._waiting = []
        self._is_parsing = True

        def work() -> _Answer:
            begun = time.perf_counter()
            stream.append(text)
            parsed = stream.parse()
            return _Answer(stream, parsed, time.perf_counter() - begun)

        self._typesetter.parse(work, self._on_parsed)

    def _on_parsed(self, answer: _Answer) -> None:
        if answer.stream is not self._stream or not isValid(self):
            return  # Another text was set meanwhile, or the message was deleted.
        self._is_parsing = False
        if self._waiting:
            # Long texts are parsed less often, so that the window stays responsive.
            self._timer.start(max(DRAW_INTERVAL_MS, round(answer.seconds * 1000 * PARSE_SHARE)))
        self._draw(answer.parsed)

    def _draw(self, parsed: Parsed) -> None:
        self.document.update_blocks(parsed.finished, parsed.open_end)
        self.drawn.emit()

    def _restyle(self) -> None:
        self.document.restyle(self._typesetter.styles)
