"""What a model holds of a conversation outlives it: a restart, another layout, other conversations in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from pytestqt.qtbot import QtBot

from app.chats.state_saver import StateSaver
from app.models.conversation import Conversation, Restored
from app.models.open_model import OpenModel
from app.paths import kept_states_path
from app.settings import Settings
from app.wiring import Desk, make_desk
from engine.chats.message import Message
from engine.devices.device import CPU_ID
from engine.layout.layout import make_layout
from engine.plan.edit import Edit
from engine.session.status import Phase
from engine.settings.context_settings import ContextSettings
from engine.units import MIB
from tests.support.models import write_tiny_llama

N_LAYERS = 4
CPU_ALONE = (CPU_ID,) * N_LAYERS
MIXED = ("RPC0", CPU_ID, CPU_ID, "RPC0")
SHORT = {"max_tokens": 8, "seed": 1, "temperature": 0.0}
LONG_WORDS = "Tell me of everything that the old harbour had seen in its two hundred years by the sea. " * 5


class Bench:
    """A desk that can be closed and opened anew over the same files, as after a restart."""

    def __init__(self, qtbot: QtBot, folder: Path) -> None:
        self._qtbot = qtbot
        self._folder = folder
        self._model = write_tiny_llama(folder / "ada.gguf", n_layers=N_LAYERS, n_ctx_train=1 << 16)
        self.desk = self._open_desk()

    def _open_desk(self) -> Desk:
        desk = make_desk(Settings(self._folder / "settings.ini"))
        desk.rig.start()
        desk.archive.start()
        self.restored: list[Restored] = []
        desk.models.current.conversation.restored.connect(self.restored.append)
        return desk

    def restart(self) -> None:
        self.desk.close()
        self.desk = self._open_desk()

    @property
    def model(self) -> OpenModel:
        return self.desk.models.current

    @property
    def conversation(self) -> Conversation:
        return self.model.conversation

    @property
    def saver(self) -> StateSaver:
        states = self.conversation.answering.states
        assert isinstance(states, StateSaver)
        return states

    @property
    def files(self) -> list[Path]:
        return sorted(kept_states_path().glob("*.state"))

    def wait(self, condition: Callable[[], bool]) -> None:
        self._qtbot.waitUntil(condition)

    def start_lab(self) -> None:
        self.desk.rig.lab.start([128 * MIB])
        self.wait(lambda: len(self.desk.rig.live.rig.devices) == 1)

    def load(self, *devices: str, n_ctx: int = 2048) -> None:
        self.desk.opener.open(self._model)
        self.wait(lambda: self.model.name == "ada")
        context = ContextSettings(n_ctx=n_ctx, threads=1, threads_batch=1)
        self.desk.document.replace(Edit(make_layout(N_LAYERS, devices), context), "test")
        self.desk.loader.load()
        self.wait(lambda: self.model.loading.loaded is not None and self.model.loading.loaded.edit.context == context)
        self.wait(lambda: self.model.loading.phase is Phase.READY and self.saver.is_settled)

    def say(self, text: str) -> Message:
        chat = self.conversation.chat
        self.conversation.change_chat(msgspec.structs.replace(chat, settings=SHORT))
        self.conversation.send(text)
        self.wait(lambda: not self.conversation.is_answering)
        return self.conversation.tree.path[-1]

    def settle(self) -> None:
        """What waits for a pause is written now."""
        self.saver.save_now()
        self.wait(lambda: self.saver.is_settled)


@pytest.fixture
def bench(qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    for name in ("DATA", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    opened = Bench(qtbot, tmp_path)
    yield opened
    opened.desk.close()


def read_tokens(answer: Message) -> int:
    assert answer.timings is not None
    return answer.timings.prompt_tokens - answer.timings.cached_tokens


def test_layers_move_in_the_middle_of_a_conversation_and_nothing_is_read_again(bench: Bench) -> None:
    bench.start_lab()
    bench.load(*CPU_ALONE)
    first = bench.say(LONG_WORDS)
    assert first.timings is not None
    asked = first.timings.prompt_tokens
    assert read_tokens(first) == asked
    # at once, not in a pause: it is saved because the model goes
    bench.load(*MIXED)
    assert [each.tokens > asked for each in bench.restored] == [True]
    second = bench.say("And then?")
    assert second.state == "done"
    assert read_tokens(second) < 40
    assert second.timings is not None
    assert second.timings.cached_tokens >= asked


def test_a_restart_and_an_unload_cost_no_reading(bench: Bench) -> None:
    bench.load(*CPU_ALONE)
    bench.say(LONG_WORDS)
    bench.settle()
    assert len(bench.files) == 1
    bench.restart()
    bench.wait(lambda: not bench.conversation.is_empty)
    bench.load(*CPU_ALONE)
    assert [each.tokens > 100 for each in bench.restored] == [True]
    assert read_tokens(bench.say("Who said so?")) < 40
    bench.desk.unloader.unload_current()
    bench.wait(lambda: not bench.model.loading.has_child)
    bench.load(*CPU_ALONE)
    assert read_tokens(bench.say("Where was that?")) < 40


def test_what_was_asked_before_the_state_was_back_waits_for_it(bench: Bench) -> None:
    bench.load(*CPU_ALONE)
    bench.say(LONG_WORDS)
    bench.desk.unloader.unload_current()
    bench.wait(lambda: not bench.model.loading.has_child)
    bench.desk.loader.load()
    bench.wait(lambda: bench.model.loading.phase is Phase.READY)
    assert read_tokens(bench.say("And then?")) < 40


def test_a_conversation_comes_back_after_another_one_took_its_place(bench: Bench) -> None:
    bench.load(*CPU_ALONE)
    bench.say(LONG_WORDS)
    first = bench.conversation.chat.id
    bench.desk.shelf.new()
    bench.say(f"Something else. {LONG_WORDS}")
    bench.desk.shelf.open(first)
    bench.wait(lambda: bench.conversation.chat.id == first)
    assert read_tokens(bench.say("And then?")) < 40
    bench.settle()
    assert len(bench.files) == 2


def test_what_was_left_out_stays_so_after_a_restart_and_another_conversation(bench: Bench) -> None:
    bench.load(*CPU_ALONE)
    answers = [bench.say(LONG_WORDS) for _ in range(5)]
    assert [bool(answer.note) for answer in answers] == [False] * 4 + [True]
    chat, left_out = bench.conversation.chat.id, bench.conversation.left_out
    bench.settle()
    bench.restart()
    bench.wait(lambda: not bench.conversation.is_empty)
    bench.load(*CPU_ALONE)
    assert bench.conversation.left_out == left_out
    after_restart = bench.say("Who said so?")
    bench.desk.shelf.new()
    bench.say(LONG_WORDS)
    bench.desk.shelf.open(chat)
    bench.wait(lambda: bench.conversation.chat.id == chat)
    after_another = bench.say("And then?")
    for answer in (after_restart, after_another):
        assert read_tokens(answer) < 40
        assert not answer.note
    assert bench.conversation.left_out == left_out


def test_a_question_is_answered_while_a_state_is_written(bench: Bench) -> None:
    bench.load(*CPU_ALONE)
    bench.say(LONG_WORDS)
    bench.saver.save_now()
    assert bench.model.loading.phase is Phase.READY
    assert bench.say("And then?").state == "done"
    bench.wait(lambda: bool(bench.files))


def test_other_cache_types_are_another_state_and_a_damaged_one_is_read_again(bench: Bench) -> None:
    bench.load(*CPU_ALONE)
    bench.say(LONG_WORDS)
    bench.settle()
    (path,) = bench.files
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    bench.desk.unloader.unload_current()
    bench.wait(lambda: not bench.model.loading.has_child)
    bench.load(*CPU_ALONE, n_ctx=2304)
    assert [each.tokens for each in bench.restored] == [0]
    assert "damaged" in bench.restored[0].refusal
    answer = bench.say("And then?")
    assert (answer.state, read_tokens(answer) > 100) == ("done", True)


def test_nothing_is_kept_of_what_was_deleted_and_the_quota_holds(bench: Bench) -> None:
    bench.load(*CPU_ALONE)
    bench.say(LONG_WORDS)
    bench.settle()
    bench.wait(lambda: bool(bench.files))
    bench.desk.shelf.delete(bench.conversation.chat.id)
    bench.wait(lambda: not bench.files)
    bench.say(f"Another one. {LONG_WORDS}")
    bench.settle()
    said: list[str] = []
    bench.desk.notices.given.connect(lambda notice: said.append(notice.text))
    done: list[bool] = []
    bench.desk.states.set_quota(1, lambda: done.append(True))
    bench.wait(lambda: bool(done))
    assert bench.files == []
    assert Settings(bench._folder / "settings.ini").kept_states_bytes == 1
    bench.say(LONG_WORDS)
    bench.settle()
    bench.wait(lambda: any("larger than the room" in text for text in said))
    assert bench.files == []
