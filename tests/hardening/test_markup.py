"""Untrusted texts in tool tips and tables are shown literally: Qt would render markup, and load its images."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from widgets.common.row_table import RowTable

ROOT = Path(__file__).parents[2]
PLAIN = {"plain_tool_tip"}
OURS = {
    ("widgets/common/roles.py", "tip or name"),
    ("widgets/library/library_view.py", "starter.address"),
    ("widgets/library/library_filters.py", "tip"),
    ("widgets/controls/context_editor.py", "name"),
    ("widgets/serve/serve_pane.py", "tr('Stop the server to change this setting.') if status.is_on else tip"),
    (
        "widgets/devices/device_card.py",
        "'' if used_bytes is None else tr('{used} used', used=format_bytes(used_bytes))",
    ),
}
"""Names of our buttons, texts and addresses that are in the program, and figures."""


def tool_tips() -> Iterator[tuple[str, int, ast.expr]]:
    for folder in ("app", "widgets"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".setToolTip") and node.args:
                    yield str(path.relative_to(ROOT)), node.lineno, node.args[-1]


def is_ours(value: ast.expr) -> bool:
    """Whether it is a text of the program without anything filled in, or goes through `plain_tool_tip`."""
    if isinstance(value, ast.IfExp):
        return is_ours(value.body) and is_ours(value.orelse)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        fills_in = any(not isinstance(keyword.value, ast.Constant) for keyword in value.keywords)
        return value.func.id in PLAIN or (value.func.id == "tr" and not fills_in)
    return isinstance(value, ast.Constant)


def test_no_tool_tip_takes_foreign_words_for_markup() -> None:
    found = [
        f"{path}:{line}: {ast.unparse(value)}"
        for path, line, value in tool_tips()
        if not is_ours(value) and (path, ast.unparse(value)) not in OURS
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("tips", [None, [["<img src='file:///etc/hostname'>"]]])
def test_what_another_machine_calls_itself_is_no_markup_in_a_table(qtbot: QtBot, tips: list[list[str]] | None) -> None:
    table = RowTable(["Name"], "Machines")
    qtbot.addWidget(table)
    table.show_rows([["<img src='file:///etc/hostname'>"]], tips)
    item = table.item(0, 0)
    assert item is not None
    assert item.text().startswith("<img")
    assert "&lt;img" in item.toolTip()
