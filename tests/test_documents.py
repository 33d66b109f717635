"""Documents against the tree: links, file paths, functions, commands of make.py, benchmarks, and line lengths."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_LINE = 120
FOLDERS = ("app", "benchmarks", "docs", "engine", "resources", "tests", "widgets")
PAGES = sorted(
    path
    for folder in ("app", "benchmarks", "engine", "resources", "widgets")
    for path in (ROOT / folder).rglob("README.md")
)
"""Pages beside packages."""
CHECKED = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *PAGES]


LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)]*)?\)")
CODE = re.compile(r"`([^`\n]+)`")
PLACE = re.compile(r"`([\w/]+\.py):([\w.]+)`")
COMMAND = re.compile(r"make\.py ([a-z][a-z-]*)")
FILE = re.compile(r"[\w./-]+\.(?:py|c|po|qss|toml|md)")
FOLDER = re.compile(rf"(?:{'|'.join(FOLDERS)})(?:/[\w-]+)+/?")
EXAMPLES = ("NAME", "FILE", "fr.po")
"""Parts of paths that stand for any."""


def _id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield numbered lines without blocks of code, rows of tables and pictures, which cannot be wrapped."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith(("|", "![")):
            yield number, line


@cache
def _tree() -> frozenset[str]:
    """Return every file and folder of the tree, by its whole path and by each end of it, such as `layout/layout.py`."""
    found = set()
    for top, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith((".", "__")) and name not in ("build", "dist")]
        for name in (*files, *folders):
            parts = (Path(top) / name).relative_to(ROOT).parts
            found |= {"/".join(parts[first:]) for first in range(len(parts))}
    return frozenset(found)


@cache
def _names(path: Path) -> frozenset[str]:
    """Return the functions, classes and methods of a module, methods as `Class.method`."""
    found = set()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, kinds):
            found.add(node.name)
            inner = node.body if isinstance(node, ast.ClassDef) else ()
            found |= {f"{node.name}.{each.name}" for each in inner if isinstance(each, kinds)}
    return frozenset(found)


@cache
def _commands() -> frozenset[str]:
    """Return the keys of `COMMANDS` in make.py."""
    for node in ast.parse((ROOT / "make.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and "COMMANDS" in ast.unparse(node):
            return frozenset(ast.literal_eval(key) for key in node.value.keys if key is not None)
    raise AssertionError("make.py has no COMMANDS")


def _lacks(file: str, name: str) -> bool:
    return not (ROOT / file).is_file() or name not in _names(ROOT / file)


def test_the_tour_names_functions() -> None:
    assert len(PLACE.findall((ROOT / "docs" / "tour.md").read_text(encoding="utf-8"))) > 50


@pytest.mark.parametrize("document", CHECKED, ids=_id)
def test_functions_that_are_named_exist(document: Path) -> None:
    """Places are written as `path:function` or `path:Class.method`."""
    places = PLACE.findall(document.read_text(encoding="utf-8"))
    assert [f"{file}:{name}" for file, name in places if _lacks(file, name)] == []


@pytest.mark.parametrize("document", CHECKED, ids=_id)
def test_relative_links_lead_somewhere(document: Path) -> None:
    links = [link for link in LINK.findall(document.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", CHECKED, ids=_id)
def test_files_and_folders_that_are_named_exist(document: Path) -> None:
    """A path begins at the root, or is the end of one, where the folder is clear."""
    codes = CODE.findall(document.read_text(encoding="utf-8"))
    words = {re.split(r"(?<=\.py):", word)[0].rstrip("/") for code in codes for word in code.split()}
    named = {word for word in words if FILE.fullmatch(word) or FOLDER.fullmatch(word)}
    assert sorted(word for word in named if word not in _tree() and not any(each in word for each in EXAMPLES)) == []


@pytest.mark.parametrize("document", CHECKED, ids=_id)
def test_commands_of_make_that_are_named_exist(document: Path) -> None:
    assert set(COMMAND.findall(document.read_text(encoding="utf-8"))) <= _commands()


@pytest.mark.parametrize("document", CHECKED, ids=_id)
def test_prose_is_wrapped(document: Path) -> None:
    lines = _prose(document.read_text(encoding="utf-8"))
    assert [number for number, line in lines if len(line) > MAX_LINE] == []


def _parsed(*patterns: str) -> Iterator[ast.AST]:
    """Yield every syntax node of the modules that match."""
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            yield from ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def _menu_commands() -> set[str]:
    """Return the names in `app/window/menus.py`; of an f-string the part before the first brace."""
    calls = [node for node in _parsed("app/window/menus.py") if isinstance(node, ast.Call) and node.args]
    names = [call.args[0] for call in calls if ast.unparse(call.func) in ("Command", "Switch")]
    return {ast.literal_eval(name.values[0] if isinstance(name, ast.JoinedStr) else name) for name in names}


def _cli_commands() -> set[str]:
    """Return the keys of `_COMMANDS` in `app/cli/arguments.py`."""
    for node in _parsed("app/cli/arguments.py"):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_COMMANDS":
            assert isinstance(node.value, ast.Dict)
            return {ast.literal_eval(key) for key in node.value.keys if key is not None}
    raise AssertionError("app/cli/arguments.py has no _COMMANDS")


def _dialogs() -> set[str]:
    """Return the classes of dialogs, without those that exist to be derived from."""
    classes = [node for node in _parsed("app/**/*.py", "widgets/**/*.py") if isinstance(node, ast.ClassDef)]
    bases = {node.name: {ast.unparse(base) for base in node.bases} for node in classes}
    named = {name for name, its in bases.items() if name.endswith("Dialog") and any(b.endswith("Dialog") for b in its)}
    return {name for name in named if not name.startswith("_") and not any(name in its for its in bases.values())}


def test_the_index_names_every_command_and_dialog() -> None:
    text = (ROOT / "docs" / "where.md").read_text(encoding="utf-8")
    words = {word for code in CODE.findall(text) for word in re.split(r"[\s/:.]+", code)}
    assert len(_menu_commands()) > 50
    assert len(_dialogs()) > 8
    assert sorted((_menu_commands() | _dialogs()) - words) == []
    # Words of paths, such as `app/cli/chat.py`, do not name a command.
    section = text.partition("\n## Command line\n")[2].partition("\n## ")[0]
    named = {row.split("|")[1].strip(" `") for row in section.splitlines() if row.startswith("| `")}
    assert sorted(_cli_commands() - named) == []


def test_the_readme_names_every_command() -> None:
    rows = [row for row in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if row.startswith("| `")]
    # Options in a cell may have an escaped bar.
    named = {code.split()[0] for row in rows for code in CODE.findall(re.split(r"(?<!\\)\|", row)[1])}
    assert sorted(_cli_commands() - named) == []


def test_the_page_of_benchmarks_names_every_benchmark() -> None:
    rows = [
        row for row in (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8").splitlines() if row[:1] == "|"
    ]
    named = [code.split()[0] for row in rows for code in CODE.findall(row.split("|")[1])[:1]]
    modules = [path.stem for path in (ROOT / "benchmarks").glob("*.py") if not path.stem.startswith("_")]
    assert sorted(named) == sorted(modules)
