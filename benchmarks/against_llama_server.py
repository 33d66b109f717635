"""Speed of `layerdeck-cli serve` and of llama-server, as ratios: the same model, settings and requests on the CPU.

    python -m benchmarks.against_llama_server [PATH/TO/llama-server] [MODEL.gguf] [--tokens 128] [--rounds 8]
        [--streams 1,4] [--ctx 2048] [--threads N]

llama-server should be built from the llama.cpp sources of the pinned llama-cpp-python, with the same CMake options. The
default is the one in PATH, and the demo model. Both servers run all the time. Each request is sent to one after the
other, in the order A B B A, so that other load on the machine affects both. The client is a process of its own.

For each number of parallel requests (`--streams`) it prints medians: tokens per second, from the first byte sent to the
last one received; the ratio of the pairs; milliseconds to the first token; evaluated prompt tokens; and how many pairs
of answers have the same text. Answers are greedy, and must end by the limit of tokens, so that all have one length.
Texts of parallel requests may differ, since the kernels and their rounding depend on the number of tokens in a batch. A
different text of a single request ends the benchmark with an error.

Resident memory is printed for both. Our serving process has the model in a child, llama-server in itself. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from msgspec import Struct
from msgspec.structs import asdict

from app.demo import fetched_demo
from benchmarks._children import TIMEOUT_S, usable_processors

ROOT = Path(__file__).resolve().parent.parent
CLI = "import sys; from app.cli import main; sys.exit(main())"
PROMPT = "Tell me a long story about the sea, a ship and its crew. Begin with the harbour and the weather of that day."
BATCH = 512


class Served(Struct, frozen=True):
    """A running server."""

    process: psutil.Process
    port: int


class Run(Struct, frozen=True):
    """The result of several parallel requests to one server.

    `speed`: tokens per second of all answers together.
    `first_s`: median seconds to the first token.
    `evaluated_tokens`: prompt tokens of all requests that were not cached.
    """

    speed: float
    first_s: float
    texts: tuple[str, ...]
    evaluated_tokens: int


class Comparison(Struct, frozen=True):
    """Medians over all pairs of runs of both servers.

    `ratio`: tokens per second of ours to theirs.
    `first_later_ms`: by how much our first token comes later.
    `ours_evaluated`, `theirs_evaluated`: prompt tokens that were not cached.
    `same_texts`: pairs of answers with the same text, of `texts` pairs.
    """

    ours_per_second: float
    theirs_per_second: float
    ratio: float
    ours_first_ms: float
    theirs_first_ms: float
    first_later_ms: float
    ours_evaluated: float
    theirs_evaluated: float
    same_texts: int
    texts: int


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("program", nargs="?", metavar="PATH/TO/llama-server", default=shutil.which("llama-server"))
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL.gguf", default=fetched_demo())
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--streams", default="1,4")
    parser.add_argument("--ctx", type=int, default=2048, help="of each request")
    parser.add_argument("--threads", type=int, default=usable_processors())
    options = parser.parse_args()
    if options.program is None:
        parser.error("There is no llama-server in PATH; name the program.")
    if options.model is None:
        parser.error("The demo model is not there; name a model, or run the set-up.")
    counts = [int(count) for count in options.streams.split(",")]
    slots = max(counts)
    with (
        tempfile.TemporaryDirectory() as folder,
        _started(our_command(options.model, options.ctx, slots, options.threads), Path(folder, "ours")) as ours,
        _started(
            their_command(options.program, options.model, options.ctx, slots, options.threads), Path(folder, "theirs")
        ) as theirs,
    ):
        found = {count: compare(ours, theirs, count, options.tokens, options.rounds) for count in counts}
        serving_bytes = ours.process.memory_info().rss
        child_bytes = sum(each.memory_info().rss for each in ours.process.children(recursive=True))
        their_bytes = theirs.process.memory_info().rss
    for count, each in found.items():
        print(
            f"{count:>2} at a time: {each.ours_per_second:.1f} tokens/s, llama-server {each.theirs_per_second:.1f},"
            f" ratio {each.ratio:.3f}; first token {each.ours_first_ms:.1f} ms, llama-server"
            f" {each.theirs_first_ms:.1f}, {each.first_later_ms:+.1f} ms; {each.ours_evaluated:.0f} tokens of prompts"
            f" evaluated, llama-server {each.theirs_evaluated:.0f}; same text {each.same_texts} of {each.texts}"
        )
    print(
        f"memory of the serving process: {serving_bytes / 1e6:.0f} MB, of its children {child_bytes / 1e6:.0f} MB;"
        f" llama-server {their_bytes / 1e6:.0f} MB"
    )
    result = {
        "benchmark": "against_llama_server", "model": options.model.name, "tokens": options.tokens,
        "rounds": options.rounds, "threads": options.threads, "ctx": options.ctx, "slots": slots,
        "streams": {str(count): asdict(each) for count, each in found.items()},
        "serving_rss_bytes": serving_bytes, "children_rss_bytes": child_bytes, "theirs_rss_bytes": their_bytes,
    }  # fmt: skip
    print(json.dumps(result))
    if 1 in found and found[1].same_texts != found[1].texts:
        sys.exit("Single requests were answered with other texts.")


def our_command(model: Path, ctx: int, slots: int, threads: int) -> list[str]:
    """Return the command of our server, without the port. `ctx`: context length of one slot, in tokens."""
    return [
        sys.executable, "-c", CLI, "serve", str(model), "--only", "--device", "CPU", "--ctx", str(ctx),
        "--parallel", str(slots), "--kv-unified", "off", "--threads", str(threads), "--threads-batch", str(threads),
        "--batch", str(BATCH), "--ubatch", str(BATCH), "--load-mode", "mmap",
    ]  # fmt: skip


def their_command(program: str, model: Path, ctx: int, slots: int, threads: int) -> list[str]:
    """Return the command of llama-server, without the port. `ctx`: context length of one slot, in tokens.

    Its cache of prompts in memory is off (`--cache-ram 0`): ours has none, and filling it delays the first token.
    """
    return [
        program, "--model", str(model), "--device", "none", "--ctx-size", str(ctx * slots), "--parallel", str(slots),
        "--no-kv-unified", "--threads", str(threads), "--threads-batch", str(threads), "--batch-size", str(BATCH),
        "--ubatch-size", str(BATCH), "--fit", "off", "--cache-ram", "0", "--no-ui", "--host", "127.0.0.1",
    ]  # fmt: skip


@contextmanager
def _started(command: Sequence[str], folder: Path) -> Iterator[Served]:
    """Start a server, yield it when it has answered a request, and end it afterwards.

    Raises:
        RuntimeError: the server ended by itself, or did not answer within the time limit.
    """
    folder.mkdir()
    port = _free_port()
    environment = os.environ | {f"XDG_{kind}_HOME": str(folder / kind) for kind in ("CONFIG", "DATA", "CACHE")}
    with (
        Path(folder, "log").open("w+b") as log,
        subprocess.Popen(
            [*command, "--port", str(port)],
            cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        ) as process,
    ):  # fmt: skip
        try:
            begun_s = time.monotonic()
            while not _is_ready(port):
                if process.poll() is not None or time.monotonic() - begun_s > TIMEOUT_S:
                    raise RuntimeError(f"{command[0]} does not serve:\n{Path(log.name).read_text(errors='replace')}")
                time.sleep(0.1)
            yield Served(psutil.Process(process.pid), port)
        finally:
            process.terminate()
            process.wait(TIMEOUT_S)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _is_ready(port: int) -> bool:
    """Return whether a server answers a chat request. The answer comes only when the model is loaded."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1})
        connection.request("POST", "/v1/chat/completions", body)
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False
    finally:
        connection.close()


