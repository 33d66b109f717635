"""Texts of the window all go through `engine.base.language`, and the catalogues agree with the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.base.language import LANGUAGES, read_language
from resources.languages.catalogue import Entry, header_fields, read_catalogue, write_catalogue
from resources.languages.extract import CATALOGUES, ROOT, brought_up_to_date, faults_of, texts_of

PATHS = sorted(CATALOGUES.glob("*.po"))

NO_TEXTS = ("app/cli", "app/gui.py", "app/log_file.py", "app/logs.py", "app/program.py", "app/run_records.py")
"""What speaks English always: command line, log, reports to send."""
ENGLISH = (
    "app/bug_report.py: Layerdeck {}, Python {}, PySide6 {}, {}",
    "app/bug_report.py: not installed",
    "app/language.py: {} is not a readable translation ({}); check the file.",
    "app/window/recovery.py: run mark",
    "app/window/recovery.py: what was open",
    "app/models/open_models.py: close a model",
    "app/serving/served_models.py: The server is ending.",
    "app/serving/served_models.py: The load was cancelled in the window.",
    "app/wiring/desk.py: draw formulas",
    "app/wiring/presenters.py: auto layout",
)
"""Words of reports to send, of the terminal and for programs, and names that people do not read."""
CODE = "widgets/serve/snippets.py"
"""Texts for other programs, which are in no language."""

SAY_FIRST = frozenset(
    {
        *("addAction", "addButton", "addItem", "addMenu", "addTab", "plain_label"),
        *("show", "show_status", "_show", "_show_note"),
        *("setAccessibleDescription", "setAccessibleName", "setInformativeText", "setLabelText", "setPlaceholderText"),
        *("setStatusTip", "setText", "setTitle", "setToolTip", "setWindowTitle", "Notice", "QAction", "QCheckBox"),
        *("QDockWidget", "QGroupBox", "QLabel", "QMenu", "QPushButton", "QRadioButton", "QToolBar", "QToolButton"),
    }
)
"""Functions whose first argument people read."""
NAMES = frozenset({"Layerdeck", "192.0.2.7:50052", "https://…", "K7QM-3XHD-9RWP-T2FV", "≡", "Hub…"})
"""What is the same in every language."""


def test_each_language_has_a_catalogue() -> None:
    assert {path.stem for path in PATHS} == set(LANGUAGES) - {"en"}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_catalogue_is_read_and_written_whole(path: Path) -> None:
    """Whether each text has a translation is asked before a release: `make.py check-translations`."""
    document = path.read_text(encoding="utf-8")
    entries, language = read_catalogue(document), read_language(document)
    assert language.name == path.stem == header_fields(entries)["Language"]
    assert len({entry.text for entry in entries}) == len(entries)
    assert write_catalogue(entries) == document


TEXTS = (Entry("&Open {name}…"), Entry("Close"), Entry("{count} file", "{count} files"), Entry("Log (*.log)"))
SAID = (
    Entry("", "", ("Language: de\n",)),
    Entry("&Open {name}…", "", ("{name} ö&ffnen…",)),
    Entry("Close", "", ("Schließen",)),
    Entry("{count} file", "{count} files", ("{count} Datei", "{count} Dateien")),
    Entry("Log (*.log)", "", ("Protokoll (*.log)",)),
)


def test_a_catalogue_that_says_every_text_has_no_faults() -> None:
    assert list(faults_of(SAID, TEXTS)) == []


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        (Entry("Close", "", ("",)), "has no translation"),
        (Entry("Close"), "has no translation"),
        (Entry("Shut", "", ("Zu",)), "is in no module"),
        (Entry("&Open {name}…", "", ("{nam} ö&ffnen…",)), "has other fields"),
        (Entry("&Open {name}…", "", ("{name} öffnen…",)), "has other fields"),
        (Entry("&Open {name}…", "", ("{name} ö&ffnen",)), "has other fields"),
        (Entry("Close", "", ("Schließen ",)), "has other fields"),
        (Entry("Log (*.log)", "", ("Protokoll (*.txt)",)), "has other fields"),
        (Entry("{count} file", "{count} files", ("{count} Datei", "Dateien")), "has other fields"),
    ],
)
def test_what_a_release_must_not_have_is_listed(entry: Entry, fault: str) -> None:
    entries = {each.text: each for each in (*SAID, entry)}
    (found,) = faults_of(tuple(entries.values()), TEXTS)
    assert fault in found


def test_a_text_that_is_not_in_the_catalogue_is_listed_and_added() -> None:
    assert list(faults_of(SAID[:-1], TEXTS)) == ["'Log (*.log)' is not in it"]
    added = brought_up_to_date(SAID[:-1], TEXTS)
    assert added == (*SAID[:-1], Entry("Log (*.log)"))
    assert brought_up_to_date(SAID, TEXTS[1:]) == (SAID[0], *SAID[2:])


def modules() -> Iterator[Path]:
    for source in ("app", "widgets"):
        for path in sorted((ROOT / source).rglob("*.py")):
            place = path.relative_to(ROOT).as_posix()
            if not place.startswith(NO_TEXTS):
                yield path


def words_of(node: ast.expr) -> str:
    """Return the text of a literal, its fields as `{}`; empty for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)  # type: ignore[misc]
    return ""


