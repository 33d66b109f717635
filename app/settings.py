"""Preferences and state that are stored between runs, in one INI file: theme, window state, recent models."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec
from msgspec import Struct
from PySide6.QtCore import QByteArray, QEvent, QSettings

from app.language import KEY, LANGUAGE_NAMES, SYSTEM
from app.paths import make_folder, settings_path
from app.theme import DEFAULT_ZOOM, THEME_NAMES, ZOOM_STEPS
from engine.base.json_file import UNREADABLE
from engine.base.language import tr
from engine.base.texts import show
from engine.runtime.protocol.heartbeat import MAX_STALL_LIMIT_S, MIN_STALL_LIMIT_S
from widgets.common.delayed_call import DelayedCall
from widgets.controls.values import AdapterName
from widgets.library.load_question import LoadDecision
from widgets.library.recent_models import RecentModel

MAX_RECENT = 12
RETRY_MS = 10_000
"""Milliseconds between two attempts to write settings while the disk is full."""
# So many digits and more may exceed 64 bits.
MAX_DIGITS = 19
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8080
"""Default address of the API server, in the window and in `layerdeck-cli serve`."""
_Kept = TypeVar("_Kept", bound=Struct)
_Value = TypeVar("_Value")
_Name = TypeVar("_Name", bound=str)


def find_settings_error(file: Path) -> str:
    """Return a message for the user if settings cannot be stored in `file`; empty if they can.

    A missing folder is made.
    """
    remedy = tr("settings are lost when the window closes. Give Layerdeck a folder that it can write to.")
    try:
        str(file).encode()
    except UnicodeEncodeError:
        # QSettings would silently use another file name.
        return tr("The name of {file} is not valid text; {remedy}", file=show(str(file)), remedy=remedy)
    try:
        make_folder(file.parent)
        if file.exists() and not (file.is_file() and os.access(file, os.R_OK | os.W_OK)):
            return tr("{file} cannot be written; {remedy}", file=show(str(file)), remedy=remedy)
    except OSError as error:
        return tr(
            "The folder {parent} cannot be used ({reason}); {remedy}",
            parent=show(str(file.parent)),
            reason=error.strerror or error,
            remedy=remedy,
        )
    return ""


class _StoredModel(Struct, frozen=True):
    path: str
    title: str
    detail: str


class StoredSideFiles(Struct, frozen=True):
    """The projector, the LoRA adapters and the draft of a model, as they are stored in the settings.

    `projector`: path of the projector's file; empty if there is none.
    `device`: device of the projector; None for automatic.
    `draft`: the draft (speculative decoding) as JSON text from `encode_draft`; empty if there is none.
    """

    projector: str = ""
    device: str | None = None
    adapters: tuple[AdapterName, ...] = ()
    draft: str = ""


class _Store(Protocol):
    """Interface of a key-value store for settings, which `QSettings` implements."""

    def value(self, key: str, default: object = None, /) -> object: ...

    def setValue(self, key: str, value: object, /) -> None: ...

    def sync(self) -> None: ...


class _MemoryStore:
    """A settings store in memory, for a run in which the INI file cannot be written."""

    def __init__(self) -> None:
        self._values: dict[str, object] = {}

    def value(self, key: str, default: object = None, /) -> object:
        return self._values.get(key, default)

    def setValue(self, key: str, value: object, /) -> None:
        self._values[key] = value

    def sync(self) -> None:
        """Do nothing: there is no file."""


class _IniStore(QSettings):
    """Stores the settings in the INI file, and calls `on_fault` if writing fails or succeeds again.

    After a change, QSettings writes the whole file anew when the event loop is idle. Changes that it could not write
    stay in memory for the next attempt.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(str(file), QSettings.Format.IniFormat)
        self.on_fault: Callable[[str, bool], None] = lambda _sentence, _is_bad: None
        self._file = file
        self._fails = False
        self._retry = DelayedCall(self, self._look, RETRY_MS)

    def event(self, event: QEvent) -> bool:
        """Handle an event of Qt. After the event in which QSettings writes, check whether the write succeeded."""
        handled = super().event(event)
        # The status stays after the first failure.
        if event.type() is QEvent.Type.UpdateRequest and self.status() is QSettings.Status.AccessError:
            self._look()
        return handled

    def _look(self) -> None:
        # Another object for the same file shares its changes, and writes them.
        other = QSettings(str(self._file), QSettings.Format.IniFormat)
        other.sync()
        before, self._fails = self._fails, other.status() is QSettings.Status.AccessError
        if self._fails:
            self._retry.start()
        if self._fails and not before:
            self.on_fault(
                tr(
                    "Settings cannot be saved in {file}. Changes are lost when the window closes, unless they can be "
                    "saved by then. Check the disk's free space and permissions.",
                    file=show(str(self._file)),
                ),
                True,
            )
        elif before and not self._fails:
            self.on_fault(tr("Settings are being saved again, including the changes since the failure."), False)


