"""Messages and options that plain and secure serving have in common."""

from __future__ import annotations

from argparse import Namespace

from app.cli.output import say
from app.paths import kept_weights_path
from engine.base.kept_weights import DEFAULT_QUOTA_BYTES
from engine.base.units import format_bytes
from engine.machines.rigs.lab import CAPS_NOT_ENFORCED, KeptWeights


def kept_weights(options: Namespace) -> KeptWeights | None:
    """Return folder and size of the cache of weights; None for no cache."""
    quota_bytes = DEFAULT_QUOTA_BYTES if options.keep is None else options.keep
    return KeptWeights(kept_weights_path(), quota_bytes) if quota_bytes else None


def tell_serving(options: Namespace, *, caps_enforced: bool) -> None:
    """Print whether the memory caps of running workers are enforced, and the size of the cache of weights."""
    if options.cap and not caps_enforced:
        tell(CAPS_NOT_ENFORCED)
    kept = kept_weights(options)
    if kept is not None:
        words = f"up to {format_bytes(kept.quota_bytes)} of weights in {kept.folder}"
        tell(f"It caches {words}; `rig kept --empty` deletes them.")


def tell(sentence: str) -> None:
    """Print a sentence to standard error."""
    say(f"layerdeck-cli: {sentence}")
