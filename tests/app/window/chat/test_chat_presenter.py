"""The chat of a model: its texts before it can answer, and the progress of reading a question."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
from PySide6.QtWidgets import QLineEdit, QPlainTextEdit
from pytestqt.qtbot import QtBot

from app.models.answering import StateStorage
from app.models.conversation import Conversation, Restored
from app.models.unloaded_counter import UnloadedCounter
from app.notices import Notice
from app.paths import presets_path
from app.window.chat.chat_settings_presenter import ChatSettingsPresenter
from app.wiring import WindowObjects
from engine.base.errors import WorkerCrashedError
from engine.base.units import GIB
from engine.base.values import replace
from engine.chat.answer import Append
from engine.chat.conversation import Conversation as Chat
from engine.chat.message import Message, Role
from engine.chat.presets import Preset, read_presets, update_presets
from engine.chat.tree import tree_of
from engine.devices.device import Rig, make_host
from engine.model.gguf.model_file import identify
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.messages import Counted, Rendered
from engine.runtime.protocol.requests import CountTokens, RenderTemplate, ToolCall
from engine.runtime.session.events import Answered, Reading
from engine.runtime.session.status import ModelStatus, Phase
from tests.support.models import write_tiny_llama
from tests.support.pictures import picture
from tests.support.windows import WindowOpener
from widgets.chat.chat_pane import ChatPane
from widgets.chat.settings_panel import SettingChange
from widgets.chat.shown import MessageAction

CONTEXT = ContextSettings(n_ctx=4096, n_batch=32, n_ubatch=32, threads=1, threads_batch=1)
QUESTION = "abc " * 700


@pytest.fixture
def reading(open_window: WindowOpener, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WindowObjects:
    """A window with a loaded model that reads a question in small batches, and with a database: text is shown once it
    is stored."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    opened = open_window()
    with qtbot.waitSignal(opened.desk.archive.is_open_now):
        opened.desk.archive.start()
    opened.desk.prober.close()
    path = write_tiny_llama(tmp_path / "tiny.gguf", n_embd=256, n_head=4, n_ff=768, n_ctx_train=4096)
    model = read_model(path)
    place = opened.desk.models.place(model, identify(model.paths))
    rig = Rig((), make_host("host", 16 * GIB, 8 * GIB))
    opened.desk.document.open(model, rig, Edit(single_device(model.n_layers, "CPU"), CONTEXT))
    opened.desk.loader.load()
    qtbot.waitUntil(lambda: place.loading.phase is Phase.READY)
    return opened


def shown(window: WindowObjects) -> Callable[[], bool]:
    return lambda: window.main.status_line.text().startswith("Processing the prompt: ")


