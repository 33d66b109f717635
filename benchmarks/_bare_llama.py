"""What llama.cpp takes by itself: a child that calls it with nothing of ours around; the benchmarks compare with it.

    python -m benchmarks._bare_llama load|probe MODEL LOAD_MODE N_CTX THREADS

Prints one JSON line: `load_seconds` around `llama_model_load_from_file`; with `probe` nothing
is allocated and it is around model and context.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

from llama_cpp import llama_cpp as low


def main() -> None:
    """Do what the arguments say."""
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
    """Return the settings that the worker gets."""
    parameters = low.llama_context_default_params()
    parameters.n_ctx = n_ctx
    parameters.n_threads = parameters.n_threads_batch = threads
    parameters.swa_full = False
    return parameters


if __name__ == "__main__":
    main()
