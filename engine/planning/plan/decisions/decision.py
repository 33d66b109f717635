"""`Decision`: the value of one setting for a load, and the reason for it.

For some settings the fastest value was measured on this computer. The measurement is stored under a key that this
module makes, and `measured_choice` looks it up.
"""

from __future__ import annotations

import hashlib

from msgspec import Struct

from engine.base.language import tr
from engine.devices.device import MeasuredChoice, Rig
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.layout import Layout


class Decision(Struct, frozen=True):
    """The value of one setting for a load, with the reason for it.

    `setting`: key of the layout file's `context`, or `projector`, `adapters` or `draft`.
    `value`: value that the load uses.
    `reason`: one sentence for the user.
    `overridden`: whether the user chose the value; the automatic choice could be another value.
    """

    setting: str
    value: str | int | bool
    reason: str
    overridden: bool = False


BOUND_THREADS = "bound_threads"
"""Key of a measured choice: whether threads are bound to cores (1) or not (0). It is no setting of a layout file."""


def model_key(model: ModelFile) -> str:
    """Return the key of a model in stored measurements: a hash of its architecture, name and size."""
    words = f"{model.architecture}|{model.name}|{model.n_layers}|{model.size_bytes}"
    return hashlib.sha256(words.encode("utf-8", "replace")).hexdigest()[:16]


def load_key(model: ModelFile, layout: Layout, rig: Rig) -> str:
    """Return the key of a model on the devices of a layout, for measurements that depend on both."""
    used = {*layout.devices, *(override.device for override in layout.overrides)}
    devices = sorted(f"{each.backend} {each.name}" for each in rig.all_devices if each.id in used)
    words = "|".join((layout.split_mode, str(bool(layout.overrides)), *devices))
    return f"{model_key(model)} {hashlib.sha256(words.encode('utf-8', 'replace')).hexdigest()[:16]}"


def measured_choice(rig: Rig, setting: str, load: str = "") -> MeasuredChoice | None:
    """Return the measured value of a setting on this computer; None if it was not measured.

    `load`: key of `load_key` for a setting that depends on the model; empty for one that does not.
    """
    choices = (each for each in rig.host.choices if each.setting == setting and each.load == load)
    return next(choices, None)


def gain_text(choice: MeasuredChoice) -> str:
    """Return a phrase for the user on how much faster the measured value is than `choice.base`."""
    if choice.value == choice.base:
        return tr("no other value was clearly faster")
    return tr(
        "{ratio:.2f} times as fast as with {base} (95 % interval: {low:.2f} to {high:.2f})",
        ratio=choice.ratio,
        base=choice.base,
        low=choice.low,
        high=choice.high,
    )
