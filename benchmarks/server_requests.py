"""Growth of the API server's process over 10,000 short requests: memory, file descriptors, threads and asyncio tasks.

    python -m benchmarks.server_requests [--requests 10000] [--clients 4]

The clients are threads of another process. Of ten requests six are short chats (two of them streamed), one counts
tokens, one is refused, one closes its stream in the middle, and one opens a connection of its own. The figures are
printed after the first tenth of the requests, when caches are full, and at the end. The last line is one JSON object.

Measured on 2 cores of a shared machine (2026-11): 64.6 MiB after 1,000 requests, 67.3 MiB after 10,000, 69.1 MiB after
30,000; always 13 descriptors, 9 threads and 5 tasks; 65,969 Python objects became 65,996 in 3,000 requests. The model's
processes grew from 68.7 to 69.2 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
from msgspec import Struct
from msgspec.structs import asdict

from engine.api.server.guard import Access
from engine.api.server.journal import Journal
from engine.api.server.pool import ModelPool
from engine.api.server.pool_functions import PoolFunctions
from engine.api.server.server import Address, ApiServer
from tests.support.api_server import cpu_rig, entry_of, plan_on_cpu
from tests.support.models import write_tiny_llama

HI = [{"role": "user", "content": "Hi"}]
REQUESTS: list[tuple[str, dict[str, object]]] = [
    *[("/v1/chat/completions", {"messages": HI, "max_tokens": 2})] * 4,
    *[("/v1/chat/completions", {"messages": HI, "max_tokens": 2, "stream": True})] * 2,
    ("/tokenize", {"content": "How many tokens are these?"}),
    ("/v1/chat/completions", {"messages": []}),
]


class Figures(Struct, frozen=True):
    """Counts of the serving process at one moment. `child_bytes`: resident memory of its child processes."""

    rss_bytes: int
    descriptors: int
    threads: int
    tasks: int
    child_bytes: int


def main() -> None:
    """Send the requests, and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.port is not None:
        print(json.dumps(_send_all(options.port, options.requests, options.clients)))
        return
    with tempfile.TemporaryDirectory() as folder:
        entry = entry_of(write_tiny_llama(Path(folder) / "tiny.gguf", n_layers=2))
        pool = ModelPool(PoolFunctions(lambda: [entry], cpu_rig, plan_on_cpu))
        server = ApiServer(Address(port=0), Access(), pool, version="", journal=Journal())
        server.start()
        try:
            server.preload(entry).result()
            first = options.requests // 10
            _by_client(server, first, options.clients)
            before = _figures(server)
            begun_s = time.perf_counter()
            statuses = _by_client(server, options.requests - first, options.clients)
            seconds = time.perf_counter() - begun_s
            after = _figures(server)
            totals = server.journal.totals
        finally:
            server.stop()
    for name, value in asdict(before).items():
        print(f"{name:>12}: {value:>12,} after {first} requests, {getattr(after, name):>12,} at the end")
    print(f"{(options.requests - first) / seconds:.0f} requests a second; {dict(statuses)}; journal: {totals}")
    print(
        json.dumps(
            {
                "requests": options.requests, "before": asdict(before), "after": asdict(after), "statuses": statuses,
                "seconds": seconds,
            }
        )
    )  # fmt: skip


def _figures(server: ApiServer) -> Figures:
    while server.journal.under_way:
        time.sleep(0.1)

    async def tasks() -> int:
        return len(asyncio.all_tasks())

    n_tasks = asyncio.run_coroutine_threadsafe(tasks(), server.loop).result()
    gc.collect()
    process = psutil.Process()
    children = sum(each.memory_info().rss for each in process.children(recursive=True))
    return Figures(process.memory_info().rss, process.num_fds(), process.num_threads(), n_tasks, children)


def _by_client(server: ApiServer, count: int, clients: int) -> Counter[str]:
    words = [sys.executable, "-m", "benchmarks.server_requests", "--port", str(server.address.port)]
    words += ["--requests", str(count), "--clients", str(clients)]
    told = subprocess.run(words, check=True, capture_output=True).stdout
    return Counter(json.loads(told))


def _send_all(port: int, count: int, clients: int) -> Counter[str]:
    statuses: Counter[str] = Counter()
    lock = threading.Lock()

    def run(number: int) -> None:
        own = _send(port, range(number, count, clients))
        with lock:
            statuses.update(own)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


def _send(port: int, numbers: range) -> Counter[str]:
    statuses: Counter[str] = Counter()
    kept = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    for place, _ in enumerate(numbers):
        kind = place % 10
        if kind < len(REQUESTS):
            path, document = REQUESTS[kind]
            kept.request("POST", path, json.dumps(document))
            reply = kept.getresponse()
            reply.read()
            statuses[str(reply.status)] += 1
            continue
        single = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        if kind == 8:
            single.request("POST", "/v1/chat/completions", json.dumps({"messages": HI, "stream": True}))
            single.getresponse().read(1)
            statuses["left"] += 1
        else:
            single.request("GET", "/health")
            statuses[str(single.getresponse().status)] += 1
        single.close()
    kept.close()
    return statuses


if __name__ == "__main__":
    main()
