"""`python -m engine.chat.pdf_reader`: the child process that extracts the text of a PDF file.

PDF files are complex and come from strangers, so they are parsed in a confined process.
"""

from __future__ import annotations

import io

from engine.base.confinement import PDF
from engine.runtime.process.decoders import run_decoder
from engine.runtime.protocol.messages import Message
from engine.runtime.protocol.requests import Job

MAX_PAGES = 2000
MAX_CHARACTERS = 4 << 20
SECONDS = 30.0


class ReadPdf(Job, frozen=True, tag="read_pdf", kw_only=True):
    """The request to extract the text of a PDF file. `data`: its bytes."""

    data: bytes


class PdfText(Message, frozen=True, tag="pdf_text", kw_only=True):
    """The text of a PDF file, with empty lines between pages. `fault`: why there is no text; empty if there is one."""

    text: str = ""
    fault: str = ""


def main() -> None:
    """Run the child process: answer requests until the parent ends it."""
    run_decoder(ReadPdf, lambda request: pdf_text(request.data), PDF)


def pdf_text(data: bytes) -> PdfText:
    """Return the text of a PDF file. Time and memory are limited only by the process in which this runs."""
    import pypdf

    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            return PdfText(fault="it is protected with a password; save it without one")
        if len(reader.pages) > MAX_PAGES:
            return PdfText(fault=f"it has {len(reader.pages)} pages, and at most {MAX_PAGES} are read")
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
        # pypdf raises many kinds of errors for broken files; all of them are errors of the file.
        return PdfText(fault="it is damaged or cannot be read")
    text = "\n\n".join(part for part in parts if part).encode("utf-8", "replace").decode()
    return PdfText(text=text) if text else PdfText(fault="it contains no text, only images")


if __name__ == "__main__":
    main()
