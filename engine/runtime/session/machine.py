"""State machine of one open model: a pure function from state and input to state and effects.

It does no input or output and reads no clock. `driver.py` carries out the effects, and reports as inputs what happens.
This module handles commands, and passes reports on: those of loads to `loads.py`, those of requests to `answers.py`.

Invariants, which `tests/engine/runtime/session` checks with random inputs: each load and each request has exactly one
final event (ending). Nothing starts after close. The previous model stays loaded until the new layout has been checked
and its load begins. No effect names a child that has ended.
"""

from __future__ import annotations

from functools import partial

from engine.base.errors import ArgumentError
from engine.base.language import tr
from engine.base.texts import show
from engine.base.values import replace
from engine.planning.fit.step_back import Tried
from engine.planning.plan.plan import Plan, self_test_text
from engine.runtime.process.outcome import EndReason, ProcessOutcome
from engine.runtime.protocol.messages import AnyMessage, DeviceMemoryReadings
from engine.runtime.protocol.requests import DeviceMemoryQuery
from engine.runtime.session import answers, effects, inputs, loads
from engine.runtime.session.effects import Effect
from engine.runtime.session.events import Crashed, Failed, OutOfMemory, Stage
from engine.runtime.session.inputs import Greetings, Input
from engine.runtime.session.load_spec import refusal_of
from engine.runtime.session.reports import crash_event, lost_event, memory_event, progress_text
from engine.runtime.session.state import (
    Exhausted,
    LoadedInfo,
    Loss,
    RequestRun,
    RequestState,
    State,
    Step,
    Transition,
)


def advance(state: State, event: Input) -> tuple[State, tuple[Effect, ...]]:
    """Return the state after `event`, and the effects to carry out in their order.

    Raises:
        ArgumentError: a command is refused; nothing has changed.
    """
    transition = Transition(state)
    _take(transition, event)
    _end_waiting(transition)
    answers.update_timer(transition)
    _settle(transition)
    return transition.state, tuple(transition.effects)


def _end_waiting(transition: Transition) -> None:
    """End the requests whose child process ran out of memory, as soon as the search for proposals has ended.

    Proposals are changes of the layout or settings after which the model should fit. After the child has run out of
    memory during an answer, a search for them may begin. The requests wait until it has ended. Then they end with the
    event `OutOfMemory`.
    """
    state = transition.state
    if state.requests and state.child is None and state.load is None and state.last is not None:
        ending = state.last.ending
        if isinstance(ending, OutOfMemory):
            answers.end_all(transition, partial(_out_of_memory, ending))


def _take(transition: Transition, event: Input) -> None:
    if isinstance(event, inputs.Command):
        _take_command(transition, event)
        return
    match event:
        case inputs.ChildMessage():
            if _is_of_child(transition, event.child):
                _take_message(transition, event.message)
        case inputs.ChildEnded():
            if _is_of_child(transition, event.child):
                _take_child_end(transition, event)
        case inputs.TimerExpired():
            if event.timer == transition.state.stop_timer:
                answers.kill(transition)
        case inputs.Bug():
            _take_bug(transition)
        case _:
            _take_work(transition, event)


# ------------------------------------------------------------------ commands


def _take_command(transition: Transition, command: inputs.Command) -> None:
    match command:
        case inputs.Load():
            _take_load(transition, command)
        case inputs.SubmitRequest():
            answers.ask(transition, command.request)
        case inputs.StopRequest():
            answers.stop(transition, command.id)
        case inputs.StopAll():
            _stop_all(transition)
        case inputs.Unload():
            _stop_all(transition)
            transition.change(unload_wanted=True)
        case inputs.Close():
            if not transition.state.closing:
                # Another one is set with the limit of a close, which is shorter.
                answers.drop_timer(transition)
            transition.change(closing=True)
            _stop_all(transition)
        case inputs.QueryMemory():
            if transition.state.loaded is not None and not transition.child.ending:
                transition.send(DeviceMemoryQuery())


def _take_load(transition: Transition, command: inputs.Load) -> None:
    if transition.state.closing:
        raise ArgumentError(tr("This model was closed. Open the model again before you load it."))
    _forget_waiting(transition)
    transition.change(waiting=command.spec)
    _stop_what_runs(transition)


def _stop_all(transition: Transition) -> None:
    _forget_waiting(transition)
    _stop_what_runs(transition)


def _forget_waiting(transition: Transition) -> None:
    if transition.state.waiting is not None:
        transition.change(waiting=None)
        transition.report(loads.cancelled_before_it_began())


