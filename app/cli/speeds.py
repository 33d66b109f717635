"""What answers teach about speed, kept for the window and the next command."""

from __future__ import annotations

import logging

from app.paths import speeds_path
from app.timed_answer import timed_answer
from engine.errors import EngineError
from engine.fit.speed_book import read_speed_book, write_speed_book
from engine.plan.plan import Plan
from engine.rigs.speeds import bare_speed, learnt
from engine.session.events import Done

_log = logging.getLogger("layerdeck.speeds")


def learn_speed(plan: Plan, done: Done) -> None:
    """Keep what an answer on `plan` taught. A book that cannot be written loses that, and the command nothing."""
    answer = timed_answer(done)
    book = read_speed_book(speeds_path())
    predicted = bare_speed(plan, book, answer)
    if predicted is None:
        return
    try:
        write_speed_book(speeds_path(), learnt(book, plan, predicted, answer))
    except EngineError as error:
        _log.info("speeds: %s", error.summary())
