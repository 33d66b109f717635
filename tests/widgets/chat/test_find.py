"""Search in a conversation: the drawn text, the number of matches, next and previous match."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from pytestqt.qtbot import QtBot

from tests.widgets.chat.conftest import exchange, long_conversation
from widgets.chat.chat_pane import ChatPane
from widgets.chat.message_search import Match, MessageSearch
from widgets.chat.shown import ShownMessage
from widgets.markdown.matches import drawn_lines, find_matches, match_pattern
from widgets.markdown.stream import parse_whole
from widgets.markdown.typesetter import Typesetter
from widgets.markdown.view import MarkdownView

RICH = """# The Quay

A **qu**ay is *not* a key; see `quay()` and [quay](https://example.com/quay).

- first quay \N{SHIP} and a quay
- second

| a | quay |
|---|---|
| quay | b |

```python
quay = "quay"
```

Inline $quay$ is a formula, and two
lines are one paragraph.
"""


def find(qtbot: QtBot, pane: ChatPane, text: str) -> None:
    pane.open_find()
    pane.find_bar.text_edit.setText(text)
    qtbot.waitUntil(lambda: pane._search.is_done)


def current(pane: ChatPane) -> Match | None:
    return pane.message_list._match


@pytest.mark.parametrize("query", ["quay", "QUAY", "not a key", "two lines", "quay()", "b", "formula"])
def test_a_drawn_document_has_the_matches_that_were_counted(typesetter: Typesetter, qtbot: QtBot, query: str) -> None:
    view = MarkdownView(typesetter)
    qtbot.addWidget(view)
    view.set_text(RICH)
    pattern = match_pattern(query)
    counted = sum(len(pattern.findall(line)) for line in drawn_lines(parse_whole(RICH)))
    found = list(find_matches(view.document(), pattern))
    assert len(found) == counted > 0
    assert all(pattern.fullmatch(cursor.selectedText().replace("\u2028", " ")) for cursor in found)


def test_markup_inside_a_word_is_no_part_of_it(typesetter: Typesetter, qtbot: QtBot) -> None:
    search = MessageSearch(typesetter)
    texts = ("in**side** out", "inside", "in side", "&auml;ther", "**")
    search.start("inside", [ShownMessage(str(place), "user", "You", text) for place, text in enumerate(texts)])
    qtbot.waitUntil(lambda: search.is_done)
    assert [match.index for match in search.matches] == [0, 1]
    search.start("\N{LATIN SMALL LETTER A WITH DIAERESIS}ther", search._messages)
    qtbot.waitUntil(lambda: search.is_done)
    assert [match.index for match in search.matches] == [3]
    search.start("**", search._messages)
    qtbot.waitUntil(lambda: search.is_done)
    assert [match.index for match in search.matches] == [4]


def test_matches_are_counted_highlighted_and_gone_through(qtbot: QtBot, pane: ChatPane) -> None:
    pane.show_messages([*exchange("Where is the quay?", "The quay is **by the quay**.", 1), *exchange(number=2)])
    find(qtbot, pane, "quay")
    bar = pane.find_bar
    assert bar.count_label.text() == "1 of 3"
    assert current(pane) == Match("q1", 0, 0)
    QTest.keyClick(bar.text_edit, Qt.Key.Key_Return)
    QTest.keyClick(bar.text_edit, Qt.Key.Key_Return)
    assert bar.count_label.text() == "3 of 3"
    assert current(pane) == Match("a1", 1, 1)
    QTest.keyClick(bar.text_edit, Qt.Key.Key_Return)
    assert bar.count_label.text() == "1 of 3"
    bar.previous_button.click()
    assert bar.count_label.text() == "3 of 3"
    bubble = pane.message_list.bubble("a1")
    assert bubble is not None
    assert len(bubble.view.extraSelections()) == 2
    find(qtbot, pane, "nowhere")
    assert bar.count_label.text() == "No matches"
    assert not bar.next_button.isEnabled()
    QTest.keyClick(bar.text_edit, Qt.Key.Key_Escape)
    assert not bar.isVisible()
    assert not bubble.view.extraSelections()
    assert pane.prompt_edit.hasFocus()


def test_the_way_to_a_match_leads_through_ten_thousand_messages(qtbot: QtBot, pane: ChatPane) -> None:
    messages = long_conversation(5000)
    far = "a line\n\n" * 200 + "here is the **needle** of it\n\n" + "a line\n\n" * 200
    messages[3001] = ShownMessage("far", "assistant", "Demo", far)
    pane.show_messages(messages)
    find(qtbot, pane, "the needle of")
    assert pane.find_bar.count_label.text() == "1 of 1"

    def is_in_sight() -> bool:
        bubble = pane.message_list.bubble("far")
        rect = None if bubble is None else bubble.view.match_rect(0)
        if bubble is None or rect is None:
            return False
        top = bubble.view.viewport().mapTo(pane.message_list.viewport(), rect.topLeft()).y()
        return 0 <= top <= pane.message_list.viewport().height() - rect.height()

    qtbot.waitUntil(is_in_sight)
    assert len(pane.message_list.bubbles()) < 30, "only those in sight are laid out"


def test_the_search_begins_where_the_reader_is_and_follows_new_messages(qtbot: QtBot, pane: ChatPane) -> None:
    messages = [message for number in range(30) for message in exchange("the word", "long " * 100, number)]
    pane.show_messages(messages)
    find(qtbot, pane, "the word")
    begun = current(pane)
    assert begun is not None
    assert begun.index > 40, "the reader was at the end"
    pane.show_messages([*messages, *exchange("the word again", number=99)])
    qtbot.waitUntil(lambda: pane._search.is_done)
    assert pane.find_bar.count_label.text().endswith(" of 31")
    assert current(pane) == begun
    pane.close_find()
    assert not pane.find_bar.isVisible()
