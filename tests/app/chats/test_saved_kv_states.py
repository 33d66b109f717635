"""Saved KV states of conversations: they survive a restart, another layout, and other conversations in their slot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.background import Background
from app.chats.saved_kv_states import KvStateRepository
from app.cli.chat import saved_states_quota
from app.notices import Notice, Notices
from app.settings import Settings
from app.window.saves_at_close import wait_for_saves
from engine.base.errors import ChatError
from engine.chat.message import Message
from engine.chat.saved_kv_states import KV_STATES_QUOTA_BYTES, KvStateKey, SavedKvStates
from engine.devices.device import CPU_ID
from engine.planning.fit.loaded_models import UNTIL_UNLOADED_S
from engine.runtime.protocol.requests import AnyModelRequest, SaveSequence
from engine.runtime.session.events import Answered
from engine.runtime.session.status import Phase
from tests.app.chats.bench import Bench
from widgets.library.recent_models import RecentModel

N_LAYERS = 4
MIXED = ("RPC0", CPU_ID, CPU_ID, "RPC0")
LONG_WORDS = "Tell me of everything that the old harbour had seen in its two hundred years by the sea. " * 5
BENCH = {"n_layers": N_LAYERS}


def read_tokens(answer: Message) -> int:
    assert answer.timings is not None
    return answer.timings.prompt_tokens - answer.timings.cached_tokens


def test_layers_move_in_the_middle_of_a_conversation_and_nothing_is_read_again(bench: Bench) -> None:
    bench.start_lab()
    bench.load(n_ctx=2048)
    first = bench.say(LONG_WORDS)
    assert first.timings is not None
    asked = first.timings.prompt_tokens
    assert read_tokens(first) == asked
    # at once, not in a pause: it is saved because the model goes
    bench.load(*MIXED, n_ctx=2048)
    assert [each.tokens > asked for each in bench.restored] == [True]
    second = bench.say("And then?")
    assert second.state == "done"
    assert read_tokens(second) < 40
    assert second.timings is not None
    assert second.timings.cached_tokens >= asked


def test_a_restart_and_an_unload_cost_no_reading(bench: Bench) -> None:
    bench.load(n_ctx=2048)
    bench.say(LONG_WORDS)
    bench.settle()
    assert len(bench.files) == 1
    bench.restart()
    bench.wait(lambda: not bench.conversation.is_empty)
    bench.load(n_ctx=2048)
    assert [each.tokens > 100 for each in bench.restored] == [True]
    assert read_tokens(bench.say("Who said so?")) < 40
    bench.desk.unloader.unload_current()
    bench.wait(lambda: not bench.model.loading.has_child)
    bench.load(n_ctx=2048)
    assert read_tokens(bench.say("Where was that?")) < 40


def test_what_was_asked_before_the_state_was_back_waits_for_it(bench: Bench) -> None:
    bench.load(n_ctx=2048)
    bench.say(LONG_WORDS)
    bench.desk.unloader.unload_current()
    bench.wait(lambda: not bench.model.loading.has_child)
    bench.desk.loader.load()
    bench.wait(lambda: bench.model.loading.phase is Phase.READY)
    assert read_tokens(bench.say("And then?")) < 40


def test_a_conversation_comes_back_after_another_one_took_its_place(bench: Bench) -> None:
    bench.load(n_ctx=2048)
    bench.say(LONG_WORDS)
    first = bench.conversation.chat.id
    bench.desk.chat_controller.new()
    bench.say(f"Something else. {LONG_WORDS}")
    bench.open_chat(first)
    assert read_tokens(bench.say("And then?")) < 40
    bench.settle()
    assert len(bench.files) == 2


class SlowSaves:
    """Lets the end of each save arrive when the test wants it, as from a slow disk. `found`: searched conversations."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self._saver, self._held, self._is_open = bench.saver, list[Answered](), False
        self.found: list[str] = []
        search = KvStateRepository.find

        def find(
            repository: KvStateRepository, chat: str, key: KvStateKey, then: Callable[[Path | None], None]
        ) -> None:
            self.found.append(chat)
            search(repository, chat, key, then)

        monkeypatch.setattr(KvStateRepository, "find", find)
        answered = bench.model.loading.bridge.answered
        answered.disconnect(bench.saver._on_answered)
        answered.connect(self._deliver)

    @property
    def is_waiting(self) -> bool:
        return bool(self._held)

    def end(self) -> None:
        """Deliver the end of each save; later ones arrive at once."""
        self._is_open = True
        for event in self._held:
            self._saver._on_answered(event)

    def _deliver(self, event: Answered) -> None:
        if event.request in self._saver._saving and not self._is_open:
            self._held.append(event)
        else:
            self._saver._on_answered(event)


