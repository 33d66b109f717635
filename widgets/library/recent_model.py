"""What the model panel lists and what it reports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RecentModel:
    """A model that was opened before; `detail` is a dim line such as `Q4_K_M · 17.3 GiB`."""

    path: Path
    title: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The person wants this model."""

    path: Path
