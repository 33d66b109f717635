"""Images in the window's conversations, with the real engine: attached, counted, asked with, kept, refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from pytestqt.qtbot import QtBot

from app.chats.attacher import Attacher
from app.chats.state_saver import StateSaver
from app.chats.thumbnails import Thumbnails
from app.models.conversation import Conversation, Restored
from app.models.loading import ModelState
from app.settings import Settings
from app.wiring import Desk, make_desk
from engine.chats.message import Message
from engine.devices.device import CPU_ID
from engine.layout.layout import single_device
from engine.memory.side_files import SideFiles, read_projector
from engine.plan.edit import Edit
from engine.settings.context_settings import ContextSettings
from tests.support.models import write_tiny_llama
from tests.support.pictures import picture
from tests.support.side_models import write_tiny_projector
from widgets.chat.gallery import Gallery

N_LAYERS = 2
SHORT = {"max_tokens": 8, "seed": 1, "temperature": 0.0}


class Bench:
    """A desk that can be closed and opened anew, and a model that may have eyes."""

    def __init__(self, qtbot: QtBot, folder: Path) -> None:
        self._qtbot, self._folder = qtbot, folder
        self._model = write_tiny_llama(folder / "ada.gguf", n_layers=N_LAYERS, n_ctx_train=1 << 16)
        self._projector = write_tiny_projector(folder / "mmproj-ada.gguf", image_px=64)
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

    def load(self, *, sees: bool = True, n_ctx: int = 1024) -> None:
        if self.desk.models.current.name != "ada":
            self.desk.opener.open(self._model)
            self.wait(lambda: self.desk.models.current.name == "ada")
        context = ContextSettings(n_ctx=n_ctx, threads=1, threads_batch=1)
        files = SideFiles(read_projector(self._projector, CPU_ID)) if sees else SideFiles()
        edit = Edit(single_device(N_LAYERS, CPU_ID), context, files)
        self.desk.document.replace(edit, "test")
        loading = self.desk.models.current.loading
        self.desk.loader.load()
        self.wait(lambda: loading.loaded is not None and loading.loaded.edit.side_files == files)
        self.wait(lambda: loading.state is ModelState.READY)

    def attach(self, *seeds: int) -> None:
        paths = [self._folder / f"{seed}.png" for seed in seeds]
        for seed, path in zip(seeds, paths, strict=True):
            path.write_bytes(picture(seed))
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


@pytest.fixture
def bench(qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    for name in ("DATA", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    bench = Bench(qtbot, tmp_path)
    yield bench
    bench.desk.close()


def prompt_tokens(answer: Message) -> int:
    assert answer.state == "done", answer.note
    assert answer.timings is not None
    return answer.timings.prompt_tokens


def test_images_are_counted_asked_with_and_branched(bench: Bench) -> None:
    bench.load()
    bench.attach(1, 2)
    bench.wait(lambda: bench.attacher.tokens > 0 and all(each.tokens for each in bench.attacher.files))
    counted = bench.attacher.tokens
    first = bench.ask("What?")
    words = prompt_tokens(first) - counted
    assert (bench.path[0].attachments[0].kind, counted) == ("image", 2 * 64)
    bench.conversation.regenerate(first.id)
    again = bench.answered()
    assert again.id != first.id
    assert again.content == first.content
    assert again.timings is not None
    assert again.timings.cached_tokens == prompt_tokens(first) - 1
    bench.conversation.edit(bench.path[0].id, "Wha?")
    edited = bench.answered()
    assert prompt_tokens(edited) == counted + words - 1
    assert len(bench.path[0].attachments) == 2
    later = bench.ask("And?")
    assert prompt_tokens(later) > prompt_tokens(edited)


def test_a_conversation_with_images_goes_on_after_a_restart(bench: Bench) -> None:
    bench.load()
    bench.attach(1)
    first = bench.ask("Tell me of everything that the old harbour had seen in its two hundred years by the sea. " * 2)
    assert first.content.strip(), "nothing is said of a question whose answer is empty"
    bench.settle()
    bench.desk.close()
    bench.restart()
    bench.wait(lambda: not bench.conversation.is_empty)
    bench.load()
    bench.wait(lambda: bool(bench.restored))
    assert bench.restored[0].tokens >= prompt_tokens(first), bench.restored
    answer = bench.ask("And?")
    assert answer.timings is not None
    assert answer.timings.cached_tokens >= prompt_tokens(first)


def test_a_model_without_eyes_says_what_to_do(bench: Bench) -> None:
    bench.load(sees=False)
    bench.attach(1)
    assert not bench.attacher.files
    assert any("1.png is not taken" in text and "projector" in text for text in bench.refused)
    bench.load()
    bench.attach(1)
    bench.ask("What?")
    bench.load(sees=False)
    refused = bench.ask("And now?")
    assert refused.state == "failed"
    assert "Choose the model's projector" in refused.note


def test_images_that_are_too_many_leave_out_old_turns(bench: Bench) -> None:
    bench.load(n_ctx=512)
    for seed in range(6):
        bench.attach(seed)
        answer = bench.ask(f"What is number {seed}?")
        assert prompt_tokens(answer) < 512
    assert bench.conversation.left_out


def test_a_picture_of_a_kept_image_comes_back(bench: Bench, qtbot: QtBot) -> None:
    gallery = Gallery()
    thumbnails = Thumbnails(gallery, bench.desk.archive, bench.desk.background)
    with qtbot.waitSignal(bench.desk.archive.is_open_now):
        pass
    data = picture(1, (400, 200))
    bench.desk.archive.keep_file(data)
    bench.attacher.add_image(data)
    bench.wait(lambda: not bench.attacher.is_reading)
    (file,) = bench.attacher.files
    assert file.attachment is not None
    gallery.ask(file.attachment.sha256)
    bench.wait(lambda: file.attachment is not None and file.attachment.sha256 in gallery.pictures)
    shown = gallery.pictures[file.attachment.sha256]
    assert (shown.width(), shown.height()) == (224, 112)
    assert file.name == "Pasted image 1"
    assert thumbnails.parent() is None
