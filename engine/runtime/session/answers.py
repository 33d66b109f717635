"""Requests to the loaded model in the state machine: any number may run at once, and each gets one final event.

The child itself orders the requests (slots, waiting requests). This module only lists the running requests, turns the
child's messages into events, and limits the time that requests may take to stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.base.errors import ArgumentError
from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.runtime.protocol.messages import (
    AllocationFailure,
    Answer,
    AnyMessage,
    Failure,
    FinalMessage,
    Generated,
    Piece,
    Reading,
    Saving,
    Shifted,
)
from engine.runtime.protocol.requests import AnyModelRequest, Stop
from engine.runtime.session import effects, events
from engine.runtime.session.events import Answered, Cancelled, Crashed, Done, Failed, OutOfMemory, RequestEnding, Token
from engine.runtime.session.reports import done_event, failed_event, out_of_memory_event
from engine.runtime.session.state import READING_PATIENCE, RequestRun, RequestState, State, Transition


def ask(transition: Transition, request: AnyModelRequest) -> None:
    """Assign a number to the request, which becomes its id, and send it to the child.

    Raises:
        ArgumentError: no model is ready.
    """
    state = transition.state
    if state.load is not None or state.waiting is not None:
        raise ArgumentError(tr("A model is being loaded; wait until it is ready."))
    if state.loaded is None or state.unload_wanted or state.closing or state.loss is not None:
        raise ArgumentError(tr("No model is loaded; load one first."))
    if transition.child.killed:
        raise ArgumentError(
            tr("The engine process is being ended, because an answer did not stop. Load the model again.")
        )
    run = RequestRun(replace(request, id=state.asked))
    # An idle child is silent for hours. Only while it has work to do does silence mean that it stalled.
    if not state.requests:
        transition.watch(True)
    transition.change(asked=state.asked + 1, requests=(*state.requests, run))
    transition.send(run.request)


def stop(transition: Transition, number: int) -> None:
    """Ask the child to end one request; does nothing if the request or the child has ended."""
    run = _find(transition.state, number)
    if run is not None and not run.stopping and transition.state.child is not None:
        _put(transition, run.stopped(on_cpu=_is_on_cpu(transition)))
        transition.send(Stop(request=number))


def stop_all(transition: Transition) -> None:
    """Ask the child to end every request, except those that must run to their end, such as saving a KV state."""
    stoppable = _stoppable(transition.state)
    if all(run.stopping for run in stoppable):
        return
    for run in stoppable:
        _put(transition, run.stopped(on_cpu=_is_on_cpu(transition)))
    # `Stop` without an id would also stop requests that outlast a stop.
    if len(stoppable) == len(transition.state.requests):
        transition.send(Stop())
    else:
        for run in stoppable:
            transition.send(Stop(request=run.id))


def kill(transition: Transition) -> None:
    """Kill the child, because its requests did not stop in time."""
    transition.change(stop_timer=None)
    transition.change_child(killed=True, ending=True)
    transition.do(effects.KillChild(transition.child.id))


def take_message(transition: Transition, message: AnyMessage) -> None:
    """Add to `transition` the event for a child's message about a request. Ended requests have no more events."""
    number = message.request if isinstance(message, Answer | Failure | AllocationFailure) else None
    run = None if number is None else _find(transition.state, number)
    # A killed child ends all requests with one ending; what it sent before must not end one of them differently.
    if run is None or transition.child.killed:
        return
    match message:
        case Reading():
            # While the prompt is tokenised the message is a sign of life alone: the prompt may still be refused.
            if not message.prompt_tokens:
                return
            # The child repeats this message as a sign of life, also in the middle of an answer.
            if run.state is RequestState.ASKED:
                _put(transition, replace(run, state=RequestState.READING))
            transition.report(
                events.Reading(
                    request=run.id,
                    read_tokens=message.read_tokens,
                    prompt_tokens=message.prompt_tokens,
                    cached_tokens=message.cached_tokens,
                )
            )
        case Piece():
            if run.state in (RequestState.ASKED, RequestState.READING):
                _put(transition, replace(run, state=RequestState.ANSWERING))
            transition.report(
                Token(text=message.text, request=run.id, choices=message.choices, context_used=message.context_used)
            )
        case Saving():
            transition.report(
                events.Saving(request=run.id, saved_bytes=message.saved_bytes, size_bytes=message.size_bytes)
            )
        case Shifted():
            transition.report(
                events.Shifted(request=run.id, kept_tokens=message.kept_tokens, dropped_tokens=message.dropped_tokens)
            )
        case FinalMessage() | Failure() | AllocationFailure():
            _end(transition, run, _ending(transition, run, message))


