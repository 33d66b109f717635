"""What an answer teaches about speed: how far the bare prediction of its layout is off."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.fit.speed_book import SpeedBook
from engine.plan.plan import Plan
from engine.plan.preview import plan_speed
from engine.rigs.speed_test import known_speeds
from engine.speed.prediction import SpeedForecast
from engine.speed.speeds import layout_class
from engine.speed.work import Work


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """An answer that was alone on its devices: its tokens, and how many of them came in a second."""

    prompt_tokens: int
    generated_tokens: int
    tokens_per_second: float


def bare_speed(plan: Plan, book: SpeedBook, answer: TimedAnswer) -> SpeedForecast | None:
    """Return what `answer` would have been predicted to take by measurements alone, without what answers taught; None
    where nobody can say. Asks drivers."""
    speeds = replace(known_speeds(plan.rig, book), ratios={}, factors={})
    fill_tokens = answer.prompt_tokens + answer.generated_tokens // 2
    return plan_speed(Work(plan.model), plan, speeds, fill_tokens)


def learnt(book: SpeedBook, plan: Plan, predicted: SpeedForecast, answer: TimedAnswer) -> SpeedBook:
    """Return the book after an answer on `plan`, of which `bare_speed` said what it would take."""
    name = layout_class(plan.edit.layout, plan.rig)
    return book.with_answer(name, plan.rig, predicted, answer.generated_tokens, answer.tokens_per_second)
