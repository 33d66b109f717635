"""What an answer teaches about speed: how far the bare prediction of its layout is off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.fit.speed_book import SpeedBook
from engine.plan.plan import Plan
from engine.plan.preview import plan_prompt, plan_speed
from engine.rigs.speed_test import known_speeds
from engine.speed.answers import MIN_PROMPT_TOKENS
from engine.speed.prediction import SpeedForecast
from engine.speed.speeds import layout_class
from engine.speed.work import Work


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """An answer that was alone on its devices: its tokens, and how many of them came in a second; of its prompt what
    was read for it."""

    prompt_tokens: int
    generated_tokens: int
    tokens_per_second: float
    read_tokens: int = 0
    read_per_second: float = 0.0


class BareSpeeds(NamedTuple):
    """What would have been predicted by measurements alone; `prompt` None where nothing is to be learnt of it."""

    answer: SpeedForecast
    prompt: SpeedForecast | None


def bare_speed(plan: Plan, book: SpeedBook, answer: TimedAnswer) -> BareSpeeds | None:
    """Return what `answer` would have been predicted to take by measurements alone, without what answers taught; None
    where nobody can say. Asks drivers."""
    speeds = known_speeds(plan.rig, book).unlearnt
    work = Work(plan.model)
    fill_tokens = answer.prompt_tokens + answer.generated_tokens // 2
    predicted = plan_speed(work, plan, speeds, fill_tokens)
    if predicted is None:
        return None
    # A prompt with images is read in other ways, and one that was mostly read before says little.
    tells = plan.edit.side_files.projector is None and answer.read_tokens >= MIN_PROMPT_TOKENS
    return BareSpeeds(predicted, plan_prompt(work, plan, speeds, answer.read_tokens) if tells else None)


def learnt(book: SpeedBook, plan: Plan, predicted: BareSpeeds, answer: TimedAnswer) -> SpeedBook:
    """Return the book after an answer on `plan`, of which `bare_speed` said what it would take."""
    name = layout_class(plan.edit.layout, plan.rig)
    book = book.with_answer(name, plan.rig, predicted.answer, answer.generated_tokens, answer.tokens_per_second)
    if predicted.prompt is None:
        return book
    return book.with_prompt(name, plan.rig, predicted.prompt, answer.read_per_second)
