"""Sampling with llama.cpp's samplers in its default order, token probabilities, and a digest of logits.

`SamplerChain` samples for a request. `ChoiceReader` reads the probabilities of tokens before all samplers.
`logit_digest` is for comparing the results of two layouts of one model.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
from collections.abc import Sequence
from typing import Any

from engine.planning.settings.sampling_settings import SamplingSettings
from engine.runtime.child.generate.grammar import Grammar, grammar_text
from engine.runtime.child.generate.text import piece_text
from engine.runtime.child.load.loaded_context import DECODED, LoadedContext
from engine.runtime.child.native.failures import RequestError, failure
from engine.runtime.child.native.log import decode_failure
from engine.runtime.protocol.messages import LogitDigest, TokenChoice
from engine.runtime.protocol.requests import Generate, Logits

MIN_KEEP = 1
MIROSTAT_TOKENS = 100
"""Mirostat's parameter m, the number of tokens for its estimate of the distribution; llama.cpp uses the same value."""


def settings_of(request: Generate) -> SamplingSettings:
    """Return a request's sampling settings: `sampling` if given, else settings made from fields such as `top_k`."""
    return request.sampling or SamplingSettings(
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        seed=request.seed,
        max_tokens=request.max_tokens,
        stop=request.stop,
        # Such requests are measurements: their number of tokens is fixed.
        repetition="continue",
    )


class SamplerChain:
    """The sampler chain of one request; greedy at temperature 0. Call `free` when the request ends.

    `tokens`: tokens of the prompt, which count for repetition penalties like those of the answer.
    """

    def __init__(self, loaded: LoadedContext, settings: SamplingSettings, tokens: Sequence[int]) -> None:
        self._low = loaded.engine.low
        self._context = loaded.context
        self._sample = self._low.llama_sampler_sample
        text = grammar_text(settings, loaded.engine.send_abort_text)
        # The grammar first: an invalid one raises before any native object was made.
        self._grammar = Grammar(loaded, text) if text else None
        self._chain = self._low.llama_sampler_chain_init(self._low.llama_sampler_chain_default_params())
        for sampler in self._samplers(loaded, settings):
            self._low.llama_sampler_chain_add(self._chain, sampler)
        self._look_at(tokens, loaded, settings)

    def free(self) -> None:
        self._low.llama_sampler_free(self._chain)
        if self._grammar is not None:
            self._grammar.free()

    def sample(self, index: int) -> int:
        """Sample the next token and return it. `index`: index of the logits in the last batch.

        Raises:
            RequestError: no token obeys the grammar.
        """
        if self._grammar is not None:
            return self._grammar.sample(self._chain, index)
        return int(self._sample(self._chain, self._context, index))

    def _look_at(self, tokens: Sequence[int], loaded: LoadedContext, settings: SamplingSettings) -> None:
        """Pass the last tokens of the prompt to the samplers of penalties and DRY, as many as their windows need."""
        windows = [settings.penalty_last_n] if _penalises(settings) else []
        windows += [settings.dry_penalty_last_n] if settings.dry_multiplier else []
        window = max((_window(tokens, loaded) for tokens in windows), default=0)
        # Only the chain: a grammar begins with the answer.
        for token in tokens[-window:] if window else ():
            self._low.llama_sampler_accept(self._chain, token)

    def _samplers(self, loaded: LoadedContext, settings: SamplingSettings) -> list[Any]:
        low = self._low
        # llama.cpp's seeds have 32 bits.
        seed = int.from_bytes(os.urandom(4), "little") if settings.seed is None else settings.seed & 0xFFFFFFFF
        # The order is that of llama.cpp's common_sampler_init: with mirostat only temperature, otherwise the default
        # chain penalties, DRY, top-n-sigma, top-k, typical, top-p, min-p, XTC, temperature.
        if settings.mirostat != "off" and settings.temperature > 0:
            return [low.llama_sampler_init_temp(settings.temperature), self._mirostat(loaded, settings, seed)]
        first = [
            low.llama_sampler_init_penalties(
                loaded.vocabulary_size,
                _window(settings.penalty_last_n, loaded),
                settings.repeat_penalty,
                settings.frequency_penalty,
                settings.presence_penalty,
            ),
            self._dry(loaded, settings),
        ]
        if settings.temperature <= 0:
            return [*first, low.llama_sampler_init_greedy()]
        return [
            *first,
            low.llama_sampler_init_top_n_sigma(settings.top_n_sigma),
            low.llama_sampler_init_top_k(settings.top_k),
            low.llama_sampler_init_typical(settings.typ_p, MIN_KEEP),
            low.llama_sampler_init_top_p(settings.top_p, MIN_KEEP),
            low.llama_sampler_init_min_p(settings.min_p, MIN_KEEP),
            low.llama_sampler_init_xtc(settings.xtc_probability, settings.xtc_threshold, MIN_KEEP, seed),
            low.llama_sampler_init_temp_ext(settings.temperature, settings.dynatemp_range, settings.dynatemp_exponent),
            low.llama_sampler_init_adaptive_p(settings.adaptive_target, settings.adaptive_decay, seed)
            if settings.adaptive_target >= 0
            else low.llama_sampler_init_dist(seed),
        ]

    def _mirostat(self, loaded: LoadedContext, settings: SamplingSettings, seed: int) -> Any:
        low, tau, eta = self._low, settings.mirostat_tau, settings.mirostat_eta
        if settings.mirostat == "1":
            return low.llama_sampler_init_mirostat(loaded.vocabulary_size, seed, tau, eta, MIROSTAT_TOKENS)
        return low.llama_sampler_init_mirostat_v2(seed, tau, eta)

    def _dry(self, loaded: LoadedContext, settings: SamplingSettings) -> Any:
        breakers = [text.encode("utf-8", "replace") for text in settings.dry_breakers]
        return self._low.llama_sampler_init_dry(
            loaded.vocabulary,
            settings.dry_multiplier,
            settings.dry_base,
            settings.dry_allowed_length,
            _window(settings.dry_penalty_last_n, loaded),
            (ctypes.c_char_p * len(breakers))(*breakers),
            len(breakers),
        )


