"""Updates the catalogues from the texts in the code: `python -m resources.languages.extract [--check]`.

New texts are added without a translation, texts that the code no longer has are removed, and translations stay. With
`--check` nothing is written. It then lists what a release must not have: texts without a translation, translations of
removed texts, and translations with other fields than their text. A change to the code may leave such faults, because
an untranslated text is shown in English; so no test looks for them.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from resources.languages.catalogue import Entry, fields_of, read_catalogue, write_catalogue

ROOT = Path(__file__).resolve().parents[2]
CATALOGUES = Path(__file__).resolve().parent
SOURCES = ("app", "widgets", "engine")
_LETTER = re.compile(r"(?<!&)&(?=[^&\s])")
"""The `&` before the mnemonic letter of a menu entry."""
_PATTERNS = re.compile(r"\(\*[^)]*\)")
"""File name patterns of file dialogs, such as `(*.gguf)`."""
_FORMS = {"tr": 1, "tr_count": 2}
"""Functions that translate texts (`engine/base/language.py`), and the number of literals that each takes."""


def texts_in_code(root: Path = ROOT) -> tuple[Entry, ...]:
    """Return every translatable text of the code once, sorted by the modules that use it.

    Raises:
        ValueError: a text is not a literal, or has different plurals in two places.
    """
    found: dict[str, Entry] = {}
    for path in sorted(path for folder in SOURCES for path in (root / folder).rglob("*.py")):
        place = path.relative_to(root).as_posix()
        source = path.read_text(encoding="utf-8")
        for entry in texts_of(ast.parse(source), place) if "engine.base.language import" in source else ():
            known = found.setdefault(entry.text, entry)
            if known.plural != entry.plural:
                raise ValueError(f"{place}: {entry.text!r} has other forms elsewhere")
            if place not in known.places:
                found[entry.text] = Entry(entry.text, entry.plural, (), (*known.places, place))
    return tuple(found.values())


def texts_of(tree: ast.Module, place: str) -> Iterator[Entry]:
    """Yield the translatable texts of a module. `place`: path of the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FORMS:
            words = node.args[: _FORMS[node.func.id]]
            literals = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
            if len(literals) != _FORMS[node.func.id]:
                raise ValueError(f"{place}:{node.lineno}: {node.func.id} takes literals")
            yield Entry(literals[0], literals[1] if len(literals) > 1 else "", (), (place,))


def brought_up_to_date(catalogue: tuple[Entry, ...], texts: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Return a new catalogue: the header of `catalogue`, and `texts` with the translations that `catalogue` has."""
    translations = {(entry.text, entry.plural): entry.translations for entry in catalogue}
    header = tuple(entry for entry in catalogue if not entry.text)
    return (
        *header,
        *(Entry(each.text, each.plural, translations.get((each.text, each.plural), ()), each.places) for each in texts),
    )


def faults_of(catalogue: tuple[Entry, ...], texts: tuple[Entry, ...]) -> Iterator[str]:
    """Yield a sentence for each fault of a catalogue that a release must not have. `texts`: all texts of the code."""
    entries = {(entry.text, entry.plural): entry for entry in catalogue if entry.text}
    known = {(text.text, text.plural) for text in texts}
    for key in known - entries.keys():
        yield f"{key[0]!r} is not in it"
    for key, entry in entries.items():
        if key not in known:
            yield f"{entry.text!r} is in no module"
        elif not entry.is_translated:
            yield f"{entry.text!r} has no translation"
        for translation, text in zip(entry.translations, (entry.text, entry.plural), strict=False):
            if translation and _shape(translation) != _shape(text):
                yield f"{translation!r} has other fields, letters for the keyboard, patterns or ends than {text!r}"


def _shape(text: str) -> tuple[object, ...]:
    """Return the properties that a translation must share with its text, such as fields and mnemonic letters."""
    return (
        fields_of(text),
        len(_LETTER.findall(text)),
        _PATTERNS.findall(text),
        text.endswith("…"),
        len(text) - len(text.lstrip()),
        len(text) - len(text.rstrip()),
        "\n" in text,
    )


def main() -> int:
    """Update or check the catalogues; return the exit code, 1 if the check found a fault."""
    parser = argparse.ArgumentParser(prog="resources.languages.extract")
    parser.add_argument("--check", action="store_true", help="write nothing, and list what a release must not have")
    only_check = parser.parse_args().check
    texts, n_faults = texts_in_code(), 0
    for path in sorted(CATALOGUES.glob("*.po")):
        entries = read_catalogue(path.read_text(encoding="utf-8"))
        if only_check:
            faults = sorted(faults_of(entries, texts))
            print(*(f"{path.name}: {fault}" for fault in faults), sep="\n", end="\n" if faults else "")
            n_faults += len(faults)
            continue
        entries = brought_up_to_date(entries, texts)
        path.write_text(write_catalogue(entries), encoding="utf-8")
        missing = sum(1 for entry in entries if not entry.is_translated)
        print(f"{path.name}: {len(entries) - 1} texts, {missing} without a translation")
    return 1 if n_faults else 0


if __name__ == "__main__":
    sys.exit(main())
