"""Cards lent through the tunnel: forecasts follow the card's own backend, and match what the load takes."""

from __future__ import annotations

import json
import re
import signal
import socket
from pathlib import Path

import pytest

from app.paths import pairings_path
from tests.engine.cuda.conftest import Cards
from tests.support.command_line import run_cli, start_cli
from tests.support.models import write_tiny_llama

pytestmark = pytest.mark.engine("cuda")

PARTS = ("weights_bytes", "kv_cache_bytes", "compute_bytes", "output_bytes")
N_LAYERS = 8


@pytest.mark.parametrize("cache", ["f16", "q8_0"])
def test_a_remote_card_takes_what_was_forecast(cards: Cards, tmp_path: Path, cache: str) -> None:
    # Rows of 576 are no multiple of 512, so CUDA pads them if they are quantised.
    model = write_tiny_llama(
        tmp_path / "m.gguf",
        n_layers=N_LAYERS,
        n_embd=576,
        n_head=9,
        n_ff=1024,
        n_vocab=8192,
        n_head_kv=9,
        file_type="Q8_0",
    )
    pairings_path().unlink(missing_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    words = ("--device", "CUDA0", "--device", "CUDA2", "--device", "CPU", "--cap", "CUDA2=8GiB", "--keep", "0")
    with start_cli("rig", "serve", "--secure", "--port", port, "--name", "attic", *words) as server:
        code = None
        while code is None:
            line = server.error_line()
            assert line, server.err
            code = re.search(r"Pairing code: (\S+)", line)
        assert run_cli("rig", "pair", f"127.0.0.1:{port}", code.group(1)).code == 0
        found = run_cli("devices", "--peer", "attic")
        devices = {each["id"]: each for each in found.document["devices"]}
        assert {"attic-CUDA0", "attic-CUDA2", "attic-CPU"} <= devices.keys()
        assert devices["attic-CUDA0"]["remote"]["backend"] == "CUDA"
        assert devices["attic-CUDA2"]["total_bytes"] == 8 << 30
        rig, layout = tmp_path / "rig.json", tmp_path / "layout.json"
        rig.write_text(found.out, encoding="utf-8")
        runs = [("attic-CUDA0", "0-2"), ("CPU", "3-3"), ("attic-CUDA2", "4-5"), ("attic-CPU", "6-7")]
        layout.write_text(
            json.dumps(
                {
                    "version": 1,
                    "model": {"name": "m", "layers": N_LAYERS},
                    "split_mode": "layer",
                    "runs": [{"device": device, "layers": layers} for device, layers in runs],
                    "context": {"n_ctx": 1024, "type_k": cache, "type_v": cache, "flash_attn": "on"},
                }
            ),
            encoding="utf-8",
        )
        answer = run_cli("load", str(model), "--rig", str(rig), "--layout", str(layout), "--json")
        (loaded,) = [event for event in answer.events if event["event"] == "loaded"]
        forecast = {row["id"]: [row[part] for part in PARTS] for row in loaded["forecast"]}
        assert {row["id"]: [row[part] for part in PARTS] for row in loaded["devices"]} == forecast
        answering = {row["id"]: row.get("answering_bytes", 0) for row in loaded["forecast"]}
        assert answering["attic-CUDA0"] > 0 == answering["attic-CPU"]
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 0
