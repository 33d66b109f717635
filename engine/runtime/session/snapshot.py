"""The public state of one open model, which may be read at any moment and in any thread."""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from engine.base.language import tr
from engine.base.values import ComparedWithout
from engine.planning.fit.proposal import Proposal
from engine.runtime.session.events import LoadEnding, Stage
from engine.runtime.session.load_spec import LoadAttempt, LoadSpec
from engine.runtime.session.state import LoadedInfo, LoadRun, RequestRun, State, Step
from engine.runtime.session.status import Phase


class Pending(Struct, frozen=True):
    """A load that has not ended.

    `spec`: the plan to load, with its rules for retries.
    `waits`: reason why it waits, as a clause without a full stop; empty if it does not wait.
    `cancelled`: whether it was cancelled and is ending.
    """

    spec: LoadSpec
    waits: str = ""
    cancelled: bool = False


class Snapshot(ComparedWithout, frozen=True):
    """The public state of a session at one moment.

    `number`: grows with each change, so that the later of two snapshots has the greater number.
    `loaded`: the loaded model; None if there is none.
    `pending`: the load that runs or waits; None if there is none.
    `stage`: stage of the running load; None if none runs.
    `attempts`: layouts tried by the running load, or by the last one if none runs.
    `ending`, `proposals`: result of the last load that has ended.
    `requests`: requests under way.
    `context_used`: number of tokens in the context at the end of the last answer; None before the first one. During an
    answer, the present number is in the events `Reading` and `Token`.
    `holds_child`: whether the child process still exists, and with it its memory.
    `is_unloading`: whether the model is being unloaded, or the session closed.
    """

    # Else a change of nothing else would be reported.
    not_compared: ClassVar[str] = "number"
    number: int = 0
    phase: Phase = Phase.STOPPED
    loaded: LoadedInfo | None = None
    pending: Pending | None = None
    stage: Stage | None = None
    attempts: tuple[LoadAttempt, ...] = ()
    ending: LoadEnding | None = None
    proposals: tuple[Proposal, ...] = ()
    requests: tuple[RequestRun, ...] = ()
    context_used: int | None = None
    holds_child: bool = False
    is_unloading: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether a model is loaded and no request is under way."""
        return self.phase is Phase.READY

    @property
    def context_size(self) -> int | None:
        """Context of one request in tokens (`n_ctx_seq`); None if no model is loaded."""
        return None if self.loaded is None else self.loaded.n_ctx_seq


def snapshot_of(state: State, number: int = 0) -> Snapshot:
    """Return the public part of `state` as a snapshot. `number`: the snapshot's number; it grows with each change."""
    load, last = state.load, state.last
    return Snapshot(
        number=number,
        phase=_phase(state),
        loaded=state.loaded,
        pending=_pending(state),
        stage=None if load is None or load.of_answer else load.progress.stage,
        attempts=load.attempts if load is not None else last.attempts if last is not None else (),
        ending=None if last is None else last.ending,
        proposals=() if last is None else last.proposals,
        requests=state.requests,
        context_used=state.context_used,
        holds_child=state.child is not None,
        is_unloading=state.unload_wanted or state.closing,
    )


def _phase(state: State) -> Phase:
    if state.load is not None:
        return _load_phase(state, state.load)
    if state.loss is not None or (state.child is not None and state.child.ending):
        return Phase.STOPPING
    if state.requests:
        return Phase.STOPPING if all(run.stopping for run in state.requests) else Phase.ANSWERING
    if state.child is not None:
        return Phase.READY
    return Phase.FAILED if state.has_failed else Phase.STOPPED


def _load_phase(state: State, load: LoadRun) -> Phase:
    if load.cancelled or load.step in (Step.ENDING, Step.DIAGNOSING, Step.EXPLAINING):
        return Phase.STOPPING
    # Until the hello the child only starts: Python and llama.cpp's libraries are being loaded.
    begun = load.step is Step.LOADING and state.child is not None and state.child.greeted
    return Phase.LOADING if begun else Phase.STARTING


def _pending(state: State) -> Pending | None:
    if state.waiting is not None:
        return Pending(state.waiting, _why_it_waits(state))
    if state.load is None or state.load.of_answer:
        return None
    waits = tr("the previous model is being unloaded") if state.load.step is Step.REPLACING else ""
    return Pending(state.load.asked, waits, state.load.cancelled)


def _why_it_waits(state: State) -> str:
    if state.load is not None:
        return tr("the previous load is being stopped")
    # Requests that outlast a stop are not being stopped; they are waited for.
    answers = [run for run in state.requests if not run.request.outlasts_stop]
    if answers:
        return tr("an answer is being stopped") if len(answers) == 1 else tr("answers are being stopped")
    if state.requests:
        return tr("the KV state of the conversation is being saved")
    if state.loss is not None:
        return tr("the RPC workers are being checked")
    return tr("the previous engine process is ending")
