"""Brings the catalogues up to date with the texts in the code: `python -m resources.languages.extract`.

Texts that came are added without a translation, those that went are dropped, and what is translated stays.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from resources.languages.catalogue import Entry, read_catalogue, write_catalogue

ROOT = Path(__file__).resolve().parents[2]
CATALOGUES = Path(__file__).resolve().parent
SOURCES = ("app", "widgets", "engine")
_FORMS = {"tr": 1, "tr_count": 2}
"""The functions that texts go through (`engine/language.py`), and how many texts each takes."""


def texts_in_code(root: Path = ROOT) -> tuple[Entry, ...]:
    """Return every text of the code once, sorted by the modules that it is in.

    Raises:
        ValueError: for a text that is no literal, and one that has different forms for several.
    """
    found: dict[str, Entry] = {}
    for path in sorted(path for folder in SOURCES for path in (root / folder).rglob("*.py")):
        place = path.relative_to(root).as_posix()
        source = path.read_text(encoding="utf-8")
        for entry in texts_of(ast.parse(source), place) if "engine.language import" in source else ():
            known = found.setdefault(entry.text, entry)
            if known.plural != entry.plural:
                raise ValueError(f"{place}: {entry.text!r} has other forms elsewhere")
            if place not in known.places:
                found[entry.text] = Entry(entry.text, entry.plural, (), (*known.places, place))
    return tuple(found.values())


def texts_of(tree: ast.Module, place: str) -> Iterator[Entry]:
    """Yield the texts of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FORMS:
            words = node.args[: _FORMS[node.func.id]]
            literals = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
            if len(literals) != _FORMS[node.func.id]:
                raise ValueError(f"{place}:{node.lineno}: {node.func.id} takes literals")
            yield Entry(literals[0], literals[1] if len(literals) > 1 else "", (), (place,))


def brought_up_to_date(catalogue: tuple[Entry, ...], texts: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Return the entries of `texts` with what `catalogue` has of them; its header stays."""
    said = {(entry.text, entry.plural): entry.said for entry in catalogue}
    header = tuple(entry for entry in catalogue if not entry.text)
    return (
        *header,
        *(Entry(each.text, each.plural, said.get((each.text, each.plural), ()), each.places) for each in texts),
    )


def main() -> None:
    """Write the catalogues."""
    texts = texts_in_code()
    for path in sorted(CATALOGUES.glob("*.po")):
        before = read_catalogue(path.read_text(encoding="utf-8"))
        after = brought_up_to_date(before, texts)
        path.write_text(write_catalogue(after), encoding="utf-8")
        missing = sum(1 for entry in after if not entry.is_said)
        print(f"{path.name}: {len(after) - 1} texts, {missing} without a translation")


if __name__ == "__main__":
    main()
