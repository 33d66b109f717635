"""A load, step by step: from what was asked for to its one ending, over as many layouts as its retries allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec

from engine.base.language import tr
from engine.planning.fit.step_back import NextLayout, Tried, layout_words, shortage_words
from engine.planning.plan.plan import Plan
from engine.runtime.protocol.messages import (
    AllocationFailure,
    AnyMessage,
    Failure,
    Hello,
    LoadedModel,
    StageProgress,
    Stop,
    Stopped,
)
from engine.runtime.session import effects, inputs
from engine.runtime.session.events import Attempt, Cancelled, Failed, LoadEnding, OutOfMemory
from engine.runtime.session.inputs import Greetings
from engine.runtime.session.load_order import FIRST_REASON, LoadAttempt, LoadOrder, outcome_words, refusal_of
from engine.runtime.session.reports import failed_event, loaded_event, out_of_memory_event, refusal
from engine.runtime.session.state import (
    Child,
    LoadedInfo,
    LoadResult,
    LoadRun,
    StageMark,
    Step,
    Turn,
    out_of_memory_ending,
)

INTERNAL_FAILURE = Failed(kind="internal", message=tr("An internal error ended this. The log has the details."))


def begin(turn: Turn, order: LoadOrder) -> None:
    """Begin a load; nothing else runs."""
    turn.change(load=LoadRun(order, order.plan), last=None, has_failed=False)
    _tell_beginning(turn)
    _prepare(turn)


def cancelled_before_it_began() -> Cancelled:
    """Return the ending of a load that only waited."""
    return Cancelled(stage="header")


def cancel(turn: Turn) -> None:
    """End the load that runs, if there is one. What waits for a process of ours ends when that is gone."""
    load = turn.state.load
    if load is None or load.cancelled:
        return
    turn.change_load(cancelled=True)
    if load.ticket is not None:
        turn.do(effects.Abandon(load.ticket))
    if load.step in (Step.PREPARING, Step.CHOOSING, Step.GREETING):
        _finish(turn, Cancelled(stage=load.mark.stage))
    elif load.step is Step.LOADING:
        turn.send(Stop())
        turn.stop_child()


def conclude(turn: Turn, ending: LoadEnding) -> None:
    """The layout that was tried for real has come to this; its child is gone. Another may follow."""
    load = turn.load
    if load.cancelled:
        _finish(turn, Cancelled(stage=load.mark.stage))
    elif not isinstance(ending, OutOfMemory):
        _finish(turn, ending)
    else:
        tried = Tried(load.plan.edit.layout, load.plan.forecast, refusal_of(ending), load.tenths)
        turn.change_load(ending=ending)
        _note(turn, outcome_words(ending))
        _choose_after(turn, tried)


def give_up(turn: Turn) -> None:
    """End the load after an error of ours."""
    load = turn.load
    if load.step is Step.EXPLAINING:
        _finish(turn, out_of_memory_ending(load))
    elif turn.state.child is not None and load.step in (Step.LOADING, Step.ENDING, Step.REPLACING):
        step = load.step if load.step is Step.REPLACING else Step.ENDING
        turn.change_load(step=step, ending=load.ending or INTERNAL_FAILURE)
        turn.stop_child()
    else:
        _finish(turn, INTERNAL_FAILURE)


# ------------------------------------------------------------------ what work has found


def take_work(turn: Turn, answer: inputs.Work) -> None:
    """Go on with what the load has waited for; what it does not wait for comes too late and is nothing."""
    if not turn.take_answer(answer.ticket):
        return
    match answer:
        case inputs.Prepared():
            _take_prepared(turn, answer)
        case inputs.Refused():
            conclude(turn, answer.ending)
        case inputs.Forecasted():
            _take_forecast(turn, answer)
        case inputs.Chosen():
            _take_choice(turn, answer.found)
        case inputs.Greeted():
            _take_greetings(turn, answer.greetings)
        case inputs.Explained():
            ending = msgspec.structs.replace(
                out_of_memory_ending(turn.load),
                proposals=tuple(each.text for each in answer.proposals),
                holders=answer.holders,
            )
            _finish(turn, ending, answer)
        case inputs.WorkFailed():
            give_up(turn)


def _prepare(turn: Turn) -> None:
    turn.await_work(Step.PREPARING, partial(effects.Prepare, plan=turn.load.plan))


def _take_prepared(turn: Turn, answer: inputs.Prepared) -> None:
    load = turn.load
    turn.change_load(plan=answer.plan, base=load.base or answer.plan, request=answer.request)
    if load.is_real or not load.asked.retry.retries:
        _greet(turn)
    else:
        _try(turn, answer.plan, FIRST_REASON)


def _try(turn: Turn, plan: Plan, reason: str, tenths: int = 0) -> None:
    """Begin with a layout: what does the engine say?"""
    attempt = LoadAttempt(len(turn.load.attempts) + 1, plan.edit.layout, reason)
    turn.change_load(plan=plan, tenths=tenths, is_real=False, attempts=(*turn.load.attempts, attempt))
    turn.tell(Attempt(number=attempt.number, layout=layout_words(plan.edit.layout), reason=reason))
    held = turn.state.child
    rig_endpoints = {device.endpoint for device in plan.rig.devices if device.endpoint is not None}
    can_ask = held is None or held.plan.used_endpoints.keys().isdisjoint(rig_endpoints)
    turn.await_work(Step.FORECASTING, partial(effects.Forecast, plan=plan, ask_engine=can_ask))


def _take_forecast(turn: Turn, answer: inputs.Forecasted) -> None:
    if turn.load.cancelled:
        _note(turn, tr("Cancelled."), loaded=False)
        _finish(turn, Cancelled(stage="fit"))
        return
    turn.change_load(plan=answer.plan)
    if answer.fits:
        _load_really(turn)
    else:
        _choose_after(turn, Tried(answer.plan.edit.layout, answer.plan.forecast, tenths=turn.load.tenths))


def _choose_after(turn: Turn, tried: Tried) -> None:
    """Look for another layout after one that did not fit, where one more may be tried."""
    load = turn.load
    turn.change_load(latest=tried)
    history = (*load.tried, tried)
    if load.attempts and len(load.attempts) <= load.asked.retry.retries:
        turn.await_work(Step.CHOOSING, partial(effects.Choose, asked=load.asked.with_plan(_base(turn)), tried=history))
    else:
        _take_choice(turn, None)


def _take_choice(turn: Turn, found: NextLayout | None) -> None:
    load, tried = turn.load, turn.load.latest
    assert tried is not None
    only_forecast = tried.refusal is None
    if found is None and only_forecast:
        # A forecast refuses nothing: where no other layout is left to try, this one is loaded all the same.
        _load_really(turn)
        return
    turn.change_load(latest=None, tried=(*load.tried, tried))
    if found is None:
        _explain(turn)
        return
    if only_forecast:
        _note(
            turn,
            tr("Not loaded: the engine's plan is short on {shortage}.", shortage=shortage_words(tried.rows)),
            loaded=False,
        )
    outcome = turn.load.attempts[-1].outcome
    turn.change_load(request=None, ending=None)
    _try(
        turn,
        _base(turn).with_layout(found.layout),
        tr("{outcome} Moved: {change}.", outcome=outcome, change=found.change),
        found.tenths,
    )


def _explain(turn: Turn) -> None:
    load = turn.load
    explain = partial(
        effects.Explain,
        plan=_base(turn),
        tried=load.tried,
        ending=out_of_memory_ending(load),
        constraints=load.asked.retry.constraints,
    )
    turn.await_work(Step.EXPLAINING, explain)


def _base(turn: Turn) -> Plan:
    """Return the plan that was asked for, as it may be planned with."""
    assert turn.load.base is not None
    return turn.load.base


# ------------------------------------------------------------------ one layout, for real


def _tell_beginning(turn: Turn) -> None:
    for mark in (StageMark("header"), StageMark("fit")):
        turn.change_load(mark=mark)
        turn.tell(mark.progress())


def _load_really(turn: Turn) -> None:
    _tell_beginning(turn)
    turn.change_load(is_real=True)
    if turn.load.request is None:
        _prepare(turn)
    else:
        _greet(turn)


def _greet(turn: Turn) -> None:
    """Ask the layout's workers; those that what is loaded holds serve nobody else, and are asked after its end."""
    endpoints = tuple(turn.load.plan.used_endpoints)
    held = turn.state.child.plan.used_endpoints if turn.state.child is not None else {}
    turn.change_load(unchecked=tuple(each for each in endpoints if each in held))
    _greet_now(turn, tuple(each for each in endpoints if each not in held))


