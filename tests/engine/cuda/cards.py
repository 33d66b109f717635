"""Stand-ins for CUDA cards that count memory and compute nothing: builds `cards.c` and reads its shared counters.

The engine's real CUDA host code runs on them, so requests, refusals, pools and pinned memory are those of a card.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct
from msgspec.structs import fields

SOURCE = Path(__file__).with_name("cards.c")
VERSIONS = Path(__file__).with_name("cards.map")
"""Versions of the symbols, by which the engine's CUDA library finds them."""
NAMES = ("libcudart.so.13", "libcublas.so.13", "libcuda.so.1", "libnvidia-ml.so.1")
"""One file under the names of the CUDA runtime, cuBLAS, the driver and NVML: the loader then maps it once."""
BLOCK_BYTES = 2 << 20
"""What `cards.c` takes of a card at least."""

_HEAD = struct.Struct("<II40x")  # ready, number of processes; a pthread_mutex_t has 40 bytes on x86-64
_PROCESS = struct.Struct("<iiqqq")
_ACCOUNT = struct.Struct("<9q40s")
_MAX_CARDS = 16


class Account(Struct, frozen=True):
    """A process on a card, in bytes. `context_call`: the call that made its context; empty: it never used the card."""

    used_bytes: int
    peak_bytes: int
    buffer_bytes: int
    buffer_peak_bytes: int
    pool_bytes: int
    pool_peak_bytes: int
    small_bytes: int
    context_bytes: int
    refused: int
    context_call: str


class Ledger(Struct, frozen=True):
    """Accounts by process id and number of the card; cards that a process never used are left out."""

    accounts: dict[int, dict[int, Account]]

    def used_cards(self) -> set[int]:
        """Return the cards on which any process has made a context."""
        return {card for accounts in self.accounts.values() for card in accounts}

    def of_loader(self) -> dict[int, Account]:
        """Return the accounts of the process that asked for most, which is the one that loaded a model."""
        return max(self.accounts.values(), key=lambda each: sum(card.buffer_peak_bytes for card in each.values()))


_NAMES = [field.name for field in fields(Account)]


def headers() -> Path:
    """Return the folder of CUDA's headers, of a toolkit or of NVIDIA's package for Python.

    Raises:
        FileNotFoundError: there is neither.
    """
    toolkits = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    folders = [Path(folder) / "include" for folder in toolkits if folder]
    folders.append(Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "include")
    found = next((folder for folder in folders if (folder / "driver_types.h").is_file()), None)
    if found is None:
        raise FileNotFoundError(
            "CUDA's headers are missing: pip install nvidia-cuda-runtime==13.0.* nvidia-cuda-crt==13.0.*"
        )
    return found


def build(folder: Path) -> None:
    """Compile the library into `folder`, under all its names."""
    compiler = shutil.which("cc") or shutil.which("gcc") or "cc"
    options = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-strict-prototypes", "-fPIC", "-shared"]
    first, *others = NAMES
    command = [compiler, *options, f"-I{headers()}", str(SOURCE), "-o", str(folder / first)]
    subprocess.run([*command, f"-Wl,--version-script,{VERSIONS}", "-lpthread"], check=True, timeout=120)
    for name in others:
        (folder / name).symlink_to(first)


def read_ledger(path: Path) -> Ledger:
    """Return what the processes of a ledger have taken so far."""
    data = path.read_bytes()
    _ready, count = _HEAD.unpack_from(data)
    size = _PROCESS.size + _MAX_CARDS * _ACCOUNT.size
    found: dict[int, dict[int, Account]] = {}
    for at in range(_HEAD.size, _HEAD.size + count * size, size):
        pid, *_others = _PROCESS.unpack_from(data, at)
        found[pid] = dict(_accounts(data, at + _PROCESS.size))
    return Ledger(found)


def _accounts(data: bytes, at: int) -> Iterator[tuple[int, Account]]:
    for card in range(_MAX_CARDS):
        values = dict(zip(_NAMES, _ACCOUNT.unpack_from(data, at + card * _ACCOUNT.size), strict=True))
        values["context_call"] = values["context_call"].split(b"\0")[0].decode()
        account = Account(**values)
        if account.context_call or account.refused:
            yield card, account
