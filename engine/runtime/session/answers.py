"""Requests on the loaded model: any number at once, of any kind, each with exactly one ending."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec

from engine.base.errors import ArgumentError
from engine.base.language import tr
from engine.runtime.protocol.messages import (
    AllocationFailure,
    Answer,
    AnyMessage,
    AnyModelRequest,
    Failure,
    Generated,
    LastWord,
    Piece,
    Reading,
    Stop,
)
from engine.runtime.session import effects, events
from engine.runtime.session.events import Answered, Cancelled, Crashed, Done, Failed, OutOfMemory, RequestEnding, Token
from engine.runtime.session.reports import done_event, failed_event, out_of_memory_event
from engine.runtime.session.state import RequestRun, RequestState, State, Turn


def ask(turn: Turn, request: AnyModelRequest) -> None:
    """Give the request its id and hand it to the child.

    Raises:
        ArgumentError: where no model is ready to be asked.
    """
    state = turn.state
    if state.load is not None or state.waiting is not None:
        raise ArgumentError(tr("A model is being loaded; wait until it is ready."))
    if state.loaded is None or state.unload_wanted or state.closing or state.loss is not None:
        raise ArgumentError(tr("No model is loaded; load one first."))
    if turn.child.killed:
        raise ArgumentError(
            tr("The engine process is being ended, because an answer did not stop. Load the model again.")
        )
    run = RequestRun(msgspec.structs.replace(request, id=state.asked))
    if not state.requests:
        turn.watch(True)
    turn.change(asked=state.asked + 1, requests=(*state.requests, run))
    turn.send(run.request)
    _mind_timer(turn)


def stop(turn: Turn, number: int) -> None:
    """Ask the child to end one request; does nothing if the request or the child has ended."""
    run = _find(turn.state, number)
    if run is not None and not run.stopping and turn.state.child is not None:
        _put(turn, replace(run, state=RequestState.STOPPING))
        turn.send(Stop(request=number))
        _mind_timer(turn)


def stop_all(turn: Turn) -> None:
    """Ask the child to end every request, except those that outlast a stop."""
    stoppable = _stoppable(turn.state)
    if all(run.stopping for run in stoppable):
        return
    for run in stoppable:
        _put(turn, replace(run, state=RequestState.STOPPING))
    if len(stoppable) == len(turn.state.requests):
        turn.send(Stop())
    else:
        for run in stoppable:
            turn.send(Stop(request=run.id))
    _mind_timer(turn)


def kill(turn: Turn) -> None:
    """Kill the child, because its requests did not stop in time."""
    turn.change(stop_timer=None)
    turn.change_child(killed=True, ending=True)
    turn.do(effects.KillChild(turn.child.id))


def take_message(turn: Turn, message: AnyMessage) -> None:
    """Take a message of the child about a request; messages about ended requests are ignored."""
    number = message.request if isinstance(message, Answer | Failure | AllocationFailure) else None
    run = None if number is None else _find(turn.state, number)
    if run is None or turn.child.killed:
        return
    match message:
        case Reading():
            # A sign of life in the middle of an answer is no return to its prompt.
            if run.state is RequestState.ASKED:
                _put(turn, replace(run, state=RequestState.READING))
            turn.tell(
                events.Reading(request=run.id, read_tokens=message.read_tokens, prompt_tokens=message.prompt_tokens)
            )
        case Piece():
            if run.state in (RequestState.ASKED, RequestState.READING):
                _put(turn, replace(run, state=RequestState.ANSWERING))
            turn.tell(Token(text=message.text, request=run.id, choices=message.choices))
        case LastWord() | Failure() | AllocationFailure():
            _end(turn, run, _ending(turn, run, message))


def end_all(turn: Turn, ending_of: Callable[[RequestRun], RequestEnding]) -> None:
    """End every request that is under way, each with the result of `ending_of`."""
    for run in turn.state.requests:
        _end(turn, run, ending_of(run))


def killed_ending(state: State, run: RequestRun) -> Failed:
    """Return the ending of a request whose child was killed because it did not stop."""
    if run.stopping:
        what = tr("The answer did not stop within {stop_timeout_s:g} s", stop_timeout_s=state.stop_timeout_s)
    else:
        what = tr("Another answer did not stop within {stop_timeout_s:g} s", stop_timeout_s=state.stop_timeout_s)
    message = tr("{what}, so the engine process was ended. Load the model again.", what=what)
    return Failed(kind="stalled", message=message, request=run.id)


def with_request(ending: Failed | Crashed, run: RequestRun) -> Failed | Crashed:
    """Return `ending` as that of one request."""
    return msgspec.structs.replace(ending, request=run.id)


def _ending(turn: Turn, run: RequestRun, message: LastWord | Failure | AllocationFailure) -> RequestEnding:
    ending: Done | Answered | OutOfMemory | Failed
    match message:
        case Generated():
            turn.change(context_used=message.context_used)
            ending = done_event(message)
        case Failure(kind="cancelled"):
            return Cancelled(stage="warm_up", request=run.id)
        case Failure():
            ending = failed_event(message)
        case AllocationFailure():
            ending = out_of_memory_event(turn.child.plan.rig, message, generating=True)
        case _:
            ending = Answered(request=run.id, answer=message)
    return msgspec.structs.replace(ending, request=run.id)


def _end(turn: Turn, run: RequestRun, ending: RequestEnding) -> None:
    """End a request; nothing else reports its ending."""
    left = tuple(each for each in turn.state.requests if each.id != run.id)
    turn.change(requests=left)
    if not left:
        turn.watch(False)
    turn.tell(ending)
    _mind_timer(turn)


def _put(turn: Turn, run: RequestRun) -> None:
    turn.change(requests=_replaced(turn.state.requests, run))


def _replaced(runs: Iterable[RequestRun], run: RequestRun) -> tuple[RequestRun, ...]:
    return tuple(run if each.id == run.id else each for each in runs)


def _stoppable(state: State) -> tuple[RequestRun, ...]:
    return tuple(run for run in state.requests if not run.request.outlasts_stop)


def _find(state: State, number: int) -> RequestRun | None:
    return next((run for run in state.requests if run.id == number), None)


def _mind_timer(turn: Turn) -> None:
    """Have the timer run while all requests are to stop: a child that goes on with none of them is ended.

    While others are answered one that does not stop costs nobody anything; that a child stands still is seen otherwise.
    """
    state = turn.state
    stoppable = _stoppable(state)
    wanted = bool(stoppable) and all(run.stopping for run in stoppable)
    if state.child is None or state.child.ending:
        return
    if wanted and state.stop_timer is None:
        timer = turn.number()
        turn.change(stop_timer=timer)
        turn.do(effects.SetTimer(timer))
    elif not wanted and state.stop_timer is not None:
        turn.do(effects.CancelTimer(state.stop_timer))
        turn.change(stop_timer=None)
