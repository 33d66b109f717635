"""Texts for people about the drafts of an answer (speculative decoding)."""

from __future__ import annotations

from engine.base.language import tr
from engine.runtime.protocol.messages import DraftPause, DraftStatistics

PAUSES: dict[DraftPause, str] = {
    "slower": tr("drafts paused: they made the answer slower"),
    "earlier": tr("no drafts: they made an earlier answer slower"),
    "state": tr("no drafts: the model's recurrent state is too large to be copied at each step"),
    "context": tr("drafts paused: the conversation is longer than the context of the draft model"),
    "failed": tr("drafts paused: the draft model could not compute"),
}


def draft_words(drafts: DraftStatistics | None) -> list[str]:
    """Return texts about the drafts of an answer: their gain, and why they were paused; empty if there were none."""
    if drafts is None:
        return []
    words = []
    acceptance, tokens = drafts.acceptance, drafts.tokens_per_step
    if acceptance is not None and tokens is not None:
        percent = round(100 * acceptance)
        if drafts.gain is None:
            words.append(
                tr("draft: {percent} % accepted, {tokens:.1f} tokens per step", percent=percent, tokens=tokens)
            )
        else:
            words.append(
                tr(
                    "draft: {percent} % accepted, {tokens:.1f} tokens per step, {gain:.1f} times as fast",
                    percent=percent,
                    tokens=tokens,
                    gain=drafts.gain,
                )
            )
    return [*words, *([PAUSES[drafts.paused]] if drafts.paused else [])]
