"""Sounds in conversations of the window, with the real engine: attaching, counting, asking, storing, refusing."""

from __future__ import annotations

from app.window.chat.attach_presenter import shown_file
from tests.app.chats.bench import Bench, prompt_tokens


def test_sounds_are_counted_asked_with_and_kept(bench: Bench) -> None:
    bench.load(hears=True, n_ctx=1024)
    bench.attach_sounds(1, 2)
    bench.wait(lambda: bench.attacher.tokens > 0 and all(each.tokens for each in bench.attacher.files))
    counted = bench.attacher.tokens
    assert shown_file(bench.attacher.files[0], 1024).detail == f"0:01, {counted // 2} tokens"
    first = bench.say("What?")
    words = prompt_tokens(first) - counted
    assert [(each.kind, each.length_ms) for each in bench.path[0].attachments] == [("audio", 400)] * 2
    bench.conversation.regenerate(first.id)
    again = bench.answered()
    assert again.content == first.content
    assert again.timings is not None
    assert again.timings.cached_tokens == prompt_tokens(first) - 1
    bench.conversation.edit(bench.path[0].id, "Wha?")
    assert prompt_tokens(bench.answered()) == counted + words - 1


def test_a_model_without_ears_says_what_to_do(bench: Bench) -> None:
    bench.load(sees=True, n_ctx=1024)
    bench.attach_sounds(1)
    assert not bench.attacher.files
    assert any("1.wav cannot be attached" in text and "no projector for sound" in text for text in bench.refused)
    bench.load(hears=True, n_ctx=1024)
    bench.attach_sounds(1)
    bench.say("What?")
    bench.load(sees=True, n_ctx=1024)
    refused = bench.say("And now?")
    assert refused.state == "failed"
    assert "no projector that reads sound is loaded" in refused.note
