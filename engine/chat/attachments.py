"""Files that are attached to a question: text and code, the text of PDF files, images and sounds.

Images and sounds need a model with a multimodal projector for them. No file leaves this computer.
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
from engine.runtime.media.images.pictures import MAX_IMAGE_BYTES, ImageFacts, Picture, inspect_image, is_image
from engine.runtime.media.sounds.recordings import MAX_SOUND_BYTES, SoundFacts, inspect_sound, is_sound
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
    """An attachment with the bytes of its file.

    `thumbnail`: small version of an image; None for other files.
    """

    attachment: Attachment
    data: bytes
    thumbnail: Picture | None = None


def read_attachment(path: Path) -> ReadFile:
    """Return a file as an attachment. This takes up to a minute.

    Raises:
        ChatError: the file cannot be attached; the message names the file and a remedy.
    """
    try:
        # The largest limit of all kinds. One byte more shows that a file exceeds it.
        data = read_at_most(path, MAX_PDF_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        name = show(path.name, MAX_NAME_CHARACTERS)
        raise ChatError(tr("{name} cannot be attached ({reason}); check the path.", name=name, reason=reason)) from None
    return as_attachment(data, path.name)


def as_attachment(data: bytes, file_name: str) -> ReadFile:
    """Return the bytes of a file as an attachment called `file_name`. This takes up to a minute.

    Raises:
        ChatError: the file cannot be attached; the message names the file and a remedy.
    """
    name = show(file_name, MAX_NAME_CHARACTERS)
    if not data:
        raise ChatError(tr("{name} is empty; there is nothing to attach.", name=name))
    # By content and not by name: a file's ending may be wrong or missing.
    kind = _kind(data)
    if len(data) > _MOST_BYTES[kind]:
        raise ChatError(_too_large(kind, name))
    looked = inspect_image(data, name) if kind == "image" else None
    heard = inspect_sound(data, name) if kind == "audio" else None
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
            return tr("{name} is larger than {most} MiB; make the image smaller.", name=name, most=most)
        case "audio":
            return tr(
                "{name} is larger than {most} MiB; save the sound as MP3, or shorten the sound.", name=name, most=most
            )
    return tr("{name} is larger than {most} MiB; attach a part of the file.", name=name, most=most)


def _mime(kind: AttachmentKind, decoded: ImageFacts | SoundFacts | None, file_name: str) -> str:
    if decoded is not None:
        return decoded.mime
    return "application/pdf" if kind == "pdf" else mimetypes.guess_type(file_name)[0] or "text/plain"


def _text(data: bytes, name: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    # UTF-16 and most binary files contain zero bytes.
    if "\0" in text:
        raise ChatError(
            tr(
                "{name} is not UTF-8 text; attach text, code, a PDF file, an image, or sound as WAV, MP3 or FLAC.",
                name=name,
            )
        )
    return text


def _pdf_text(data: bytes, name: str) -> str:
    try:
        found = ask_decoder("pdf", ReadPdf(data=data, seconds=SECONDS), PdfText)
    except EngineError:
        found = PdfText(
            fault=tr(
                "the file could not be read, or reading took too much memory or more than {seconds:g} s",
                seconds=SECONDS,
            )
        )
    if found.fault:
        raise ChatError(tr("{name} cannot be attached: {fault}.", name=name, fault=found.fault))
    return found.text
