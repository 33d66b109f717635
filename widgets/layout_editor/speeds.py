"""The words for predicted speed: the header's figure with what it rests on, and the milliseconds of a lane."""

from __future__ import annotations

from engine.language import tr
from engine.plan.preview import Preview
from engine.speed.prediction import DeviceTime, SpeedForecast, prompt_words, rate_text, source_words, speed_words
from engine.units import format_bytes

_TOLD_BESIDE_S, _TOLD_BELOW_S = 1.0, 5.0
"""How long a load sends weights before the tool tip says so, and before the notes do."""
REMEDY = tr("Devices > Measure Speeds finds it out; each answer teaches it too.")


def speed_text(preview: Preview) -> str:
    """Return what is predicted of the edited layout, and beside it what its last answer reached.

    What rests on what is usual for a kind of device alone is told as what it is.
    """
    speed, answered = preview.speed, preview.answered_per_second
    measured = "" if answered is None else tr("{rate} measured", rate=rate_text(answered))
    if speed is None:
        return measured
    rate = rate_text(speed.tokens_per_second)
    if speed.is_known:
        predicted = tr("about {rate} tokens/s", rate=rate)
    elif measured:
        predicted = tr("roughly {rate} tokens/s", rate=rate)
    else:
        predicted = tr("roughly {rate} tokens/s (not measured)", rate=rate)
    prompt = speed.prompt
    read = "" if prompt is None or not prompt.is_known else _prompt_text(prompt)
    return ", ".join(filter(None, (predicted, measured, read)))


def _prompt_text(prompt: SpeedForecast) -> str:
    return tr("prompt {rate}/s", rate=rate_text(prompt.tokens_per_second))


def speed_tool_tip(preview: Preview) -> str:
    """Return what the prediction is made of, a line each."""
    speed = preview.speed
    if speed is None:
        return "\n".join(_sending_lines(preview))
    lines = [speed_words(speed) if speed.is_known else _guess_words(speed)]
    if speed.prompt is not None and (read := prompt_words(speed.prompt)):
        lines.append(read)
    for each in speed.devices:
        away = (
            tr(", {milliseconds} of it on the way", milliseconds=milliseconds_text(each.link_s))
            if each.link_s >= 0.02 * each.seconds
            else ""
        )
        time = tr(
            "{milliseconds} a token{away} ({source})",
            milliseconds=lane_speed_text(each),
            away=away,
            source=source_words(each.source),
        )
        lines.append(f"{each.id}: {time}")
    if any(each.source in ("card", "guess") for each in speed.devices):
        lines.append(REMEDY)
    if preview.answered_per_second is not None:
        lines.append(
            tr("The last answer of this layout had {rate} tokens/s.", rate=rate_text(preview.answered_per_second))
        )
    return "\n".join([*lines, *_sending_lines(preview)])


def _guess_words(speed: SpeedForecast) -> str:
    return tr(
        "Roughly {rate} tokens per second, by what is usual for such devices: {unknown} was not measured.",
        rate=rate_text(speed.tokens_per_second),
        unknown=", ".join(each.id for each in speed.devices if each.source == "guess"),
    )


def _sending_lines(preview: Preview, least_s: float = _TOLD_BESIDE_S) -> list[str]:
    """Return how long a load sends weights, a line for each worker to which it takes `least_s` or more."""
    return [
        tr(
            "A load sends {size} to {id}: about {seconds:.0f} s, less where the worker has kept some of it.",
            size=format_bytes(each.size_bytes),
            id=each.id,
            seconds=each.seconds,
        )
        for each in preview.sendings
        if each.seconds >= least_s
    ]


def sending_notes(preview: Preview) -> list[str]:
    """Return how long a load sends weights, where that is long enough that everybody should know beforehand."""
    return _sending_lines(preview, _TOLD_BELOW_S)


def lane_speed_text(time: DeviceTime | None) -> str:
    """Return a device's part of a token's time, "~12 ms" where it is a guess; empty where it has none."""
    if time is None:
        return ""
    about = "~" if time.source == "guess" else ""
    return f"{about}{milliseconds_text(time.seconds)}"


def milliseconds_text(seconds: float) -> str:
    """Return "12 ms", "1.2 ms" or "0.12 ms"."""
    value = seconds * 1e3
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"
