"""Loads with drafts through a real child, compared with their forecast."""

from __future__ import annotations

from engine.planning.plan.plan import Plan
from engine.runtime.session.events import Loaded
from engine.runtime.session.load_spec import LoadSpec
from tests.support.session_log import SessionLog


def check_load(plan: Plan) -> None:
    """Load a plan with drafts; each device must hold what was forecast, to the byte."""
    with SessionLog() as log:
        log.session.load(LoadSpec(plan))
        (loaded,) = log.wait_for_endings(1)
    assert isinstance(loaded, Loaded), loaded
    expected = {row.id: row.without_overhead() for row in plan.forecast}
    for row in loaded.devices:
        asked = expected[row.id]
        state_bytes = row.kv_cache_bytes + row.recurrent_bytes
        assert row.draft_bytes == asked.draft_bytes, row.id
        assert (row.output_bytes, state_bytes) == (asked.output_bytes, asked.kv_cache_bytes + asked.recurrent_bytes)
        assert (row.weights_bytes, row.compute_bytes) == (asked.weights_bytes, asked.compute_bytes)
