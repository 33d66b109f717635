"""Attached files: plain text, the text of a PDF from a confined child, and an error for others."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.base.errors import ChatError
from engine.chat.attachments import MAX_TEXT_BYTES, read_attachment
from engine.chat.pdf_reader import pdf_text
from engine.runtime.media.images.pictures import MAX_IMAGE_BYTES


def write_pdf(path: Path, content: bytes) -> Path:
    """Write a PDF of one page that draws `content`."""
    objects = (
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 200 200] /Contents 4 0 R"
        b" /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    )
    data, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, start=1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = b"xref\n0 6\n0000000000 65535 f \n" + table + b"trailer << /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n"
    path.write_bytes(data + end % len(data))
    return path


def test_code_is_attached_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "größe.py"
    path.write_text("print('é')\n", encoding="utf-8")
    attachment, data, _ = read_attachment(path)
    assert (attachment.kind, attachment.name, attachment.mime) == ("text", "größe.py", "text/x-python")
    assert (attachment.text, attachment.size_bytes) == ("print('é')\n", len(data))


def test_the_text_of_a_pdf_is_read_by_a_child(tmp_path: Path) -> None:
    path = write_pdf(tmp_path / "a.pdf", b"BT /F1 12 Tf 20 100 Td (Layers in a file) Tj ET")
    attachment = read_attachment(path).attachment
    assert (attachment.kind, attachment.text) == ("pdf", "Layers in a file")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"\x7fELF\xff\xfe", "not UTF-8 text"),
        (b"\x89PNG\r\n\x1a\n\x00", "cannot be read: it is damaged"),
        (b"\x89PNG\r\n\x1a\n" + bytes(MAX_IMAGE_BYTES), "larger than 20 MiB; make the image smaller"),
        (b"a\0b", "not UTF-8 text"),
        (b"fLaC" + bytes(99), "cannot be read: it is damaged or empty"),
        (b"a" * (MAX_TEXT_BYTES + 1), "larger than 2 MiB"),
        (b"%PDF-1.4 nothing more", "damaged"),
    ],
)
def test_what_cannot_be_attached_is_a_sentence(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(ChatError, match=f"^file .*{words}"):
        read_attachment(path)


def test_a_file_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ChatError, match="check the path"):
        read_attachment(tmp_path / "none")


def test_a_pdf_without_text_says_so(tmp_path: Path) -> None:
    assert "only images" in pdf_text(write_pdf(tmp_path / "a.pdf", b"").read_bytes()).fault
