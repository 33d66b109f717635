"""Which architectures the arithmetic covers, one line each; everything else is left to the probe."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """How an architecture with ordinary attention departs from llama's.

    `parallel`: attention and feed-forward read the same input, so both results are alive at once;
    `positions`: positions per token (several for multi-axis rotary embeddings).
    """

    parallel: bool = False
    positions: int = 1


_LLAMA = Architecture()
_MULTI_AXIS = Architecture(positions=4)

ARCHITECTURES: dict[str, Architecture] = {
    "bailingmoe": _LLAMA,
    "chatglm": _LLAMA,
    "dots1": _LLAMA,
    "ernie4_5": _LLAMA,
    "gemma": _LLAMA,
    "glm4": _MULTI_AXIS,
    "granite": _LLAMA,
    "granitemoe": _LLAMA,
    "hunyuan-moe": _LLAMA,
    "internlm2": _LLAMA,
    "jais2": _LLAMA,
    "llama": _LLAMA,
    "maincoder": _LLAMA,
    "minicpm": _LLAMA,
    "minimax-m2": _LLAMA,
    "mistral3": _LLAMA,
    "nemotron": _LLAMA,
    "paddleocr": _MULTI_AXIS,
    "phi2": Architecture(parallel=True),
    "phimoe": _LLAMA,
    "qwen2": _LLAMA,
    "qwen2vl": _MULTI_AXIS,
    "qwen3": _LLAMA,
    "qwen3moe": _LLAMA,
    "qwen3vlmoe": _MULTI_AXIS,
    "refact": _LLAMA,
}
"""Each is checked against the engine's own numbers in tests/engine/memory."""


def find_architecture(name: str) -> Architecture | None:
    """Return the entry of `name`, None where only a probe can tell."""
    return ARCHITECTURES.get(name)
