"""The Vulkan pack in the bundle, on Mesa's llvmpipe. Needs `make.py bundle` and `make.py pack vulkan`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.planning.layout.layout import Layout, Run
from engine.planning.layout.layout_file import LayoutFile, write_layout
from engine.planning.settings.context_settings import ContextSettings
from tests.support.models import write_tiny_llama

pytestmark = pytest.mark.bundle

N_LAYERS = 4


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Nothing but a home, and llvmpipe twice in the place of two cards."""
    home = tmp_path / "home"
    home.mkdir()
    return {"HOME": str(home), "GGML_VK_VISIBLE_DEVICES": "0,0"}


@pytest.fixture
def archive(dist: Path) -> Path:
    """Return what `make.py pack vulkan` has left beside the bundle."""
    found = next(iter(sorted(dist.glob("layerdeck-pack-vulkan-*.tar.gz"))), None)
    if found is None:
        pytest.skip("there is no Vulkan pack in dist/; `make.py pack vulkan` builds one")
    return found


def run_cli(bundle: Path, environment: Mapping[str, str], *words: str) -> str:
    done = subprocess.run(
        [str(bundle / "layerdeck-cli"), *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def told(bundle: Path, environment: Mapping[str, str], *words: str) -> Any:
    return json.loads(run_cli(bundle, environment, *words, "--json"))


def answer(bundle: Path, environment: Mapping[str, str], model: Path, device: str) -> str:
    """Return what the likeliest tokens say with all layers on `device`, and see that its weights are there."""
    layout = model.with_name(f"{device}.layout.json")
    context = ContextSettings(n_ctx=256, flash_attn="off")
    write_layout(layout, LayoutFile("tiny", Layout(N_LAYERS, (Run(device, 0, N_LAYERS - 1),), device), context))
    question = ("--prompt", "One after another.", "-n", "8", "--temp", "0", "--json")
    words = ("load", str(model), "--layout", str(layout), *question)
    events = [json.loads(line) for line in run_cli(bundle, environment, *words).splitlines()]
    (loaded,) = (event for event in events if event["event"] == "loaded")
    assert {row["id"] for row in loaded["devices"] if row["weights_bytes"]} >= {device}
    return "".join(event["text"] for event in events if event["event"] == "token")


def test_a_pack_is_installed_checked_used_and_removed(
    bundle: Path, environment: dict[str, str], archive: Path, tmp_path: Path
) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf", n_layers=N_LAYERS, n_embd=128, n_head=4, n_ff=256)
    assert told(bundle, environment, "devices")["devices"] == []
    said = answer(bundle, environment, model, "CPU")
    assert said
    (pack,) = told(bundle, environment, "packs", "install", str(archive), "--yes")["packs"]
    assert (pack["name"], pack["state"], pack["devices"]) == ("vulkan", "used", ["Vulkan0", "Vulkan1"]), pack["reason"]
    (pack,) = told(bundle, environment, "packs")["packs"]
    assert Path(pack["folder"]).is_relative_to(environment["HOME"])
    assert [device["id"] for device in told(bundle, environment, "devices")["devices"]] == ["Vulkan0", "Vulkan1"]
    assert answer(bundle, environment, model, "Vulkan0") == said
    run_cli(bundle, environment, "packs", "remove", "vulkan")
    assert told(bundle, environment, "devices")["devices"] == []
