"""The table of samplers: one record for each field of `SamplingSettings`, in the order in which they are used.

Made from it: checks of presets, chats and models' own defaults, the form, options of the command line. What models say
about themselves (`general.sampling.*`) is under `model_key` there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from engine.base.language import tr
from engine.planning.settings.kinds import Choice, LeftOpen, Real, SamplingKind, SamplingValue, Text, Texts, WholeNumber
from engine.planning.settings.sampling_settings import MIROSTAT_MODES, SamplingSettings

SamplingGroup = Literal["Answer", "Repetition", "Choice", "Temperature", "Mirostat", "Shape"]
SAMPLING_GROUPS: tuple[SamplingGroup, ...] = get_args(SamplingGroup)
MAX_WINDOW = 1 << 24
MAX_ALTERNATIVES = 20
MAX_SEED = (1 << 32) - 2
"""One less than LLAMA_DEFAULT_SEED, which means another seed each time."""


@dataclass(frozen=True, slots=True)
class SamplingSetting:
    """`label` is its name in a form, `help` a clause on what it does, and from which value on it does nothing."""

    key: str
    kind: SamplingKind
    group: SamplingGroup
    label: str
    help: str
    model_key: str = ""

    @property
    def flag(self) -> str:
        """The option of the command line."""
        return "--" + self.key.replace("_", "-")

    @property
    def default(self) -> SamplingValue:
        """llama.cpp's default."""
        value: SamplingValue = getattr(SamplingSettings(), self.key)
        return value


