"""The file with a user's settings of the server: further names of models, and idle times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path

from msgspec import Struct, field

from engine.api.server.offers import entry_of_file
from engine.api.wire.api_request import keep_alive_seconds
from engine.api.wire.errors import ApiError
from engine.api.wire.names import ModelEntry, find_entry
from engine.base.errors import ArgumentError, EngineError
from engine.base.json_file import JsonObject, parse_document, read_file
from engine.base.values import replace

VERSION = 1
MAX_NAME = 200


def preferences_error(reason: str, *, location: str = "", source: str = "") -> ArgumentError:
    """Return the error for a preferences file that cannot be used.

    `location`: key in the file to which the reason applies. `source`: name of the file.
    """
    return ArgumentError(f"{source}{': ' * bool(location)}{location}: {reason}.")


class Preferences(Struct, frozen=True):
    """A user's settings of the server.

    `aliases`: names that the user gave to models, each with the name or file of the model.
    `keep_alive_s`: idle time in seconds after which a model is unloaded; None: the server's default.
    `keep_alive_of`: idle times in seconds of single models, by their name or file.
    """

    aliases: Mapping[str, str] = field(default_factory=dict)
    keep_alive_s: float | None = None
    keep_alive_of: Mapping[str, float] = field(default_factory=dict)


def read_preferences(path: Path) -> Preferences:
    """Return the preferences in a file; empty preferences if the file does not exist.

    Raises:
        ArgumentError: the file cannot be read, or has an invalid value.
    """
    if not path.exists():
        return Preferences()
    data = read_file(path, what="server settings", fail=preferences_error)
    root = parse_document(data, what="server settings", source=path.name, version=VERSION, fail=preferences_error)
    root.allow("version", "aliases", "keep_alive", "models")
    aliases = root.maybe("aliases", root.nested, None)
    models = root.maybe("models", root.nested, None)
    return Preferences(
        aliases={} if aliases is None else {check_alias(key): aliases.text(key) for key in aliases.keys},
        keep_alive_s=root.nullable("keep_alive", partial(_seconds, root), None),
        keep_alive_of={} if models is None else {key: _of_model(models.nested(key)) for key in models.keys},
    )


def _of_model(model: JsonObject) -> float:
    model.allow("keep_alive")
    return _seconds(model, "keep_alive")


def _seconds(document: JsonObject, key: str) -> float:
    value, seconds = document.any_value(key), None
    with suppress(ApiError):
        seconds = keep_alive_seconds(value) if isinstance(value, str | int | float) else None
    if seconds is None:
        document.refuse('this must be a time such as "5m", "30s", 0, or -1 for never', key)
    return seconds


def check_alias(name: str) -> str:
    """Check a name that the user gives to a model; return it without white space around it.

    Raises:
        ArgumentError: the name is empty or too long, or has control characters.
    """
    if not name.strip() or len(name) > MAX_NAME or not name.isprintable():
        raise ArgumentError(f"A model name must have 1 to {MAX_NAME} characters on one line; choose another name.")
    return name.strip()


def with_preferences(entries: Sequence[ModelEntry], preferences: Preferences) -> tuple[ModelEntry, ...]:
    """Return `entries` with the user's names and idle times. Files outside the library get an entry if a preference
    names them.

    A preference for a model or file that does not exist now has no effect. It stays in the file for later.
    """
    found = list(entries)
    for alias, target in preferences.aliases.items():
        index = _index_of(found, target)
        if index is None and (entry := _readable_entry(Path(target))) is not None:
            found.append(entry)
            index = len(found) - 1
        if index is not None and alias not in found[index].all_names:
            found[index] = replace(found[index], names=(*found[index].names, alias))
    for target, seconds in preferences.keep_alive_of.items():
        index = _index_of(found, target)
        if index is not None:
            found[index] = replace(found[index], keep_alive_s=seconds)
    return tuple(found)


def _readable_entry(path: Path) -> ModelEntry | None:
    """Return the entry of a file; None if it is not a model file that can be opened."""
    try:
        state = path.stat()
        return _entry_in_state(path, state.st_mtime_ns, state.st_size) if path.is_file() else None
    except (OSError, ValueError, EngineError):  # ValueError: the name has a null character
        return None


@lru_cache(maxsize=256)
def _entry_in_state(path: Path, _changed_ns: int, _size_bytes: int) -> ModelEntry:
    # Lists are made for many requests, and a header may have megabytes.
    return entry_of_file(path)


def _index_of(entries: Sequence[ModelEntry], target: str) -> int | None:
    """Return the index of the entry with this name or file path; None if there is none."""
    with suppress(ApiError):
        return list(entries).index(find_entry(target, entries))
    with suppress(OSError):  # a folder that this user may not read, or a name that is too long
        path = Path(target)
        if path.is_file():
            resolved = path.resolve()
            return next((index for index, each in enumerate(entries) if each.path.resolve() == resolved), None)
    return None
