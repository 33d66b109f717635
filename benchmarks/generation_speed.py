"""Tokens per second of a model child, as ratios to llama.cpp alone with the same settings.

    python -m benchmarks.generation_speed [--model FILE.gguf] [--tokens 60] [--rounds 12] [--threads 1]

One request and four parallel ones are measured, prompts and answers separately. Ours and a child that calls only
llama.cpp (`_bare_loop.py`) both hold the model, and take turns, in alternating order, so that other load on the machine
affects both. Printed are median tokens per second, and the median of the rounds' ratios, ours to llama.cpp's.

Ours is measured by the wall clock of the parent process, so pipe and decoding of messages are included. The time of an
answer begins with the message that all prompts have been read, and ends with the last piece. The default is one thread:
several wait for each other in each step, and all of them wait when another program uses a core. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from msgspec import Struct

from benchmarks._children import (
    BareLoop,
    OurChild,
    bare_loop,
    load_request,
    our_child,
    write_model,
)
from engine.runtime.protocol.messages import Generated, Hello, LoadedModel, Piece, Reading, StageProgress
from engine.runtime.protocol.requests import Generate

N_CTX = 1024
"""Context length of each request, in tokens."""
TOGETHER = 4
WARM_UP_ROUNDS = 2
"""Rounds that are not counted. They fill caches, and teach our child how many prompt tokens to take in a batch."""
LONG_PROMPT = "The layers of a model are places. " * 8
SHORT_PROMPT = "Hello"
"""Four of these fit in one batch, so that the four answers begin and end together."""

_numbers = count(1)


class Speed(Struct, frozen=True):
    """Tokens per second of prompts and of answers, all requests of a round together."""

    prompt: float
    answer: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    result: dict[str, object] = {"benchmark": "generation_speed"}
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or write_model(Path(folder) / "speed.gguf", n_layers=12, n_embd=768, n_ff=2048)
        for name, requests, prompt in (("one", 1, LONG_PROMPT), ("four", TOGETHER, SHORT_PROMPT)):
            ours, bare = measure(path, requests, prompt, options.tokens, options.rounds, options.threads)
            result |= report(name, ours, bare)
    print(json.dumps(result | {"tokens": options.tokens, "threads": options.threads, "rounds": options.rounds}))


def report(name: str, ours: Sequence[Speed], bare: Sequence[Speed]) -> dict[str, float]:
    """Print the median speeds and ratios of one measurement, and return them. `name` begins their keys."""
    figures: dict[str, float] = {}
    for part in ("prompt", "answer"):
        pairs = [(getattr(mine, part), getattr(theirs, part)) for mine, theirs in zip(ours, bare, strict=True)]
        mine, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(one / other for one, other in pairs)
        print(f"{name}, {part}: ours {mine:.1f} t/s, bare {theirs:.1f} t/s, ratio {ratio:.3f}")
        figures[f"{name}_{part}_tokens_per_second"] = round(mine, 1)
        figures[f"{name}_{part}_ratio"] = round(ratio, 3)
    return figures


def measure(
    path: Path, requests: int, prompt: str, tokens: int, rounds: int, threads: int
) -> tuple[list[Speed], list[Speed]]:
    """Return the speeds (ours, llama.cpp's) of all counted rounds."""
    ours, bare = [], []
    n_ctx = N_CTX * requests
    with our_child() as child, bare_loop(path, n_ctx=n_ctx, threads=threads, sequences=requests) as loop:
        child.send(load_request(path, load_mode="mmap", n_ctx=n_ctx, threads=threads, n_seq_max=requests))
        while not isinstance(message := child.message(), LoadedModel):
            if not isinstance(message, Hello | StageProgress):
                raise RuntimeError(f"no load: {message}")
        for number in range(WARM_UP_ROUNDS + rounds):
            # other beginnings each time: nothing of a prompt is cached
            prompts = [f"{chr(ord('A') + number % 26)}{request}{prompt}" for request in range(requests)]
            if number % 2:
                bare.append(bare_speed(loop, prompts, tokens))
            ours.append(our_speed(child, prompts, tokens))
            if not number % 2:
                bare.append(bare_speed(loop, prompts, tokens))
    return ours[WARM_UP_ROUNDS:], bare[WARM_UP_ROUNDS:]


def our_speed(child: OurChild, prompts: Sequence[str], tokens: int) -> Speed:
    """Return the speeds of our child for one round, measured in this process."""
    numbers = [next(_numbers) for _ in prompts]
    begun = time.perf_counter()
    child.send(
        *(
            Generate(id=number, prompt=prompt, max_tokens=tokens, temperature=0.0)
            for number, prompt in zip(numbers, prompts, strict=True)
        )
    )
    reading, running, read_tokens, generated_tokens, early_tokens = set(numbers), set(numbers), 0, 0, 0
    read: float | None = None
    while running:
        match child.message():
            case Reading() as message if message.read_tokens == message.prompt_tokens:
                reading.discard(message.request)
                if not reading and read is None:  # it is told again as a sign of life while answers are made
                    read = time.perf_counter()
            case Reading():
                pass
            case Piece():
                early_tokens += read is None
            case Generated() as message:
                running.discard(message.request)
                read_tokens += message.evaluated_tokens
                generated_tokens += message.generated_tokens
            case message:
                raise RuntimeError(f"no generation: {message}")
    ended = time.perf_counter()
    if read is None:
        raise RuntimeError("an answer ended before all prompts had been read; ask for more tokens")
    # what was there when the clock started: the first token of each, and what prompts that were read sooner had
    generated_tokens -= max(early_tokens, len(prompts))
    return Speed(read_tokens / (read - begun), generated_tokens / (ended - read))


def bare_speed(loop: BareLoop, prompts: Sequence[str], tokens: int) -> Speed:
    """Return the speeds of llama.cpp alone for one round, measured in its child."""
    figures = loop.ask([*prompts, tokens])
    return Speed(figures["prompt_tokens"] / figures["prompt_seconds"], len(prompts) * (tokens - 1) / figures["seconds"])


if __name__ == "__main__":
    main()
