"""What is kept between runs: window state, theme, recent models, warnings already given."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec
from PySide6.QtCore import QByteArray, QSettings

from app.language import KEY, LANGUAGE_NAMES, SYSTEM
from app.paths import make_folder, settings_path
from app.theme import THEME_NAMES
from engine.base.json_file import UNREADABLE
from engine.base.language import tr
from engine.base.texts import show
from widgets.library.load_question import LoadAnswer
from widgets.library.recent_models import RecentModel

MAX_RECENT = 12
MAX_DIGITS = 19
_Kept = TypeVar("_Kept", bound=msgspec.Struct)
_Value = TypeVar("_Value")
_Name = TypeVar("_Name", bound=str)


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


class Preference(Generic[_Value]):
    """One value of the settings, as an attribute of `Settings`.

    `read` makes the value of what the file has under `key`, which is None if it has nothing; `write` makes its text.
    """

    def __init__(self, key: str, read: Callable[[object], _Value], write: Callable[[_Value], str] = str) -> None:
        self._key, self._read, self._write = key, read, write

    def __get__(self, settings: Settings, _owner: type[Settings]) -> _Value:
        return self._read(settings.store.value(self._key))

    def __set__(self, settings: Settings, value: _Value) -> None:
        settings.store.setValue(self._key, self._write(value))


def _switch(key: str, *, default: bool = False) -> Preference[bool]:
    return Preference(
        key, lambda kept: default if kept is None else kept == "true", lambda value: "true" if value else "false"
    )


def _choice(key: str, names: Iterable[_Name], default: _Name) -> Preference[_Name]:
    return Preference(key, lambda kept: next((name for name in names if name == kept), default))


def _text(key: str) -> Preference[str]:
    return Preference(key, lambda kept: "" if kept is None else str(kept))


def _load_answer(kept: object) -> LoadAnswer | None:
    return next((answer for answer in LoadAnswer if answer == kept), None)


def _size_bytes(kept: object) -> int | None:
    text = str(kept)
    return int(text) if text.isascii() and text.isdecimal() and len(text) < MAX_DIGITS else None


class Settings:
    """Typed access to one INI file. A value that cannot be read is as if it had never been written.

    `fault` says why nothing is kept beyond this run, for people; empty where it is. Nothing else depends on that.
    """

    theme = _choice("theme", THEME_NAMES, "system")
    language = _choice(KEY, LANGUAGE_NAMES, SYSTEM)
    """The language of the window from the next start on."""
    remote_warning_given = _switch("remote_warning_given")
    reload_lost = _switch("reload_lost")
    """Whether a model that was lost is loaded again without being asked."""
    steps_back = _switch("steps_back")
    """Whether a load that does not fit may try other layouts."""
    without_room = Preference("without_room", _load_answer, lambda answer: "" if answer is None else answer.value)
    """What to do if a model does not fit beside those that are loaded; None: ask."""
    arrangement = _text("window/arrangement")
    """How the window was arranged last; empty: never."""
    drops_oldest_turns = _switch("chat/drop_oldest", default=True)
    """Whether a full context drops the oldest turns, rather than to refuse the question."""
    asks_when_full = _switch("chat/ask_when_full")
    """Whether people are asked before a full context drops the oldest turns."""
    kept_states_bytes = Preference(
        "chat/kept_states_bytes", _size_bytes, lambda quota_bytes: "" if quota_bytes is None else str(quota_bytes)
    )
    """How much of the disk saved KV states may take; None: nobody said."""
    last_chat = _text("chat/last")
    """The conversation that was shown last."""
    shows_chat_list = _switch("chat/list")
    """Whether the list of conversations is shown beside a chat that is not alone."""

    def __init__(self, path: Path | None = None) -> None:
        file = path or settings_path()
        self.fault = find_fault(file)
        self.store: _Store = _Memory() if self.fault else QSettings(str(file), QSettings.Format.IniFormat)

    @property
    def recent_models(self) -> tuple[RecentModel, ...]:
        """The models opened last, the latest first; their files are not touched."""
        try:
            stored = msgspec.json.decode(str(self.store.value("recent_models", "[]")), type=list[_StoredModel])
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
            return msgspec.json.decode(str(self.store.value("side_files", "{}")), type=dict[str, KeptSideFiles])
        except UNREADABLE:
            return {}

    def kept(self, key: str, kind: type[_Kept]) -> _Kept | None:
        """Return the document kept under `key`, None where there is none that can be read."""
        try:
            return msgspec.json.decode(str(self.store.value(key, "")), type=kind)
        except UNREADABLE:
            return None

    def keep(self, key: str, document: msgspec.Struct) -> None:
        """Keep a document under `key`."""
        self._write(key, document)

    def _write(self, key: str, document: object) -> None:
        """Keep what msgspec can write under `key`. A path that is not UTF-8 cannot be written: the old value stays."""
        with suppress(UnicodeEncodeError):
            self.store.setValue(key, msgspec.json.encode(document).decode())

    def window_state(self) -> tuple[QByteArray, QByteArray] | None:
        """Return geometry and dock state as last saved."""
        geometry, state = self.store.value("window/geometry"), self.store.value("window/state")
        if isinstance(geometry, QByteArray) and isinstance(state, QByteArray):
            return geometry, state
        return None

    def save_window_state(self, geometry: QByteArray, state: QByteArray) -> None:
        self.store.setValue("window/geometry", geometry)
        self.store.setValue("window/state", state)

    def sync(self) -> None:
        """Write to disk now."""
        self.store.sync()