def _stop_what_runs(transition: Transition) -> None:
    """Stop the running load or the running requests.

    The final event of each is reported later, when the child has acknowledged the stop or has ended.
    """
    # A lost child has ended already. Only the greetings that look for the lost device are under way; the ending does
    # without their answers.
    if transition.state.loss is not None:
        _cut_short(transition)
        return
    loads.cancel(transition)
    # Requests that wait for proposals have no child any more; they end with the search for these.
    if transition.state.child is not None:
        answers.stop_all(transition)


def _settle(transition: Transition) -> None:
    """Execute the waiting command (unload, close or load) if no load and no request runs."""
    # The order matters: a load that was requested after an unload begins when the old child has ended, because both
    # children together might not fit into the memory.
    if not transition.state.is_idle:
        return
    if transition.state.child is None:
        if transition.state.unload_wanted:
            transition.change(unload_wanted=False)
    elif transition.state.unload_wanted or transition.state.closing:
        if not transition.child.ending:
            transition.change(loaded=None, context_used=None)
            transition.stop_child()
        return
    elif transition.child.ending:
        return
    if transition.state.waiting is not None:
        spec = transition.state.waiting
        transition.change(waiting=None)
        loads.begin(transition, spec)


# ------------------------------------------------------------------ what the driver reports


def _is_of_child(transition: Transition, child: int) -> bool:
    """Return whether a report is about the current child. A late report about an earlier child is ignored."""
    return transition.state.child is not None and transition.state.child.id == child


def _take_message(transition: Transition, message: AnyMessage) -> None:
    # Readings concern neither load nor requests, and may come at any time.
    if isinstance(message, DeviceMemoryReadings):
        transition.do(effects.ReportMemory(message))
    elif transition.state.load is not None:
        if transition.load.step in (Step.LOADING, Step.ENDING):
            loads.take_message(transition, message)
    else:
        answers.take_message(transition, message)


def _take_child_end(transition: Transition, event: inputs.ChildEnded) -> None:
    child, outcome, loaded = transition.child, event.outcome, transition.state.loaded
    transition.change(child=None, loaded=None, context_used=None)
    answers.drop_timer(transition)
    # The process holds the memory that the waiting load needs.
    cannot_begin = outcome.still_exists and transition.state.waiting is not None
    if cannot_begin:
        transition.change(waiting=None)
    if transition.state.load is not None:
        stage = transition.load.progress.stage
        if loaded is not None and not child.ending:
            transition.change(lost=_crash(transition, outcome, child.plan))
        loads.take_child_end(transition, outcome, partial(_diagnose, transition, outcome, stage, child.plan))
    elif loaded is not None and not child.ending and _handle_out_of_memory(transition, outcome, loaded):
        pass
    # We killed it because its requests did not stop. Other outcomes are losses, whose cause is looked for.
    elif transition.state.requests and child.killed and outcome.reason is EndReason.STOPPED:
        transition.change(has_failed=True)
        answers.end_all(transition, partial(answers.killed_ending, transition.state))
    elif transition.state.requests or not child.ending:
        _diagnose(transition, outcome, None, child.plan)
    if cannot_begin:
        transition.change(has_failed=True)
        transition.report(_crash(transition, outcome, child.plan))


def _take_work(transition: Transition, answer: inputs.Work) -> None:
    loss = transition.state.loss
    if loss is None or loss.ticket != answer.ticket:
        loads.take_work(transition, answer)
    else:
        _take_lost_greetings(transition, answer.greetings if isinstance(answer, inputs.Greeted) else {})


def _take_bug(transition: Transition) -> None:
    """Handle an internal error: end the running load or the running requests, and unload the model.

    After such an error the state of the child process is unknown.
    """
    if transition.state.loss is not None:
        _cut_short(transition)
    elif transition.state.load is not None:
        loads.give_up(transition)
    elif transition.state.requests:
        transition.change(unload_wanted=True)
        answers.end_all(transition, partial(answers.with_request, loads.INTERNAL_FAILURE))


# ------------------------------------------------------------------ a child that ended without an answer


