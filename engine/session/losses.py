"""A child that went without its last word: whose fault it was, and the endings that follow from that."""

from __future__ import annotations

from functools import partial

from engine.plan.plan import Plan, known_words
from engine.process.outcome import EndReason, ProcessOutcome
from engine.session import answers, effects, loads
from engine.session.events import Crashed, Failed, Stage
from engine.session.greetings import Greetings
from engine.session.reports import crash_event, lost_event
from engine.session.state import Loss, Step
from engine.session.turn import Turn


def diagnose(turn: Turn, outcome: ProcessOutcome, stage: Stage | None, plan: Plan) -> None:
    """Find out which device is to blame, where one can be, and end with that what the child was for."""
    endpoints = tuple(plan.used_endpoints)
    if not endpoints or not (outcome.lost_rpc or outcome.reason is EndReason.STALLED):
        _end(turn, crash_event(outcome, known_words(plan), plan.used_endpoints))
        return
    ticket = turn.number()
    turn.change(loss=Loss(ticket, outcome, stage, plan))
    if turn.state.load is not None:
        turn.change_load(step=Step.DIAGNOSING)
    if turn.state.closing:
        take_greetings(turn, {})
    else:
        turn.do(effects.Greet(ticket, endpoints, plan.routes))


def take_greetings(turn: Turn, greetings: Greetings) -> None:
    """End with what the workers have said."""
    loss = turn.state.loss
    assert loss is not None
    turn.change(loss=None)
    known = known_words(loss.plan)
    _end(turn, lost_event(loss.outcome, loss.stage, loss.plan.used_endpoints, greetings, known))


def cut_short(turn: Turn) -> None:
    """Wait for no answers any more; end with what is known."""
    assert turn.state.loss is not None
    turn.do(effects.Abandon(turn.state.loss.ticket))
    take_greetings(turn, {})


def _end(turn: Turn, ending: Failed | Crashed) -> None:
    if turn.state.load is not None:
        loads.conclude(turn, ending)
        return
    turn.change(has_failed=True)
    if turn.state.requests:
        answers.end_all(turn, partial(answers.with_request, ending))
    else:
        turn.tell(ending)
