"""An answer under way: kept before it is shown, thought and answer apart, whole at its end; what is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.chats.answer import AnswerInProgress
from engine.chats.asking import SYSTEM, answer_request, attachment_text, chat_messages, count_request, messages_by_id
from engine.chats.conversation import Conversation
from engine.chats.message import Attachment, Message, Timings
from engine.chats.store import ChatStore
from engine.chats.thinking import THINK, Told, begun_answer
from engine.chats.tree import MessageTree, tree_of
from engine.errors import EngineError
from engine.settings.sampling_settings import SamplingSettings
from tests.support.patience import DEADLINE_S

QUESTION = Message(id="q", role="user", content="Why?")
ANSWER = Message(id="a", role="assistant", content="", parent="q", state="writing")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChatStore]:
    store = ChatStore(tmp_path / "chats.sqlite")
    store.save(Conversation(id="c"))
    yield store
    store.close()


def begin(store: ChatStore, answer: Message = ANSWER, begun: str = "") -> tuple[AnswerInProgress, list[Told]]:
    store.apply("c", MessageTree(), tree_of((QUESTION, answer), "a")).result(DEADLINE_S)
    shown: list[Told] = []
    kept: list[str] = []

    def show(told: Told, error: EngineError | None) -> None:
        assert error is None
        shown.append(told)
        # what is painted now is on disk, also for another process
        kept.append(store.tree("c").path[-1].content)
        assert kept[-1].startswith("".join(each.content for each in shown))

    times = iter(range(100))
    return AnswerInProgress(store, "c", answer, show, begun=begun, clock=lambda: next(times)), shown


def test_each_piece_is_on_disk_before_it_is_shown_and_the_whole_at_the_end(store: ChatStore) -> None:
    answer, shown = begin(store)
    for text in ("<thi", "nk>hm", ", so</think>", "\n\nBe", "cause."):
        answer.add(text)
    assert not answer.is_thinking
    assert answer.marks == THINK
    whole, kept = answer.end("done", stop_reason="end_of_text", timings=Timings(prompt_tokens=3, generated_tokens=5))
    kept.result(DEADLINE_S)
    assert (whole.reasoning, whole.content) == ("hm, so", "Because.")
    assert whole.timings is not None
    assert whole.timings.generated_tokens == 5
    assert whole.timings.first_token_seconds == 1
    assert whole.timings.thinking_seconds is not None
    assert store.tree("c").path[-1] == whole
    assert "".join(told.content for told in shown) == "Because."
    assert "".join(told.reasoning for told in shown) == "hm, so"


def test_an_answer_goes_on_with_what_is_there(store: ChatStore) -> None:
    earlier = Timings(
        prompt_tokens=7,
        generated_tokens=3,
        generation_seconds=1.5,
        first_token_seconds=0.5,
        thinking_seconds=2.0,
    )
    before = Message(
        id="a", role="assistant", content="Be", reasoning="hm", parent="q", state="writing", timings=earlier
    )
    answer, _ = begin(store, before, begun_answer("hm", "Be", THINK))
    answer.add("cause.")
    assert answer.message.content == "Because."
    timings = Timings(prompt_tokens=9, cached_tokens=8, generated_tokens=4, generation_seconds=0.5)
    whole, kept = answer.end("stopped", timings=timings)
    kept.result(DEADLINE_S)
    assert whole.timings == msgspec.structs.replace(earlier, generated_tokens=7, generation_seconds=2.0)
    assert (whole.reasoning, whole.content, whole.state) == ("hm", "Because.", "stopped")


def test_a_piece_that_cannot_be_kept_is_shown_and_said_once(tmp_path: Path) -> None:
    store = ChatStore(tmp_path / "chats.sqlite")
    shown: list[tuple[str, bool]] = []
    answer = AnswerInProgress(store, "c", ANSWER, lambda told, error: shown.append((told.content, error is not None)))
    store.close()
    answer.add("Be")
    answer.add("cause.")
    assert shown == [("Be", True), ("cause.", False)]


def test_a_model_is_asked_in_turns() -> None:
    file = Attachment(id="f", kind="text", name="a.md", mime="", sha256="", size_bytes=9, text="```\nx\n```")
    path = (
        Message(id="1", role="user", content="Look", attachments=(file,)),
        Message(id="2", role="assistant", content="Yes", reasoning="hm"),
        Message(id="3", role="user", content="Never answered"),
        Message(id="4", role="assistant", content=" ", state="failed"),
        Message(id="5", role="user", content="Last"),
    )
    asked = messages_by_id("Be kind.", path)
    assert [(each, message.role) for each, message in asked.items()] == [
        (SYSTEM, "system"),
        ("1", "user"),
        ("2", "assistant"),
        ("5", "user"),
    ]
    assert asked["1"].content == "File: a.md\n````\n```\nx\n```\n````\n\nLook"
    assert asked["2"].content == "Yes"
    assert chat_messages("Be kind.", path) == tuple(asked.values())
    request = answer_request(asked.values(), SamplingSettings(top_k=3), begun="x")
    assert (len(request.messages), request.begun) == (4, "x")
    assert ("<think>", "</think>") in request.thinking
    counted = count_request(asked.values(), path[:1])
    assert counted.texts == (attachment_text(file),)
