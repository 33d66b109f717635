"""Export of conversations to files, and import of them in addition to the existing ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PySide6.QtWidgets import QFileDialog, QLineEdit, QMessageBox, QWidget
from pytestqt.qtbot import QtBot

from app.chats.archive import ChatArchive
from app.chats.transfer import FORMS, ChatTransfer, form_of
from app.notices import Notice
from app.settings import Settings
from app.window.chat.conversation_list_presenter import TransferPresenter, file_name
from app.wiring import Desk, make_desk
from engine.chat.tree import MessageTree
from tests.support.kept_conversation import CHAT, DATA, kept_tree


@pytest.fixture
def desk(qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    desk = make_desk(Settings(tmp_path / "settings.ini"))
    with qtbot.waitSignal(desk.archive.is_open_now):
        desk.archive.start()
    desk.archive.keep_file(DATA)
    desk.archive.save(CHAT, None)
    desk.archive.apply(CHAT.id, MessageTree(), kept_tree())
    yield desk
    desk.close()


def read(archive: ChatArchive, chat: str, wait: Callable[[Callable[[], bool]], None]) -> MessageTree:
    found: list[MessageTree] = []
    archive.read(chat, lambda _chat, tree: found.append(tree))
    wait(lambda: bool(found))
    return found[0]


def test_each_form_is_written_and_what_holds_branches_comes_back(desk: Desk, qtbot: QtBot, tmp_path: Path) -> None:
    notices: list[Notice] = []
    desk.notices.given.connect(notices.append)
    transfer = ChatTransfer(desk.archive, desk.notices)
    for form in FORMS:
        path = tmp_path / f"out{form.ending}"
        transfer.export((CHAT.id,), path, form)
        qtbot.waitUntil(path.exists)
        assert "What else?" in path.read_text("utf-8")
        assert ("A **quay**." in path.read_text("utf-8")) is form.holds_many
        if form.ending == ".html":
            continue
        before = {chat.id for chat in desk.archive.chats}
        transfer.import_file(path)
        qtbot.waitUntil(lambda before=before: len(desk.archive.chats) == len(before) + 1)  # type: ignore[misc]
        (new,) = {chat.id for chat in desk.archive.chats} - before
        back = read(desk.archive, new, qtbot.waitUntil)
        said = [message for message in back.messages.values() if message.role != "system"]
        assert back.path[-1].content.endswith("What else?")
        assert len(said) == (len(kept_tree().messages) if form.holds_many else len(kept_tree().path))
        # OpenAI's messages have the text of files among their own.
        last = back.path[-1]
        assert "quay" in (last.content if form.ending == ".openai.json" else last.attachments[0].text)
    (tmp_path / "bad.json").write_text("{}")
    transfer.import_file(tmp_path / "bad.json")
    qtbot.waitUntil(lambda: any("bad.json" in notice.text and notice.bad for notice in notices))
    transfer.export((CHAT.id,), tmp_path / "no" / "out.md", FORMS[0])
    qtbot.waitUntil(lambda: any("cannot be written" in notice.text for notice in notices))
    transfer.export(("nobody",), tmp_path / "none.md", FORMS[0])
    qtbot.waitUntil(lambda: any("no messages to export" in notice.text for notice in notices))
    assert len(desk.archive.chats) == 5


def test_the_ending_says_the_form_and_titles_make_names() -> None:
    markdown, page, ours, lines, openai = FORMS
    assert form_of(Path("a.HTML"), markdown.filter) == (Path("a.HTML"), page)
    assert form_of(Path("a"), ours.filter) == (Path("a.json"), ours)
    assert form_of(Path("v1.2"), "") == (Path("v1.2.md"), markdown)
    assert form_of(Path("a.md"), "", (ours, lines)) == (Path("a.md.json"), ours)
    assert form_of(Path("a.openai.json"), markdown.filter) == (Path("a.openai.json"), openai)
    assert file_name(CHAT.title) == "Ships a b b"
    assert file_name("../..") == "conversation"


def test_an_existing_file_is_replaced_only_after_a_question(desk: Desk, qtbot: QtBot, tmp_path: Path) -> None:
    window = QWidget()
    qtbot.addWidget(window)
    window.show()
    presenter = TransferPresenter(ChatTransfer(desk.archive, desk.notices), desk.archive, lambda: CHAT.id, window)
    notes = tmp_path / "notes.md"
    notes.write_text("my own notes")

    def export_to(name: str) -> QMessageBox:
        """Type `name` into the file dialog of an export, and return the question that follows."""
        presenter.export_current()
        dialog = window.findChildren(QFileDialog)[-1]
        dialog.setDirectory(str(tmp_path))
        edit = dialog.findChild(QLineEdit)
        assert isinstance(edit, QLineEdit)
        edit.setText(name)
        dialog.accept()
        return next(box for box in window.findChildren(QMessageBox) if box.isVisible())

    box = export_to("notes")
    assert box.text() == "notes.md already exists. Do you want to replace it?"
    box.button(QMessageBox.StandardButton.No).click()
    assert notes.read_text() == "my own notes"
    export_to("notes").button(QMessageBox.StandardButton.Yes).click()
    qtbot.waitUntil(lambda: "What else?" in notes.read_text())
