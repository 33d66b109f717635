"""The state machine that writes an answer, driven by hand and by random inputs; window and command line share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.chat.answer import (
    AnswerOptions,
    AnswerRun,
    Append,
    AskOverflow,
    Count,
    Effects,
    Finish,
    Notice,
    ReadFiles,
    Restore,
    SendRequest,
    StopAnswer,
    continued_answer,
    layout_words,
    loss_text,
    new_answer,
)
from engine.chat.asking import (
    SYSTEM,
    answer_request,
    attachment_text,
    chat_messages,
    choices_in_prompt,
    messages_by_id,
    texts_of,
)
from engine.chat.context import Overflow
from engine.chat.conversation import TITLE_CHARACTERS, title_of, title_of_message
from engine.chat.message import Attachment, Message, Timings, new_user_message
from engine.chat.thinking import THINK, begun_answer
from engine.chat.tree import MessageTree, add, tree_of
from engine.planning.layout.layout import Layout, make_layout, single_device
from engine.planning.settings.sampling_settings import SamplingSettings
from engine.runtime.protocol.messages import Counted, TokenChoice
from engine.runtime.session.events import Cancelled, Crashed, Done, Failed, Shifted

QUESTION = Message(id="q", role="user", content="Why?")
IMAGE = Attachment(id="i", kind="image", name="a.png", mime="image/png", sha256="ab", size_bytes=1)


def done(stop_reason: str = "end_of_text", generated_tokens: int = 5) -> Done:
    return msgspec.convert(
        {
            "event": "done",
            "prompt_tokens": 9,
            "cached_tokens": 3,
            "generated_tokens": generated_tokens,
            "prompt_tokens_per_second": 2.0,
            "generation_tokens_per_second": 10.0,
            "stop_reason": stop_reason,
        },
        Done,
    )


def begin(tree: MessageTree | None = None, options: AnswerOptions | None = None) -> tuple[AnswerRun, Effects]:
    """Return an answer for which the model is to be asked, counted or read, with the effects."""
    run = new_answer("c", tree or tree_of((QUESTION,), "q"), options or AnswerOptions())
    assert run.begin() == (Restore(),)
    return run, run.restored()


def counted(request: Count, each: int, n_ctx: int = 256) -> Counted:
    messages = request.request.messages
    return Counted(request=0, prompt=each * len(messages), messages=(each,) * len(messages), texts=(), n_ctx=n_ctx)


def long_talk(turns: int, *, pinned: str = "") -> MessageTree:
    tree = MessageTree()
    for turn in range(turns):
        question = Message(id=f"q{turn}", role="user", content="x" * 100, parent=tree.leaf, pinned=pinned == f"q{turn}")
        tree = add(tree, question)
        if turn < turns - 1:
            tree = add(tree, Message(id=f"a{turn}", role="assistant", content="y" * 100, parent=question.id))
    return tree


def test_each_piece_is_written_before_it_counts_and_the_whole_at_the_end() -> None:
    run, effects = begin()
    (ask,) = effects
    assert isinstance(ask, SendRequest)
    assert [message.content for message in ask.request.messages] == ["Why?"]
    shown = []
    for text in ("<thi", "nk>hm", ", so</think>", "\n\nBe", "cause."):
        run.token(text)
        for piece in run.flush():
            assert isinstance(piece, Append)
            before = run.message
            run.written(piece)
            shown.append(piece)
            assert run.message.content == before.content + piece.content
    assert not run.is_thinking
    assert run.marks == THINK
    (finish,) = run.done(done())
    assert isinstance(finish, Finish)
    whole = finish.message
    assert (whole.reasoning, whole.content, whole.state) == ("hm, so", "Because.", "done")
    assert "".join(piece.content for piece in shown) == "Because."
    assert "".join(piece.reasoning for piece in shown) == "hm, so"
    assert whole.timings is not None
    assert (whole.timings.generated_tokens, whole.timings.prompt_seconds) == (5, 3.0)
    assert whole.timings.thinking_seconds is not None


def test_what_came_since_the_last_piece_is_written_together_and_the_rest_before_the_end() -> None:
    run, _ = begin()
    assert run.flush() == ()
    run.token("Be")
    run.token("cau")
    assert run.flush() == (Append(run.message.id, "Becau"),)
    run.token("se")
    rest, finish = run.done(done())
    assert (rest, isinstance(finish, Finish)) == (Append(run.message.id, "se"), True)
    run.written(Append(run.message.id, "Becau"))
    assert run.message.content == "Because", "the whole message, whatever is written late"


def test_an_answer_goes_on_with_what_is_there() -> None:
    earlier = Timings(
        prompt_tokens=7, generated_tokens=3, generation_seconds=1.5, first_token_seconds=0.5, thinking_seconds=2.0
    )
    before = Message(
        id="a", role="assistant", content="Be", reasoning="hm", parent="q", timings=earlier, note="x", state="stopped"
    )
    tree = tree_of((QUESTION, before), "a")
    run = continued_answer("c", tree, before, AnswerOptions(), begun_answer("hm", "Be", THINK))
    assert (run.tree.messages["a"].state, run.tree.messages["a"].note) == ("writing", "")
    (ask,) = run.restored()
    assert isinstance(ask, SendRequest)
    assert ask.request.begun.endswith("Be")
    run.token("cause.")
    *_, finish = run.done(done("stopped", 4))
    assert isinstance(finish, Finish)
    whole = finish.message
    assert whole.timings is not None
    assert (whole.timings.generated_tokens, whole.timings.first_token_seconds) == (7, 0.5)
    assert (whole.timings.thinking_seconds, whole.timings.prompt_tokens) == (2.0, 7)
    assert (whole.reasoning, whole.content, whole.state) == ("hm", "Because.", "stopped")


def test_a_thought_that_is_ended_is_what_the_next_answer_goes_on_from() -> None:
    run, _ = begin()
    assert run.answer_now() == ()
    run.token("<think>hm, that")
    run.flush()
    assert run.answer_now() == (StopAnswer(),)
    assert run.answer_now() == ()
    assert run.continuation is None
    run.done(done("stopped"))
    assert run.continuation == "<think>\nhm, that\n</think>\n\n"


@pytest.mark.parametrize(
    ("text", "state", "note"),
    [("", "failed", "It is gone."), ("Be", "interrupted", "It is gone. The partial answer was kept.")],
)
def test_an_answer_that_breaks_off_is_interrupted_where_text_came_and_failed_where_none_did(
    text: str, state: str, note: str
) -> None:
    run, _ = begin()
    if text:
        run.token(text)
    *_, finish = run.fail(loss_text(Failed(kind="unreachable", message="It is gone.")))
    assert isinstance(finish, Finish)
    assert (finish.message.state, finish.message.note, finish.failure) == (state, note, "It is gone.")
    assert (finish.message.timings is None) == (not text)
    assert run.fail("again") == run.done(done()) == run.stop() == ()


def test_a_loss_has_one_sentence() -> None:
    assert "Stopped before" in loss_text(Cancelled(stage="warm_up"))
    crashed = Crashed(kind="crashed", signal=9, message="Many words.")
    assert loss_text(crashed) == "The engine ended during this answer."


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (make_layout(3, ["CUDA0", "CUDA0", "CPU"]), "CUDA0 0–1, CPU 2"),
        (single_device(3, "CPU"), "CPU 0–2"),
    ],
)
def test_the_layout_of_an_answer_is_kept_in_one_form(layout: Layout, words: str) -> None:
    assert layout_words(layout) == words
    run, _ = begin(options=AnswerOptions(model="ada", model_identity="id", layout=layout))
    assert (run.message.layout, run.message.model, run.message.model_identity) == (words, "ada", "id")


def test_a_short_prompt_is_not_counted_and_a_long_one_is() -> None:
    options = AnswerOptions(n_ctx=256)
    assert [type(effect) for effect in begin(options=options)[1]] == [SendRequest]
    run, (count,) = begin(long_talk(2), options)
    assert isinstance(count, Count)
    assert [type(effect) for effect in run.counted(counted(count, 10))] == [SendRequest]
    assert run.counted(counted(count, 10)) == ()


def test_turns_that_are_left_out_are_counted_anew_and_said_once() -> None:
    run, (count,) = begin(long_talk(5, pinned="q1"), AnswerOptions(n_ctx=256))
    assert isinstance(count, Count)
    notice, again = run.counted(counted(count, 50))
    assert isinstance(notice, Notice)
    assert isinstance(again, Count)
    assert run.left_out
    assert not {"q1", "a1", "q4"} & run.left_out
    assert len(again.request.messages) == 9 - len(run.left_out)
    # the template writes more than was thought: others are left out, without another word
    more, *_ = run.counted(counted(again, 60))
    while isinstance(more, Count):
        (more,) = run.counted(counted(more, 30))
    assert isinstance(more, SendRequest)
    *_, finish = run.done(done())
    assert isinstance(finish, Finish)
    assert finish.message.note == notice.sentence
    assert finish.message.cut is not None
    later = add(add(run.tree, finish.message), Message(id="q5", role="user", content="z", parent=finish.message.id))
    run, (count,) = begin(later, AnswerOptions(n_ctx=256))
    assert run.message.cut == finish.message.cut
    assert isinstance(count, Count)
    assert [type(effect) for effect in run.counted(counted(count, 5))] == [SendRequest]
    *_, finish = run.done(done())
    assert isinstance(finish, Finish)
    assert finish.message.note == ""


def test_a_full_context_asks_a_person_once_or_fails() -> None:
    def full(overflow: Overflow) -> tuple[AnswerRun, Effects, Count]:
        run, (count,) = begin(long_talk(5), AnswerOptions(n_ctx=256, overflow=overflow))
        assert isinstance(count, Count)
        return run, run.counted(counted(count, 45)), count

    run, (failed,), _ = full("stop")
    assert isinstance(failed, Finish)
    assert failed.message.state == "failed"
    assert "too long for the context" in failed.failure
    assert "256" in failed.failure
    run, (asked,), _ = full("ask")
    assert isinstance(asked, AskOverflow)
    assert "Drop the oldest" in asked.sentence
    taken_back, _, again = run.answer_overflow(True)
    assert taken_back == AskOverflow("")
    assert isinstance(again, Count)
    (second, *_) = run.counted(counted(again, 90))
    assert isinstance(second, Count), "a person is asked once"
    refusals: list[Callable[[AnswerRun], Effects]] = [
        lambda run: run.answer_overflow(False),
        lambda run: run.stop(),
        lambda run: run.fail("x"),
    ]
    for refuse in refusals:
        run, _, _ = full("ask")
        taken_back, finish = refuse(run)
        assert taken_back == AskOverflow("")
        assert isinstance(finish, Finish)
        assert finish.message.state == "failed"


def test_a_shifted_context_is_told_at_once_and_below_the_answer() -> None:
    run, _ = begin()
    run.token("Well")
    (notice,) = run.shifted(Shifted(kept_tokens=12, dropped_tokens=100))
    assert isinstance(notice, Notice)
    assert "the first 12 tokens and the newest" in notice.sentence
    *_, finish = run.done(done())
    assert isinstance(finish, Finish)
    assert (finish.message.state, finish.message.note) == ("done", notice.sentence)
    assert run.shifted(Shifted(kept_tokens=12, dropped_tokens=100)) == ()
    run, _ = begin()
    run.token("Well")
    run.shifted(Shifted(kept_tokens=12, dropped_tokens=100))
    *_, finish = run.fail("It was lost.")
    assert isinstance(finish, Finish)
    assert finish.message.note.startswith(notice.sentence)
    assert "It was lost." in finish.message.note


def test_it_can_be_stopped_before_the_model_is_asked_and_while_it_answers() -> None:
    run, (count,) = begin(long_talk(2), AnswerOptions(n_ctx=256))
    assert isinstance(count, Count)
    (finish,) = run.stop()
    assert isinstance(finish, Finish)
    assert "before the model began to answer" in finish.failure
    assert run.counted(counted(count, 1)) == ()
    run, _ = begin()
    assert run.stop() == (StopAnswer(),)


def test_files_are_read_before_the_model_is_asked() -> None:
    tree = tree_of((new_user_message("Look", None, [IMAGE]),), None)
    tree = MessageTree(tree.messages, next(iter(tree.messages)))
    run, (read,) = begin(tree)
    if isinstance(read, Count):
        (read,) = run.counted(counted(read, 9))
    assert read == ReadFiles(("ab",))
    (ask,) = run.files_read({"ab": b"data"})
    assert isinstance(ask, SendRequest)
    assert ask.request.messages[0].media[0].data == b"data"
    run, (read,) = begin(tree)
    if isinstance(read, Count):
        (read,) = run.counted(counted(read, 9))
    (finish,) = run.files_read({})
    assert isinstance(finish, Finish)
    assert "no longer saved" in finish.failure


INPUTS = ("restored", "counted", "overflow", "files", "token", "flush", "stop", "answer_now", "done", "fail")


@given(st.lists(st.sampled_from(INPUTS), max_size=30), st.sampled_from(["drop", "stop", "ask"]), st.integers(1, 200))
def test_whatever_comes_an_answer_ends_once_and_nothing_comes_after_it(
    inputs: list[str], overflow: Overflow, each: int
) -> None:
    run = new_answer("c", long_talk(4), AnswerOptions(n_ctx=256, overflow=overflow))
    seen: list[object] = list(run.begin())
    for name in [*inputs, "fail"]:
        last = [effect for effect in seen if isinstance(effect, Count)][-1:]
        match name:
            case "counted" if last:
                seen += run.counted(counted(last[0], each))
            case "counted":
                pass
            case "overflow":
                seen += run.answer_overflow(each % 2 == 0)
            case "files":
                seen += run.files_read({})
            case "token":
                run.token("so")
            case "done":
                seen += run.done(done())
            case "fail":
                seen += run.fail("It is over.")
            case "restored":
                seen += run.restored()
            case "flush":
                seen += run.flush()
            case "stop":
                seen += run.stop()
            case _:
                seen += run.answer_now()
    assert sum(isinstance(effect, Finish) for effect in seen) == 1
    assert isinstance(seen[-1], Finish)
    assert run.has_ended
    pieces = "".join(effect.content for effect in seen if isinstance(effect, Append))
    assert run.message.content == pieces
    assert sum(isinstance(effect, SendRequest) for effect in seen) <= 1


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
    assert texts_of(path[0]) == [attachment_text(file)]


def test_a_title_is_the_first_line_and_short() -> None:
    assert title_of("  one \t two\nthree") == "one two"
    assert len(title_of("word " * 100)) <= TITLE_CHARACTERS


def test_nothing_in_a_title_turns_what_stands_beside_it() -> None:
    assert title_of("A\u202etxt.exe\x1b[31m") == "A\\u202etxt.exe\\x1b[31m"
    file = Attachment(id="f", kind="text", name="\u202efdp", mime="", sha256="", size_bytes=1)
    assert title_of_message(Message(id="q", role="user", content="", attachments=(file,))) == "\\u202efdp"


def answer(pieces: Sequence[str], *, thought: str = "", shown: str | None = None) -> Message:
    """An answer that was written with these tokens."""
    text = "".join(pieces).removesuffix("<end>")
    content = text.partition("</think>")[2] if thought else text
    chosen = tuple(TokenChoice(piece, 0.5, ((piece, 0.5),)) for piece in pieces)
    return Message(
        id="a",
        role="assistant",
        content=content.strip() if shown is None else shown,
        reasoning=thought,
        choices=chosen,
    )


def question(text: str) -> Message:
    return Message(id="q", role="user", content=text)


def found(prompt: Sequence[str], *shown: Message) -> dict[int, str]:
    return {place: choice.text for place, choice in choices_in_prompt(prompt, shown).items()}


def test_an_answer_is_found_behind_its_question() -> None:
    prompt = ["<s>", "the", " quay", "<a>", "the", " quay", "<end>", "<u>"]
    path = (question("the quay"), answer(["the", " quay", "<end>"]))
    assert found(prompt, *path) == {4: "the", 5: " quay", 6: "<end>"}
    assert found(prompt, question("the quay"), question("the quay")) == {}


def test_thoughts_are_in_no_prompt() -> None:
    pieces = ["<think>", "Hello", " there", "</think>", "\n\n", "Hello", "!", "<end>"]
    assert found(["<u>", "Hi", "<a>", "Hello", "!", "</s>"], question("Hi"), answer(pieces, thought="Hello there")) == {
        3: "Hello",
        4: "!",
    }


def test_other_tokens_are_told_from_those_of_the_answer() -> None:
    said = answer(["un", "load", "ed", " it", " all"])
    assert found(["<a>", "unload", "ed", " it", " all"], said) == {2: "ed", 3: " it", 4: " all"}
    # what a template changed ends it
    assert found(["<a>", "un", "load", "ing", " it"], said) == {}
    assert found(["<a>", "un", "load", "ed", " i", "t all"], said) == {1: "un", 2: "load", 3: "ed"}


def test_spaces_that_a_template_leaves_out_move_nothing() -> None:
    assert found(["<a>", "Yes", ".", "<u>"], answer([" ", " Yes", "."])) == {2: "."}
    assert found(["<a>", "Yes", ".", "<u>"], answer(["\n", "Yes", "."])) == {1: "Yes", 2: "."}


def test_halves_of_characters_are_found() -> None:
    pieces = ["\ufffd", "\ufffd", " ok"]
    assert found(["<a>", *pieces], answer(pieces, shown="\N{GRINNING FACE} ok")) == {1: "\ufffd", 2: "\ufffd", 3: " ok"}


WORDS = st.lists(st.sampled_from(["a", "b", " ", "ab", "\n", "", "c"]), max_size=12)


@given(WORDS, st.lists(WORDS, max_size=4))
def test_what_is_found_says_the_same(prompt: list[str], answers: list[list[str]]) -> None:
    for place, text in found(prompt, *map(answer, answers)).items():
        assert prompt[place] == text
