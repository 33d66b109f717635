"""The words for predicted speed: the header's figure with what it rests on, and the milliseconds of a lane."""

from __future__ import annotations

from engine.language import tr
from engine.plan.preview import Preview
from engine.speed.prediction import prompt_words, rate_text, source_words, speed_words
from engine.speed.prompts import PromptForecast
from engine.speed.route import DeviceTime
from engine.units import format_bytes

NOT_KNOWN = tr("speed not measured")
REMEDY = tr("Devices > Measure Speeds finds it out; each answer teaches it too.")


def speed_text(preview: Preview) -> str:
    """Return what is predicted of the edited layout, and beside it what its last answer reached."""
    speed, answered = preview.speed, preview.answered_per_second
    measured = "" if answered is None else tr("{rate} measured", rate=rate_text(answered))
    if speed is None:
        return measured
    predicted = tr("about {rate} tokens/s", rate=rate_text(speed.tokens_per_second)) if speed.is_known else NOT_KNOWN
    prompt = speed.prompt
    read = "" if prompt is None or not prompt.is_known else _prompt_text(prompt)
    return ", ".join(filter(None, (predicted, measured, read)))


def _prompt_text(prompt: PromptForecast) -> str:
    return tr("prompt {rate}/s", rate=rate_text(prompt.tokens_per_second))


def speed_tool_tip(preview: Preview) -> str:
    """Return what the prediction is made of, a line each."""
    speed = preview.speed
    if speed is None:
        return "\n".join(_sending_lines(preview))
    lines = [speed_words(speed)]
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
            milliseconds=milliseconds_text(each.seconds),
            away=away,
            source=source_words(each.source),
        )
        lines.append(f"{each.id}: {time if each.source != 'guess' else tr('not measured')}")
    if any(each.source in ("card", "guess") for each in speed.devices):
        lines.append(REMEDY)
    if preview.answered_per_second is not None:
        lines.append(
            tr("The last answer of this layout had {rate} tokens/s.", rate=rate_text(preview.answered_per_second))
        )
    return "\n".join([*lines, *_sending_lines(preview)])


def _sending_lines(preview: Preview) -> list[str]:
    """Return how long a load sends weights, a line for each worker where that is worth telling."""
    return [
        tr(
            "A load sends {size} to {id}: about {seconds:.0f} s, less where the worker has kept some of it.",
            size=format_bytes(each.size_bytes),
            id=each.id,
            seconds=each.seconds,
        )
        for each in preview.sendings
        if each.seconds >= 1
    ]


def lane_speed_text(time: DeviceTime | None) -> str:
    """Return a device's part of a token's time; empty where it has none or nobody knows."""
    if time is None or time.source == "guess":
        return ""
    return milliseconds_text(time.seconds)


def milliseconds_text(seconds: float) -> str:
    """Return "12 ms", "1.2 ms" or "0.12 ms"."""
    value = seconds * 1e3
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"
