"""Tokens per second through the worker, against llama.cpp's own greedy loop in a bare child with the same settings.

    python -m benchmarks.generation_speed [--model FILE.gguf] [--tokens 200] [--threads N]

The two take turns. Ours is measured in the parent, from the first piece of text to the last message, so that the pipe
and the decoding of messages count; the bare loop is measured inside its process. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks._children import OurChild, load_request, our_child, run_bare, usable_processors, write_model
from engine.runner.protocol import Generate, Generated, Hello, LoadedModel, Piece, Reading, StageProgress

ROUNDS = 5
N_CTX = 2048
PROMPT = "The layers of a model are places. " * 8


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=usable_processors())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or write_model(Path(folder) / "speed.gguf", n_layers=12, n_embd=768, n_ff=2048)
        ours, bare = measure(path, options.tokens, options.threads)
    result = {
        "benchmark": "generation_speed",
        "ours_tokens_per_second": round(statistics.median(ours), 1),
        "bare_tokens_per_second": round(statistics.median(bare), 1),
        "ratio": round(statistics.median(ours) / statistics.median(bare), 3),
        "tokens": options.tokens,
        "threads": options.threads,
        "rounds": ROUNDS,
    }
    print(f"ours {result['ours_tokens_per_second']} t/s, bare {result['bare_tokens_per_second']} t/s")
    print(json.dumps(result))


def measure(path: Path, tokens: int, threads: int) -> tuple[list[float], list[float]]:
    """Return (ours, bare) speeds of all rounds in tokens per second."""
    ours, bare = [], []
    for number in range(ROUNDS + 1):
        with our_child() as child:
            child.send(load_request(path, load_mode="mmap", n_ctx=N_CTX, threads=threads))
            while not isinstance(message := child.message(), LoadedModel):
                if not isinstance(message, Hello | StageProgress):
                    raise RuntimeError(f"no load: {message}")
            speed = our_speed(child, tokens)
        _, figures = run_bare(
            "generate", path, load_mode="mmap", n_ctx=N_CTX, threads=threads, prompt=PROMPT, n_tokens=tokens
        )
        if number:  # the first round fills the file cache
            ours.append(speed)
            bare.append(figures["generated"] / figures["seconds"])
    return ours, bare


def our_speed(child: OurChild, tokens: int) -> float:
    """Return tokens per second as the parent sees them arrive."""
    child.send(Generate(prompt=PROMPT, max_tokens=tokens, temperature=0.0))
    first = 0.0
    while isinstance(message := child.message(), Piece | Reading):
        if isinstance(message, Piece):
            first = first or time.perf_counter()
    seconds = time.perf_counter() - first
    if not isinstance(message, Generated):
        raise RuntimeError(f"no generation: {message}")
    # the first token was there when the clock started
    return (message.generated_tokens - 1) / seconds


if __name__ == "__main__":
    main()