def _greet_now(turn: Turn, endpoints: tuple[str, ...]) -> None:
    if endpoints:
        turn.await_work(Step.GREETING, partial(effects.Greet, endpoints=endpoints, routes=turn.load.plan.routes))
    else:
        _take_greetings(turn, {})


def _take_greetings(turn: Turn, greetings: Greetings) -> None:
    refused = refusal(greetings, turn.load.plan.used_endpoints)
    if refused is not None:
        conclude(turn, refused)
    elif turn.state.child is not None:
        turn.change_load(step=Step.REPLACING)
        turn.change(loaded=None, context_used=None)
        turn.stop_child()
    else:
        _start(turn)


def _start(turn: Turn) -> None:
    """Start the child, once nothing is left to be asked."""
    unchecked = turn.load.unchecked
    if unchecked:
        turn.change_load(unchecked=())
        _greet_now(turn, unchecked)
        return
    load, number = turn.load, turn.number()
    assert load.request is not None
    turn.change_load(step=Step.LOADING)
    turn.change(child=Child(number, load.plan))
    turn.do(effects.StartChild(number, load.plan, load.request))


def take_message(turn: Turn, message: AnyMessage) -> None:
    """Take what the load's own child says."""
    load = turn.load
    if load.cancelled:
        return
    match message:
        case Hello():
            turn.change_child(greeted=True)
        case StageProgress():
            _take_progress(turn, message)
        case LoadedModel() if load.ending is None:
            _become_ready(turn, message)
        case AllocationFailure():
            _keep_ending(turn, out_of_memory_event(load.plan.rig, message))
        case Failure():
            _keep_ending(turn, failed_event(message))
        case Stopped():
            _keep_ending(turn, Cancelled(stage=message.stage))