def _diagnose(transition: Transition, outcome: ProcessOutcome, stage: Stage | None, plan: Plan) -> None:
    """Handle the unexpected end of the child: end its load or its requests.

    If the loss of an RPC worker may be the cause, first check which workers still answer.

    `stage`: stage of the load; None if the child was answering or idle.
    `plan`: plan of the child.
    """
    # ggml's RPC client aborts the process when a server does not answer, and often without its address. A greeting from
    # here tells which server is gone.
    if stage is not None and transition.state.load is not None:
        rows = tuple(row.without_overhead() for row in plan.forecast if row.need_bytes)
        exhausted = memory_event(outcome, plan, stage, rows)
        if exhausted is not None:
            loads.conclude(transition, exhausted)
            return
    endpoints = tuple(plan.used_endpoints)
    if not endpoints or not (outcome.lost_rpc or outcome.reason is EndReason.STALLED):
        _end_with(transition, _with_progress(transition, outcome, _crash(transition, outcome, plan)))
        return
    ticket = transition.number()
    transition.change(loss=Loss(ticket, outcome, stage, plan))
    if transition.state.load is not None:
        transition.change_load(step=Step.DIAGNOSING)
    # Nothing starts after close, and greetings are work.
    if transition.state.closing:
        _take_lost_greetings(transition, {})
    else:
        transition.do(effects.Greet(ticket, endpoints, plan.routes))


def _crash(transition: Transition, outcome: ProcessOutcome, plan: Plan) -> Failed | Crashed:
    return crash_event(outcome, self_test_text(plan), plan.used_endpoints, model=_file_name(transition, plan))


def _handle_out_of_memory(transition: Transition, outcome: ProcessOutcome, loaded: LoadedInfo) -> bool:
    """Handle the end of a child that ran out of memory during an answer; return False if it ended for another reason.

    If other layouts may be tried, the requests end, and the next load of the same `LoadSpec` tries another layout
    first. Otherwise a search for proposals (changes after which the model should fit) begins, and the requests end
    after it.
    """
    state, spec = transition.state, loaded.spec
    is_reading = all(run.state in (RequestState.ASKED, RequestState.READING) for run in state.requests)
    rows = tuple(row for row in loaded.measured if row.need_bytes)
    ending = memory_event(outcome, spec.plan, "prompt" if state.requests and is_reading else "answer", rows)
    if ending is None:
        return False
    transition.change(has_failed=True)
    tried = Tried(spec.plan.edit.layout, spec.plan.forecast, refusal_of(ending))
    loads.learn(transition, spec.plan, tried)
    is_over = state.unload_wanted or state.closing or state.waiting is not None
    if spec.retry.retries or is_over:
        transition.change(exhausted=None if is_over else Exhausted(spec.plan.edit, tried, ending))
        if state.requests:
            answers.end_all(transition, partial(_out_of_memory, ending))
        else:
            transition.report(ending)
    else:
        loads.explain(transition, spec, tried, ending)
    return True


def _out_of_memory(ending: OutOfMemory, run: RequestRun) -> OutOfMemory:
    return replace(ending, request=run.id)


def _take_lost_greetings(transition: Transition, greetings: Greetings) -> None:
    """End the load or the requests of a child that ended unexpectedly.

    `greetings`: results of the check whether its RPC workers still answer; empty if the check was cancelled.
    """
    loss = transition.state.loss
    assert loss is not None
    transition.change(loss=None)
    event = lost_event(
        loss.outcome,
        loss.stage,
        loss.plan.used_endpoints,
        greetings,
        self_test_text(loss.plan),
        is_answering=bool(transition.state.requests),
        model=_file_name(transition, loss.plan),
    )
    _end_with(transition, _with_progress(transition, loss.outcome, event))


def _file_name(transition: Transition, plan: Plan) -> str:
    """Return the name of the file that the child was reading: the model or, during its load, the draft model."""
    load, draft = transition.state.load, plan.edit.side_files.draft
    path = draft.path if draft is not None and load is not None and load.progress.draft else None
    return show((path or plan.memory.model.paths[0]).name)


def _with_progress(transition: Transition, outcome: ProcessOutcome, ending: Failed | Crashed) -> Failed | Crashed:
    """Return `ending`. If the child stalled during a load, a sentence on the progress is added to the message."""
    load = transition.state.load
    if load is None or outcome.reason is not EndReason.STALLED:
        return ending
    return replace(ending, message=f"{ending.message} {progress_text(load.progress)}")


def _cut_short(transition: Transition) -> None:
    """End at once the load or the requests of a child that ended unexpectedly.

    The check whether the child's RPC workers still answer is cancelled.
    """
    assert transition.state.loss is not None
    transition.do(effects.CancelWork(transition.state.loss.ticket))
    _take_lost_greetings(transition, {})


def _end_with(transition: Transition, ending: Failed | Crashed) -> None:
    if transition.state.load is not None:
        loads.conclude(transition, ending)
        return
    transition.change(has_failed=True)
    if transition.state.requests:
        answers.end_all(transition, partial(answers.with_request, ending))
    else:
        transition.report(ending)
