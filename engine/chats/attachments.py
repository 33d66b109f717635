"""Files that are attached to a question: text and code as they are, the text of PDF files. None leaves this machine."""

from __future__ import annotations

import hashlib
import mimetypes
import subprocess
from pathlib import Path

import msgspec

from engine.chats.message import Attachment, new_id
from engine.chats.pdf_reader import SECONDS, PdfText
from engine.errors import ChatError
from engine.files import read_at_most
from engine.json_file import UNREADABLE
from engine.language import tr
from engine.programs import child_argv
from engine.texts import show

MAX_TEXT_BYTES = 2 << 20
MAX_PDF_BYTES = 64 << 20
MAX_NAME_CHARACTERS = 200
GRACE_SECONDS = 5.0
"""The child's own alarm rings first; where it could not, it is killed this much later."""


def read_attachment(path: Path) -> tuple[Attachment, bytes]:
    """Return a file as an attachment, and its bytes, which are to be kept with it. Takes up to half a minute.

    Raises:
        ChatError: one sentence that names the file, with what to do.
    """
    name = show(path.name, MAX_NAME_CHARACTERS)
    try:
        data = read_at_most(path, MAX_PDF_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ChatError(tr("{name} cannot be attached ({reason}); check the path.", name=name, reason=reason)) from None
    if not data:
        raise ChatError(tr("{name} is empty; there is nothing to attach.", name=name))
    is_pdf = data.startswith(b"%PDF-")
    most_bytes = MAX_PDF_BYTES if is_pdf else MAX_TEXT_BYTES
    if len(data) > most_bytes:
        raise ChatError(tr("{name} is larger than {most} MiB; attach a part of it.", name=name, most=most_bytes >> 20))
    attachment = Attachment(
        id=new_id(),
        kind="pdf" if is_pdf else "text",
        name=name,
        mime="application/pdf" if is_pdf else mimetypes.guess_type(path.name)[0] or "text/plain",
        sha256=hashlib.sha256(data).hexdigest(),
        size_bytes=len(data),
        text=_pdf_text(data, name) if is_pdf else _text(data, name),
    )
    return attachment, data


def _text(data: bytes, name: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ChatError(tr("{name} is not text in UTF-8; attach text, code or a PDF file.", name=name))
    return text


def _pdf_text(data: bytes, name: str) -> str:
    try:
        done = subprocess.run(
            child_argv("pdf"),
            input=data,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS + GRACE_SECONDS,
            check=False,
        )
        found = msgspec.json.decode(done.stdout, type=PdfText)
    except (OSError, subprocess.TimeoutExpired, *UNREADABLE):
        found = PdfText(fault=tr("it took longer than {seconds:g} s or too much memory to read", seconds=SECONDS))
    if found.fault:
        raise ChatError(tr("{name} cannot be attached: {fault}.", name=name, fault=found.fault))
    return found.text
