"""Several requests at once on a loaded model: each answers as it would alone, and none blocks another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from engine.planning.settings.context_settings import ContextSettings
from engine.planning.settings.sampling_settings import SamplingSettings
from engine.runtime.protocol.messages import (
    AnyMessage,
    DeviceMemoryReadings,
    Failure,
    Generated,
    LoadedModel,
    LogitDigest,
    Piece,
    Reading,
    Rendered,
    Tokenised,
)
from engine.runtime.protocol.requests import (
    ChatMessage,
    DeviceMemoryQuery,
    Generate,
    Load,
    Logits,
    RenderTemplate,
    Stop,
    Tokenise,
)
from tests.engine.runtime.child.raw_child import RawChild, endless, entries
from tests.support.kept_models import write_kept_model
from tests.support.models import write_tiny_llama

PROMPTS = ("Once upon a time", "The layers of a model " * 9, "x", "Someone said that " * 20)
FOUR_SLOTS = ContextSettings(n_ctx=4096, n_ubatch=64, n_seq_max=4, threads=1)
IN_ONE_CACHE = ContextSettings(
    n_ctx=4096, n_ubatch=64, n_seq_max=4, kv_unified=True, threads=1, type_k="f32", type_v="f32", flash_attn="off"
)
"""In one cache others move a request's cells, and with them the order of sums: at full precision that stays unseen."""


def load(child: RawChild, path: Path, context: ContextSettings) -> LoadedModel:
    answer = child.ask(Load(path=str(path), devices=(), parameters=entries(), context=context))
    assert isinstance(answer, LoadedModel), answer
    return answer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=2)


@pytest.fixture
def child(model: Path) -> Iterator[RawChild]:
    with RawChild() as child:
        load(child, model, FOUR_SLOTS)
        yield child


def greedy(number: int, prompt: str, max_tokens: int = 40, stop: Sequence[str] = ()) -> Generate:
    return Generate(id=number, prompt=prompt, max_tokens=max_tokens, temperature=0.0, stop=tuple(stop))


def text_of(said: Sequence[AnyMessage]) -> str:
    return "".join(message.text for message in said if isinstance(message, Piece))


def ending(said: Sequence[AnyMessage]) -> Generated:
    assert isinstance(said[-1], Generated), said[-1]
    return said[-1]


def alone(child: RawChild, number: int, prompt: str, max_tokens: int = 40, stop: Sequence[str] = ()) -> str:
    child.send(greedy(number, prompt, max_tokens, stop))
    return text_of(child.last_words(number)[number])


@pytest.mark.parametrize("context", [FOUR_SLOTS, IN_ONE_CACHE])
def test_beside_others_a_request_says_what_it_says_alone(model: Path, context: ContextSettings) -> None:
    with RawChild() as child:
        loaded = load(child, model, context)
        assert (loaded.slots, loaded.n_ctx_seq) == (4, 4096 if context.kv_unified else 1024)
        texts = [alone(child, number, prompt) for number, prompt in enumerate(PROMPTS, start=1)]
        for number, prompt in enumerate(PROMPTS, start=11):
            child.send(greedy(number, prompt))
        said = child.last_words(11, 12, 13, 14)
        assert [text_of(said[number]) for number in said] == texts
        for number in said:
            assert ending(said[number]).stop_reason == "length"
            assert ending(said[number]).generated_tokens == 40


def test_windows_in_one_cache_are_whole_in_each_micro_batch(tmp_path: Path) -> None:
    """Short prompts and a long one lead to this order of cells: newer half of the conversation's window, older half.

    The next prompt takes two micro batches, of which the second one overwrites the newer half
    (`LoadedContext.decoded_tokens`).
    """
    model = write_kept_model(tmp_path / "model.gguf", "gemma3-dense")
    context = msgspec.structs.replace(IN_ONE_CACHE, n_ctx=768, n_ubatch=32, n_seq_max=3)
    begun = "abcdefgh ijkl mnop qrst uvwx yz. ABCDEF"
    more = f"{begun}A few words more"
    most = f"{more}, so that the prompt takes two micro batches to read. It is so."
    with RawChild() as child:
        load(child, model, context)
        for number, prompt in enumerate(("z" * 31, begun, "xyz", "?!.", more, "w" * 188)):
            alone(child, number, prompt, 1)
        after_others = probabilities(child, 6, most)
    with RawChild() as child:
        load(child, model, context)
        assert probabilities(child, 6, most) == pytest.approx(after_others, abs=1e-3)


