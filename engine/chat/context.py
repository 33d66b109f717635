"""Fits a conversation into the context: counts the prompt's tokens by part, and chooses the turns to leave out.

Whole turns are left out, the oldest first. The system prompt, pinned turns and the last question stay. The stored
conversation does not change. More turns are left out than necessary, so that the next prompts begin with the same
tokens, which are still in the KV cache. The decision is stored with the answer as a `Cut`, and applies to later answers
too. If the context becomes longer, a new decision is made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from engine.base.language import tr
from engine.chat.message import Cut, Message
from engine.chat.tree import MessageTree
from engine.planning.settings.context_settings import ContextSettings, is_quantised
from engine.planning.settings.sampling_settings import SamplingSettings
from engine.runtime.protocol.requests import ChatMessage

Overflow = Literal["drop", "stop", "ask"]
OVERFLOWS: tuple[Overflow, ...] = ("drop", "stop", "ask")
DEFAULT_RESERVE = 1024
"""Number of tokens that are reserved for an answer without a token limit, if the context has room for them."""
RESERVE_SHARE = 4
"""Divisor of the context size: at most a quarter of the context is reserved for the answer."""
ROOM_AFTER = 0.75
"""If turns must be left out, so many are left out that the other messages fill at most this share of their room.

The rest of the room is for the next turns. Until it is full, prompts keep their beginning, which is in the KV cache.
"""
COUNT_FROM = 0.5
"""Number of characters for each token of the context size up to which a prompt is assumed to fit.