SAMPLING: tuple[SamplingSetting, ...] = (
    SamplingSetting(
        "max_tokens",
        WholeNumber(1, MAX_WINDOW, left_open=LeftOpen(None, None, "unlimited", or_empty=True)),
        "Answer",
        tr("Longest answer"),
        tr("tokens of an answer at most"),
    ),
    SamplingSetting(
        "stop",
        Texts(),
        "Answer",
        tr("Stop texts"),
        tr("an answer ends before any of these; one a line, \\n is a newline"),
    ),
    SamplingSetting(
        "seed",
        WholeNumber(0, MAX_SEED, "", left_open=LeftOpen(None, None, "random", or_empty=True)),
        "Answer",
        tr("Seed"),
        tr("the same one gives the same answer again"),
    ),
    SamplingSetting(
        "penalty_last_n",
        WholeNumber(-1, MAX_WINDOW),
        "Repetition",
        tr("Penalised tokens"),
        tr("how many of the last tokens the three penalties look at; 0: none, -1: the whole context"),
        "penalty_last_n",
    ),
    SamplingSetting(
        "repeat_penalty",
        Real(0.01, 10, 0.05),
        "Repetition",
        tr("Repeat penalty"),
        tr("makes tokens that were there less likely; 1: off"),
        "penalty_repeat",
    ),
    SamplingSetting(
        "presence_penalty",
        Real(-10, 10, 0.1),
        "Repetition",
        tr("Presence penalty"),
        tr("the same, once for each token; 0: off"),
    ),
    SamplingSetting(
        "frequency_penalty",
        Real(-10, 10, 0.1),
        "Repetition",
        tr("Frequency penalty"),
        tr("the same, for each time it was there; 0: off"),
    ),
    SamplingSetting(
        "dry_multiplier",
        Real(0, 100, 0.1),
        "Repetition",
        tr("DRY strength"),
        tr("makes it less likely that a sequence of tokens goes on as it did before; 0: off"),
    ),
    SamplingSetting(
        "dry_base",
        Real(0, 100, 0.05),
        "Repetition",
        tr("DRY base"),
        tr("how much more with each token of the sequence"),
    ),
    SamplingSetting(
        "dry_allowed_length",
        WholeNumber(0, MAX_WINDOW),
        "Repetition",
        tr("DRY allowed length"),
        tr("tokens that may be repeated without that"),
    ),
    SamplingSetting(
        "dry_penalty_last_n",
        WholeNumber(-1, MAX_WINDOW),
        "Repetition",
        tr("DRY tokens"),
        tr("how many of the last tokens it looks at; 0: none, -1: the whole context"),
    ),
    SamplingSetting(
        "dry_breakers",
        Texts(),
        "Repetition",
        tr("DRY breakers"),
        tr("texts that end a sequence; one a line, \\n is a newline"),
    ),
    SamplingSetting(
        "top_n_sigma",
        Real(-1, 100, 0.1),
        "Choice",
        "Top-n-sigma",
        tr("leaves tokens within so many standard deviations of the likeliest; -1: off"),
    ),
    SamplingSetting(
        "top_k",
        WholeNumber(0, MAX_WINDOW),
        "Choice",
        "Top-k",
        tr("leaves so many of the likeliest tokens; 0: all"),
        "top_k",
    ),
    SamplingSetting(
        "typ_p",
        Real(0, 1, 0.01),
        "Choice",
        "Typical-p",
        tr("leaves tokens that are about as likely as expected; 1: off"),
    ),
    SamplingSetting(
        "top_p",
        Real(0, 1, 0.01),
        "Choice",
        "Top-p",
        tr("leaves the likeliest tokens that have this probability together; 1: off"),
        "top_p",
    ),
    SamplingSetting(
        "min_p",
        Real(0, 1, 0.01),
        "Choice",
        "Min-p",
        tr("leaves tokens with at least this part of the likeliest one's probability; 0: off"),
        "min_p",
    ),
    SamplingSetting(
        "xtc_probability",
        Real(0, 1, 0.05),
        "Choice",
        tr("XTC probability"),
        tr("how often all likely tokens but the least likely of them are taken out; 0: never"),
        "xtc_probability",
    ),
    SamplingSetting(
        "xtc_threshold",
        Real(0, 1, 0.05),
        "Choice",
        tr("XTC threshold"),
        tr("from which probability on a token is likely in that sense; above 0.5: off"),
        "xtc_threshold",
    ),
    SamplingSetting(
        "temperature",
        Real(0, 100, 0.05),
        "Temperature",
        "Temperature",
        tr("evens probabilities out above 1, sharpens them below; 0: always the likeliest token"),
        "temp",
    ),
    SamplingSetting(
        "dynatemp_range",
        Real(0, 100, 0.05),
        "Temperature",
        tr("Dynamic range"),
        tr("the temperature varies by so much with how sure the model is; 0: off"),
    ),
    SamplingSetting(
        "dynatemp_exponent", Real(0, 100, 0.1), "Temperature", tr("Dynamic exponent"), tr("how it varies with that")
    ),
    SamplingSetting(
        "adaptive_target",
        Real(-1, 1, 0.05),
        "Temperature",
        tr("Adaptive-p target"),
        tr("prefers tokens near this probability, in place of a plain choice at the end; below 0: off"),
    ),
    SamplingSetting(
        "adaptive_decay",
        Real(0, 0.99, 0.01),
        "Temperature",
        tr("Adaptive-p decay"),
        tr("how long it remembers what it chose"),
    ),
    SamplingSetting(
        "mirostat",
        Choice(MIROSTAT_MODES),
        "Mirostat",
        "Mirostat",
        tr("keeps surprise at a level; takes the place of penalties and choice above"),
        "mirostat",
    ),
    SamplingSetting(
        "mirostat_tau", Real(0, 100, 0.1), "Mirostat", tr("Mirostat tau"), tr("that level"), "mirostat_tau"
    ),
    SamplingSetting(
        "mirostat_eta", Real(0, 1, 0.01), "Mirostat", tr("Mirostat eta"), tr("how fast it gets there"), "mirostat_eta"
    ),
    SamplingSetting(
        "grammar",
        Text(),
        "Shape",
        tr("Grammar"),
        tr("the answer obeys this grammar (GBNF), whose start is root; empty: none"),
    ),
    SamplingSetting(
        "json_schema", Text(), "Shape", tr("JSON schema"), tr("the answer is JSON that obeys this schema; empty: none")
    ),
    SamplingSetting(
        "alternatives",
        WholeNumber(0, MAX_ALTERNATIVES),
        "Answer",
        tr("Alternatives"),
        tr(
            "how many likely tokens are kept with each one of an answer, with their probabilities "
            "before all samplers; 0: none, which is fastest"
        ),
    ),
)
"""Order of llama.cpp where it matters: penalties, DRY, top-n-sigma, top-k, typical, top-p, min-p, XTC, temperature."""

SAMPLING_KEYS = tuple(setting.key for setting in SAMPLING)
SAMPLING_BY_KEY = {setting.key: setting for setting in SAMPLING}
