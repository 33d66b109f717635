"""What is kept between runs: window state, theme, recent models, warnings already given."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from PySide6.QtCore import QByteArray, QSettings

from app.language import KEY, LANGUAGE_NAMES, SYSTEM
from app.paths import make_folder, settings_path
from app.theme import THEME_NAMES, ThemeName
from engine.json_file import UNREADABLE
from engine.language import tr
from engine.texts import show
from widgets.library.load_question import LoadAnswer
from widgets.library.recent_models import RecentModel

MAX_RECENT = 12
MAX_DIGITS = 19
_Kept = TypeVar("_Kept", bound=msgspec.Struct)


def find_fault(file: Path) -> str:
    """Return why settings cannot be kept in `file`, empty where they can; the folder is made where it is missing."""
    remedy = tr("settings are kept until the window closes. Give this program a folder that it can write to.")
    try:
        str(file).encode()
    except UnicodeEncodeError:
        # Qt would take another file for it.
        return tr("The name of {file} is no text; {remedy}", file=show(str(file)), remedy=remedy)
    try:
        make_folder(file.parent)
        if file.exists() and not (file.is_file() and os.access(file, os.R_OK | os.W_OK)):
            return tr("{file} is no file that can be written; {remedy}", file=show(str(file)), remedy=remedy)
    except OSError as error:
        return tr(
            "The folder {parent} cannot be used ({reason}); {remedy}",
            parent=show(str(file.parent)),
            reason=error.strerror or error,
            remedy=remedy,
        )
    return ""


class _StoredModel(msgspec.Struct, frozen=True):
    path: str
    title: str
    detail: str


class KeptAdapter(msgspec.Struct, frozen=True):
    """A LoRA adapter that was loaded beside a model."""

    path: str
    scale: float


class KeptSideFiles(msgspec.Struct, frozen=True):
    """What was loaded beside a model; an empty `projector` is none."""

    projector: str = ""
    device: str | None = None
    adapters: tuple[KeptAdapter, ...] = ()


class _Store(Protocol):
    """What keeps values by key; `QSettings` is one."""

    def value(self, key: str, default: object = None, /) -> object: ...

    def setValue(self, key: str, value: object, /) -> None: ...

    def sync(self) -> None: ...


class _Memory:
    """Keeps values until the program ends."""

    def __init__(self) -> None:
        self._values: dict[str, object] = {}

    def value(self, key: str, default: object = None, /) -> object:
        return self._values.get(key, default)

    def setValue(self, key: str, value: object, /) -> None:
        self._values[key] = value

    def sync(self) -> None:
        """There is no place to write to."""


class Settings:
    """Typed access to one INI file. A value that cannot be read is as if it had never been written.

    `fault` says why nothing is kept beyond this run, for people; empty where it is. Nothing else depends on that.
    """

    def __init__(self, path: Path | None = None) -> None:
        file = path or settings_path()
        self.fault = find_fault(file)
        self._store: _Store = _Memory() if self.fault else QSettings(str(file), QSettings.Format.IniFormat)

    @property
    def theme(self) -> ThemeName:
        name = self._store.value("theme", "system")
        return next((known for known in THEME_NAMES if known == name), "system")

    @theme.setter
    def theme(self, name: ThemeName) -> None:
        self._store.setValue("theme", name)

    @property
    def language(self) -> str:
        """Which language the window speaks from the next start on: one of `LANGUAGE_NAMES`."""
        name = self._store.value(KEY, SYSTEM)
        return next((known for known in LANGUAGE_NAMES if known == name), SYSTEM)

    @language.setter
    def language(self, name: str) -> None:
        self._store.setValue(KEY, name)

    @property
    def recent_models(self) -> tuple[RecentModel, ...]:
        """The models opened last, the latest first; their files are not touched."""
        try:
            stored = msgspec.json.decode(str(self._store.value("recent_models", "[]")), type=list[_StoredModel])
        except UNREADABLE:
            return ()
        return tuple(RecentModel(Path(each.path), each.title, each.detail) for each in stored)

    def add_recent_model(self, model: RecentModel) -> None:
        """Put `model` first among the recent models."""
        kept = [model, *(other for other in self.recent_models if other.path != model.path)][:MAX_RECENT]
        self._keep_recent(kept)

    def forget_recent_model(self, path: Path) -> None:
        """Take the model at `path` off the list."""
        self._keep_recent([other for other in self.recent_models if other.path != path])

    def forget_recent_models(self) -> None:
        """Empty the list."""
        self._keep_recent([])

    def _keep_recent(self, models: list[RecentModel]) -> None:
        stored = [_StoredModel(str(each.path), each.title, each.detail) for each in models]
        self._write("recent_models", stored)

    def side_files(self, model: Path) -> KeptSideFiles:
        """Return what was loaded beside the model at `model`; the files are not touched."""
        return self._all_side_files().get(str(model), KeptSideFiles())

    def keep_side_files(self, model: Path, files: KeptSideFiles) -> None:
        """Keep what is loaded beside the model at `model`."""
        kept = {path: each for path, each in self._all_side_files().items() if path != str(model)}
        if files != KeptSideFiles():
            kept[str(model)] = files
        self._write("side_files", kept)

    def _all_side_files(self) -> dict[str, KeptSideFiles]:
        try:
            return msgspec.json.decode(str(self._store.value("side_files", "{}")), type=dict[str, KeptSideFiles])
        except UNREADABLE:
            return {}

    def kept(self, key: str, kind: type[_Kept]) -> _Kept | None:
        """Return the document kept under `key`, None where there is none that can be read."""
        try:
            return msgspec.json.decode(str(self._store.value(key, "")), type=kind)
        except UNREADABLE:
            return None

    def keep(self, key: str, document: msgspec.Struct) -> None:
        """Keep a document under `key`."""
        self._write(key, document)

    def _write(self, key: str, document: object) -> None:
        """Keep what msgspec can write under `key`. A path that is not UTF-8 cannot be written: the old value stays."""
        with suppress(UnicodeEncodeError):
            self._store.setValue(key, msgspec.json.encode(document).decode())

    @property
    def remote_warning_given(self) -> bool:
        return self._store.value("remote_warning_given", "false") == "true"

    @remote_warning_given.setter
    def remote_warning_given(self, given: bool) -> None:
        self._store.setValue("remote_warning_given", "true" if given else "false")

    @property
    def reload_lost(self) -> bool:
        """Whether a model that was lost is loaded again without being asked."""
        return self._store.value("reload_lost", "false") == "true"

    def reload_by_itself(self, wanted: bool) -> None:
        """Keep whether a lost model is loaded again without being asked."""
        self._store.setValue("reload_lost", "true" if wanted else "false")

    @property
    def steps_back(self) -> bool:
        """Whether a load that does not fit may try other layouts."""
        return self._store.value("steps_back", "false") == "true"

    def step_back(self, wanted: bool) -> None:
        """Keep whether a load that does not fit may try other layouts."""
        self._store.setValue("steps_back", "true" if wanted else "false")

    @property
    def without_room(self) -> LoadAnswer | None:
        """What to do when a model does not fit beside those that are loaded; None: ask."""
        kept = self._store.value("without_room")
        return next((answer for answer in LoadAnswer if answer == kept), None)

    @without_room.setter
    def without_room(self, answer: LoadAnswer | None) -> None:
        self._store.setValue("without_room", "" if answer is None else answer.value)

    @property
    def arrangement(self) -> str:
        """How the window was arranged last; empty: never."""
        return str(self._store.value("window/arrangement", ""))

    @arrangement.setter
    def arrangement(self, name: str) -> None:
        self._store.setValue("window/arrangement", name)

    @property
    def drops_oldest_turns(self) -> bool:
        """Whether a full context leaves out the oldest turns, rather than to refuse the question."""
        return self._store.value("chat/drop_oldest", "true") == "true"

    def drop_oldest_turns(self, wanted: bool) -> None:
        """Keep whether a full context leaves out the oldest turns."""
        self._store.setValue("chat/drop_oldest", "true" if wanted else "false")

    @property
    def asks_when_full(self) -> bool:
        """Whether people are asked before a full context leaves out the oldest turns."""
        return self._store.value("chat/ask_when_full", "false") == "true"

    def ask_when_full(self, wanted: bool) -> None:
        """Keep whether people are asked before a full context leaves out the oldest turns."""
        self._store.setValue("chat/ask_when_full", "true" if wanted else "false")

    @property
    def kept_states_bytes(self) -> int | None:
        """How much of the disk may hold what models hold of conversations; None: nobody said."""
        kept = str(self._store.value("chat/kept_states_bytes", ""))
        return int(kept) if kept.isascii() and kept.isdecimal() and len(kept) < MAX_DIGITS else None

    @kept_states_bytes.setter
    def kept_states_bytes(self, quota_bytes: int | None) -> None:
        self._store.setValue("chat/kept_states_bytes", "" if quota_bytes is None else str(quota_bytes))

    @property
    def last_chat(self) -> str:
        """The conversation that was shown last."""
        return str(self._store.value("chat/last", ""))

    @last_chat.setter
    def last_chat(self, chat: str) -> None:
        self._store.setValue("chat/last", chat)

    @property
    def shows_chat_list(self) -> bool:
        """Whether the list of conversations is shown beside a chat that is not alone."""
        return self._store.value("chat/list", "false") == "true"

    @shows_chat_list.setter
    def shows_chat_list(self, shown: bool) -> None:
        self._store.setValue("chat/list", "true" if shown else "false")

    def window_state(self) -> tuple[QByteArray, QByteArray] | None:
        """Return geometry and dock state as last saved."""
        geometry, state = self._store.value("window/geometry"), self._store.value("window/state")
        if isinstance(geometry, QByteArray) and isinstance(state, QByteArray):
            return geometry, state
        return None

    def save_window_state(self, geometry: QByteArray, state: QByteArray) -> None:
        self._store.setValue("window/geometry", geometry)
        self._store.setValue("window/state", state)

    def sync(self) -> None:
        """Write to disk now."""
        self._store.sync()
