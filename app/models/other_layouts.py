"""Layouts other than the requested one: proposals after a load ran out of memory, and layouts loaded instead."""

from __future__ import annotations

from functools import partial

from PySide6.QtCore import QObject

from app.models.document import LayoutDocument
from app.models.loading import StepBack
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.models.unloader import Unloader
from app.notices import Notices
from app.rig.live_rig import LiveRig
from engine.base.language import tr
from engine.planning.memory.estimate import grade_text


class OtherLayouts(QObject):
    """Puts layouts into the editor: proposals after a failed load, and layouts loaded instead of the requested one.

    Each replacement of the edited layout is one step of undo.
    """

    def __init__(
        self,
        document: LayoutDocument,
        models: OpenModels,
        unloader: Unloader,
        live: LiveRig,
        notices: Notices,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._document = document
        self._models = models
        self._unloader = unloader
        self._live = live
        self._notices = notices

    def follow(self, model: OpenModel) -> None:
        """Connect to `model`, so that a layout that was loaded instead of the requested one is put into the editor."""
        model.loading.stepped_back.connect(partial(self._on_stepped_back, model))

    def apply_proposal(self, index: int) -> None:
        """Put the layout and settings of a proposal into the editor, or unload the model that the proposal names.

        Nothing is loaded. `index`: index in the proposals of the current model.
        """
        loading = self._models.current.loading
        if index >= len(loading.proposals):
            return
        proposal, model = loading.proposals[index], loading.proposals_model
        if model is None or self._document.model != model:
            name = model.name if model is not None else tr("another model")
            self._notices.show(tr("This proposal is for {name}; open that model first.", name=name), bad=True)
            return
        # This proposal unloads another model and leaves the layout as it is.
        if proposal.unload is not None:
            self._unloader.unload_other(proposal.unload)
            return
        self._document.replace(proposal.edit, proposal.text)
        asked = tr("; the engine is checking this change") if self._live.is_real else ""
        self._notices.show(
            tr(
                "{text}: fits ({grade}){check}. Choose Load to try this change, or Undo to revert it.",
                text=proposal.text,
                grade=grade_text(proposal.grade),
                check=asked,
            )
        )

    def _on_stepped_back(self, model: OpenModel, change: StepBack) -> None:
        """Put the layout that was loaded instead of the requested one into the editor.

        Nothing is done if the layout of `model` was edited since the request.
        """
        if model is self._models.current and self._document.edit == change.asked:
            self._document.replace(change.loaded, tr("use less memory"))
