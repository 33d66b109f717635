"""Loads models: alone, beside loaded ones, or after other models were unloaded to free memory.

The user is asked before another model is unloaded, and before a layout is loaded that is forecast not to fit. With the
setting `reload_lost`, a model whose child process died is loaded again without a question.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from msgspec import Struct
from PySide6.QtCore import QObject, QTimer, Signal

from app.background import Background, Task
from app.load.load_questions import fit_question, load_question, override_question, with_proposal
from app.load.memory_return import MemoryReturn
from app.models.document import LayoutDocument
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.notices import Notice
from app.rig.lab import Lab
from app.rig.live_rig import LiveRig
from app.settings import Settings
from engine.base.cancellation import CancelToken
from engine.base.language import tr
from engine.base.values import replace
from engine.model.gguf.model_file import ModelFile
from engine.planning.fit.proposal import ALL_KINDS, Proposal
from engine.planning.fit.strategies.constraints import Constraints
from engine.planning.fit.unload_plan import UnloadPlan, plan_unloads
from engine.planning.layout.engine_parameters import used_devices
from engine.planning.plan.plan import Plan
from engine.runtime.session.load_spec import DEFAULT_RETRIES, LoadSpec, RetryPolicy
from widgets.library.load_question import LoadChoice, LoadDecision


class _LoadRequest(Struct, frozen=True):
    """A load of `plan` by `model` that was requested and has not started.

    `unloads`: the models to unload for this load, and the memory that is missing even after that.
    """

    model: OpenModel
    plan: Plan
    unloads: UnloadPlan


class Loader(QObject):
    """Loads models, one at a time, and asks the user before a load that does not fit. Calls return at once.

    `constraints_of`: returns the pinned layers of a model and the disabled devices. Layouts that are tried or proposed
    instead of the requested one respect them.
    """

    question_changed = Signal(object)  # LoadQuestion | None
    notice = Signal(Notice)
    load_asked = Signal()
    """Emitted when the user requests a load, before it is checked. Receivers may still replace the edited layout."""

    def __init__(
        self,
        models: OpenModels,
        document: LayoutDocument,
        live: LiveRig,
        lab: Lab,
        settings: Settings,
        background: Background,
        constraints_of: Callable[[ModelFile], Constraints],
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._models = models
        self._document = document
        self._live = live
        self._lab = lab
        self._settings = settings
        self._constraints_of = constraints_of
        self._proposing = background.latest()
        """Runs the search for a proposal (a layout that fits) while the question before a load is shown."""
        self._reloaded: set[OpenModel] = set()
        """Models that were loaded again automatically after a crash of their child, and have not answered since."""
        self._asked: _LoadRequest | None = None
        self._proposal: Proposal | None = None
        """A layout or setting that fits, for the question that is shown; None if none is known."""
        self.memory_return = MemoryReturn(models, live, self)
        models.current_changed.connect(self._on_current_changed)
        models.changed.connect(self._on_models_changed)
        document.preview_changed.connect(self._on_edited)
        document.edit_settled.connect(self._on_edited)
        models.added.connect(self._follow)
        for model in models.all:
            self._follow(model)

    @property
    def is_waiting(self) -> bool:
        """Whether a load waits until the memory of unloaded models is free."""
        return self.memory_return.is_waiting

    def load(self) -> None:
        """Load the edited layout of the current model. If the model is answering, the answer is stopped first.

        The engine checks the new layout before it replaces the loaded one. Other models stay loaded if all fit.
        """
        self.load_asked.emit()
        # What to ask is decided by the plan, which may still be that of an earlier edit.
        self._document.when_forecast(self._load)

    def _load(self) -> None:
        current, plan = self._models.current, self._document.plan
        if plan is None:
            return
        busy = self.memory_return.waiting or self._models.loading
        if busy is not None:
            if busy is not current:
                self._show(
                    tr(
                        "{name} is being loaded. Wait until it is loaded or cancel that load, then load {other}.",
                        name=busy.name,
                        other=plan.model.name,
                    )
                )
            return
        loaded = current.loading.loaded
        if loaded is not None and not loaded.differs_from(plan.edit):
            return
        # Before `_obstacle`, which refuses the same violations.
        if self._offers_without_overrides(current, plan):
            return
        obstacle = self._obstacle(plan)
        if obstacle:
            self._show(obstacle)
            return
        self._decide(self._request_of(current, plan))

    def obstacle(self, plan: Plan) -> str:
        """Return the reason why `plan` cannot be loaded now, with a remedy; empty if a load can be tried."""
        return self._obstacle(plan)

    def unloads_for(self, model: OpenModel, plan: Plan) -> UnloadPlan:
        """Return the models to unload before `plan` is loaded, and the memory that is missing even after that.

        `model`: the open model that loads `plan`. Its own memory counts as free.
        """
        return self._request_of(model, plan).unloads

    def load_unasked(self, model: OpenModel, plan: Plan) -> None:
        """Load `plan` for a client of the API server, without questions.

        Other models are unloaded first if the load needs their memory. The caller must make sure that no load runs or
        waits, and that no model to unload is answering.
        """
        self._go_on(self._request_of(model, plan), LoadDecision.UNLOAD)

    def load_without_unload(self, model: OpenModel, plan: Plan) -> None:
        """Load `plan` without questions, and keep all loaded models loaded.

        The caller must make sure that no load runs or waits. If memory runs out although the forecast fits, the load
        tries other layouts or fails.
        """
        self._go_on(self._request_of(model, plan), LoadDecision.BESIDE)

    def reload(self, model: OpenModel) -> None:
        """Load `model` again with the layout and settings of its last load.

        Lab workers (RPC workers on this computer) that have stopped are restarted first.
        """
        if self._may_reload(model):
            # Asked again then: another load may have begun while the workers were started.
            self._lab.when_running(lambda: model.loading.reload() if self._may_reload(model) else None)

    def _may_reload(self, model: OpenModel) -> bool:
        busy = self._models.loading
        if busy is None and not self.is_waiting:
            return True
        if busy is not model:
            self._show(
                tr(
                    "Another model is being loaded. Wait until it is loaded or cancel that load, then reload {name}.",
                    name=model.name,
                )
            )
        return False

    def answer(self, choice: LoadChoice) -> None:
        """Carry out the user's answer to the question that is shown before a load."""
        request, proposal = self._asked, self._proposal
        self._withdraw()
        if choice.remember:
            self._settings.without_room = choice.answer
        if request is None:
            return
        if choice.answer is not LoadDecision.PROPOSAL:
            self._go_on(request, choice.answer)
        elif proposal is not None:
            self._document.replace(proposal.edit, proposal.text)
            self.load()

    def ask_again(self) -> None:
        """Delete the user's stored answer for loads beside other models, so that the next such load asks again."""
        self._settings.without_room = None
        self.notice.emit(
            Notice(tr("You will be asked if a model does not fit together with the loaded models"), bad=False)
        )

    def cancel(self) -> None:
        """Remove a question about a load, and cancel the load that runs or waits for memory."""
        self._withdraw()
        if self.is_waiting:
            self.memory_return.cancel()
        else:
            self._models.current.loading.cancel()

    def close(self) -> None:
        """Cancel the search for a layout that fits, and the load that waits for memory."""
        self.memory_return.cancel()
        self._proposing.cancel()

    def _follow(self, model: OpenModel) -> None:
        model.loading.lost_changed.connect(partial(self._on_lost_changed, model))
        model.loading.answered.connect(lambda _event: self._reloaded.discard(model))

    def _on_lost_changed(self, model: OpenModel, lost: bool) -> None:
        """Load `model` again after its child has died, if other layouts may be tried or `reload_lost` is on.

        With the setting `reload_lost`, a model that crashes again before its first answer is not loaded another time.
        So crashes do not repeat forever.
        `lost`: True if the child has just died; False if the model can no longer be loaded again.
        """
        if lost and model.loading.steps_back:
            # Without asking, as a load steps back: the layout did not fit.
            QTimer.singleShot(0, self, partial(self.reload, model))
        elif lost and self._settings.reload_lost and model not in self._reloaded:
            self._reloaded.add(model)
            # Not in the middle of the signals that report the loss.
            QTimer.singleShot(0, self, partial(self.reload, model))

    # ------------------------------------------------------------------ deciding

    def _decide(self, request: _LoadRequest) -> None:
        answer = self._settings.without_room if request.unloads.victims else LoadDecision.BESIDE
        if answer is None or self._would_fail(request) or not _is_decided_by(request.unloads, answer):
            self._ask(request)
        else:
            self._go_on(request, answer)

    def _request_of(self, model: OpenModel, plan: Plan) -> _LoadRequest:
        """Return a request to load `plan`, with the models to unload and the memory that is missing even after that."""
        # The own old load ends first, so its memory counts as free.
        replaced = () if model.held is None else (model.held,)
        others = [held for held in self._models.held if held not in replaced]
        unloads = plan_unloads(plan.forecast, others, lambda leaving: self._live.rig_without((*replaced, *leaving)))
        return _LoadRequest(model, plan, unloads)

    def _would_fail(self, request: _LoadRequest) -> bool:
        """Return whether the load is forecast to fail even after the models in `request.unloads` are unloaded.

        False if the settings allow other layouts to be tried: the engine then keeps the loaded model until it has found
        a plan that fits.
        """
        return bool(request.unloads.still_short) and not self._settings.steps_back

    def _ask(self, request: _LoadRequest) -> None:
        self._asked, self._proposal = request, None
        name = request.plan.model.name
        self._proposing.cancel()
        if request.unloads.victims:
            # Its buttons stay where they are: nothing is looked for meanwhile.
            self.question_changed.emit(load_question(request.unloads, name, self._models.now_s()))
            return
        question = fit_question(request.unloads, name, is_loaded=request.model.loading.loaded is not None)
        # Asked at once; the proposal follows when it is found.
        self.question_changed.emit(question)

        def propose(found: Proposal | None) -> None:
            self._proposal = found
            self.question_changed.emit(with_proposal(question, found))

        constraints = self._constraints_of(request.plan.model).kept_by(request.plan.edit.layout)

        def search(task: Task[None]) -> Proposal | None:
            # A token of this request: another question cancels the search.
            return _best_proposal(request.plan, constraints, task.token)

        self._proposing.run("Finding what fits", search, propose, lambda _error: propose(None), quiet=True)

    def _offers_without_overrides(self, model: OpenModel, plan: Plan) -> bool:
        """Show the question whether to drop overrides that the split mode does not support, if there are any.

        Return whether the question is shown.
        """
        if not plan.violations:
            return False
        from engine.planning.fit.mode_layouts import without_refused_overrides

        found = without_refused_overrides(plan.with_own_tables())
        # The load needs a layout that breaks no other rule either.
        if found is None or plan.with_edit(found.edit).violations:
            return False
        self._asked, self._proposal = _LoadRequest(model, plan, UnloadPlan()), found
        self.question_changed.emit(override_question(plan.violations[0].message, found))
        return True

    def _go_on(self, request: _LoadRequest, answer: LoadDecision) -> None:
        if answer is LoadDecision.CANCEL:
            return
        if answer is LoadDecision.UNLOAD:
            # They go for the sake of another: their next question brings them back.
            self._models.park(victim.key for victim in request.unloads.victims)
        # Drivers return memory some time after the process has ended.
        self.memory_return.then(request.model, lambda: self._begin(request))

    def _begin(self, request: _LoadRequest) -> None:
        plan, now = request.plan, self._document.plan
        if now is not None and self._models.current is request.model and now.edit == plan.edit:
            plan = now  # With the devices as they are after the wait.
        # What others gave back just now would be taken for what this load did not take.
        learns = request.plan.report.probe_only is None and not request.unloads.victims
        request.model.loading.load(self._spec(plan), forecast_is_whole=learns)

    def _spec(self, plan: Plan) -> LoadSpec:
        return LoadSpec(plan, self._retry(plan), self._settings.stall_limit_s)

    def _retry(self, plan: Plan) -> RetryPolicy:
        constraints = self._constraints_of(plan.model).kept_by(plan.edit.layout)
        # Pins that the layout breaks are left out: a layer that was moved by hand is not pinned any more.
        return RetryPolicy(DEFAULT_RETRIES if self._settings.steps_back else 0, constraints)

    def _obstacle(self, plan: Plan) -> str:
        """Return the reason why `plan` cannot be loaded, with a remedy; empty if a load can be tried.

        Reasons are broken rules of llama.cpp, stopped lab workers (RPC workers on this computer), and devices of a rig
        file that this machine lacks.
        """
        if plan.violations:
            first = plan.violations[0]
            return f"{first.message} {first.remedy}"
        used = used_devices(plan.edit.layout)
        missing = [device for device in self._live.missing_devices if device in used]
        stopped = [device for device in self._live.stopped_devices if device in used]
        if stopped:
            return tr(
                "{names} stopped. Choose Devices > Restart Lab Workers, or move the layers to other devices.",
                names=", ".join(stopped),
            )
        if not missing:
            return ""
        return tr(
            "The rig file has {names}, which this computer does not have. You can plan the layout, but not load it. "
            "Devices > Refresh returns to the devices of this computer.",
            names=", ".join(missing),
        )

    # ------------------------------------------------------------------ telling

    def _on_current_changed(self, _model: OpenModel) -> None:
        self._withdraw()

    def _on_models_changed(self) -> None:
        """Update the question to the user about a load after a loaded model started to answer or was unloaded.

        Remove the question if the load fits now.
        """
        asked = self._asked
        # A question about overrides does not depend on memory.
        if asked is None or asked.plan.violations:
            return
        request = self._request_of(asked.model, asked.plan)
        if not request.unloads.victims and not self._would_fail(request):
            self._withdraw()
        elif request.unloads != asked.unloads:
            self._ask(request)

    def _on_edited(self) -> None:
        """Remove the question to the user about a load if model, layout or settings have changed since it was shown."""
        if self._asked is None:
            return
        plan, document = self._asked.plan, self._document
        # Another file may have replaced a blank model: the open model is the same, and the edits may be equal.
        if document.model is not plan.model or document.edit != plan.edit:
            self._withdraw()

    def _withdraw(self) -> None:
        if self._asked is not None:
            self._asked = self._proposal = None
            self._proposing.cancel()
            self.question_changed.emit(None)

    def _show(self, text: str) -> None:
        self.notice.emit(Notice(text))


def _best_proposal(plan: Plan, constraints: Constraints, token: CancelToken) -> Proposal | None:
    """Return the proposal that changes `plan` least and unloads no other models; None if there is none.

    `constraints`: limits for the layouts that are searched, such as pinned layers.
    """
    # The searches need much that the window's start can do without.
    from engine.planning.fit.proposals import best_by_forecast
    from engine.planning.fit.strategies.constraints import SearchLimit

    kinds = tuple(kind for kind in ALL_KINDS if kind != "unload")
    return best_by_forecast(plan.with_own_tables(), replace(constraints, watch=SearchLimit(token)), kinds)


def _is_decided_by(unloads: UnloadPlan, answer: LoadDecision) -> bool:
    """Return whether the user's stored `answer` decides this load, so that no question is shown.

    `answer`: UNLOAD decides if no model to unload is answering. BESIDE decides if the load needs no RPC worker that a
    loaded model uses. Without a stored answer the user is always asked.
    `unloads`: the models to unload, and the needed RPC workers that loaded models use.
    """
    if answer is LoadDecision.UNLOAD:
        return not any(victim.is_busy for victim in unloads.victims)
    return answer is LoadDecision.BESIDE and not unloads.workers
