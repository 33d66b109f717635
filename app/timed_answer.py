"""Token counts and speeds of an answer, from the last event of its request."""

from __future__ import annotations

from engine.machines.rigs.speeds import TimedAnswer
from engine.runtime.session.events import Done


def timed_answer(done: Done) -> TimedAnswer:
    """Return the number of tokens and tokens per second: of the answer, and of its prompt without the cached part."""
    return TimedAnswer(
        done.prompt_tokens,
        done.generated_tokens,
        done.generation_tokens_per_second,
        done.prompt_tokens - done.cached_tokens,
        done.prompt_tokens_per_second,
    )
