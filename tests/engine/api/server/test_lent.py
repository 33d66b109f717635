"""A session loaded by the window answers requests of the server. Texts are stored only on request."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from engine.api.server.journal import MAX_TEXT, MAX_TEXTS, Journal, RequestText
from engine.api.server.pool import ModelPool
from engine.api.server.pool_functions import PoolFunctions
from engine.api.wire.errors import ApiError
from engine.api.wire.names import ModelEntry
from engine.base.values import replace
from engine.model.gguf.model_file import identify
from engine.planning.fit.loaded_models import HeldModel
from engine.runtime.session.driver import SessionUpdate
from engine.runtime.session.events import Loaded, LoadEnding
from engine.runtime.session.session import ModelSession
from tests.support.api_server import Reply, RunningServer, cpu_rig, entry_of, plan_on_cpu, running
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S, wait_until

MINE = ModelEntry("mine", Path("mine.gguf"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", n_layers=2)


@contextmanager
def a_session(path: Path) -> Iterator[tuple[ModelSession, queue.SimpleQueue[SessionUpdate]]]:
    """A session of somebody else, in which the model is loaded."""
    news: queue.SimpleQueue[SessionUpdate] = queue.SimpleQueue()
    session = ModelSession(news.put)
    try:
        load(session, news, path)
        yield session, news
    finally:
        session.close()


def load(session: ModelSession, news: queue.SimpleQueue[SessionUpdate], path: Path) -> None:
    session.load(plan_on_cpu(entry_of(path), cpu_rig()))
    while not isinstance(ending := news.get(timeout=DEADLINE_S), LoadEnding):
        pass
    assert isinstance(ending, Loaded)


def held(path: Path) -> HeldModel:
    return HeldModel(identify([path]), "tiny").idle(time.monotonic(), answered=False)


def ask(server: RunningServer, model: str = "mine", **further: object) -> Reply:
    asked = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **further}
    return server.post("/v1/chat/completions", asked)


def state(server: RunningServer) -> str:
    return str(server.get("/v1/layerdeck/status").document["models"].get("mine", {}).get("state", ""))


def test_a_lent_model_answers_and_stays(path: Path) -> None:
    mine = replace(entry_of(path), id="mine")
    with a_session(path) as (session, _), running([]) as server:
        server.server.lend(mine, session, held(path))
        assert ask(server).document["model"] == "mine"
        assert ask(server, "", keep_alive=0).status == 200
        assert [each["id"] for each in server.get("/v1/models").document["data"]] == ["mine"]
        assert state(server) == "loaded"
        server.server.take_back("mine")
        assert (reply := ask(server)).status == 404, reply.body
        server.server.lend(mine, session, held(path))
        assert ask(server).status == 200
        server.server.stop()
        # The end of the server is not the end of what belongs to others.
        assert session.snapshot.is_ready


def test_a_request_while_the_model_is_moved_waits(path: Path) -> None:
    mine = replace(entry_of(path), id="mine")
    with a_session(path) as (session, news), running([]) as server, ThreadPoolExecutor(1) as threads:
        server.server.lend(mine, session, held(path))
        session.unload()
        wait_until(lambda: not session.snapshot.holds_child)
        waiting = threads.submit(ask, server)
        wait_until(lambda: server.get("/v1/layerdeck/status").document["models"]["mine"]["waiting"] == 1)
        load(session, news, path)
        server.server.lend(mine, session, held(path))
        assert waiting.result().status == 200


def test_a_model_that_is_taken_back_is_loaded_for_those_who_wait(path: Path) -> None:
    mine = replace(entry_of(path), id="mine")
    with a_session(path) as (session, _), running([mine]) as server, ThreadPoolExecutor(1) as threads:
        server.server.lend(mine, session, held(path))
        session.unload()
        wait_until(lambda: not session.snapshot.holds_child)
        waiting = threads.submit(ask, server)
        wait_until(lambda: server.get("/v1/layerdeck/status").document["models"]["mine"]["waiting"] == 1)
        server.server.take_back("mine")
        assert waiting.result().status == 200
        assert not session.snapshot.holds_child


class OutsidePool:
    """A pool whose models others load, and one request for the model `MINE`."""

    def __init__(self, load: Callable[[ModelEntry], Awaitable[None]]) -> None:
        self.pool = ModelPool(PoolFunctions(lambda: (MINE,), load=load))

    async def ask(self) -> None:
        async with self.pool.use("mine"):
            pass

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[asyncio.Task[None]]:
        """A request that waits for the model."""
        async with asyncio.timeout(DEADLINE_S):
            task = asyncio.create_task(self.ask())
            while not self.pool.states().get("mine", {}).get("waiting"):
                await asyncio.sleep(0)
            yield task
            await self.pool.close()


def test_a_load_outside_is_cancelled_when_nobody_waits_for_it() -> None:
    async def run() -> None:
        begun, cancelled = asyncio.Event(), asyncio.Event()

        async def load(_entry: ModelEntry) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        outside = OutsidePool(load)
        async with outside.asking() as asked:
            outside.pool.start()
            await begun.wait()
            asked.cancel()
            await cancelled.wait()

    asyncio.run(run())


def test_a_load_outside_that_lends_nothing_is_a_refusal() -> None:
    async def load(_entry: ModelEntry) -> None:
        """Return as if the model was loaded."""

    async def run() -> None:
        outside = OutsidePool(load)
        async with outside.asking() as asked:
            outside.pool.start()
            with pytest.raises(ApiError) as caught:
                await asked
            assert (caught.value.status, caught.value.code) == (503, "model_lost")

    asyncio.run(run())


def test_a_model_that_is_lost_before_an_admitted_request_begins_is_a_refusal(path: Path) -> None:
    async def load(_entry: ModelEntry) -> None:
        """Not called: the pool is not started."""

    async def run(session: ModelSession) -> None:
        outside = OutsidePool(load)
        async with outside.asking() as asked:
            outside.pool.lend(MINE, session, held(path))
            # The child ends before the next iteration of the loop, in which the request goes on.
            session.close()
            with pytest.raises(ApiError) as caught:
                await asked
            assert (caught.value.status, caught.value.code) == (503, "model_lost")

    with a_session(path) as (session, _):
        asyncio.run(run(session))


def test_texts_are_kept_only_if_asked_for(path: Path) -> None:
    journal = Journal()
    with running([entry_of(path)], journal=journal) as server:
        ask(server, "tiny")
        assert all(journal.text_of(entry.number) is None for entry in server.ended)
        journal.keeps_texts = True
        answer = ask(server, "tiny", max_tokens=8).document["choices"][0]["message"]["content"]
        last = server.ended[-1]
        text = journal.text_of(last.number)
        assert text is not None
        assert '"Hi"' in text.asked
        assert text.answered == answer
        assert "Hi" not in repr(last)
        journal.forget_texts()
        assert journal.text_of(last.number) is None


def test_texts_that_were_forgotten_do_not_come_back() -> None:
    """A request is under way when its text is dropped, and when texts are kept again."""
    journal = Journal()
    journal.keeps_texts = True
    record = journal.begin("", "/")
    record.note_asked(b"secret")
    record.note_answered("a")
    assert journal.text_of(1) == RequestText("secret", "a")
    journal.forget_texts()
    journal.keeps_texts = True
    record.note_answered("b")
    assert journal.text_of(1) is None


def test_a_text_is_cut_by_characters() -> None:
    journal = Journal()
    journal.keeps_texts = True
    journal.begin("", "/").note_asked(("a" + "\u4e16" * MAX_TEXT).encode())
    assert journal.text_of(1) == RequestText("a" + "\u4e16" * (MAX_TEXT - 1))


def test_texts_are_bounded() -> None:
    journal = Journal()
    journal.keeps_texts = True
    for number in range(MAX_TEXTS + 5):
        journal.begin("", "/").note_asked(b"a" * (MAX_TEXT * 2))
        journal.keep_text(number + 1, answered="b" * MAX_TEXT * 3)
    kept = [journal.text_of(number) for number in range(1, MAX_TEXTS + 6)]
    assert len([each for each in kept if each is not None]) == MAX_TEXTS
    assert all(len(each.asked) == len(each.answered) == MAX_TEXT for each in kept if each is not None)
