"""Fetches and parses model cards: the README.md of a repository, and some of its YAML metadata.

The text is untrusted. Views show no HTML of it and load nothing that it refers to.
"""

from __future__ import annotations

from msgspec import Struct

from engine.base.language import tr
from engine.base.texts import clean
from engine.library.hub.settings import HubError, HubSettings
from engine.library.hub.web import open_url

MAX_CARD_BYTES = 512 * 1024
# Longest text in characters: the layout of a longer one would block the window.
MAX_SHOWN = 16_000
# Longest metadata block that is parsed, in characters.
_MAX_SETTINGS = 32_000
_MAX_VALUES = 6
_MAX_VALUE = 200
_SETTINGS = (
    ("license", tr("Licence")), ("license_name", tr("Name of the licence")), ("base_model", tr("Base model")),
    ("language", tr("Language")), ("pipeline_tag", tr("Task")), ("datasets", tr("Data sets")),
)  # fmt: skip


class ModelCard(Struct, frozen=True):
    """A model card of the hub.

    `facts`: labels and values from the YAML metadata.
    `text`: the Markdown text.
    `is_cut`: whether the text was cut at `MAX_SHOWN` characters.
    """

    facts: tuple[tuple[str, str], ...]
    text: str
    is_cut: bool


def fetch_card(repo: str, hub: HubSettings, token: str | None = None, *, revision: str = "main") -> ModelCard | None:
    """Return the model card of a repository; None if the repository has none. Waits for the network.

    Raises:
        HubError: if the hub does not answer properly.
    """
    hub.require_online()
    try:
        with open_url(hub.file_url(repo, revision, "README.md"), token=token, first=0, end=MAX_CARD_BYTES) as response:
            data = response.read_whole(MAX_CARD_BYTES)
    except HubError as error:
        if error.fault == "not_found":
            return None
        raise
    return read_card(data.decode("utf-8", "replace"))


def read_card(source: str) -> ModelCard:
    """Return the model card in the text of a README.md."""
    settings, text = split_front_matter(source)
    return ModelCard(_facts(settings), text[:MAX_SHOWN], len(text) > MAX_SHOWN)


def split_front_matter(text: str) -> tuple[str, str]:
    """Split Markdown into its YAML metadata between two lines of `---` ("" for none) and the rest."""
    lines = text.lstrip("\ufeff").splitlines()
    if not lines or lines[0].strip() != "---":
        return "", text
    end = next((number for number, line in enumerate(lines[1:], 1) if line.strip() == "---"), None)
    if end is None:
        return "", text
    return "\n".join(lines[1:end]), "\n".join(lines[end + 1 :]).lstrip()


def _facts(settings: str) -> tuple[tuple[str, str], ...]:
    if not settings or len(settings) > _MAX_SETTINGS:
        return ()
    import yaml

    try:
        values = yaml.safe_load(settings)
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a date that no calendar has.
        return ()
    if not isinstance(values, dict):
        return ()
    return tuple((label, words) for key, label in _SETTINGS if (words := _words(values.get(key))))


def _words(value: object) -> str:
    values = value if isinstance(value, list) else [value]
    words = [clean(str(each), _MAX_VALUE) for each in values[:_MAX_VALUES] if isinstance(each, str | int | float)]
    more = ", …" if len(values) > _MAX_VALUES else ""
    return ", ".join(filter(None, words)) + more if words else ""