def test_answers_take_turns_if_a_micro_batch_is_short(tmp_path: Path) -> None:
    model = write_kept_model(tmp_path / "model.gguf", "gemma3-dense")
    with RawChild() as child:
        load(child, model, msgspec.structs.replace(IN_ONE_CACHE, n_ctx=768, n_ubatch=3))
        texts = [alone(child, number, prompt, 24) for number, prompt in enumerate("abcd")]
        # All prompts are cached, so that each request has one token to compute from the start.
        for number, prompt in enumerate("abcd", start=10):
            child.send(greedy(number, prompt, 24))
        said = child.last_words(10, 11, 12, 13)
        assert [text_of(said[number]) for number in said] == texts


def probabilities(child: RawChild, number: int, prompt: str) -> list[float]:
    """Return the probability of each token of a short answer."""
    settings = SamplingSettings(max_tokens=8, temperature=0.0, repetition="continue", alternatives=1)
    child.send(Generate(id=number, prompt=prompt, sampling=settings))
    said = child.last_words(number)[number]
    return [choice.probability for each in said if isinstance(each, Piece) for choice in each.choices]


def test_each_has_its_own_sampler(child: RawChild) -> None:
    requests = [Generate(id=number, prompt="Once", max_tokens=24, seed=seed) for number, seed in enumerate((1, 2, 1))]
    for request in requests:
        child.send(request)
    said = child.last_words(0, 1, 2)
    texts = [text_of(said[number]) for number in range(3)]
    assert texts[0] == texts[2] != texts[1]


def test_answers_go_on_while_a_long_prompt_is_read(model: Path) -> None:
    with RawChild() as child:
        load(child, model, ContextSettings(n_ctx=4096, n_batch=32, n_ubatch=32, n_seq_max=2, threads=1))
        child.send(endless(1, "Hello"))
        assert isinstance(child.message(), Reading)
        child.send(greedy(2, "word " * 100, 1))
        said = child.last_words(2)[2]
        between = child.heard[child.heard.index(said[0]) : child.heard.index(said[-1])]
        readings = [message for message in said if isinstance(message, Reading)]
        assert len(readings) > 15
        assert (told := [message.read_tokens for message in readings]) == sorted(told)
        assert {message.prompt_tokens for message in readings} == {501}
        answered = [message for message in between if isinstance(message, Piece) and message.request == 1]
        assert len(answered) >= len(readings) // 2  # a token in each batch; half a character is told with the next one
        child.send(Stop(request=1))
        assert ending(child.last_words(1)[1]).stop_reason == "stopped"


def test_prompts_are_read_side_by_side(model: Path) -> None:
    with RawChild() as child:
        load(child, model, ContextSettings(n_ctx=4096, n_batch=32, n_ubatch=32, n_seq_max=2, threads=1))
        child.send(greedy(1, "word " * 100, 1), greedy(2, "text " * 100, 1))
        said = child.last_words(1, 2)
        first_end = child.heard.index(said[1][-1])
        other = {m.read_tokens for m in child.heard[:first_end] if isinstance(m, Reading) and m.request == 2}
        assert len(other) > 4
        # one may be told again as a sign of life
        read = {number: {m.read_tokens for m in said[number] if isinstance(m, Reading)} for number in said}
        assert abs(len(read[1]) - len(read[2])) <= 2
        assert alone(child, 3, "text " * 100, 1) == text_of(said[2])


def test_one_is_stopped_and_the_others_go_on(child: RawChild) -> None:
    texts = [alone(child, number, prompt, 60) for number, prompt in enumerate(PROMPTS[:2], start=1)]
    child.send(endless(21, "Hello"))
    for number, prompt in enumerate(PROMPTS[:2], start=22):
        child.send(greedy(number, prompt, 60))
    while not isinstance(message := child.message(), Piece) or message.request != 22:
        assert not isinstance(message, Generated)
    begun = message.text
    child.send(Stop(request=21))
    said = child.last_words(21, 22, 23)
    assert ending(said[21]).stop_reason == "stopped"
    assert begun + text_of(said[22]) == texts[0]
    assert text_of(said[23]).endswith(texts[1][-20:])


def test_a_stop_without_a_number_ends_all_that_were_asked_before(child: RawChild) -> None:
    for number in range(6):
        child.send(endless(number, "Hello"))
    child.send(Stop())
    child.send(greedy(6, "Hello", 2))
    said = child.last_words(*range(7))
    assert [ending(said[number]).stop_reason for number in range(7)] == ["stopped"] * 6 + ["length"]


