"""Time of a load by load mode, as ratios to `mmap`: with the file not in the page cache, and right after an unload.

    python -m benchmarks.load_modes [--model FILE.gguf] [--rounds 5]

The modes are loaded in turns, and each is compared with `mmap` of the same round. Before a cold load the file is
removed from the page cache with POSIX_FADV_DONTNEED. That needs no privileges, but leaves pages that are mapped
elsewhere, and a hypervisor may still hold the file in memory. Times are wall-clock milliseconds from the request to the
loaded model, in a child that already runs, as in the window. Printed are medians, and medians of the rounds' ratios.
The last line is one JSON object.

`mmap` is also measured while the file is read ahead: by 2 or 4 threads, or by the kernel (POSIX_FADV_WILLNEED). On a
virtual disk none of these was faster (1.02 to 1.16 of the time of plain mmap, 650 MB), so there is no such setting.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

from benchmarks._children import load_request, our_child, write_model
from engine.runtime.protocol.messages import Hello, LoadedModel, StageProgress

MODES = ("mmap", "none", "direct_io", "mmap_2_readers", "mmap_4_readers", "mmap_willneed")
"""Load modes; the first is the reference. The part after `mmap_` says what reads the file ahead of the load."""
READ_BYTES = 4 << 20
N_CTX = 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    times: dict[str, dict[str, list[float]]] = {mode: {"cold": [], "again": []} for mode in MODES}
    with tempfile.TemporaryDirectory(dir=Path.home() / ".cache") as folder:
        path = options.model or write_model(Path(folder) / "load.gguf", n_layers=12, n_embd=1024, n_ff=2816)
        for number in range(options.rounds):
            # Another mode is first in each round.
            for mode in MODES[number % len(MODES) :] + MODES[: number % len(MODES)]:
                forget(path)
                times[mode]["cold"].append(load_s(path, mode))
                times[mode]["again"].append(load_s(path, mode))
        size_bytes = path.stat().st_size
    result: dict[str, object] = {"benchmark": "load_modes", "model_bytes": size_bytes, "rounds": options.rounds}
    for mode, found in times.items():
        for kind, seconds in found.items():
            first = times[MODES[0]][kind]
            ratio = statistics.median(one / other for one, other in zip(seconds, first, strict=True))
            print(f"{mode}, {kind}: {statistics.median(seconds) * 1e3:.0f} ms, {ratio:.2f} of {MODES[0]}")
            result |= {
                f"{mode}_{kind}_ms": round(statistics.median(seconds) * 1e3),
                f"{mode}_{kind}_ratio": round(ratio, 3),
            }
        again = statistics.median(one / other for one, other in zip(found["again"], found["cold"], strict=True))
        result[f"{mode}_again_over_cold"] = round(again, 3)
    print(json.dumps(result))


def forget(path: Path) -> None:
    """Remove a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def load_s(path: Path, mode: str) -> float:
    """Load the model in a new child; return the seconds from the request to the loaded model."""
    with our_child() as child:
        while not isinstance(child.message(), Hello):
            pass
        begun = time.perf_counter()
        readers = read_ahead(path, mode)
        load_mode = "mmap" if mode.startswith("mmap") else mode
        child.send(load_request(path, load_mode=load_mode, n_ctx=N_CTX, threads=1))
        while not isinstance(message := child.message(), LoadedModel):
            if not isinstance(message, StageProgress):
                raise RuntimeError(f"no load: {message}")
        seconds = time.perf_counter() - begun
        for reader in readers:
            reader.join()
        return seconds


def read_ahead(path: Path, mode: str) -> list[threading.Thread]:
    """Start reading the file into the page cache as `mode` says; return the threads that read."""
    if mode == "mmap_willneed":
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        os.close(descriptor)
    count = int(mode.split("_")[1]) if mode.endswith("_readers") else 0
    offsets, lock = iter(range(0, path.stat().st_size, READ_BYTES)), threading.Lock()

    def read() -> None:
        block = bytearray(READ_BYTES)
        descriptor = os.open(path, os.O_RDONLY)
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                break
            os.preadv(descriptor, [block], offset)
        os.close(descriptor)

    threads = [threading.Thread(target=read) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


if __name__ == "__main__":
    main()
