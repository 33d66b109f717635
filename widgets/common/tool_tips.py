"""Tooltips with text from elsewhere: Qt takes text for markup when it looks like it."""

from __future__ import annotations

from html import escape


def plain_tool_tip(text: str) -> str:
    """Return what shows `text` as it is, line breaks included; empty stays empty."""
    return f"<qt>{escape(text).replace(chr(10), '<br>')}</qt>" if text else ""
