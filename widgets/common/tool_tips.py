"""Tooltips with text from files or servers: Qt would render text that looks like markup."""

from __future__ import annotations

from html import escape


def plain_tool_tip(text: str) -> str:
    """Return a tooltip that shows `text` literally, with its line breaks; empty for an empty text."""
    # `<qt>` makes Qt take every text as rich text, so that none is guessed to be. Rich tooltips wrap long lines, too.
    return f"<qt>{escape(text).replace(chr(10), '<br>')}</qt>" if text else ""
