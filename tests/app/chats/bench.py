"""A desk with a model for tests of conversations. Tests can close it and open it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from pytestqt.qtbot import QtBot

from app.chats.attacher import Attacher
from app.chats.saved_kv_states import ModelKvStates
from app.models.conversation import Conversation, Restored
from app.models.open_model import OpenModel
from app.paths import saved_states_path
from app.settings import Settings
from app.wiring import Desk, make_desk
from engine.base.units import MIB
from engine.chat.message import Message
from engine.devices.device import CPU_ID
from engine.planning.layout.layout import make_layout
from engine.planning.memory.side_files import SideFiles, read_projector
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.session.status import Phase
from tests.support.models import write_tiny_llama
from tests.support.pictures import picture
from tests.support.side_models import write_tiny_ear, write_tiny_projector
from tests.support.sounds import tone

SHORT: Mapping[str, object] = {"max_tokens": 8, "seed": 1, "temperature": 0.0}


class Bench:
    """A desk over files of its own. `settings`: of the samplers, for conversations that begin here."""

    def __init__(
        self, qtbot: QtBot, folder: Path, *, n_layers: int = 2, settings: Mapping[str, object] = SHORT
    ) -> None:
        self._qtbot, self.folder, self._n_layers, self._settings = qtbot, folder, n_layers, settings
        self._model = write_tiny_llama(folder / "ada.gguf", n_layers=n_layers, n_ctx_train=1 << 16)
        self._open()

    def _open(self) -> None:
        self.desk: Desk = make_desk(Settings(self.folder / "settings.ini"))
        self.desk.archive.start()
        self.attacher = Attacher(self.model, self.desk.background)
        self.refused: list[str] = []
        self.restored: list[Restored] = []
        self.painted: list[str] = []
        self.attacher.refused.connect(self.refused.append)
        self.conversation.restored.connect(self.restored.append)
        self.conversation.piece_kept.connect(lambda piece: self.painted.append(piece.content))

    def restart(self) -> None:
        self.desk.close()
        self._open()

    @property
    def model(self) -> OpenModel:
        return self.desk.models.current

    @property
    def conversation(self) -> Conversation:
        return self.model.conversation

    @property
    def path(self) -> tuple[Message, ...]:
        return self.conversation.tree.path

    @property
    def saver(self) -> ModelKvStates:
        states = self.conversation.answering.states
        assert isinstance(states, ModelKvStates)
        return states

    @property
    def files(self) -> list[Path]:
        """Saved states."""
        return sorted(saved_states_path().glob("*.state"))

    def wait(self, condition: Callable[[], bool]) -> None:
        self._qtbot.waitUntil(condition)

    def wait_until_open(self) -> None:
        """Wait until the database of conversations is open; it may be open already."""
        opened: list[None] = []
        self.desk.archive.work("Waiting for the database", lambda _store: None, opened.append)
        self.wait(lambda: bool(opened))

    # ------------------------------------------------------------------ loading

    def start_lab(self) -> None:
        self.desk.rig.start()
        self.desk.rig.lab.start([128 * MIB])
        self.wait(lambda: len(self.desk.rig.live.rig.devices) == 1)

    def load(self, *devices: str, n_ctx: int = 512, sees: bool = False, hears: bool = False) -> None:
        """Load the model on `devices`, one for each layer; on the CPU without."""
        if self.model.name != "ada":
            self.desk.opener.open(self._model)
            self.wait(lambda: self.model.name == "ada")
        context = ContextSettings(n_ctx=n_ctx, threads=1, threads_batch=1)
        layout = make_layout(self._n_layers, devices or (CPU_ID,) * self._n_layers)
        edit = Edit(layout, context, _side_files(self.folder, sees=sees, hears=hears))
        self.desk.document.replace(edit, "test")
        loading = self.model.loading
        self.desk.loader.load()
        self.wait(lambda: loading.loaded is not None and loading.loaded.edit == edit)
        self.wait(lambda: loading.phase is Phase.READY and self.saver.is_settled)
        chat = self.conversation.chat
        if not chat.settings:
            self.conversation.change_chat(msgspec.structs.replace(chat, settings=dict(self._settings)))

    # ------------------------------------------------------------------ talking

    def attach(self, *seeds: int) -> None:
        """Attach images."""
        self._attach({f"{seed}.png": picture(seed) for seed in seeds})

    def attach_sounds(self, *seeds: int) -> None:
        self._attach({f"{seed}.wav": tone(seed) for seed in seeds})

    def _attach(self, files: Mapping[str, bytes]) -> None:
        for name, data in files.items():
            (self.folder / name).write_bytes(data)
        self.attacher.add([self.folder / name for name in files])
        self.wait(lambda: not self.attacher.is_reading)

    def open_chat(self, chat: str) -> None:
        """Show the stored conversation with this id."""
        self.desk.chat_controller.open(chat)
        self.wait(lambda: self.conversation.chat.id == chat)

    def say(self, text: str) -> Message:
        """Ask with what is attached; return the answer."""
        self.conversation.send(text, self.attacher.take())
        return self.answered()

    def answered(self) -> Message:
        self.wait(lambda: not self.conversation.is_answering and self.model.loading.phase is Phase.READY)
        return self.path[-1]

    def settle(self) -> None:
        """What waits for a pause is written now."""
        self.saver.save_now()
        self.wait(lambda: self.saver.is_settled)

    def reopened(self, chat: str) -> tuple[Message, ...]:
        """What another reader of the store finds."""
        found: list[tuple[Message, ...]] = []
        self.desk.archive.read(chat, lambda _chat, tree: found.append(tree.path))
        self.wait(lambda: bool(found))
        return found[0]


def _side_files(folder: Path, *, sees: bool, hears: bool) -> SideFiles:
    if hears:
        return SideFiles(read_projector(write_tiny_ear(folder / "mmproj-ada-ears.gguf"), CPU_ID))
    if sees:
        return SideFiles(read_projector(write_tiny_projector(folder / "mmproj-ada.gguf", image_px=64), CPU_ID))
    return SideFiles()


def prompt_tokens(answer: Message) -> int:
    assert answer.state == "done", answer.note
    assert answer.timings is not None
    return answer.timings.prompt_tokens
