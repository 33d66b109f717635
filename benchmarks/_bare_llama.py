"""What llama.cpp takes by itself: a child that calls it with nothing of ours around; the benchmarks compare with it.

    python -m benchmarks._bare_llama load|probe|generate MODEL LOAD_MODE N_CTX THREADS PROMPT N_TOKENS

Prints one JSON line: `load_seconds` around `llama_model_load_from_file`, and with `generate` the greedy loop's figures;
with `probe` nothing is allocated and `load_seconds` is around model and context.
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
    what, path, load_mode, n_ctx, threads, prompt, n_tokens = sys.argv[1:]
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
    if what == "generate":
        figures |= generate(model, make_context(model, int(n_ctx), int(threads)), prompt, int(n_tokens))
    print(json.dumps(figures), flush=True)


def make_context(model: Any, n_ctx: int, threads: int) -> Any:
    """Return a context with the settings that the worker gets."""
    context = low.llama_init_from_model(model, context_parameters(n_ctx, threads))
    # the same state of caches and thread pools as after a load by the worker
    decode(context, [1] * 512)
    low.llama_memory_clear(low.llama_get_memory(context), False)
    return context


def context_parameters(n_ctx: int, threads: int) -> Any:
    """Return the settings that the worker gets."""
    parameters = low.llama_context_default_params()
    parameters.n_ctx = n_ctx
    parameters.n_threads = parameters.n_threads_batch = threads
    parameters.swa_full = False
    return parameters


def generate(model: Any, context: Any, prompt: str, n_tokens: int) -> dict[str, float]:
    """Decode the prompt and continue greedily."""
    vocabulary = low.llama_model_get_vocab(model)
    text = prompt.encode()
    tokens = (ctypes.c_int32 * (len(text) + 8))()
    count = low.llama_tokenize(vocabulary, text, len(text), tokens, len(tokens), True, True)
    begun = time.perf_counter()
    decode(context, tokens[:count])
    read = time.perf_counter()
    sampler = low.llama_sampler_chain_init(low.llama_sampler_chain_default_params())
    low.llama_sampler_chain_add(sampler, low.llama_sampler_init_greedy())
    generated = 0
    while generated < n_tokens:
        token = low.llama_sampler_sample(sampler, context, -1)
        if low.llama_vocab_is_eog(vocabulary, token):
            break
        generated += 1
        decode(context, [token])
    seconds = time.perf_counter() - read
    return {"prompt_seconds": read - begun, "prompt_tokens": count, "generated": generated, "seconds": seconds}


def decode(context: Any, tokens: list[int]) -> None:
    """Append tokens to the context."""
    array = (ctypes.c_int32 * len(tokens))(*tokens)
    if low.llama_decode(context, low.llama_batch_get_one(array, len(tokens))) != 0:
        raise RuntimeError("llama_decode failed")
    low.llama_synchronize(context)


if __name__ == "__main__":
    main()
