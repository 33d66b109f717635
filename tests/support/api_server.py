"""An API server in this process with small models on the CPU, and requests to it, as JSON or as raw bytes."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from engine.api.server.guard import Access
from engine.api.server.journal import Journal, RequestEntry
from engine.api.server.pool import ModelPool
from engine.api.server.pool_functions import PoolFunctions
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
from engine.runtime.session.load_spec import LoadSpec
from tests.support.patience import DEADLINE_S, wait_until

CONTEXT = ContextSettings(n_ctx=2048, n_batch=256, n_ubatch=256, n_seq_max=4, threads=1, threads_batch=1)
"""Four slots with 512 tokens each."""


def cpu_rig() -> Rig:
    """Return a rig with no device but the host."""
    return Rig((), make_host(name="host", total_bytes=8 * GIB, free_bytes=8 * GIB))


def entry_of(path: Path) -> ModelEntry:
    """Return the server's entry of a model file."""
    return ModelEntry(id=path.stem, path=path, names=(path.name,))


def plan_on_cpu(entry: ModelEntry, rig: Rig, context: ContextSettings = CONTEXT) -> LoadSpec:
    """Return the load spec of a model on the CPU."""
    memory = ModelMemory(read_model(entry.path))
    return LoadSpec(Plan(memory, rig, Edit(initial_layout(memory, rig, context), context)))


class Reply(Struct, frozen=True):
    """An HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object of the body, which must contain nothing else."""
        document = self.document
        assert list(document) == ["error"], document
        assert {"message", "type", "param", "code"} <= set(document["error"])
        return dict(document["error"])

    @property
    def events(self) -> list[Any]:
        """The server-sent events of the body, parsed strictly: each is one data line and an empty line.

        Comments are skipped.
        """
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


class RunningServer(Struct):
    """A running API server, with the requests that tests send to it."""

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
        """Send a request and return the complete response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            connection.request(method, path, body=body, headers={**self.headers, **(headers or {})})
            reply = connection.getresponse()
            return Reply(reply.status, {key.lower(): value for key, value in reply.getheaders()}, reply.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        """Send a GET request."""
        return self.request("GET", path, headers=headers)

    def post(self, path: str, document: Any, headers: dict[str, str] | None = None) -> Reply:
        """Send a POST request. `document`: is encoded as JSON, except bytes."""
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        return self.request("POST", path, body, headers)

    def warm(self, *models: str) -> None:
        """Load these models before the test starts, so that the leak check does not count their processes."""
        for model in models:
            asked = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
            assert self.post("/v1/chat/completions", asked).status == 200

    @property
    def ended(self) -> tuple[RequestEntry, ...]:
        """The requests that have ended. A request may end a moment after its client has received the answer."""
        wait_until(lambda: not self.server.journal.under_way)
        return self.server.journal.ended

    def raw(self) -> socket.socket:
        """Return a TCP connection to the server."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S)


@contextmanager
def running(
    entries: Sequence[ModelEntry],
    *,
    access: Access | None = None,
    rig: Callable[[], Rig] = cpu_rig,
    plan: Callable[[ModelEntry, Rig], LoadSpec] = plan_on_cpu,
    keep_alive_s: float = float("inf"),
    journal: Journal | None = None,
    learn: Callable[[ComputingNeed], None] = lambda _need: None,
) -> Iterator[RunningServer]:
    """Run a server that offers these models. Each is loaded at its first request."""
    pool = ModelPool(PoolFunctions(lambda: entries, rig, plan, learn=learn), keep_alive_s=keep_alive_s)
    server = ApiServer(
        Address(port=0), access or Access(), pool, version="test", journal=journal if journal is not None else Journal()
    )
    server.start()
    try:
        yield RunningServer(server)
    finally:
        server.stop()
        assert not server.is_running
