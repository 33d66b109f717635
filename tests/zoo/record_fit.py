"""Records the layers that llama.cpp's own fit puts on devices of given sizes: `python -m tests.zoo.record_fit`.

It calls `common_fit_params` of the library's common code, with stand-in devices (`simdev.c`) that have just that much
memory. Only values that the caller leaves at their defaults are fitted, so the context stays as given.
"""

from __future__ import annotations

import argparse
import ctypes
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support.headers import write_with_hole
from tests.zoo.pack import FOLDER, read_document
from tests.zoo.record import DEFAULTS, Library

_MIB = 1 << 20
_LARGE_BYTES = 1 << 28
_SYMBOL = (
    "_Z17common_fit_paramsPKcP18llama_model_paramsP20llama_context_paramsPfP32llama_model_tensor_buft_overridePmjPK22"
    "common_fit_extra_model14ggml_log_level"
)
_FIXED_CONTEXT = 0xFFFFFFFF
_LOG_ERROR = 4

SHARES = ((1.3,), (0.6,), (0.25,), (0.7, 0.5), (0.4, 0.2), (0.15, 0.3), (0.35, 0.2, 0.25), (0.1, 0.1, 0.5))
"""Parts of the file's size that each device has beside room for buffers."""


def rigs(size_bytes: int) -> list[dict[str, Any]]:
    """Return what is asked for a model: memory and margin of each device, and context settings."""
    large = size_bytes > _LARGE_BYTES
    margin, buffers = (512 * _MIB, 640 * _MIB) if large else (_MIB, 2 * _MIB)
    settings = {"n_ctx": 4096} if large else {"n_ctx": 256, "n_ubatch": 64}
    found = [
        {"memory": [int(size_bytes * share) + margin + buffers for share in shares], "margin": margin, **settings}
        for shares in SHARES
    ]
    if large:
        found += [{"memory": [size << 30 for size in sizes], "margin": 1 << 30, "n_ctx": 8192} for sizes in CARDS]
    return found


CARDS = ((24,), (24, 12), (16, 8))
"""Cards that people have, in GiB."""


class Fitter(Library):
    """The library with its common code and stand-in devices whose memory can be set."""

    def __init__(self, simdev: str) -> None:
        super().__init__((), simdev)
        import llama_cpp

        folder = Path(llama_cpp.__file__).parents[1] / "lib"
        self._fit = getattr(ctypes.CDLL(str(folder / "libllama-common.so")), _SYMBOL)
        self._fit.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 5, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int]
        self._set_memory = ctypes.CDLL(simdev).simdev_set_memory
        self._set_memory.argtypes = [ctypes.c_size_t, ctypes.c_size_t]

    def fit(self, path: Path, asked: dict[str, Any]) -> dict[str, Any]:
        """Return what llama.cpp's fit makes of the devices: its layers, its overrides, and what they then hold."""
        count = len(asked["memory"])
        for number, memory in enumerate(asked["memory"]):
            self._set_memory(number, memory)
        own = {key: value for key, value in asked.items() if key not in ("memory", "margin")}
        options = {**DEFAULTS, **own, "device_order": list(range(count))}
        keep: list[Any] = []
        low: Any = self.low
        model = self._model_parameters(options, keep, False)
        model.n_gpu_layers = low.llama_model_default_params().n_gpu_layers
        context = self._context_parameters(options)
        split = (ctypes.c_float * low.llama_max_devices())()
        overrides = (ctypes.c_void_p * (2 * 4096))()
        margins = (ctypes.c_size_t * low.llama_max_devices())(*[asked["margin"]] * count)
        status = self._fit(
            str(path).encode(), ctypes.addressof(model), ctypes.addressof(context), split, overrides, margins,
            _FIXED_CONTEXT, None, _LOG_ERROR,
        )  # fmt: skip
        if status != 0:
            return {**asked, "status": status}
        # Untouched where everything fits: then all layers go to devices, split by their memory.
        touched = model.n_gpu_layers >= 0
        chosen: dict[str, Any] = {
            "n_gpu_layers": model.n_gpu_layers if touched else DEFAULTS["n_gpu_layers"],
            "tensor_split": list(split[:count]) if touched and count > 1 else None,
            "overrides": self._overrides(overrides) if touched else [],
        }
        measured = self.measure(path, {**own, **chosen, "device_order": options["device_order"]}, real=False)
        if "devices" not in measured:
            return {**asked, "status": 0, **chosen, "refused": measured["reason"]}
        held = {number: sum(sizes.values()) for number, sizes in measured["devices"].items()}
        kept = sum(sizes["model"] + sizes["context"] for sizes in measured["devices"].values())
        return {**asked, "status": 0, **chosen, "held": held, "placed_bytes": kept}

    def _overrides(self, table: Any) -> list[list[Any]]:
        found: list[list[Any]] = []
        for place in range(0, len(table), 2):
            pattern, buffer_type = table[place], table[place + 1]
            if pattern is None:
                break
            owner = self.buffer_type_device(buffer_type)
            target = self.stand_ins.index(owner) if owner in self.stand_ins else "CPU"
            found.append([ctypes.string_at(pattern).decode(), target])
        return found


def record(name: str, simdev: str) -> list[dict[str, Any]]:
    """Return what llama.cpp's fit does with one model of the zoo on each rig."""
    header = gzip.decompress((FOLDER / "headers" / f"{name}.gguf.head.gz").read_bytes())
    size_bytes = read_document(name)["size_bytes"]
    with TemporaryDirectory() as folder:
        path = write_with_hole(Path(folder) / f"{name}.gguf", header, size_bytes)
        fitter = Fitter(simdev)
        return [fitter.fit(path, asked) for asked in rigs(size_bytes)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Record each model in a process of its own, since the library may end it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="+")
    parser.add_argument("--simdev", required=True, help="path of the compiled simdev.c")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.here:
        lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in record(options.names[0], options.simdev))
        out = FOLDER / "fit" / f"{options.names[0]}.json.gz"
        out.parent.mkdir(exist_ok=True)
        out.write_bytes(gzip.compress(f"[\n{lines}\n]\n".encode(), mtime=0))
        os._exit(0)
    for name in options.names:
        started = time.monotonic()
        words = [sys.executable, "-m", "tests.zoo.record_fit", "--here", "--simdev", options.simdev, name]
        ended = subprocess.run(words, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        print(f"{name:32} {ended.returncode:4} {time.monotonic() - started:6.1f} s", flush=True)
        if ended.returncode:
            print(ended.stderr.decode()[-600:], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