def _take_progress(turn: Turn, message: StageProgress) -> None:
    mark = turn.load.mark.after(message)
    if mark is not None and turn.load.ending is None:
        turn.change_load(mark=mark)
        turn.tell(mark.progress(message.device))


def _keep_ending(turn: Turn, ending: LoadEnding) -> None:
    """Keep the child's last word on this load; it is told when the child's memory is free again."""
    if turn.load.ending is None:
        turn.change_load(step=Step.ENDING, ending=ending)
        turn.stop_child()


def _become_ready(turn: Turn, message: LoadedModel) -> None:
    load = turn.load
    assert load.request is not None
    event = loaded_event(load.plan, message)
    turn.change(
        loaded=LoadedInfo(
            order=load.asked.with_plan(load.plan),
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
        ),
        context_used=None,
    )
    turn.watch(False)
    _finish(turn, event)


def take_child_end(turn: Turn, diagnose: Callable[[], None]) -> None:
    """The child has gone, ours or the one before; `diagnose` finds out why, where nothing was said."""
    load = turn.load
    match load.step:
        case Step.LOADING | Step.ENDING | Step.REPLACING if load.cancelled:
            _finish(turn, Cancelled(stage=load.mark.stage))
        case Step.ENDING | Step.REPLACING if load.ending is not None:
            conclude(turn, load.ending)
        case Step.LOADING:
            diagnose()
        case Step.REPLACING:
            _start(turn)
        case _:
            pass  # What was loaded before was lost meanwhile: that is no ending of this load.


# ------------------------------------------------------------------ the end


def _note(turn: Turn, outcome: str, *, loaded: bool = True) -> None:
    """Say of the latest attempt what became of it, if nothing is said yet."""
    attempts = turn.load.attempts
    if attempts and not attempts[-1].outcome:
        turn.change_load(attempts=(*attempts[:-1], replace(attempts[-1], outcome=outcome, loaded=loaded)))


def _finish(turn: Turn, ending: LoadEnding, explained: inputs.Explained | None = None) -> None:
    """End the load: the one place where that is told."""
    _note(turn, outcome_words(ending), loaded=turn.load.is_real)
    proposals = () if explained is None else explained.proposals
    turn.change(
        load=None,
        last=LoadResult(turn.load.attempts, ending, proposals),
        has_failed=turn.state.child is None and not isinstance(ending, Cancelled),
    )
    turn.tell(ending)
