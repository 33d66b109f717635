"""The machine of one open model: what goes in, and what state and effects come of it. It does nothing by itself.

Promises, which `tests/engine/runtime/session` drives it against: each load and each request has exactly one ending;
nothing starts after close; what was loaded stays until the new layout is tried for real; a child that is gone is left
alone.
"""

from __future__ import annotations

from functools import partial

from engine.base.errors import ArgumentError
from engine.base.language import tr
from engine.planning.plan.plan import Plan, known_words
from engine.runtime.process.outcome import EndReason, ProcessOutcome
from engine.runtime.protocol.messages import AnyMessage, DeviceMemoryQuery, DeviceMemoryReadings
from engine.runtime.session import answers, effects, inputs, loads
from engine.runtime.session.effects import Effect
from engine.runtime.session.events import Crashed, Failed, Stage
from engine.runtime.session.inputs import Greetings, Input
from engine.runtime.session.reports import crash_event, lost_event
from engine.runtime.session.state import Loss, State, Step, Turn


def advance(state: State, event: Input) -> tuple[State, tuple[Effect, ...]]:
    """Return the state after `event`, and what is to be done.

    Raises:
        ArgumentError: for a command that is refused; then nothing has changed.
    """
    turn = Turn(state)
    _take(turn, event)
    _settle(turn)
    return turn.state, tuple(turn.effects)


def _take(turn: Turn, event: Input) -> None:
    if isinstance(event, inputs.Command):
        _take_command(turn, event)
        return
    match event:
        case inputs.ChildSaid():
            if _is_of_child(turn, event.child):
                _take_message(turn, event.message)
        case inputs.ChildEnded():
            if _is_of_child(turn, event.child):
                _take_child_end(turn, event)
        case inputs.TimerRang():
            if event.timer == turn.state.stop_timer:
                answers.kill(turn)
        case inputs.Bug():
            _take_bug(turn)
        case _:
            _take_work(turn, event)


# ------------------------------------------------------------------ commands


def _take_command(turn: Turn, command: inputs.Command) -> None:
    match command:
        case inputs.Load():
            _take_load(turn, command)
        case inputs.Ask():
            answers.ask(turn, command.request)
        case inputs.StopRequest():
            answers.stop(turn, command.id)
        case inputs.StopAll():
            _stop_all(turn)
        case inputs.Unload():
            _stop_all(turn)
            turn.change(unload_wanted=True)
        case inputs.Close():
            turn.change(closing=True)
            _stop_all(turn)
        case inputs.QueryMemory():
            if turn.state.loaded is not None and not turn.child.ending:
                turn.send(DeviceMemoryQuery())


def _take_load(turn: Turn, command: inputs.Load) -> None:
    if turn.state.closing:
        raise ArgumentError(tr("The model is closed; nothing is loaded for it any more."))
    _forget_waiting(turn)
    turn.change(waiting=command.order)
    _stop_what_runs(turn)


def _stop_all(turn: Turn) -> None:
    _forget_waiting(turn)
    _stop_what_runs(turn)


def _forget_waiting(turn: Turn) -> None:
    if turn.state.waiting is not None:
        turn.change(waiting=None)
        turn.tell(loads.cancelled_before_it_began())


def _stop_what_runs(turn: Turn) -> None:
    """Its ending comes when the child has answered or is gone; the search for a lost device ends at once."""
    if turn.state.loss is not None:
        _cut_short(turn)
        return
    loads.cancel(turn)
    answers.stop_all(turn)


def _settle(turn: Turn) -> None:
    """Go on to what was asked for, once nothing runs: unload, close, or the load that waits."""
    if not turn.state.is_idle:
        return
    if turn.state.child is None:
        if turn.state.unload_wanted:
            turn.change(unload_wanted=False)
    elif turn.state.unload_wanted or turn.state.closing:
        if not turn.child.ending:
            turn.change(loaded=None, context_used=None)
            turn.stop_child()
        return
    elif turn.child.ending:
        return
    if turn.state.waiting is not None:
        order = turn.state.waiting
        turn.change(waiting=None)
        loads.begin(turn, order)


