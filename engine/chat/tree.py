"""The messages of a conversation as an immutable tree, and functions that return a changed tree.

The chat shows the path from a root to `leaf`. Children of one message are its versions: editing and regenerating add a
version. Only `without_turn` and `without_leaf` remove messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from msgspec import Struct, field

from engine.base.language import tr
from engine.base.values import replace
from engine.chat.message import Cut, Message, new_id


class MessageTree(Struct, frozen=True, dict=True):
    """An immutable tree of messages.

    `messages`: messages by id, in the order in which they were added (parents before children).
    `leaf`: id of the last shown message; None: the tree is empty.
    """

    messages: Mapping[str, Message] = field(default_factory=dict)
    leaf: str | None = None

    @cached_property
    def children(self) -> Mapping[str | None, tuple[str, ...]]:
        """Ids of child messages by their parent's id, in the order of adding. Roots have the key None."""
        # One pass over all messages; `versions` and `newest_leaf` then need no search.
        found: dict[str | None, list[str]] = {}
        for message in self.messages.values():
            found.setdefault(message.parent, []).append(message.id)
        return {parent: tuple(ids) for parent, ids in found.items()}

    @cached_property
    def path(self) -> tuple[Message, ...]:
        """The shown messages, from the root to the leaf."""
        return self.path_to(self.leaf)

    def path_to(self, message: str | None) -> tuple[Message, ...]:
        """Return the messages from the root to `message`, both included; an empty path if `message` is None."""
        path: list[Message] = []
        while message is not None:
            path.append(self.messages[message])
            message = path[-1].parent
        return tuple(reversed(path))

    def versions(self, message: str) -> tuple[str, ...]:
        """Return the ids of `message` and of all other messages with the same parent, in the order of adding."""
        return self.children[self.messages[message].parent]

    def newest_leaf(self, message: str) -> str:
        """Return the id of the last message of the newest branch below `message`; its own id if it has no children."""
        while below := self.children.get(message):
            message = below[-1]
        return message

    def below(self, message: str) -> Iterator[str]:
        """Yield the ids of a message and of all its descendants."""
        # A stack instead of recursion: a conversation may be thousands of messages deep.
        waiting = [message]
        while waiting:
            found = waiting.pop()
            yield found
            waiting.extend(self.children.get(found, ()))


def tree_of(messages: Iterable[Message], leaf: str | None) -> MessageTree:
    """Return a tree of messages. Parents must come before their children.

    Raises:
        ValueError: a parent is missing or comes later, an id occurs twice, or the leaf is missing.
    """
    by_id: dict[str, Message] = {}
    for message in messages:
        if message.id in by_id:
            raise ValueError(tr("the message {id} occurs twice", id=message.id[:40]))
        if message.parent is not None and message.parent not in by_id:
            raise ValueError(tr("the message before message {id} is missing", id=message.id[:40]))
        by_id[message.id] = message
    if leaf is not None and leaf not in by_id:
        raise ValueError(tr("the message that was shown last is missing"))
    return MessageTree(by_id, leaf)


def mended_tree(messages: Iterable[Message], leaf: str | None) -> MessageTree:
    """Return a tree even if messages are missing, which happens if two programs change a conversation at the same time.

    A message whose parent is missing becomes a root. If the leaf is missing, the newest branch is shown.
    """
    waiting = {message.id: message for message in messages}
    by_id: dict[str, Message] = {}
    while waiting:
        before = len(by_id)
        for message in waiting.values():
            if message.parent is None or message.parent in by_id:
                by_id[message.id] = message
        if len(by_id) == before:
            # No message has a known parent: one becomes a root, and its descendants follow in the next round.
            orphans = [message for message in waiting.values() if message.parent not in waiting]
            first = (orphans or list(waiting.values()))[0]
            by_id[first.id] = replace(first, parent=None)
        waiting = {message: waiting[message] for message in waiting if message not in by_id}
    tree = MessageTree(by_id, leaf)
    if leaf in by_id:
        return tree
    beginnings = tree.children.get(None, ())
    return replace(tree, leaf=tree.newest_leaf(beginnings[-1]) if beginnings else None)


