"""Predicted speed of prompts: limited by arithmetic, and corrected by answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.machines.rigs.speeds import TimedAnswer, bare_speed, learnt
from engine.model.gguf.model_file import part_of_tensor
from engine.model.gguf.reader import read_model
from engine.planning.fit.speed_book import EMPTY_BOOK, read_speed_book, write_speed_book
from engine.planning.layout.layout import Layout, Override, make_layout, single_device
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.plan_document import plan_document, plan_text
from engine.planning.plan.preview import plan_prompt, plan_speed
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.prediction import SpeedForecast
from engine.planning.speed.speeds import NO_MEASUREMENTS, Link, Speeds, layout_class
from engine.planning.speed.work import TokenWork
from tests.support.models import write_header_only, write_tiny_moe
from tests.support.previews import make_gpu, make_rig
from tests.support.truth import truth_model

RIG = make_rig(make_gpu("CUDA0", 24), make_gpu("CUDA1", 24))
CONTEXT = ContextSettings(n_ctx=8192)
KNOWN = Speeds(
    bandwidths={CPU_ID: 5e10, "CUDA0": 1e12, "CUDA1": 1e12},
    links={"CUDA0": Link(1e-5, 2e10), "CUDA1": Link(1e-5, 1e10)},
    op_seconds=dict.fromkeys((CPU_ID, "CUDA0", "CUDA1"), 1e-6),
    products={CPU_ID: {"F16": 2e11}, "CUDA0": {"F16": 2e13}, "CUDA1": {"F16": 1e13}},
)


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> ModelMemory:
    path = tmp_path_factory.mktemp("models") / "eight.gguf"
    return ModelMemory(read_model(write_header_only(path, n_layers=32, n_embd=4096, n_head=32, n_ff=14336)))


def prompt_of(
    memory: ModelMemory,
    layout: Layout,
    speeds: Speeds = KNOWN,
    *,
    n_tokens: int = 1024,
    changes: Mapping[str, object] | None = None,
) -> SpeedForecast:
    context = msgspec.structs.replace(CONTEXT, **(changes or {}))
    found = plan_prompt(TokenWork(memory.model), Plan(memory, RIG, Edit(layout, context)), speeds, n_tokens)
    assert found is not None
    return found


def weights_of(memory: ModelMemory) -> float:
    """Return how many weights the layers multiply a token with."""
    work = TokenWork(memory.model)
    sizes = work.weights(0, memory.model.n_layers - 1)
    return sum(size * work.weights_in_byte[name] for name, size in sizes)


def test_many_tokens_are_a_matter_of_arithmetic(memory: ModelMemory) -> None:
    found = prompt_of(memory, single_device(32, "CUDA0"))
    least_s = weights_of(memory) / 2e13
    assert least_s < found.token_s < 1.3 * least_s
    slower = replace(KNOWN, products={**KNOWN.products, "CUDA0": {"F16": 1e13}})
    assert prompt_of(memory, single_device(32, "CUDA0"), slower).token_s > 1.7 * found.token_s
    token = plan_speed(TokenWork(memory.model), Plan(memory, RIG, Edit(single_device(32, "CUDA0"), CONTEXT)), KNOWN)
    assert token is not None
    assert token.prompt is not None
    assert token.prompt.tokens_per_second > 10 * token.tokens_per_second


def test_few_tokens_at_once_read_the_weights_again_and_again(memory: ModelMemory) -> None:
    layout = single_device(32, "CUDA0")
    many, few = (prompt_of(memory, layout, changes={"n_ubatch": tokens}) for tokens in (512, 2))
    assert few.token_s > 3 * many.token_s


def test_a_longer_prompt_is_read_more_slowly_for_its_attention(memory: ModelMemory) -> None:
    times = [prompt_of(memory, single_device(32, "CUDA0"), n_tokens=tokens).token_s for tokens in (512, 2048, 8192)]
    assert times == sorted(times)
    assert times[-1] < 3 * times[0]


def test_a_card_computes_with_weights_of_the_host(memory: ModelMemory) -> None:
    layout = make_layout(32, [CPU_ID] * 16 + ["CUDA0"] * 16)
    lent, alone = (prompt_of(memory, layout, changes={"op_offload": wanted}) for wanted in (True, False))
    assert lent.token_s < 0.5 * alone.token_s
    host_bytes = sum(size for _, size in TokenWork(memory.model).weights(0, 15))
    card = next(each for each in lent.devices if each.id == "CUDA0")
    assert card.link_s * 1024 == pytest.approx(2 * host_bytes / 2e10, rel=0.1), "once for each of two micro batches"
    few = prompt_of(memory, layout, n_tokens=16)
    assert few.token_s == pytest.approx(prompt_of(memory, layout, n_tokens=16, changes={"op_offload": False}).token_s)


def test_links_carry_every_token(memory: ModelMemory) -> None:
    slow = replace(KNOWN, links={**KNOWN.links, "CUDA1": Link(1e-3, 1e8)})
    found = prompt_of(memory, make_layout(32, ["CUDA0"] * 16 + ["CUDA1"] * 16), slow)
    second = next(each for each in found.devices if each.id == "CUDA1")
    assert second.link_s == pytest.approx(4 * 4096 / 1e8 + 1e-3 / 512, rel=0.1)


def test_recurrent_layers_have_no_attention_to_pay_for() -> None:
    memory = ModelMemory(truth_model("falcon-mamba-7b"))
    layout, changes = single_device(memory.model.n_layers, "CUDA0"), {"n_ctx": 65_536}
    short, long = (prompt_of(memory, layout, n_tokens=n, changes=changes).token_s for n in (1024, 65_536))
    assert long == pytest.approx(short, rel=0.01)


def test_sliding_window_layers_attend_to_their_window() -> None:
    memory = ModelMemory(truth_model("gemma-3-4b"))
    layout = single_device(memory.model.n_layers, "CUDA0")
    window, full = (
        prompt_of(memory, layout, n_tokens=65_536, changes={"n_ctx": 65_536, "swa_full": swa_full}).token_s
        for swa_full in (False, True)
    )
    short = prompt_of(memory, layout, n_tokens=1024, changes={"n_ctx": 65_536}).token_s
    # One layer in six attends to everything.
    assert (window - short) < 0.25 * (full - short)


def test_of_experts_a_prompt_reads_all_and_a_token_its_own(tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "moe.gguf", n_layers=4, n_embd=256, n_ff=512, n_expert=8, n_expert_used=2)
    memory = ModelMemory(read_model(path))
    layout = single_device(4, "CUDA0")
    expert_bytes = sum(block.expert_bytes for block in memory.model.blocks)
    slow = replace(KNOWN, bandwidths={**KNOWN.bandwidths, "CUDA0": 1e6})
    assert 128 * prompt_of(memory, layout, slow, n_tokens=128, changes={"n_ctx": 512}).token_s > expert_bytes / 1e6
    parts = [TokenWork(memory.model).experts_read(n_tokens) for n_tokens in (1, 2, 128)]
    assert parts == [0.0, 0.25, pytest.approx(1.0)], "a second token chooses a quarter of what the first one left"


def test_of_what_is_moved_experts_alone_are_read_in_part(tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "moe.gguf", n_layers=4, n_embd=256, n_ff=512, n_expert=8, n_expert_used=2)
    model = read_model(path)
    work = TokenWork(model)
    layout = replace(single_device(4, "CUDA0"), overrides=(Override(CPU_ID, "attention"), Override("CUDA1", "experts")))
    for moved in work.moved(layout):
        part = "attention" if moved.device == CPU_ID else "experts"
        taken = [each for block in model.blocks[1:3] for each in block.tensors if part_of_tensor(each.name) == part]
        read_bytes = sum(size for _, size in moved.between(1, 2))
        whole_bytes = sum(moved.whole_bytes(name, 1, 2) for name in moved.weights)
        assert whole_bytes == sum(each.size_bytes for each in taken)
        assert read_bytes == whole_bytes * (1 if moved.device == CPU_ID else 2 / 8)
    assert {moved.device for moved in work.moved(layout)} == {CPU_ID, "CUDA1"}


def test_what_it_rests_on_is_said_and_a_guess_is_not_told(memory: ModelMemory) -> None:
    layout = single_device(32, "CUDA0")
    plan = Plan(memory, RIG, Edit(layout, CONTEXT))
    for speeds, source in (
        (KNOWN, "measured"),
        (Speeds(factors={"CUDA0": 1.0}, prompt_factors={"CUDA0": 1.0}), "answers"),
        (replace(KNOWN, products={}), "guess"),
        (NO_MEASUREMENTS, "guess"),
    ):
        speed = plan_speed(TokenWork(memory.model), plan, speeds)
        assert speed is not None
        assert speed.prompt is not None
        assert speed.prompt.source == source
        document = plan_document(plan, speed=speed)["speed"]
        assert isinstance(document, dict)
        prompt = document["prompt"]
        assert (prompt["source"], prompt["tokens"]) == (source, 2048)
        assert (prompt["tokens_per_second"] is None) == (source == "guess")
        assert (prompt["devices"][0]["token_ms"] is None) == (source == "guess")
        assert ("Predicted for a prompt of 2048 tokens" in plan_text(plan, speed=speed)) == (source != "guess")


def test_prompts_teach_and_are_kept(memory: ModelMemory, tmp_path: Path) -> None:
    layout = single_device(32, "CUDA0")
    bare = prompt_of(memory, layout, NO_MEASUREMENTS)
    name = layout_class(layout, RIG)
    book = EMPTY_BOOK.with_prompt(name, RIG, bare, bare.tokens_per_second / 3)
    write_speed_book(tmp_path / "speeds.json", book)
    kept = read_speed_book(tmp_path / "speeds.json")
    assert kept == book
    found = prompt_of(memory, layout, kept.speeds(RIG))
    assert found.token_s == pytest.approx(3 * bare.token_s, rel=1e-3)
    assert (found.source, found.is_learnt) == ("answers", True)
    assert kept.speeds(RIG).unlearnt == EMPTY_BOOK.speeds(RIG)
    assert kept.speeds(RIG).factors == {}, "prompts say nothing of answers"


def test_an_answer_teaches_both_and_of_a_short_prompt_only_its_own(memory: ModelMemory) -> None:
    plan = Plan(memory, RIG, Edit(single_device(32, "CUDA0"), CONTEXT))
    for read_tokens, n_prompts in ((400, 1), (20, 0)):
        answer = TimedAnswer(420, 40, 50.0, read_tokens, 900.0)
        bare = bare_speed(plan, EMPTY_BOOK, answer)
        assert bare is not None
        book = learnt(EMPTY_BOOK, plan, bare, answer)
        assert (len(book.answers), len(book.prompts)) == (1, n_prompts)


def test_measuring_anew_forgets_what_prompts_taught(memory: ModelMemory) -> None:
    layout = single_device(32, "CUDA0")
    bare = prompt_of(memory, layout, NO_MEASUREMENTS)
    book = EMPTY_BOOK.with_prompt(layout_class(layout, RIG), RIG, bare, bare.tokens_per_second)
    (key,) = (key for key in book.prompts[0].parts if key != "links")
    assert book.without_answers_of({key}).prompts == ()
    assert book.without_answers_of({"another"}) == book