def compare(ours: Served, theirs: Served, count: int, tokens: int, rounds: int) -> Comparison:
    """Measure both servers in turns; return the medians over all rounds. `count`: parallel requests.

    Raises:
        RuntimeError: an answer ended before the limit of tokens.
    """
    pairs: list[tuple[Run, Run]] = []
    run(ours, -1, count, tokens)
    run(theirs, -1, count, tokens)
    for number in range(rounds):
        mine, other = run(ours, 2 * number, count, tokens), run(theirs, 2 * number, count, tokens)
        pairs.append((mine, other))
        other, mine = run(theirs, 2 * number + 1, count, tokens), run(ours, 2 * number + 1, count, tokens)
        pairs.append((mine, other))
    return comparison(pairs)


def comparison(pairs: Sequence[tuple[Run, Run]]) -> Comparison:
    """Return the medians over pairs of runs (ours, theirs); both runs of a pair answered the same requests."""
    mine, others = zip(*pairs, strict=True)
    first_ms = [1000 * statistics.median(each.first_s for each in side) for side in (mine, others)]
    texts = [(a, b) for one, other in pairs for a, b in zip(one.texts, other.texts, strict=True)]
    return Comparison(
        ours_per_second=statistics.median(each.speed for each in mine),
        theirs_per_second=statistics.median(each.speed for each in others),
        ratio=statistics.median(one.speed / other.speed for one, other in pairs),
        ours_first_ms=first_ms[0],
        theirs_first_ms=first_ms[1],
        first_later_ms=1000 * statistics.median(one.first_s - other.first_s for one, other in pairs),
        ours_evaluated=statistics.median(each.evaluated_tokens for each in mine),
        theirs_evaluated=statistics.median(each.evaluated_tokens for each in others),
        same_texts=sum(a == b for a, b in texts),
        texts=len(texts),
    )


def run(server: Served, number: int, count: int, tokens: int) -> Run:
    """Send `count` requests in parallel, and return the figures of their answers.

    `number` and the request's index begin the prompt, so that no prompt is cached.
    """
    prompts = [f"Story {number + 2}.{place + 1}: {PROMPT}" for place in range(count)]
    words = [sys.executable, "-m", "benchmarks._stream_client", str(server.port), str(tokens), json.dumps(prompts)]
    told = json.loads(subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
    if set(told["finish_reasons"]) != {"length"} or told["tokens"] != count * tokens:
        raise RuntimeError("An answer ended before the limit; ask for fewer tokens, or of another model.")
    return Run(
        speed=told["tokens"] / told["seconds"],
        first_s=statistics.median(told["first_s"]),
        texts=tuple(told["texts"]),
        evaluated_tokens=sum(told["evaluated"]),
    )


if __name__ == "__main__":
    main()
