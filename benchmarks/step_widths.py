"""What a step of several tokens costs, as with drafts, in durations of a step of one token.

    python -m benchmarks.step_widths FILE.gguf [FILE.gguf ...] [--threads 1] [--rounds 15] [--depth 200]
        [--widths 2,3,4,5,6,8,12,16,24,32]

A draft of n tokens gains only if the model accepts more of it than the step with n + 1 tokens costs. llama.cpp alone,
in this process: a sequence of --depth tokens, then batches of each width in turn with logits for all tokens, whose KV
cells are removed again. Prints the medians of the ratios of each round. With one thread it is the time of the
processor, which other work on the machine changes little. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from pathlib import Path

from llama_cpp import llama_cpp as low

from benchmarks._bare_llama import context_parameters
from benchmarks._bare_loop import decode, extend


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--depth", type=int, default=200)
    parser.add_argument("--widths", default="2,3,4,5,6,8,12,16,24,32")
    options = parser.parse_args()
    callback = low.llama_log_callback(lambda _level, _text, _data: None)
    low.llama_log_set(callback, ctypes.c_void_p(0))
    low.llama_backend_init()
    widths = [1, *(int(width) for width in options.widths.split(","))]
    found = {}
    for path in options.models:
        ratios, seconds = measure(path, options.threads, options.rounds, options.depth, widths)
        found[path.name] = ratios
        print(f"{path.name}: {1000 * seconds:.2f} ms for one token, then", ratios, flush=True)
    print(json.dumps({"benchmark": "step_widths", "threads": options.threads, "depth": options.depth, "costs": found}))


def measure(path: Path, threads: int, rounds: int, depth: int, widths: list[int]) -> tuple[dict[int, float], float]:
    """Return the cost of each width in durations of width 1, and the median of these in seconds."""
    model = low.llama_model_load_from_file(str(path).encode(), low.llama_model_default_params())
    context = low.llama_init_from_model(model, context_parameters(depth + max(widths), threads))
    batch = low.llama_batch_init(max(depth, *widths), 0, 1)
    # Several threads wait for each other in loops, which takes processor time.
    clock = time.process_time if threads == 1 else time.perf_counter
    memory = low.llama_get_memory(context)
    extend(batch, list(range(1000, 1000 + depth)), 0, 0)
    decode(context, batch)
    times: dict[int, list[float]] = {width: [] for width in widths}
    for number in range(rounds + 1):
        for width in widths:
            batch.n_tokens = 0
            for place in range(width):
                extend(batch, [2000 + place], depth + place, 0)
            begun = clock()
            decode(context, batch)
            if number:
                times[width].append(clock() - begun)
            low.llama_memory_seq_rm(memory, 0, depth, -1)
    low.llama_batch_free(batch)
    low.llama_free(context)
    low.llama_model_free(model)
    ratios = {
        width: round(statistics.median(one / other for one, other in zip(taken, times[1], strict=True)), 2)
        for width, taken in times.items()
    }
    return ratios, statistics.median(times[1])


if __name__ == "__main__":
    main()
