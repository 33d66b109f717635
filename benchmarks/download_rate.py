"""Rate of a download, as ratios to `curl` and to `curl` followed by `sha256sum`; and the memory of its child.

    python -m benchmarks.download_rate [--size-mib 1024] [--repeat 3] [--folder DIR]

All download the same file from a server on this machine, in turns, measured from start to end of their processes by the
wall clock. Our transfer also hashes all bytes, so it has two rates: until the last byte is here, and until the file is
checked. Printed are MiB per second (medians), the ratios, and the largest resident memory of the transfer's child in
MiB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
from msgspec import Struct

from engine.base.units import MIB
from engine.library.downloads.transfer import Transfer, TransferEnd
from engine.runtime.protocol.network import Download, DownloadProgress, TransferFile

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 600


class Measured(Struct, frozen=True):
    """One transfer of ours: seconds until all bytes were here and until they were checked, and its child's peak."""

    here_s: float
    checked_s: float
    peak_bytes: int


@contextmanager
def _server(path: Path) -> Iterator[str]:
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks._file_server", str(path)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdin is not None
    try:
        yield f"http://127.0.0.1:{child.stdout.readline().strip()}/model.gguf"
    finally:
        child.stdin.close()
        child.stdout.close()
        child.wait(TIMEOUT_S)


def _curl(url: str, target: Path, *, checked: bool) -> float:
    target.unlink(missing_ok=True)
    begun = time.perf_counter()
    subprocess.run(["curl", "-s", "-o", str(target), url], check=True)
    if checked:
        subprocess.run(["sha256sum", str(target)], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def _ours(url: str, target: Path, size_bytes: int) -> Measured:
    target.unlink(missing_ok=True)
    ended = threading.Event()
    ends: list[TransferEnd] = []
    peak_bytes = 0
    here_s = 0.0

    def progress(message: DownloadProgress) -> None:
        nonlocal peak_bytes, here_s
        peak_bytes = max(peak_bytes, _peak_bytes(transfer.pid))
        if message.stage == "verify" and not here_s:
            here_s = time.perf_counter() - begun

    def end(how: TransferEnd) -> None:
        ends.append(how)
        ended.set()

    download = Download(files=(TransferFile(url=url, target=str(target), size_bytes=size_bytes),), reserve_bytes=0)
    transfer = Transfer(download, progress, end)
    begun = time.perf_counter()
    transfer.start()
    ended.wait(TIMEOUT_S)
    checked_s = time.perf_counter() - begun
    transfer.wait(TIMEOUT_S)
    if not ends[0].succeeded:
        raise SystemExit(ends[0].message)
    return Measured(here_s or checked_s, checked_s, peak_bytes)


def _peak_bytes(pid: int | None) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def main() -> None:
    """Measure in turns, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    size_bytes = options.size_mib * MIB
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "model.gguf"
        block = b"GGUF" + np.random.default_rng(1).bytes(MIB - 4)
        with path.open("wb") as file:
            for _ in range(options.size_mib):
                file.write(block)
        target = Path(folder) / "got.gguf"
        plain, checked, ours = [], [], []
        with _server(path) as url:
            for _ in range(options.repeat):
                plain.append(_curl(url, target, checked=False))
                checked.append(_curl(url, target, checked=True))
                ours.append(_ours(url, target, size_bytes))
    curl = size_bytes / MIB / median(plain)
    curl_checked = size_bytes / MIB / median(checked)
    here = size_bytes / MIB / median(each.here_s for each in ours)
    done = size_bytes / MIB / median(each.checked_s for each in ours)
    print(f"curl                 {curl:7.0f} MiB/s")
    print(f"curl and sha256sum   {curl_checked:7.0f} MiB/s")
    print(f"ours, all bytes here {here:7.0f} MiB/s  {here / curl:.2f} of curl")
    print(f"ours, checked        {done:7.0f} MiB/s  {done / curl_checked:.2f} of curl and sha256sum")
    print(f"peak memory          {max(each.peak_bytes for each in ours) / MIB:7.1f} MiB")


if __name__ == "__main__":
    main()
