"""The Find tab with a local hub: search, forecasts before a download, the queue, and downloaded models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import keyring
import keyring.backends.fail
import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QTreeWidget
from pytestqt.qtbot import QtBot

from app.wiring import WindowObjects
from tests.support.hub_server import Fault, HubServer, Repo, hub_server
from tests.support.models import write_tiny_llama
from tests.support.windows import WindowOpener
from widgets.common.elided_label import ElidedLabel
from widgets.library.card_view import CardView
from widgets.library.find_panel import FindPanel

CARD = """---
license: apache-2.0
base_model: [org/Ada]
---
# Ada

**Small.** ![a picture](https://192.0.2.1/x.png) <img src="https://192.0.2.1/y.png">
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("hub")
    names = {f"Ada-{kind}.gguf": kind for kind in ("Q8_0", "F16")}
    return {
        name: write_tiny_llama(folder / name, file_type=kind, n_layers=2).read_bytes() for name, kind in names.items()
    }


@pytest.fixture
def hub(files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    for name in ("LLAMA_CACHE", "OLLAMA_MODELS", "HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with hub_server(Repo("org/Ada-GGUF", {**files}, card=CARD), Repo("org/Empty", {"README.md": b"x"})) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def window(hub: HubServer, open_window: WindowOpener) -> WindowObjects:
    return open_window("light")


@pytest.fixture
def no_keyring() -> Iterator[None]:
    before = keyring.get_keyring()
    keyring.set_keyring(keyring.backends.fail.Keyring())  # type: ignore[no-untyped-call]
    yield
    keyring.set_keyring(before)


def texts(table: QTreeWidget, column: int) -> list[str]:
    model = table.model()
    return [str(model.index(row, column).data()) for row in range(model.rowCount())]


def show_find(window: WindowObjects) -> FindPanel:
    window.actions["library"].trigger()
    view = window.library_presenter.page.view
    view.find_tab.click()
    return view.find_panel


def choose_ada(window: WindowObjects, qtbot: QtBot) -> FindPanel:
    panel = show_find(window)
    qtbot.waitUntil(lambda: panel.results.topLevelItemCount() == 2)
    row = texts(panel.results, 0).index("org/Ada-GGUF")
    panel.results.setCurrentIndex(panel.results.model().index(row, 0))
    qtbot.waitUntil(lambda: panel.offered.topLevelItemCount() == 2)
    return panel


def test_a_model_is_found_planned_fetched_and_listed(window: WindowObjects, qtbot: QtBot) -> None:
    panel = choose_ada(window, qtbot)
    assert texts(panel.offered, 2) == ["fits in memory"] * 2
    assert sum("proposed" in label for label in texts(panel.offered, 0)) == 1
    panel.download_button.click()
    qtbot.waitUntil(lambda: [row.words_label.text() for row in panel.downloads.rows.values()] != [])
    qtbot.waitUntil(lambda: "checked and saved" in next(iter(panel.downloads.rows.values())).words_label.text())
    view = window.library_presenter.page.view
    view.models_tab.click()
    qtbot.waitUntil(lambda: view.visible_titles() == ("Ada",))
    assert view.list_view.current is not None
    assert view.list_view.current.entry.owners == ("Hugging Face cache",)


def test_a_download_is_paused_and_goes_on(window: WindowObjects, hub: HubServer, qtbot: QtBot) -> None:
    panel = choose_ada(window, qtbot)
    hub.faults.append(Fault("stall", after_bytes=20_000))
    panel.download_button.click()
    qtbot.waitUntil(lambda: len(panel.downloads.rows) == 1)
    (row,) = panel.downloads.rows.values()
    # A pause before the first request would leave the fault to the second try, which waits 30 s for the hub.
    qtbot.waitUntil(lambda: not hub.faults)
    qtbot.waitUntil(lambda: not row.pause_button.isHidden())
    row.pause_button.click()
    qtbot.waitUntil(lambda: not row.resume_button.isHidden())
    row.resume_button.click()
    qtbot.waitUntil(lambda: "checked and saved" in row.words_label.text())
    row.remove_button.click()
    qtbot.waitUntil(lambda: panel.downloads.rows == {})


def test_an_address_is_shown_and_what_it_names_is_proposed(window: WindowObjects, qtbot: QtBot) -> None:
    panel = show_find(window)
    panel.search_edit.setText("org/Ada-GGUF:F16")
    QTest.keyClick(panel.search_edit, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: panel.offered.topLevelItemCount() == 2)
    assert texts(panel.offered, 0)[panel.offered.currentIndex().row()] == "F16  (proposed)"


def test_what_goes_wrong_is_said(window: WindowObjects, qtbot: QtBot) -> None:
    panel = show_find(window)
    panel.search_edit.setText("org/none")
    QTest.keyClick(panel.search_edit, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: "org/none" in panel.message_label.text() and "…" not in panel.message_label.text())
    window.desk.finder.access.set_offline(True)
    panel.search_button.click()
    qtbot.waitUntil(lambda: "offline" in panel.message_label.text())
    assert window.desk.finder.access.kept.offline


def test_the_card_is_shown_and_nothing_else_is_fetched(window: WindowObjects, hub: HubServer, qtbot: QtBot) -> None:
    panel = choose_ada(window, qtbot)
    n_asked = len(hub.asked)
    panel.card_button.click()
    (card,) = panel.findChildren(CardView)
    qtbot.waitUntil(lambda: "Small." in card.text_view.toPlainText())
    assert card.isVisible()
    assert not panel.offered.isVisible()
    assert [label.text() for label in card.findChildren(ElidedLabel)] == ["apache-2.0", "org/Ada"]
    assert "[picture: a picture]" in card.text_view.toPlainText()
    assert [asked.path for asked in hub.asked[n_asked:]] == [f"/org/Ada-GGUF/resolve/{'c' * 40}/README.md"]
    panel.card_button.click()
    assert panel.offered.isVisible()
    assert not card.isVisible()


@pytest.mark.usefixtures("no_keyring")
def test_a_file_of_another_server_is_not_downloaded_again_for_a_token(
    window: WindowObjects, files: dict[str, bytes], qtbot: QtBot
) -> None:
    panel = show_find(window)
    with hub_server() as elsewhere:
        elsewhere.plain = files
        panel.search_edit.setText(f"{elsewhere.url}/plain/Ada-F16.gguf")
        QTest.keyClick(panel.search_edit, Qt.Key.Key_Return)
        qtbot.waitUntil(lambda: len(panel.downloads.rows) == 1)
        (row,) = panel.downloads.rows.values()
        qtbot.waitUntil(lambda: "checked and saved" in row.words_label.text())
        said: list[str] = []
        asked: list[str] = []
        window.desk.notices.given.connect(lambda notice: said.append(notice.text))
        window.desk.finder.message.connect(asked.append)
        window.desk.finder.set_token("hf_mine")
        qtbot.waitUntil(lambda: any("Access token saved" in text for text in said))
        assert asked == []


@pytest.mark.usefixtures("no_keyring")
def test_an_access_token_can_be_removed_again(window: WindowObjects, qtbot: QtBot) -> None:
    finder = window.desk.finder
    finder.set_token("hf_mine")
    qtbot.waitUntil(lambda: finder.access.token(finder.access.settings) == "hf_mine")
    told: list[str] = []
    window.desk.notices.given.connect(lambda notice: told.append(notice.text))
    finder.remove_token()
    qtbot.waitUntil(lambda: "The access token was removed." in told)
    assert finder.access.token(finder.access.settings) is None