class Preference(Generic[_Value]):
    """A Python descriptor: an attribute of `Settings` whose value is stored in the INI file.

    `read`: converts the stored text to the value; gets None if nothing is stored.
    `write`: converts the value to the text to store.
    """

    def __init__(self, key: str, read: Callable[[object], _Value], write: Callable[[_Value], str] = str) -> None:
        self._key, self._read, self._write = key, read, write

    def __get__(self, settings: Settings, _owner: type[Settings]) -> _Value:
        return self._read(settings.store.value(self._key))

    def __set__(self, settings: Settings, value: _Value) -> None:
        settings.store.setValue(self._key, self._write(value))


def _switch(key: str, *, default: bool = False) -> Preference[bool]:
    return Preference(
        # An INI file has only texts: QSettings returns "true" and not True.
        key,
        lambda kept: default if kept is None else kept == "true",
        lambda value: "true" if value else "false",
    )


def _choice(key: str, names: Iterable[_Name], default: _Name) -> Preference[_Name]:
    return Preference(key, lambda kept: next((name for name in names if name == kept), default))


def _text(key: str) -> Preference[str]:
    return Preference(key, lambda kept: "" if kept is None else str(kept))


def _load_decision(kept: object) -> LoadDecision | None:
    return next((answer for answer in LoadDecision if answer == kept), None)


def _size_bytes(kept: object) -> int | None:
    text = str(kept)
    return int(text) if text.isascii() and text.isdecimal() and len(text) < MAX_DIGITS else None


def _stall_limit_s(kept: object) -> int | None:
    seconds = _size_bytes(kept)
    return seconds if seconds is not None and MIN_STALL_LIMIT_S <= seconds <= MAX_STALL_LIMIT_S else None


def _idle_time_s(kept: object) -> float:
    seconds = _size_bytes(kept)
    return inf if seconds is None else float(seconds)


def _zoom_percent(kept: object) -> int:
    text = str(kept)
    return int(text) if text in map(str, ZOOM_STEPS) else DEFAULT_ZOOM


def _port(kept: object) -> int:
    text = str(kept)
    is_port = text.isascii() and text.isdecimal() and len(text) < MAX_DIGITS and 0 < int(text) < 1 << 16
    return int(text) if is_port else DEFAULT_PORT


