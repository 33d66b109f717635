"""Presets (named system prompts with sampling settings), in a JSON file that people edit and share.

The module also decides which system prompt and settings apply to a conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from msgspec import Struct

from engine.base.errors import ChatError, EngineError
from engine.base.json_file import (
    MAX_FILE_BYTES,
    JsonObject,
    changing,
    encode_document,
    parse_document,
    read_file,
    write_file,
)
from engine.base.language import tr
from engine.chat.conversation import Conversation
from engine.chat.thinking import TEMPLATE_KEY
from engine.model.demo.speaking import recommended_sampling
from engine.model.gguf.model_file import ModelFile
from engine.planning.settings.kinds import SamplingValue
from engine.planning.settings.sampling_sources import Sampling, model_sampling, sampling_of
from engine.planning.settings.sampling_table import SAMPLING_BY_KEY, SAMPLING_KEYS

VERSION = 1
MAX_PRESETS = 1000
MAX_NAME_CHARACTERS = 200


class Preset(Struct, frozen=True, kw_only=True):
    """A named system prompt with sampling settings, by the names of `SamplingSettings`.

    Settings that the preset does not contain come from the model or the conversation.
    """

    name: str
    system: str = ""
    settings: dict[str, SamplingValue] = {}


def read_presets(path: Path) -> tuple[Preset, ...]:
    """Return the presets of a file; none if the file does not exist.

    Raises:
        ChatError: the file cannot be read; the sentence names the faulty key.
    """
    # No preset was saved yet.
    if not path.exists():
        return ()
    return parse_presets(read_file(path, what="preset", fail=_fault), source=path.name)


def parse_presets(data: bytes | str, *, source: str = "") -> tuple[Preset, ...]:
    """Return the presets in a document. `source`: file name for error messages.

    Raises:
        ChatError: the document cannot be used; the sentence names the faulty key.
    """
    root = parse_document(data, what="preset", source=source, version=VERSION, fail=_fault)
    root.allow("version", "presets")
    items = root.nested_list("presets")
    if len(items) > MAX_PRESETS:
        root.refuse(
            tr(
                "there are {count} presets; at most {max_presets} are allowed",
                count=len(items),
                max_presets=MAX_PRESETS,
            ),
            "presets",
        )
    presets = tuple(map(_preset, items))
    names = [preset.name for preset in presets]
    for item, name in zip(items, names, strict=True):
        if names.count(name) > 1:
            item.refuse(tr("another preset has the same name; change one of the names"), "name")
    return presets


def write_presets(path: Path, presets: Iterable[Preset]) -> None:
    """Write the presets to a file.

    Raises:
        ChatError: the file cannot be written, or `read_presets` would refuse it.
    """
    data = encode_document({"version": VERSION, "presets": [_document(preset) for preset in presets]})
    if len(data) > MAX_FILE_BYTES:
        reason = tr("the presets need more than 1 MiB; shorten the system prompt, or delete other presets")
        raise _fault(reason, source=path.name)
    # A file that cannot be read again would lose all presets.
    parse_presets(data, source=path.name)
    write_file(path, data, what="preset", fail=_fault)


def update_presets(path: Path, change: Callable[[dict[str, Preset]], object]) -> tuple[Preset, ...]:
    """Change the presets in a file, and return all presets that the file then has.

    Except on Windows, the file is locked meanwhile, so that a change by another process at the same time is not lost.

    `change`: a function that changes the dictionary of the file's presets, by name.

    Raises:
        ChatError: the file cannot be read or written, or `read_presets` would refuse the changed file. The file is then
            unchanged.
    """
    with changing(path, what="preset", fail=_fault):
        presets = {preset.name: preset for preset in read_presets(path)}
        change(presets)
        write_presets(path, presets.values())
    return tuple(presets.values())


def system_prompt(conversation: Conversation, preset: Preset | None) -> str:
    """Return the system prompt of a conversation: its own prompt, else the prompt of its preset."""
    return conversation.system or ("" if preset is None else preset.system)


def chat_sampling(model: ModelFile | None, preset: Preset | None, settings: Mapping[str, object]) -> Sampling:
    """Return the sampling settings of a conversation with the source of each value.

    `settings`: the conversation's own settings. They override the settings of the preset and of the model.
    """
    of_model = {} if model is None else model_sampling(model.metadata)
    of_preset = {} if preset is None else preset.settings
    return sampling_of(of_model, of_preset, settings, authors=recommended_sampling(model))


def chat_template(model: ModelFile | None, own: str = "") -> str:
    """Return the chat template in use: the conversation's own (`own`) or the model's; empty if both are missing."""
    found = own or ("" if model is None else model.metadata.get(TEMPLATE_KEY))
    return found if isinstance(found, str) else ""


def _preset(item: JsonObject) -> Preset:
    item.allow("name", "system", "settings")
    name = item.text("name").strip()
    if not 0 < len(name) <= MAX_NAME_CHARACTERS:
        item.refuse(
            tr(
                "the name of a preset must have 1 to {max_name_characters} characters",
                max_name_characters=MAX_NAME_CHARACTERS,
            ),
            "name",
        )
    settings: dict[str, SamplingValue] = {}
    if "settings" in item.keys:
        values = item.nested("settings")
        values.allow(*SAMPLING_KEYS)
        for key in values.keys:
            try:
                settings[key] = SAMPLING_BY_KEY[key].kind.checked(values.any_value(key))
            except ValueError as error:
                values.refuse(str(error), key)
    return Preset(name=name, system=item.maybe("system", item.text, ""), settings=settings)


def _document(preset: Preset) -> dict[str, object]:
    return {
        "name": preset.name,
        **({"system": preset.system} if preset.system else {}),
        **({"settings": preset.settings} if preset.settings else {}),
    }


def _fault(reason: str, *, location: str = "", source: str = "") -> EngineError:
    return ChatError(": ".join(part for part in (source, location, reason) if part))
