"""What a model would do on a rig, as a value with its words: where layers go, with how much context, how fast."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.base.language import tr
from engine.devices.device import CPU_ID

FitKind = Literal["devices", "split", "cpu", "disk", "no", "unknown"]
"""All layers on devices; some, or all, on the CPU; more on the CPU than its memory, read from disk again and again;
no layout fits; nobody can tell."""

FITTING: tuple[FitKind, ...] = ("devices", "split", "cpu")


class Fit(msgspec.Struct, frozen=True, omit_defaults=True):
    """`layers`: how many are on each device, in the order of the layout. Speeds in tokens per second, 0 where nobody
    can tell. `reason`: a sentence where it does not fit or cannot be told."""

    kind: FitKind
    strategy: str = ""
    n_ctx: int = 0
    layers: tuple[tuple[str, int], ...] = ()
    slowest: float = 0.0
    fastest: float = 0.0
    has_overrides: bool = False
    reason: str = ""

    @property
    def fits(self) -> bool:
        return self.kind in FITTING

    @property
    def speed(self) -> float:
        """The middle of what is predicted, in tokens per second."""
        return (self.slowest + self.fastest) / 2


def fit_words(fit: Fit) -> str:
    """Return a few words on a forecast, for a line of a list."""
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
    return tr("cannot be told")


def place_words(fit: Fit) -> str:
    """Return how many layers are where."""
    return ", ".join(tr("{count} on {device}", count=count, device=device) for device, count in fit.layers)


def speed_words(fit: Fit) -> str:
    """Return the predicted speed for people, empty where there is none."""
    if not fit.fits or fit.fastest <= 0:
        return ""
    return tr("{rate}–{rate2} tokens/s", rate=_rate(fit.slowest), rate2=_rate(fit.fastest))


def _rate(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}" if rate >= 1 else f"{rate:.2g}"
