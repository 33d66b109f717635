"""The decision to map the file, over platforms, devices, sizes and choices."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import Struct, field

from engine.base.processor import Processor
from engine.base.units import GIB
from engine.devices.device import CPU_ID, Device, DeviceKind, Rig, make_host
from engine.model.gguf.reader import read_model
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.side_files import Adapter, SideFiles
from engine.planning.plan.decisions.decision import Decision
from engine.planning.plan.decisions.resolve import resolve
from engine.planning.plan.decisions.threads import HostFacts
from engine.planning.settings.context_settings import ContextSettings, LoadMode
from tests.support.models import write_header_only
from tests.support.previews import make_layout

N_LAYERS = 4
ADAPTER = SideFiles(adapters=(Adapter(Path("lora.gguf"), ()),))


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> ModelMemory:
    """A model of some 600 MiB."""
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return ModelMemory(
        read_model(write_header_only(path, n_layers=N_LAYERS, n_embd=4096, n_head=32, n_ff=14336, n_vocab=4096))
    )


class Case(Struct, frozen=True, dict=True):
    """One row: devices as (backend, kind), how many layers stay on the CPU, the host's free memory as a share of the
    file, and what is expected."""

    mode: LoadMode
    says: str
    platform: str = "linux"
    devices: tuple[tuple[str, DeviceKind], ...] = (("CUDA", "gpu"),)
    on_cpu: int = 0
    asked: LoadMode = "auto"
    free_share: float = 100.0
    side_files: SideFiles = field(default_factory=SideFiles)

    def decide(self, memory: ModelMemory) -> Decision:
        devices = tuple(
            Device(f"D{number}", "device", backend, kind, 24 * GIB)
            for number, (backend, kind) in enumerate(self.devices)
        )
        runs = [(CPU_ID, self.on_cpu)] if self.on_cpu else []
        left = N_LAYERS - self.on_cpu
        for number, device in enumerate(devices):
            share = left // (len(devices) - number)
            runs.append((device.id, share))
            left -= share
        layout = make_layout(N_LAYERS, [run for run in runs if run[1]] or [(CPU_ID, N_LAYERS)])
        rig = Rig(devices, make_host("host", 256 * GIB, int(memory.model.size_bytes * self.free_share)))
        resolved = resolve(
            memory, rig, layout, ContextSettings(n_ctx=256, load_mode=self.asked), self.side_files,
            HostFacts(self.platform, Processor(8, 8)),
        )  # fmt: skip
        decision = next(each for each in resolved.decisions if each.setting == "load_mode")
        assert resolved.context.load_mode == decision.value
        return decision


TABLE = {
    "a card that holds everything": Case("mmap", "memory-mapped from the file"),
    "a card and the CPU": Case("mmap", "memory-mapped from the file", on_cpu=1),
    "Windows and CUDA": Case("none", "Windows", platform="win32"),
    "Windows and Vulkan": Case("none", "Vulkan", platform="win32", devices=(("Vulkan", "gpu"),)),
    "Vulkan first": Case("none", "Vulkan", devices=(("Vulkan", "gpu"), ("CUDA", "gpu"))),
    "Vulkan second": Case("mmap", "memory-mapped", devices=(("CUDA", "gpu"), ("Vulkan", "gpu"))),
    "HIP": Case("mmap", "memory-mapped", devices=(("HIP", "gpu"),)),
    "Metal that holds everything": Case("mmap", "memory-mapped", platform="darwin", devices=(("Metal", "gpu"),)),
    "Metal and the CPU": Case("none", "Metal", platform="darwin", devices=(("Metal", "gpu"),), on_cpu=1),
    "an integrated card": Case("none", "integrated", devices=(("CUDA", "igpu"),)),
    "an RPC worker": Case("mmap", "memory-mapped", devices=(("RPC", "gpu"),)),
    "no devices": Case("none", "Everything is on the CPU", devices=(), on_cpu=N_LAYERS),
    "no devices on a Mac": Case("none", "Everything is on the CPU", platform="darwin", devices=(), on_cpu=N_LAYERS),
    "no devices and no room": Case("mmap", "no room", devices=(), on_cpu=N_LAYERS, free_share=0.5),
    "a file larger than what is free": Case("none", "larger than the free memory", free_share=0.9),
    "a file larger than what is free, half of it on the CPU": Case("mmap", "no room", on_cpu=3, free_share=0.4),
    "the same on Windows": Case("mmap", "memory-mapped", platform="win32", devices=(("HIP", "gpu"),), free_share=0.9),
    "an adapter": Case("none", "adapter", side_files=ADAPTER),
    "chosen mmap": Case("mmap", "Set explicitly", asked="mmap", devices=(), on_cpu=N_LAYERS),
    "chosen mmap with an adapter": Case("mmap", "Set explicitly", asked="mmap", side_files=ADAPTER),
    "chosen none": Case("none", "Set explicitly", asked="none"),
    "chosen direct I/O": Case("direct_io", "Set explicitly", asked="direct_io", devices=(("Vulkan", "gpu"),)),
}


@pytest.mark.parametrize("case", TABLE.values(), ids=TABLE)
def test_the_mode(memory: ModelMemory, case: Case) -> None:
    decision = case.decide(memory)
    assert decision.value == case.mode
    assert case.says in decision.reason
    assert decision.reason.endswith(".")
    assert decision.overridden is (case.asked != "auto")
