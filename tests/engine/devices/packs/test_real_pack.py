"""The bundle's engine and the built Vulkan pack, on Mesa's llvmpipe: `make.py test --backend portable`.

The pack is the one that `make.py pack vulkan` has written to `dist/`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib import util
from pathlib import Path

import pytest

from engine.devices.device import CPU_ID
from engine.devices.packs.store import NO_PACKS, PACKS_VARIABLE, PackStore
from engine.machines.rigs import pack_installer
from engine.machines.rigs.discovery import discover
from engine.machines.rigs.pack_installer import PackInstaller
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import Layout, Run
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.plan_requests import load_request
from engine.runtime.protocol.messages import Generated, LoadedModel, Piece
from engine.runtime.protocol.requests import Generate
from tests.support.conversation import Conversation
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S

pytestmark = pytest.mark.engine("portable")

DIST = Path(__file__).resolve().parents[4] / "dist"
CONTEXT = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=2, threads_batch=2, flash_attn="off")
_LONGEST_S = 10 * DEADLINE_S
"""llvmpipe compiles every shader in each process anew."""
_N_LAYERS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelMemory:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_llama(path, n_layers=_N_LAYERS, n_embd=128, n_head=4, n_ff=256, n_ctx_train=2048)
    return ModelMemory(read_model(path))


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PackInstaller]:
    """The pack, installed and checked; children load it."""
    archive = next(iter(sorted(DIST.glob("layerdeck-pack-vulkan-*.tar.gz"))), None)
    if archive is None:
        pytest.skip("there is no Vulkan pack in dist/; `make.py pack vulkan` builds one")
    folder = tmp_path_factory.mktemp("packs")
    kept = PackInstaller(PackStore(folder / "packs"), folder / "packs.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GGML_VK_VISIBLE_DEVICES", "0")
        patch.setattr(pack_installer, "TIMEOUT_S", _LONGEST_S)
        patch.setattr("engine.machines.rigs.engine_checks.TIMEOUT_S", _LONGEST_S)
        patch.setenv(PACKS_VARIABLE, str(kept.book))
        verdict = kept.install(archive)
        assert (verdict.ok, verdict.devices) == (True, ("Vulkan0",)), verdict.reason
        yield kept


def answer(model: ModelMemory, layout: Layout) -> str:
    """Return what the likeliest tokens say, and see that what was loaded is where the layout has it."""
    plan = Plan(model, discover(timeout_s=_LONGEST_S), Edit(layout, CONTEXT))
    with Conversation() as child:
        loaded = child.ask(load_request(plan), _LONGEST_S)
        assert isinstance(loaded, LoadedModel), loaded
        assert {part.device for part in loaded.parts if part.weights_bytes} >= {run.device for run in layout.runs}
        done = child.ask(Generate(id=1, prompt="One after another.", max_tokens=8, temperature=0.0), _LONGEST_S)
        assert isinstance(done, Generated), done
        return "".join(message.text for message in child.heard if isinstance(message, Piece))


def on(device: str) -> Layout:
    return Layout(_N_LAYERS, (Run(device, 0, _N_LAYERS - 1),), device)


def test_a_model_on_the_packs_device_says_what_it_says_on_the_processor(
    keeper: PackInstaller, model: ModelMemory
) -> None:
    rig = discover(timeout_s=_LONGEST_S)
    assert [(device.id, device.backend) for device in rig.devices] == [("Vulkan0", "Vulkan")]
    split = Layout(_N_LAYERS, (Run("Vulkan0", 0, 1), Run(CPU_ID, 2, 3)), CPU_ID)
    said = answer(model, on(CPU_ID))
    assert said
    assert answer(model, on("Vulkan0")) == answer(model, split) == said


def test_without_packs_there_is_the_processor(keeper: PackInstaller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PACKS_VARIABLE, NO_PACKS)
    assert discover().devices == ()
    monkeypatch.setenv(PACKS_VARIABLE, str(keeper.book))
    keeper.switch("vulkan", on=False)
    assert discover().devices == ()
    keeper.switch("vulkan", on=True)
    assert [device.id for device in discover(timeout_s=_LONGEST_S).devices] == ["Vulkan0"]


def test_the_oldest_processor_says_the_same(
    model: ModelMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no other CPU backend beside the engine than that of SSE4.2."""
    package = util.find_spec("llama_cpp")
    assert package is not None
    assert package.origin is not None
    monkeypatch.setenv(PACKS_VARIABLE, NO_PACKS)
    said = answer(model, on(CPU_ID))
    libraries = tmp_path / "lib"
    shutil.copytree(Path(package.origin).parent / "lib", libraries, symlinks=True)
    for variant in libraries.glob("libggml-cpu-*"):
        if variant.name != "libggml-cpu-sse42.so":
            variant.unlink()
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(libraries))
    assert answer(model, on(CPU_ID)) == said
