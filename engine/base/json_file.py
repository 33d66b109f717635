"""Strict reading of the JSON files that people edit. Every error is one sentence with the path of the faulty key."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec

from engine.base.errors import EngineError
from engine.base.files import locked, read_at_most, write_whole
from engine.base.language import tr
from engine.base.units import MAX_SIZE_BYTES, parse_size

MAX_FILE_BYTES = 1 << 20
"""Largest JSON file that is read. Layouts and rigs have a few KiB; a larger file is something else."""

MAX_DIGITS = 40

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions that msgspec raises for invalid JSON."""

T = TypeVar("T")
D = TypeVar("D")
Choice = TypeVar("Choice", bound=str)
Document = TypeVar("Document", bound=msgspec.Struct)


class Fail(Protocol):
    """Constructor of the error class for one kind of document, such as `LayoutError`."""

    def __call__(self, reason: str, *, location: str = "", source: str = "") -> EngineError: ...


class JsonObject:
    """A JSON object whose methods return values with checked type and range, or raise the document's error (`fail`).

    `location`: path of the object in the document; empty: the root.
    `source`: name of the file in errors.
    `fail`: constructor of the document's error, such as `LayoutError`.
    """

    def __init__(self, value: dict[str, object], location: str, source: str, fail: Fail) -> None:
        self._value = value
        self._location = location
        self._source = source
        self._fail = fail

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._value)

    def location_of(self, key: str) -> str:
        """Return the path of `key`, such as `runs[2].layers`."""
        return f"{self._location}.{key}" if self._location else key

    def refuse(self, reason: str, key: str | None = None) -> NoReturn:
        """Raise the error for this kind of document, such as `LayoutError`, with `reason` and the path of `key`.

        `key`: key of this object; None: the error has the path of the object itself.
        """
        raise self._fail(reason, location=self._location if key is None else self.location_of(key), source=self._source)

    def allow(self, *keys: str) -> None:
        """Raise the error for this kind of document, such as `LayoutError`, if a key is not one of `keys`."""
        for key in self._value:
            if key not in keys:
                self.refuse(
                    tr(
                        "unknown key {key}; allowed keys: {names}",
                        key=json.dumps(key[:60]),
                        names=", ".join(keys),
                    )
                )

    def maybe(self, key: str, read: Callable[[str], T], default: D) -> T | D:
        """Return `read(key)`, or `default` if the key is absent."""
        return read(key) if key in self._value else default

    def nullable(self, key: str, read: Callable[[str], T], default: D) -> T | D:
        """Return `read(key)`, or `default` if the key is absent or null."""
        return default if self._value.get(key) is None else read(key)

    def integer(self, key: str, low: int, high: int) -> int:
        """Return the whole number under `key`, which must be from `low` to `high`."""
        value = self._needed(key)
        # bool is a subclass of int.
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(tr("the value must be a whole number, not {shown}", shown=_shown(value)), key)
        if not low <= value <= high:
            self.refuse(
                tr("the value {shown} is outside of {low} to {high}", shown=_shown(value), low=low, high=high), key
            )
        return value

    def number(self, key: str) -> float:
        """Return the finite number under `key`."""
        value = self._needed(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(tr("the value must be a number, not {shown}", shown=_shown(value)), key)
        if abs(value) > 1e18 or not math.isfinite(value):
            self.refuse(tr("the number {shown} is too large", shown=_shown(value)), key)
        return float(value)

    def flag(self, key: str) -> bool:
        """Return the boolean under `key`."""
        value = self._needed(key)
        if not isinstance(value, bool):
            self.refuse(tr("the value must be true or false, not {shown}", shown=_shown(value)), key)
        return value

    def text(self, key: str) -> str:
        """Return the text under `key`, which must be encodable as UTF-8."""
        value = self._needed(key)
        if not isinstance(value, str):
            self.refuse(tr("the value must be text in quotes, not {shown}", shown=_shown(value)), key)
        # JSON can write half of a surrogate pair as an escape. Python takes it, and UTF-8 cannot encode it.
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            self.refuse(tr("the text contains a lone surrogate, which is half of a character; remove it"), key)
        return value

    def is_text(self, key: str, text: str) -> bool:
        """Return whether the value of `key` is exactly this text."""
        return self._value.get(key) == text

    def choice(self, key: str, options: Sequence[Choice]) -> Choice:
        """Return the text under `key`, which must be one of `options`."""
        value = self.text(key)
        found = next((option for option in options if option == value), None)
        if found is None:
            self.refuse(
                tr("the value {shown} is not one of {names}", shown=_shown(value), names=", ".join(options)), key
            )
        return found

    def size(self, key: str) -> int:
        """Return the size under `key` in bytes: a whole number, or text such as "24GiB"."""
        value = self._needed(key)
        if isinstance(value, str):
            try:
                return parse_size(value)
            except ValueError as error:
                self.refuse(str(error), key)
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(
                tr(
                    'the value must be a whole number of bytes or a size such as "24GiB", not {shown}',
                    shown=_shown(value),
                ),
                key,
            )
        if value < 0:
            self.refuse(tr("a size must not be negative, but the value is {shown}", shown=_shown(value)), key)
        if value > MAX_SIZE_BYTES:
            self.refuse(tr("{shown} bytes are more memory than any device has", shown=_shown(value)), key)
        return value

    def any_value(self, key: str) -> object:
        """Return the value under `key` without a check of its type."""
        return self._needed(key)

    def nested(self, key: str) -> JsonObject:
        """Return the object under `key`."""
        return self._child(self._needed(key), self.location_of(key))

    def nested_list(self, key: str) -> tuple[JsonObject, ...]:
        """Return the list of objects under `key`."""
        value = self._needed(key)
        if not isinstance(value, list):
            self.refuse(tr("the value must be a list, not {shown}", shown=_shown(value)), key)
        return tuple(self._child(item, f"{self.location_of(key)}[{index}]") for index, item in enumerate(value))

    def _child(self, value: object, location: str) -> JsonObject:
        if not isinstance(value, dict):
            raise self._fail(
                tr("the value must be an object, not {shown}", shown=_shown(value)),
                location=location,
                source=self._source,
            )
        return JsonObject(value, location, self._source, self._fail)

    def _needed(self, key: str) -> object:
        if key not in self._value:
            self.refuse(tr("this required key is missing"), key)
        return self._value[key]


def parse_json(text: str, object_pairs_hook: Callable[[list[tuple[str, object]]], object] | None = None) -> Any:
    """Return the value of a JSON text. All its numbers are finite.

    `object_pairs_hook`: as in `json.loads`.

    Raises:
        ValueError: the text is not JSON, or a number in it is not finite or has more than `MAX_DIGITS` digits.
        RecursionError: objects or lists are nested too deeply.
    """
    return json.loads(
        text,
        object_pairs_hook=object_pairs_hook,
        parse_int=_whole_number,
        parse_float=_finite,
        parse_constant=_no_constant,
    )


def parse_document(data: bytes | str, *, what: str, source: str, version: int, fail: Fail) -> JsonObject:
    """Return the root object of a JSON document that has the version `version`.

    Raises the document's error (`fail`) if the document is longer than `MAX_FILE_BYTES`, is not UTF-8 or not JSON, has
    duplicate keys, NaN, deep nesting, or another version.
    `what`: the kind of document for error messages, such as "layout".
    `source`: name of the file for error messages.
    """
    try:
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(tr("the file is larger than 1 MiB, so it is not a {kind} file", kind=what))
        # Some editors begin a file with a byte order mark.
        text = data.decode("utf-8-sig") if isinstance(data, bytes) else data
        value: object = parse_json(text, object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        raise fail(
            tr("the file is not UTF-8 text at byte {start}; save the file as UTF-8", start=error.start), source=source
        ) from error
    except json.JSONDecodeError as error:
        raise fail(
            tr(
                "invalid JSON at line {lineno}, column {colno}: {msg}",
                lineno=error.lineno,
                colno=error.colno,
                msg=error.msg,
            ),
            source=source,
        ) from error
    except RecursionError as error:
        raise fail(
            tr("the objects or lists in the file are nested too deeply for a {kind} file", kind=what), source=source
        ) from error
    # The two errors above are ValueErrors as well, so their clauses come first.
    except ValueError as error:
        raise fail(str(error), source=source) from error
    if not isinstance(value, dict):
        raise fail(
            tr("a {kind} file must contain one object, not {shown}", kind=what, shown=_shown(value)), source=source
        )
    root = JsonObject(value, "", source, fail)
    found = root.integer("version", 0, 1 << 31)
    if found != version:
        remedy = (
            tr("update Layerdeck to read the file")
            if found > version
            else tr("versions begin at {version}, so correct the number", version=version)
        )
        root.refuse(
            tr(
                "the {kind} file has version {found}, but only version {version} is supported; {remedy}",
                kind=what,
                found=found,
                version=version,
                remedy=remedy,
            ),
            "version",
        )
    return root


def read_file(path: Path, *, what: str, fail: Fail) -> bytes:
    """Return the content of a file, cut after `MAX_FILE_BYTES` + 1 bytes.

    The additional byte lets `parse_document` notice and refuse a file that is too long.
    `what`: the kind of document for error messages, such as "layout".
    `fail`: the error to raise if the file cannot be read.
    """
    try:
        return read_at_most(path, MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise fail(
            tr("the {kind} file cannot be read ({reason}); check the path", kind=what, reason=reason), source=path.name
        ) from error


def write_file(path: Path, data: bytes, *, what: str, fail: Fail) -> None:
    """Write a file atomically: other processes see the old or the new file.

    `what`: the kind of document for error messages, such as "layout".
    `fail`: the error to raise if the file cannot be written.
    """
    try:
        write_whole(path, data)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise fail(
            tr("the {kind} file cannot be written ({reason}); choose another place", kind=what, reason=reason),
            source=path.name,
        ) from error


def read_struct(path: Path, kind: type[Document], max_bytes: int, *, version: int | None) -> Document | None:
    """Return the document that `write_struct` wrote to a file.

    None: the file is missing, damaged, longer than `max_bytes`, or of another version.

    `kind`: class of the document.
    `version`: expected value of the document's field `version`; None if every version is accepted.
    """
    try:
        # No time for a pipe or device in the place of our own file: nobody waits for a user here.
        data = read_at_most(path, max_bytes + 1, timeout_s=0.0)
        document = msgspec.json.decode(data, type=kind) if len(data) <= max_bytes else None
    except (OSError, ValueError, *UNREADABLE):
        return None
    return document if version is None or getattr(document, "version", None) == version else None


def write_struct(path: Path, document: msgspec.Struct, *, what: str, fail: Fail) -> None:
    """Write a document as JSON for `read_struct`; create missing folders.

    `what`: the kind of document for error messages, such as "layout".
    `fail`: the error to raise if the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise fail(
            tr(
                "the folder of the {kind} file cannot be created ({reason}); check the permissions and the free space",
                kind=what,
                reason=error.strerror,
            ),
            source=path.name,
        ) from error
    write_file(path, msgspec.json.encode(document), what=what, fail=fail)


@contextmanager
def changing(path: Path, *, what: str, fail: Fail) -> Iterator[None]:
    """Lock the file `path` while a `with` block reads and changes it.

    Other processes and threads that use `changing` for the same file wait until the block has ended. Missing folders
    are created. On Windows nothing is locked.

    `what`: the kind of document for error messages, such as "layout".
    `fail`: the error to raise if a folder cannot be created or the lock file cannot be opened.
    """
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(path))
        except OSError as error:
            reason = tr("the {kind} file cannot be written ({reason}); choose another place", kind=what,
                        reason=error.strerror)  # fmt: skip
            raise fail(reason, source=path.name) from error
        yield


def change_struct(
    path: Path,
    read: Callable[[Path], T],
    change: Callable[[T], T],
    write: Callable[[Path, T], None],
    *,
    what: str,
    fail: Fail,
) -> None:
    """Read the value in the file `path`, change it, and write it back if it has changed.

    The file is locked from reading to writing (`changing`), because several windows and commands may change it.

    `change`: returns the changed value.
    `what`, `fail`: as for `changing`.
    """
    with changing(path, what=what, fail=fail):
        before = read(path)
        after = change(before)
        if after != before:
            write(path, after)


def encode_document(document: dict[str, object]) -> bytes:
    """Return a document as indented UTF-8 JSON that ends with a newline."""
    return (json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        doubled = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(tr("the key {key} occurs twice in one object; remove one", key=json.dumps(doubled[:60])))
    return value


def _whole_number(text: str) -> int:
    # `int` takes quadratic time, and Python itself refuses texts only from 4,300 digits on.
    if len(text) > MAX_DIGITS:
        raise ValueError(
            tr(
                "a number in the file has {count} digits; at most {max_digits} digits are allowed",
                count=len(text),
                max_digits=MAX_DIGITS,
            )
        )
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(tr("the number {text} is too large", text=text[:MAX_DIGITS]))
    return number


def _no_constant(text: str) -> NoReturn:
    raise ValueError(tr("{text} is not a JSON number", text=text))


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return tr("an object")
    if isinstance(value, list):
        return tr("a list")
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
