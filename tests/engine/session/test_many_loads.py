"""A session that loads and unloads all day takes no more of the system at the end than near the beginning."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import psutil
import pytest

from engine.devices.device import Rig, make_host
from engine.gguf.reader import read_model
from engine.layout.layout import Layout, Run
from engine.protocol.messages import Generate
from engine.session.events import Done, Loaded
from engine.session.status import Phase
from engine.settings.context_settings import ContextSettings
from engine.units import GIB
from tests.support.models import write_tiny_llama
from tests.support.orders import order_of
from tests.support.selection import examples
from tests.support.session_log import SessionLog

WARM_CYCLES = 10
"""After so many everything that is made once has been made."""
N_CYCLES = max(examples(100), 3 * WARM_CYCLES)
MAX_GROWTH = 1.05


def held() -> tuple[int, int, int]:
    """Return (descriptors, threads, children) of this process."""
    process = psutil.Process()
    descriptors = process.num_handles() if psutil.WINDOWS else process.num_fds()
    return descriptors, threading.active_count(), len(process.children(recursive=True))


@pytest.mark.exhaustive
def test_nothing_grows_over_many_loads(tmp_path: Path) -> None:
    model = read_model(write_tiny_llama(tmp_path / "tiny.gguf", n_layers=1))
    order = order_of(
        model=model,
        rig=Rig((), make_host("host", 8 * GIB)),
        layout=Layout(1, (Run("CPU", 0, 0),), "CPU"),
        context=ContextSettings(n_ctx=64, n_batch=32, n_ubatch=32, threads=1),
    )
    process = psutil.Process()
    first, warm_bytes = held(), 0
    with SessionLog() as log:
        for cycle in range(N_CYCLES):
            log.session.load(order)
            assert isinstance(log.wait_for_endings(1)[-1], Loaded)
            log.session.ask(Generate(prompt="x", max_tokens=1))
            assert isinstance(log.wait_for_endings(2)[-1], Done)
            log.session.unload()
            log.wait_for_phase(Phase.STOPPED)
            # the child's threads see its end, then they end themselves
            log.wait_until(lambda: not any("worker-" in each.name for each in threading.enumerate()), quietly=True)
            if cycle == 0:
                first = held()
            if cycle == WARM_CYCLES:
                gc.collect()
                warm_bytes = process.memory_info().rss
            log.events.clear()
            log.phases.clear()
        assert held() == first
        gc.collect()
        assert process.memory_info().rss <= warm_bytes * MAX_GROWTH
