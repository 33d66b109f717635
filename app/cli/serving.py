"""Messages and options of `rig serve` that are the same with --secure and without it."""

from __future__ import annotations

import errno
import os
from argparse import Namespace
from pathlib import Path

from app.cli.output import print_notice
from app.paths import weight_cache_path
from engine.base.units import format_bytes
from engine.base.weight_cache import WEIGHT_CACHE_QUOTA_BYTES
from engine.machines.rigs.lab import CAPS_NOT_ENFORCED, WeightCache


def weight_cache(options: Namespace) -> WeightCache | None:
    """Return folder and quota of the cache of weights; None if the cache is off or the folder cannot be written."""
    quota_bytes = WEIGHT_CACHE_QUOTA_BYTES if options.keep is None else options.keep
    return WeightCache(weight_cache_path(), quota_bytes) if quota_bytes and not _fault(weight_cache_path()) else None


def _fault(folder: Path) -> str:
    """Return the reason why weights cannot be cached in `folder`; empty if they can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return "" if os.access(folder, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)


def print_serving(options: Namespace, *, caps_enforced: bool) -> None:
    """Print whether the memory caps of the workers are enforced, and in which folder weights are cached, if at all."""
    if options.cap and not caps_enforced:
        print_notice(CAPS_NOT_ENFORCED)
    kept = weight_cache(options)
    if kept is not None:
        words = f"up to {format_bytes(kept.quota_bytes)} of weights in {kept.folder}"
        print_notice(f"The worker caches {words}; `rig kept --empty` deletes them.")
    elif options.keep != 0:
        folder = weight_cache_path()
        print_notice(f"The worker caches no weights, because {folder} cannot be written ({_fault(folder)}).")
