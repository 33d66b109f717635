"""The exported Python script, run with the engine: its buffers equal those of our own load of the layout."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from engine.base.units import MIB
from engine.devices.device import CPU_ID, Rig
from engine.machines.rigs.lab import LabRig
from engine.model.gguf.reader import read_model
from engine.planning.exchange.exporting import export_plan
from engine.planning.layout.layout import Override, make_layout
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.session.events import Loaded
from engine.runtime.session.status import Phase
from tests.support.load_specs import spec_of
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from tests.support.session_log import SessionLog

_BUFFER = re.compile(r"^\w+:\s+(\S+)\s+(model|KV|compute|output) buffer size =\s+([\d.]+) MiB", re.MULTILINE)
_ROUNDING_MIB = 0.006


def script_sizes(text: str, rig: Rig, folder: Path) -> dict[tuple[str, str], float]:
    """Run the script, and return the MiB that llama.cpp reports for each device and kind."""
    path = folder / "load_model.py"
    path.write_text(text.replace("max_tokens=256", "max_tokens=2"), "utf-8")
    done = subprocess.run([sys.executable, path, "hi"], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    ids = {f"RPC0[{device.endpoint}]": device.id for device in rig.devices}
    sizes: defaultdict[tuple[str, str], float] = defaultdict(float)
    for name, kind, size in _BUFFER.findall(done.stderr):
        sizes[ids.get(name, CPU_ID), kind] += float(size)
    return dict(sizes)


@pytest.mark.parametrize("homes", ["CCCCCC", "C00CC1", "010101"])
def test_the_script_gives_the_same_rows(homes: str, tmp_path: Path) -> None:
    model = read_model(write_tiny_llama(tmp_path / "tiny.gguf", n_layers=6, n_embd=128, n_ff=512, n_vocab=2048))
    named = {"C": CPU_ID, "0": "RPC0", "1": "RPC1"}
    layout = make_layout(6, [named[letter] for letter in homes], CPU_ID if "C" in homes else "RPC0")
    if homes.startswith("C0"):
        layout = type(layout)(6, layout.runs, CPU_ID, overrides=(Override(CPU_ID, "ffn", 1, 1),))
    context = ContextSettings(n_ctx=512, n_ubatch=64, load_mode="none", threads=1, threads_batch=1)
    with LabRig([64 * MIB, 64 * MIB]) as lab:
        spec = spec_of(model, lab.rig, layout, context)
        with SessionLog() as log:
            log.session.load(spec)
            loaded = log.wait_for_endings(1)[0]
            log.session.unload()
            log.wait_until(lambda: log.session.snapshot.phase in (Phase.STOPPED, Phase.FAILED))
        assert isinstance(loaded, Loaded), loaded
        sizes = script_sizes(export_plan(spec.plan, "python").text, lab.rig, tmp_path)
    for row in loaded.devices:
        ours = {
            "model": row.weights_bytes,
            "KV": row.kv_cache_bytes,
            "compute": row.compute_bytes,
            "output": row.output_bytes,
        }
        for kind, size_bytes in ours.items():
            assert sizes.get((row.id, kind), 0.0) == pytest.approx(size_bytes / MIB, abs=_ROUNDING_MIB), (row.id, kind)
