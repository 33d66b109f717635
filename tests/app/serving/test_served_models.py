"""Loads for programs in the window: idle models go, and answers are waited for."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from openai.types.chat import ChatCompletion
from pytestqt.qtbot import QtBot

from app.serving.served_models import _LoadRequest
from engine.api.wire.errors import ApiError
from engine.runtime.session.status import Phase
from tests.support.served_window import HELLO, Bench, served_window
from tests.support.windows import WindowOpener


@pytest.fixture
def bench(open_window: WindowOpener, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with served_window(open_window, qtbot, tmp_path, monkeypatch) as found:
        yield found


def test_an_idle_model_goes_for_another_and_one_that_answers_is_waited_for(bench: Bench) -> None:
    """Both are laid out on one worker, which serves one model at a time."""
    worker = bench.start_worker()
    bench.open(bench.file("bob", seed=1), worker)
    ada = bench.load(bench.file("ada"), device=worker)
    bob = next(model for model in bench.desk.models.all if model.name == "bob")
    bench.start()
    assert bench.say_hello("bob") == "bob"
    assert bench.desk.models.current is ada
    assert [held.name for held in bench.desk.models.held] == ["bob"]
    stream = bench.stream("bob")
    with bench.client() as client:
        waiting = bench.ask(
            lambda: client.chat.completions.create(model="ada", messages=HELLO, max_tokens=4)  # type: ignore[arg-type]
        )
        # The wait is known to the models when bob is taken back from the server.
        bench.wait(lambda: bench.desk.server.contexts == {})
        assert bob.loading.phase is Phase.ANSWERING
        assert not waiting.done()
        stream.leave()
        bench.wait(waiting.done)
    assert waiting.result().model == "ada"
    assert [held.name for held in bench.desk.models.held] == ["ada"]


def test_a_load_that_waits_is_given_up_with_its_last_client(bench: Bench) -> None:
    worker = bench.start_worker()
    bob = bench.load(bench.file("bob", seed=1), worker)
    bench.open(bench.file("ada"), worker)
    bench.start()
    stream, gone = bench.stream("bob"), bench.stream_of("ada")
    bench.wait(lambda: bench.desk.server.contexts == {})
    gone.leave()
    # Bob is lent again while it still answers.
    bench.wait(lambda: "bob" in bench.desk.server.contexts)
    assert bob.loading.phase is Phase.ANSWERING
    stream.leave()
    bench.wait(lambda: bob.loading.phase is Phase.READY)
    assert [held.name for held in bench.desk.models.held] == ["bob"]


def test_a_load_that_has_begun_goes_on_without_its_client_and_the_next_ones_are_served(bench: Bench) -> None:
    worker = bench.start_worker()
    ada = bench.open(bench.file("ada"), worker)
    bench.open(bench.file("bob", seed=1), worker)
    bench.start()
    gone = bench.stream_of("ada")
    bench.wait(lambda: ada.loading.is_busy)
    gone.leave()
    # One client wants the model of the load that goes on, another one a model that is loaded after it.
    with bench.client() as client:

        def ask(name: str) -> Future[ChatCompletion]:
            return bench.ask(
                lambda: client.chat.completions.create(model=name, messages=HELLO, max_tokens=4)  # type: ignore[arg-type]
            )

        asked = [ask("ada"), ask("bob")]
        bench.wait(lambda: all(each.done() for each in asked))
    assert [each.result().model for each in asked] == ["ada", "bob"]


def test_a_load_that_has_begun_is_that_of_the_next_request_for_its_model(bench: Bench) -> None:
    """After a cancel in the window, the model was loaded again, since a client still waited."""
    ada = bench.open(bench.file("ada"), bench.start_worker())
    bench.start()
    gone = bench.stream_of("ada")
    bench.wait(lambda: ada.loading.is_busy)
    parts = bench.desk.server._objects
    assert parts is not None
    served = parts.served
    first = served._request
    assert first is not None
    errors: list[ApiError | None] = []
    served._on_asked(_LoadRequest(first.entry, errors.append))
    ada.loading.cancel()
    gone.leave()
    bench.wait(lambda: bool(errors))
    assert [error and error.code for error in errors] == ["cancelled"]
    assert served._request is None


def test_a_load_that_waits_is_for_its_file_even_if_a_person_opens_another_in_its_place(bench: Bench) -> None:
    worker = bench.start_worker()
    bench.load(bench.file("bob", seed=1), worker)
    ada = bench.open(bench.file("ada"), worker)
    bench.desk.library.catalogue.index.save_folders((bench.file("carl", seed=2).parent,))
    bench.start()
    stream = bench.stream("bob")
    with bench.client() as client:
        waiting = bench.ask(
            lambda: client.chat.completions.create(model="ada", messages=HELLO, max_tokens=4)  # type: ignore[arg-type]
        )
        bench.wait(lambda: bench.desk.server.contexts == {})
        bench.desk.opener.open(bench.file("carl", seed=2))
        bench.wait(lambda: ada.name == "carl")
        stream.leave()
        bench.wait(waiting.done)
    assert waiting.result().model == "ada"
    assert ada.loading.phase is Phase.STOPPED
    assert bench.say_hello("carl") == "carl"
    loaded = [model.loading.bridge.session.snapshot.loaded for model in bench.desk.models.all]
    assert [None if info is None else info.spec.plan.model.name for info in loaded] == [
        None if info is None else model.name for model, info in zip(bench.desk.models.all, loaded, strict=True)
    ]
