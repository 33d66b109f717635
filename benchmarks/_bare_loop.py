"""Greedy answers by llama.cpp alone, as the reference of `generation_speed`: one sequence, or several in one batch.

    python -m benchmarks._bare_loop MODEL N_CTX THREADS SEQUENCES

Each line of standard input is a JSON list: the prompts, then the number of tokens of each answer. For each line it
prints a JSON line with the number of prompt tokens, and the wall-clock seconds of prompts and answers.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from llama_cpp import llama_cpp as low

MMAP = 1


def main() -> None:
    """Load the model, then answer each line of standard input."""
    path, n_ctx, threads, sequences = sys.argv[1:]
    callback = low.llama_log_callback(lambda _level, _text, _data: None)
    low.llama_log_set(callback, ctypes.c_void_p(0))
    low.llama_backend_init()
    parameters = low.llama_model_default_params()
    parameters.load_mode = MMAP
    model = low.llama_model_load_from_file(path.encode(), parameters)
    context = low.llama_init_from_model(model, context_parameters(int(n_ctx), int(threads), int(sequences)))
    batch = low.llama_batch_init(low.llama_n_batch(context), 0, 1)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        *prompts, n_tokens = json.loads(line)
        print(json.dumps(generate(model, context, batch, prompts, n_tokens)), flush=True)


def context_parameters(n_ctx: int, threads: int, sequences: int) -> Any:
    """Return the context parameters that a model child of ours sets too."""
    parameters = low.llama_context_default_params()
    parameters.n_ctx = n_ctx
    parameters.n_seq_max = sequences
    parameters.n_threads = parameters.n_threads_batch = threads
    parameters.swa_full = False
    return parameters


def generate(model: Any, context: Any, batch: Any, prompts: Sequence[str], n_tokens: int) -> dict[str, float]:
    """Decode the prompts in one batch, then generate greedily, with one token of each sequence in a batch.

    Return the prompt tokens, the seconds of the prompts, and the seconds from the first tokens to the last ones.
    """
    vocabulary = low.llama_model_get_vocab(model)
    texts = [tokenized(vocabulary, prompt) for prompt in prompts]
    low.llama_memory_clear(low.llama_get_memory(context), False)
    samplers = [greedy_sampler() for _ in prompts]
    begun = time.perf_counter()
    batch.n_tokens = 0
    places = [extend(batch, text, 0, sequence) for sequence, text in enumerate(texts)]
    decode(context, batch)
    read = time.perf_counter()
    lengths = [len(text) for text in texts]
    for step in range(n_tokens):
        tokens = [
            low.llama_sampler_sample(sampler, context, place) for sampler, place in zip(samplers, places, strict=True)
        ]
        if any(low.llama_vocab_is_eog(vocabulary, token) for token in tokens):
            raise RuntimeError("an answer ended by itself; take another model")
        if step == 0:
            first = time.perf_counter()
        if step + 1 == n_tokens:
            break
        batch.n_tokens = 0
        for sequence, token in enumerate(tokens):
            places[sequence] = extend(batch, [token], lengths[sequence] + step, sequence)
        decode(context, batch)
    seconds = time.perf_counter() - first
    for sampler in samplers:
        low.llama_sampler_free(sampler)
    return {"prompt_tokens": sum(lengths), "prompt_seconds": read - begun, "seconds": seconds}


def tokenized(vocabulary: Any, prompt: str) -> list[int]:
    text = prompt.encode()
    tokens = (ctypes.c_int32 * (len(text) + 8))()
    count = low.llama_tokenize(vocabulary, text, len(text), tokens, len(tokens), True, True)
    return list(tokens[:count])


def greedy_sampler() -> Any:
    sampler = low.llama_sampler_chain_init(low.llama_sampler_chain_default_params())
    low.llama_sampler_chain_add(sampler, low.llama_sampler_init_greedy())
    return sampler


def extend(batch: Any, tokens: Sequence[int], position: int, sequence: int) -> int:
    """Append tokens to the batch, with logits for the last one; return the last one's index in the batch."""
    begin = int(batch.n_tokens)
    for offset, token in enumerate(tokens):
        place = begin + offset
        batch.token[place], batch.pos[place], batch.n_seq_id[place] = token, position + offset, 1
        batch.seq_id[place][0] = sequence
        batch.logits[place] = offset + 1 == len(tokens)
    batch.n_tokens = begin + len(tokens)
    return begin + len(tokens) - 1


def decode(context: Any, batch: Any) -> None:
    if low.llama_decode(context, batch) != 0:
        raise RuntimeError("llama_decode failed")
    low.llama_synchronize(context)


if __name__ == "__main__":
    main()
