"""Downloads and the hub as signals: told in the GUI thread, what is no longer wanted is not told, nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.background import Background
from app.library.downloads import Downloads
from app.library.hub_browser import HubBrowser
from app.notices import Notices
from engine.devices.device import Rig, make_host
from engine.downloads.view import JobState
from engine.errors import EngineError
from engine.hub.addresses import HubAddress, WebAddress
from engine.hub.fit import FitVerdict, RepoFit
from engine.hub.forecast import FitWish
from engine.hub.found import HubModel, SearchQuery
from engine.hub.remote_header import HeaderCache
from engine.hub.settings import HubSettings, hub_settings
from engine.hub.tokens import TokenStore
from engine.units import GIB
from tests.support.hub_server import Fault, HubServer, Repo, hub_server
from tests.support.models import write_tiny_llama
from tests.support.patient_bot import PatientBot
from tests.support.transfers import order_of

RIG = Rig((), make_host("host", 8 * GIB, 8 * GIB))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HubServer]:
    model = write_tiny_llama(tmp_path / "tiny-Q8_0.gguf", file_type="Q8_0").read_bytes()
    with hub_server(Repo("org/tiny", {"tiny-Q8_0.gguf": model}), Repo("org/shut", {}, gated=True)) as found:
        yield found


@pytest.fixture
def hub(server: HubServer) -> HubSettings:
    return hub_settings(environment={"HF_ENDPOINT": server.url})


@pytest.fixture
def background(qapp: object) -> Iterator[Background]:
    found = Background()
    yield found
    found.close()


def _downloads(path: Path, background: Background) -> Downloads:
    return Downloads(
        path, tokens=TokenStore({}), background=background, notices=Notices(), template=order_of(tries=1)
    )  # fmt: skip


def test_a_download_from_an_address_to_its_end(
    qtbot: PatientBot, server: HubServer, hub: HubSettings, background: Background, tmp_path: Path
) -> None:
    downloads = _downloads(tmp_path / "queue.json", background)
    try:
        with qtbot.waitSignal(downloads.finished) as told:
            downloads.add_address(HubAddress("org/tiny"), hub, tmp_path / "to")
        (job,) = told.args
        assert (tmp_path / "to" / "tiny-Q8_0.gguf").read_bytes() == server.repos["org/tiny"].files["tiny-Q8_0.gguf"]
        assert job.paths == (str(tmp_path / "to" / "tiny-Q8_0.gguf"),)
        server.plain["other.gguf"] = b"GGUF and more"
        server.faults.append(Fault("broken"))
        downloads.add_address(WebAddress(f"{server.url}/plain/other.gguf", "other.gguf"), hub, tmp_path / "to")
        qtbot.waitUntil(lambda: [job.state for job in downloads.jobs] == [JobState.DONE, JobState.PAUSED])
        assert "503" in downloads.jobs[1].reason
        downloads.resume(downloads.jobs[1].id)
        qtbot.waitUntil(lambda: [job.state for job in downloads.jobs] == [JobState.DONE, JobState.DONE])
    finally:
        downloads.close()
    again = _downloads(tmp_path / "queue.json", background)
    with qtbot.assertNotEmitted(again.finished):
        qtbot.waitUntil(lambda: len(again.jobs) == 2)
    again.close()


class _Heard:
    def __init__(self, browser: HubBrowser) -> None:
        self.found: list[tuple[HubModel, ...]] = []
        self.fits: list[RepoFit] = []
        self.cards: list[str] = []
        self.wanted: list[str] = []
        self.errors: list[EngineError] = []
        browser.found.connect(self.found.append)
        browser.fitted.connect(self.fits.append)
        browser.card_read.connect(self.cards.append)
        browser.token_wanted.connect(self.wanted.append)
        browser.failed.connect(self.errors.append)


def test_search_look_and_fit(
    qtbot: PatientBot, hub: HubSettings, server: HubServer, background: Background, tmp_path: Path
) -> None:
    cache = HeaderCache(tmp_path / "headers")
    browser = HubBrowser(lambda: hub, tokens=TokenStore({}), cache=cache, background=background)
    heard = _Heard(browser)
    browser.search(SearchQuery("nothing"))
    browser.search(SearchQuery("tiny"))
    qtbot.waitUntil(lambda: bool(heard.found))
    assert [[model.repo for model in models] for models in heard.found] == [["org/tiny"]], "the last search only"
    browser.look(HubAddress("org/tiny"), lambda _model: FitWish(RIG))
    qtbot.waitUntil(lambda: bool(heard.fits and heard.cards))
    assert (heard.fits[0].fits[0].verdict, heard.cards) == (FitVerdict.CPU, ["# A model"])
    server.faults.append(Fault("busy", wait_s=0))
    browser.search(SearchQuery("tiny"))
    qtbot.waitUntil(lambda: bool(heard.errors))
    assert "429" in heard.errors[0].summary()
    assert heard.wanted == []
