"""The `context` of a layout file, read and written by the table."""

from __future__ import annotations

from typing import Any

from engine.json_file import JsonObject
from engine.settings.context_settings import ContextSettings
from engine.settings.table import KEYS, SETTINGS


def parse_context(item: JsonObject) -> ContextSettings:
    """Return what the object says; what it does not name is at its default. Refuses through `item`."""
    item.allow(*KEYS)
    named: dict[str, Any] = {
        setting.key: setting.kind.read(item, setting.key) for setting in SETTINGS if setting.key in item.keys
    }
    return ContextSettings(**named)


def context_document(context: ContextSettings) -> dict[str, object]:
    """Return the settings as a file has them."""
    values = {setting: getattr(context, setting.key) for setting in SETTINGS}
    return {
        setting.key: setting.kind.written(value)
        for setting, value in values.items()
        if not setting.rare or value != setting.default
    }
