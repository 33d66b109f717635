"""Texts for people about the drafts of an answer (speculative decoding)."""

from __future__ import annotations

from engine.base.language import tr
from engine.runtime.protocol.messages import DraftPause, DraftStatistics

PAUSES: dict[DraftPause, str] = {
    "slower": tr("speculative decoding paused: it made the answer slower"),
    "earlier": tr("no speculative decoding: it made an earlier answer slower"),
    "state": tr("no speculative decoding: the model's recurrent state is too large to be copied at each step"),
    "context": tr("speculative decoding paused: the conversation is longer than the context of the draft model"),
    "failed": tr("speculative decoding paused: an error occurred in the draft model"),
}


def draft_words(drafts: DraftStatistics | None) -> list[str]:
    """Return texts about speculative decoding in an answer; empty if no tokens were drafted.

    They state the share of accepted tokens, the gain in speed, and why drafting was paused.
    """
    if drafts is None:
        return []
    words = []
    acceptance, tokens = drafts.acceptance, drafts.tokens_per_step
    if acceptance is not None and tokens is not None:
        percent = round(100 * acceptance)
        if drafts.gain is None:
            words.append(
                tr("drafted tokens: {percent} % accepted, {tokens:.1f} tokens per step", percent=percent, tokens=tokens)
            )
        else:
            words.append(
                tr(
                    "drafted tokens: {percent} % accepted, {tokens:.1f} tokens per step, {gain:.1f} times as fast as "
                    "without drafts",
                    percent=percent,
                    tokens=tokens,
                    gain=drafts.gain,
                )
            )
    return [*words, *([PAUSES[drafts.paused]] if drafts.paused else [])]
