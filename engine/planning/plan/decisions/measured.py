"""Settings that were measured on this computer: keys under which they are stored, and look-up for decisions."""

from __future__ import annotations

import hashlib

from engine.base.language import tr
from engine.devices.device import MeasuredChoice, Rig
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.layout import Layout

BOUND_THREADS = "bound_threads"
"""Key of the measured choice whether threads are bound to cores (1 or 0). It is no setting of a layout file."""


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


def gain_words(choice: MeasuredChoice) -> str:
    """Return a phrase on how much faster the measured value is."""
    if choice.value == choice.base:
        return tr("no other value was clearly faster")
    return tr(
        "{ratio:.2f} times as fast as with {base} ({low:.2f} to {high:.2f})",
        ratio=choice.ratio,
        base=choice.base,
        low=choice.low,
        high=choice.high,
    )
