"""Tooltips with text from elsewhere: Qt takes text for markup when it looks like it."""

from __future__ import annotations

from html import escape


def plain_tool_tip(text: str) -> str:
    """Return a tooltip that shows `text` literally, line breaks included; "" for an empty text."""
    # `<qt>` makes Qt take every text as rich text, so that none is guessed to be. Rich tooltips wrap long lines, too.
    return f"<qt>{escape(text).replace(chr(10), '<br>')}</qt>" if text else ""
