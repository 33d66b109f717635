"""Texts and JSON fields about drafts."""

from __future__ import annotations

import json

import msgspec
import pytest

from app.chats.shown_messages import answer_note
from app.cli.chat_printers import JsonChat, TextChat
from app.cli.printers import JsonPrinter, TextPrinter
from engine.api.wire.answer import timings_of
from engine.chat.llama_ui import _timings as exported
from engine.chat.message import Message, Timings
from engine.devices.device import Rig, make_host
from engine.runtime.protocol.messages import AllocationFailure, BufferMemory, DraftStatistics, Generated, StageProgress
from engine.runtime.session.drafts import PAUSES, draft_words
from engine.runtime.session.reports import done_event, out_of_memory_event
from engine.runtime.session.state import LoadProgress

DRAFTS = DraftStatistics(kind="model", drafted_tokens=100, accepted_tokens=62, steps=45, gain=1.31)
WORDS = "drafted tokens: 62 % accepted, 2.4 tokens per step, 1.3 times as fast as without drafts"
GENERATED = Generated(
    request=1,
    prompt_tokens=3,
    cached_tokens=0,
    evaluated_tokens=3,
    generated_tokens=108,
    prompt_seconds=1.0,
    generation_seconds=2.0,
    context_used=111,
    stop_reason="length",
    draft=DRAFTS,
)
DONE = done_event(GENERATED)


def test_the_words() -> None:
    assert draft_words(None) == []
    assert draft_words(DraftStatistics(kind="ngram", steps=9)) == [], "no match costs nothing, and says nothing"
    assert draft_words(DRAFTS) == [WORDS]
    short = msgspec.structs.replace(DRAFTS, gain=None)
    assert draft_words(short) == ["drafted tokens: 62 % accepted, 2.4 tokens per step"]
    for pause, sentence in PAUSES.items():
        assert draft_words(msgspec.structs.replace(DRAFTS, paused=pause)) == [WORDS, sentence]


def test_they_stand_below_an_answer() -> None:
    timings = Timings(generated_tokens=108, generation_seconds=2.0, draft=DRAFTS)
    answer = Message(id="a", parent=None, role="assistant", created_ms=0, content="x", timings=timings)
    assert answer_note(answer) == f"54.0 tokens/s · 108 tokens · {WORDS}"
    # As stored, and as a continued answer has them.
    assert msgspec.json.decode(msgspec.json.encode(timings), type=Timings) == timings
    assert timings.after(Timings(generated_tokens=5)).draft == DRAFTS


def test_the_command_line_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    message = Message(id="a", parent=None, role="assistant", created_ms=0, content="x")
    TextChat().done(DONE, message)
    TextPrinter().show(DONE)
    assert capsys.readouterr().err.count(WORDS) == 2
    JsonChat().done(DONE, message)
    JsonPrinter().show(DONE)
    expected = {
        "kind": "model", "drafted_tokens": 100, "accepted_tokens": 62, "steps": 45, "gain": 1.31, "paused": "",
    }  # fmt: skip
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["draft"] for line in lines] == [expected, expected]
    plain = msgspec.structs.replace(DONE, draft=None)
    JsonChat().done(plain, message)
    JsonPrinter().show(plain)
    assert all("draft" not in json.loads(line) for line in capsys.readouterr().out.splitlines())


def test_the_server_and_exports_have_the_fields_of_llama_server() -> None:
    told = timings_of(DONE)
    assert (told["draft_n"], told["draft_n_accepted"]) == (100, 62)
    assert "draft_n" not in timings_of(msgspec.structs.replace(DONE, draft=None))
    found = exported(Timings(draft=DRAFTS))
    assert (found["draft_n"], found["draft_n_accepted"]) == (100, 62)


def test_the_progress_of_the_draft_model_comes_after_that_of_the_model() -> None:
    progress = LoadProgress("warm_up", 1.0)
    again = progress.after(StageProgress(stage="read", fraction=0.25, draft=True))
    assert again == LoadProgress("read", 0.25, draft=True)
    assert again.after(StageProgress(stage="warm_up")) is None, "a late message about the model itself"


def test_a_refused_allocation_says_that_it_was_the_draft() -> None:
    rig = Rig((), make_host("host", 1 << 30, 1 << 30))
    refused = AllocationFailure(
        stage="context",
        device="CPU",
        buffer_type="CPU",
        requested_bytes=1 << 20,
        free_bytes=None,
        parts=(BufferMemory(device="CPU", buffer_type="CPU", weights_bytes=5, draft=True),),
        text="failed",
        draft=True,
    )
    message = out_of_memory_event(rig, refused).message
    assert ", for the draft model: 1.0 MiB requested" in message
    assert "Move the draft model to another device" in message
