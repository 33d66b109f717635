"""The demo model: the file that set-up, window and `layerdeck-cli demo` use, its questions and sampler settings."""

from __future__ import annotations

import os
import sys
from math import inf
from pathlib import Path

import pytest

from app.demo import MADE_UP_CAPS_BYTES, fetched_demo, find_demo
from app.paths import fetched_models_path
from engine.devices.device import Rig, make_host
from engine.model.demo.speaking import (
    FILE_NAME,
    LAB_CAPS_BYTES,
    SAMPLE_PROMPTS,
    SIZE_BYTES,
    recommended_sampling,
    sample_prompts,
)
from engine.model.gguf.reader import read_model
from engine.planning.fit.strategies.fastest import initial_layout
from engine.planning.layout.layout import single_device
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.decisions.context_length import default_context
from engine.planning.settings.sampling_sources import model_sampling, sampling_of
from resources.setup.demo_model import DEMO_MODEL, DEMO_MODEL_BYTES
from resources.setup.places import model_folder
from tests.support.command_line import run_here
from tests.support.load_specs import worker_device
from tests.support.models import write_tiny_llama
from tests.support.plans import make_report
from tests.support.real_model import real_model


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is taken for the fetched model: as large as it, and a hole."""
    path = tmp_path / FILE_NAME
    with path.open("wb") as file:
        file.truncate(SIZE_BYTES)
    monkeypatch.setattr("app.demo.fetched_models_path", lambda: tmp_path)
    return path


def test_set_up_and_window_mean_the_same_file() -> None:
    assert (DEMO_MODEL, DEMO_MODEL_BYTES) == (FILE_NAME, SIZE_BYTES)
    assert model_folder(sys.platform, os.environ, Path.home()) == fetched_models_path()


def test_the_fetched_model_is_the_demo_where_it_is_whole(fetched: Path) -> None:
    assert find_demo().path == fetched
    assert find_demo().caps_bytes == LAB_CAPS_BYTES
    os.truncate(fetched, 1000)
    assert fetched_demo() is None
    made_up = find_demo()
    assert read_model(made_up.path).n_layers == 16
    assert made_up.caps_bytes == MADE_UP_CAPS_BYTES


@pytest.mark.parametrize("system", ["linux", "darwin", "win32"])
def test_the_model_that_comes_with_the_bundle_is_the_demo_where_none_was_fetched(
    system: str, fetched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "Contents" / "MacOS" / "layerdeck"
    models = (program.parents[1] / "Resources" if system == "darwin" else program.parent) / "models"
    models.mkdir(parents=True)
    brought = models / FILE_NAME
    brought.symlink_to(fetched)
    monkeypatch.setattr("sys.executable", str(program))
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("app.demo.fetched_models_path", lambda: tmp_path / "empty")
    assert fetched_demo() is None, "a checkout has no folder beside its program"
    monkeypatch.setattr("sys.frozen", True, raising=False)
    assert fetched_demo() == brought


def test_the_command_writes_the_fetched_model_unless_asked_for_the_made_up_one(
    fetched: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "there" / "demo.gguf"
    assert run_here(capsys, "demo", target, "--json").document == {"path": str(target), "size_bytes": SIZE_BYTES}
    assert SAMPLE_PROMPTS[0] in run_here(capsys, "demo", target).out
    assert run_here(capsys, "demo", target, "--generated", "--json").code == 0
    assert read_model(target).n_layers == 16


def test_only_the_model_that_answers_has_sample_questions(tmp_path: Path) -> None:
    assert sample_prompts(read_model(write_tiny_llama(tmp_path / "tiny.gguf", n_layers=30))) == ()
    assert sample_prompts(read_model(real_model())) == SAMPLE_PROMPTS


def test_the_model_that_answers_is_sampled_as_its_authors_recommend_unless_the_file_says_otherwise(
    tmp_path: Path,
) -> None:
    assert recommended_sampling(None) == {}
    assert recommended_sampling(read_model(write_tiny_llama(tmp_path / "tiny.gguf", n_layers=30))) == {}
    model = read_model(real_model())
    assert model_sampling(model.metadata) == {}
    sampling = sampling_of({"top_p": 0.5}, {}, {}, authors=recommended_sampling(model))
    assert (sampling.settings.temperature, sampling.settings.top_p) == (0.2, 0.5)
    assert (sampling.settings.repeat_penalty, sampling.settings.penalty_last_n) == (1.1, 256)
    assert (sampling.sources["temperature"], sampling.sources["top_p"]) == ("authors", "model")
    assert "authors" in sampling.explain("temperature")


def test_no_lab_worker_has_room_for_all_of_it_and_two_do() -> None:
    memory = ModelMemory(read_model(real_model()))
    context = default_context(memory.model)
    devices = tuple(worker_device(f"RPC{n}", f"127.0.0.1:{5000 + n}", cap) for n, cap in enumerate(LAB_CAPS_BYTES))
    rig = Rig(devices, make_host("host", 8 << 30, 8 << 30))
    for device in devices:
        assert not make_report(memory.model, rig, single_device(30, device.id), context).fits
    first = initial_layout(memory, rig, context, seconds=inf)
    assert len(first.devices) == 2
    assert "CPU" not in first.devices
