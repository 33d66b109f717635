"""The table of samplers: one record for each field of `SamplingSettings`, in the order of the form.

The table is used to check presets, chats and recommendations of models, to build the form, and for command line
options.
"""

from __future__ import annotations

from typing import Literal, get_args

from msgspec import Struct

from engine.base.language import tr
from engine.planning.settings.kinds import (
    Choice,
    OpenValue,
    Real,
    SamplingKind,
    SamplingValue,
    Text,
    Texts,
    WholeNumber,
)
from engine.planning.settings.sampling_settings import (
    FULL_CONTEXT_MODES,
    MIROSTAT_MODES,
    REPETITION_MODES,
    SamplingSettings,
)

SamplingGroup = Literal["Answer", "Repetition", "Choice", "Temperature", "Mirostat", "Shape"]
SAMPLING_GROUPS: tuple[SamplingGroup, ...] = get_args(SamplingGroup)
MAX_WINDOW = 1 << 24
"""Upper limit of settings that count tokens; far above any context length."""
MAX_ALTERNATIVES = 20
MAX_SEED = (1 << 32) - 2
"""Largest seed: one less than `LLAMA_DEFAULT_SEED`, which makes llama.cpp choose a random seed."""


class SamplingSetting(Struct, frozen=True):
    """One row of the table of samplers.

    `key`: name of the field in `SamplingSettings`.
    `kind`: type and range of the value.
    `group`: section of the form.
    `label`: name in the form.
    `help`: phrase on its effect and on the value that turns it off.
    `model_key`: metadata key after `general.sampling.` in a GGUF file; empty if files cannot recommend a value.
    """

    key: str
    kind: SamplingKind
    group: SamplingGroup
    label: str
    help: str
    model_key: str = ""

    @property
    def flag(self) -> str:
        """Return the name of the command line option."""
        return "--" + self.key.replace("_", "-")

    @property
    def default(self) -> SamplingValue:
        """Return the default value of this setting, which is llama.cpp's."""
        value: SamplingValue = getattr(SamplingSettings(), self.key)
        return value


