"""Images in conversations of the window, with the real engine: attaching, counting, asking, storing, refusing."""

from __future__ import annotations

import pytest

from app.chats.attacher import Thumbnails
from app.models.context_counter import ContextCounter
from engine.chat.context import ContextUse
from tests.app.chats.bench import Bench, prompt_tokens
from tests.support.pictures import picture
from widgets.chat.images import Gallery


def test_images_are_counted_asked_with_and_branched(bench: Bench) -> None:
    bench.load(sees=True, n_ctx=1024)
    bench.attach(1, 2)
    bench.wait(lambda: bench.attacher.tokens > 0 and all(each.tokens for each in bench.attacher.files))
    counted = bench.attacher.tokens
    first = bench.say("What?")
    words = prompt_tokens(first) - counted
    assert (bench.path[0].attachments[0].kind, counted) == ("image", 2 * 64)
    bench.conversation.regenerate(first.id)
    again = bench.answered()
    assert again.id != first.id
    assert again.content == first.content
    assert again.timings is not None
    assert again.timings.cached_tokens == prompt_tokens(first) - 1
    bench.conversation.edit(bench.path[0].id, "Wha?")
    edited = bench.answered()
    assert prompt_tokens(edited) == counted + words - 1
    assert len(bench.path[0].attachments) == 2
    later = bench.say("And?")
    assert prompt_tokens(later) > prompt_tokens(edited)


def test_the_meter_has_images_as_attachments(bench: Bench) -> None:
    bench.load(sees=True, n_ctx=1024)
    bench.attach(1, 2)
    bench.say("What?")
    told: list[ContextUse] = []
    counter = ContextCounter(bench.desk.loading)
    counter.counted.connect(told.append)
    counter.count(bench.conversation.counted_chat())
    bench.wait(lambda: bool(told))
    assert told[-1].used > 2 * 64
    assert (told[-1].attachments, told[-1].history) == (2 * 64, told[-1].used - 2 * 64)


def test_a_conversation_with_images_goes_on_after_a_restart(bench: Bench) -> None:
    bench.load(sees=True, n_ctx=1024)
    bench.attach(1)
    first = bench.say("Tell me of everything that the old harbour had seen in its two hundred years by the sea. " * 2)
    assert first.content.strip(), "nothing is said of a question whose answer is empty"
    bench.settle()
    bench.restart()
    bench.wait(lambda: not bench.conversation.is_empty)
    bench.load(sees=True, n_ctx=1024)
    bench.wait(lambda: bool(bench.restored))
    assert bench.restored[0].tokens >= prompt_tokens(first), bench.restored
    answer = bench.say("And?")
    assert answer.timings is not None
    assert answer.timings.cached_tokens >= prompt_tokens(first)


def test_a_model_without_eyes_says_what_to_do(bench: Bench) -> None:
    bench.load(n_ctx=1024)
    bench.attach(1)
    assert not bench.attacher.files
    assert any("1.png cannot be attached" in text and "projector" in text for text in bench.refused)
    bench.load(sees=True, n_ctx=1024)
    bench.attach(1)
    bench.say("What?")
    bench.load(n_ctx=1024)
    refused = bench.say("And now?")
    assert refused.state == "failed"
    assert "Choose the model's projector" in refused.note


@pytest.mark.exhaustive
def test_images_that_are_too_many_leave_out_old_turns(bench: Bench) -> None:
    bench.load(sees=True)
    for seed in range(6):
        bench.attach(seed)
        answer = bench.say(f"What is number {seed}?")
        assert prompt_tokens(answer) < 512
    assert bench.conversation.left_out


def test_a_picture_of_a_kept_image_comes_back(bench: Bench) -> None:
    gallery = Gallery()
    thumbnails = Thumbnails(gallery, bench.desk.archive, bench.desk.background)
    bench.wait_until_open()
    data = picture(1, (400, 200))
    bench.desk.archive.keep_file(data)
    bench.attacher.add_image(data)
    bench.wait(lambda: not bench.attacher.is_reading)
    (file,) = bench.attacher.files
    assert file.attachment is not None
    gallery.ask(file.attachment.sha256)
    bench.wait(lambda: file.attachment is not None and file.attachment.sha256 in gallery.pictures)
    shown = gallery.pictures[file.attachment.sha256]
    assert (shown.width(), shown.height()) == (224, 112)
    assert file.name == "Pasted image 1"
    assert thumbnails.parent() is None
