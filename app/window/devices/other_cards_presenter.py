"""The presenter of Devices > Plan with Other Cards.

It compares memory and speed of the current model on this computer as it is, and with graphics cards added to it.
"""

from __future__ import annotations

from PySide6.QtWidgets import QWidget

from app.background import Background, Task
from app.models.document import LayoutDocument
from app.models.speeds import SpeedRepository
from app.rig.device_search import RigFiles
from app.rig.live_rig import LiveRig
from app.window.dialogs import OneDialog
from engine.base.errors import EngineError
from engine.base.language import tr
from engine.base.units import format_bytes
from engine.base.values import replace
from engine.devices.card_catalogue import CARDS, with_cards
from engine.devices.device import Rig
from engine.planning.fit.strategies.fastest import initial_layout
from engine.planning.plan.figures import FIGURES, Figures, figures_of
from engine.planning.plan.plan import Plan
from widgets.devices.other_cards import OtherCardsDialog


class OtherCardsPresenter(OneDialog[OtherCardsDialog]):
    """Compares forecasts of the current model: on the present devices, and with the chosen cards added.

    A change of the chosen cards cancels the computation for the former choice.
    """

    def __init__(
        self,
        document: LayoutDocument,
        live: LiveRig,
        speeds: SpeedRepository,
        files: RigFiles,
        background: Background,
        window: QWidget,
    ) -> None:
        super().__init__(self._make_dialog, self._begin, window)
        self._document, self._live, self._speeds, self._files = document, live, speeds, files
        self._window, self._latest = window, background.latest()

    def _make_dialog(self) -> OtherCardsDialog:
        dialog = OtherCardsDialog(sorted(card.name for card in CARDS), FIGURES, self._window)
        dialog.chosen_changed.connect(lambda _cards: self._compare())
        dialog.use_requested.connect(self._use)
        return dialog

    def _begin(self, _dialog: OtherCardsDialog) -> None:
        self._compare()

    def _use(self, cards: tuple[str, ...]) -> None:
        self._files.imagine(with_cards(self._live.devices.rig, cards))

    def _compare(self) -> None:
        dialog, plan = self.dialog, self._document.plan
        if dialog is None:
            return
        try:
            rig = with_cards(self._live.rig, dialog.chosen)
        except EngineError as error:
            # Figures of other cards must not take the place of the sentence.
            self._latest.cancel()
            dialog.refuse(error.summary())
            return
        if plan is None:
            dialog.show_status(tr("Open a model to see the forecast for these graphics cards."))
            return
        dialog.show_status(tr("Computing…"))
        here = self._live.rig

        def compute(_task: Task[None]) -> tuple[Figures, Figures]:
            return self._figures(plan, here), self._figures(plan, rig)

        def show(found: tuple[Figures, Figures]) -> None:
            if self.dialog is not None:
                self.dialog.show_figures(*(each.words() for each in found))
                size = format_bytes(
                    sum(each.total_bytes for each in rig.devices) - sum(each.total_bytes for each in here.devices)
                )
                self.dialog.show_status(
                    tr("{model}: the graphics cards add {size} of memory.", model=plan.model.name, size=size)
                )

        def failed(error: EngineError) -> None:
            if self.dialog is not None:
                self.dialog.show_status(error.summary())

        self._latest.run(tr("Comparing devices"), compute, show, failed)

    def _figures(self, plan: Plan, rig: Rig) -> Figures:
        """Find a fast layout for the model of `plan` on `rig`, and return its figures (memory, speed).

        The search takes time, so it must not run in the GUI thread.
        """
        own, edit, speeds = plan.with_own_tables(), plan.edit, self._speeds.known_speeds(rig)
        layout = initial_layout(own.memory, rig, edit.context, edit.side_files, speeds)
        return figures_of(Plan(own.memory, rig, replace(edit, layout=layout)), speeds)