def ask_again_in_the_first_of_two(bench: Bench) -> tuple[str, str]:
    """Begin two conversations, and send a question in the first one again; return the ids of both."""
    bench.say(LONG_WORDS)
    first = bench.conversation.chat.id
    bench.desk.chat_controller.new()
    bench.say("Something else.")
    second = bench.conversation.chat.id
    bench.open_chat(first)
    bench.conversation.send("And then?")
    return first, second


def test_a_conversation_that_is_opened_again_waits_for_the_end_of_its_save(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.load(n_ctx=2048)
    saves = SlowSaves(bench, monkeypatch)
    first, _ = ask_again_in_the_first_of_two(bench)
    bench.wait(lambda: saves.is_waiting)
    assert saves.found == []
    saves.end()
    assert read_tokens(bench.answered()) < 40
    assert saves.found == [first]


def test_a_question_that_is_stopped_during_a_save_holds_up_no_other_conversation(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.load(n_ctx=2048)
    saves = SlowSaves(bench, monkeypatch)
    first, second = ask_again_in_the_first_of_two(bench)
    bench.conversation.answering.stop()
    bench.open_chat(second)
    assert bench.say("And then?").state == "done"
    saves.end()
    bench.open_chat(first)
    assert read_tokens(bench.say("And after that?")) < 40


def test_a_question_that_waits_for_the_end_of_a_save_counts_as_an_answer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.load(n_ctx=2048)
    saves = SlowSaves(bench, monkeypatch)
    ask_again_in_the_first_of_two(bench)
    bench.wait(lambda: saves.is_waiting)
    assert bench.model.loading.phase is Phase.ANSWERING
    bench.model.keep_alive(1e-9)
    bench.desk.models.unload_expired()
    assert bench.model.loading.loaded is not None
    bench.model.keep_alive(UNTIL_UNLOADED_S)
    bench.conversation.answering.stop()
    bench.wait(lambda: bench.model.loading.phase is Phase.READY)
    saves.end()


def test_what_was_left_out_stays_so_after_a_restart_and_another_conversation(bench: Bench) -> None:
    bench.load(n_ctx=2048)
    answers = [bench.say(LONG_WORDS) for _ in range(5)]
    assert [bool(answer.note) for answer in answers] == [False] * 4 + [True]
    chat, left_out = bench.conversation.chat.id, bench.conversation.left_out
    bench.settle()
    bench.restart()
    bench.wait(lambda: not bench.conversation.is_empty)
    bench.load(n_ctx=2048)
    assert bench.conversation.left_out == left_out
    after_restart = bench.say("Who said so?")
    bench.desk.chat_controller.new()
    bench.say(LONG_WORDS)
    bench.open_chat(chat)
    after_another = bench.say("And then?")
    for answer in (after_restart, after_another):
        assert read_tokens(answer) < 40
        assert not answer.note
    assert bench.conversation.left_out == left_out


def test_a_question_is_answered_while_a_state_is_written(bench: Bench) -> None:
    bench.load(n_ctx=2048)
    bench.say(LONG_WORDS)
    bench.saver.save_now()
    assert bench.model.loading.phase is Phase.READY
    assert bench.say("And then?").state == "done"
    bench.wait(lambda: bool(bench.files))


def test_other_cache_types_are_another_state_and_a_damaged_one_is_read_again(bench: Bench) -> None:
    bench.load(n_ctx=2048)
    bench.say(LONG_WORDS)
    bench.settle()
    (path,) = bench.files
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    bench.desk.unloader.unload_current()
    bench.wait(lambda: not bench.model.loading.has_child)
    bench.load(n_ctx=2304)
    assert [each.tokens for each in bench.restored] == [0]
    assert bench.restored[0].refusal.startswith("The saved KV state of “Tell me of everything")
    assert "is damaged" in bench.restored[0].refusal
    assert path.name not in bench.restored[0].refusal
    bench.wait(lambda: not bench.files)
    answer = bench.say("And then?")
    assert (answer.state, read_tokens(answer) > 100) == ("done", True)


def test_nothing_is_kept_of_what_was_deleted_and_the_quota_holds(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.load(n_ctx=2048)
    bench.say(LONG_WORDS)
    bench.settle()
    bench.wait(lambda: bool(bench.files))
    bench.desk.chat_controller.delete(bench.conversation.chat.id)
    bench.wait(lambda: not bench.files)
    bench.say(f"Another one. {LONG_WORDS}")
    bench.settle()
    said: list[str] = []
    bench.desk.notices.given.connect(lambda notice: said.append(notice.text))
    done: list[bool] = []
    bench.desk.states.set_quota(1, lambda: done.append(True))
    bench.wait(lambda: bool(done))
    assert bench.files == []
    assert Settings(bench.folder / "settings.ini").saved_states_bytes == 1
    written: list[Path] = []
    monkeypatch.setattr(bench.desk.states, "keep", lambda _chat, path: written.append(path))
    bench.say(LONG_WORDS)
    bench.settle()
    bench.wait(lambda: any("larger than the limit" in text for text in said))
    assert (bench.files, written) == ([], [])


def test_a_search_that_fails_answers_that_there_is_no_state(
    qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation waits for the answer before it goes on."""

    def fail(_states: SavedKvStates, _conversation: str, _key: KvStateKey) -> Path | None:
        raise ChatError("The folder is gone.")

    monkeypatch.setattr(SavedKvStates, "find", fail)
    notices = Notices()
    said: list[Notice] = []
    notices.given.connect(said.append)
    background = Background()
    repository = KvStateRepository(tmp_path, Settings(tmp_path / "settings.ini"), background, notices)
    found: list[Path | None] = []
    repository.find("c", KvStateKey("m", ("f16", "f16", "False"), 1), found.append)
    qtbot.waitUntil(lambda: bool(found))
    assert found == [None]
    assert ["gone" in notice.text for notice in said] == [True]


@pytest.mark.parametrize(
    "bench", [{"n_layers": 4, "settings": {"max_tokens": 3000, "seed": 1, "temperature": 0.0}}], indirect=True
)
def test_an_answer_that_a_close_stops_is_saved_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.load(n_ctx=8192)
    loading, asked = bench.model.loading, list[SaveSequence]()
    ask = loading.ask

    def noting_ask(request: AnyModelRequest) -> int:
        if isinstance(request, SaveSequence):
            asked.append(request)
        return ask(request)

    monkeypatch.setattr(loading, "ask", noting_ask)
    bench.conversation.send(LONG_WORDS, ())
    bench.wait(lambda: bool(bench.painted))
    wait_for_saves(bench.desk.models)
    # As at the end of the children, which follows.
    loading.prepare_close()
    assert len(asked) == 1


@pytest.mark.parametrize("quota_bytes", [0, 5 << 30, None])
def test_the_command_line_reads_the_limit_that_was_chosen_in_the_window(
    tmp_path: Path, quota_bytes: int | None
) -> None:
    settings = Settings(tmp_path / "layerdeck.ini")
    settings.saved_states_bytes = quota_bytes
    # Text of all kinds in the same file.
    settings.last_chat = '50 % [of] a; chat = \n"one" #2'
    settings.add_recent_model(RecentModel(tmp_path / "mödel %1;.gguf", "[title]", "key = value"))
    settings.sync()
    expected = KV_STATES_QUOTA_BYTES if quota_bytes is None else quota_bytes
    assert saved_states_quota(tmp_path / "layerdeck.ini") == expected


@pytest.mark.parametrize(
    "content", [b"", b"[chat]\nkept_states_bytes=many\n", b"[chat]\nkept_states_bytes=" + b"9" * 30, b"\xff\0", b"chat"]
)
def test_a_damaged_settings_file_gives_the_default_limit(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "layerdeck.ini"
    assert saved_states_quota(file) == KV_STATES_QUOTA_BYTES
    file.write_bytes(content)
    assert saved_states_quota(file) == KV_STATES_QUOTA_BYTES