def _penalises(settings: SamplingSettings) -> bool:
    return settings.repeat_penalty != 1 or settings.presence_penalty != 0 or settings.frequency_penalty != 0


def _window(tokens: int, loaded: LoadedContext) -> int:
    return min(loaded.context_tokens, tokens) if tokens >= 0 else loaded.context_tokens


DIGITS = 5


class ChoiceReader:
    """Reads the probability of each sampled token, and those of the most probable tokens.

    Reading takes time, because it needs all logits of the token. `most`: number of most probable tokens.
    """

    def __init__(self, loaded: LoadedContext, most: int) -> None:
        # Imported on request: numpy takes longer to import than everything else that an answer needs.
        import numpy

        self._numpy = numpy
        self._loaded = loaded
        self._most = min(most, loaded.vocabulary_size)
        self._texts: dict[int, str] = {}

    def read(self, index: int, token: int) -> TokenChoice:
        """Return the probabilities for a sampled token. `index`: index of its logits in the last batch."""
        numpy, loaded = self._numpy, self._loaded
        pointer = loaded.engine.low.llama_get_logits_ith(loaded.context, index)
        logits = numpy.ctypeslib.as_array(pointer, (loaded.vocabulary_size,))
        # Damaged weights and overflows give logits that are not numbers, which JSON does not have. They count as -inf.
        with numpy.errstate(invalid="ignore"):
            weights = numpy.nan_to_num(numpy.exp(logits - numpy.fmax.reduce(logits)), copy=False)
        total = float(weights.sum(dtype=numpy.float64)) or 1.0
        likeliest = numpy.argpartition(weights, -self._most)[-self._most :]
        ordered = likeliest[numpy.argsort(weights[likeliest])[::-1]]
        return TokenChoice(
            self._text(token),
            round(float(weights[token]) / total, DIGITS),
            tuple((self._text(int(each)), round(float(weights[each]) / total, DIGITS)) for each in ordered),
        )

    def _text(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = piece_text(self._loaded, token)
        return text


SHOWN = 8
SAMPLED = 256


def logit_digest(loaded: LoadedContext, request: Logits) -> LogitDigest:
    """Return a digest of the logits of the last token, after decoding tokens from an empty KV cache.

    Raises:
        RequestError: the model generates no text, the tokens are invalid, or the computation failed.
    """
    if not loaded.makes_text:
        raise failure("argument", "This model does not continue text and has no logits to compare.")
    limit = min(loaded.context_tokens, loaded.batch_tokens)
    if not 0 < len(request.tokens) <= limit:
        raise failure("argument", f"Logits need 1 to {limit} tokens, not {len(request.tokens)}.")
    size = loaded.vocabulary_size
    if any(not 0 <= token < size for token in request.tokens):
        raise failure("argument", f"Token IDs of this model are 0 to {size - 1}.")
    loaded.clear()
    status = loaded.decode(request.tokens)
    if status != DECODED:
        raise RequestError(decode_failure(status, loaded.log.facts))
    logits = loaded.engine.low.llama_get_logits_ith(loaded.context, -1)
    values = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * size)).contents
    sha256 = hashlib.sha256(bytes(values)).hexdigest()
    # JSON has no infinity and no NaN.
    shown = tuple(values[:]) if all(map(math.isfinite, values)) else ()
    loaded.clear()
    # The step is rounded up, so that there are at most SAMPLED values.
    return LogitDigest(sha256=sha256, first=shown[:SHOWN], sample=shown[:: max(1, -(-size // SAMPLED))])
