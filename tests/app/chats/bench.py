"""A desk with a model that may have eyes or ears, which can be closed and opened anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from pytestqt.qtbot import QtBot

from app.chats.attacher import Attacher
from app.chats.state_saver import StateSaver
from app.models.conversation import Conversation, Restored
from app.settings import Settings
from app.wiring import Desk, make_desk
from engine.chats.message import Message
from engine.devices.device import CPU_ID
from engine.layout.layout import single_device
from engine.memory.side_files import SideFiles, read_projector
from engine.plan.edit import Edit
from engine.session.status import Phase
from engine.settings.context_settings import ContextSettings
from tests.support.models import write_tiny_llama
from tests.support.pictures import picture
from tests.support.side_models import write_tiny_ear, write_tiny_projector
from tests.support.sounds import tone

N_LAYERS = 2
SHORT = {"max_tokens": 8, "seed": 1, "temperature": 0.0}


class Bench:
    """A desk that can be closed and opened anew, and a model that may have eyes or ears."""

    def __init__(self, qtbot: QtBot, folder: Path) -> None:
        self._qtbot, self._folder = qtbot, folder
        self._model = write_tiny_llama(folder / "ada.gguf", n_layers=N_LAYERS, n_ctx_train=1 << 16)
        self._eyes = write_tiny_projector(folder / "mmproj-ada.gguf", image_px=64)
        self._ears = write_tiny_ear(folder / "mmproj-ada-ears.gguf")
        self.restart()

    def restart(self) -> None:
        self.desk: Desk = make_desk(Settings(self._folder / "settings.ini"))
        self.desk.archive.start()
        self.attacher = Attacher(self.desk.models.current, self.desk.background)
        self.refused: list[str] = []
        self.restored: list[Restored] = []
        self.attacher.refused.connect(self.refused.append)
        self.conversation.restored.connect(self.restored.append)

    @property
    def conversation(self) -> Conversation:
        return self.desk.models.current.conversation

    @property
    def path(self) -> tuple[Message, ...]:
        return self.conversation.tree.path

    def wait(self, condition: Callable[[], bool]) -> None:
        self._qtbot.waitUntil(condition)

    def load(self, *, sees: bool = True, hears: bool = False, n_ctx: int = 1024) -> None:
        if self.desk.models.current.name != "ada":
            self.desk.opener.open(self._model)
            self.wait(lambda: self.desk.models.current.name == "ada")
        context = ContextSettings(n_ctx=n_ctx, threads=1, threads_batch=1)
        projector = self._ears if hears else self._eyes if sees else None
        files = SideFiles() if projector is None else SideFiles(read_projector(projector, CPU_ID))
        edit = Edit(single_device(N_LAYERS, CPU_ID), context, files)
        self.desk.document.replace(edit, "test")
        loading = self.desk.models.current.loading
        self.desk.loader.load()
        self.wait(lambda: loading.loaded is not None and loading.loaded.edit.side_files == files)
        self.wait(lambda: loading.phase is Phase.READY)

    def attach(self, *seeds: int) -> None:
        paths = [self._folder / f"{seed}.png" for seed in seeds]
        for seed, path in zip(seeds, paths, strict=True):
            path.write_bytes(picture(seed))
        self.attacher.add(paths)
        self.wait(lambda: not self.attacher.is_reading)

    def attach_sounds(self, *seeds: int) -> None:
        paths = [self._folder / f"{seed}.wav" for seed in seeds]
        for seed, path in zip(seeds, paths, strict=True):
            path.write_bytes(tone(seed))
        self.attacher.add(paths)
        self.wait(lambda: not self.attacher.is_reading)

    def ask(self, words: str) -> Message:
        chat = self.conversation.chat
        if chat.settings != SHORT:
            self.conversation.change_chat(msgspec.structs.replace(chat, settings=SHORT))
        self.conversation.send(words, self.attacher.take())
        return self.answered()

    def settle(self) -> None:
        """What waits for a pause is written now."""
        saver = self.conversation.answering.states
        assert isinstance(saver, StateSaver)
        saver.save_now()
        self.wait(lambda: saver.is_settled)

    def answered(self) -> Message:
        self.wait(lambda: not self.conversation.is_answering)
        return self.path[-1]


def prompt_tokens(answer: Message) -> int:
    assert answer.state == "done", answer.note
    assert answer.timings is not None
    return answer.timings.prompt_tokens


@pytest.fixture
def bench(qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    for name in ("DATA", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    bench = Bench(qtbot, tmp_path)
    yield bench
    bench.desk.close()
