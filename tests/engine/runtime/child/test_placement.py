"""Layouts in the real engine: the device of each layer and its KV cache, and equal results.

Three capped RPC workers and the CPU; models are loaded one after another in one child.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from engine.base.units import MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.model.gguf.reader import read_model
from engine.planning.layout.engine_parameters import MAX_ENTRIES, engine_parameters, entry_count
from engine.planning.layout.layout import Layout, Override, make_layout, single_device
from engine.planning.settings.context_settings import ContextSettings, FlashAttention, LoadMode
from engine.runtime.protocol.messages import LoadedModel, LogitDigest, Serving
from engine.runtime.protocol.requests import DeviceRef, Load, Logits, Serve
from tests.support.conversation import Conversation
from tests.support.models import write_tiny_llama, write_tiny_moe

WORKERS = ("RPC0", "RPC1", "RPC2")
PLACES = (*WORKERS, CPU_ID)
LAYOUTS_PER_MODEL = 110
SEED = 20240229
CONTEXT = ContextSettings(n_ctx=256, n_batch=32, n_ubatch=32, threads=1, threads_batch=1, pipeline="on")
TOKENS = tuple(range(3, 27))


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[DeviceRef, ...]]:
    """Three local RPC workers with room for any of these layouts."""
    with ExitStack() as stack:
        children = [stack.enter_context(Conversation()) for _ in WORKERS]
        for child in children:
            child.send(Serve(host="127.0.0.1", port=0, cap_bytes=64 * MIB))
        served = [child.answer() for child in children]
        ports = [answer.port for answer in served if isinstance(answer, Serving)]
        assert len(ports) == len(WORKERS), served
        yield tuple(
            DeviceRef(id=name, backend="RPC", endpoint=f"127.0.0.1:{port}")
            for name, port in zip(WORKERS, ports, strict=True)
        )


def random_layout(source: random.Random, n_layers: int) -> Layout:
    """A layout of up to fifteen entries; few and many runs are equally likely."""
    while True:
        bounds = sorted({0, *source.sample(range(n_layers), source.randrange(15)), n_layers})
        assignment: list[str] = []
        for length in (end - start for start, end in itertools.pairwise(bounds)):
            others = [place for place in PLACES if not assignment or place != assignment[-1]]
            assignment += [source.choice(others)] * length
        layout = make_layout(n_layers, assignment, source.choice((*PLACES, assignment[-1])))
        if entry_count(layout) <= MAX_ENTRIES:
            return layout


def load(child: Conversation, request: Load, tokens: tuple[int, ...] = TOKENS) -> tuple[LoadedModel, str]:
    """Load, and return what the engine says of it and the digest of its logits."""
    loaded = child.ask(request)
    assert isinstance(loaded, LoadedModel), loaded
    digest = child.ask(Logits(tokens=tokens))
    assert isinstance(digest, LogitDigest), digest
    return loaded, digest.sha256


@pytest.mark.parametrize(
    ("n_layers", "tied", "flash_attn", "load_mode"),
    [(17, False, "off", "none"), pytest.param(24, True, "on", "mmap", marks=pytest.mark.exhaustive)],
)
def test_random_layouts_are_placed_exactly_and_compute_the_same(
    tmp_path: Path,
    workers: tuple[DeviceRef, ...],
    n_layers: int,
    tied: bool,
    flash_attn: FlashAttention,
    load_mode: LoadMode,
) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf", n_layers=n_layers, tied=tied, file_type="F16")
    context = msgspec.structs.replace(CONTEXT, flash_attn=flash_attn, load_mode=load_mode)
    source = random.Random(SEED)
    layouts = [random_layout(source, n_layers) for _ in range(LAYOUTS_PER_MODEL)]
    _assert_variety(layouts)

    def request(layout: Layout) -> Load:
        parameters = engine_parameters(layout, n_layers)
        return Load(path=str(model), devices=workers, parameters=parameters, context=context)

    with Conversation() as child:
        on_host = request(single_device(n_layers, CPU_ID))
        _, expected = load(child, on_host)
        assert load(child, on_host, TOKENS[:-1])[1] != expected, "the digest does not tell results apart"
        for layout in layouts:
            loaded, digest = load(child, request(layout))
            assert loaded.layer_devices == (*layout.assignment(), layout.output_device), layout
            assert loaded.kv_devices == tuple(enumerate(layout.assignment())), layout
            assert digest == expected, layout


@pytest.mark.parametrize("device", [CPU_ID, "RPC2"])
def test_one_device_mode_puts_everything_there(tmp_path: Path, workers: tuple[DeviceRef, ...], device: str) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf", n_layers=4)
    parameters = engine_parameters(single_device(4, device).with_split_mode("none"), 4)
    with Conversation() as child:
        loaded, _ = load(child, Load(path=str(model), devices=workers, parameters=parameters, context=CONTEXT))
    assert loaded.layer_devices == (device,) * 5
    assert loaded.kv_devices == tuple((layer, device) for layer in range(4))


def test_overrides_move_the_weights_of_their_part_and_nothing_else(
    tmp_path: Path, workers: tuple[DeviceRef, ...]
) -> None:
    path = write_tiny_moe(tmp_path / "moe.gguf", n_layers=12)
    blocks = read_model(path).blocks
    overrides = (
        Override("RPC1", part="experts", first=2, last=11),
        Override("RPC2", part="attention", first=1, last=1),
        Override("RPC2", part="ffn", first=10, last=10),
        Override("RPC2", pattern=r"^blk\.0\.ffn_.*_exps"),
    )
    layout = replace(single_device(12, "RPC0"), overrides=overrides)
    on_host = single_device(12, CPU_ID)
    # With auto the engine turns flash attention off where overrides pull it away from its layer's device.
    context = msgspec.structs.replace(CONTEXT, flash_attn="off")

    def request(layout: Layout) -> Load:
        return Load(path=str(path), devices=workers, parameters=engine_parameters(layout, 12), context=context)

    with Conversation() as child:
        _, expected = load(child, request(on_host))
        from_host, same = load(child, request(replace(on_host, overrides=overrides)))
        loaded, digest = load(child, request(layout))
    assert digest == same == expected
    assert {*from_host.layer_devices, *(device for _, device in from_host.kv_devices)} == {CPU_ID}
    assert set(loaded.layer_devices) == {device for _, device in loaded.kv_devices} == {"RPC0"}
    placed = {part.device: part.weights_bytes for part in loaded.parts}
    assert placed["RPC1"] == sum(block.expert_bytes for block in blocks[2:])
    assert placed["RPC2"] == blocks[1].attention_bytes + blocks[10].ffn_bytes + blocks[0].expert_bytes


def _assert_variety(layouts: list[Layout]) -> None:
    """The sample holds what could go wrong: each of these at least five times."""
    last = [layout.runs[-1].device for layout in layouts]
    cases = {
        "leading CPU": [layout.runs[0].device == CPU_ID for layout in layouts],
        "CPU in the middle": [any(run.device == CPU_ID for run in layout.runs[1:-1]) for layout in layouts],
        "CPU last": [device == CPU_ID for device in last],
        "output elsewhere": [layout.output_device != device for layout, device in zip(layouts, last, strict=True)],
        "output on CPU": [layout.output_device == CPU_ID for layout in layouts],
        "a worker twice": [
            any(sum(run.device == worker for run in layout.runs) > 1 for worker in WORKERS) for layout in layouts
        ],
        "many entries": [entry_count(layout) >= MAX_ENTRIES - 2 for layout in layouts],
        "few entries": [entry_count(layout) <= 2 for layout in layouts],
    }
    assert {name: sum(found) for name, found in cases.items() if sum(found) < 5} == {}
