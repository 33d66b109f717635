"""Split mode tensor in the graph: its members stand there as one device, and each has a buffer for the whole graph."""

from __future__ import annotations

from dataclasses import replace

from engine.layout.layout import Run
from engine.memory.backends import BackendTraits, SizeRule
from engine.memory.placement import Placement


def as_one_device(placement: Placement) -> Placement:
    """Return `placement` with its members as one device behind the leading layers, named after all of them."""
    name = "+".join(placement.entries)
    return replace(
        placement,
        runs=(Run(name, placement.leading, placement.n_layers - 1),),
        output_device=name,
        entries=(name,),
        traits={name: _shared_traits([placement.traits[entry] for entry in placement.entries])},
        shares=(),
    )


def _shared_traits(members: list[BackendTraits]) -> BackendTraits:
    """Return the traits of all members together: what one cannot do none does, and tensors take the most."""
    return BackendTraits(
        SizeRule(
            alignment_bytes=max(traits.size_rule.alignment_bytes for traits in members),
            pads_rows=any(traits.size_rule.pads_rows for traits in members),
        ),
        converts_kv=any(traits.converts_kv for traits in members),
    )
