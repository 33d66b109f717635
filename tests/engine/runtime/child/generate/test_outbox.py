"""Messages that `Outbox` holds back and joins, with a simulated clock."""

from __future__ import annotations

from engine.runtime.child.generate.outbox import Outbox
from engine.runtime.protocol.messages import Failure, Message, Piece, Reading, TokenChoice
from engine.runtime.protocol.requests import STREAM_INTERVAL_S, WHOLE_INTERVAL_S

FAST_S = STREAM_INTERVAL_S / 4.5
CHOICE = TokenChoice("a", 0.5, ())


class Desk:
    """An outbox whose writes are recorded, and its clock."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.written: list[list[Message]] = []
        self.outbox = Outbox(lambda messages: self.written.append(list(messages)), lambda: self.now_s)

    def token(self, *pieces: Message, batch_s: float, interval_s: float = STREAM_INTERVAL_S) -> None:
        """Let a batch of `batch_s` pass, which gives `pieces`."""
        self.now_s += batch_s
        self.outbox.send_soon(pieces, batch_s, interval_s)


def piece(text: str, request: int = 1) -> Piece:
    return Piece(request=request, text=text, choices=(CHOICE,), context_used=len(text))


def reading() -> Reading:
    return Reading(request=1, read_tokens=2, prompt_tokens=3)


def test_pieces_of_fast_answers_are_joined_for_each_request() -> None:
    desk = Desk()
    for number in range(4):
        desk.token(piece(f"a{number}"), piece(f"b{number}", 2), batch_s=FAST_S)
    # A fifth batch would end too late.
    assert desk.written == [
        [
            Piece(request=1, text="a0a1a2a3", choices=(CHOICE,) * 4, context_used=2),
            Piece(request=2, text="b0b1b2b3", choices=(CHOICE,) * 4, context_used=2),
        ]
    ]


def test_each_piece_of_a_slow_answer_is_sent_at_once() -> None:
    desk = Desk()
    for number in range(3):
        desk.token(piece(str(number)), batch_s=STREAM_INTERVAL_S * 0.6)
    assert desk.written == [[piece("0")], [piece("1")], [piece("2")]]


def test_an_answer_that_nobody_sees_grow_is_sent_once_a_second() -> None:
    desk = Desk()
    for _ in range(100):
        desk.token(piece("a"), batch_s=0.025, interval_s=WHOLE_INTERVAL_S)
    assert [len(written) for written in desk.written] == [1, 1]
    assert all(isinstance(each, Piece) and 38 <= len(each.text) <= 40 for (each,) in desk.written)


def test_other_messages_are_sent_at_once_after_the_held_pieces() -> None:
    desk = Desk()
    desk.token(piece("a"), batch_s=FAST_S)
    assert desk.written == []
    end = Failure(kind="cancelled", message="stopped", request=1)
    desk.outbox.send(end)
    assert desk.written == [[piece("a"), end]]
    desk.token(reading(), piece("b"), batch_s=FAST_S)
    assert desk.written[1:] == [[reading(), piece("b")]]


def test_a_heartbeat_sends_the_held_pieces_before_itself() -> None:
    desk = Desk()
    desk.token(piece("a"), batch_s=FAST_S)
    desk.outbox.send_reading(lambda: [reading()])
    assert desk.written == [[piece("a"), reading()]]


def test_nothing_is_written_if_there_is_nothing_to_send() -> None:
    desk = Desk()
    desk.outbox.send()
    desk.token(batch_s=STREAM_INTERVAL_S)
    assert desk.written == []
