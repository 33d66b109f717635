"""Time and memory for reading a model's header with a large vocabulary; the time also of gguf-py's `GGUFReader`.

    python -m benchmarks.header_reading [--tokens 262144]

`ours_ms`, `reference_ms`, `ratio`: wall-clock milliseconds, ours as the best of 7, and how many times faster ours is.
`python_peak_mib`: peak of Python's allocations (tracemalloc), in a new child process.
`resident_mib`: peak of the resident size of a new child process.
`resident_growth_mib`: by how much that is above the peak of a child that reads a small header.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import gguf

from engine.base.units import MIB
from engine.model.demo.llama_writer import LlamaShape, byte_vocabulary, write_llama
from engine.model.gguf.reader import read_model

ROUNDS = 7
_SHAPE = LlamaShape(n_layers=32, n_embd=4096, n_head=32, n_head_kv=8, n_ff=14336, n_ctx_train=131072)
_CHILD = """
import re, resource, sys, tracemalloc
from pathlib import Path
from engine.model.gguf.reader import read_model
if sys.argv[2] == "traced":
    tracemalloc.start()
read_model(Path(sys.argv[1]))
print(tracemalloc.get_traced_memory()[1] if sys.argv[2] == "traced" else 0)
status = Path("/proc/self/status")
if status.exists():  # On Linux ru_maxrss of a child starts with the size of its parent.
    print(int(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1]) * 1024)
else:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def _best_seconds(action: Callable[[], object], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        start = perf_counter()
        action()
        seconds.append(perf_counter() - start)
    return min(seconds)


def _child_memory(path: Path, mode: str) -> tuple[int, int]:
    """Return the peaks of Python's allocations and of the resident size of a child that reads the header, in bytes.

    `mode`: "traced" counts allocations and makes the resident size larger; "plain" counts none.
    """
    command = [sys.executable, "-c", _CHILD, str(path), mode]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.split()
    return int(output[0]), int(output[1])


def measure(n_tokens: int) -> dict[str, float | int]:
    """Write a header with `n_tokens` tokens, read it with both readers, and return the figures."""
    with tempfile.TemporaryDirectory() as folder:
        large, small = Path(folder) / "large.gguf", Path(folder) / "small.gguf"
        for path, vocabulary in ((large, byte_vocabulary(n_tokens)), (small, byte_vocabulary())):
            write_llama(path, _SHAPE, vocabulary, name=path.stem, weights=None)
        ours = _best_seconds(lambda: read_model(large), ROUNDS)
        reference = _best_seconds(lambda: gguf.GGUFReader(large), 1)
        resident = _child_memory(large, "plain")[1]
        return {
            "tokens": n_tokens,
            "ours_ms": round(ours * 1e3, 2),
            "reference_ms": round(reference * 1e3, 1),
            "ratio": round(reference / ours, 1),
            "python_peak_mib": round(_child_memory(large, "traced")[0] / MIB, 2),
            "resident_mib": round(resident / MIB, 1),
            "resident_growth_mib": round((resident - _child_memory(small, "plain")[1]) / MIB, 2),
        }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=256 * 1024)
    figures = measure(parser.parse_args().tokens)
    print(f"{figures['tokens']:,} tokens: {figures['ours_ms']} ms, reference {figures['reference_ms']} ms,")
    print(f"{figures['ratio']} times faster; {figures['python_peak_mib']} MiB of Python allocations at most,")
    print(f"resident size {figures['resident_growth_mib']} MiB above that for a small header")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