The tokens of such a short prompt are not counted.
"""


class ContextUse(Struct, frozen=True):
    """The use of the context, in tokens: the parts of the prompt, and the reserve for the answer.

    `history`: messages, and the text that the chat template adds.
    `attachments`: texts of attached files.
    `reserve`: tokens reserved for the answer.
    `n_ctx`: context size.
    `uncounted_media`: number of images and sounds whose tokens are unknown and in no part.
    """

    system: int
    history: int
    attachments: int
    reserve: int
    n_ctx: int
    uncounted_media: int = 0

    @property
    def used(self) -> int:
        """Number of context tokens that the prompt takes."""
        return self.system + self.history + self.attachments


class Fit(Struct, frozen=True):
    """Result of `choose`: the messages that the prompt contains. Messages are given by id, in their order.

    `decision`: `fits` (perhaps after turns were left out), `ask` (ask a person), or `full` (the prompt cannot be sent).
    `shown`, `left_out`: messages in the prompt, and messages left out of it.
    `newly`: messages in `left_out` that no earlier decision had left out.
    `over_tokens`: number of tokens beyond the available room; 0 if the prompt fits.
    """

    decision: Literal["fits", "ask", "full"]
    shown: tuple[str, ...]
    left_out: tuple[str, ...]
    newly: tuple[str, ...] = ()
    over_tokens: int = 0

    def sentence(self) -> str:
        """Return a sentence for people about the decision; empty if the prompt fits and leaves out nothing new."""
        if self.decision == "full":
            return tr(
                "The conversation is {over_tokens} tokens too long for the context. Shorten the last question, "
                "unpin messages, or load with a longer context.",
                over_tokens=self.over_tokens,
            )
        if self.decision == "ask":
            return tr(
                "The context is full: {over_tokens} tokens too many. Drop the oldest messages, or load with a longer "
                "context.",
                over_tokens=self.over_tokens,
            )
        if self.newly:
            return left_out_sentence()
        return ""


def left_out_sentence() -> str:
    """Return the sentence for the user when a prompt leaves out turns that earlier prompts contained."""
    return tr("The context is full. The model no longer sees the oldest messages.")


def shift_error(sampling: SamplingSettings, context: ContextSettings) -> str:
    """Return why the settings of a load prevent a context shift when the context is full; empty if they allow it.

    The child process checks the model itself, and refuses a request with a reason if the model cannot shift.
    """
    if sampling.full_context != "shift" or not (is_quantised(context.type_k) or is_quantised(context.type_v)):
        return ""
    return tr(
        "A full context cannot be shifted with a quantised KV cache ({type_k} and {type_v}), which would lose "
        "precision with each shift. Load with a KV cache of type f16, bf16 or f32, or let answers end when the "
        "context is full.",
        type_k=context.type_k,
        type_v=context.type_v,
    )


def shift_sentence(kept_tokens: int) -> str:
    """Return the sentence for people when the context was shifted during an answer.

    `kept_tokens`: number of tokens at the start of the context that were not removed.
    """
    return tr(
        "The context became full during this answer. The answer went on: the model still sees the first "
        "{kept_tokens} tokens and the newest tokens, but not the tokens between them.",
        kept_tokens=kept_tokens,
    )


def may_be_too_long(asked: Sequence[ChatMessage], n_ctx: int | None) -> bool:
    """Return whether the tokens of a prompt must be counted, because it may exceed the context.

    A prompt with images or sounds must always be counted. `n_ctx`: context size in tokens; None: unknown.
    """
    # An image takes hundreds of tokens and no characters.
    if any(message.media for message in asked):
        return True
    return n_ctx is not None and sum(len(message.content) for message in asked) > n_ctx * COUNT_FROM


def shown_path(path: Sequence[Message], left_out: Collection[str]) -> tuple[Message, ...]:
    """Return the messages of `path` except those whose ids are in `left_out`."""
    return tuple(message for message in path if message.id not in left_out)


def answer_reserve(n_ctx: int, max_tokens: int | None) -> int:
    """Return the number of tokens to reserve for the answer.

    `n_ctx`: context size in tokens.
    `max_tokens`: largest length of the answer in tokens; None: no limit.
    """
    return max(1, min(max_tokens or DEFAULT_RESERVE, n_ctx // RESERVE_SHARE))


def tokens_of(messages: Iterable[str], contents: Iterable[int], prompt: int) -> dict[str, int]:
    """Return the number of tokens of each message by id, including an equal share of the template's own tokens.

    `messages`: message ids.
    `contents`: number of tokens of each message's text.
    `prompt`: number of tokens of the whole prompt, to which the returned numbers add up.
    """
    found = dict(zip(messages, contents, strict=True))
    if found:
        # Text of the template is not part of any message, so all messages share it equally.
        share, rest = divmod(prompt - sum(found.values()), len(found))
        found = {message: tokens + share for message, tokens in found.items()}
        found[next(reversed(found))] += rest
    return found


def use_of(used: int, system: int, attachments: int, reserve: int, n_ctx: int) -> ContextUse:
    """Return how the prompt's tokens are distributed over its parts.

    `used`: number of tokens of the whole prompt as the chat template writes it.
    `system`, `attachments`: number of tokens of the system prompt, and of the attached texts of the messages in the
    prompt.
    `reserve`: tokens for the answer; limited to the tokens that the prompt leaves free.
    """
    system = min(system, used)
    attachments = min(attachments, used - system)
    return ContextUse(system, used - system - attachments, attachments, max(0, min(reserve, n_ctx - used)), n_ctx)


def turns_of(path: Sequence[Message]) -> tuple[tuple[Message, ...], ...]:
    """Divide messages into turns, each a question with its answers. Messages before the first one form a turn too."""
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
    """Decide which messages the prompt contains.

    `path`: the messages from the first one to the last question.
    `tokens`: number of tokens by message id, from `tokens_of`.
    `room`: largest number of tokens for the messages; the answer's reserve is already subtracted.
    `policy`: action if the messages do not fit: drop turns, ask a person, or stop.
    `already`: ids of messages that earlier decisions left out.
    """
    # Turns that were left out before stay out; they are not counted again.
    turns = [turn for turn in turns_of(path) if not all(message.id in already for message in turn)]
    shown_before = {message.id for turn in turns for message in turn}
    need = sum(tokens.get(message, 0) for message in shown_before)
    if need <= room:
        return _fit("fits", path, shown_before, ())
    if policy != "drop":
        return _fit("ask" if policy == "ask" else "full", path, shown_before, (), need - room)
    dropped: list[str] = []
    # Dropping to three quarters keeps the same prefix for several turns.
    goal = int(room * ROOM_AFTER)
    # The last turn is the question itself, which is never dropped.
    for turn in turns[:-1]:
        if need <= goal:
            break
        if not stays(turn):
            dropped += [message.id for message in turn]
            need -= sum(tokens.get(message.id, 0) for message in turn)
    shown = shown_before - set(dropped)
    # Pinned turns and the question alone are too long.
    if need > room:
        return _fit("full", path, shown, tuple(dropped), need - room)
    return _fit("fits", path, shown, tuple(dropped))


def stays(turn: Sequence[Message]) -> bool:
    """Return whether a turn always stays in the prompt: it has a pinned message or a system message."""
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


# ------------------------------------------------------------------ what stays left out


def cut_of_path(path: Sequence[Message], n_ctx: int | None) -> Cut | None:
    """Return the cut (turns left out of the prompt) that is stored with the last answer in `path`.

    Return None if there is no cut, or if the context is longer than the one for which the cut was made.
    `n_ctx`: size of the context in tokens; None if unknown.
    """
    last = next((message for message in reversed(path) if message.role == "assistant"), None)
    return None if last is None or not _holds(last.cut, n_ctx) else last.cut


def cut_of_answer(tree: MessageTree, answer: str, n_ctx: int | None) -> Cut | None:
    """Return the stored cut (turns left out of the prompt) that applies to an answer before a new decision is made.

    The cut is taken from the answer; else from the other versions of the answer, the newest first; else from the
    previous answer. Cuts for a context shorter than `n_ctx` are ignored.
    """
    return next(
        (message.cut for message in _versions(tree, answer) if _holds(message.cut, n_ctx)),
        cut_of_path(tree.path_to(tree.messages[answer].parent), n_ctx),
    )


def left_out_of(path: Sequence[Message], cut: Cut | None) -> frozenset[str]:
    """Return the ids of the messages in `path` that a cut leaves out of the prompt."""
    index = next((index for index, message in enumerate(path) if cut is not None and message.id == cut.first), 0)
    return frozenset(message.id for turn in turns_of(path[:index]) if not stays(turn) for message in turn)


def cut_that_leaves_out(path: Sequence[Message], left_out: Collection[str], n_ctx: int) -> Cut | None:
    """Return the cut (record of the turns left out of a prompt) for `left_out`; None if that is empty.

    The cut is stored with the answer, so that later prompts leave out the same messages.

    `path`: messages of the shown branch.
    `left_out`: ids of messages, none of them in the last turn.
    `n_ctx`: context size in tokens for which the cut is made.
    """
    # A cut names the first message after those that are left out.
    indices = [index for index, message in enumerate(path) if message.id in left_out]
    return Cut(path[indices[-1] + 1].id, n_ctx) if indices else None


def _versions(tree: MessageTree, answer: str) -> Iterator[Message]:
    yield tree.messages[answer]
    yield from (tree.messages[version] for version in reversed(tree.versions(answer)))


def _holds(cut: Cut | None, n_ctx: int | None) -> bool:
    return cut is not None and (n_ctx is None or n_ctx <= cut.n_ctx)
