"""`python -m engine.chats.pdf_reader`: the text of a PDF file on standard input, as one JSON object.

A PDF is a program of a stranger in all but name: this process has an alarm, an address space that ends, no file system
but its own code, and nothing to lose.
"""

from __future__ import annotations

import io
import logging
import signal
import sys
from pathlib import Path

import msgspec

from engine.confinement import code_folders, confine, refuse_core_files

MAX_PAGES = 2000
MAX_CHARACTERS = 4 << 20
SECONDS = 30.0
MEMORY_BYTES = 1 << 30


class PdfText(msgspec.Struct, frozen=True, kw_only=True):
    """The text, pages apart by empty lines, or why there is none."""

    text: str = ""
    fault: str = ""


def main() -> None:
    """Read, answer and end."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable()  # what the library says of the file is for nobody
    refuse_core_files()
    data = sys.stdin.buffer.read()
    _limit_memory()
    confine(readable=code_folders(), writable=())
    sys.stdout.buffer.write(msgspec.json.encode(pdf_text(data)))


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


def _limit_memory() -> None:
    if not sys.platform.startswith("linux"):
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit_bytes = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))


if __name__ == "__main__":
    main()