# ------------------------------------------------------------------ what the driver reports


def _is_of_child(turn: Turn, child: int) -> bool:
    """Whether it is about the child there is; what an earlier one said comes too late."""
    return turn.state.child is not None and turn.state.child.id == child


def _take_message(turn: Turn, message: AnyMessage) -> None:
    if isinstance(message, DeviceMemoryReadings):
        turn.do(effects.TellMemory(message))
    elif turn.state.load is not None:
        if turn.load.step in (Step.LOADING, Step.ENDING):
            loads.take_message(turn, message)
    else:
        answers.take_message(turn, message)


def _take_child_end(turn: Turn, event: inputs.ChildEnded) -> None:
    child, outcome = turn.child, event.outcome
    turn.change(child=None, loaded=None, context_used=None)
    if turn.state.stop_timer is not None:
        turn.do(effects.CancelTimer(turn.state.stop_timer))
        turn.change(stop_timer=None)
    if turn.state.load is not None:
        stage = turn.load.mark.stage
        loads.take_child_end(turn, partial(_diagnose, turn, outcome, stage, child.plan))
    elif turn.state.requests and child.killed and outcome.reason is EndReason.STOPPED:
        turn.change(has_failed=True)
        answers.end_all(turn, partial(answers.killed_ending, turn.state))
    elif turn.state.requests or not child.ending:
        _diagnose(turn, outcome, None, child.plan)


def _take_work(turn: Turn, answer: inputs.Work) -> None:
    loss = turn.state.loss
    if loss is None or loss.ticket != answer.ticket:
        loads.take_work(turn, answer)
    else:
        _take_lost_greetings(turn, answer.greetings if isinstance(answer, inputs.Greeted) else {})


def _take_bug(turn: Turn) -> None:
    """Give what runs its ending, and go on without the child."""
    if turn.state.loss is not None:
        _cut_short(turn)
    elif turn.state.load is not None:
        loads.give_up(turn)
    elif turn.state.requests:
        turn.change(unload_wanted=True)
        answers.end_all(turn, partial(answers.with_request, loads.INTERNAL_FAILURE))


# ------------------------------------------------------------------ a child that went without its last word


def _diagnose(turn: Turn, outcome: ProcessOutcome, stage: Stage | None, plan: Plan) -> None:
    """Find out which device is to blame, where one can be, and end with that what the child was for."""
    endpoints = tuple(plan.used_endpoints)
    if not endpoints or not (outcome.lost_rpc or outcome.reason is EndReason.STALLED):
        _end_with(turn, crash_event(outcome, known_words(plan), plan.used_endpoints))
        return
    ticket = turn.number()
    turn.change(loss=Loss(ticket, outcome, stage, plan))
    if turn.state.load is not None:
        turn.change_load(step=Step.DIAGNOSING)
    if turn.state.closing:
        _take_lost_greetings(turn, {})
    else:
        turn.do(effects.Greet(ticket, endpoints, plan.routes))


def _take_lost_greetings(turn: Turn, greetings: Greetings) -> None:
    """End with what the workers have said."""
    loss = turn.state.loss
    assert loss is not None
    turn.change(loss=None)
    known = known_words(loss.plan)
    _end_with(turn, lost_event(loss.outcome, loss.stage, loss.plan.used_endpoints, greetings, known))


def _cut_short(turn: Turn) -> None:
    """Wait for no answers any more; end with what is known."""
    assert turn.state.loss is not None
    turn.do(effects.Abandon(turn.state.loss.ticket))
    _take_lost_greetings(turn, {})


def _end_with(turn: Turn, ending: Failed | Crashed) -> None:
    if turn.state.load is not None:
        loads.conclude(turn, ending)
        return
    turn.change(has_failed=True)
    if turn.state.requests:
        answers.end_all(turn, partial(answers.with_request, ending))
    else:
        turn.tell(ending)