def test_how_much_is_read_is_told_until_the_first_word(
    reading: WindowObjects, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.models.reading_pace.KNOWN_AFTER_S", 0.0)
    seen: list[str] = []
    in_chat: list[str] = []
    model = reading.desk.models.current
    chat = reading.views.current.chat

    def note() -> None:
        seen.append(reading.main.status_line.text())
        in_chat.append(chat.reading.label.text())

    model.loading.bridge.reading.connect(note)
    model.conversation.send(QUESTION)
    qtbot.waitUntil(lambda: bool(seen))
    qtbot.waitUntil(lambda: not shown(reading)())
    assert any(text.startswith("Processing the prompt: ") and " of " in text for text in seen)
    for texts in (seen, in_chat):
        assert any(" s left" in text for text in texts)
    model.loading.stop_answer()
    qtbot.waitUntil(lambda: model.loading.phase is Phase.READY)


def test_a_question_that_is_stopped_is_told_of_no_more(reading: WindowObjects, qtbot: QtBot) -> None:
    model = reading.desk.models.current
    model.conversation.send(QUESTION)
    qtbot.waitUntil(shown(reading))
    model.loading.stop_answer()
    qtbot.waitUntil(lambda: model.loading.phase is Phase.READY)
    assert not shown(reading)()


class EndlessRestore(StateStorage):
    """Restores no KV state and does not say so, as if it read a slow disk."""

    def before_answer(self, chat: str, then: Callable[[], None], *, goes_on: bool) -> None:
        pass


def test_the_menu_stops_a_question_that_waits_for_its_kv_state(reading: WindowObjects) -> None:
    conversation = reading.desk.models.current.conversation
    conversation.answering.states = EndlessRestore()
    stop = reading.actions["stop_answer"]
    conversation.send("hello")
    assert stop.isEnabled()
    stop.trigger()
    assert not conversation.is_answering
    assert conversation.tree.path[-1].note == "Stopped before the model began to answer."
    assert not stop.isEnabled()


def test_the_context_meter_follows_the_question_and_the_answer(reading: WindowObjects, qtbot: QtBot) -> None:
    model = reading.desk.models.current
    chat = reading.views.current.chat
    conversation = model.conversation
    shown: list[int] = []

    def note() -> None:
        if conversation.is_answering:
            shown.append(used(chat))

    conversation.change_chat(msgspec.structs.replace(conversation.chat, settings={"seed": 1}))
    model.loading.bridge.reading.connect(note)
    conversation.piece_kept.connect(lambda _piece: note())
    conversation.send(QUESTION)
    qtbot.waitUntil(lambda: shown[-1:] > [len(QUESTION) + 100] or not conversation.is_answering)
    model.loading.stop_answer()
    qtbot.waitUntil(lambda: not conversation.is_answering)
    answer = conversation.tree.path[-1]
    assert answer.timings is not None
    prompt_tokens = answer.timings.prompt_tokens
    assert shown == sorted(shown)
    assert len({tokens for tokens in shown if tokens < prompt_tokens}) > 1, "it follows the question"
    assert shown[-1] > prompt_tokens, "it follows the answer"
    counts: list[int] = []

    def counted() -> bool:
        """The raw prompt has as many tokens as the meter shows."""
        counts[:] = [used(chat)]
        return chat.context_meter._reserve > 0

    qtbot.waitUntil(counted)
    rendered: list[int] = []
    request = model.loading.ask(RenderTemplate(messages=conversation.prompt_messages(), tokenise=True))

    def take(event: Answered) -> None:
        if event.request == request and isinstance(event.answer, Rendered):
            rendered.append(event.answer.n_tokens)

    model.loading.bridge.answered.connect(take)
    qtbot.waitUntil(lambda: bool(rendered))
    assert counts == rendered


def test_a_stopped_answer_does_not_set_the_meter_back_to_its_question(reading: WindowObjects, qtbot: QtBot) -> None:
    """While an answer ends, the child still reports that it works, with the length of the prompt."""
    model, chat = reading.desk.models.current, reading.views.current.chat
    conversation, bridge = model.conversation, model.loading.bridge
    conversation.change_chat(msgspec.structs.replace(conversation.chat, settings={"seed": 1}))
    before: list[int] = []
    after: list[int] = []

    def stop() -> None:
        request = conversation.pending_request
        if before or request is None:
            return
        before.append(used(chat))
        model.loading.stop_answer()
        bridge.snapshot.emit(bridge.session.snapshot)
        bridge.reading.emit(Reading(request=request, read_tokens=5, prompt_tokens=5, cached_tokens=0))
        after.append(used(chat))

    bridge.token.connect(lambda _token: stop())
    conversation.send(QUESTION)
    qtbot.waitUntil(lambda: bool(after) and not conversation.is_answering)
    assert before[0] > len(QUESTION) // 2
    assert after == before


def open_long(conversation: Conversation, max_tokens: int) -> None:
    """Open a conversation that is longer than the context."""
    path: list[Message] = []
    for place in range(16):
        parent = path[-1].id if path else None
        role: Role = "assistant" if place % 2 else "user"
        path.append(Message(id=str(place), role=role, content="abc " * 300, parent=parent))
    settings: dict[str, object] = {"max_tokens": max_tokens, "seed": 1}
    conversation.open(Chat(id="c", title="Long", settings=settings), tree_of(path, path[-1].id))


def _has_more(seen: list[tuple[str, str]], before: int, conversation: Conversation) -> bool:
    return len(seen) > before or not conversation.is_answering


def test_a_piece_is_shown_once_if_more_messages_are_dropped(reading: WindowObjects, qtbot: QtBot) -> None:
    """New marks come with the whole text, to which the first piece was added a second time."""
    chat, conversation = reading.views.current.chat, reading.desk.models.current.conversation
    open_long(conversation, max_tokens=1000)
    painted: list[tuple[str, str]] = []

    def compare(piece: Append) -> None:
        painted.append((chat.message_list.messages[-1].text, conversation.tree.messages[piece.message].content))

    conversation.piece_kept.connect(compare)
    # The model may end an answer after a token, which comes with the end and as no piece.
    for question in ("abc", QUESTION):
        conversation.send(question)
        qtbot.waitUntil(partial(_has_more, painted, len(painted), conversation))
        conversation.answering.stop()
        qtbot.waitUntil(lambda: not conversation.is_answering)
    assert painted
    assert [shown for shown, _ in painted] == [kept for _, kept in painted]


def test_messages_that_a_full_context_drops_are_marked_at_once(reading: WindowObjects, qtbot: QtBot) -> None:
    model = reading.desk.models.current
    chat = reading.views.current.chat
    conversation = model.conversation
    open_long(model.conversation, max_tokens=1)
    assert not any(message.is_left_out for message in chat.message_list.messages)
    marked: list[bool] = []
    model.loading.bridge.token.connect(
        lambda _token: marked.append(any(message.is_left_out for message in chat.message_list.messages))
    )
    conversation.send("abc")
    qtbot.waitUntil(lambda: not conversation.is_answering)
    assert all(marked), "while the answer is written"
    dropped = [message.id for message in chat.message_list.messages if message.is_left_out]
    assert dropped
    assert dropped == [message.id for message in conversation.tree.path if message.id in conversation.left_out]
    # With a longer context they fit again.
    info = model.loading.snapshot.loaded
    assert info is not None
    model.loading.snapshot = replace(model.loading.snapshot, loaded=replace(info, n_ctx_seq=2 * info.n_ctx_seq))
    model.loading.loaded_changed.emit(model.loading.loaded)
    assert not conversation.left_out
    assert not any(message.is_left_out for message in chat.message_list.messages)


def used(chat: ChatPane) -> int:
    """Return the number that the context meter shows."""
    digits = "".join(letter for letter in chat.context_text.partition("/")[0] if letter.isdigit())
    return int(digits or 0)


def test_a_shift_that_the_loaded_cache_does_not_allow_is_not_taken(reading: WindowObjects) -> None:
    model, pane = reading.desk.models.current, reading.views.current.chat
    model.conversation.answering.stop()
    pane.heading.settings_button.click()
    panel = pane.settings_panel
    assert panel is not None
    info = model.loading.snapshot.loaded
    assert info is not None
    quantised = replace(info, context=msgspec.structs.replace(info.context, type_v="q8_0"))
    model.loading.snapshot = replace(model.loading.snapshot, loaded=quantised)
    panel.value_changed.emit(SettingChange("full_context", "shift"))
    assert "quantised KV cache (f16 and q8_0)" in panel.error_label.text()
    assert "full_context" not in model.conversation.chat.settings
    assert panel.fields["full_context"].text == "end"
    model.loading.snapshot = replace(model.loading.snapshot, loaded=info)
    panel.value_changed.emit(SettingChange("full_context", "shift"))
    assert panel.error_label.text() == ""
    assert model.conversation.chat.settings["full_context"] == "shift"


def test_a_value_that_is_being_typed_stays_until_it_is_committed(open_window: WindowOpener) -> None:
    window = open_window()
    conversation, pane = window.desk.models.current.conversation, window.views.current.chat
    pane.heading.settings_button.click()
    panel = pane.settings_panel
    assert panel is not None
    grammar, temperature, top_k = (panel.fields[key] for key in ("grammar", "temperature", "top_k"))
    assert isinstance(grammar.control, QPlainTextEdit)
    assert isinstance(temperature.control, QLineEdit)
    grammar.control.setPlainText('root ::= "yes')
    temperature.control.setText("0.")
    # Another value is committed, and the title changes.
    panel.value_changed.emit(SettingChange("top_k", "7"))
    conversation.change_chat(msgspec.structs.replace(conversation.chat, title="Fruit", draft="Why?"))
    assert (grammar.text, temperature.text, top_k.text) == ('root ::= "yes', "0.", "7")
    assert conversation.chat.settings == {"top_k": 7}
    grammar.control.setPlainText('root ::= "yes"')
    temperature.control.setText("0.25")
    before = conversation.chat.id
    window.desk.chat_controller.new()
    assert conversation.chat.id != before
    stored = window.desk.archive.chat(before)
    assert stored is not None
    assert stored.settings == {"top_k": 7, "grammar": 'root ::= "yes"', "temperature": 0.25}
    # In another conversation typed text does not stay, nor if the value is reset.
    temperature.control.setText("0.5")
    conversation.begin(Chat(id="d", settings={"temperature": 0.75}))
    assert temperature.text == "0.75"
    temperature.control.setText("0.5")
    panel._resets["temperature"].click()
    assert temperature.text == "0.8"
    assert conversation.chat.settings == {}


def test_a_preset_takes_the_prompt_of_the_conversation_once_it_is_stored(
    open_window: WindowOpener, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    window = open_window()
    conversation, store = window.desk.models.current.conversation, window.desk.presets
    (presenter,) = window.main.findChildren(ChatSettingsPresenter)
    conversation.begin(Chat(id="c", system="Be brief.", settings={"top_k": 7, "seed": None}))
    # Another window has stored a preset since this one read the file.
    update_presets(presets_path(), lambda presets: presets.update({"other": Preset(name="other")}))
    presenter._save("Brief")
    # What changes before the preset is stored stays with the conversation.
    conversation.change_chat(msgspec.structs.replace(conversation.chat, settings={"top_k": 7, "min_p": 0.5}))
    assert conversation.chat.system == "Be brief."
    qtbot.waitUntil(lambda: conversation.chat.preset == "Brief")
    brief = Preset(name="Brief", system="Be brief.", settings={"top_k": 7, "seed": None})
    assert read_presets(presets_path()) == (Preset(name="other"), brief)
    assert (conversation.chat.system, conversation.chat.settings) == ("", {"min_p": 0.5})
    assert set(store.presets) == {"other", "Brief"}
    # A preset that cannot be stored leaves the conversation as it is.
    presets_path().write_text("{}")
    conversation.begin(Chat(id="d", system="Be kind."))
    presenter._save("Kind")
    qtbot.waitUntil(lambda: "presets.json" in window.main.status_line.text())
    assert conversation.chat.system == "Be kind."
    assert set(store.presets) == {"other", "Brief"}


def test_a_remark_on_a_restored_state_goes_with_the_next_question(reading: WindowObjects, qtbot: QtBot) -> None:
    model = reading.desk.models.current
    chat = reading.views.current.chat
    model.conversation.emit_restored(model.conversation.chat.id, Restored(512))
    assert chat.status_text == "Saved KV state restored: 512 tokens."
    chat.prompt_edit.setPlainText("abc")
    chat.send_button.click()
    assert chat.status_text == "", "which may have to be read as a whole"
    model.loading.stop_answer()
    qtbot.waitUntil(lambda: model.loading.phase is Phase.READY)


def test_without_a_model_the_banner_opens_one_and_a_remark_goes_with_its_conversation(
    open_window: WindowOpener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    asked: list[bool] = []
    monkeypatch.setattr("app.window.dialog_actions.DialogActions.open_model", lambda _questions: asked.append(True))
    window = open_window()
    pane = window.views.current.chat
    assert pane.empty.title_label.text() == "No model is open"
    pane.start_banner.button.click()
    assert asked
    pane.show_remark("Saved KV state restored: 927 tokens.")
    window.views.left.conversation.begin()
    pane.set_status(ModelStatus("Demo", Phase.READY))
    assert pane.status_text == ""


def test_the_meter_counts_a_draft_and_a_file_before_anything_is_loaded(
    open_window: WindowOpener, qtbot: QtBot, tmp_path: Path
) -> None:
    window = open_window()
    desk, meter = window.desk, window.views.current.chat.context_meter
    with qtbot.waitSignal(desk.opener.model_changed):
        desk.opener.open(write_tiny_llama(tmp_path / "ada.gguf", n_layers=2))
    model, pane = desk.models.current, window.views.current.chat
    conversation = model.conversation
    n_ctx = model.planned_context
    assert n_ctx
    assert meter.text == ""
    assert desk.vocabulary.pid is None, "nothing is counted before there is something to count"

    def used() -> int:
        words, _, total = meter.text.replace("\N{NARROW NO-BREAK SPACE}", "").replace(" ", "").partition("/")
        assert not total or int(total) == n_ctx
        return int(words) if words.isdecimal() else 0

    pane.prompt_edit.setPlainText("What is a quay?")
    qtbot.waitUntil(lambda: used() > 0)
    draft = used()
    pane.prompt_edit.setPlainText("What is a quay? " + "abc " * 20)
    qtbot.waitUntil(lambda: used() == draft + 81)  # A token for each letter of the tiny model.
    (tmp_path / "code.py").write_text("print('quay')\n" * 9)
    pane.files_given.emit([tmp_path / "code.py"])
    qtbot.waitUntil(lambda: used() > draft + 81 + 100)
    assert "attachments" in meter.toolTip()
    assert model.loading.phase is Phase.STOPPED
    # An image has no tokens that the vocabulary alone could tell.
    assert "Images" not in meter.toolTip()
    (tmp_path / "quay.png").write_bytes(picture(1, (32, 32)))
    pane.files_given.emit([tmp_path / "quay.png"])
    qtbot.waitUntil(lambda: "The tokens of images and sounds are counted when the model is loaded." in meter.toolTip())
    pane.file_removed.emit(window.views.current.chat.attachments.files[1].id)
    qtbot.waitUntil(lambda: "Images" not in meter.toolTip())
    # Another context length has another total, and nothing is counted for nothing.
    conversation.change_chat(msgspec.structs.replace(conversation.chat, draft=""))
    pane.file_removed.emit(window.views.current.chat.attachments.files[0].id)
    qtbot.waitUntil(lambda: meter.text == "")


def test_a_vocabulary_that_could_not_be_read_is_tried_again_for_another_draft(
    open_window: WindowOpener, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = open_window()
    desk = window.desk
    with qtbot.waitSignal(desk.opener.model_changed):
        desk.opener.open(write_tiny_llama(tmp_path / "ada.gguf", n_layers=2))
    conversation = desk.models.current.conversation
    asked: list[Path] = []

    def count(path: Path, _request: CountTokens) -> Counted:
        asked.append(path)
        raise WorkerCrashedError("The child was killed.")

    monkeypatch.setattr(desk.vocabulary, "count", count)
    conversation.change_chat(msgspec.structs.replace(conversation.chat, draft="one"))
    (counter,) = window.main.findChildren(UnloadedCounter)
    qtbot.waitUntil(lambda: len(asked) == 1 and not counter._latest.is_running)
    conversation.change_chat(msgspec.structs.replace(conversation.chat, draft=""))
    conversation.change_chat(msgspec.structs.replace(conversation.chat, draft="two"))
    qtbot.waitUntil(lambda: len(asked) == 2)


def test_retry_without_a_loaded_model_says_what_is_missing(open_window: WindowOpener) -> None:
    window = open_window()
    pane = window.views.current.chat
    question = Message(id="q", role="user", content="Why?")
    failed = Message(id="a", role="assistant", content="", parent="q", state="failed", note="It is gone.")
    window.desk.models.current.conversation.open(Chat(id="c", title="Why?"), tree_of((question, failed), "a"))
    pane.acted.emit(MessageAction("regenerate", "a"))
    assert window.main.status_line.text() == "Load the model first."
    pane.prompt_edit.setPlainText("the next question")
    bubble = pane.message_list.bubble("q")
    assert bubble is not None
    bubble.start_editing()
    assert bubble.edit_box is not None
    bubble.edit_box.edit.setPlainText("Why, then?")
    bubble.edit_box.send_button.click()
    assert bubble.edit_box is not None
    assert bubble.edit_box.edit.toPlainText() == "Why, then?", "it is not lost"
    assert pane.prompt_edit.toPlainText() == "the next question"


TOOLS = '[{"type": "function", "function": {"name": "look", "parameters": {}}}]'


def test_faulty_tools_are_told_and_nothing_is_sent_with_them(reading: WindowObjects) -> None:
    model, pane = reading.desk.models.current, reading.views.current.chat
    pane.heading.settings_button.click()
    panel = pane.settings_panel
    assert panel is not None
    field = panel.tools_field
    field.text_edit.setPlainText('[{"type"')
    field.flush()
    assert field.error_label.text().startswith("The tools are not JSON: ")
    assert model.conversation.chat.tools == '[{"type"', "what was typed is kept"
    pane.heading.settings_button.click()
    pane.prompt_edit.setPlainText("Where?")
    pane.send_button.click()
    assert not model.conversation.is_answering
    assert pane.prompt_edit.toPlainText() == "Where?"
    refusal = "Edit the tools in the settings of this conversation."
    assert refusal in reading.main.status_line.text()
    question, answer = (
        Message(id="q", role="user", content="Where?"),
        Message(id="a", role="assistant", content="Here."),
    )
    called = msgspec.structs.replace(answer, parent="q", calls=(ToolCall("c1", "look", "{}"),))
    model.conversation.open(Chat(id="c", tools='[{"type"'), tree_of((question, called), "a"))
    for action in (
        MessageAction("edit", "q", "Who?"),
        MessageAction("regenerate", "a"),
        MessageAction("continue", "a"),
        MessageAction("answer", "a"),
        MessageAction("result", "a", "12 degrees", "c1"),
    ):
        reading.main.status_line.show_notice(Notice(""))
        pane.acted.emit(action)
        assert refusal in reading.main.status_line.text(), action.kind
        assert not model.conversation.is_answering, action.kind
    assert set(model.conversation.tree.messages) == {"q", "a"}
    field.text_edit.setPlainText(TOOLS)
    field.flush()
    assert field.error_label.isHidden()
    assert field.note_label.text().startswith("The chat template of this model does not support tools")
    assert [tool["function"]["name"] for tool in model.conversation.tools.tools] == ["look"]


def test_a_question_takes_along_what_was_just_typed_as_a_result(reading: WindowObjects, qtbot: QtBot) -> None:
    model, pane = reading.desk.models.current, reading.views.current.chat
    conversation = model.conversation
    called = Message(id="a", role="assistant", content="", parent="q", calls=(ToolCall("c1", "look", "{}"),))
    conversation.open(Chat(id="c", tools=TOOLS), tree_of((Message(id="q", role="user", content="Where?"), called), "a"))
    bubble = pane.message_list.bubble("a")
    assert bubble is not None
    result = bubble.calls.blocks[0].result
    assert result is not None
    result.edit.setPlainText("12 degrees")
    pane.prompt_edit.setPlainText("And there?")
    pane.send_button.click()
    assert [(each.role, each.content) for each in conversation.tree.path[2:4]] == [
        ("tool", "12 degrees"),
        ("user", "And there?"),
    ]
    conversation.answering.stop()
    qtbot.waitUntil(lambda: model.loading.phase is Phase.READY and not conversation.is_answering)


def test_a_result_is_sent_from_its_message(reading: WindowObjects, qtbot: QtBot) -> None:
    model, pane = reading.desk.models.current, reading.views.current.chat
    conversation = model.conversation
    call = ToolCall("c1", "look", '{"town": "Bonn"}')
    called = Message(id="a", role="assistant", content="", parent="q", calls=(call,))
    conversation.open(Chat(id="c", tools=TOOLS), tree_of((Message(id="q", role="user", content="Where?"), called), "a"))
    bubble = pane.message_list.bubble("a")
    assert bubble is not None
    result = bubble.calls.blocks[0].result
    assert result is not None
    result.edit.setPlainText("12 degrees")
    result.flush()
    assert conversation.chat.results == {"a/c1": "12 degrees"}
    result.send_button.click()
    assert conversation.is_answering
    assert [(each.role, each.content) for each in conversation.tree.path[2:3]] == [("tool", "12 degrees")]
    assert conversation.chat.results == {}
    qtbot.waitUntil(lambda: pane.messages[2] == ("tool", "```\n12 degrees\n```"))
    conversation.answering.stop()
    qtbot.waitUntil(lambda: model.loading.phase is Phase.READY and not conversation.is_answering)
    # Without a loaded model the text stays.
    conversation.open(Chat(id="d"), tree_of((Message(id="q", role="user", content="Where?"), called), "a"))
    model.loading.unload()
    qtbot.waitUntil(lambda: not model.loading.has_child)
    pane.acted.emit(MessageAction("type_result", "a", "8 degrees", "c1"))
    pane.acted.emit(MessageAction("result", "a", "8 degrees", "c1"))
    assert conversation.chat.results == {"a/c1": "8 degrees"}
    assert len(conversation.tree.messages) == 2
    assert reading.main.status_line.text() == "Load the model first."