def select(tree: MessageTree, message: str) -> MessageTree:
    """Return the tree with `message` on the shown branch.

    If `message` is shown already, nothing changes. Otherwise the newest branch below `message` is shown.
    """
    if any(shown.id == message for shown in tree.path):
        return tree
    return replace(tree, leaf=tree.newest_leaf(message))


def step_version(tree: MessageTree, message: str, step: int) -> MessageTree:
    """Return the tree with another version of a message shown.

    `step`: number of versions to go forward, or back if negative; limited at the first and the last version.
    """
    versions = tree.versions(message)
    # No wrapping around: the arrows are disabled at both ends.
    index = min(max(versions.index(message) + step, 0), len(versions) - 1)
    return select(tree, versions[index])


def add(tree: MessageTree, message: Message) -> MessageTree:
    """Return the tree with a message added below its `parent` and shown as the leaf."""
    return _tree_of({**tree.messages, message.id: message}, message.id)


def edited(tree: MessageTree, message: str, content: str, *, created_ms: int) -> MessageTree:
    """Return the tree with a new version of a message, which has the text `content` and is shown.

    Messages below the old version stay there.

    `created_ms`: time of the new version in milliseconds since 1970.
    """
    old = tree.messages[message]
    new = Message(
        id=new_id(),
        role=old.role,
        content=content,
        parent=old.parent,
        # Attachment ids are unique in the database; both versions share the bytes by their SHA-256.
        attachments=tuple(replace(attachment, id=new_id()) for attachment in old.attachments),
        pinned=old.pinned,
        created_ms=created_ms,
    )
    return add(tree, new)


def edited_result(tree: MessageTree, message: str, content: str, *, created_ms: int) -> MessageTree:
    """Return the tree with a new version of a tool result, which has the text `content` and is shown.

    Results of parallel calls that follow `message` on the shown path are copied below the new version. So each call
    keeps its result.

    `created_ms`: time of the new version in milliseconds since 1970.
    """
    path = tree.path
    index = next((index for index, each in enumerate(path) if each.id == message), len(path))
    parent = tree.messages[message].parent
    for old in path[index:]:
        if old.role != "tool":
            break
        text = content if old.id == message else old.content
        new = replace(old, id=new_id(), parent=parent, content=text, created_ms=created_ms)
        tree, parent = add(tree, new), new.id
    return tree


def changed(tree: MessageTree, message: Message) -> MessageTree:
    """Return the tree with `message` in place of the message with the same id."""
    return _tree_of({**tree.messages, message.id: message}, tree.leaf)


def branched(tree: MessageTree, message: str) -> MessageTree:
    """Return a tree for another conversation: copies, with new ids, of the messages from the root to `message`."""
    copies: list[Message] = []
    path = tree.path_to(message)
    ids = {old.id: new_id() for old in path}
    for old in path:
        copies.append(
            replace(
                old,
                id=ids[old.id],
                parent=copies[-1].id if copies else None,
                attachments=tuple(replace(attachment, id=new_id()) for attachment in old.attachments),
                cut=renamed_cut(old.cut, ids),
            )
        )
    return tree_of(copies, copies[-1].id)


def renamed_cut(cut: Cut | None, ids: Mapping[str, str]) -> Cut | None:
    """Return the cut (turns left out of the prompt) of a copied message, with the new id of `Cut.first`.

    `ids`: new ids by old ids. Returns None if the message `Cut.first` was not copied.
    """
    return None if cut is None or cut.first not in ids else Cut(ids[cut.first], cut.n_ctx)


def turn_of(tree: MessageTree, message: str) -> str:
    """Return the id of the question that a message's turn begins with; the message's own id if there is no question."""
    for earlier in reversed(tree.path_to(message)):
        if earlier.role == "user":
            return earlier.id
    return message


def without_turn(tree: MessageTree, message: str) -> MessageTree:
    """Return the tree without the turn of a message (its question with all answers).

    Later questions then follow the message before that turn.
    """
    question = turn_of(tree, message)
    removed = {question}
    for found in tree.below(question):
        parent = tree.messages[found].parent
        # Answers go with their question, but later questions stay.
        if parent in removed and tree.messages[found].role != "user":
            removed.add(found)
    return _without(tree, removed)


