"""Rules that files beside a model may break with a layout, one sentence and one remedy each."""

from __future__ import annotations

from collections.abc import Iterator

from engine.devices.device import Rig
from engine.language import tr
from engine.layout.layout import Layout, Violation
from engine.memory.side_files import SideFiles


def side_file_violations(side_files: SideFiles, layout: Layout, rig: Rig) -> Iterator[Violation]:
    """Yield what stands against loading `side_files`. Rules: `split_adapter`, `projector_device`."""
    if side_files.adapters and layout.split_mode == "tensor":
        yield Violation(
            "split_adapter",
            tr("In split mode tensor the engine cannot cut a LoRA adapter as it cuts the weights, and ends."),
            tr("Choose split mode layer, or leave the adapter out."),
        )
    projector = side_files.projector
    if projector is not None and projector.device is not None and rig.device(projector.device) is None:
        yield Violation(
            "projector_device",
            tr(
                "The projector is to run on {device}, which is not among the devices ({names}).",
                device=projector.device,
                names=", ".join(rig.ids),
            ),
            tr("Choose another device for it, or leave that open."),
        )
