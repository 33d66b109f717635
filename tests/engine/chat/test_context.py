"""Turns dropped from a full context: whole old ones, never the question, system prompt or pinned ones.

The choice stays the same for later answers, after deletions, in branches and in files.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.chat.context import (
    OVERFLOWS,
    Overflow,
    choose,
    cut_of_answer,
    cut_of_path,
    cut_that_leaves_out,
    left_out_of,
    turns_of,
    use_of,
)
from engine.chat.conversation import Conversation
from engine.chat.exports import as_json
from engine.chat.imports import parse_conversations
from engine.chat.message import Cut, Message
from engine.chat.store import ChatStore
from engine.chat.tree import MessageTree, add, branched, tree_of, without_turn


def path(turns: int, pinned: frozenset[int] = frozenset(), *, system: bool = True) -> tuple[Message, ...]:
    messages = [Message(id="s", role="system", content="")] if system else []
    for turn in range(turns):
        messages.append(Message(id=f"q{turn}", role="user", content="", pinned=turn in pinned))
        if turn < turns - 1:
            messages.append(Message(id=f"a{turn}", role="assistant", content=""))
    return tuple(messages)


@given(
    st.integers(1, 12),
    st.lists(st.integers(0, 200), min_size=25, max_size=25),
    st.integers(0, 3000),
    st.sampled_from(OVERFLOWS),
    st.frozensets(st.integers(0, 11)),
)
def test_what_is_shown_fits_and_keeps_what_must_stay(
    turns: int, sizes: list[int], room: int, policy: Overflow, pinned: frozenset[int]
) -> None:
    said = path(turns, pinned)
    tokens = {message.id: size for message, size in zip(said, sizes, strict=False)}
    fit = choose(said, tokens, room, policy)
    need = sum(tokens[message] for message in fit.shown)
    assert (need <= room) == (fit.decision == "fits")
    assert {*fit.shown} | {*fit.left_out} == {message.id for message in said}
    assert f"q{turns - 1}" in fit.shown
    assert "s" in fit.shown
    assert all(message.id in fit.shown for message in said if message.pinned)
    for turn in turns_of(said):
        assert len({message.id in fit.shown for message in turn}) == 1
    assert fit.over_tokens == max(0, need - room)
    if policy != "drop":
        assert not fit.left_out


@given(st.integers(2, 12), st.integers(100, 2000))
def test_what_was_left_out_stays_out_and_is_said_once(turns: int, room: int) -> None:
    said = path(turns)
    tokens = {message.id: 100 for message in said}
    first = choose(said, tokens, room)
    again = choose(said, tokens, room, already=first.left_out)
    if first.decision == "fits":
        assert (again.shown, again.newly, again.sentence()) == (first.shown, (), "")
    assert bool(first.newly) == bool(first.left_out)


def test_several_turns_fit_after_some_were_left_out() -> None:
    said = path(10)
    tokens = {message.id: 10 for message in said}
    fit = choose(said, tokens, 150)
    assert fit.left_out[:2] == ("q0", "a0")
    assert sum(tokens[message] for message in fit.shown) <= 150 * 0.75


def test_policies_say_what_is_wrong() -> None:
    said = path(3)
    tokens = {message.id: 100 for message in said}
    assert "Drop the oldest" in choose(said, tokens, 400, "ask").sentence()
    assert "200 tokens too long" in choose(said, tokens, 400, "stop").sentence()
    assert "oldest messages" in choose(said, tokens, 400).sentence()
    assert choose(said, tokens, 50).decision == "full"


@given(*[st.integers(0, 1000)] * 4)
def test_the_meter_adds_up(used: int, system: int, attachments: int, reserve: int) -> None:
    use = use_of(used, system, attachments, reserve, 1024)
    assert use.used == used
    assert min(use.system, use.history, use.attachments, use.reserve) >= 0
    assert use.used + use.reserve <= 1024
    if system + attachments <= used and used + reserve <= 1024:
        assert (use.system, use.attachments, use.reserve) == (system, attachments, reserve)


def talk(turns: int, pinned: frozenset[int] = frozenset(), cut: Cut | None = None) -> MessageTree:
    """Questions and answers, of which the last one has the cut."""
    messages: list[Message] = []
    for turn in range(turns):
        before = messages[-1].id if messages else None
        messages.append(Message(id=f"q{turn}", role="user", content="", parent=before, pinned=turn in pinned))
        last = turn == turns - 1
        messages.append(
            Message(id=f"a{turn}", role="assistant", content="", parent=f"q{turn}", cut=cut if last else None)
        )
    return tree_of(messages, messages[-1].id)


@given(st.integers(1, 12), st.integers(0, 1500), st.frozensets(st.integers(0, 11)))
def test_the_same_is_left_out_for_the_next_answer(turns: int, room: int, pinned: frozenset[int]) -> None:
    tree = talk(turns, pinned)
    question = tree.path[:-1]
    fit = choose(question, {message.id: 60 for message in question}, room)
    if fit.decision != "fits":
        return
    cut = cut_that_leaves_out(question, fit.left_out, 512)
    assert (cut is None) == (not fit.left_out)
    later = talk(turns, pinned, cut).path
    assert cut_of_path(later, 512) == cut
    assert left_out_of(later, cut) == set(fit.left_out)


@pytest.mark.parametrize(("n_ctx", "holds"), [(None, True), (256, True), (512, True), (513, False)])
def test_in_a_longer_context_it_is_decided_anew(n_ctx: int | None, holds: bool) -> None:
    assert (cut_of_path(talk(4, cut=Cut("q2", 512)).path, n_ctx) is not None) == holds


def test_another_version_begins_with_the_cut_of_the_one_before_it_and_a_question_with_that_of_its_path() -> None:
    tree = talk(4, cut=Cut("q2", 512))
    again = Message(id="b3", role="assistant", content="", parent="q3")
    assert cut_of_answer(add(tree, again), "b3", 512) == Cut("q2", 512)
    question = Message(id="q4", role="user", content="", parent="a3")
    follows = add(add(tree, question), Message(id="a4", role="assistant", content="", parent="q4"))
    assert cut_of_answer(follows, "a4", 512) == Cut("q2", 512)
    assert cut_of_answer(tree, "a2", 512) is None


def test_where_the_first_turn_shown_is_deleted_the_one_after_it_is_the_first() -> None:
    left = without_turn(talk(4, cut=Cut("q1", 512)), "q1")
    assert left.path[-1].cut == Cut("q2", 512)
    assert left_out_of(left.path, left.path[-1].cut) == {"q0", "a0"}
    assert without_turn(talk(4, cut=Cut("q1", 512)), "q0").path[-1].cut == Cut("q1", 512)


def test_a_branch_a_file_and_the_database_leave_out_the_same(tmp_path: Path) -> None:
    tree = talk(4, cut=Cut("q2", 512))
    conversation = Conversation(id="c", leaf=tree.leaf)
    (imported,) = parse_conversations(as_json([(conversation, tree)], {}), source="a.json")
    with_store = ChatStore(tmp_path / "chats.sqlite3")
    with_store.save(conversation)
    with_store.apply("c", MessageTree(), tree).result()
    kept = with_store.tree("c")
    with_store.close()
    assert kept == tree
    for other in (branched(tree, "a3"), imported.tree, kept):
        left_out = left_out_of(other.path, cut_of_path(other.path, 512))
        assert [message.id in left_out for message in other.path] == [True] * 4 + [False] * 4


def test_a_cut_of_a_file_that_names_no_message_is_none() -> None:
    tree = talk(2, cut=Cut("nowhere", 512))
    (imported,) = parse_conversations(as_json([(Conversation(id="c"), tree)], {}), source="a.json")
    assert [message.cut for message in imported.tree.messages.values()] == [None] * 4
    assert left_out_of(tree.path, Cut("nowhere", 512)) == frozenset()
