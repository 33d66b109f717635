"""What a command or file of another program says of a load, before a model and devices are known."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from engine.base.language import tr
from engine.model.gguf.quoting import clean, quote
from engine.planning.layout.layout import SplitMode
from engine.planning.settings.context_settings import AUTO_CONTEXT, ContextSettings
from engine.planning.settings.kinds import WholeNumber
from engine.planning.settings.table import SETTINGS

MAX_NUMBER = (1 << 31) - 1
_OPEN = ContextSettings(n_ctx=AUTO_CONTEXT)
_KINDS = {setting.key: setting.kind for setting in SETTINGS}


@dataclass(frozen=True, slots=True)
class ForeignOverride:
    """`pattern`: regex on tensor names, for buffer type `buffer`; or the experts of the first `n_experts` layers on the
    CPU (0: of all)."""

    pattern: str = ""
    buffer: str = ""
    n_experts: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignLoad:
    """`program`: name for sentences. `model`: path or name as it was written; empty if there is none.

    `n_gpu_layers`: None if it was left to the program. `devices`: names; None if left to the program, empty for none.
    `servers`: RPC endpoints in order. `shares`: as in `-ts`. `projector_device`: "none" for the CPU, empty: open.
    """

    program: str
    model: str = ""
    n_gpu_layers: int | None = None
    devices: tuple[str, ...] | None = None
    servers: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    split_mode: SplitMode = "layer"
    main_gpu: int = 0
    overrides: tuple[ForeignOverride, ...] = ()
    stops_pipeline: bool = False
    projector: str = ""
    projector_device: str = ""
    adapters: tuple[tuple[str, float], ...] = ()
    context: ContextSettings = _OPEN
    notes: tuple[str, ...] = ()


class ForeignOptions:
    """Collects the options of a `ForeignLoad`. A value that cannot be read is noted and left out.

    `load`: what was collected so far, but for lists and settings, which grow in fields of their own.
    """

    def __init__(self, program: str) -> None:
        self.load = ForeignLoad(program=program)
        self.overrides: list[ForeignOverride] = []
        self.adapters: list[tuple[str, float]] = []
        self.context: dict[str, Any] = {}
        self.notes: list[str] = []
        self.unknown: list[str] = []

    def done(self) -> ForeignLoad:
        """Return what was collected, with a sentence on what was not known."""
        if self.unknown:
            names = ", ".join(dict.fromkeys(map(clean, self.unknown)))
            self.notes.append(tr("Unknown to Layerdeck, left out: {names}.", names=names))
        return replace(
            self.load,
            overrides=tuple(self.overrides),
            adapters=tuple(self.adapters),
            context=msgspec.structs.replace(_OPEN, **self.context),
            notes=tuple(self.notes),
        )

    def refuse(self, name: str, value: str) -> None:
        """Note a value that cannot be read."""
        self.notes.append(tr("{name} {value} cannot be read, left out.", name=clean(name), value=quote(value)))

    def take_count(self, key: str, name: str, text: str) -> None:
        """Take a whole number for a setting, if it is in the setting's range."""
        kind = _KINDS[key]
        number = whole_number(text)
        assert isinstance(kind, WholeNumber)
        if number is None or not kind.low <= number <= kind.high:
            self.refuse(name, text)
        else:
            self.context[key] = number

    def take_choice(self, key: str, name: str, text: str) -> None:
        """Take a word for a setting."""
        try:
            self.context[key] = _KINDS[key].typed(text)
        except ValueError:
            self.refuse(name, text)

    def take_layers(self, name: str, text: str) -> None:
        """Take `-ngl`: a number, "auto" or "all"; numbers below 0 mean the same words."""
        number = {"auto": -1, "all": -2}.get(text, whole_number(text))
        if number is None:
            self.refuse(name, text)
        else:
            layers = None if number == -1 else (MAX_NUMBER if number < 0 else number)
            self.load = replace(self.load, n_gpu_layers=layers)

    def take_main(self, name: str, text: str) -> None:
        """Take the index of the main device."""
        number = whole_number(text)
        if number is None:
            self.refuse(name, text)
        else:
            self.load = replace(self.load, main_gpu=number)


def whole_number(text: str) -> int | None:
    """Return the whole number that `text` is; None for anything else, or beyond 32 bits."""
    digits = text.strip().removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 10:
        return None
    number = int(text)
    return number if abs(number) <= MAX_NUMBER else None


def real_number(text: str) -> float | None:
    """Return the finite number that `text` is; None for anything else."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
