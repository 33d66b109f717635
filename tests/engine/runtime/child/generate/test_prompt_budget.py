"""The number of prompt tokens in a batch, from the measured speed."""

from __future__ import annotations

import pytest

from engine.runtime.child.generate.decode_loop import FIRST_TOKENS, PromptBudget


@pytest.fixture
def budget() -> PromptBudget:
    """A budget of 2,048 tokens at 100 tokens/s, so of 200 tokens in 2 s, or 32 beside answers."""
    budget = PromptBudget(2048)
    assert budget.tokens(5000, with_answers=False) == FIRST_TOKENS
    budget.note(100, 1.0)
    return budget


@pytest.mark.parametrize(("missing", "tokens"), [(5000, 200), (251, 200), (250, 250), (150, 150)])
def test_a_small_rest_of_a_prompt_is_added_to_the_batch(budget: PromptBudget, missing: int, tokens: int) -> None:
    assert budget.tokens(missing, with_answers=False) == tokens


def test_running_answers_limit_the_batch(budget: PromptBudget) -> None:
    assert budget.tokens(40, with_answers=True) == FIRST_TOKENS


def test_a_batch_is_never_larger_than_the_context_allows(budget: PromptBudget) -> None:
    budget.note(100, 0.001)
    assert budget.tokens(2500, with_answers=False) == 2048