def test_those_beyond_the_slots_wait_in_order(child: RawChild) -> None:
    for number in range(4):
        child.send(endless(number, "Hi", seed=number))
    for number in range(4, 8):
        child.send(greedy(number, "Hello there", 3))
    child.send(Stop(request=5))
    waiting = child.last_words(5)
    assert ending(waiting[5]).stop_reason == "stopped"
    assert ending(waiting[5]).generated_tokens == 0
    child.send(Stop(request=2))
    said = child.last_words(2, 4, 6, 7)
    order = [message.request for message in child.heard if isinstance(message, Generated)]
    assert order == [2, 4, 6, 7]
    assert text_of(said[4]) == text_of(said[6]) == text_of(said[7])
    child.send(Stop())
    child.last_words(0, 1, 3)


def test_a_stop_text_ends_the_answer_before_it(child: RawChild) -> None:
    whole = alone(child, 1, "Once upon a time", 60)
    stop = whole[20:23]
    place = whole.index(stop)
    child.send(greedy(2, "Once upon a time", 60, [stop, "never said at all"]))
    child.send(greedy(3, "Once upon a time", 60, [whole[-1] * 40 + "?"]))
    said = child.last_words(2, 3)
    assert text_of(said[2]) == whole[:place]
    assert ending(said[2]).stop_reason == "end_of_text"
    assert ending(said[2]).generated_tokens < 60
    assert text_of(said[3]) == whole  # what was held back comes at the end
    assert ending(said[3]).stop_reason == "length"
    refused = child.ask(greedy(4, "Once", 5, [""]))
    assert isinstance(refused, Failure)
    assert refused.request == 4


def test_a_stopped_answer_ends_with_text_that_might_have_become_a_stop_text(model: Path) -> None:
    with RawChild() as child:
        load(child, model, msgspec.structs.replace(FOUR_SLOTS, n_ctx=8000, n_seq_max=2))
        whole = alone(child, 1, "Once", 3000)
        child.send(greedy(2, "Once", 3000, [f"{whole[1:]} and no more"]))
        child.send(greedy(3, "Twice", 3000))
        text, n_others = "", 0
        # Both are in the same batches, so that the first answer has more tokens than it has sent.
        while n_others < 2:
            message = child.message()
            assert isinstance(message, Reading | Piece)
            if isinstance(message, Piece) and message.request == 2:
                text += message.text
            elif isinstance(message, Piece) and text:
                n_others += 1
        assert text == whole[:1]
        child.send(Stop())
        said = child.last_words(2, 3)[2]
        text += text_of(said)
        assert ending(said).stop_reason == "stopped"
        expected = alone(child, 4, "Once", ending(said).generated_tokens)
        # Half a character at the end is left out.
        assert text in (expected, expected[:-1])
        assert len(text) > 1


@pytest.mark.parametrize("context", [FOUR_SLOTS, IN_ONE_CACHE])
def test_a_prefix_that_another_slot_holds_is_not_read_again(model: Path, context: ContextSettings) -> None:
    shared = "The same long beginning of every request. " * 8
    with RawChild() as child:
        load(child, model, context)
        fresh = []
        for number, last in enumerate(("one", "two", "three")):
            fresh.append(alone(child, 10 * number + 1, f"{shared}{last}", 12))
            alone(child, 10 * number + 2, "?" * 300, 1)  # an unlike prompt in each of the slots
        for number in range(4):
            child.send(greedy(100 + number, f"{number}" * 300, 1))
        child.last_words(100, 101, 102, 103)
        child.send(greedy(200, f"{shared}one", 30))
        child.send(greedy(201, f"{shared}two", 12))
        child.send(greedy(202, f"{shared}three", 12))
        said = child.last_words(200, 201, 202)
        assert ending(said[200]).cached_tokens <= 2
        child.send(greedy(203, f"{shared}two", 12))
        child.send(greedy(204, f"{shared}three", 12))
        copied = child.last_words(203, 204)
        for number, text in ((203, fresh[1]), (204, fresh[2])):
            assert text_of(copied[number]) == text
            end = ending(copied[number])
            assert end.cached_tokens >= len(shared)
            assert end.cached_tokens + end.evaluated_tokens == end.prompt_tokens


