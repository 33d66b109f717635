"""Help > New Version: off until people turn it on, beside the GUI thread, and only what is signed is told."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.background import Background
from app.notices import Notice, Notices
from app.releases import KEY, KeptLook, Look, ReleaseKeeper
from app.settings import Settings
from app.window.releases_dialog import ReleasesDialog
from engine.releases.source import Source
from tests.support.accessibility import nameless
from tests.support.hub_server import Fault, HubServer, hub_server
from tests.support.signed_releases import PUBLIC_KEY, signed_release

LONG_MS = 20_000


def today() -> date:
    return datetime.now(UTC).date()


@pytest.fixture
def server() -> Iterator[HubServer]:
    with hub_server() as opened:
        opened.plain["release.json"] = signed_release(today())
        yield opened


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(tmp_path / "settings.ini")


@pytest.fixture
def notices(qtbot: QtBot) -> Notices:
    return Notices()


@pytest.fixture
def keeper(server: HubServer, settings: Settings, notices: Notices) -> Iterator[ReleaseKeeper]:
    background = Background()
    yield ReleaseKeeper(
        settings, background, notices, source=Source(address=f"{server.url}/plain/release.json", key=PUBLIC_KEY)
    )
    background.close()


def look(keeper: ReleaseKeeper, qtbot: QtBot) -> Look:
    with qtbot.waitSignal(keeper.looked, timeout=LONG_MS) as caught:
        keeper.look()
    (found,) = caught.args
    assert isinstance(found, Look)
    return found


def test_nobody_is_asked_until_people_want_that_and_then_once_a_day(
    keeper: ReleaseKeeper, server: HubServer, settings: Settings, qtbot: QtBot
) -> None:
    keeper.start()
    assert not keeper.is_looking
    keeper.turn(True)
    with qtbot.waitSignal(keeper.looked, timeout=LONG_MS):
        keeper.start()
    keeper.start()
    assert not keeper.is_looking, "today it was done"
    settings.keep(KEY, KeptLook(daily=True, looked="2026-01-01"))
    with qtbot.waitSignal(keeper.looked, timeout=LONG_MS):
        keeper.start()
    assert len(server.asked) == 2


def test_a_newer_version_is_told_and_its_number_kept(
    keeper: ReleaseKeeper, notices: Notices, server: HubServer, settings: Settings, tmp_path: Path, qtbot: QtBot
) -> None:
    said: list[Notice] = []
    notices.given.connect(said.append)
    found = look(keeper, qtbot)
    assert found.is_news
    assert [notice.text for notice in said] == [f"{found.sentence} Help > New Version says where."]
    assert "9.1.0 is out" in found.sentence
    assert keeper.kept.serial == 7
    server.plain["release.json"] = signed_release(today(), serial=6, version="9.9.9")
    assert "older answer" in look(keeper, qtbot).sentence
    assert keeper.kept.serial == 7
    assert len(said) == 1
    settings.sync()
    kept = Settings(tmp_path / "settings.ini").kept(KEY, KeptLook)
    assert kept is not None
    assert kept.serial == 7


def test_an_old_version_is_no_news_and_a_fault_disturbs_nobody(
    keeper: ReleaseKeeper, notices: Notices, server: HubServer, qtbot: QtBot
) -> None:
    said: list[Notice] = []
    notices.given.connect(said.append)
    server.plain["release.json"] = signed_release(today(), version="0.0.1")
    assert "is the newest version" in look(keeper, qtbot).sentence
    server.faults.append(Fault("broken"))
    found = look(keeper, qtbot)
    assert (found.release, found.is_news) == (None, False)
    assert "trouble" in found.sentence
    assert said == []


def test_the_dialog_turns_it_on_and_shows_what_was_found(
    keeper: ReleaseKeeper, server: HubServer, qtbot: QtBot
) -> None:
    parent = ReleasesDialog(None, keeper)  # type: ignore[arg-type]
    qtbot.addWidget(parent)
    parent.show()
    assert nameless(parent) == []
    assert not parent.daily_box.isChecked()
    with qtbot.waitSignal(keeper.looked, timeout=LONG_MS):
        parent.daily_box.click()
        assert parent.text == "Looking…"
    assert keeper.kept.daily
    assert "9.1.0 is out" in parent.text
    assert parent.page_button.isEnabled()
    parent.address_edit.setText("http://192.0.2.1/")
    parent.look_button.click()
    assert "begins with https://" in parent.text
    assert not keeper.is_looking
    parent.address_edit.setText(f"{server.url}/plain/other.json")
    with qtbot.waitSignal(keeper.looked, timeout=LONG_MS):
        parent.look_button.click()
    assert keeper.kept.address.endswith("other.json")
    assert "no such file" in parent.text
    assert not parent.page_button.isEnabled()
    parent.daily_box.click()
    assert not keeper.kept.daily
    parent.close()


def test_a_copy_without_an_address_says_so(settings: Settings, notices: Notices, qtbot: QtBot) -> None:
    background = Background()
    keeper = ReleaseKeeper(settings, background, notices, source=Source(address="", key=PUBLIC_KEY))
    assert "enter an address" in look(keeper, qtbot).sentence
    background.close()
