"""Formats predicted speeds as sentences and numbers for the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from engine.base.language import tr
from engine.base.units import format_bytes
from engine.planning.speed.speeds import Source

if TYPE_CHECKING:
    from engine.planning.speed.prediction import LinkUse, SpeedForecast

_SOURCE_TEXTS: Mapping[Source, str] = {
    "measured": tr("from a speed measurement"),
    "answers": tr("from earlier answers"),
    "card": tr("from the graphics card's specifications"),
    "guess": tr("not measured"),
}


def source_text(where: Source) -> str:
    """Return the source of a speed as a phrase for the user, such as "not measured"."""
    return _SOURCE_TEXTS[where]


def speed_sentence(speed: SpeedForecast) -> str:
    """Return a sentence for the user on the predicted speed of a layout."""
    if not speed.is_known:
        unknown = ", ".join(each.id for each in speed.devices if each.source == "guess")
        return tr(
            "The speed of {devices} was not measured yet "
            "(Devices > Measure Speeds, or layerdeck-cli devices --measure).",
            devices=unknown,
        )
    learnt = tr(", corrected by the speed of earlier answers") if speed.is_learnt else ""
    return tr(
        "Predicted: {rate} tokens/s with {fill_tokens} tokens in the context ({source}{learnt}).",
        rate=predicted_rate_text(speed.tokens_per_second),
        fill_tokens=speed.n_tokens,
        source=source_text(speed.source),
        learnt=learnt,
    )


def prompt_text(prompt: SpeedForecast) -> str:
    """Return a sentence for the user on the predicted prompt speed; empty if the prediction is a guess."""
    if not prompt.is_known:
        return ""
    learnt = tr(", corrected by the speed of earlier answers") if prompt.is_learnt else ""
    return tr(
        "Predicted for a prompt of {n_tokens} tokens: {rate} tokens/s ({source}{learnt}).",
        n_tokens=prompt.n_tokens,
        rate=predicted_rate_text(prompt.tokens_per_second),
        source=source_text(prompt.source),
        learnt=learnt,
    )


def link_use_text(speed: SpeedForecast, use: LinkUse) -> str:
    """Return a sentence for the user on the network link to a worker.

    The sentence has round trip, throughput, bytes per token, and by how many tokens per second the link slows answers.
    """
    rate = use.bytes_per_second
    words = tr(
        "Link to {id}: {round_trip} ms round trip, {rate}, {size} per token. It slows answers by {lost} tokens/s.",
        id=use.id,
        round_trip=f"{use.latency_s * 1e3:.0f}" if use.latency_s >= 0.01 else f"{use.latency_s * 1e3:.2g}",
        # Powers of 1000, as networks are sold.
        rate=f"{rate / 1e9:.1f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.3g} MB/s",
        size=format_bytes(round(use.token_bytes)),
        lost=rate_text(speed.lost_per_second(use)),
    )
    return (
        words
        if use.is_measured
        else " ".join((words, tr("The connection was not measured; typical values of a network are used.")))
    )


def rate_text(rate: float) -> str:
    """Return tokens per second as text: two significant digits below 10, whole numbers from 10 on."""
    if rate < 1:
        return f"{rate:.2g}"
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"


def predicted_rate_text(rate: float) -> str:
    """Return predicted tokens per second as text, with two significant digits; predictions are not more exact."""
    # Rounded before the format, which would write 1.6e+05.
    return rate_text(float(f"{rate:.2g}")) if rate > 0 else rate_text(rate)
