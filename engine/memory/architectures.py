"""Which architectures the arithmetic covers, one line each; everything else is left to the probe."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """How an architecture with ordinary attention departs from llama's.

    `parallel`: attention and feed-forward read the same input, so both results are alive at once;
    `extra_hidden`: further activations as wide as the embedding that are alive at a layer's peak;
    `positions`: positions per token (several for multi-axis rotary embeddings);
    `full_attention_only`: the engine knows a sliding window for it, and then we leave it to the probe.
    """

    parallel: bool = False
    extra_hidden: int = 0
    positions: int = 1
    full_attention_only: bool = False


_LLAMA = Architecture()

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "mistral3": _LLAMA,
    "qwen2": _LLAMA,
    "qwen2moe": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3moe": _LLAMA,
    "internlm2": _LLAMA,
    "granite": _LLAMA,
    "granitemoe": _LLAMA,
    "gemma": _LLAMA,
    "olmo2": Architecture(full_attention_only=True),
    "starcoder": _LLAMA,
    "starcoder2": _LLAMA,
    "minicpm": _LLAMA,
    "phi2": Architecture(parallel=True),
    "falcon": Architecture(parallel=True),
}

UNREAD_WINDOW_KEY = "attention.sliding_window"


def find_architecture(name: str) -> Architecture | None:
    """Return the entry of `name`, None where only a probe can tell."""
    return ARCHITECTURES.get(name)
