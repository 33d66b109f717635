"""Texts that end an answer: what may be the beginning of one is held back until it is clear."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Passes text on up to the first of some texts. `found`: one has come, and what follows is dropped."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """Take more of the answer; return what of it can be told."""
        if not self._texts:
            return text
        if self.found:
            return ""
        text = self._held + text
        places = [place for place in map(text.find, self._texts) if place >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        held = max(_overlap(text, stop) for stop in self._texts)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """Return what was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that `stop` begins with, less than all of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