def test_a_running_answer_lends_its_prefix(child: RawChild) -> None:
    shared = "Everybody begins with this sentence, which is long enough to be worth it. "
    fresh = alone(child, 1, f"{shared}And then", 12)
    for number in range(4):
        child.send(greedy(10 + number, f"{number}" * 300, 1))
    child.last_words(10, 11, 12, 13)
    # The grammar has no end: the answer still runs on a machine that is slow to send the next request.
    grammar = 'root ::= "a" root'
    sampling = SamplingSettings(seed=3, grammar=grammar, full_context="shift", repetition="continue")
    child.send(Generate(id=20, prompt=shared, sampling=sampling))
    while not isinstance(child.message(), Piece):
        pass
    child.send(greedy(21, f"{shared}And then", 12))
    said = child.last_words(21)[21]
    assert text_of(said) == fresh
    assert ending(said).cached_tokens >= len(shared)
    child.send(Stop())
    assert ending(child.last_words(20)[20]).stop_reason == "stopped"


def test_requests_that_outgrow_one_cache_take_turns(model: Path) -> None:
    """Three that need 200 tokens each share a cache of 512: one waits for another's end and says the same."""
    context = msgspec.structs.replace(IN_ONE_CACHE, n_ctx=512, n_seq_max=3)
    prompts = ("a" * 120, "b" * 120, "c" * 120)
    with RawChild() as child:
        load(child, model, context)
        texts = [alone(child, number, prompt, 100) for number, prompt in enumerate(prompts, start=1)]
        for number, prompt in enumerate(prompts, start=11):
            child.send(greedy(number, prompt, 100))
        said = child.last_words(11, 12, 13)
        assert [text_of(said[number]) for number in said] == texts
        assert {ending(said[number]).context_used for number in said} == {121 + 99}


def test_quick_requests_and_readings_come_between_batches(child: RawChild) -> None:
    child.send(endless(1, "Hello"))
    child.send(Tokenise(id=2, text="Hi <s>"))
    child.send(RenderTemplate(id=3, messages=(ChatMessage("user", "hi"),)))
    child.send(DeviceMemoryQuery())
    child.send(Tokenise(id=1, text="the number is taken"))
    said = child.last_words(2, 3)
    tokenised, rendered = said[2][-1], said[3][-1]
    assert isinstance(tokenised, Tokenised)
    assert "".join(tokenised.pieces[1:]).strip() == "Hi <s>"
    assert isinstance(rendered, Rendered)
    assert "hi" in rendered.text
    messages = []
    while not isinstance(message := child.message(), Failure):
        messages.append(message)
    assert "in progress" in message.message
    assert any(isinstance(message, DeviceMemoryReadings) for message in [*child.heard, *messages])
    child.send(Stop(request=1))
    child.last_words(1)


def test_a_look_at_the_logits_costs_a_running_answer_nothing(child: RawChild) -> None:
    whole = alone(child, 1, "Once upon a time", 200)
    child.send(greedy(2, "Once upon a time", 200))
    assert isinstance(child.message(), Reading)
    child.send(Logits(tokens=(1, 5, 9)))
    said = child.last_words(2)
    assert any(isinstance(message, LogitDigest) for message in child.heard)
    assert text_of(said[2]) == whole
    assert ending(said[2]).generated_tokens == 200


def test_tokens_and_back(child: RawChild) -> None:
    for text in ("plain words", "é ü 漢", "", "two\nlines\t"):
        answer = child.ask(Tokenise(id=1, text=text, add_special=False))
        assert isinstance(answer, Tokenised)
        assert len(answer.tokens) == len(answer.pieces)
        with_special = child.ask(Tokenise(id=1, text=text))
        assert isinstance(with_special, Tokenised)
        assert with_special.tokens[-len(answer.tokens) or len(with_special.tokens) :] == answer.tokens
        if text.isascii():
            assert "".join(answer.pieces) in (text, f" {text}" if text else "")


def test_a_text_that_is_being_tokenised_has_signs_of_life(model: Path) -> None:
    with RawChild(command=["tests.support.slow_tokenizer"]) as child:
        load(child, model, FOUR_SLOTS)
        assert isinstance(child.ask(Tokenise(id=5, text="word")), Tokenised)
        assert set(child.heard) == {Reading(request=5, read_tokens=0, prompt_tokens=0)}


def test_a_template_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf", n_layers=1, extra_metadata={"tokenizer.chat_template": "{% if %}"})
    with RawChild() as child:
        load(child, path, ContextSettings(n_ctx=256, threads=1))
        rendered = child.ask(RenderTemplate(id=1, messages=(ChatMessage("user", "hi"),)))
    assert isinstance(rendered, Rendered)
    assert "template is not used" in rendered.replaced
    assert "<|im_start|>" in rendered.text