def is_empty_failure(tree: MessageTree, message: str) -> bool:
    """Return whether a message is an answer without text that failed or was interrupted, and has no children."""
    known = tree.messages[message]
    # An answer is still "writing" in the database if the program was killed.
    is_lost = known.state in ("failed", "interrupted", "writing")
    is_empty = is_lost and not (known.content or known.reasoning or known.calls)
    return is_empty and message not in tree.children


def without_leaf(tree: MessageTree, message: str) -> MessageTree:
    """Return the tree without a message that has no children."""
    return _without(tree, {message})


class TreeChange(Struct, frozen=True):
    """The difference of two trees of a conversation.

    `removed`: ids of removed messages.
    `put`: new and changed messages, parents before children.
    `leaf`: id of the new leaf; None: the new tree is empty.
    """

    removed: tuple[str, ...]
    put: tuple[Message, ...]
    leaf: str | None


def difference(before: MessageTree, after: MessageTree) -> TreeChange:
    """Return the change that turns the tree `before` into `after`."""
    removed = tuple(message for message in before.messages if message not in after.messages)
    put = tuple(message for message in after.messages.values() if before.messages.get(message.id) != message)
    return TreeChange(removed, put, after.leaf)


def _tree_of(messages: Mapping[str, Message], leaf: str | None) -> MessageTree:
    """Return a tree of `messages` whose last shown message is `leaf`.

    `messages`: messages by id.

    Raises:
        ValueError: a parent is not among the messages.
    """
    for message in messages.values():
        if message.parent is not None and message.parent not in messages:
            raise ValueError(tr("the message before message {id} is missing", id=message.id[:40]))
    return MessageTree(messages, leaf)


def _without(tree: MessageTree, removed: set[str]) -> MessageTree:
    """Return the tree without the messages in `removed`. Their children move to the nearest remaining ancestor."""
    messages: dict[str, Message] = {}
    for message in tree.messages.values():
        if message.id not in removed:
            parent, cut = _nearest(tree, message.parent, removed), _cut_after(tree, message, removed)
            moved = parent != message.parent or cut != message.cut
            messages[message.id] = replace(message, parent=parent, cut=cut) if moved else message
    return replace(tree, messages=messages, leaf=_leaf_after(tree, MessageTree(messages), removed))


def _cut_after(tree: MessageTree, message: Message, removed: set[str]) -> Cut | None:
    """Return the cut (turns left out of the prompt) of a message after the messages in `removed` were taken out.

    If the message `Cut.first` was removed, the next remaining message of the path takes its place.
    """
    cut = message.cut
    if cut is None or cut.first not in removed:
        return cut
    path = [each.id for each in tree.path_to(message.id)]
    later = path[path.index(cut.first) :] if cut.first in path else []
    return next((Cut(each, cut.n_ctx) for each in later if each not in removed), None)


def _nearest(tree: MessageTree, message: str | None, removed: set[str]) -> str | None:
    while message is not None and message in removed:
        message = tree.messages[message].parent
    return message


def _leaf_after(tree: MessageTree, left: MessageTree, removed: set[str]) -> str | None:
    """Return the id of the last shown message after the messages in `removed` were taken out from `tree`.

    If the last shown message remains, it stays the same. Otherwise another message takes the place of the first removed
    message of the shown path: its nearest remaining version, else its nearest remaining ancestor, else the last
    remaining root. The newest branch below that message is then shown.

    `left`: the tree of the remaining messages.
    """
    if tree.leaf is None or tree.leaf not in removed:
        return tree.leaf
    first_removed = next(message for message in tree.path if message.id in removed)
    versions: Sequence[str] = tree.versions(first_removed.id)
    staying = [version for version in versions if version in left.messages]
    if staying:
        index = versions.index(first_removed.id)
        nearest = min(staying, key=lambda version: abs(versions.index(version) - index))
        return left.newest_leaf(nearest)
    kept = _nearest(tree, first_removed.id, removed)
    if kept is not None:
        return left.newest_leaf(kept)
    beginnings = left.children.get(None, ())
    return left.newest_leaf(beginnings[-1]) if beginnings else None
