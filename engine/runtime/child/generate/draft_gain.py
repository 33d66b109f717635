"""Measures how much faster drafts make an answer, from the durations of the decode loop's steps.

A step drafts, computes a batch and samples. Without drafts a step gives each answer one token; the loop measures such
plain steps again and again, separately for each number of answers at the same time (`PlainSteps`). A step with drafts
gives an answer several tokens, each of which would have taken a plain step. The gain is the time of these plain steps
divided by the time of the step with drafts. Steps with tokens of prompts are not timed.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from engine.runtime.child.generate.ngrams import NgramDrafts
from engine.runtime.protocol.messages import DraftPause, DraftStatistics
from engine.runtime.protocol.requests import DraftKind

LEAST_PLAIN = 3
"""Number of plain steps (steps without drafts) measured before the first draft; the first step after a prompt is often
slow.
"""
MAX_PLAIN = 9
"""Number of the latest plain steps (steps without drafts) from whose durations the median is taken.

Older steps do not count, because steps get slower as the context grows.
"""
STEPS_BETWEEN = 40
"""Number of steps with drafts after which a plain step (a step without drafts) is measured again."""
TESTED_TOKENS = 200
"""Number of tokens from steps with drafts after which drafts are paused if they have made the answer slower.

Such a pause is rare, because the measured durations also decide how many tokens are drafted (`draft_length`).
"""
DECLINED_STEPS = 8
"""Number of consecutive steps without drafts after which the statistics of an answer report that drafts are paused.

In these steps nothing was drafted, because drafts would have lost time.
"""
FIRST_PAUSE_TOKENS, LONGEST_PAUSE_TOKENS = 200, 3200
"""Numbers of answer tokens for which drafts pause after they lost time: the first pause, and the longest.

Each loss of time doubles the length of the next pause.
"""


class DraftingPause:
    """The pause of drafts that begins after drafts have made answers slower; all answers of a loaded model share it.

    The pause ends when a number of tokens has been generated (`FIRST_PAUSE_TOKENS`).
    """

    def __init__(self) -> None:
        self._left = 0
        self._tokens = FIRST_PAUSE_TOKENS

    @property
    def is_paused(self) -> bool:
        """Whether drafting is paused. An answer that begins during the pause gets no drafts."""
        return self._left > 0

    def begin(self) -> None:
        """Begin the pause, because drafts make an answer slower. A pause that has already begun is not prolonged."""
        if not self.is_paused:
            self._left, self._tokens = self._tokens, min(2 * self._tokens, LONGEST_PAUSE_TOKENS)

    def count(self, tokens: int) -> bool:
        """Count newly generated tokens, and return whether the pause of drafting is over now.

        The pause lasts for a number of tokens, not for a time.
        """
        was_paused, self._left = self.is_paused, max(0, self._left - tokens)
        return was_paused and not self.is_paused

    def forget(self) -> None:
        """End the pause, because drafts made the last `TESTED_TOKENS` tokens faster.

        The next pause has the initial length `FIRST_PAUSE_TOKENS` again. Without this call it would be twice as long as
        the last one, up to a limit.
        """
        self._left, self._tokens = 0, FIRST_PAUSE_TOKENS


class PlainSteps:
    """Durations of the last plain steps (steps of the decode loop without drafts), by the number of running answers."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._since = 0

    def is_due(self, answers: int) -> bool:
        """Return whether the next step should have no drafts, so that its duration can be measured.

        `answers`: number of running answers.
        """
        return len(self._seconds.get(answers, ())) < LEAST_PLAIN or self._since >= STEPS_BETWEEN

    def note(self, answers: int, seconds: float) -> None:
        self._seconds.setdefault(answers, deque(maxlen=MAX_PLAIN)).append(seconds)
        self._since = 0

    def note_drafted(self) -> None:
        """Count a step with drafts, so that `is_due` knows when to measure a plain step again."""
        self._since += 1

    def seconds(self, answers: int) -> float | None:
        """Return the median duration in seconds of a plain step (a step without drafts); None if too few were timed.

        `answers`: number of running answers in the step.
        """
        measured = self._seconds.get(answers, ())
        return median(measured) if len(measured) >= LEAST_PLAIN else None


class AnswerDraft:
    """Counts and times the drafts of one answer, and pauses drafting if drafts make the answer slower.

    `pauses`: whether drafts that lose time are paused.
    `paused`: why drafts are paused; empty: they are not.
    `ngrams`: n-gram drafts of the sequence.
    `step_tokens`: number of tokens that the current step has added to the answer so far.
    `shared_pause`: the pause that all answers of the loaded model share.
    """

    def __init__(self, kind: DraftKind, *, pauses: bool = True) -> None:
        self._pauses = pauses
        self.paused: DraftPause = ""
        self.shared_pause = DraftingPause()
        self.ngrams = NgramDrafts()
        self.step_tokens = 0
        self._kind: DraftKind = kind
        self._steps = self._drafted = self._accepted = self._declined = 0
        self._seconds = self._plain_seconds = 0.0
        self._was_drafted = False
        self._tested_tokens, self._lost_seconds = 0, 0.0

    def forget(self) -> None:
        """Forget the n-grams, because tokens were removed from the sequence."""
        self.ngrams = NgramDrafts()

    def begin_step(self, drafted: int) -> None:
        """Count a step. `drafted`: number of tokens that were drafted for it."""
        self._steps += 1
        self._drafted += drafted
        self.step_tokens = 1
        if drafted:
            self._declined = 0

    def decline(self) -> None:
        """Count a step of this answer for which nothing is drafted, because drafts would make the step slower."""
        self._declined += 1

    def accept(self) -> None:
        """Count a drafted token that the model sampled too."""
        self._accepted += 1
        self.step_tokens += 1

    def note_seconds(self, seconds: float, plain_seconds: float, *, has_drafts: bool) -> None:
        """Add the time of the present step, and pause the drafts if they have lost time.

        `plain_seconds`: duration of a plain step (a step without drafts); equal to `seconds` if this step was plain.
        `has_drafts`: whether the step drafted or tried to draft for this answer, and not only for other answers.
        """
        # A batch that computes lost tokens again may give no token.
        tokens, self.step_tokens = self.step_tokens, 0
        without = tokens * plain_seconds
        self._seconds += seconds
        self._plain_seconds += without
        if not has_drafts:
            return
        self._was_drafted = True
        self._tested_tokens += tokens
        self._lost_seconds += seconds - without
        if self._tested_tokens >= TESTED_TOKENS:
            if self._lost_seconds > 0:
                self.pause()
            else:
                self.shared_pause.forget()
            self._tested_tokens, self._lost_seconds = 0, 0.0

    def pause(self) -> None:
        """Pause the drafts of this answer and of the next ones, because they lose time."""
        if self._pauses and not self.paused:
            self.paused = "slower" if self._was_drafted else "earlier"
            self.shared_pause.begin()

    @property
    def statistics(self) -> DraftStatistics:
        gain = self._plain_seconds / self._seconds if self._was_drafted and self._seconds > 0 else None
        paused = self.paused
        if not paused and self._declined >= DECLINED_STEPS:
            paused = "slower" if self._was_drafted else "earlier"
        return DraftStatistics(
            kind=self._kind,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
            steps=self._steps,
            gain=None if gain is None else round(gain, 3),
            paused=paused,
        )
