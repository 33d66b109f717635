"""The steps of a load in the state machine, from the `LoadSpec` to its one ending.

1. `_prepare`: the plan becomes a request (`Step.PREPARING`). A plan that breaks a rule ends the load here.
2. If other layouts may be tried, `_try` probes the layout (FORECASTING). If it does not fit, `_choose_after` looks for
   the next layout (CHOOSING), and `_try` probes that one.
3. `_greet` checks whether the RPC workers answer (GREETING). If one does not, the load ends before a child is started.
4. The child of the model that was loaded before ends (REPLACING), because its memory is needed.
5. `_start` starts a child (LOADING). `LoadedModel` becomes the event `Loaded`, with measured bytes for each device.
6. If an allocation failed, the child ends (ENDING). The load then tries another layout, or searches for changes to
   propose to the user (EXPLAINING). If the child was lost, `machine.py` looks for the lost device (DIAGNOSING).

`_finish` is the only place that reports an ending.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from engine.base.language import tr
from engine.base.values import replace
from engine.planning.fit.calibration import computing_need
from engine.planning.fit.step_back import NextLayout, Tried, describe_layout, shortage_text
from engine.planning.plan.plan import Plan
from engine.runtime.process.outcome import ProcessOutcome
from engine.runtime.protocol.messages import (
    AllocationFailure,
    AnyMessage,
    Failure,
    Hello,
    LoadedModel,
    StageProgress,
    Stopped,
)
from engine.runtime.protocol.requests import Stop
from engine.runtime.session import effects, inputs
from engine.runtime.session.events import Attempt, Cancelled, Failed, Fallback, LoadEnding, OutOfMemory
from engine.runtime.session.inputs import Greetings
from engine.runtime.session.load_spec import FIRST_REASON, LoadAttempt, LoadSpec, outcome_words, refusal_of
from engine.runtime.session.reports import failed_event, loaded_event, out_of_memory_event, refusal
from engine.runtime.session.state import (
    Child,
    LoadedInfo,
    LoadProgress,
    LoadResult,
    LoadRun,
    Step,
    Transition,
    out_of_memory_ending,
)

INTERNAL_FAILURE = Failed(kind="internal", message=tr("An internal error ended this action. The log has the details."))


def begin(transition: Transition, spec: LoadSpec) -> None:
    """Begin a load. No other load and no request may be running.

    The model loaded before may have run out of memory in an answer. If the load spec has its layout and settings again
    and allows other layouts, that layout counts as a failed first attempt, and another one is tried.
    """
    load, exhausted = LoadRun(spec, spec.plan), transition.state.exhausted
    if exhausted is not None and spec.retry.retries and spec.plan.edit == exhausted.edit:
        ending = exhausted.ending
        first = LoadAttempt(1, exhausted.tried.layout, FIRST_REASON, outcome_words(ending), loaded=True)
        load = replace(load, latest=exhausted.tried, ending=ending, attempts=(first,), is_real=True)
    transition.change(load=load, exhausted=None, last=None, has_failed=False)
    _report_beginning(transition)
    _prepare(transition)


def cancelled_before_it_began() -> Cancelled:
    """Return the final event of a load that was cancelled before it began, while it waited for another load."""
    return Cancelled(stage="header")


def cancel(transition: Transition) -> None:
    """Cancel the running load, if there is one.

    While the load prepares its request, chooses a layout or checks its RPC workers, it ends at once. In other steps it
    ends when its child processes have exited, because they hold device memory until then.
    """
    load = transition.state.load
    if load is None or load.cancelled:
        return
    transition.change_load(cancelled=True)
    if load.ticket is not None:
        transition.do(effects.CancelWork(load.ticket))
    # FORECASTING and EXPLAINING run probing children, which hold device memory until they have ended. A load that
    # begins before that would find less memory than its forecast says.
    if load.step in (Step.PREPARING, Step.CHOOSING, Step.GREETING):
        _finish(transition, Cancelled(stage=load.progress.stage))
    elif load.step is Step.LOADING:
        transition.send(Stop())
        transition.stop_child()


def conclude(transition: Transition, ending: LoadEnding) -> None:
    """Handle the failure or cancellation of a real load (not a probe) of one layout. The child must have ended.

    If a device ran out of memory, another layout may be tried. Otherwise the requested load ends.
    """
    load = transition.load
    if load.cancelled:
        _finish(transition, Cancelled(stage=load.progress.stage))
    elif not isinstance(ending, OutOfMemory):
        _finish(transition, ending)
    else:
        tried = Tried(load.plan.edit.layout, load.plan.forecast, refusal_of(ending), load.backoff_tenths)
        if ending.stage == "warm_up":
            learn(transition, load.plan, tried)
        transition.change_load(ending=ending)
        _note(transition, outcome_words(ending))
        _choose_after(transition, tried)


def explain(transition: Transition, spec: LoadSpec, tried: Tried, ending: OutOfMemory) -> None:
    """Begin to search for changes to propose (proposals), after a loaded model ran out of memory in an answer."""
    # Tables of its own: other threads plan with those of the loaded plan.
    plan = spec.plan.with_own_tables()
    run = LoadRun(spec, plan, base=plan, is_real=True, tried=(tried,), ending=ending, of_answer=True)
    transition.change(load=run, last=None)
    _explain(transition)


def learn(transition: Transition, plan: Plan, tried: Tried) -> None:
    """Report how much more memory a layout needs on a device than its forecast says, so that later forecasts include
    it.

    `plan`: the plan that was loaded.
    `tried`: the layout of `plan`, and the allocation that the device refused.
    """
    assert tried.refusal is not None
    need = computing_need(plan, tried.refusal.device)
    if need is not None:
        transition.do(effects.ReportNeed(need))


def give_up(transition: Transition) -> None:
    """End the load after an internal error."""
    load = transition.load
    if load.step is Step.EXPLAINING:
        _finish(transition, out_of_memory_ending(load))
    elif transition.state.child is not None and load.step in (Step.LOADING, Step.ENDING, Step.REPLACING):
        step = load.step if load.step is Step.REPLACING else Step.ENDING
        transition.change_load(step=step, ending=load.ending or INTERNAL_FAILURE)
        transition.stop_child()
    else:
        _finish(transition, INTERNAL_FAILURE)


# ------------------------------------------------------------------ results of work


def take_work(transition: Transition, answer: inputs.Work) -> None:
    """Continue the load with the result of slow work, such as a memory forecast or the choice of a layout.

    Each piece of work has a number (`ticket`). A result whose number is not the expected one is ignored.
    """
    if not transition.take_answer(answer.ticket):
        return
    match answer:
        case inputs.Prepared():
            _take_prepared(transition, answer)
        case inputs.Refused():
            conclude(transition, answer.ending)
        case inputs.Forecasted():
            _take_forecast(transition, answer)
        case inputs.Chosen():
            _take_choice(transition, answer.found)
        case inputs.Greeted():
            _take_greetings(transition, answer.greetings)
        case inputs.Explained():
            ending = replace(
                out_of_memory_ending(transition.load),
                proposals=tuple(each.text for each in answer.proposals),
                holders=answer.holders,
            )
            _finish(transition, ending, answer)
        case inputs.WorkFailed():
            give_up(transition)


def _prepare(transition: Transition) -> None:
    transition.await_work(Step.PREPARING, partial(effects.Prepare, plan=transition.load.plan))


def _take_prepared(transition: Transition, answer: inputs.Prepared) -> None:
    load = transition.load
    transition.change_load(plan=answer.plan, base=load.base or answer.plan, request=answer.request)
    if load.latest is not None:
        _choose_after(transition, load.latest)
    elif load.is_real or not load.asked.retry.retries:
        _greet(transition)
    else:
        _try(transition, answer.plan, FIRST_REASON)


def _try(transition: Transition, plan: Plan, reason: str, backoff_tenths: int = 0) -> None:
    """Begin an attempt with a layout: forecast its memory by a probe, or by arithmetic if no probe is possible.

    `reason`: why this layout is tried, as a sentence.
    `backoff_tenths`: tenths of its capacity that the layout leaves unused on each device where an allocation failed.
    """
    attempt = LoadAttempt(len(transition.load.attempts) + 1, plan.edit.layout, reason)
    transition.change_load(
        plan=plan, backoff_tenths=backoff_tenths, is_real=False, attempts=(*transition.load.attempts, attempt)
    )
    transition.report(Attempt(number=attempt.number, layout=describe_layout(plan.edit.layout), reason=reason))
    # An RPC server serves one client at a time, and the model that is still loaded holds the connection: a probe would
    # wait for it without end. The arithmetic has to do then.
    held = transition.state.child
    rig_endpoints = {device.endpoint for device in plan.rig.devices if device.endpoint is not None}
    can_send = held is None or held.plan.used_endpoints.keys().isdisjoint(rig_endpoints)
    transition.await_work(Step.FORECASTING, partial(effects.Forecast, plan=plan, ask_engine=can_send))


def _take_forecast(transition: Transition, answer: inputs.Forecasted) -> None:
    if transition.load.cancelled:
        _note(transition, tr("Cancelled."), loaded=False)
        _finish(transition, Cancelled(stage="fit"))
        return
    transition.change_load(plan=answer.plan)
    if answer.fits:
        _load_really(transition)
    else:
        _choose_after(
            transition,
            Tried(answer.plan.edit.layout, answer.plan.forecast, backoff_tenths=transition.load.backoff_tenths),
        )


def _choose_after(transition: Transition, tried: Tried) -> None:
    """Begin to choose another layout after `tried`, which did not fit, if the retry policy allows another attempt."""
    load = transition.load
    transition.change_load(latest=tried)
    history = (*load.tried, tried)
    # Attempts are counted only if others may be tried; the first one is the layout of the load spec.
    if load.attempts and len(load.attempts) <= load.asked.retry.retries:
        transition.await_work(
            Step.CHOOSING, partial(effects.Choose, asked=load.asked.with_plan(_base(transition)), tried=history)
        )
    else:
        _take_choice(transition, None)


def _take_choice(transition: Transition, found: NextLayout | None) -> None:
    load, tried = transition.load, transition.load.latest
    assert tried is not None
    # No refusal: the layout was not loaded, because its forecast does not fit.
    only_forecast = tried.refusal is None
    if found is None and only_forecast:
        # A forecast refuses nothing (docs/contract.md): if no other layout is left, this one is loaded all the same.
        _load_really(transition)
        return
    transition.change_load(latest=None, tried=(*load.tried, tried))
    if found is None:
        _explain(transition)
        return
    if only_forecast:
        _note(
            transition,
            tr(
                "This layout was not loaded, because its forecast shows that memory is short: {shortage}.",
                shortage=shortage_text(tried.rows),
            ),
            loaded=False,
        )
    outcome = transition.load.attempts[-1].outcome
    transition.change_load(request=None, ending=None)
    _try(
        transition,
        _base(transition).with_layout(found.layout),
        tr("{outcome} Change for the next attempt: {change}.", outcome=outcome, change=found.change),
        found.backoff_tenths,
    )


def _explain(transition: Transition) -> None:
    load = transition.load
    explain = partial(
        effects.Explain,
        plan=_base(transition),
        tried=load.tried,
        ending=out_of_memory_ending(load),
        constraints=load.asked.retry.constraints,
    )
    transition.await_work(Step.EXPLAINING, explain)


def _base(transition: Transition) -> Plan:
    """Return the plan of the load spec (`LoadRun.base`).

    It shares no cache with other plans, so a worker thread can use it.
    """
    assert transition.load.base is not None
    return transition.load.base


# ------------------------------------------------------------------ one layout, for real


def _report_beginning(transition: Transition) -> None:
    for mark in (LoadProgress("header"), LoadProgress("fit")):
        transition.change_load(progress=mark)
        transition.report(mark.event())


def _load_really(transition: Transition) -> None:
    _report_beginning(transition)
    transition.change_load(is_real=True)
    if transition.load.request is None:
        _prepare(transition)
    else:
        _greet(transition)


def _greet(transition: Transition) -> None:
    """Check whether the RPC workers of the layout answer (greet them).

    Workers that the loaded model uses are checked after its child has ended.
    """
    # A worker serves one client at a time, so that it would not answer while the old child is connected.
    endpoints = tuple(transition.load.plan.used_endpoints)
    held = transition.state.child.plan.used_endpoints if transition.state.child is not None else {}
    transition.change_load(unchecked=tuple(each for each in endpoints if each in held))
    _greet_now(transition, tuple(each for each in endpoints if each not in held))


def _greet_now(transition: Transition, endpoints: tuple[str, ...]) -> None:
    if endpoints:
        transition.await_work(
            Step.GREETING, partial(effects.Greet, endpoints=endpoints, routes=transition.load.plan.routes)
        )
    else:
        _take_greetings(transition, {})


def _take_greetings(transition: Transition, greetings: Greetings) -> None:
    refused = refusal(greetings, transition.load.plan.used_endpoints)
    if refused is not None:
        conclude(transition, refused)
    # The point of no return: from here on the model loaded before is gone, even if the new one fails.
    elif transition.state.child is not None:
        transition.change_load(step=Step.REPLACING)
        transition.change(loaded=None, context_used=None)
        transition.stop_child()
    else:
        _start(transition)


def _start(transition: Transition) -> None:
    """Start the child that loads the model.

    If the previous child used some of the RPC workers, first check whether these answer.
    """
    unchecked = transition.load.unchecked
    if unchecked:
        transition.change_load(unchecked=())
        _greet_now(transition, unchecked)
        return
    # A number tells messages of this child from late ones of an earlier child (`machine._is_of_child`).
    load, number = transition.load, transition.number()
    assert load.request is not None
    transition.change_load(step=Step.LOADING)
    transition.change(child=Child(number, load.plan))
    without_api = transition.state.without_tensor_api
    transition.do(effects.StartChild(number, load.plan, load.request, without_api, load.asked.stall_limit_s))


def take_message(transition: Transition, message: AnyMessage) -> None:
    """Handle a message of the child that loads: its progress, the loaded model, or a failure."""
    load = transition.load
    if load.cancelled:
        return
    match message:
        case Hello():
            transition.change_child(greeted=True)
        case StageProgress():
            _take_progress(transition, message)
        case LoadedModel() if load.ending is None:
            _become_ready(transition, message)
        case AllocationFailure():
            _keep_ending(transition, out_of_memory_event(load.plan.rig, message))
        case Failure():
            _keep_ending(transition, failed_event(message))
        case Stopped():
            _keep_ending(transition, Cancelled(stage=message.stage))


def _take_progress(transition: Transition, message: StageProgress) -> None:
    mark = transition.load.progress.after(message)
    if mark is not None and transition.load.ending is None:
        transition.change_load(progress=mark)
        transition.report(mark.event(message.device))


def _keep_ending(transition: Transition, ending: LoadEnding) -> None:
    """Store the final event of the load (its ending), and stop the child.

    The event is reported after the child has ended: only then is its memory free for another attempt.
    """
    if transition.load.ending is None:
        transition.change_load(step=Step.ENDING, ending=ending)
        transition.stop_child()


def _become_ready(transition: Transition, message: LoadedModel) -> None:
    load = transition.load
    assert load.request is not None
    event = loaded_event(load.plan, message)
    transition.change(
        loaded=LoadedInfo(
            spec=load.asked.with_plan(load.plan),
            n_ctx=message.n_ctx,
            n_ctx_seq=message.n_ctx_seq,
            slots=message.slots,
            n_vocab=message.n_vocab,
            chat_template=message.chat_template,
            flash_attention=message.flash_attention,
            layer_devices=message.layer_devices,
            kv_devices=message.kv_devices,
            context=load.request.context,
            measured=event.devices,
            forecast=load.plan.forecast,
            elsewhere=event.elsewhere,
        ),
        context_used=None,
    )
    # An idle child is silent. It is watched again with the first request.
    transition.watch(False)
    _finish(transition, event)


def take_child_end(transition: Transition, outcome: ProcessOutcome, diagnose: Callable[[], None]) -> None:
    """Handle the end of a child during a load: the child that loads, or the child of the previous model.

    `diagnose`: called to find the cause if the child ended without reporting one.
    """
    load = transition.load
    match load.step:
        case Step.LOADING | Step.ENDING | Step.REPLACING if load.cancelled:
            _finish(transition, Cancelled(stage=load.progress.stage))
        case Step.LOADING | Step.ENDING if _can_do_without_tensor_api(transition, outcome):
            _load_without_tensor_api(transition)
        case Step.ENDING | Step.REPLACING if load.ending is not None:
            conclude(transition, load.ending)
        case Step.LOADING:
            diagnose()
        case Step.REPLACING if outcome.still_exists:
            # It holds the memory that the new layout needs.
            diagnose()
        case Step.REPLACING:
            _start(transition)
        case _:
            pass  # The model loaded before was lost (`State.lost`). The new load needs no child yet, and goes on.


def _can_do_without_tensor_api(transition: Transition, outcome: ProcessOutcome) -> bool:
    """Return whether the load failed in Metal's tensor API, and this session has not yet loaded without that API."""
    ending = transition.load.ending
    has_failed = ending is None or isinstance(ending, Failed)
    state = transition.state
    return has_failed and outcome.failed_in_tensor_api and not (state.without_tensor_api or state.closing)


