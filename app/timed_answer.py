"""What of the end of an answer says something of speed."""

from __future__ import annotations

from engine.machines.rigs.speeds import TimedAnswer
from engine.runtime.session.events import Done


def timed_answer(done: Done) -> TimedAnswer:
    """Return the tokens of an answer and of its prompt, and how fast both were."""
    return TimedAnswer(
        done.prompt_tokens,
        done.generated_tokens,
        done.generation_tokens_per_second,
        done.prompt_tokens - done.cached_tokens,
        done.prompt_tokens_per_second,
    )
