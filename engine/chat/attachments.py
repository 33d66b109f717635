"""Files that are attached to a question: text and code as they are, the text of PDF files, images for models that see,
sounds for those that hear.

None leaves this machine.
"""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from engine.base.errors import ChatError, EngineError
from engine.base.files import read_at_most
from engine.base.language import tr
from engine.base.texts import show
from engine.chat.message import Attachment, AttachmentKind, new_id
from engine.chat.pdf_reader import SECONDS, PdfText, ReadPdf
from engine.runtime.media.images.pictures import MAX_IMAGE_BYTES, Looked, Picture, is_image, look_at
from engine.runtime.media.sounds.recordings import MAX_SOUND_BYTES, Heard, is_sound, listen_to
from engine.runtime.process.decoders import ask_decoder

MAX_TEXT_BYTES = 2 << 20
MAX_PDF_BYTES = 64 << 20
MAX_NAME_CHARACTERS = 200
_MOST_BYTES: Mapping[AttachmentKind, int] = {
    "text": MAX_TEXT_BYTES,
    "pdf": MAX_PDF_BYTES,
    "image": MAX_IMAGE_BYTES,
    "audio": MAX_SOUND_BYTES,
}


class ReadFile(NamedTuple):
    """An attachment, its bytes, which are to be kept with it, and of an image a small picture to be shown."""

    attachment: Attachment
    data: bytes
    thumbnail: Picture | None = None


def read_attachment(path: Path) -> ReadFile:
    """Return a file as an attachment. Takes up to a minute.

    Raises:
        ChatError: one sentence that names the file, with what to do.
    """
    try:
        data = read_at_most(path, MAX_PDF_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        name = show(path.name, MAX_NAME_CHARACTERS)
        raise ChatError(tr("{name} cannot be attached ({reason}); check the path.", name=name, reason=reason)) from None
    return as_attachment(data, path.name)


def as_attachment(data: bytes, file_name: str) -> ReadFile:
    """Return the bytes of a file as an attachment; takes as long and raises as `read_attachment` does."""
    name = show(file_name, MAX_NAME_CHARACTERS)
    if not data:
        raise ChatError(tr("{name} is empty; there is nothing to attach.", name=name))
    kind = _kind(data)
    if len(data) > _MOST_BYTES[kind]:
        raise ChatError(_too_large(kind, name))
    looked = look_at(data, name) if kind == "image" else None
    heard = listen_to(data, name) if kind == "audio" else None
    attachment = Attachment(
        id=new_id(),
        kind=kind,
        name=name,
        mime=_mime(kind, looked or heard, file_name),
        sha256=hashlib.sha256(data).hexdigest(),
        size_bytes=len(data),
        text=_pdf_text(data, name) if kind == "pdf" else _text(data, name) if kind == "text" else "",
        width_px=0 if looked is None else looked.width_px,
        height_px=0 if looked is None else looked.height_px,
        length_ms=0 if heard is None else heard.length_ms,
    )
    return ReadFile(attachment, data, None if looked is None else looked.thumbnail)


def _kind(data: bytes) -> AttachmentKind:
    if data.startswith(b"%PDF-"):
        return "pdf"
    if is_image(data):
        return "image"
    return "audio" if is_sound(data) else "text"


def _too_large(kind: AttachmentKind, name: str) -> str:
    most = _MOST_BYTES[kind] >> 20
    match kind:
        case "image":
            return tr("{name} is larger than {most} MiB; make it smaller.", name=name, most=most)
        case "audio":
            return tr("{name} is larger than {most} MiB; save it as MP3, or cut it.", name=name, most=most)
    return tr("{name} is larger than {most} MiB; attach a part of it.", name=name, most=most)


def _mime(kind: AttachmentKind, decoded: Looked | Heard | None, file_name: str) -> str:
    if decoded is not None:
        return decoded.mime
    return "application/pdf" if kind == "pdf" else mimetypes.guess_type(file_name)[0] or "text/plain"


def _text(data: bytes, name: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ChatError(
            tr(
                "{name} is not text in UTF-8; attach text, code, a PDF file, an image, or sound as WAV, MP3 or FLAC.",
                name=name,
            )
        )
    return text


def _pdf_text(data: bytes, name: str) -> str:
    try:
        found = ask_decoder("pdf", ReadPdf(data=data, seconds=SECONDS), PdfText)
    except EngineError:
        found = PdfText(
            fault=tr("it broke its reader, or took longer than {seconds:g} s or too much memory", seconds=SECONDS)
        )
    if found.fault:
        raise ChatError(tr("{name} cannot be attached: {fault}.", name=name, fault=found.fault))
    return found.text
