"""The message tree: any sequence of edits, versions and deletions leaves a valid tree."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.chat.message import Attachment, Message
from engine.chat.tree import (
    MessageTree,
    add,
    branched,
    changed,
    difference,
    edited,
    mended_tree,
    select,
    step_version,
    tree_of,
    turn_of,
    without_turn,
)

OPERATIONS = ("ask", "answer", "edit", "select", "step", "pin", "turn")


def question(ident: str, parent: str | None = None) -> Message:
    return Message(id=ident, role="user", content=f"question {ident}", parent=parent)


def answer(ident: str, parent: str) -> Message:
    return Message(id=ident, role="assistant", content=f"answer {ident}", parent=parent)


def two_turns() -> MessageTree:
    messages = (question("q1"), answer("a1", "q1"), question("q2", "a1"), answer("a2", "q2"))
    return tree_of(messages, "a2")


def ids(tree: MessageTree) -> list[str]:
    return [message.id for message in tree.path]


def check(tree: MessageTree) -> None:
    """Every parent comes before its children, the leaf is there, and roles take turns on every branch."""
    tree_of(tree.messages.values(), tree.leaf)
    assert (tree.leaf is None) <= (not tree.messages)
    for message in tree.messages.values():
        if message.role == "assistant":
            assert message.parent is not None
            assert tree.messages[message.parent].role == "user"
        elif message.parent is not None:
            assert tree.messages[message.parent].role == "assistant"


@st.composite
def edits(draw: st.DrawFn) -> list[tuple[str, int]]:
    return draw(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 50)), max_size=40))


def step(tree: MessageTree, operation: str, number: int, name: str) -> MessageTree:
    """Do one of the operations where it can be done, to the message that `number` picks."""
    known = list(tree.messages.values())
    users = [message for message in known if message.role == "user"]
    if operation == "ask" or not known:
        ends = [message for message in known if message.role == "assistant"]
        return add(tree, question(name, ends[number % len(ends)].id if ends else None))
    if operation == "answer":
        return add(tree, answer(name, users[number % len(users)].id))
    picked = known[number % len(known)]
    if operation == "edit":
        return edited(tree, picked.id, "other words", created_ms=number)
    if operation == "select":
        return select(tree, picked.id)
    if operation == "step":
        return step_version(tree, picked.id, number - 25)
    if operation == "pin":
        return changed(tree, msgspec.structs.replace(picked, pinned=True))
    return without_turn(tree, picked.id)


@given(edits())
def test_any_sequence_leaves_a_tree_and_loses_only_what_was_taken_away(operations: list[tuple[str, int]]) -> None:
    tree = MessageTree()
    for place, (operation, number) in enumerate(operations):
        before = tree
        tree = step(before, operation, number, f"m{place}")
        check(tree)
        if operation != "turn":
            assert set(before.messages) <= set(tree.messages)
        else:
            gone = [message for message in before.messages if message not in tree.messages]
            assert gone or not before.messages
        change = difference(before, tree)
        again = {ident: message for ident, message in before.messages.items() if ident not in change.removed}
        again.update({message.id: message for message in change.put})
        assert again == dict(tree.messages)
        assert change.leaf == tree.leaf


@given(edits(), st.integers(0, 50))
def test_a_branch_says_the_same_and_shares_nothing(operations: list[tuple[str, int]], number: int) -> None:
    tree = MessageTree()
    for place, (operation, picked) in enumerate(operations):
        tree = step(tree, operation, picked, f"m{place}")
    if not tree.messages:
        return
    message = list(tree.messages)[number % len(tree.messages)]
    branch = branched(tree, message)
    check(branch)
    assert [m.content for m in branch.path] == [m.content for m in tree.path_to(message)]
    assert not set(branch.messages) & set(tree.messages)


def test_an_edit_is_a_version_beside_and_the_old_branch_is_one_step_away() -> None:
    tree = edited(two_turns(), "q2", "another question", created_ms=5)
    assert [message.content for message in tree.path] == ["question q1", "answer a1", "another question"]
    assert tree.versions(tree.path[-1].id) == ("q2", tree.path[-1].id)
    assert ids(step_version(tree, tree.path[-1].id, -1)) == ["q1", "a1", "q2", "a2"]
    assert step_version(tree, tree.path[-1].id, 7).leaf == tree.leaf


def test_an_edit_keeps_attachments() -> None:
    file = Attachment(id="f", kind="text", name="a.py", mime="text/x-python", sha256="0" * 64, size_bytes=3, text="abc")
    tree = add(MessageTree(), msgspec.structs.replace(question("q"), attachments=(file,)))
    (kept,) = edited(tree, "q", "other", created_ms=1).path[-1].attachments
    assert (kept.name, kept.text) == ("a.py", "abc")
    assert kept.id != "f"


def test_a_turn_goes_with_all_its_answers_and_later_ones_move_up() -> None:
    tree = add(two_turns(), answer("a1b", "q1"))
    left = without_turn(select(tree, "a2"), "a1")
    assert set(left.messages) == {"q2", "a2"}
    assert ids(left) == ["q2", "a2"]
    assert left.messages["q2"].parent is None


def test_a_turn_goes_and_the_nearest_version_of_its_question_is_shown() -> None:
    tree = edited(two_turns(), "q2", "other words", created_ms=1)
    assert ids(without_turn(tree, tree.path[-1].id)) == ["q1", "a1", "q2", "a2"]
    assert ids(without_turn(two_turns(), "q2")) == ["q1", "a1"]
    left = without_turn(tree_of((question("q1"),), "q1"), "q1")
    assert left == MessageTree({}, None)


def test_what_is_shown_stays_where_something_else_is_taken_away() -> None:
    tree = select(edited(two_turns(), "q2", "other words", created_ms=1), "a2")
    other = next(message.id for message in tree.messages.values() if message.content == "other words")
    assert ids(without_turn(tree, other)) == ["q1", "a1", "q2", "a2"]


def test_turns_are_named_by_their_question() -> None:
    assert turn_of(two_turns(), "a2") == "q2"
    assert turn_of(tree_of([Message(id="s", role="system", content="")], "s"), "s") == "s"


@pytest.mark.parametrize(
    ("messages", "leaf", "reason"),
    [
        ([question("q"), question("q")], None, "twice"),
        ([answer("a", "q"), question("q")], None, "is missing"),
        ([question("q")], "x", "message that was shown last"),
    ],
)
def test_what_is_no_tree_is_refused(messages: list[Message], leaf: str | None, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        tree_of(messages, leaf)


@given(st.lists(st.tuples(st.integers(0, 12), st.none() | st.integers(0, 12)), max_size=13, unique_by=lambda it: it[0]))
def test_whatever_was_kept_can_be_shown(kept: list[tuple[int, int | None]]) -> None:
    messages = [question(str(own), None if parent is None else str(parent)) for own, parent in kept]
    tree = mended_tree(messages, "0")
    assert set(tree.messages) == {message.id for message in messages}
    tree_of(tree.messages.values(), tree.leaf)