class Settings:
    """Typed access to the INI file. A stored value that cannot be read counts as absent.

    `fault`: message for the user if settings last for this run only; empty if they are stored.
    """

    theme = _choice("theme", THEME_NAMES, "system")
    language = _choice(KEY, LANGUAGE_NAMES, SYSTEM)
    """The language that the window uses from its next start on."""
    remote_warning_given = _switch("remote_warning_given")
    reload_lost = _switch("reload_lost")
    """Whether a model whose child process died is loaded again automatically. If not, the user may load it again."""
    steps_back = _switch("steps_back")
    """Whether a load that runs out of memory tries other layouts."""
    stall_limit_s = Preference("stall_limit_s", _stall_limit_s, lambda limit_s: "" if limit_s is None else str(limit_s))
    """A load or an answer that makes no progress for this number of seconds is ended; None for the default limit."""
    without_room = Preference("without_room", _load_decision, lambda answer: "" if answer is None else answer.value)
    """The user's stored answer to the question what to do if a model does not fit beside the loaded ones.

    None if the user must be asked.
    """
    idle_time_s = Preference("idle_time_s", _idle_time_s, lambda idle_s: "" if idle_s == inf else f"{idle_s:g}")
    """Seconds from the last answer of a model until it is unloaded; infinite if models stay loaded."""
    arrangement = _text("window/arrangement")
    """Name of the last arrangement of the panels (`Arrangement`); empty if none was stored yet."""
    shows_load_details = _switch("window/load_details")
    """Whether the settings bar shows cache types and flash attention."""
    shows_report_details = _switch("window/report_details")
    """Whether the load report shows its table."""
    counts_projectors = _switch("counts_projectors", default=True)
    """Whether memory forecasts in the library and of hub models include the projector that belongs to the model."""
    loads_last_model = _switch("load_last_model")
    """Whether the model that was opened last is opened and loaded when the window starts."""
    zoom_percent = Preference("window/zoom", _zoom_percent)
    """Zoom of the interface in per cent."""
    drops_oldest_turns = _switch("chat/drop_oldest", default=True)
    """Whether the oldest messages are dropped if the context is full. If not, the question is refused."""
    asks_when_full = _switch("chat/ask_when_full")
    """Whether to ask before the oldest messages are dropped."""
    saved_states_bytes = Preference(
        "chat/kept_states_bytes", _size_bytes, lambda quota_bytes: "" if quota_bytes is None else str(quota_bytes)
    )
    """Limit of all saved KV states on disk, in bytes; None for the default limit."""
    last_chat = _text("chat/last")
    """Id of the conversation that was shown last; empty if there is none."""
    serve_host = Preference("serve/host", lambda kept: DEFAULT_HOST if kept is None else str(kept))
    """The host or IP address on which the API server listens."""
    serve_port = Preference("serve/port", _port)
    serve_needs_key = _switch("serve/key", default=True)
    """Whether clients of the API server need its key."""
    serves_plain = _switch("serve/plain")
    """Whether the API server may listen without TLS on an address that other computers reach."""
    serves_at_start = _switch("serve/at_start")
    """Whether the API server starts together with the window."""
    shows_chat_list = _switch("chat/list")
    """Whether the list of conversations is shown while layers and chat are both visible."""

    def __init__(self, path: Path | None = None) -> None:
        file = path or settings_path()
        self.fault = find_settings_error(file)
        self.store: _Store = _MemoryStore() if self.fault else _IniStore(file)

    def watch(self, on_fault: Callable[[str, bool], None]) -> None:
        """Call `on_fault` when changes cannot be stored any more, and when they are stored again.

        `on_fault`: called with a sentence, and whether it reports a failure, in the thread of the event loop.
        """
        if isinstance(self.store, _IniStore):
            self.store.on_fault = on_fault

    @property
    def recent_models(self) -> tuple[RecentModel, ...]:
        """The models opened last, newest first. No file is read."""
        try:
            stored = msgspec.json.decode(str(self.store.value("recent_models", "[]")), type=list[_StoredModel])
        except UNREADABLE:
            return ()
        return tuple(RecentModel(Path(each.path), each.title, each.detail) for each in stored)

    def add_recent_model(self, model: RecentModel) -> None:
        """Put `model` first in the list of recent models."""
        self.sync()
        kept = [model, *(other for other in self.recent_models if other.path != model.path)][:MAX_RECENT]
        self._keep_recent(kept)

    def forget_recent_model(self, path: Path) -> None:
        """Remove the model at `path` from the list of recent models."""
        self.sync()
        self._keep_recent([other for other in self.recent_models if other.path != path])

    def forget_recent_models(self) -> None:
        """Empty the list of recent models."""
        self._keep_recent([])

    def _keep_recent(self, models: list[RecentModel]) -> None:
        stored = [_StoredModel(str(each.path), each.title, each.detail) for each in models]
        self._write("recent_models", stored)

    @property
    def parked_models(self) -> tuple[Path, ...]:
        """Paths of the models that were parked (unloaded until their next question) when they were last open."""
        try:
            stored = msgspec.json.decode(str(self.store.value("parked_models", "[]")), type=list[str])
        except UNREADABLE:
            return ()
        return tuple(map(Path, stored))

    def keep_parked(self, model: Path, *, parked: bool) -> None:
        """Store whether the model with the file `model` is parked (unloaded until its next question)."""
        self.sync()
        kept = [path for path in self.parked_models if path != model]
        wanted = [model, *kept][:MAX_RECENT] if parked else kept
        if wanted != list(self.parked_models):
            self._write("parked_models", [str(path) for path in wanted])

    def side_files(self, model: Path) -> StoredSideFiles:
        """Return the projector, LoRA adapters and draft (speculative decoding) last chosen for the model file `model`.

        Reads the settings only, not these files.
        """
        return self._all_side_files().get(str(model), StoredSideFiles())

    def store_side_files(self, model: Path, files: StoredSideFiles) -> None:
        """Store the projector, LoRA adapters and draft (speculative decoding) chosen for the model file `model`."""
        self.sync()
        stored = {path: each for path, each in self._all_side_files().items() if path != str(model)}
        # Models without side files need no entry.
        if files != StoredSideFiles():
            stored[str(model)] = files
        self._write("side_files", stored)

    def _all_side_files(self) -> dict[str, StoredSideFiles]:
        try:
            return msgspec.json.decode(str(self.store.value("side_files", "{}")), type=dict[str, StoredSideFiles])
        except UNREADABLE:
            return {}

    def kept(self, key: str, kind: type[_Kept]) -> _Kept | None:
        """Return the JSON document of type `kind` that is stored under `key`, or None if none can be read."""
        try:
            return msgspec.json.decode(str(self.store.value(key, "")), type=kind)
        except UNREADABLE:
            return None

    def keep(self, key: str, document: Struct) -> None:
        """Store `document` as JSON under `key` in the INI file."""
        self._write(key, document)

    def keep_changes(self, key: str, before: _Kept, after: _Kept) -> None:
        """Store the fields of `after` that differ from `before` in the JSON document under `key`.

        Its other fields stay as they are. So if two windows have read the same document and change different fields,
        both changes are stored. If no document is stored under `key`, all of `after` is stored.
        """
        self.sync()
        fields = msgspec.structs.asdict(after)
        changed = {name: value for name, value in fields.items() if value != getattr(before, name)}
        self.keep(key, msgspec.structs.replace(self.kept(key, type(before)) or before, **changed))

    def _write(self, key: str, document: object) -> None:
        """Store `document` as JSON under `key`. If the document has a path that is not UTF-8, the old value stays."""
        with suppress(UnicodeEncodeError):
            # A set has no order of its own: the same choice gives the same text.
            self.store.setValue(key, msgspec.json.encode(document, order="deterministic").decode())

    def window_state(self) -> tuple[QByteArray, QByteArray] | None:
        """Return the stored geometry and dock state of the main window, or None if there is none."""
        geometry, state = self.store.value("window/geometry"), self.store.value("window/state")
        # In a damaged file the values have other types.
        if isinstance(geometry, QByteArray) and isinstance(state, QByteArray):
            return geometry, state
        return None

    def save_window_state(self, geometry: QByteArray, state: QByteArray) -> None:
        self.store.setValue("window/geometry", geometry)
        self.store.setValue("window/state", state)

    def sync(self) -> None:
        """Write all changes to the INI file now, and read the changes that other windows have written.

        Call it before a list or dictionary is changed and written as a whole.
        """
        self.store.sync()
