"""Cost of the API server: the same loaded model answers over HTTP and through `session.stream`, in turns.

    python -m benchmarks.server_overhead [--model FILE.gguf] [--tokens 64] [--rounds 3] [--streams 1,4,16]

For each number of parallel streams it prints medians: tokens per second of both and their ratio (HTTP to session), by
how many milliseconds the first token comes later over HTTP, and the processor time of this process for each token in
microseconds, which other load on the machine changes little. At the end it prints the resident memory of this process.
The HTTP client is a process of its own.

Without `--model` a model that the set-up has fetched answers, otherwise a tiny one that generates thousands of tokens
per second, so that its ratio is the worst case. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
from msgspec import Struct

from app.paths import fetched_models_path
from engine.api.server.guard import Access
from engine.api.server.journal import Journal
from engine.api.server.pool import ModelPool
from engine.api.server.pool_functions import PoolFunctions
from engine.api.server.pooled_model import LoadedModel
from engine.api.server.server import Address, ApiServer
from engine.api.wire.api_request import ApiRequest, generate_request
from engine.api.wire.names import ModelEntry
from engine.devices.device import Rig
from engine.machines.rigs.discovery import host_device
from engine.model.gguf.reader import read_model
from engine.planning.fit.strategies.fastest import initial_layout
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.requests import ChatMessage
from engine.runtime.session.events import Done, Token
from engine.runtime.session.load_spec import LoadSpec

PROMPT = "Tell me a long story about the sea, a ship and its crew."
SLOTS = 16


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", default="1,4,16")
    options = parser.parse_args()
    counts = [int(count) for count in options.streams.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or _model(Path(folder))
        entry = ModelEntry(path.stem, path)
        parts = PoolFunctions(lambda: [entry], lambda: Rig((), host_device()), _plan)
        server = ApiServer(Address(port=0), Access(), ModelPool(parts), version="", journal=Journal())
        server.start()
        try:
            server.preload(entry).result()
            found = {str(count): _compare(server, entry, count, options) for count in counts}
        finally:
            server.stop()
    size_bytes = psutil.Process().memory_info().rss
    for count, each in found.items():
        print(
            f"{count:>2} streams: {each['http']:8.1f} tokens/s by HTTP, {each['session']:8.1f} by session,"
            f" ratio {each['ratio']:.3f}; first token {each['first_later_ms']:+.1f} ms;"
            f" {each['http_us']:.0f} us of the processor for a token, {each['session_us']:.0f} by session"
        )
    print(f"memory of the serving process: {size_bytes / (1 << 20):.0f} MiB")
    print(json.dumps({"model": path.name, "streams": found, "rss_bytes": size_bytes}))


def _model(folder: Path) -> Path:
    fetched = sorted(fetched_models_path().glob("*.gguf"))
    if fetched:
        return fetched[0]
    from tests.support.models import write_tiny_llama

    return write_tiny_llama(folder / "tiny.gguf", n_layers=8)


def _plan(entry: ModelEntry, rig: Rig) -> LoadSpec:
    memory = ModelMemory(read_model(entry.path))
    context = ContextSettings(n_ctx=512 * SLOTS, n_batch=512, n_ubatch=512, n_seq_max=SLOTS)
    return LoadSpec(Plan(memory, rig, Edit(initial_layout(memory, rig, context), context)))


def _compare(server: ApiServer, entry: ModelEntry, count: int, options: argparse.Namespace) -> dict[str, float]:
    """Return medians over rounds in which HTTP and session take turns. `count`: parallel streams."""
    by_http: list[_Run] = []
    by_session: list[_Run] = []
    _by_http(server, count, options.tokens)
    for _ in range(options.rounds):
        by_http.append(_by_http(server, count, options.tokens))
        by_session.append(_by_session(server, entry, count, options.tokens))
        by_session.append(_by_session(server, entry, count, options.tokens))
        by_http.append(_by_http(server, count, options.tokens))
    return {
        "http": _median(each.speed for each in by_http),
        "session": _median(each.speed for each in by_session),
        "ratio": _median(a.speed / b.speed for a, b in zip(by_http, by_session, strict=True)),
        "first_later_ms": 1000
        * (_median(each.first_s for each in by_http) - _median(each.first_s for each in by_session)),
        "http_us": 1e6 * _median(each.processor_s for each in by_http),
        "session_us": 1e6 * _median(each.processor_s for each in by_session),
    }


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


class _Run(Struct, frozen=True):
    """The result of several parallel streams.

    `speed`: tokens per second of all streams together.
    `first_s`: median seconds to the first token.
    `processor_s`: processor seconds of this process for each token.
    """

    speed: float
    first_s: float
    processor_s: float


def _by_http(server: ApiServer, count: int, tokens: int) -> _Run:
    prompts = json.dumps([f"{PROMPT} {number}" for number in range(count)])
    words = [sys.executable, "-m", "benchmarks._stream_client", str(server.address.port), str(tokens), prompts]
    begun_s = time.process_time()
    told = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
    processor_s = time.process_time() - begun_s
    return _Run(told["tokens"] / told["seconds"], _median(told["first_s"]), processor_s / told["tokens"])


def _by_session(server: ApiServer, entry: ModelEntry, count: int, n_tokens: int) -> _Run:
    loop = server.loop
    model = asyncio.run_coroutine_threadsafe(_leased(server), loop).result()
    assert model.id == entry.id
    firsts: list[float] = []
    tokens: list[int] = []

    def ask(number: int) -> None:
        question = ApiRequest(
            "",
            (ChatMessage("user", f"{PROMPT} {number}"),),
            settings={"max_tokens": n_tokens, "temperature": 0.0, "repetition": "continue"},
        )
        begun_s = time.perf_counter()
        first_s = 0.0
        for event in model.session.stream(generate_request(question, model.profile)):
            if isinstance(event, Token) and not first_s:
                first_s = time.perf_counter() - begun_s
            elif isinstance(event, Done):
                tokens.append(event.generated_tokens)
        firsts.append(first_s)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    begun_s, processor_s = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, processor_s = time.perf_counter() - begun_s, time.process_time() - processor_s
    return _Run(sum(tokens) / seconds, _median(firsts), processor_s / sum(tokens))


async def _leased(server: ApiServer) -> LoadedModel:
    async with server.pool.use("") as model:
        return model


if __name__ == "__main__":
    main()
