"""One load by llama.cpp alone, as the reference of load benchmarks: nothing of Layerdeck is imported.

    python -m benchmarks._bare_llama load|probe MODEL LOAD_MODE N_CTX THREADS

Prints one JSON line. `load_seconds`: wall-clock seconds of `llama_model_load_from_file`. With `probe` nothing is
allocated (`no_alloc`), and the time of `llama_init_from_model` is included.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

from llama_cpp import llama_cpp as low


def main() -> None:
    """Load the model named by the arguments, and print its time."""
    what, path, load_mode, n_ctx, threads = sys.argv[1:]
    callback = low.llama_log_callback(lambda _level, _text, _data: None)
    low.llama_log_set(callback, ctypes.c_void_p(0))
    low.llama_backend_init()
    parameters = low.llama_model_default_params()
    parameters.load_mode = int(load_mode)
    parameters.no_alloc = what == "probe"
    begun = time.perf_counter()
    model = low.llama_model_load_from_file(path.encode(), parameters)
    if what == "probe":
        low.llama_init_from_model(model, context_parameters(int(n_ctx), int(threads)))
    figures: dict[str, float] = {"load_seconds": time.perf_counter() - begun}
    print(json.dumps(figures), flush=True)


def context_parameters(n_ctx: int, threads: int) -> Any:
    """Return the context parameters that a model child of ours sets too."""
    parameters = low.llama_context_default_params()
    parameters.n_ctx = n_ctx
    parameters.n_threads = parameters.n_threads_batch = threads
    parameters.swa_full = False
    return parameters


if __name__ == "__main__":
    main()
