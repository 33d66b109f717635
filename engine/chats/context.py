"""What of a conversation a model is shown: tokens by part, and what is left out when the context is full.

Whole turns are left out, the oldest first. The system prompt, pinned turns and the last question stay; the kept
conversation loses nothing. Once turns are left out they stay so (`cuts`), and more are left out than are needed: the
model then reads the same beginning for several turns, which its cache still holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.chats.message import Message
from engine.language import tr

Overflow = Literal["drop", "stop", "ask"]
OVERFLOWS: tuple[Overflow, ...] = ("drop", "stop", "ask")
DEFAULT_RESERVE = 1024
"""Tokens kept free for an answer whose length nobody limits, where the context has room for that."""
RESERVE_SHARE = 4
"""At most this part of the context is kept free."""
ROOM_AFTER = 0.75
"""How full what is left may be after turns were left out."""


@dataclass(frozen=True, slots=True)
class ContextUse:
    """Tokens by part. `history` has what the template itself writes; `reserve`: kept free for the answer."""

    system: int
    history: int
    attachments: int
    reserve: int
    n_ctx: int

    @property
    def used(self) -> int:
        """What the model holds, or is to read."""
        return self.system + self.history + self.attachments


@dataclass(frozen=True, slots=True)
class Fit:
    """What is shown and what is not, in the order of the path; ids of messages.

    `decision`: `fits`, also after something was left out; `ask` a person; `full`: it cannot be sent. `newly`: left out
    by this decision. `over_tokens`: by how much it does not fit, where it does not.
    """

    decision: Literal["fits", "ask", "full"]
    shown: tuple[str, ...]
    left_out: tuple[str, ...]
    newly: tuple[str, ...] = ()
    over_tokens: int = 0

    def sentence(self) -> str:
        """Return what a person is told, empty where there is nothing new."""
        if self.decision == "full":
            return tr(
                "The conversation is {over_tokens} tokens longer than the context has room for. Shorten "
                "the last question, unpin turns, or load with a longer context.",
                over_tokens=self.over_tokens,
            )
        if self.decision == "ask":
            return tr(
                "The context is full by {over_tokens} tokens. Leave out the oldest turns, or load with a "
                "longer context.",
                over_tokens=self.over_tokens,
            )
        if self.newly:
            return left_out_sentence()
        return ""


def left_out_sentence() -> str:
    """Return what a person is told once turns are left out."""
    return tr("The context is full: the oldest turns are kept here, and not shown to the model any more.")


def answer_reserve(n_ctx: int, max_tokens: int | None) -> int:
    """Return how many tokens to keep free for the answer."""
    return max(1, min(max_tokens or DEFAULT_RESERVE, n_ctx // RESERVE_SHARE))


def tokens_of(messages: Iterable[str], contents: Iterable[int], prompt: int) -> dict[str, int]:
    """Return the tokens of each message, together those of the prompt: each content with an equal part of what the
    template writes."""
    found = dict(zip(messages, contents, strict=True))
    if found:
        share, rest = divmod(prompt - sum(found.values()), len(found))
        found = {message: tokens + share for message, tokens in found.items()}
        found[next(reversed(found))] += rest
    return found


def use_of(used: int, system: int, attachments: int, reserve: int, n_ctx: int) -> ContextUse:
    """Return the use by part. `used`: tokens of all of it by the real template; `system` and `attachments`: of these
    texts alone, and of what is left out of a full context nothing is counted. The reserve ends with the context."""
    system = min(system, used)
    attachments = min(attachments, used - system)
    return ContextUse(system, used - system - attachments, attachments, max(0, min(reserve, n_ctx - used)), n_ctx)


def turns_of(path: Sequence[Message]) -> tuple[tuple[Message, ...], ...]:
    """Return questions with what answers them; what comes before the first question is a turn of its own."""
    turns: list[list[Message]] = []
    for message in path:
        if message.role == "user" or not turns:
            turns.append([])
        turns[-1].append(message)
    return tuple(map(tuple, turns))


def choose(
    path: Sequence[Message],
    tokens: Mapping[str, int],
    room: int,
    policy: Overflow = "drop",
    already: Collection[str] = (),
) -> Fit:
    """Decide what is shown. `tokens` by message, each with its part of what the template writes; `room`: how many a
    prompt may have, the reserve taken off; `already`: what was left out before."""
    turns = [turn for turn in turns_of(path) if not all(message.id in already for message in turn)]
    shown_before = {message.id for turn in turns for message in turn}
    need = sum(tokens.get(message, 0) for message in shown_before)
    if need <= room:
        return _fit("fits", path, shown_before, ())
    if policy != "drop":
        return _fit("ask" if policy == "ask" else "full", path, shown_before, (), need - room)
    dropped: list[str] = []
    goal = int(room * ROOM_AFTER)
    for turn in turns[:-1]:
        if need <= goal:
            break
        if not stays(turn):
            dropped += [message.id for message in turn]
            need -= sum(tokens.get(message.id, 0) for message in turn)
    shown = shown_before - set(dropped)
    if need > room:
        return _fit("full", path, shown, tuple(dropped), need - room)
    return _fit("fits", path, shown, tuple(dropped))


def stays(turn: Sequence[Message]) -> bool:
    """Return whether a turn is shown however full the context is."""
    return any(message.pinned or message.role == "system" for message in turn)


def _fit(
    decision: Literal["fits", "ask", "full"],
    path: Sequence[Message],
    shown: Collection[str],
    newly: tuple[str, ...],
    over_tokens: int = 0,
) -> Fit:
    return Fit(
        decision,
        tuple(message.id for message in path if message.id in shown),
        tuple(message.id for message in path if message.id not in shown),
        newly,
        over_tokens,
    )
