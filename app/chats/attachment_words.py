"""How large an attached file is, in the words of its kind."""

from __future__ import annotations

from engine.chats.message import Attachment
from engine.units import format_bytes


def attachment_size(attachment: Attachment) -> str:
    """Return the sides of an image, the length of a sound, the bytes of any other file."""
    match attachment.kind:
        case "image":
            return f"{attachment.width_px} × {attachment.height_px}"
        case "audio":
            return length_words(attachment.length_ms)
    return format_bytes(attachment.size_bytes)


def length_words(length_ms: int) -> str:
    """Return minutes and seconds as clocks of players have them; what is there is a second at least."""
    minutes, seconds = divmod(max(1, round(length_ms / 1000)), 60)
    return f"{minutes}:{seconds:02}"
