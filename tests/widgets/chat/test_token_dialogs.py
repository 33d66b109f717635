"""The tokens of an answer: the one at the cursor is shown with its alternatives."""

from __future__ import annotations

from pytestqt.qtbot import QtBot

from widgets.chat.token_dialogs import ChoicesDialog, PromptDialog, ShownChoice, ShownPrompt
from widgets.common.palette import LIGHT

CHOICES = (
    ShownChoice("The", 0.75, (("The", 0.75), ("A", 0.2), ("\n", 0.05))),
    ShownChoice(" \N{SNOWMAN}", 0.01234, ((" cat", 0.9), (" \u202edog", 0.05))),
    ShownChoice("\N{GRINNING FACE}", 1.0, ()),
    ShownChoice(".", 0.5, ((".", 0.5),)),
)


def shown_rows(dialog: ChoicesDialog) -> list[list[str]]:
    found = []
    for row in range(dialog.table.rowCount()):
        cells = [dialog.table.item(row, column) for column in range(2)]
        found.append(["" if cell is None else cell.text() for cell in cells])
    return found


def test_what_the_model_reads_names_what_else_there_was(qtbot: QtBot) -> None:
    dialog = PromptDialog()
    qtbot.addWidget(dialog)
    dialog.apply_palette(LIGHT)
    dialog.show_prompt(ShownPrompt((5, 6, 7), ("<s>", "The", "!"), choices={1: CHOICES[0]}))
    assert not dialog.table.isHidden()
    assert dialog.token_label.text() == "Token 1 · ID 5: “<s>”"
    assert dialog.table.rowCount() == 0
    dialog.text_edit.select(1)
    assert dialog.token_label.text() == "Token 2 · ID 6: “The”, 75.0 %"
    assert [dialog.table.item(row, 1).text() for row in range(3)] == ["75.0 %", "20.0 %", "5.00 %"]  # type: ignore[union-attr]
    dialog.show_prompt(ShownPrompt((5,), ("<s>",)))
    assert dialog.table.isHidden()


def test_the_token_at_the_cursor_is_named_with_its_alternatives(qtbot: QtBot) -> None:
    dialog = ChoicesDialog()
    qtbot.addWidget(dialog)
    dialog.apply_palette(LIGHT)
    dialog.show_choices(CHOICES)
    assert dialog.count_label.text() == "4 tokens"
    assert dialog.token_label.text() == "Token 1: “The”, 75.0 %"
    assert shown_rows(dialog) == [["“The”", "75.0 %"], ["“A”", "20.0 %"], ["“↵”", "5.00 %"]]
    dialog.text_edit.select(1)
    assert dialog.token_label.text().startswith("Token 2:")
    assert dialog.token_label.text().endswith("1.23 %")
    assert "\u202e" not in shown_rows(dialog)[1][0]
    dialog.text_edit.select(3)
    assert dialog.token_label.text() == "Token 4: “.”, 50.0 %"
    dialog.show_choices(())
    assert shown_rows(dialog) == []
    assert dialog.token_label.text() == ""
