"""What is left out of a full context, kept with the answer that was written so: for the next answer, and after a
restart, the model is shown the same again, and what it holds of the conversation is of use.

In a longer context than the one that was full it is decided anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from engine.chats.context import stays, turns_of
from engine.chats.message import Cut, Message
from engine.chats.tree import MessageTree


def cut_of_path(path: Sequence[Message], n_ctx: int | None) -> Cut | None:
    """Return the cut that its last answer was written with, where it holds in a context of `n_ctx` tokens (None: not
    known)."""
    last = next((message for message in reversed(path) if message.role == "assistant"), None)
    return None if last is None or not _holds(last.cut, n_ctx) else last.cut


def cut_of_answer(tree: MessageTree, answer: str, n_ctx: int | None) -> Cut | None:
    """Return the cut to begin an answer of the tree with: its own, else that of its newest version that has one, else
    that of the answer before it."""
    return next(
        (message.cut for message in _versions(tree, answer) if _holds(message.cut, n_ctx)),
        cut_of_path(tree.path_to(tree.messages[answer].parent), n_ctx),
    )


def left_out_of(path: Sequence[Message], cut: Cut | None) -> frozenset[str]:
    """Return which messages of a path the model is not shown."""
    place = next((place for place, message in enumerate(path) if cut is not None and message.id == cut.first), 0)
    return frozenset(message.id for turn in turns_of(path[:place]) if not stays(turn) for message in turn)


def cut_that_leaves_out(path: Sequence[Message], left_out: Collection[str], n_ctx: int) -> Cut | None:
    """Return the cut that leaves these messages out of a path, whose last turn is shown."""
    places = [place for place, message in enumerate(path) if message.id in left_out]
    return Cut(path[places[-1] + 1].id, n_ctx) if places else None


def _versions(tree: MessageTree, answer: str) -> Iterator[Message]:
    yield tree.messages[answer]
    yield from (tree.messages[version] for version in reversed(tree.versions(answer)))


def _holds(cut: Cut | None, n_ctx: int | None) -> bool:
    return cut is not None and (n_ctx is None or n_ctx <= cut.n_ctx)
