"""Loads the current model: alone, beside others, or in the place of one that has to be unloaded.

People are asked before another model is unloaded, and before what is loaded of a model is replaced by a layout that is
forecast not to fit. A model that was lost is loaded again by itself, if people chose that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from PySide6.QtCore import QObject, QTimer, Signal

from app.background import Background, Task
from app.load.memory_return import MemoryReturn
from app.load.room import Room, find_room, fit_question, load_question, with_proposal
from app.models.document import LayoutDocument
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.notices import Notice
from app.rig.live_rig import LiveRig
from app.settings import Settings
from engine.base.cancellation import CancelToken
from engine.base.language import tr
from engine.model.gguf.model_file import ModelFile
from engine.planning.fit.proposal import ALL_KINDS, Proposal
from engine.planning.fit.strategies.constraints import Constraints
from engine.planning.layout.engine_parameters import used_devices
from engine.planning.plan.plan import Plan
from engine.runtime.session.load_order import DEFAULT_RETRIES, LoadOrder, RetryPolicy
from widgets.library.load_question import LoadAnswer, LoadChoice


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A load that was asked for and has not begun."""

    model: OpenModel
    plan: Plan
    room: Room


class Loader(QObject):
    """One load at a time. Calls return at once. `constraints_of` tells what is pinned of a model, and which devices are
    off: that holds for layouts that are tried or proposed in the place of the one that was asked for."""

    question_changed = Signal(object)  # LoadQuestion | None
    notice = Signal(Notice)

    def __init__(
        self,
        models: OpenModels,
        document: LayoutDocument,
        live: LiveRig,
        settings: Settings,
        background: Background,
        constraints_of: Callable[[ModelFile], Constraints],
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._models = models
        self._document = document
        self._live = live
        self._settings = settings
        self._constraints_of = constraints_of
        self._proposing = background.latest()
        """The search for what would fit instead of what is asked about."""
        self._reloaded: set[OpenModel] = set()
        """Lost models that were loaded again by themselves and have not answered since."""
        self._asked: _Wanted | None = None
        self._proposal: Proposal | None = None
        """What would fit instead of what is asked about, where that is known."""
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
        """Whether a load waits for memory to come back."""
        return self.memory_return.is_waiting

    def load(self) -> None:
        """Load the edited layout of the current model. An answer that it writes is stopped first.

        Its own old load is replaced, once the layout has been checked; other models stay where there is room.
        """
        self._document.when_forecast(self._load)

    def _load(self) -> None:
        current, plan = self._models.current, self._document.plan
        if plan is None:
            return
        busy = self.memory_return.waiting or self._models.loading
        if busy is not None:
            if busy is not current:
                self._say(
                    tr(
                        "{name} is being loaded. Load {name2} when that has ended, or cancel it.",
                        name=busy.name,
                        name2=plan.model.name,
                    )
                )
            return
        loaded = current.loading.loaded
        if loaded is not None and not loaded.differs_from(plan.edit):
            return
        obstacle = self._obstacle(plan)
        if obstacle:
            self._say(obstacle)
            return
        self._decide(self._wanted(current, plan))

    def reload(self, model: OpenModel) -> None:
        """Load `model` again as it was before it was lost."""
        busy = self._models.loading
        if busy is None and not self.is_waiting:
            model.loading.reload()
        elif busy is not model:
            self._say(
                tr("Another load is under way. Reload {name} when that has ended, or cancel it.", name=model.name)
            )

    def answer(self, choice: LoadChoice) -> None:
        """Go on with the load that was asked about."""
        wanted, proposal = self._asked, self._proposal
        self._withdraw()
        if choice.remember:
            self._settings.without_room = choice.answer
        if wanted is None:
            return
        if choice.answer is not LoadAnswer.PROPOSAL:
            self._go_on(wanted, choice.answer)
        elif proposal is not None:
            self._document.replace(proposal.edit, proposal.text)
            self.load()

    def ask_again(self) -> None:
        """Forget the answer that was to count from then on."""
        self._settings.without_room = None
        self.notice.emit(Notice(tr("You will be asked when a model does not fit beside others"), bad=False))

    def cancel(self) -> None:
        """End the load that waits or runs."""
        self._withdraw()
        if self.is_waiting:
            self.memory_return.cancel()
        else:
            self._models.current.loading.cancel()

    def close(self) -> None:
        """Look for nothing and begin nothing any more."""
        self.memory_return.cancel()
        self._proposing.cancel()

    def _follow(self, model: OpenModel) -> None:
        model.loading.lost_changed.connect(partial(self._on_lost_changed, model))
        model.loading.answered.connect(lambda _event: self._reloaded.discard(model))

    def _on_lost_changed(self, model: OpenModel, lost: bool) -> None:
        """Load a lost model again by itself: once, until it has answered again."""
        if lost and self._settings.reload_lost and model not in self._reloaded:
            self._reloaded.add(model)
            # Not in the middle of the signals that report the loss.
            QTimer.singleShot(0, self, partial(self.reload, model))

    # ------------------------------------------------------------------ deciding

    def _decide(self, wanted: _Wanted) -> None:
        answer = self._settings.without_room if wanted.room.victims else LoadAnswer.BESIDE
        if self._would_end_for_nothing(wanted):
            self._ask(wanted)
        elif answer is not None and _may_go_unasked(wanted.room, answer):
            self._go_on(wanted, answer)
        else:
            self._ask(wanted)

    def _wanted(self, model: OpenModel, plan: Plan) -> _Wanted:
        """Return the load of `plan` with what it asks of the models that are loaded now."""
        replaced = () if model.held is None else (model.held,)
        others = [held for held in self._models.held if held not in replaced]
        room = find_room(plan.forecast, others, lambda leaving: self._live.rig_without((*replaced, *leaving)))
        return _Wanted(model, plan, room)

    def _would_end_for_nothing(self, wanted: _Wanted) -> bool:
        """Whether what is loaded of the model would go for a layout that then most likely does not load.

        A load that may step back keeps it until the engine has a plan that fits.
        """
        is_loaded = wanted.model.loading.loaded is not None
        return is_loaded and not wanted.room.victims and bool(wanted.room.short) and not self._settings.steps_back

    def _ask(self, wanted: _Wanted) -> None:
        self._asked, self._proposal = wanted, None
        name = wanted.plan.model.name
        self._proposing.cancel()
        if wanted.room.victims:
            # Its buttons stay where they are: nothing is looked for meanwhile.
            self.question_changed.emit(load_question(wanted.room, name, self._models.now_s()))
            return
        question = fit_question(wanted.room, name)
        self.question_changed.emit(question)

        def propose(found: Proposal | None) -> None:
            self._proposal = found
            self.question_changed.emit(with_proposal(question, found))

        constraints = self._constraints_of(wanted.plan.model).kept_by(wanted.plan.edit.layout)

        def search(task: Task[None]) -> Proposal | None:
            return _best_proposal(wanted.plan, constraints, task.token)

        self._proposing.run("Finding what fits", search, propose, lambda _error: propose(None), quiet=True)

    def _go_on(self, wanted: _Wanted, answer: LoadAnswer) -> None:
        if answer is LoadAnswer.CANCEL:
            return
        if answer is LoadAnswer.UNLOAD:
            for victim in wanted.room.victims:
                model = self._models.find(victim.key)
                if model is not None:
                    model.loading.unload()
        self.memory_return.then(wanted.model, lambda: self._begin(wanted))

    def _begin(self, wanted: _Wanted) -> None:
        plan, now = wanted.plan, self._document.plan
        if now is not None and self._models.current is wanted.model and now.edit == plan.edit:
            plan = now  # With the devices as they are after the wait.
        # What others gave back just now would be taken for what this load did not take.
        learns = wanted.plan.report.probe_only is None and not wanted.room.victims
        wanted.model.loading.load(LoadOrder(plan, self._retry(plan)), forecast_is_whole=learns)

    def _retry(self, plan: Plan) -> RetryPolicy:
        constraints = self._constraints_of(plan.model).kept_by(plan.edit.layout)
        return RetryPolicy(DEFAULT_RETRIES if self._settings.steps_back else 0, constraints)

    def _obstacle(self, plan: Plan) -> str:
        """Return why `plan` cannot be loaded here, with a remedy; empty if it can be tried."""
        if plan.violations:
            first = plan.violations[0]
            return f"{first.message} {first.remedy}"
        used = used_devices(plan.edit.layout)
        missing = [device for device in self._live.missing_devices if device in used]
        if not missing:
            return ""
        return tr(
            "This machine does not have {names} of the rig file: the layout can be planned, not "
            "loaded. Devices > Refresh goes back to what is here.",
            names=", ".join(missing),
        )

    # ------------------------------------------------------------------ telling

    def _on_current_changed(self, _model: OpenModel) -> None:
        self._withdraw()

    def _on_models_changed(self) -> None:
        """Ask anew when a model that is in the way began to answer, or has gone, or nothing is loaded any more."""
        asked = self._asked
        if asked is None:
            return
        wanted = self._wanted(asked.model, asked.plan)
        if not wanted.room.victims and not self._would_end_for_nothing(wanted):
            self._withdraw()
        elif wanted.room != asked.room:
            self._ask(wanted)

    def _on_edited(self) -> None:
        """A question is about one edit; about another one it would be another question."""
        if self._asked is not None and self._document.edit != self._asked.plan.edit:
            self._withdraw()

    def _withdraw(self) -> None:
        if self._asked is not None:
            self._asked = self._proposal = None
            self._proposing.cancel()
            self.question_changed.emit(None)

    def _say(self, text: str) -> None:
        self.notice.emit(Notice(text))


def _best_proposal(plan: Plan, constraints: Constraints, token: CancelToken) -> Proposal | None:
    """Return the proposal for `plan` that keeps most of it; unloading other models is a question of its own."""
    # The searches need much that the window's start can do without.
    from engine.planning.fit.proposals import best_by_forecast
    from engine.planning.fit.strategies.constraints import Watch

    kinds = tuple(kind for kind in ALL_KINDS if kind != "unload")
    return best_by_forecast(plan.with_own_tables(), replace(constraints, watch=Watch(token)), kinds)


def _may_go_unasked(room: Room, answer: LoadAnswer) -> bool:
    """Whether a remembered answer will do. An answer under way is never ended, a worker never shared, unasked."""
    if answer is LoadAnswer.UNLOAD:
        return not any(victim.is_busy for victim in room.victims)
    return answer is LoadAnswer.BESIDE and not room.workers
