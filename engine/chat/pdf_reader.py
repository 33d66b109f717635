"""`python -m engine.chat.pdf_reader`: the child that reads the text of a PDF file.

A PDF is a program of a stranger in all but name.
"""

from __future__ import annotations

import io

from engine.runtime.process.decoders import run_decoder
from engine.runtime.protocol.messages import Job, Message

MAX_PAGES = 2000
MAX_CHARACTERS = 4 << 20
SECONDS = 30.0
MEMORY_BYTES = 1 << 30


class ReadPdf(Job, frozen=True, tag="read_pdf", kw_only=True):
    """Read the text of a PDF file."""

    data: bytes


class PdfText(Message, frozen=True, tag="pdf_text", kw_only=True):
    """The text, pages apart by empty lines, or why there is none."""

    text: str = ""
    fault: str = ""


def main() -> None:
    """Read files until the parent has what it wants."""
    run_decoder(ReadPdf, lambda request: pdf_text(request.data), MEMORY_BYTES)


def pdf_text(data: bytes) -> PdfText:
    """Return the text of a file; it may take any time and memory."""
    import pypdf

    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            return PdfText(fault="it is locked with a password; save it without one")
        if len(reader.pages) > MAX_PAGES:
            return PdfText(fault=f"it has {len(reader.pages)} pages, and {MAX_PAGES} are the most")
        parts: list[str] = []
        left = MAX_CHARACTERS
        for page in reader.pages:
            parts.append(page.extract_text().strip())
            left -= len(parts[-1])
            if left < 0:
                return PdfText(fault=f"it has more than {MAX_CHARACTERS} characters; split it")
    except (MemoryError, RecursionError):
        return PdfText(fault="it takes too much memory")
    except Exception:
        # whatever a foreign file has wrong is that file's error
        return PdfText(fault="it is damaged or of a form that cannot be read")
    text = "\n\n".join(part for part in parts if part).encode("utf-8", "replace").decode()
    return PdfText(text=text) if text else PdfText(fault="it has no text, only pictures of it")


if __name__ == "__main__":
    main()
