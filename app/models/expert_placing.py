"""Moves of experts (MoE weights) between the CPU and other devices, for all layers or for a number of layers.

The new layout is computed in the background and is one step of undo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from PySide6.QtCore import QObject, Signal

from app.background import Background, Task
from app.models.document import LayoutDocument
from app.notices import Notices
from engine.base.errors import EngineError
from engine.base.language import tr
from engine.planning.layout.layout import Layout
from engine.planning.plan.plan import Plan

TO_CPU, BACK = "to_cpu", "back"


class ExpertPlacing(QObject):
    """Moves experts of the edited layout between devices.

    There are two moves. `TO_CPU` moves all experts to the CPU. `BACK` moves experts from the CPU back to the devices of
    their layers, as many as fit there.
    `outcomes_found`: carries a mapping from move to the memory and speed after it (`ExpertOutcome`).
    """

    outcomes_found = Signal(object)

    def __init__(
        self, document: LayoutDocument, background: Background, notices: Notices, parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._document = document
        self._notices = notices
        # Two runners: a request to compute effects must not cancel a move.
        self._looking = background.latest()
        self._placing = background.latest()

    def look(self) -> None:
        """Predict memory and speed after each move of experts, and emit `outcomes_found`.

        `TO_CPU` moves all experts to the CPU. `BACK` moves experts from the CPU back to the devices of their layers, as
        many as fit there.
        """
        self._document.when_forecast(self._look)

    def _look(self) -> None:
        plan, speeds = self._document.plan, self._document.speeds
        if plan is None:
            return

        def find(_task: Task[None]) -> Mapping[str, object]:
            from engine.planning.fit.expert_moves import all_to_cpu, back_as_fit, outcome

            own = plan.with_own_tables()
            return {TO_CPU: outcome(own, all_to_cpu(own), speeds), BACK: outcome(own, back_as_fit(own), speeds)}

        self._looking.run(
            "Comparing places of experts", find, self.outcomes_found.emit, self._notices.show_error, quiet=True
        )

    def use(self, kind: str) -> None:
        """Carry out a move of experts, as one undo step.

        `kind`: `TO_CPU` moves all experts to the CPU. `BACK` moves experts from the CPU back to the devices of their
        layers, as many as fit there.
        """

        def find(plan: Plan) -> Layout:
            from engine.planning.fit.expert_moves import all_to_cpu, back_as_fit

            return all_to_cpu(plan) if kind == TO_CPU else back_as_fit(plan)

        self._search(find, tr("move experts to the CPU") if kind == TO_CPU else tr("move experts back from the CPU"))

    def place(self, device: str, count: int) -> None:
        """Put the experts of `count` layers on `device`.

        These layers are either the first or the last ones with experts, whichever is predicted to be faster.
        """
        speeds = self._document.speeds

        def find(plan: Plan) -> Layout:
            from engine.planning.fit.expert_moves import by_count

            return by_count(plan, device, count, speeds)

        self._search(find, tr("place experts of {count} layers on {device}", count=count, device=device))

    def _search(self, find: Callable[[Plan], Layout], text: str) -> None:
        self._document.when_forecast(lambda: self._run(find, text))

    def _run(self, find: Callable[[Plan], Layout], text: str) -> None:
        plan = self._document.plan
        if plan is None:
            return

        def work(_task: Task[None]) -> Layout:
            return find(plan.with_own_tables())

        def use(layout: Layout) -> None:
            # Another model may have been opened during the search, or the layout edited, which must not be undone.
            if self._document.model is plan.model and self._document.edit == plan.edit:
                self._document.set_layout(layout, text)

        def refuse(error: EngineError) -> None:
            self._notices.show_error(error)
            # A field that showed the refused number shows the one of the layout again.
            self._document.preview_changed.emit(self._document.preview)

        self._placing.run("Placing experts", work, use, refuse, quiet=True)
