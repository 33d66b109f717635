"""Conversations with the real engine and the real store: storage of what is shown, and actions on messages."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import msgspec
import psutil
import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QTextCursor
from PySide6.QtWidgets import QApplication, QLabel, QWidget
from pytestqt.qtbot import QtBot

from app.background import Background
from app.chats.archive import ChatArchive
from app.chats.attacher import Attacher
from app.chats.shown_messages import answer_details, answer_note, shown_message
from app.models.context_counter import ContextCounter
from app.notices import Notices
from app.paths import chats_path
from app.theme import Theme
from app.window.chat.chat_presenter import ChatPresenter
from app.window.chat.conversation_list_presenter import ConversationListPresenter
from app.window.chat.prompt_presenter import PromptPresenter
from app.window.status_line import StatusLine
from engine.base.values import replace
from engine.chat.asking import chat_messages
from engine.chat.context import ContextUse
from engine.chat.conversation import Conversation as Chat
from engine.chat.message import Message, MessageState
from engine.chat.store import ChatStore
from engine.chat.tree import changed, is_empty_failure, tree_of
from engine.runtime.protocol.requests import ImageFile, Tokenise
from tests.app.chats.bench import Bench
from widgets.chat.chat_pane import ChatPane
from widgets.chat.conversation_list import ConversationList
from widgets.chat.shown import ActionKind, MessageAction
from widgets.markdown.typesetter import Typesetter

SHORT: dict[str, object] = {"max_tokens": 12, "seed": 1}
BENCH = {"settings": SHORT}


def present(bench: Bench, pane: ChatPane) -> ChatPresenter:
    """Show the conversation of the current model in `pane`."""
    desk = bench.desk
    return ChatPresenter(
        desk.models.current,
        pane,
        models=desk.models,
        opener=desk.opener,
        loader=desk.loader,
        archive=desk.archive,
        background=desk.background,
        vocabulary=desk.vocabulary,
        open_file=lambda: None,
        status_line=StatusLine(pane),
        window=pane,
    )


def test_an_answer_is_kept_with_what_it_took_and_painted_when_it_is(bench: Bench) -> None:
    bench.load()
    answer = bench.say("hello there")
    assert answer.role == "assistant"
    assert answer.content
    assert (answer.state, answer.stop_reason, answer.model, answer.layout) == ("done", "length", "ada", "CPU 0–1")
    assert answer.settings == SHORT
    assert answer.timings is not None
    assert answer.timings.generated_tokens == 12
    assert answer.timings.first_token_seconds is not None
    assert answer.content.startswith("".join(bench.painted))
    assert bench.conversation.chat.title == "hello there"
    assert [chat.title for chat in bench.desk.archive.chats] == ["hello there"]
    assert bench.reopened(bench.conversation.chat.id) == bench.path


def test_how_tokens_were_chosen_is_kept_where_that_is_asked_for(bench: Bench) -> None:
    bench.load()
    conversation = bench.conversation
    conversation.change_chat(msgspec.structs.replace(conversation.chat, settings={**SHORT, "alternatives": 3}))
    answer = bench.say("hello")
    assert len(answer.choices) == SHORT["max_tokens"]
    assert all(len(choice.likeliest) == 3 for choice in answer.choices)
    assert bench.reopened(conversation.chat.id)[-1].choices == answer.choices


def test_what_takes_the_context_is_counted_once(bench: Bench) -> None:
    bench.load()
    loading, conversation = bench.desk.loading, bench.conversation
    conversation.change_chat(msgspec.structs.replace(conversation.chat, system="Be brief."))
    answer = bench.say("hello")
    counter = ContextCounter(loading)
    told: list[ContextUse] = []
    counter.counted.connect(told.append)
    # what was asked takes as much as the model said that it read
    question = msgspec.structs.replace(conversation.tree.path[0], id="x")
    chat = replace(conversation.counted_chat(), messages=chat_messages("Be brief.", (question,)))
    counter.count(chat)
    bench.wait(lambda: bool(told))
    assert answer.timings is not None
    assert told[0].used == answer.timings.prompt_tokens
    assert told[0].system == len("Be brief.")
    assert told[0].reserve == SHORT["max_tokens"]
    before = loading.ask(Tokenise(text="x"))
    counter.count(chat)
    bench.wait(lambda: len(told) == 2)
    assert told[1] == told[0]
    assert loading.ask(Tokenise(text="x")) == before + 1
    bench.wait(lambda: not loading.snapshot.requests)


def test_a_conversation_is_counted_after_another_one_could_not_be(bench: Bench) -> None:
    bench.load()
    bench.say("hello")
    counter = ContextCounter(bench.desk.loading)
    told: list[ContextUse] = []
    counter.counted.connect(told.append)
    chat = bench.conversation.counted_chat()
    # No projector is loaded, so no image can be counted.
    counter.count(replace(chat, media=(ImageFile(sha256="0" * 64, width_px=8, height_px=8),)))
    # It is asked now, and answered after the next call.
    counter._timer.flush()
    counter.count(chat)
    bench.wait(lambda: bool(told))
    assert told[0].used > 0


def test_versions_branches_edits_and_deletions(bench: Bench) -> None:
    bench.load()
    conversation = bench.conversation
    first = bench.say("one")
    conversation.regenerate(first.id)
    second = bench.answered()
    assert conversation.tree.versions(first.id) == (first.id, second.id)
    conversation.step_version(second.id, -1)
    assert bench.path[-1] == first
    bench.say("two")
    conversation.edit(bench.path[0].id, "one, in other words")
    bench.answered()
    assert [message.content for message in bench.path if message.role == "user"] == ["one, in other words"]
    conversation.select(first.id)
    assert [message.content for message in bench.path if message.role == "user"] == ["one", "two"]
    whole = bench.path
    before = conversation.delete_turn(whole[0].id)
    assert [message.content for message in bench.path if message.role == "user"] == ["two"]
    assert before is not None
    conversation.restore(before)
    assert bench.path == whole
    kept = conversation.chat.id
    conversation.branch(first.id)
    assert conversation.chat.id != kept
    assert [message.content for message in bench.path] == [whole[0].content, whole[1].content]
    assert bench.reopened(kept) == whole
    assert bench.reopened(conversation.chat.id) == bench.path


@pytest.mark.parametrize("kind", ["regenerate", "continue", "edit", "pin"])
def test_a_deletion_can_be_taken_back_until_something_else_becomes_of_the_messages(
    bench: Bench, qtbot: QtBot, kind: ActionKind
) -> None:
    bench.load()
    pane = ChatPane(bench.desk.typesetter)
    qtbot.addWidget(pane)
    presenter = present(bench, pane)
    tree = tree_of(
        [
            Message(id="q1", role="user", content="one"),
            Message(id="a1", role="assistant", content="eins", parent="q1"),
            Message(id="q2", role="user", content="two", parent="a1"),
            Message(id="old", role="assistant", content="zwei", parent="q2"),
            Message(id="new", role="assistant", content="zwo", parent="q2"),
        ],
        "new",
    )
    bench.conversation.open(Chat(id="c", title="Numbers", settings=SHORT), tree)
    pane.acted.emit(MessageAction("delete", "q1"))
    pane.acted.emit(MessageAction("older", "new"))
    pane.undo_requested.emit()
    assert [message.id for message in bench.path] == ["q1", "a1", "q2", "new"]
    pane.acted.emit(MessageAction("delete", "q1"))
    pane.acted.emit(MessageAction(kind, "q2" if kind == "edit" else "new", "three"))
    after = bench.answered()
    path, messages = bench.path, set(bench.conversation.tree.messages)
    pane.undo_requested.emit()
    assert bench.path == path
    assert after.id in bench.conversation.tree.messages
    assert set(bench.conversation.tree.messages) == messages
    assert presenter is not None


def test_an_answer_goes_on_where_it_ended(bench: Bench) -> None:
    bench.load()
    answer = bench.say("tell me")
    bench.conversation.go_on(answer.id)
    longer = bench.answered()
    assert longer.id == answer.id
    assert longer.content.startswith(answer.content)
    assert len(longer.content) > len(answer.content)
    assert bench.reopened(bench.conversation.chat.id) == bench.path


def test_a_thought_that_was_stopped_goes_on_between_its_own_marks_and_all_of_it_counts(bench: Bench) -> None:
    bench.load(n_ctx=1024)
    conversation = bench.conversation

    def expect(grammar: str) -> None:
        settings = {**SHORT, "max_tokens": 40, "grammar": grammar}
        template = "{{ messages[0].content }} [THINK]x[/THINK] "
        conversation.change_chat(msgspec.structs.replace(conversation.chat, settings=settings, template=template))

    expect('root ::= "[THINK]" [a-z]+')
    stopped = bench.say("hello")
    assert (stopped.content, stopped.stop_reason) == ("", "length")
    assert stopped.reasoning
    assert shown_message(conversation.tree, stopped, None).can_continue
    expect('root ::= [a-z]{5} "[/THINK]yes"')
    conversation.go_on(stopped.id)
    assert conversation.answering.answer is not None
    assert conversation.answering.answer.begun == f"[THINK]\n{stopped.reasoning}"
    whole = bench.answered()
    assert whole.content == "yes"
    assert whole.reasoning.startswith(stopped.reasoning)
    before, after = stopped.timings, whole.timings
    assert before is not None
    assert after is not None
    assert after.generated_tokens > before.generated_tokens == 40
    assert (after.prompt_tokens, after.first_token_seconds) == (before.prompt_tokens, before.first_token_seconds)
    assert after.generation_seconds is not None
    assert before.generation_seconds is not None
    assert after.generation_seconds > before.generation_seconds
    assert after.thinking_seconds is not None
    assert before.thinking_seconds is not None
    assert after.thinking_seconds > before.thinking_seconds
    assert bench.reopened(conversation.chat.id) == bench.path


def test_an_answer_that_comes_at_once_after_a_thought_says_how_long_was_thought(bench: Bench) -> None:
    bench.load(n_ctx=4096)
    conversation = bench.conversation
    settings = {**SHORT, "max_tokens": 2000, "grammar": 'root ::= "<think>" [a-z]+'}
    conversation.change_chat(msgspec.structs.replace(conversation.chat, settings=settings))
    conversation.send("hello")
    bench.wait(lambda: len(bench.path[-1].reasoning) > 20)
    parts: list[Message] = []
    conversation.answer_finished.connect(lambda _done: parts.append(bench.path[-1]))
    conversation.answering.answer_now()
    settings = {**SHORT, "grammar": 'root ::= "yes"'}
    conversation.change_chat(msgspec.structs.replace(conversation.chat, settings=settings))
    bench.wait(lambda: len(parts) == 2)
    thought, whole = (part.timings for part in parts)
    assert parts[-1].content == "yes"
    assert thought is not None
    assert whole is not None
    assert whole.thinking_seconds == thought.thinking_seconds
    assert thought.thinking_seconds is not None
    assert whole.generated_tokens > thought.generated_tokens > 20


def test_the_list_switches_and_an_answer_goes_on_in_its_own_conversation(bench: Bench) -> None:
    bench.load(n_ctx=4096)
    conversation, controller = bench.conversation, bench.desk.chat_controller
    bench.say("the first")
    first = conversation.chat.id
    controller.new()
    assert conversation.is_empty
    conversation.change_chat(msgspec.structs.replace(conversation.chat, settings={**SHORT, "max_tokens": 300}))
    answering: list[bool] = []

    def switch() -> None:
        """Go to the first conversation with the first token; a fast model ends before a piece is stored and shown."""
        if not answering:
            answering.append(conversation.is_answering)
            controller.open(first)

    bench.model.loading.bridge.token.connect(switch)
    conversation.send("the second")
    second = conversation.chat.id
    bench.wait(lambda: conversation.chat.id == first)
    assert answering == [True]
    assert [message.content for message in bench.path if message.role == "user"] == ["the first"]
    assert conversation.open_message is None
    bench.wait(lambda: not conversation.is_answering)
    answer = bench.reopened(second)[-1]
    assert answer.state == "done"
    assert answer.timings is not None
    assert answer.timings.generated_tokens > 1
    controller.open(second)
    bench.wait(lambda: conversation.chat.id == second)
    assert bench.path[-1] == answer


def test_a_loaded_model_takes_a_conversation_over_from_an_unloaded_one(bench: Bench) -> None:
    bench.load()
    loaded, notices = bench.model, []
    bench.desk.notices.given.connect(lambda notice: notices.append(notice.text))
    bench.say("hello")
    chat = bench.conversation.chat.id
    bench.desk.chat_controller.new()
    bench.desk.opener.open_again()
    bench.wait(lambda: bench.model is not loaded)
    copy = bench.model
    bench.desk.chat_controller.open(chat)
    bench.wait(lambda: copy.conversation.chat.id == chat)
    bench.desk.opener.show(loaded)
    bench.desk.chat_controller.open(chat)
    bench.wait(lambda: loaded.conversation.chat.id == chat)
    assert bench.model is loaded
    assert copy.conversation.chat.id != chat, "one conversation is written to from one place"
    bench.desk.opener.show(copy)
    bench.desk.chat_controller.open(chat)
    assert bench.model is loaded, "the unloaded one does not take it away"
    assert notices[-1] == "Switched to the model ada, because it has this conversation open."


def test_deleting_has_a_way_back_and_search_finds_the_branch(bench: Bench) -> None:
    bench.load()
    conversation, desk = bench.conversation, bench.desk
    bench.say("where is the needle")
    hidden = bench.path[0].id
    conversation.edit(hidden, "something else")
    bench.answered()
    chat = conversation.chat.id
    hits: list[object] = []
    desk.archive.search("needle", hits.extend)
    bench.wait(lambda: len(hits) == 2)
    desk.chat_controller.open(chat, hidden)
    assert bench.path[0].id == hidden
    desk.chat_controller.delete(chat)
    assert desk.archive.chats == ()
    assert conversation.is_empty
    desk.chat_controller.undo_delete()
    bench.wait(lambda: conversation.chat.id == chat)
    assert bench.path[0].id == hidden


def test_a_long_conversation_leaves_out_its_oldest_turns_and_says_so_once(bench: Bench) -> None:
    bench.load(n_ctx=256)
    answers = [bench.say(f"{number} " + "many words " * 6) for number in range(10)]
    assert {answer.state for answer in answers} == {"done"}
    notes = [answer.note for answer in answers]
    assert sum(map(bool, notes)) == 1
    assert all("context is full" in note for note in notes if note)
    assert len(bench.path) == 20
    said = notes.index(max(notes))
    bench.conversation.regenerate(answers[said].id)
    assert bench.answered().note == notes[said], "it stands with what is shown"
    bench.conversation.step_version(bench.path[-1].id, -1)
    bench.conversation.answering.overflow = "stop"
    bench.conversation.send("much too long " * 60)
    failed = bench.answered()
    assert failed.state == "failed"
    assert "256" in failed.note


def test_what_a_lost_engine_had_answered_is_kept_with_what_it_took(bench: Bench) -> None:
    before = {process.pid for process in psutil.Process().children()}
    bench.load(n_ctx=1 << 14)
    conversation = bench.conversation
    conversation.change_chat(msgspec.structs.replace(conversation.chat, settings={"seed": 1}))
    conversation.send("tell me of everything")
    bench.wait(lambda: len(bench.painted) > 2)
    for process in psutil.Process().children():
        if process.pid not in before:
            process.kill()
    bench.wait(lambda: not conversation.is_answering)
    answer = bench.path[-1]
    assert (answer.state, bool(answer.content)) == ("interrupted", True)
    assert answer.note.endswith("under Last load. The partial answer was kept.")
    assert answer.timings is not None
    assert answer.timings.generated_tokens >= 3
    assert answer.timings.first_token_seconds is not None
    note = answer_note(answer)
    assert note.startswith(answer.note)
    assert note.endswith(" tokens")
    assert answer_details(answer).endswith("CPU 0–1")


def test_a_question_that_failed_stays_and_is_asked_again_only_by_retry(bench: Bench) -> None:
    bench.load(n_ctx=256)
    conversation = bench.conversation
    bench.conversation.send("far too long " * 60)
    failed = bench.answered()
    assert failed.state == "failed"
    assert shown_message(conversation.tree, failed, None).is_error
    answer = bench.say("short")
    assert answer.state == "done"
    assert [message.content for message in bench.path if message.role == "user"] == ["far too long " * 60, "short"]
    assert all(len(conversation.tree.versions(message.id)) == 1 for message in bench.path), "only an edit makes one"
    assert answer.timings is not None
    assert answer.timings.prompt_tokens < 100, "a question without an answer is not part of the prompt"


def test_retry_takes_the_place_of_the_failed_answer(bench: Bench) -> None:
    bench.load(n_ctx=256)
    conversation = bench.conversation
    conversation.send("many words " * 40)
    failed = bench.answered()
    assert failed.state == "failed"
    bench.load(n_ctx=1024)
    conversation.regenerate(failed.id)
    answer = bench.answered()
    assert answer.state == "done"
    assert conversation.tree.versions(answer.id) == (answer.id,)
    assert bench.reopened(conversation.chat.id) == bench.path


def test_without_a_place_for_conversations_it_says_so_once_and_goes_on(
    qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    assert not chats_path().parent.is_dir()
    bench = Bench(qtbot, tmp_path)
    told: list[str] = []
    bench.desk.notices.given.connect(lambda notice: told.append(notice.text))
    bench.wait(lambda: any("not saved" in text for text in told))
    bench.load()
    assert bench.say("hello").content
    assert sum("not saved" in text for text in told) == 1
    bench.desk.close()


def test_a_file_goes_with_a_question_and_stays_with_it(bench: Bench, tmp_path: Path) -> None:
    attacher = Attacher(bench.desk.models.current, bench.desk.background)
    refused: list[str] = []
    attacher.refused.connect(refused.append)
    bench.load(n_ctx=1024)
    (tmp_path / "code.py").write_text("print('quay')\n" * 20)
    (tmp_path / "picture.bin").write_bytes(b"\0\1\2")
    attacher.add([tmp_path / "code.py", tmp_path / "picture.bin", tmp_path / "gone.txt"])
    assert attacher.is_reading
    bench.wait(lambda: not attacher.is_reading and attacher.tokens > 0)
    assert [file.name for file in attacher.files] == ["code.py"]
    assert any("not UTF-8 text" in text for text in refused)
    assert any("gone.txt" in text for text in refused)
    counted = attacher.tokens
    bench.conversation.send("What is it?", attacher.take())
    answer = bench.answered()
    assert not attacher.files
    assert answer.timings is not None
    assert answer.timings.prompt_tokens > counted
    (attachment,) = bench.path[0].attachments
    assert attachment.text.startswith("print('quay')")
    assert bench.reopened(bench.conversation.chat.id) == bench.path
    bench.conversation.edit(bench.path[0].id, "What else?")
    assert "quay" in bench.conversation.tree.path[0].attachments[0].text
    bench.answered()
    attacher.add([tmp_path / "code.py"])
    bench.wait(lambda: not attacher.is_reading)
    bench.desk.chat_controller.new()
    assert not attacher.files


def test_a_full_context_asks_first_and_leaves_out_no_pinned_turn(bench: Bench) -> None:
    bench.load(n_ctx=256)
    conversation = bench.conversation
    bench.desk.chat_controller.ask_when_full(True)
    asked: list[str] = []
    conversation.overflow_asked.connect(asked.append)

    def ask_until_full() -> None:
        for number in range(9):
            conversation.send(f"{number} " + "many words " * 6)
            bench.wait(lambda: not conversation.is_answering or bool(asked))
            if asked:
                return
        raise AssertionError("nobody asked")

    bench.say("0 keep this " + "many words " * 4)
    pinned = bench.path[0].id
    conversation.toggle_pin(pinned)
    assert bench.path[0].pinned
    ask_until_full()
    assert "context is full" in asked[0]
    conversation.answering.answer_overflow(False)
    assert bench.answered().state == "failed"
    assert asked.pop() == ""
    asked.clear()
    bench.conversation.send("many words " * 6)
    bench.wait(lambda: bool(asked))
    conversation.answering.answer_overflow(True)
    answer = bench.answered()
    assert (answer.state, "context is full" in answer.note) == ("done", True)
    assert pinned not in conversation.left_out
    assert conversation.left_out


def test_an_answer_goes_on_in_a_full_context_and_says_so(bench: Bench) -> None:
    bench.load(n_ctx=256)
    conversation = bench.conversation
    told: list[str] = []
    conversation.answering.notice_given.connect(lambda _run, sentence: told.append(sentence))
    letters = {"grammar": "root ::= [a-z]*", "max_tokens": 300, "temperature": 0.0, "full_context": "shift"}
    conversation.change_chat(msgspec.structs.replace(conversation.chat, settings=letters))
    answer = bench.say("Begin")
    assert (answer.state, answer.stop_reason) == ("done", "length")
    assert told == [answer.note]
    assert "not the tokens between them" in answer.note
    bench.settle()
    assert bench.files == [], "the state is not that of the conversation"
    again = bench.say("And now?")
    assert again.state == "done", "the next question reads the conversation as it is"


def test_a_conversation_is_written_with_its_own_template(bench: Bench) -> None:
    bench.load()
    chat = bench.conversation.chat
    words = "quay " * 40
    bench.conversation.change_chat(msgspec.structs.replace(chat, template=f"{words}{{{{ messages[0].content }}}}"))
    answer = bench.say("hello")
    assert answer.timings is not None
    long = answer.timings.prompt_tokens
    bench.conversation.change_chat(msgspec.structs.replace(chat, template="{{ messages[0].content }}"))
    bench.conversation.regenerate(answer.id)
    short = bench.answered().timings
    assert short is not None
    assert short.prompt_tokens < long - 40


def test_the_log_is_told_of_a_template_that_is_not_used_and_of_nothing_that_was_said(
    bench: Bench, qtbot: QtBot, caplog: pytest.LogCaptureFixture
) -> None:
    pane = ChatPane(Typesetter(lambda work: work(), lambda work: work()))
    qtbot.addWidget(pane)
    bench.load()
    present(bench, pane)
    chat = bench.conversation.chat
    template = "{{ raise_exception('roles: ' ~ messages[-1].content) }}"
    bench.conversation.change_chat(msgspec.structs.replace(chat, template=template))
    bench.say("the secret of the quay")
    assert any("the secret of the quay" in label.text() for label in pane.findChildren(QLabel))
    bench.say("another secret")
    assert "secret" not in caplog.text
    assert caplog.text.count("it refuses this conversation") == 1


def test_what_the_model_reads_is_shown_token_by_token(bench: Bench, qtbot: QtBot, qapp: QApplication) -> None:
    window = QWidget()
    qtbot.addWidget(window)
    presenter = PromptPresenter(bench.desk.models, Theme(qapp, "light"), window)
    presenter.show()
    dialog = presenter.dialog
    assert dialog is not None
    assert "conversation is empty" in dialog.note_label.text()
    bench.load()
    chat = bench.conversation.chat
    settings = {**chat.settings, "alternatives": 3, "grammar": "root ::= [a-z]+"}
    bench.conversation.change_chat(msgspec.structs.replace(chat, settings=settings))
    answer = bench.say("hello quay \u202e")
    assert answer.timings is not None
    bench.conversation.change_chat(msgspec.structs.replace(bench.conversation.chat, draft="and then?"))
    presenter.show()
    bench.wait(lambda: "512" in dialog.count_label.text())
    text = dialog.text_edit.toPlainText()
    assert "quay" in text
    assert "\u202e" not in text
    assert text.index("hello") < text.index("and then?")
    dialog.text_edit.moveCursor(QTextCursor.MoveOperation.End)
    count = int(dialog.count_label.text().split(" of ")[0])
    assert count > answer.timings.prompt_tokens
    assert dialog.token_label.text().startswith(f"Token {count} · ID ")
    told = []
    for place in range(count):
        dialog.text_edit.select(place)
        told += [dialog.table.rowCount()] if dialog.token_label.text().endswith("%") else []
    assert len(told) >= answer.timings.generated_tokens - 1
    assert set(told) == {3}
    bench.desk.unloader.unload_current()
    presenter.show()
    assert "load" in dialog.note_label.text().lower()
    dialog.close()


def test_what_the_command_line_began_is_listed_when_the_window_is_looked_at_again(bench: Bench, qtbot: QtBot) -> None:
    archive = bench.desk.archive
    bench.wait_until_open()
    window = QWidget()
    qtbot.addWidget(window)
    list_view, pane = ConversationList(window), ChatPane(Typesetter(lambda work: work(), lambda work: work()), window)
    presenter = ConversationListPresenter(
        archive, bench.desk.chat_controller, list_view, current_pane=lambda: pane, flush=pane.flush, window=window
    )
    chat = bench.conversation.chat
    bench.conversation.change_chat(msgspec.structs.replace(chat, title="here"))
    with closing(ChatStore(chats_path())) as other:
        other.save(Chat(id="elsewhere", title="in a terminal")).result()
    with qtbot.waitSignal(archive.changed):
        application = QApplication.instance()
        assert isinstance(application, QApplication)
        application.applicationStateChanged.emit(Qt.ApplicationState.ApplicationActive)
    assert {each.title for each in archive.chats} == {"here", "in a terminal"}
    assert presenter.parent() is window


def test_a_window_that_closes_while_its_conversations_are_opened_leaves_no_thread(qtbot: QtBot, tmp_path: Path) -> None:
    background = Background()
    archive = ChatArchive(tmp_path / "chats.sqlite3", background, Notices())
    archive.start()
    background.close()
    archive.close()
    names = {"chats", "Opening the conversations"}
    qtbot.waitUntil(lambda: names.isdisjoint(thread.name for thread in threading.enumerate()))


@pytest.mark.parametrize("state", ["writing", "interrupted"])
def test_an_answer_that_never_began_offers_retry(bench: Bench, state: MessageState) -> None:
    bench.load()
    answer = bench.say("hello")
    lost = msgspec.structs.replace(answer, state=state, content="", reasoning="", note="", timings=None, stop_reason="")
    tree = changed(bench.conversation.tree, lost)
    shown = shown_message(tree, lost, None)
    assert (shown.note, shown.is_error) == ("Layerdeck ended before an answer came.", True)
    assert not shown_message(tree, lost, lost.id).is_error, "it is being written"
    assert is_empty_failure(tree, lost.id), "Retry takes its place"
    begun = msgspec.structs.replace(lost, content="Wel")
    assert not shown_message(changed(tree, begun), begun, None).is_error
