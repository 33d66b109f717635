"""Recorded loads: each that the engine refused violates a rule, and no other does."""

from __future__ import annotations

import pytest

from engine.planning.layout.rules import violations
from tests.support.truth import MODEL_NAMES, truth_cases

ONLY_COMPUTED = ("repeated_device", "single_head", "split_attention")
"""Rules on layouts that load, and go wrong when they compute."""


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_the_engine_refuses_what_breaks_a_rule(name: str) -> None:
    for case in truth_cases(name):
        broken = violations(case.layout, case.model, case.rig, case.context)
        known = [violation for violation in broken if violation.rule not in ONLY_COMPUTED]
        assert bool(known) == (case.refused is not None), (case.name, case.refused, known)
