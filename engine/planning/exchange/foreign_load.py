"""Load options that were found in a command or file of another program, before a model and devices are known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from engine.base.language import tr
from engine.base.texts import clean, quote
from engine.base.values import replace
from engine.planning.layout.engine_parameters import float32
from engine.planning.layout.layout import SplitMode
from engine.planning.settings.context_settings import AUTO_CONTEXT, ContextSettings, KvType
from engine.planning.settings.kinds import WholeNumber
from engine.planning.settings.table import SETTINGS

MAX_NUMBER = (1 << 31) - 1
_OPEN = ContextSettings(n_ctx=AUTO_CONTEXT)
_KINDS = {setting.key: setting.kind for setting in SETTINGS}


class ForeignOverride(Struct, frozen=True):
    """An override in a command of another program: either `pattern` with `buffer`, or `n_experts`.

    `pattern`: regex on tensor names.
    `buffer`: name of the buffer type for the tensors that match.
    `n_experts`: number of first layers whose experts go to the CPU; 0 for all layers, None for an override by regex.
    """

    pattern: str = ""
    buffer: str = ""
    n_experts: int | None = None


class ForeignDraft(Struct, frozen=True, kw_only=True):
    """Options of speculative decoding, found in a command or file of another program.

    `types`: types of speculative decoding by llama.cpp's names, also unknown ones; empty if none is given.
    `model`: path of the draft model; empty if there is none.
    `n_tokens`: largest number of drafted tokens; None for the default.
    `n_gpu_layers`: number of the draft model's layers on devices; None if the option is missing.
    `devices`: llama.cpp's names of the draft model's devices; None if the option is missing.
    `type_k`, `type_v`: types of the draft model's KV cache.
    """

    types: tuple[str, ...] = ()
    model: str = ""
    n_tokens: int | None = None
    n_gpu_layers: int | None = None
    devices: tuple[str, ...] | None = None
    type_k: KvType = "f16"
    type_v: KvType = "f16"


class ForeignLoad(Struct, frozen=True, kw_only=True):
    """Load options that were found in a command or file of another program.

    `program`: name of the program for sentences.
    `model`: path or name of the model as written; empty if there is none.
    `n_gpu_layers`: number of layers on devices; None if the program decides.
    `devices`: llama.cpp's names of devices; None if the program decides, empty for no device.
    `servers`: RPC endpoints in the order of `--rpc`.
    `shares`: numbers of option `-ts`.
    `stops_pipeline`: whether there is an override whose pattern matches no tensor (`MATCHES_NO_TENSOR`). Its only
    effect is that llama.cpp turns off pipeline parallelism.
    `projector`: path of the projector file; empty if there is none.
    `projector_device`: llama.cpp's name of the projector's device; "none" for the CPU, empty if the program decides.
    `adapters`: (path, scale) of each LoRA adapter.
    `draft`: options of speculative decoding; None if there are none.
    `given`: values that the text sets, without defaults of the program: settings by key, "split_mode" and "main_gpu".
    `notes`: sentences for the user on options that were left out.
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
    draft: ForeignDraft | None = None
    context: ContextSettings = _OPEN
    given: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class ForeignOptions:
    """Collects options of another program, and makes a `ForeignLoad` of them.

    For an option whose value cannot be parsed, a note is added.

    `load`: the options collected so far. Overrides, adapters, settings and notes are not in it, but in attributes of
    this object.
    """

    def __init__(self, program: str) -> None:
        self.load = ForeignLoad(program=program)
        self.overrides: list[ForeignOverride] = []
        self.adapters: list[tuple[str, float]] = []
        self.context: dict[str, Any] = {}
        self.notes: list[str] = []
        self.unknown: list[str] = []

    def done(self) -> ForeignLoad:
        """Return the collected options, with a note on options that are unknown."""
        if self.unknown:
            names = ", ".join(dict.fromkeys(map(clean, self.unknown)))
            self.notes.append(tr("Not imported, because Layerdeck does not know these options: {names}.", names=names))
        return replace(
            self.load,
            overrides=tuple(self.overrides),
            adapters=tuple(self.adapters),
            context=replace(_OPEN, **self.context),
            notes=tuple(self.notes),
        )

    def refuse(self, name: str, value: str) -> None:
        """Add a note that the value of option `name` cannot be parsed."""
        self.notes.append(
            tr(
                "Layerdeck cannot read {name} {value}, so this option was not imported.",
                name=clean(name),
                value=quote(value),
            )
        )

    def take_value(self, key: str, name: str, text: str) -> None:
        """Set the setting `key` to the value `text` of option `name`; add a note if the value is not allowed."""
        kind = _KINDS[key]
        try:
            # `typed` also takes "8k" and "auto" for a whole number, which no other program knows.
            if isinstance(kind, WholeNumber) and whole_number(text) is None:
                raise ValueError(text)
            self.context[key] = kind.typed(text)
        except ValueError:
            self.refuse(name, text)

    def take_layers(self, name: str, text: str) -> None:
        """Set the number of GPU layers from option `-ngl`: a number, "auto" or "all".

        -1 is "auto", smaller numbers are "all".
        """
        number = {"auto": -1, "all": -2}.get(text, whole_number(text))
        if number is None:
            self.refuse(name, text)
        else:
            layers = None if number == -1 else (MAX_NUMBER if number < 0 else number)
            self.load = replace(self.load, n_gpu_layers=layers)

    def take_main(self, name: str, text: str) -> None:
        """Set llama.cpp's `main_gpu` to the number `text` of option `name`; add a note if it is no number."""
        number = whole_number(text)
        if number is None:
            self.refuse(name, text)
        else:
            self.load = replace(self.load, main_gpu=number, given={**self.load.given, "main_gpu": number})


def whole_number(text: str) -> int | None:
    """Parse `text` as a decimal whole number; None if it has another form, or does not fit into an int32."""
    digits = text.strip().removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 10:
        return None
    number = int(text)
    return number if abs(number) <= MAX_NUMBER else None


def real_number(text: str) -> float | None:
    """Parse `text` as a finite number; None if it has another form."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def share_number(text: str) -> float | None:
    """Parse a share, such as one of option `-ts`: 0, or a positive number that a C `float` can hold; else None."""
    number = real_number(text)
    if number is None or number < 0:
        return None
    # llama.cpp computes with `float`, in which 1e-50 is 0 and 1e39 is infinite. `std::stof` refuses both.
    rounded = float32(number)
    return number if math.isfinite(rounded) and bool(rounded) == bool(number) else None
