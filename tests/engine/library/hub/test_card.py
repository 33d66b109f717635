"""Model cards of repositories: untrusted text, bounded, with a few settings that are shown."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.base.errors import EngineError
from engine.library.hub.card import MAX_SHOWN, fetch_card, read_card, split_front_matter
from engine.library.hub.settings import HubSettings
from tests.support.hub_server import Repo, hub_server

CARD = "---\nlicense: mit\nbase_model:\n- org/base\n- org/other\nlanguage: [en, de]\n---\n# Small\n\nText."


@pytest.fixture
def hub() -> Iterator[HubSettings]:
    with hub_server(Repo("org/Small", {}, card=CARD)) as server:
        yield HubSettings(server.url)


def test_a_card_has_facts_and_text(hub: HubSettings) -> None:
    card = fetch_card("org/Small", hub)
    assert card is not None
    assert card.facts == (("Licence", "mit"), ("Base model", "org/base, org/other"), ("Language", "en, de"))
    assert (card.text, card.is_cut) == ("# Small\n\nText.", False)
    with pytest.raises(EngineError, match="offline"):
        fetch_card("org/Small", HubSettings(hub.endpoint, offline=True))


@pytest.mark.parametrize(
    "settings",
    [
        "license: [",
        "- a\n- b",
        "a: &a [x,x]\nb: &b [*a,*a]\nlicense: *b",
        "license: {deep: {deeper: 1}}",
        "!!python/object/apply:os.system ['true']",
        "license: mit\n" + "x: y\n" * 20_000,
        "[" * 5_000,
    ],
)
def test_settings_of_a_stranger_say_nothing_at_worst(settings: str) -> None:
    card = read_card(f"---\n{settings}\n---\ntext")
    assert (card.facts, card.text) == ((), "text")


def test_what_is_shown_is_bounded_and_on_one_line() -> None:
    card = read_card('---\nlicense: "a\\nb\\u202ec"\nlanguage: [a, b, c, d, e, f, g]\n---\n' + "x" * (MAX_SHOWN + 1))
    assert (len(card.text), card.is_cut) == (MAX_SHOWN, True)
    assert card.facts == (("Licence", "a b\\u202ec"), ("Language", "a, b, c, d, e, f, …"))


def test_text_without_settings_stays_whole() -> None:
    assert split_front_matter("no settings\n---\n") == ("", "no settings\n---\n")
    assert split_front_matter("---\nnever ends") == ("", "---\nnever ends")
