"""Model > API Server: programs use the models that the window has loaded, and load others in it."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import openai
import psutil
import pytest
from pytestqt.qtbot import QtBot

from app.paths import serve_settings_path
from app.serving import offers
from app.serving.api_server import ServerPhase
from engine.base.errors import ArgumentError
from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.planning.fit.loaded_models import UNTIL_UNLOADED_S
from engine.planning.layout.layout import single_device
from engine.planning.layout.layout_file import parse_layout
from engine.planning.plan.decisions.context_length import default_context
from engine.runtime.session.status import Phase
from tests.support.patience import DEADLINE_S
from tests.support.ports import free_port
from tests.support.served_window import HELLO, N_LAYERS, Bench, served_window
from tests.support.windows import WindowOpener
from widgets.controls.values import AutoOptions


@pytest.fixture
def bench(open_window: WindowOpener, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with served_window(open_window, qtbot, tmp_path, monkeypatch) as found:
        yield found


def test_a_program_asks_the_model_that_the_window_has_loaded(bench: Bench) -> None:
    model = bench.load(bench.file("ada"))
    pane = bench.start()
    child = model.loading.bridge.session.snapshot.loaded
    assert bench.say_hello("ada") == "ada"
    assert bench.say_hello("") == "ada"
    assert model.loading.bridge.session.snapshot.loaded is child
    assert [held.name for held in bench.desk.models.held] == ["ada"]
    rows = pane.table.requests
    bench.wait(lambda: [row.texts[7] for row in rows.rows] == ["200", "200"])
    row = rows.rows[0].texts
    assert row[1:3] == ("127.0.0.1", "ada")
    assert row[4] == "4"
    assert row[7] == "200"
    bench.stop()
    bench.wait(lambda: model.loading.phase is Phase.READY)


def test_the_chat_goes_on_beside_a_program_and_its_stop_stops_its_own_answer(bench: Bench) -> None:
    model = bench.load(bench.file("ada"))
    bench.start()
    stream = bench.stream()
    bench.wait(lambda: model.loading.phase is Phase.ANSWERING)
    pane = bench.window.views.current.chat
    pane.prompt_edit.setPlainText("hello")
    pane.send_button.click()
    bench.wait(lambda: model.conversation.pending_request is not None)
    assert len(model.loading.bridge.session.snapshot.requests) == 2
    pane.stop_button.click()
    bench.wait(lambda: not model.conversation.is_answering)
    assert len(model.loading.bridge.session.snapshot.requests) == 1
    assert not stream.ended.is_set()
    bench.stop()
    bench.wait(stream.ended.is_set)
    bench.wait(lambda: model.loading.phase is Phase.READY)


def test_a_program_that_goes_away_stops_its_answer(bench: Bench) -> None:
    model = bench.load(bench.file("ada"))
    pane = bench.start()
    stream = bench.stream()
    stream.leave()
    bench.wait(lambda: model.loading.phase is Phase.READY)
    bench.wait(lambda: bool(pane.table.requests.rows) and pane.table.requests.rows[0].texts[7] == "client disconnected")


def test_a_model_that_is_not_loaded_is_loaded_in_the_window_beside_the_shown_one(bench: Bench) -> None:
    shown = bench.load(bench.file("ada"))
    other = bench.file("bob", seed=1)
    bench.desk.library.catalogue.index.save_folders((other.parent,))
    bench.start()
    assert bench.say_hello("bob") == "bob"
    assert bench.desk.models.current is shown
    assert [held.name for held in bench.desk.models.held] == ["ada", "bob"]
    (loaded,) = (model for model in bench.desk.models.all if model.name == "bob")
    assert loaded.keep_alive_s == 300.0
    bench.wait(lambda: loaded.status.phase is Phase.READY)
    assert len(bench.window.main.model_panel.loaded_list.rows()) == 2
    # It can be shown like any other, with the layout on which it runs.
    bench.desk.opener.show(loaded)
    assert bench.desk.document.model is loaded.file
    assert not loaded.status.is_edited


def test_names_and_idle_times_of_the_user_count_in_the_window_too(bench: Bench) -> None:
    path = bench.file("bob", seed=1)
    bench.desk.library.catalogue.index.save_folders((path.parent,))
    serve_settings_path().parent.mkdir(parents=True, exist_ok=True)
    kept = {"version": 1, "aliases": {"mine": "bob"}, "models": {"bob": {"keep_alive": "30m"}}}
    serve_settings_path().write_text(json.dumps(kept), encoding="utf-8")
    try:
        bench.start()
        assert bench.say_hello("mine") == "bob"
        assert bench.desk.models.current.keep_alive_s == 1800.0
    finally:
        serve_settings_path().unlink()


def test_a_model_that_took_long_to_load_stays_as_long_unless_a_time_was_chosen(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bench.file("bob", seed=1)
    bench.desk.library.catalogue.index.save_folders((path.parent,))
    monkeypatch.setattr(offers, "default_keep_alive_s", lambda load_s: 900.0 if load_s > 0 else 300.0)
    bench.start()
    assert bench.say_hello("bob") == "bob"
    model = bench.desk.models.current
    # The request may be answered before the window notes that the load has ended.
    bench.wait(lambda: model.held is not None and model.held.keep_alive_s == 900.0)


def test_a_window_without_a_model_shows_the_one_that_a_program_asked_for(bench: Bench) -> None:
    path = bench.file("ada")
    bench.desk.library.catalogue.index.save_folders((path.parent,))
    bench.start()
    bench.say_hello("ada")
    model = bench.desk.models.current
    assert model.name == "ada"
    assert model.keep_alive_s == 300.0
    assert bench.desk.document.model is not None
    # A file that a person opens in its place is that person's, and stays loaded.
    model.loading.unload()
    bench.wait(lambda: not model.loading.has_child)
    bench.desk.opener.open(bench.file("bob", seed=1))
    bench.wait(lambda: model.name == "bob")
    assert not model.is_of_program
    assert model.keep_alive_s == UNTIL_UNLOADED_S


def test_what_a_stopped_server_had_begun_ends_no_later_load(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.desk.library.catalogue.index.save_folders((bench.file("bob", seed=1).parent,))
    bench.file("carl", seed=2)
    opener, held = bench.desk.opener, list[tuple[object, ...]]()
    open_aside = opener.open_aside
    monkeypatch.setattr(opener, "open_aside", lambda *arguments: held.append(arguments))
    bench.start()
    with bench.client() as client:
        first = bench.ask(
            lambda: client.chat.completions.create(model="bob", messages=HELLO)  # type: ignore[arg-type]
        )
        bench.wait(lambda: len(held) == 1)
        bench.stop()
        bench.wait(first.done)
    bench.start()
    with bench.client() as client:
        second = bench.ask(
            lambda: client.chat.completions.create(model="carl", messages=HELLO, max_tokens=4)  # type: ignore[arg-type]
        )
        bench.wait(lambda: len(held) == 2)
        *_, failed = held[0]
        failed(ArgumentError("bob is gone"))  # type: ignore[operator]
        open_aside(*held[1])  # type: ignore[arg-type]
        bench.wait(second.done)
    assert second.result().model == "carl"


def test_a_model_whose_engine_was_killed_is_loaded_again_for_the_next_request(bench: Bench) -> None:
    before = set(psutil.Process().children(recursive=True))
    model = bench.load(bench.file("ada"))
    engines = set(psutil.Process().children(recursive=True)) - before
    bench.start()
    stream = bench.stream()
    for engine in engines:
        with suppress(psutil.NoSuchProcess):
            engine.kill()
    bench.wait(stream.ended.is_set)
    bench.wait(lambda: model.loading.phase is Phase.STOPPED)
    assert bench.desk.server.state.phase is ServerPhase.ON
    assert bench.say_hello("ada") == "ada"
    # The program has its answer before the window has heard of the end.
    bench.wait(lambda: model.loading.phase is Phase.READY)


def test_an_unknown_name_and_a_load_that_fails_are_told_to_the_program(bench: Bench) -> None:
    bench.load(bench.file("ada"))
    torn = bench.file("torn", seed=1)
    bench.desk.library.catalogue.index.save_folders((torn.parent,))
    bench.start()
    with pytest.raises(openai.NotFoundError, match="There is no model nobody"):
        bench.say_hello("nobody")
    assert bench.say_hello("torn") == "torn"  # known to the library from now on
    (model,) = (each for each in bench.desk.models.all if each.name == "torn")
    model.loading.unload()
    bench.wait(lambda: not model.loading.has_child)
    torn.write_bytes(torn.read_bytes()[:-4096])
    with pytest.raises(openai.InternalServerError):
        bench.say_hello("torn")
    assert bench.say_hello("ada") == "ada"


def test_snippets_have_name_and_context_of_a_model_that_is_loaded_later(bench: Bench) -> None:
    pane = bench.start()
    pane.program_box.setCurrentText("Zed")
    bench.load(bench.file("ada"))
    bench.wait(lambda: '"ada"' in pane.snippet_edit.toPlainText())
    # Another model that is not loaded is shown.
    bench.open(bench.file("bob", seed=1))
    bench.wait(lambda: bench.desk.models.current.name == "bob")
    assert '"name": "ada"' in pane.snippet_edit.toPlainText()
    assert '"max_tokens": 16384' in pane.snippet_edit.toPlainText()


def test_faults_of_the_address_are_said_in_the_panel(bench: Bench) -> None:
    bench.load(bench.file("ada"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        pane = bench.start(port=port)
        assert pane.error_label.text() == f"Another program uses port {port}. Choose another port."
        assert pane.switch_button.isEnabled()
    pane.host_edit.setText("192.0.2.17")
    pane.switch_button.click()
    assert "Allow unencrypted requests" in pane.error_label.text()
    pane.key_box.click()
    pane.switch_button.click()
    assert "Require the key" in pane.error_label.text()
    pane.key_box.click()
    pane.plain_box.click()
    pane.switch_button.click()
    bench.wait(lambda: bench.desk.server.state.phase is ServerPhase.OFF)
    assert pane.error_label.text().startswith("This computer does not have the address 192.0.2.17.")
    pane.host_edit.setText("")
    pane.switch_button.click()
    assert pane.error_label.text().startswith("Enter an address to listen on")
    pane.host_edit.setText("127.0.0.1")
    bench.start()
    assert not pane.error_label.isVisible()
    assert bench.say_hello("ada") == "ada"


def test_the_end_of_the_window_ends_streams_and_the_server(bench: Bench) -> None:
    bench.load(bench.file("ada"))
    bench.start()
    port = bench.desk.settings.serve_port
    streams = [bench.stream() for _ in range(2)]
    bench.window.main.close()
    for stream in streams:
        assert stream.ended.wait(DEADLINE_S)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


def test_texts_are_kept_only_while_the_switch_is_on(bench: Bench) -> None:
    bench.load(bench.file("ada"))
    pane = bench.start()
    bench.say_hello("ada")
    pane.texts_box.click()
    bench.say_hello("ada")
    bench.wait(lambda: len(pane.table.requests.rows) == 2)
    pane.table.selectRow(1)
    assert pane.text_edit.toPlainText().startswith("The text of this request was not stored.")
    pane.table.selectRow(0)
    bench.wait(lambda: '"Hello"' in pane.text_edit.toPlainText())
    number = pane.table.chosen
    assert number is not None
    pane.texts_box.click()
    assert bench.desk.server.text_of(number) is None
    assert not pane.text_edit.toPlainText()


def test_the_panel_is_not_updated_for_each_token(bench: Bench) -> None:
    bench.load(bench.file("ada"))
    bench.start()
    stream = bench.stream()
    session = bench.desk.loading.bridge.session
    bench.wait(lambda: bench.presenter.n_updates > 0)
    before, tokens = bench.presenter.n_updates, session.snapshot
    assert tokens.requests
    bench.wait(lambda: not bench.presenter.is_waiting)
    # What comes now are tokens alone.
    settled = bench.presenter.n_updates
    assert settled - before <= 2
    bench.say_hello("ada")
    # The presenter hears of the request in the GUI thread, which may be after its answer came.
    bench.wait(lambda: bench.presenter.n_updates > settled)
    stream.leave()


def test_the_server_starts_with_a_window_that_wants_it(bench: Bench, open_window: WindowOpener) -> None:
    assert not bench.desk.settings.serves_at_start
    pane = bench.pane
    pane.start_box.click()
    assert bench.desk.settings.serves_at_start
    assert bench.window.actions["serve_at_start"].isChecked()
    bench.desk.settings.serve_port = free_port()
    bench.desk.settings.sync()
    again = open_window()
    again.start(files=(), rig=None)
    bench.wait(lambda: again.desk.server.state.phase is ServerPhase.ON)
    assert again.desk.server.state.url.endswith(str(bench.desk.settings.serve_port))


def test_models_that_are_not_loaded_are_listed_with_what_they_would_take(bench: Bench) -> None:
    bench.load(bench.file("ada"))
    bench.desk.library.catalogue.index.save_folders((bench.file("bob", seed=1).parent,))
    bench.start()
    with bench.client() as client:
        found = bench.answer(lambda: client.models.retrieve("bob")).model_dump()
        listed = bench.answer(lambda: list(client.models.list()))
    assert found["fits"] == "yes"
    assert [row["id"] for row in found["forecast"]] == [CPU_ID]
    layout = parse_layout(json.dumps(found["layout"]), source="bob", n_layers=N_LAYERS).layout
    assert layout == single_device(N_LAYERS, CPU_ID)
    assert [each.id for each in listed] == ["ada", "bob"]


def test_a_forecast_counts_idle_models_as_leaving(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.load(bench.file("ada"))
    bench.desk.library.catalogue.index.save_folders((bench.file("bob", seed=1).parent,))
    live = bench.desk.rig.live
    reported = live.reported()
    host = replace(reported.host, free_bytes=0, margin_bytes=0)
    monkeypatch.setattr(live, "reported", lambda: replace(reported, host=host))
    bench.start()
    with bench.client() as client:
        found = bench.answer(lambda: client.models.retrieve("bob")).model_dump()
    assert (found["fits"], found["unloads"]) == ("after_unloading", ["ada"]), found


def test_a_model_is_loaded_for_a_program_with_the_preferred_strategy(bench: Bench) -> None:
    shown = bench.load(bench.file("ada"))
    bench.desk.library.catalogue.index.save_folders((bench.file("bob", seed=1).parent,))
    bench.desk.auto_layouts.set_options(AutoOptions(strategy="context"))
    bench.start()
    bench.say_hello("bob")
    (loaded,) = (model for model in bench.desk.models.all if model.name == "bob")
    info = loaded.loading.loaded
    assert info is not None
    assert shown.file is not None
    assert info.edit.context.n_ctx > default_context(shown.file).n_ctx


def test_forecasts_end_with_the_server(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forecast that waits for the window does not hold up the end of the server."""
    bench.desk.library.catalogue.index.save_folders((bench.file("bob", seed=1).parent,))
    bench.start()
    held: list[object] = []
    monkeypatch.setattr("app.serving.served_models.ServedModels._answer", lambda _self, reading: held.append(reading))
    with bench.client() as client:
        asked = bench.ask(lambda: client.models.retrieve("bob"))
        bench.wait(lambda: bool(held))
        bench.stop()
        bench.wait(asked.done)