def _load_without_tensor_api(transition: Transition) -> None:
    """Load the same layout again without Metal's tensor API. Later loads of this session do not use it either."""
    transition.change(without_tensor_api=True)
    transition.change_load(ending=None)
    transition.report(
        Fallback(
            message=tr(
                "The load failed in Metal's tensor API and is tried again without this API. Prompts may be "
                "processed more slowly; an update of macOS may help."
            )
        )
    )
    _report_beginning(transition)
    _greet(transition)


# ------------------------------------------------------------------ the end


def _note(transition: Transition, outcome: str, *, loaded: bool = True) -> None:
    """Set the outcome of the latest attempt to load a layout, unless it is already set.

    `outcome`: result of the attempt, as a sentence.
    `loaded`: whether a load of the layout began; False if only its memory was forecast.
    """
    attempts = transition.load.attempts
    if attempts and not attempts[-1].outcome:
        transition.change_load(attempts=(*attempts[:-1], replace(attempts[-1], outcome=outcome, loaded=loaded)))


def _finish(transition: Transition, ending: LoadEnding, explained: inputs.Explained | None = None) -> None:
    """End the load and report its ending. No other function does that."""
    _note(transition, outcome_words(ending), loaded=transition.load.is_real)
    proposals = () if explained is None else explained.proposals
    # A failed load says that no model is loaded; a cancelled one leaves the model loaded before.
    lost = transition.state.lost if isinstance(ending, Cancelled) else None
    # Before a load that waits it would be taken for the ending of that load, which tells it in turn.
    reported = None if transition.state.waiting is not None else lost
    transition.change(
        load=None,
        lost=None if reported is lost else lost,
        last=LoadResult(transition.load.attempts, ending, proposals),
        has_failed=transition.state.child is None and (lost is not None or not isinstance(ending, Cancelled)),
    )
    # Requests that waited for the proposals get this ending (`machine._end_waiting`).
    if not transition.state.requests:
        transition.report(ending)
    if reported is not None:
        transition.report(reported)
