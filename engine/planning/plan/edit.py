"""`Edit`: layout, context settings and side files (such as the projector) of one model as the user set them."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from engine.base.values import replace
from engine.devices.device import Rig
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.layout import Layout, single_device
from engine.planning.layout.layout_file import LayoutFile
from engine.planning.layout.moves import DraftMove, Move, RangeMove
from engine.planning.memory.drafts import draft_file, draft_of_file
from engine.planning.memory.side_files import NO_SIDE_FILES, SideFiles
from engine.planning.settings.context_settings import ContextSettings


class Edit(Struct, frozen=True):
    """Layout, context settings and side files of one model as the user set them; undo restores edits.

    Side files are the projector, the LoRA adapters and the draft model.
    `context` may have settings on auto. A `Plan` has the values that the load uses.
    """

    layout: Layout
    context: ContextSettings
    side_files: SideFiles = NO_SIDE_FILES

    def after(self, move: Move) -> Edit:
        """Return a copy of the edit changed by `move`, which a user made in the layout editor.

        Raises:
            LayoutError: the layout has no boundary or layer with the index of `move`.
        """
        draft = self.side_files.draft
        if not isinstance(move, DraftMove):
            return replace(self, layout=move.apply(self.layout))
        if draft is not None and draft.kind == "mtp":
            # The head is the last layer of the model (`mtp_error` refuses several).
            last = self.layout.n_layers - 1
            return replace(self, layout=RangeMove(last, last, move.device).apply(self.layout))
        if draft is None or draft.model is None:
            return self
        moved = replace(draft, layout=single_device(draft.model.n_layers, move.device))
        return replace(self, side_files=replace(self.side_files, draft=moved))

    def as_file(self, model_name: str, rig: Rig | None = None) -> LayoutFile:
        """Return the layout, settings and draft of this edit as a layout file.

        Projector and LoRA adapters are left out, because a layout file cannot contain them.

        `rig`: the devices for which the layout was made; None leaves them out of the file.
        """
        return LayoutFile(model_name, self.layout, self.context, draft_file(self.side_files.draft), rig)


def edit_of_file(file: LayoutFile, model: ModelFile, folder: Path, side_files: SideFiles) -> Edit:
    """Return the edit (layout, settings, side files) that a layout file describes.

    If the layout file names a draft model, the header of that model is read from its file. So this must not be called
    in the GUI thread. If the layout file names no draft, the edit has none either.

    `folder`: folder of the layout file.
    `side_files`: projector and adapters of the edit, which a layout file does not have.

    Raises:
        ModelFileError: the file of the draft model cannot be read.
    """
    return Edit(file.layout, file.context, replace(side_files, draft=draft_of_file(file.draft, model, folder)))
