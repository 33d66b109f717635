"""The layout that a model gets when it is opened: that of strategy fewest, but without overrides.

People should see at once where layers are, and an opening model is not to wait for a search over single matrices: what
more devices could hold by leaving experts on the CPU is for those who ask for an automatic layout.
"""

from __future__ import annotations

import msgspec

from engine.devices.device import Rig
from engine.fit.strategies.choosing import choose
from engine.fit.strategies.constraints import Constraints
from engine.fit.strategies.fewest import fewest_candidates
from engine.fit.strategies.workbench import Workbench
from engine.gguf.model_file import ModelFile
from engine.layout.layout import Layout
from engine.memory.model_memory import ModelMemory
from engine.memory.side_files import NO_SIDE_FILES, SideFiles
from engine.plan.decisions.context_length import context_lengths
from engine.settings.context_settings import ContextSettings


def initial_layout(
    model: ModelFile | ModelMemory, rig: Rig, context: ContextSettings, side_files: SideFiles = NO_SIDE_FILES
) -> Layout:
    """Return the first layout of a model; when the host is too small too it is the best there is, not an error.

    Where the context length is left open, the longest sensible one is planned with that the layout has room for.
    """
    memory = model if isinstance(model, ModelMemory) else ModelMemory(model)
    found = None
    for n_ctx in context_lengths(memory.model, rig, context):
        settings = msgspec.structs.replace(context, n_ctx=n_ctx)
        bench = Workbench(memory, rig, settings, Constraints(side_files=side_files))
        found = choose(bench, fewest_candidates(bench), plain=True)
        if found.fits:
            break
    assert found is not None  # There is at least one length.
    return found.layout
