"""The sampler chain of a generation."""

from __future__ import annotations

import os
from typing import Any

from engine.protocol.messages import Generate
from engine.worker.bindings import Bindings

MIN_KEEP = 1


class SamplerChain:
    """llama.cpp samplers for one request: greedy at temperature 0. To be freed."""

    def __init__(self, engine: Bindings, context: int, request: Generate) -> None:
        self._low = engine.low
        self._context = context
        self._sample = engine.low.llama_sampler_sample
        self._chain = self._low.llama_sampler_chain_init(self._low.llama_sampler_chain_default_params())
        for sampler in self._samplers(request):
            self._low.llama_sampler_chain_add(self._chain, sampler)

    def free(self) -> None:
        self._low.llama_sampler_free(self._chain)

    def sample(self, place: int) -> int:
        """Choose the next token from the logits at a place of the batch that was decoded last."""
        return int(self._sample(self._chain, self._context, place))

    def _samplers(self, request: Generate) -> list[Any]:
        low = self._low
        if request.temperature <= 0:
            return [low.llama_sampler_init_greedy()]
        seed = int.from_bytes(os.urandom(4), "little") if request.seed is None else request.seed & 0xFFFFFFFF
        return [
            low.llama_sampler_init_top_k(request.top_k),
            low.llama_sampler_init_top_p(request.top_p, MIN_KEEP),
            low.llama_sampler_init_min_p(request.min_p, MIN_KEEP),
            low.llama_sampler_init_temp(request.temperature),
            low.llama_sampler_init_dist(seed),
        ]