def untold(tree: ast.Module) -> Iterator[str]:
    """Yield what people read and is a bare literal: arguments of functions that show it, and anything in prose."""
    silent = {id(node) for parent in ast.walk(tree) for node in _silent(parent)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and _name(node.func) in SAY_FIRST:
            words = words_of(node.args[0])
            if re.search(r"[A-Za-z]{3}", words.replace("Layerdeck", "")) and id(node.args[0]) not in silent:
                yield words
        elif isinstance(node, (ast.Constant, ast.JoinedStr)) and id(node) not in silent:
            words = words_of(node)
            if re.search(r"[A-Za-z}]{2}[,.:;]? [a-z{]{2}", words) and not re.fullmatch(r"[a-z {}]{0,4}", words):
                yield words


def _silent(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the literals that `node` keeps from people: of the log, names of things, documentation."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
        yield from (line.value for line in node.body if isinstance(line, ast.Expr))
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr) and isinstance(node.value, ast.Constant):
        yield from [node.value] if isinstance(node, ast.Expr) else []
    if isinstance(node, ast.ClassDef) and any(
        isinstance(base, ast.Name) and base.id == "StrEnum" for base in node.bases
    ):
        yield from (line.value for line in node.body if isinstance(line, ast.Assign))
    if isinstance(node, ast.JoinedStr):
        yield from (part for part in node.values if isinstance(part, ast.Constant))
    if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
        yield node.format_spec
    if isinstance(node, ast.Call):
        function = node.func
        owner = _name(function.value) if isinstance(function, ast.Attribute) else ""
        is_hidden = any(each.arg == "quiet" and _is_true(each.value) for each in node.keywords)
        if owner in ("_log", "logging") or _name(function) in ("tr", "tr_count", "getLogger", "setObjectName"):
            yield from (each for argument in node.args for each in ast.walk(argument))
        elif is_hidden:
            yield from node.args


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def test_what_people_read_is_never_a_bare_literal() -> None:
    found = [
        f"{path.relative_to(ROOT).as_posix()}: {words}"
        for path in modules()
        if path.relative_to(ROOT).as_posix() != CODE
        for words in untold(ast.parse(path.read_text(encoding="utf-8")))
        if words not in NAMES
    ]
    assert [line for line in found if line not in ENGLISH] == [], "\n".join(found)


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ('label.setText("Open it")', 1),
        ('label.setText(f"{count} layers")', 1),
        ('words = f"{name} is loaded"', 1),
        ('label.setText(tr("Open it"))', 0),
        ('_log.info("the child ended")', 0),
        ('label.setObjectName("the child")', 0),
    ],
)
def test_bare_literals_are_found(line: str, count: int) -> None:
    assert len(set(untold(ast.parse(line)))) == count


@pytest.mark.parametrize("line", ["tr(text)", 'tr(f"{count} layers")', 'tr_count("one", several, 2)'])
def test_a_text_is_a_literal(line: str) -> None:
    with pytest.raises(ValueError, match="takes literals"):
        list(texts_of(ast.parse(line), "here"))
