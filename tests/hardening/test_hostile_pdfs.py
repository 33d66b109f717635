"""Malformed PDF files: text or one error, within the limits of the child that reads them."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence

import pytest

from engine.base.errors import ChatError
from engine.chat import attachments
from engine.chat.attachments import as_attachment
from tests.support.selection import some

CATALOGUE = b"<< /Type /Catalog /Pages 2 0 R >>"
PAGES = b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>"
FONT = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
WIDE = b"<< /Type /Font /Subtype /Type0 /BaseFont /X /Encoding /Identity-H "
HELLO = b"BT /F1 12 Tf 20 100 Td (Hello) Tj ET\n"
GLYPH = b"BT /F1 12 Tf <0001> Tj ET"


def stream(data: bytes, further: bytes = b"") -> bytes:
    return b"<< /Length %d %s >>\nstream\n" % (len(data), further) + data + b"\nendstream"


def page(contents: bytes = b"4 0 R", resources: bytes = b"/Font << /F1 5 0 R >>", further: bytes = b"") -> bytes:
    return (
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 200 200] /Contents "
        + contents + b" /Resources << " + resources + b" >> " + further + b" >>"
    )  # fmt: skip


def pdf(
    objects: Sequence[bytes], trailer: bytes = b"/Root 1 0 R", *, table: bool = True, at: int | None = None
) -> bytes:
    data, places = b"%PDF-1.7\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n" % number + each + b"\nendobj\n"
    begin = len(data)
    if table:
        data += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
        data += b"".join(b"%010d 00000 n \n" % place for place in places)
    end = begin if at is None else at
    return data + b"trailer\n<< /Size %d %s >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, trailer, end)


def of(content: bytes, *further: bytes, font: bytes = FONT) -> bytes:
    """One page that draws `content`."""
    return pdf([CATALOGUE, PAGES, page(), content, font, *further])


def packed_zeros(size: int) -> bytes:
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(size >> 20)) + packer.flush()


def table_in_a_stream(entries: Sequence[tuple[int, int]], w: bytes = b"[1 4 2]", further: bytes = b"") -> bytes:
    """Objects that lie in object 4, which says that it lies in itself."""
    packed = b"1 0 2 6 3 12 4 18 5 24         1 0 R 2 0 R 3 0 R 4 0 R 5 0 R "
    data = b"%PDF-1.7\n4 0 obj\n" + stream(packed, b"/Type /ObjStm /N 5 /First 30") + b"\nendobj\n"
    begin = len(data)
    rows = b"".join(kind.to_bytes(1) + where.to_bytes(4) + bytes(2) for kind, where in entries)
    said = b"/Type /XRef /Size %d /W %s /Root 1 0 R %s" % (len(entries), w, further)
    return data + b"90 0 obj\n" + stream(rows, said) + b"\nendobj\nstartxref\n%d\n%%%%EOF" % begin


def encrypted(how: bytes) -> bytes:
    objects = [CATALOGUE, PAGES, page(), stream(HELLO), FONT, b"<< /Filter /Standard " + how + b" >>"]
    return pdf(objects, b"/Root 1 0 R /Encrypt 6 0 R /ID [<00> <00>]")


def count(number: bytes, kids: bytes = b"3 0 R") -> bytes:
    pages = b"<< /Type /Pages /Kids [" + kids + b"] /Count " + number + b" >>"
    return pdf([CATALOGUE, pages, page(), stream(HELLO), FONT])


def form(names: bytes, target: int) -> bytes:
    return stream(
        names,
        b"/Type /XObject /Subtype /Form /BBox [0 0 1 1] /Resources << /XObject << /X %d 0 R >> >>" % target,
    )


def drawing(*forms: bytes) -> bytes:
    first = page(b"4 0 R", b"/XObject << /X 6 0 R >>")
    return pdf([CATALOGUE, PAGES, first, stream(b"/X Do"), FONT, *forms])


ZEROS = b"<" + b"00" * 32 + b">"
PLAIN = of(stream(HELLO))
TABLE = PLAIN.index(b"xref\n0")
FLATE = b"/Filter /FlateDecode"
TWICE = b"/Filter [/FlateDecode /FlateDecode]"
FILES: dict[str, Callable[[], bytes]] = {
    "zeros of 256 MiB": lambda: of(stream(packed_zeros(256 << 20), FLATE)),
    "zeros packed twice": lambda: of(
        stream(zlib.compress(packed_zeros(256 << 20)), b"/Filter [/FlateDecode /FlateDecode]")
    ),
    "5000 filters": lambda: of(stream(zlib.compress(HELLO), b"/Filter [" + b"/FlateDecode " * 5000 + b"]")),
    "runs": lambda: of(stream(b"\x81A" * 10_000_000, b"/Filter /RunLengthDecode")),
    "letters of zeros": lambda: of(stream(b"z" * 20_000_000 + b"~>", b"/Filter /ASCII85Decode")),
    "predicted bytes": lambda: of(
        stream(packed_zeros(64 << 20), FLATE + b" /DecodeParms << /Predictor 12 /Columns 1 >>")
    ),
    "predicted columns": lambda: of(
        stream(zlib.compress(HELLO), FLATE + b" /DecodeParms << /Predictor 12 /Columns 1000000000000 >>")
    ),
    "pages within themselves": lambda: pdf([CATALOGUE, b"<< /Type /Pages /Kids [2 0 R] /Count 1 >>"]),
    "pages that are shared": lambda: pdf(
        [
            CATALOGUE,
            *(b"<< /Type /Pages /Kids [" + b"%d 0 R " % (n + 1) * 10 + b"] /Count 1000000 >>" for n in range(2, 12)),
            page(b"13 0 R", b""),
            stream(HELLO),
        ]
    ),
    "a deep tree": lambda: pdf(
        [
            CATALOGUE,
            *(b"<< /Type /Pages /Kids [%d 0 R] /Count 1 >>" % (n + 1) for n in range(2, 5000)),
            page(b"[]", b""),
        ]
    ),
    "a million pages, claimed": lambda: count(b"1000000"),
    "a million pages, named": lambda: count(b"1000000", b"3 0 R " * 1_000_000),
    "fewer pages than none": lambda: count(b"-5"),
    "a count of 100,000 digits": lambda: count(b"9" * 100_000),
    "a page that is its parent": lambda: pdf([CATALOGUE, PAGES, page(further=b"/Parent 3 0 R"), stream(HELLO), FONT]),
    "locked": lambda: encrypted(b"/V 1 /R 2 /O " + ZEROS + b" /U " + ZEROS + b" /P -4"),
    "locked with nothing": lambda: encrypted(b"/V 5 /R 6 /Length 256 /O (x) /U (y) /OE (z) /UE (w) /P -1 /Perms (q)"),
    "locked with a long key": lambda: encrypted(
        b"/V 2 /R 3 /Length 99999999999 /O " + ZEROS + b" /U " + ZEROS + b" /P -4"
    ),
    "locked by itself": lambda: pdf([CATALOGUE, PAGES, page(), stream(HELLO), FONT], b"/Root 1 0 R /Encrypt 1 0 R"),
    "no table": lambda: pdf([CATALOGUE, PAGES, page(), stream(HELLO), FONT], table=False),
    "a table at the start": lambda: pdf([CATALOGUE, PAGES, page(), stream(HELLO), FONT], at=0),
    "a table far behind the end": lambda: pdf([CATALOGUE, PAGES, page(), stream(HELLO), FONT], at=10**30),
    "a table before itself": lambda: pdf(
        [CATALOGUE, PAGES, page(), stream(HELLO), FONT], b"/Root 1 0 R /Prev %d" % TABLE
    ),
    "a table of many": lambda: PLAIN.replace(b"xref\n0 6", b"xref\n0 99999999999"),
    "a broken table": lambda: PLAIN[:TABLE] + b"xref\n0 6\n" + b"z" * 5000 + PLAIN[TABLE:],
    "a root that is itself": lambda: pdf([b"1 0 R"]),
    "a circle of references": lambda: pdf([*(b"%d 0 R" % n for n in range(2, 5001)), b"1 0 R"]),
    "a length that is its stream": lambda: of(b"<< /Length 4 0 R >>\nstream\n" + HELLO + b"\nendstream"),
    "a length below none": lambda: of(b"<< /Length -100 >>\nstream\n" + HELLO + b"\nendstream"),
    "a length beyond the end": lambda: of(b"<< /Length 99999999999999 >>\nstream\n" + HELLO + b"\nendstream"),
    "objects within themselves": lambda: table_in_a_stream([(0, 0), *[(2, 4)] * 5]),
    "objects within each other": lambda: table_in_a_stream([(0, 0), (2, 2), (2, 3), (2, 2)]),
    "wide columns of a table": lambda: table_in_a_stream([(0, 0), (1, 9)], b"[1000000000 1000000000 1000000000]"),
    "columns below none": lambda: table_in_a_stream([(0, 0), (1, 9)], b"[-1 -4 -2]"),
    "columns of nothing": lambda: table_in_a_stream([(0, 0), (1, 9)], b"[0 0 0]", b"/Index [0 999999999]"),
    "a form within itself": lambda: drawing(form(b"/X Do /X Do", 6)),
    "forms that double": lambda: drawing(*(form(b"/X Do /X Do", n + 1) for n in range(6, 36)), stream(HELLO)),
    "a million contents": lambda: pdf(
        [CATALOGUE, PAGES, page(b"[" + b"4 0 R " * 1_000_000 + b"]"), stream(HELLO), FONT]
    ),
    "lists in lists": lambda: of(stream(b"[" * 1_000_000)),
    "tables in tables": lambda: pdf(
        [CATALOGUE, PAGES, page(further=b"/A " + b"<< /A " * 100_000), stream(HELLO), FONT]
    ),
    "an open text": lambda: of(stream(b"BT " + b"(" * 5_000_000)),
    "operators": lambda: of(stream(b"q " * 10_000_000)),
    "an inline picture": lambda: of(stream(b"BI /W 1000000 /H 1000000 ID " + b"x" * 5_000_000)),
    "a range of all characters": lambda: of(
        stream(GLYPH),
        stream(
            b"1 begincodespacerange <0000> <ffff> endcodespacerange "
            b"1 beginbfrange <00000000> <ffffffff> <0000> endbfrange"
        ),
        font=WIDE + b"/ToUnicode 6 0 R >>",
    ),
    "half a character": lambda: of(
        stream(GLYPH), stream(b"1 beginbfchar <0001> <D800> endbfchar"), font=WIDE + b"/ToUnicode 6 0 R >>"
    ),
    "widths without end": lambda: of(
        stream(GLYPH),
        b"<< /Type /Font /Subtype /CIDFontType2 /W [0 999999999 500] >>",
        font=WIDE + b"/DescendantFonts [6 0 R] >>",
    ),
    "a font of itself": lambda: of(stream(GLYPH), font=WIDE + b"/DescendantFonts [5 0 R] >>"),
    "letters of a huge size": lambda: of(stream(b"BT /F1 1e308 Tf 1e308 1e308 Td (Hello) Tj ET")),
    "a long number": lambda: of(stream(b"1" * 5_000_000 + b" 0 Td")),
    "ends of files": lambda: b"%PDF-1.7\n" + b"%%EOF\n" * 2_000_000,
    "begins of tables": lambda: b"%PDF-1.7\n" + b"startxref\n5\n" * 1_000_000,
    "begins of objects": lambda: b"%PDF-1.7\n" + b"1 0 obj\n" * 1_000_000,
    "a remark": lambda: b"%PDF-1.7\n" + b"%" * (60 << 20),
    **{f"cut at {part}": lambda part=part: PLAIN[: len(PLAIN) * part // 12] for part in range(1, 12)},  # type: ignore[misc]
    **{f"damaged {seed}": lambda seed=seed: damaged(seed) for seed in range(20)},  # type: ignore[misc]
}


def damaged(seed: int) -> bytes:
    chance, data = random.Random(seed), bytearray(PLAIN)
    for _ in range(chance.randint(1, 20)):
        data[chance.randrange(5, len(data))] = chance.randrange(256)
    return bytes(data)


def test_the_plain_one_is_read() -> None:
    assert as_attachment(PLAIN, "a.pdf").attachment.text == "Hello"


@pytest.mark.parametrize("name", some(tuple(FILES), 6))
def test_a_hostile_pdf_is_read_or_refused_in_a_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachments, "SECONDS", 12.0)
    try:
        text = as_attachment(FILES[name](), "a.pdf").attachment.text
    except ChatError as error:
        sentence = error.summary()
    else:
        text.encode()
        sentence = "a.pdf cannot be attached"
    assert sentence.startswith("a.pdf cannot be attached")
    assert len(sentence) < 300
