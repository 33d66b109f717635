"""The offer to unload idle models, so that the current model fits without layers on the CPU."""

from __future__ import annotations

from PySide6.QtCore import QObject, Signal

from app.background import Background, Task
from app.load.loader import Loader
from app.models.document import LayoutDocument
from app.models.open_models import OpenModels
from app.models.replanner import available_of, has_moved
from app.models.speeds import SpeedRepository
from app.notices import Notices
from app.rig.live_rig import LiveRig
from app.settings import Settings
from engine.base.language import join_names, tr, tr_count
from engine.base.values import replace
from engine.devices.device import CPU_ID, Rig
from engine.model.gguf.model_file import FileIdentity
from engine.planning.fit.loaded_models import HeldModel
from engine.planning.fit.unload_plan import WholeWithout, choices_to_unload, find_whole, is_whole
from engine.planning.layout.layout import Layout
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.runtime.session.status import Phase
from widgets.common.delayed_call import DelayedCall
from widgets.library.load_question import LoadDecision
from widgets.library.unload_offer import UnloadOffer

SETTLE_MS = 400
"""Milliseconds without a change of layout, devices or loaded models before the search for an offer begins."""


class UnloadOffers(QObject):
    """Offers to unload idle models if the current model then fits without layers on the CPU; unloads them on request.

    The preference for idle models (`Settings.without_room`) decides. With "ask" the offer is shown. With "unload" the
    offer is shown, and each load accepts it. With "plan around them" there is no offer. Unloaded models are parked:
    their next question loads them again, with their saved KV state.
    """

    offer_changed = Signal(object)  # UnloadOffer | None

    def __init__(
        self,
        document: LayoutDocument,
        models: OpenModels,
        live: LiveRig,
        loader: Loader,
        speeds: SpeedRepository,
        settings: Settings,
        background: Background,
        notices: Notices,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._document, self._models, self._live = document, models, live
        self._loader, self._speeds, self._settings, self._notices = loader, speeds, settings, notices
        self._searching = background.latest()
        self._asked: tuple[object, ...] | None = None
        """Inputs of the last search (model, edit, loaded models, devices), to see whether they have changed.

        None if no search was made, or if its offer was dropped.
        """
        self._rig: Rig | None = None
        """The devices at the last search, as if the models that may be unloaded were not loaded."""
        self._found: WholeWithout | None = None
        self._edit: Edit | None = None
        self._timer = DelayedCall(self, self._search, SETTLE_MS)
        document.preview_changed.connect(self._on_changed)
        models.changed.connect(self._on_changed)
        models.current_changed.connect(self._on_changed)
        loader.load_asked.connect(self._on_load_asked)

    def accept(self) -> bool:
        """Accept the offer: unload its idle models until their next question, and use the offered layout.

        That layout has no layers on the CPU, and replaces the edited one. Return False, and unload nothing, if there is
        no offer or the offer is no longer valid.
        """
        # Before `_forget`, which clears the offer.
        found, edit, is_current = self._found, self._edit, self._is_current
        self._forget()
        if found is None or edit is None or not is_current:
            return False
        self._models.park(victim.key for victim in found.victims)
        made = replace(edit, layout=found.plan.edit.layout)
        # A layout that nobody has edited needs no undo step, and still counts as unedited afterwards.
        if self._document.is_untouched:
            self._document.restart(self._live.rig, made)
        else:
            self._document.replace(made, tr("use the memory of idle models"))
        names = ", ".join(victim.name for victim in found.victims)
        self._notices.show(
            tr_count(
                "Parked {names}; the next question to this model loads the model again.",
                "Parked {names}; the next question to one of these models loads that model again.",
                len(found.victims),
                names=names,
            )
        )
        return True

    def accept_and_load(self) -> None:
        """Accept the offer to unload idle models, then load the current model.

        Do nothing if the offer is no longer valid.
        """
        if self.accept():
            self._loader.load()

    def close(self) -> None:
        """Stop the search for offers. Called before the window closes."""
        self._timer.stop()
        self._searching.cancel()

    def _on_load_asked(self) -> None:
        if self._settings.without_room is LoadDecision.UNLOAD:
            self.accept()

    def _on_changed(self) -> None:
        if self._found is not None and not self._is_current:
            self._forget()
        self._timer.start()

    @property
    def _is_current(self) -> bool:
        """Whether the offer to unload idle models is still valid.

        It is valid while current model, layout, settings and devices are those for which it was made, the current model
        is not loaded, and the models to unload are still loaded and idle.
        """
        found, model = self._found, self._models.current
        if found is None or self._document.edit != self._edit or found.plan.rig.ids != self._live.rig.ids:
            return False
        if self._asked is None or self._asked[0] != model.key or model.loading.phase is not Phase.STOPPED:
            return False
        idle = {held.key for held in self._models.held if not held.is_busy}
        return all(victim.key in idle for victim in found.victims)

    def _forget(self) -> None:
        self._searching.cancel()
        self._asked = None
        if self._found is not None:
            self._found = self._edit = None
            self.offer_changed.emit(None)

    def _others(self) -> list[HeldModel]:
        """Return the loaded models other than the current one: candidates for the offer to unload idle models.

        Empty if no such offer can be made now, for example while the current model is loaded.
        """
        current, plan, document = self._models.current, self._document.plan, self._document
        if plan is None or current.loading.phase is not Phase.STOPPED or self._models.loading is not None:
            return []
        if document.is_dragging or document.is_behind or not document.has_first_layout:
            return []
        if self._settings.without_room is LoadDecision.BESIDE or is_whole(plan) or not plan.rig.devices:
            return []
        return [held for held in self._models.held if held.key != current.key]

    def _search(self) -> None:
        plan, others = self._document.plan, self._others()
        choices = choices_to_unload(others, self._live.rig_without) if others else ()
        if plan is None or not choices:
            self._forget()
            return
        # With all idle models gone: what they hold is not free now, whatever other programs take.
        rig = choices[-1][1]
        asked = (self._models.current.key, plan.edit, _known(others), rig.ids)
        if asked == self._asked and self._rig is not None and not has_moved(rig, available_of(self._rig)):
            return
        self._asked, self._rig = asked, rig
        own, speeds_of = plan.with_own_tables(), self._speeds.known_speeds

        def find_layout(on: Plan) -> Layout:
            # Imported here: the searches need much that the window's start can do without.
            from engine.planning.fit.strategies.fastest import initial_layout

            return initial_layout(on.memory, on.rig, on.edit.context, on.edit.side_files, speeds_of(on.rig))

        def work(_task: Task[None]) -> WholeWithout | None:
            return find_whole(own, choices, find_layout)

        def show(found: WholeWithout | None) -> None:
            if asked != self._asked:
                return
            # The key too: another model may have an equal edit.
            if self._models.current.key != asked[0] or self._document.edit != plan.edit:
                self._asked = None  # Searched again when this edit is shown again.
                return
            if found is None and self._found is None:
                return
            self._found, self._edit = found, plan.edit
            self.offer_changed.emit(None if found is None else offer_of(found))

        # After an error there is no offer, as if nothing had been found.
        self._searching.run("Looking for room", work, show, lambda _error: show(None), quiet=True)


def _known(others: list[HeldModel]) -> tuple[tuple[FileIdentity, bool], ...]:
    return tuple((held.key, held.is_busy) for held in others)


def offer_of(found: WholeWithout) -> UnloadOffer:
    """Return the offer to unload models as texts for people.

    `found`: the models to unload, and the layout that fits after that without layers on the CPU.
    """
    devices = ", ".join(name for name in found.plan.edit.layout.devices if name != CPU_ID)
    names = [victim.name for victim in found.victims]
    whom = names[0] if len(names) == 1 else tr("{count} models", count=len(names))
    text = tr_count(
        "This model fits wholly on {devices} if {names} is unloaded.",
        "This model fits wholly on {devices} if {names} are unloaded.",
        len(names),
        devices=devices,
        names=join_names(names),
    )
    return UnloadOffer(
        text=text,
        unload_text=tr("Unload {models}", models=whom),
        load_text=tr("Unload and Load"),
        tool_tip=tr("The KV states are saved. The next question to an unloaded model loads it again."),
    )
