"""Forecast of a model on a rig: placement of layers, context length and speed, and its texts for people."""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal

import msgspec
from msgspec import Struct

from engine.base.language import tr, tr_count
from engine.devices.device import CPU_ID
from engine.planning.layout.layout import Layout
from engine.planning.speed.speeds import Source
from engine.planning.speed.texts import predicted_rate_text, source_text

# Result of a forecast.
# "devices": all layers are on devices. "split": some weights are on the CPU. "cpu": all layers are on the CPU.
# "disk": weights on the CPU exceed its memory, so each token reads them from disk. "no": no layout fits.
# "unknown": the arithmetic does not cover the model.
FitKind = Literal["devices", "split", "cpu", "disk", "no", "unknown"]

FITTING: tuple[FitKind, ...] = ("devices", "split", "cpu")


class Fit(Struct, frozen=True, omit_defaults=True):
    """The forecast of one model on one rig. Speeds are in tokens per second, 0 if there is no prediction.

    `strategy`: name of the strategy that made the layout.
    `n_ctx`: context length in tokens.
    `layers`: pairs of a device id and the number of layers on the device, in the order of the layout.
    `slowest`: predicted speed with a full context and poor bandwidth.
    `fastest`: predicted speed with an empty context and full bandwidth.
    `reason`: a sentence if the model does not fit, or if that is unknown; else empty.
    `layout`: key of the layout (`layout_key`), compared with the key of a measured layout.
    `expected`: predicted speed with a usual number of tokens in the context; the layout editor shows this speed too.
    `source`: where the speeds of the devices come from, such as measurements. If the sources differ, it is the least
    reliable one; devices that hardly affect `expected` are ignored.
    `projector`: file name of the projector whose memory is counted; empty if none is.
    `uncertainty`: relative error of `expected` that nine of ten predictions do not exceed, 0 if unknown.
    """

    kind: FitKind
    strategy: str = ""
    n_ctx: int = 0
    layers: tuple[tuple[str, int], ...] = ()
    slowest: float = 0.0
    fastest: float = 0.0
    reason: str = ""
    layout: str = ""
    expected: float = 0.0
    source: Source = "guess"
    projector: str = ""
    uncertainty: float = 0.0

    @property
    def fits(self) -> bool:
        return self.kind in FITTING

    @property
    def speed(self) -> float:
        """The predicted speed in tokens per second; the mean of `slowest` and `fastest` if `expected` is 0."""
        return self.expected or (self.slowest + self.fastest) / 2

    @property
    def is_speed_known(self) -> bool:
        """Whether the predicted speed is based on measurements or on the card's published data. If not, it is based on
        guessed values.
        """
        return self.source != "guess"


def layout_key(layout: Layout) -> str:
    """Return a key that is equal for equal layouts."""
    if len(layout.devices) == 1 and not layout.overrides:
        return layout.devices[0]  # The split mode changes nothing on one device.
    return blake2b(msgspec.json.encode(layout), digest_size=12).hexdigest()


def fit_text(fit: Fit) -> str:
    """Return a short text for a list: on which devices the model fits, or that it does not fit."""
    match fit.kind:
        case "devices":
            places = " + ".join(device for device, _ in fit.layers)
            return tr("fits on {places}", places=places)
        case "split":
            on_host = dict(fit.layers).get(CPU_ID, 0)
            return (
                tr(
                    "{on_host} of {count} layers on the CPU",
                    on_host=on_host,
                    count=sum((count for _, count in fit.layers)),
                )
                if on_host
                else tr("experts on the CPU")
            )
        case "cpu":
            return tr("fits in memory")
        case "disk":
            return tr("larger than memory")
        case "no":
            return tr("does not fit")
    return tr("unknown")


def projector_text(fit: Fit) -> str:
    """Return a text that says that the projector's memory is counted; empty if none is counted."""
    return tr("with the projector") if fit.projector else ""


def place_text(fit: Fit) -> str:
    """Return the number of layers on each device as text, such as "20 layers on CUDA0, 12 on CPU"."""
    if not fit.layers:
        return ""
    (first, first_count), *others = fit.layers
    words = tr_count("{count} layer on {device}", "{count} layers on {device}", first_count, device=first)
    return ", ".join((words, *(tr("{count} on {device}", count=count, device=device) for device, count in others)))


def fit_speed_text(fit: Fit) -> str:
    """Return the predicted speed as text, worded as in the layout editor; empty if there is no prediction."""
    if not fit.fits or fit.speed <= 0:
        return ""
    rate = predicted_rate_text(fit.speed)
    return tr("about {rate} tokens/s", rate=rate) if fit.is_speed_known else tr("roughly {rate} tokens/s", rate=rate)


def sourced_speed_text(fit: Fit) -> str:
    """Return the predicted speed as text, with its uncertainty and its source; empty if there is no prediction."""
    words = _uncertain(fit_speed_text(fit), fit)
    return words and tr("{speed} ({source})", speed=words, source=source_text(fit.source))


def _uncertain(words: str, fit: Fit) -> str:
    """Return `words`, the text of a speed, with the percentage by which the speed may be off.

    The text is unchanged if the percentage is unknown.
    """
    if not words or not fit.uncertainty:
        return words
    return tr("{speed}, ±{percent} %", speed=words, percent=round(100 * fit.uncertainty))


def speed_range_text(fit: Fit) -> str:
    """Return a text for a tool tip: the predicted speed, its uncertainty, and the speed with a full context.

    Empty if there is no prediction.
    """
    if not fit.fits or fit.fastest <= 0:
        return ""
    return tr(
        "Predicted: {speed}; at least {slowest} with a full context",
        speed=sourced_speed_text(fit),
        slowest=predicted_rate_text(fit.slowest),
    )