SAMPLING: tuple[SamplingSetting, ...] = (
    SamplingSetting(
        "max_tokens",
        WholeNumber(1, MAX_WINDOW, open_value=OpenValue(None, None, "unlimited", or_empty=True)),
        "Answer",
        tr("Maximum answer length"),
        tr("maximum number of tokens in an answer"),
    ),
    SamplingSetting(
        "full_context",
        Choice(FULL_CONTEXT_MODES, "W"),
        "Answer",
        tr("Context overflow"),
        tr(
            "what happens if an answer fills the context. end: the answer ends; shift: some first tokens are kept, the "
            "oldest of the others are dropped, and the answer goes on"
        ),
    ),
    SamplingSetting(
        "keep_tokens",
        WholeNumber(0, MAX_WINDOW, open_value=OpenValue(None, None, "start", or_empty=True)),
        "Answer",
        tr("Tokens kept at a context shift"),
        tr(
            "number of first tokens that stay when a full context is shifted; empty: all tokens before the first "
            "question"
        ),
    ),
    SamplingSetting(
        "repetition",
        Choice(REPETITION_MODES, "W"),
        "Answer",
        tr("On endless repetition"),
        tr(
            "what happens if an answer repeats the same text again and again. end: the answer ends; continue: the "
            "answer goes on"
        ),
    ),
    SamplingSetting(
        "stop",
        Texts(),
        "Answer",
        tr("Stop strings"),
        tr("the answer ends before any of these texts; one per line, \\n is a newline"),
    ),
    SamplingSetting(
        "seed",
        WholeNumber(0, MAX_SEED, "", open_value=OpenValue(None, None, "random", or_empty=True)),
        "Answer",
        tr("Seed"),
        tr("start value of the random numbers; the same seed gives the same answer again"),
    ),
    SamplingSetting(
        "penalty_last_n",
        WholeNumber(-1, MAX_WINDOW),
        "Repetition",
        tr("Penalty range (tokens)"),
        tr("number of latest tokens checked by the three penalties; 0: none, -1: the whole context"),
        "penalty_last_n",
    ),
    SamplingSetting(
        "repeat_penalty",
        # Not from 0 on: llama.cpp divides positive logits by the penalty.
        Real(0.01, 10, 0.05),
        "Repetition",
        tr("Repeat penalty"),
        tr("makes repeated tokens less likely; 1: off"),
        "penalty_repeat",
    ),
    SamplingSetting(
        "presence_penalty",
        Real(-10, 10, 0.1),
        "Repetition",
        tr("Presence penalty"),
        tr("makes a token less likely once it has appeared; 0: off"),
    ),
    SamplingSetting(
        "frequency_penalty",
        Real(-10, 10, 0.1),
        "Repetition",
        tr("Frequency penalty"),
        tr("makes a token less likely each time it appears; 0: off"),
    ),
    SamplingSetting(
        "dry_multiplier",
        Real(0, 100, 0.1),
        "Repetition",
        tr("DRY strength"),
        tr("makes it less likely that a sequence of tokens continues as it did before; 0: off"),
    ),
    SamplingSetting(
        "dry_base",
        Real(0, 100, 0.05),
        "Repetition",
        tr("DRY base"),
        tr("growth of the DRY penalty with each repeated token"),
    ),
    SamplingSetting(
        "dry_allowed_length",
        WholeNumber(0, MAX_WINDOW),
        "Repetition",
        tr("DRY allowed length"),
        tr("longest sequence of tokens that may be repeated without a penalty"),
    ),
    SamplingSetting(
        "dry_penalty_last_n",
        WholeNumber(-1, MAX_WINDOW),
        "Repetition",
        tr("DRY range (tokens)"),
        tr("number of latest tokens checked by DRY; 0: none, -1: the whole context"),
    ),
    SamplingSetting(
        "dry_breakers",
        Texts(),
        "Repetition",
        tr("DRY breakers"),
        tr("DRY does not search for repeated sequences across these texts; one per line, \\n is a newline"),
    ),
    SamplingSetting(
        "top_n_sigma",
        Real(-1, 100, 0.1),
        "Choice",
        "Top-n-sigma",
        tr("keeps tokens within this many standard deviations of the likeliest; -1: off"),
    ),
    SamplingSetting(
        "top_k",
        WholeNumber(0, MAX_WINDOW),
        "Choice",
        "Top-k",
        tr("keeps this many of the likeliest tokens; 0: all"),
        "top_k",
    ),
    SamplingSetting(
        "typ_p",
        Real(0, 1, 0.01),
        "Choice",
        "Typical-p",
        tr("keeps the most typical tokens that together have this probability; 1: off"),
    ),
    SamplingSetting(
        "top_p",
        Real(0, 1, 0.01),
        "Choice",
        "Top-p",
        tr("keeps the likeliest tokens that together have this probability; 1: off"),
        "top_p",
    ),
    SamplingSetting(
        "min_p",
        Real(0, 1, 0.01),
        "Choice",
        "Min-p",
        tr("keeps tokens with at least this share of the likeliest token's probability; 0: off"),
        "min_p",
    ),
    SamplingSetting(
        "xtc_probability",
        Real(0, 1, 0.05),
        "Choice",
        tr("XTC probability"),
        tr("probability with which XTC removes all likely tokens except the least likely of them; 0: off"),
        "xtc_probability",
    ),
    SamplingSetting(
        "xtc_threshold",
        Real(0, 1, 0.05),
        "Choice",
        tr("XTC threshold"),
        tr("tokens with at least this probability count as likely for XTC; above 0.5: off"),
        "xtc_threshold",
    ),
    SamplingSetting(
        "temperature",
        Real(0, 100, 0.05),
        "Temperature",
        "Temperature",
        tr("above 1: more varied answers, below 1: more predictable ones; 0: always the likeliest token"),
        "temp",
    ),
    SamplingSetting(
        "dynatemp_range",
        Real(0, 100, 0.05),
        "Temperature",
        tr("Temperature range"),
        tr(
            "how far the temperature may move from the set value: up if the next token is uncertain (high entropy), "
            "down if it is certain; 0: off"
        ),
    ),
    SamplingSetting(
        "dynatemp_exponent",
        Real(0, 100, 0.1),
        "Temperature",
        tr("Temperature exponent"),
        tr("how strongly the temperature within its range depends on the uncertainty (entropy) of the next token"),
    ),
    SamplingSetting(
        "adaptive_target",
        Real(-1, 1, 0.05),
        "Temperature",
        tr("Adaptive-p target"),
        tr("prefers tokens near this probability; below 0: off"),
    ),
    SamplingSetting(
        "adaptive_decay",
        # llama.cpp clamps the decay to 0.99 (`llama_sampler_init_adaptive_p`).
        Real(0, 0.99, 0.01),
        "Temperature",
        tr("Adaptive-p decay"),
        tr("how long Adaptive-p remembers earlier choices"),
    ),
    SamplingSetting(
        "mirostat",
        Choice(MIROSTAT_MODES),
        "Mirostat",
        "Mirostat",
        tr("keeps the entropy of the answer near a target (tau); replaces penalties and the samplers above"),
        "mirostat",
    ),
    SamplingSetting(
        "mirostat_tau",
        Real(0, 100, 0.1),
        "Mirostat",
        tr("Mirostat tau"),
        tr("target entropy for Mirostat; higher values give more varied answers"),
        "mirostat_tau",
    ),
    SamplingSetting(
        "mirostat_eta",
        Real(0, 1, 0.01),
        "Mirostat",
        tr("Mirostat eta"),
        tr("how fast Mirostat moves towards the target entropy"),
        "mirostat_eta",
    ),
    SamplingSetting(
        "grammar",
        Text(),
        "Shape",
        tr("Grammar"),
        tr("the answer follows this grammar (GBNF) with the start symbol root; empty: none"),
    ),
    SamplingSetting(
        "json_schema",
        Text(),
        "Shape",
        tr("JSON schema"),
        tr("the answer is JSON that follows this schema; empty: none"),
    ),
    SamplingSetting(
        "alternatives",
        WholeNumber(0, MAX_ALTERNATIVES),
        "Answer",
        tr("Alternatives"),
        tr(
            "number of alternatives saved for each token of an answer, with probabilities before sampling; 0: none "
            "(fastest)"
        ),
    ),
)
"""All samplers in the order of the form.

Penalties and filters are in the order of llama.cpp's chain: penalties, DRY, top-n-sigma, top-k, typical, top-p, min-p,
XTC, temperature.
"""

SAMPLING_KEYS = tuple(setting.key for setting in SAMPLING)
SAMPLING_BY_KEY = {setting.key: setting for setting in SAMPLING}
