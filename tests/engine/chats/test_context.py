"""What is left out of a full context: whole old turns, never the question, the system prompt or what is pinned."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.chats.context import OVERFLOWS, Overflow, choose, turns_of, use_of
from engine.chats.message import Message


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
    assert "Leave out" in choose(said, tokens, 400, "ask").sentence()
    assert "200 tokens longer" in choose(said, tokens, 400, "stop").sentence()
    assert "oldest turns" in choose(said, tokens, 400).sentence()
    assert choose(said, tokens, 50).decision == "full"


@given(*[st.integers(0, 1000)] * 4)
def test_the_meter_adds_up(used: int, system: int, attachments: int, reserve: int) -> None:
    use = use_of(used, system, attachments, reserve, 1024)
    assert use.used == used
    assert min(use.system, use.history, use.attachments, use.reserve) >= 0
    assert use.used + use.reserve <= 1024
    if system + attachments <= used and used + reserve <= 1024:
        assert (use.system, use.attachments, use.reserve) == (system, attachments, reserve)
