"""Buffers and callbacks whose address llama.cpp holds stay alive as long as it uses them.

They are the device list, the tensor split, the tensor overrides with their patterns, and the callbacks for log,
progress and a projector's graph. `kv_overrides` is null in every load. The child of these tests collects garbage and
overwrites freed memory before each call.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.planning.layout.engine_parameters import TensorOverride
from engine.planning.memory.backends import HOST_RULE
from engine.planning.memory.side_files import read_projector
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.messages import AnyMessage, Generated, LoadedModel
from engine.runtime.protocol.requests import ChatMessage, DeviceRef, Generate, Load, ProjectorFile
from tests.engine.runtime.child.raw_child import RawChild, entries, rpc_workers
from tests.support.collecting_child import DROPS
from tests.support.models import write_tiny_llama
from tests.support.pictures import image_file, picture
from tests.support.side_models import write_tiny_projector

CONTEXT = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=1)
CHILD = "tests.support.collecting_child"


def _load(folder: Path, refs: tuple[DeviceRef, ...]) -> Load:
    """Return a load with uneven shares on two workers, overrides, and a projector."""
    model = write_tiny_llama(folder / "m.gguf", n_layers=8)
    path = write_tiny_projector(folder / "mmproj.gguf")
    parameters = entries(("W1", 6), ("W0", 2))
    overrides = tuple(TensorOverride(f"blk\\.{layer}\\.ffn_(up|gate|down)\\.weight", "W0") for layer in (0, 2, 4))
    return Load(
        path=str(model),
        devices=refs,
        parameters=msgspec.structs.replace(parameters, overrides=overrides),
        context=CONTEXT,
        projector=ProjectorFile(str(path), "CPU", read_projector(path).weights_bytes(HOST_RULE)),
    )


def _answers(folder: Path, *command: str) -> tuple[AnyMessage | None, AnyMessage | None]:
    """Return what a child says to the load, and to a question with an image."""
    question = ChatMessage("user", "What?", (image_file(picture(1)),))
    with rpc_workers(None, None) as (_, refs), RawChild(command=command) as child:
        loaded = child.ask(_load(folder, refs))
        if not isinstance(loaded, LoadedModel):
            return loaded, None
        return loaded, child.ask(Generate(id=1, messages=(question,), max_tokens=4, temperature=0.0))


def _found(loaded: AnyMessage | None, said: AnyMessage | None) -> object:
    """Return what of both messages depends on neither times nor ports; None if there are not both."""
    if not isinstance(loaded, LoadedModel) or not isinstance(said, Generated):
        return None
    sizes = sorted((part.device, part.weights_bytes, part.kv_cache_bytes) for part in loaded.parts)
    return loaded.layer_devices, loaded.kv_devices, sizes, said.generated_tokens, said.prompt_tokens


@pytest.mark.exhaustive
def test_nothing_that_llama_cpp_holds_is_collected(tmp_path: Path) -> None:
    plain = _found(*_answers(tmp_path, "engine.runtime.child"))
    assert plain is not None
    assert _found(*_answers(tmp_path, CHILD)) == plain


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", DROPS)
def test_a_buffer_that_is_freed_early_is_found(tmp_path: Path, name: str) -> None:
    """What the test above would notice: the same child without one of the references."""
    plain = _found(*_answers(tmp_path, "engine.runtime.child"))
    try:
        dropped = _found(*_answers(tmp_path, CHILD, name))
    except (AssertionError, BrokenPipeError):
        dropped = None  # It went down at once.
    assert dropped != plain
