"""Adapters and projectors in a real child: their devices, the effect of adapters, and errors of a failed load."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.base.units import KIB, MIB
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.layout.engine_parameters import EngineParameters
from engine.planning.memory.backends import HOST_RULE
from engine.planning.memory.side_files import read_adapter, read_projector
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.messages import AllocationFailure, BufferMemory, Failure, LoadedModel, LogitDigest
from engine.runtime.protocol.requests import AdapterFile, DeviceRef, Load, Logits, ProjectorFile
from tests.engine.runtime.child.raw_child import RawChild, entries, rpc_workers
from tests.support.models import write_tiny_llama
from tests.support.side_models import write_tiny_lora, write_tiny_projector

CONTEXT = ContextSettings(n_ctx=512, n_batch=64, n_ubatch=64, threads=1)
TOKENS = (3, 1, 4, 1, 5)
LOG_STEP_BYTES = 11 * KIB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return read_model(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=4))


def load_request(
    model: ModelFile,
    parameters: EngineParameters | None = None,
    devices: tuple[DeviceRef, ...] = (),
    *,
    adapters: tuple[AdapterFile, ...] = (),
    projector: ProjectorFile | None = None,
    context: ContextSettings = CONTEXT,
) -> Load:
    return Load(
        path=str(model.paths[0]), devices=devices, parameters=parameters or entries(), context=context,
        adapters=adapters, projector=projector,
    )  # fmt: skip


def projector_file(path: Path, device: str) -> ProjectorFile:
    return ProjectorFile(str(path), device, read_projector(path).weights_bytes(HOST_RULE))


def digest(child: RawChild, request: Load) -> str:
    assert isinstance(child.ask(request), LoadedModel)
    answer = child.ask(Logits(tokens=TOKENS))
    assert isinstance(answer, LogitDigest)
    return answer.sha256


def weights(parts: tuple[BufferMemory, ...], device: str) -> int:
    return sum(part.weights_bytes for part in parts if part.device == device)


def test_an_adapter_changes_what_is_computed_by_its_scale(model: ModelFile, tmp_path: Path) -> None:
    path = str(write_tiny_lora(tmp_path / "lora.gguf", model))
    with rpc_workers(None) as (_, refs), RawChild() as child:
        half = entries(("W0", 3))
        plain = digest(child, load_request(model, half, refs))
        whole = digest(child, load_request(model, half, refs, adapters=(AdapterFile(path, 1.0),)))
        none = digest(child, load_request(model, half, refs, adapters=(AdapterFile(path, 0.0),)))
        twice = digest(
            child, load_request(model, half, refs, adapters=(AdapterFile(path, 0.5), AdapterFile(path, 0.5)))
        )
        on_cpu = digest(child, load_request(model, adapters=(AdapterFile(path, 1.0),)))
    assert none == plain
    assert whole == on_cpu
    assert plain not in (whole, twice)


def test_an_adapter_lies_with_the_weights_that_it_changes(model: ModelFile, tmp_path: Path) -> None:
    path = write_tiny_lora(tmp_path / "lora.gguf", model, layers=(0, 3), weights=("ffn_down",), rank=256)
    half_bytes = sum(tensor.size_bytes for tensor in read_adapter(path, model).tensors) // 2
    with rpc_workers(None) as (_, refs), RawChild() as child:
        request = load_request(model, entries(("W0", 3)), refs)
        plain = child.ask(request)
        loaded = child.ask(msgspec.structs.replace(request, adapters=(AdapterFile(str(path), 1.0),)))
    assert isinstance(plain, LoadedModel)
    assert isinstance(loaded, LoadedModel)
    for device in ("CPU", "W0"):
        more_bytes = weights(loaded.parts, device) - weights(plain.parts, device)
        assert more_bytes == pytest.approx(half_bytes, abs=LOG_STEP_BYTES)


@pytest.mark.parametrize("device", ["CPU", "W0"])
def test_a_projector_is_loaded_on_its_device(model: ModelFile, tmp_path: Path, device: str) -> None:
    path = write_tiny_projector(tmp_path / "mmproj.gguf", n_layers=8)
    file = projector_file(path, device)
    with rpc_workers(None) as (_, refs), RawChild() as child:
        request = load_request(model, entries(("W0", 3)), refs)
        plain = child.ask(request)
        loaded = child.ask(msgspec.structs.replace(request, projector=file))
        again = child.ask(request)
    assert isinstance(plain, LoadedModel)
    assert isinstance(loaded, LoadedModel)
    assert isinstance(again, LoadedModel)
    more_bytes = weights(loaded.parts, device) - weights(plain.parts, device)
    assert more_bytes == pytest.approx(file.weights_bytes, abs=LOG_STEP_BYTES)
    assert again.parts == plain.parts


def test_files_that_do_not_belong_to_the_model_end_the_load_with_their_name(model: ModelFile, tmp_path: Path) -> None:
    wide = write_tiny_projector(tmp_path / "wide.gguf", n_embd=96)
    torn = write_tiny_lora(tmp_path / "torn.gguf", model)
    torn.write_bytes(torn.read_bytes()[:-512])
    with RawChild() as child:
        refused = child.ask(load_request(model, projector=projector_file(wide, "CPU")))
        damaged = child.ask(load_request(model, adapters=(AdapterFile(str(torn), 1.0),)))
        gone = child.ask(load_request(model, adapters=(AdapterFile(str(tmp_path / "gone.gguf"), 1.0),)))
        after = child.ask(load_request(model))
    for answer, name in ((refused, "wide.gguf"), (damaged, "torn.gguf"), (gone, "gone.gguf")):
        assert isinstance(answer, Failure), answer
        assert answer.kind == "model_file"
        assert answer.message.startswith(f"{name}: ")
    assert isinstance(refused, Failure)
    assert "96" in refused.message
    assert isinstance(after, LoadedModel)


def test_a_device_that_refuses_them_is_named_and_the_next_load_works(model: ModelFile, tmp_path: Path) -> None:
    lora = write_tiny_lora(tmp_path / "lora.gguf", model, rank=16384)  # 8 MiB for each layer and weight
    projector = write_tiny_projector(tmp_path / "mmproj.gguf", n_layers=2)
    file = msgspec.structs.replace(projector_file(projector, "W0"), weights_bytes=64 * MIB)
    with rpc_workers(32 * MIB) as (_, refs), RawChild() as child:
        request = load_request(model, entries(("W0", 5)), refs)
        adapter = child.ask(msgspec.structs.replace(request, adapters=(AdapterFile(str(lora), 1.0),)))
        beside = child.ask(msgspec.structs.replace(request, projector=file))
        after = child.ask(request)
    for answer in (adapter, beside):
        assert isinstance(answer, AllocationFailure), answer
        assert answer.device == "W0"
        assert answer.requested_bytes > 32 * MIB
        assert weights(answer.parts, "W0") > 0
    assert isinstance(after, LoadedModel)


def test_compute_buffers_that_do_not_fit_with_an_adapter_name_their_device(model: ModelFile, tmp_path: Path) -> None:
    path = write_tiny_lora(tmp_path / "lora.gguf", model, layers=(2,), weights=("attn_q",), rank=16384)
    context = msgspec.structs.replace(CONTEXT, n_batch=512, n_ubatch=512)  # 32 MiB between the adapter's halves
    with rpc_workers(24 * MIB) as (_, refs), RawChild() as child:
        request = load_request(model, entries(("W0", 5)), refs, context=context)
        assert isinstance(child.ask(request), LoadedModel)
        answer = child.ask(msgspec.structs.replace(request, adapters=(AdapterFile(str(path), 1.0),)))
        ended = child.ended()
    assert isinstance(answer, AllocationFailure), answer
    assert (answer.stage, answer.device) == ("warm_up", "W0")
    assert answer.requested_bytes > 24 * MIB
    assert ended == 1
