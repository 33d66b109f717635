"""Answers of the hub as our values, and failures as one error each, at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.base.errors import ArgumentError
from engine.library.hub.card import fetch_card
from engine.library.hub.client import list_repo, search_models
from engine.library.hub.listing import SearchQuery
from engine.library.hub.settings import HubError, HubSettings, hub_settings
from tests.support.hub_server import Fault, HubServer, Repo, hub_server

REPO = "org/small-GGUF"


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    files = {"small-Q8_0.gguf": b"GGUF", "mmproj-F16.gguf": b"x", "../../evil.gguf": b"x"}
    repo = Repo(REPO, dict(files), downloads=7, card="---\ntitle: x\n---\n\n# Small\n")
    with hub_server(
        repo, Repo("org/other", {}, downloads=9), Repo("org/gated", {"a.gguf": b"x"}, gated=True, downloads=1)
    ) as found:
        yield found


@pytest.fixture
def hub(server: HubServer) -> HubSettings:
    server.faults.clear()
    server.asked.clear()
    return hub_settings(environment={"HF_ENDPOINT": server.url})


def test_search(server: HubServer, hub: HubSettings) -> None:
    (found,) = search_models(SearchQuery("small"), hub)
    assert (found.repo, found.downloads, found.architecture, found.n_ctx_train) == (REPO, 7, "llama", 4096)
    assert (found.licence, found.updated, found.gated) == ("mit", "2026-11-01", False)
    assert [each.repo for each in search_models(SearchQuery(order="downloads", limit=2), hub)] == ["org/other", REPO]
    assert all(asked.path.startswith("/api/models?") for asked in server.asked), "nothing but the search was asked"


def test_a_listing_names_commit_hashes_and_sizes(hub: HubSettings) -> None:
    listing = list_repo(REPO, hub)
    (quantisation,) = listing.quantisations
    assert (listing.commit, listing.n_left_out) == ("c" * 40, 1)
    assert (quantisation.tag, quantisation.size_bytes, len(quantisation.files[0].sha256 or "")) == ("Q8_0", 4, 64)
    assert [file.path for file in listing.projectors] == ["mmproj-F16.gguf"]


def test_the_token_goes_with_the_question_and_is_not_sent_on(server: HubServer, hub: HubSettings) -> None:
    assert list_repo("org/gated", hub, "hf_right").gated
    assert {asked.token for asked in server.asked} == {"hf_right"}


@pytest.mark.parametrize(
    ("fault", "word"),
    [(Fault("busy", wait_s=3), "rate_limited"), (Fault("broken"), "server"), (Fault("web_page"), "answer")],
)
def test_a_hub_in_trouble_is_told_at_once(server: HubServer, hub: HubSettings, fault: Fault, word: str) -> None:
    server.faults.append(fault)
    with pytest.raises(HubError) as caught:
        search_models(SearchQuery("small"), hub)
    assert (caught.value.fault, caught.value.kind) == (word, "unreachable")
    assert len(server.asked) == 1, "it was asked once"


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Python changes from thread to thread as often as it can, so that a gap between two steps is met."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


@pytest.mark.usefixtures("eager_threads")
def test_searches_at_the_same_time_leave_each_other_alone(server: HubServer, hub: HubSettings) -> None:
    """A shared HTTP client was closed by each new search, between another one's choosing it and using it."""
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(search_models, SearchQuery("small"), hub) for _ in range(200)]
    assert {answer.result()[0].repo for answer in answers} == {REPO}


def test_what_is_not_there(hub: HubSettings) -> None:
    with pytest.raises(HubError, match="org/none") as caught:
        list_repo("org/none", hub)
    assert (caught.value.fault, caught.value.kind) == ("not_found", "argument")


def test_a_hub_that_is_not_reached() -> None:
    hub = hub_settings(environment={"HF_ENDPOINT": "http://127.0.0.1:9"})
    with pytest.raises(HubError) as caught:
        list_repo(REPO, hub)
    assert caught.value.fault == "unreachable"


def test_offline_asks_nobody(server: HubServer) -> None:
    hub = hub_settings(environment={"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "1"})
    server.asked.clear()
    for ask in (lambda: search_models(SearchQuery(), hub), lambda: fetch_card(REPO, hub)):
        with pytest.raises(HubError, match="offline"):
            ask()
    assert server.asked == []


def test_which_hub_is_asked() -> None:
    assert hub_settings(environment={}).endpoint == "https://huggingface.co"
    assert hub_settings("https://mirror.example/", environment={}) == HubSettings(
        "https://mirror.example", False, False
    )
    assert hub_settings("https://mirror.example", environment={"HF_ENDPOINT": "https://a.example"}).trusted
    for address in ("http://mirror.example", "ftp://mirror.example", "https://", "https://user@mirror.example"):
        with pytest.raises(ArgumentError, match="https://"):
            hub_settings(address, environment={})
