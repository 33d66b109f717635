"""`SamplingSettings`: parameters of llama.cpp's samplers, and the conditions that end an answer.

`engine.planning.settings.sampling_table` describes each field with its range.
"""

from __future__ import annotations

from typing import Literal, get_args

from msgspec import Struct

Mirostat = Literal["off", "1", "2"]
MIROSTAT_MODES: tuple[Mirostat, ...] = get_args(Mirostat)
FullContext = Literal["end", "shift"]
FULL_CONTEXT_MODES: tuple[FullContext, ...] = get_args(FullContext)
Repetition = Literal["end", "continue"]
REPETITION_MODES: tuple[Repetition, ...] = get_args(Repetition)
DRY_BREAKERS = ("\n", ":", '"', "*")
"""Default sequence breakers of DRY (common/common.h)."""


class SamplingSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sampler settings of one answer. Defaults are those of `common_params_sampling` in llama.cpp's common/common.h.

    `temperature`: temperature of the distribution; with 0 the likeliest token is always chosen.
    `penalty_last_n`, `dry_penalty_last_n`: number of last tokens that are penalised; -1 for the whole context.
    `max_tokens`: largest number of tokens of the answer; None for no limit.
    `seed`: seed of the random numbers; None: each answer gets a new one.
    `full_context`: what happens when the context is full. "end" ends the answer. "shift" removes the oldest tokens
    after the first `keep_tokens`, and continues.
    `repetition`: "end" stops an answer as soon as it repeats the same text again and again.
    `keep_tokens`: number of first tokens that "shift" does not remove; None for all tokens before the first question.
    """

    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typ_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    penalty_last_n: int = 64
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_breakers: tuple[str, ...] = DRY_BREAKERS
    mirostat: Mirostat = "off"
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    seed: int | None = None
    max_tokens: int | None = None
    full_context: FullContext = "end"
    keep_tokens: int | None = None
    repetition: Repetition = "end"
    stop: tuple[str, ...] = ()
    grammar: str = ""
    json_schema: str = ""
    alternatives: int = 0
