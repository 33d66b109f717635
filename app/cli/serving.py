"""What plain and secure serving say alike, and what both are asked for."""

from __future__ import annotations

from argparse import Namespace

from app.cli.output import say
from app.paths import kept_weights_path
from engine.base.kept_weights import DEFAULT_QUOTA_BYTES
from engine.base.units import format_bytes
from engine.machines.rigs.lab import CAPS_NOT_ENFORCED, KeptWeights
from engine.runtime.protocol.messages import Serving


def kept_weights(options: Namespace) -> KeptWeights | None:
    """Return where the worker keeps weights, and how much; None where it shall keep none."""
    quota_bytes = DEFAULT_QUOTA_BYTES if options.keep is None else options.keep
    return KeptWeights(kept_weights_path(), quota_bytes) if quota_bytes else None


def tell_serving(options: Namespace, serving: Serving) -> None:
    """Say of a worker that serves what people should know."""
    if options.cap is not None and not serving.caps_enforced:
        tell(CAPS_NOT_ENFORCED)
    kept = kept_weights(options)
    if kept is not None:
        words = f"up to {format_bytes(kept.quota_bytes)} of weights in {kept.folder}"
        tell(f"It keeps {words}, so that they are sent once; `rig kept --empty` removes them.")


def tell(sentence: str) -> None:
    """Say a sentence on standard error."""
    say(f"layerdeck-cli: {sentence}")