def end_all(transition: Transition, ending_of: Callable[[RequestRun], RequestEnding]) -> None:
    """End all requests. `ending_of`: returns the final event to report for a request."""
    for run in transition.state.requests:
        _end(transition, run, ending_of(run))


def killed_ending(state: State, run: RequestRun) -> Failed:
    """Return the final event of a request whose child was killed because it or another request did not stop in time."""
    limit_s = _stop_timeout_s(state)
    if run.stopping:
        what = tr("The answer did not stop within {stop_timeout_s:g} s", stop_timeout_s=limit_s)
    else:
        what = tr("Another answer did not stop within {stop_timeout_s:g} s", stop_timeout_s=limit_s)
    message = tr("{problem}, so the engine process was ended. Load the model again.", problem=what)
    return Failed(kind="stalled", message=message, request=run.id)


def with_request(ending: Failed | Crashed, run: RequestRun) -> Failed | Crashed:
    """Return `ending` with the number of the request `run`."""
    return replace(ending, request=run.id)


def _ending(
    transition: Transition, run: RequestRun, message: FinalMessage | Failure | AllocationFailure
) -> RequestEnding:
    ending: Done | Answered | OutOfMemory | Failed
    match message:
        case Generated():
            transition.change(context_used=message.context_used)
            ending = done_event(message)
        case Failure(kind="cancelled"):
            return Cancelled(stage="warm_up", request=run.id)
        case Failure():
            ending = failed_event(message)
        case AllocationFailure():
            is_reading = run.state in (RequestState.ASKED, RequestState.READING)
            rig = transition.child.plan.rig
            ending = out_of_memory_event(rig, message, answering="prompt" if is_reading else "answer")
        case _:
            ending = Answered(request=run.id, answer=message)
    return replace(ending, request=run.id)


def _end(transition: Transition, run: RequestRun, ending: RequestEnding) -> None:
    """End a request and report its final event. No other function does that."""
    left = tuple(each for each in transition.state.requests if each.id != run.id)
    transition.change(requests=left)
    # From now on silence is no stall: an idle child sends nothing.
    if not left:
        transition.watch(False)
    transition.report(ending)


def _put(transition: Transition, run: RequestRun) -> None:
    transition.change(requests=_replaced(transition.state.requests, run))


def _replaced(runs: Iterable[RequestRun], run: RequestRun) -> tuple[RequestRun, ...]:
    return tuple(run if each.id == run.id else each for each in runs)


def _stoppable(state: State) -> tuple[RequestRun, ...]:
    return tuple(run for run in state.requests if not run.request.outlasts_stop)


def _find(state: State, number: int) -> RequestRun | None:
    return next((run for run in state.requests if run.id == number), None)


def _is_on_cpu(transition: Transition) -> bool:
    return {*transition.child.plan.edit.layout.devices} == {CPU_ID}


def _stop_timeout_s(state: State) -> float:
    """Return the seconds that the requests have to stop before their child is killed."""
    # When the session is closed the model goes anyway.
    ends_late = not state.closing and any(run.ends_late for run in state.requests)
    return state.stop_timeout_s * (READING_PATIENCE if ends_late else 1)


def update_timer(transition: Transition) -> None:
    """Start or cancel the stop timer. When it expires, the child is killed.

    The timer runs while all requests are being stopped because the child must end: to close the session, to unload
    the model, or to load another plan. Otherwise a stop has no time limit, because killing the child would lose the
    model. A graph node of a large model may take a minute, but loading the model again may take a quarter of an hour.
    A child that hangs is found by the stall limit.
    """
    state = transition.state
    stoppable = _stoppable(state)
    must_end = state.closing or state.unload_wanted or state.waiting is not None
    wanted = must_end and bool(stoppable) and all(run.stopping for run in stoppable)
    if state.child is None or state.child.ending:
        return
    if wanted and state.stop_timer is None:
        timer = transition.number()
        transition.change(stop_timer=timer)
        transition.do(effects.SetTimer(timer, _stop_timeout_s(state)))
    elif not wanted:
        drop_timer(transition)


def drop_timer(transition: Transition) -> None:
    """Cancel the timer (`update_timer`) after which a child whose requests do not stop is killed."""
    if transition.state.stop_timer is not None:
        transition.do(effects.CancelTimer(transition.state.stop_timer))
        transition.change(stop_timer=None)
