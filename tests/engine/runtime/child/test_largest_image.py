"""The largest image: reserved at the load, forecast by a probe, limited by settings; bad limits are refused."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.base.units import MIB
from engine.planning.memory.backends import HOST_RULE
from engine.planning.memory.side_files import read_projector
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.child.load import largest_media
from engine.runtime.protocol.messages import (
    GAVE_UP_EXIT_CODE,
    Aborting,
    AllocationFailure,
    AnyMessage,
    BufferMemory,
    Failure,
    Generated,
    LoadedModel,
    Probed,
    Reading,
)
from engine.runtime.protocol.requests import ChatMessage, DeviceRef, Generate, ImageFile, Load, Probe, ProjectorFile
from tests.engine.runtime.child.raw_child import RawChild, entries, rpc_workers
from tests.support.models import write_tiny_llama
from tests.support.pictures import image_file, picture
from tests.support.side_models import write_tiny_projector

CONTEXT = ContextSettings(n_ctx=512, n_batch=64, n_ubatch=64, threads=1)
LARGE = image_file(picture(1, (640, 480)), (640, 480))
MINIMUM = 8
"""Fewest tokens of an image for this projector (`set_limit_image_tokens(8, 4096)` in clip.cpp)."""


class Files:
    """A model with M-RoPE, and a projector whose images have as many tokens as they are large."""

    def __init__(self, folder: Path) -> None:
        sections = {"qwen2vl.rope.dimension_sections": [2, 3, 3, 0]}
        self.model = write_tiny_llama(
            folder / "m.gguf", n_layers=4, architecture="qwen2vl", extra_metadata=sections, n_ctx_train=1 << 15
        )
        self.path = write_tiny_projector(folder / "mmproj.gguf", kind="qwen2vl_merger")

    def request(
        self, kind: type[Load] | type[Probe], device: str = "CPU", devices: tuple[DeviceRef, ...] = (), **limits: Any
    ) -> Load | Probe:
        projector = read_projector(self.path)
        return kind(
            path=str(self.model),
            devices=devices,
            parameters=entries(("W0", 3)) if devices else entries(),
            context=msgspec.structs.replace(CONTEXT, **limits),
            projector=ProjectorFile(str(self.path), device, projector.weights_bytes(HOST_RULE), projector.plain_bytes),
        )


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def computing(message: AnyMessage | None) -> int:
    """Return the bytes that the projector computes in."""
    assert isinstance(message, LoadedModel | Probed), message
    parts: tuple[BufferMemory, ...] = message.parts
    return sum(part.compute_bytes for part in parts if part.buffer_type == "projector")


def ask(child: RawChild, number: int, image: ImageFile) -> AnyMessage | None:
    question = ChatMessage("user", "What?", (image,))
    return child.ask(Generate(id=number, messages=(question,), max_tokens=2, temperature=0.0))


def test_a_probe_forecasts_what_a_load_reserves_for_the_largest_image(files: Files) -> None:
    sizes: dict[int | None, int] = {}
    for limit in (64, 256, None):
        with RawChild() as child:
            forecast = computing(child.ask(files.request(Probe, image_max_tokens=limit)))
        with RawChild() as child:
            sizes[limit] = computing(child.ask(files.request(Load, image_max_tokens=limit)))
        assert forecast == sizes[limit] > 0
    assert sizes[64] < sizes[256] < sizes[None]


def test_an_image_is_scaled_to_the_limit_and_read(files: Files) -> None:
    counts = {}
    for limit in (64, 256):
        with RawChild() as child:
            assert isinstance(child.ask(files.request(Load, image_max_tokens=limit)), LoadedModel)
            done = ask(child, 1, LARGE)
            assert isinstance(done, Generated), done
            counts[limit] = done.prompt_tokens
            small = ask(child, 2, image_file(picture(2, (32, 32)), (32, 32)))
            assert isinstance(small, Generated)
            assert small.prompt_tokens < done.prompt_tokens
    assert counts[64] < 64 + 60 < counts[256] < 256 + 60
    with RawChild() as child:
        child.ask(files.request(Load, image_min_tokens=100))
        enlarged = ask(child, 1, image_file(picture(2, (32, 32)), (32, 32)))
        assert isinstance(enlarged, Generated)
        assert enlarged.prompt_tokens > 100


def test_an_image_that_is_computed_without_progress_ends_the_child_with_the_name_of_the_projector(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor is busy, and the heartbeat took that for work without end."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "from engine.runtime.child.load import largest_media\n"
        "from engine.runtime.protocol import heartbeat\n"
        "largest_media.NODE_SECONDS = 0.2\n"
        "largest_media.SLOWEST_RATE = 1e15\n"
        # A tenth of the usual tick, so a tenth of its work: on a busy machine a tick has some milliseconds.
        "heartbeat.CPU_SECONDS /= 10\n"
        "heartbeat.WorkHeartbeat.__init__.__kwdefaults__['tick_seconds'] = 0.1\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path / "site"), str(Path(__file__).parents[4]))))
    with RawChild() as child:
        assert isinstance(child.ask(files.request(Load, n_ctx=8192)), LoadedModel)
        ended = ask(child, 1, image_file(picture(1, (2048, 2048)), (2048, 2048)))
        assert isinstance(ended, Aborting), ended
        assert child.message() is None
    assert "one operation of mmproj.gguf took more than" in ended.text
    assert "use another file of this projector" in ended.text
    assert child.process.returncode == GAVE_UP_EXIT_CODE


def test_the_time_for_an_image_follows_the_multiplications_of_its_nodes() -> None:
    def tensor(*sizes: int, sources: tuple[Any, ...] = ()) -> Any:
        addresses = (ctypes.c_void_p * 2)(*map(ctypes.addressof, sources))
        return largest_media._Tensor(ne=(ctypes.c_int64 * 4)(*sizes), src=addresses)

    weights, tokens = tensor(1024, 4096, 1, 1), tensor(1024, 600, 1, 1)
    keys = tensor(64, 576, 16, 1)
    for operation, node, expected in (
        (b"MUL_MAT", tensor(4096, 600, 1, 1, sources=(weights, tokens)), 4096 * 600 * 1024),
        (b"FLASH_ATTN_EXT", tensor(64, 16, 576, 1, sources=(keys, keys)), 64 * 16 * 576 * 2 * 576),
        (b"ADD", tensor(1024, 600, 1, 1, sources=(tokens, tokens)), 1024 * 600 * largest_media._FEW),
        (b"VIEW", tensor(8, 1, 1, 1), 8 * largest_media._FEW),
    ):
        assert largest_media._multiplications(ctypes.addressof(node), operation) == expected


def test_a_question_that_cannot_fit_is_refused_before_anything_is_computed(files: Files) -> None:
    with RawChild() as child:
        assert isinstance(child.ask(files.request(Load, n_ctx=256)), LoadedModel)
        refused = ask(child, 1, LARGE)
    assert isinstance(refused, Failure)
    assert (refused.kind, "the context holds 256" in refused.message) == ("argument", True)
    # On a busy machine the child tells while the image is prepared that no token is computed yet.
    assert not [each for each in child.heard if isinstance(each, Reading) and each.read_tokens]


def test_a_limit_below_the_minimum_is_refused_with_both_numbers(files: Files) -> None:
    for kind in (Load, Probe):
        with RawChild() as child:
            refused = child.ask(files.request(kind, image_max_tokens=4))
            assert isinstance(refused, Failure), refused
            assert refused.kind == "argument"
            assert (
                f"The largest image (4 tokens) is below the projector's minimum of {MINIMUM} tokens" in refused.message
            )
            again = child.ask(files.request(kind, image_max_tokens=MINIMUM))
            assert isinstance(again, LoadedModel | Probed)
    with RawChild() as child:
        refused = child.ask(files.request(Load, image_min_tokens=5000))
    assert isinstance(refused, Failure)
    assert "above the projector's maximum" in refused.message


def test_a_device_without_room_for_the_largest_image_refuses_the_load(files: Files) -> None:
    cap_bytes = 8 * MIB
    with rpc_workers(cap_bytes) as (_, devices):
        with RawChild() as child:
            child.send(files.request(Load, "W0", devices))
            refused = child.answer()
        assert isinstance(refused, AllocationFailure), refused
        assert refused.device == "W0"
        assert refused.requested_bytes > cap_bytes
    with rpc_workers(cap_bytes) as (_, devices):
        with RawChild() as child:
            probed = child.ask(files.request(Probe, "W0", devices))
        assert isinstance(probed, Failure), probed
        assert (probed.kind, "W0 has no room for the largest image" in probed.message) == ("does_not_fit", True)
    # With a smaller limit there is room, and the image is read.
    with rpc_workers(cap_bytes) as (_, devices), RawChild() as child:
        assert isinstance(child.ask(files.request(Load, "W0", devices, image_max_tokens=64)), LoadedModel)
        assert isinstance(ask(child, 1, LARGE), Generated)
