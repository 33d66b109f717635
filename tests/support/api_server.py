"""An API server in this process, with small models on the CPU; and requests to it, with a client or as bytes."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.api.server.guard import Access
from engine.api.server.journal import Journal, RequestEntry
from engine.api.server.pool import ModelPool
from engine.api.server.pool_parts import PoolParts
from engine.api.server.server import Address, ApiServer
from engine.api.wire.names import ModelEntry
from engine.base.units import GIB
from engine.devices.device import ComputingNeed, Rig, make_host
from engine.model.gguf.reader import read_model
from engine.planning.fit.strategies.fastest import initial_layout
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.session.load_order import LoadOrder
from tests.support.patience import DEADLINE_S

CONTEXT = ContextSettings(n_ctx=2048, n_batch=256, n_ubatch=256, n_seq_max=4, threads=1, threads_batch=1)
"""Four requests at once, each with 512 tokens."""


def cpu_rig() -> Rig:
    """Return a rig with no device but the host."""
    return Rig((), make_host(name="host", total_bytes=8 * GIB, free_bytes=8 * GIB))


def entry_of(path: Path) -> ModelEntry:
    """Return a model by its file."""
    return ModelEntry(id=path.stem, path=path, names=(path.name,))


def plan_on_cpu(entry: ModelEntry, rig: Rig, context: ContextSettings = CONTEXT) -> LoadOrder:
    """Return the load of a model on the host."""
    memory = ModelMemory(read_model(entry.path))
    return LoadOrder(Plan(memory, rig, Edit(initial_layout(memory, rig, context), context)))


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object; there is nothing else in the body."""
        document = self.document
        assert list(document) == ["error"], document
        assert {"message", "type", "param", "code"} <= set(document["error"])
        return dict(document["error"])

    @property
    def events(self) -> list[Any]:
        """The events of a stream, read strictly: comments apart, each is one line of data and an empty line."""
        assert self.headers["content-type"] == "text/event-stream"
        text = self.body.decode()
        assert text.endswith("\n\n")
        found = []
        for block in text.removesuffix("\n\n").split("\n\n"):
            if block.startswith(":"):
                continue
            lines = block.split("\n")
            assert lines[-1].startswith("data: "), block
            assert len(lines) == 1 or (len(lines) == 2 and lines[0].startswith("event: ")), block
            data = lines[-1].removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
        return found


@dataclass(slots=True)
class RunningServer:
    """A server and the way to it."""

    server: ApiServer
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def port(self) -> int:
        return self.server.address.port

    @property
    def url(self) -> str:
        return self.server.address.url

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """Send a request and return what came back, whole."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            connection.request(method, path, body=body, headers={**self.headers, **(headers or {})})
            reply = connection.getresponse()
            return Reply(reply.status, {key.lower(): value for key, value in reply.getheaders()}, reply.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        """Ask for a path."""
        return self.request("GET", path, headers=headers)

    def post(self, path: str, document: Any, headers: dict[str, str] | None = None) -> Reply:
        """Send JSON, or bytes as they are."""
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        return self.request("POST", path, body, headers)

    def warm(self, *models: str) -> None:
        """Have these models loaded, with all their processes: what a test starts must not outlive it."""
        for model in models:
            asked = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
            assert self.post("/v1/chat/completions", asked).status == 200

    @property
    def ended(self) -> tuple[RequestEntry, ...]:
        """The requests that have ended. A client may have an answer a moment before its request has."""
        while self.server.journal.under_way:
            pass
        return self.server.journal.ended

    def raw(self) -> socket.socket:
        """Return a connection for bytes of any kind."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S)


@contextmanager
def running(
    entries: Sequence[ModelEntry],
    *,
    access: Access | None = None,
    rig: Callable[[], Rig] = cpu_rig,
    plan: Callable[[ModelEntry, Rig], LoadOrder] = plan_on_cpu,
    keep_alive_s: float = float("inf"),
    journal: Journal | None = None,
    learn: Callable[[ComputingNeed], None] = lambda _need: None,
) -> Iterator[RunningServer]:
    """Have a server that offers these models, each loaded when it is asked for."""
    pool = ModelPool(PoolParts(lambda: entries, rig, plan, learn=learn), keep_alive_s=keep_alive_s)
    server = ApiServer(
        Address(port=0), access or Access(), pool, version="test", journal=journal if journal is not None else Journal()
    )
    server.start()
    try:
        yield RunningServer(server)
    finally:
        server.stop()
        assert not server.is_running
