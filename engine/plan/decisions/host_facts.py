"""What decisions depend on of the machine that loads, besides its devices and memory."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache

from engine.processor import Processor, own_processor


@dataclass(frozen=True, slots=True)
class HostFacts:
    """`platform` as `sys.platform` has it."""

    platform: str
    processor: Processor


@cache
def own_host() -> HostFacts:
    """Return the facts of this machine, read once."""
    return HostFacts(sys.platform, own_processor())
