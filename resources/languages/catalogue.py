"""Reads and writes catalogues: the subset of PO files that ours and those of translation programs use.

An entry has an English text, its English plural if it depends on a number, the translations (one, or one for each
plural form), and the modules that use it. A translation marked as fuzzy is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

_LINE = re.compile(r'(msgid_plural|msgid|msgstr)(?:\[(\d)\])? (".*")')
_FIELD = re.compile(r"\{(\w*)[^{}]*\}")
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", "t": "\t"}


@dataclass(frozen=True, slots=True)
class Entry:
    """A text with its translations. `translations`: the translation of each plural form; empty if there is none."""

    text: str
    plural: str = ""
    translations: tuple[str, ...] = ()
    places: tuple[str, ...] = field(default=(), compare=False)

    @property
    def is_translated(self) -> bool:
        """Whether every plural form is translated."""
        return bool(self.translations) and all(self.translations)


def read_catalogue(document: str) -> tuple[Entry, ...]:
    """Return the entries of a PO file. The first one has an empty text and contains the header.

    Raises:
        ValueError: a line is not of a PO file; the message quotes it.
    """
    return tuple(
        _read_entry(block) for block in re.split(r"\n[ \t]*\n", document.replace("\r\n", "\n")) if block.strip()
    )


def header_fields(entries: Iterable[Entry]) -> dict[str, str]:
    """Return the header fields of a catalogue, such as `Language` and `Plural-Forms`."""
    header = next((entry.translations[0] for entry in entries if not entry.text and entry.translations), "")
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in header.splitlines())}


def fields_of(text: str) -> frozenset[str]:
    """Return the names of the replacement fields (`{name}`) in `text`."""
    return frozenset(_FIELD.findall(text)) if "{" in text else frozenset()


def write_catalogue(entries: Iterable[Entry]) -> str:
    """Return the content of a PO file with these entries."""
    return "\n".join("".join(f"{line}\n" for line in _lines(entry)) for entry in entries)


def _read_entry(block: str) -> Entry:
    texts: dict[str, str] = {}
    places: list[str] = []
    key, is_fuzzy = "", False
    for line in block.strip().splitlines():
        if line.startswith("#"):
            is_fuzzy |= line.startswith("#,") and "fuzzy" in line
            places += line[2:].split() if line.startswith("#:") else []
        elif line.startswith('"') and line.endswith('"') and key:
            texts[key] += _unquoted(line)
        elif match := _LINE.fullmatch(line.rstrip()):
            key = match[1] + (match[2] or "")
            texts[key] = _unquoted(match[3])
        else:
            raise ValueError(f"this line is none of a catalogue: {line[:80]}")
    translations = tuple(text for key, text in sorted(texts.items()) if key.startswith("msgstr"))
    return Entry(texts.get("msgid", ""), texts.get("msgid_plural", ""), () if is_fuzzy else translations, tuple(places))


def _unquoted(line: str) -> str:
    text = line.rstrip()[1:-1]
    return _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[1]), text) if "\\" in text else text


def _lines(entry: Entry) -> Iterator[str]:
    yield from (f"#: {place}" for place in entry.places)
    if "{" in entry.text:
        yield "#, python-brace-format"
    yield f"msgid {_quoted(entry.text)}"
    if entry.plural:
        yield f"msgid_plural {_quoted(entry.plural)}"
        yield from (f"msgstr[{number}] {_quoted(text)}" for number, text in enumerate(entry.translations or ("", "")))
    else:
        yield f"msgstr {_quoted(entry.translations[0] if entry.translations else '')}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'
