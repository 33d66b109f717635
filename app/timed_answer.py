"""Conversion of an answer's last event into its counts and speeds."""

from __future__ import annotations

from engine.machines.rigs.speeds import TimedAnswer
from engine.runtime.session.events import Done


def timed_answer(done: Done) -> TimedAnswer:
    """Return the tokens and tokens per second of an answer, and of the part of its prompt that was not cached."""
    return TimedAnswer(
        done.prompt_tokens,
        done.generated_tokens,
        done.generation_tokens_per_second,
        done.prompt_tokens - done.cached_tokens,
        done.prompt_tokens_per_second,
    )
