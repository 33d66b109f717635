"""Embeddings of given tokens by llama.cpp alone, in a child, as the reference of embedding tests.

    python -m tests.support.bare_embeddings MODEL '[[1, 2], [3]]'

Prints one JSON line with the vector of each token list, from `llama_get_embeddings_seq`.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def bare_embeddings(path: Path, texts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Run the child; return a vector for each token list."""
    command = [sys.executable, "-m", __name__, str(path), json.dumps([list(text) for text in texts])]
    done = subprocess.run(command, capture_output=True, check=True, timeout=120)
    vectors: list[list[float]] = json.loads(done.stdout)
    return vectors


def main() -> None:
    """Print the vectors of the token lists in the arguments."""
    from llama_cpp import llama_cpp as low

    path, texts = sys.argv[1:]
    low.llama_backend_init()
    model = low.llama_model_load_from_file(path.encode(), low.llama_model_default_params())
    parameters = low.llama_context_default_params()
    parameters.n_ctx, parameters.embeddings = 256, True
    context = low.llama_init_from_model(model, parameters)
    size = low.llama_model_n_embd_out(model)
    vectors = []
    for text in json.loads(texts):
        batch = low.llama_batch_init(len(text), 0, 1)
        for place, token in enumerate(text):
            batch.token[place], batch.pos[place], batch.n_seq_id[place], batch.logits[place] = token, place, 1, 1
            batch.seq_id[place][0] = 0
        batch.n_tokens = len(text)
        if low.llama_get_memory(context):
            low.llama_memory_clear(low.llama_get_memory(context), True)
        if low.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        vectors.append(
            list(ctypes.cast(low.llama_get_embeddings_seq(context, 0), ctypes.POINTER(ctypes.c_float))[:size])
        )
    print(json.dumps(vectors), flush=True)


if __name__ == "__main__":
    main()
