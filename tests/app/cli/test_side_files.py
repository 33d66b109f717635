"""Projectors and adapters on the command line, and the options of all settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.model.gguf.reader import read_model
from engine.planning.settings.table import SETTINGS, Setting
from tests.support.command_line import run_here
from tests.support.models import write_tiny_llama
from tests.support.setting_values import others
from tests.support.side_models import write_tiny_lora, write_tiny_projector


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, an adapter of 512 KiB a layer and a projector."""
    folder = tmp_path_factory.mktemp("files")
    model = read_model(write_tiny_llama(folder / "m.gguf", n_layers=4))
    write_tiny_lora(folder / "lora.gguf", model, weights=("attn_q",), rank=1024)
    write_tiny_projector(folder / "mmproj.gguf")
    card = {"id": "CUDA0", "backend": "CUDA", "total_bytes": "8GiB"}
    rig = {"version": 1, "devices": [card], "host": {"total_bytes": "4GiB"}}
    (folder / "rig.json").write_text(json.dumps(rig), encoding="utf-8")
    return folder


def plan(capsys: pytest.CaptureFixture[str], folder: Path, *words: str | Path) -> dict[str, Any]:
    answer = run_here(capsys, "plan", folder / "m.gguf", "--rig", folder / "rig.json", "--json", *words)
    assert answer.code == 0, answer
    return answer.document


def decided(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    for each in document["decisions"]:
        assert list(each) == ["setting", "value", "reason", "overridden"]
    return {each["setting"]: each for each in document["decisions"]}


def test_files_beside_the_model_count_on_their_devices(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    plain = plan(capsys, folder)
    whole = plan(
        capsys, folder, "--mmproj", folder / "mmproj.gguf", "--lora", f"{folder / 'lora.gguf'}=0.5",
        "--lora", folder / "lora.gguf",
    )  # fmt: skip
    elsewhere = plan(capsys, folder, "--mmproj", folder / "mmproj.gguf", "--mmproj-device", "CPU")

    def weights(document: dict[str, Any]) -> list[int]:
        return [row["weights_bytes"] for row in document["devices"]]

    card_bytes, host_bytes = (after - before for after, before in zip(weights(whole), weights(plain), strict=True))
    assert card_bytes > 2 * 4 * 1024 * (64 + 64) * 4
    assert host_bytes == plain["devices"][-1]["mapped_bytes"]  # Not mapped any more, with an adapter.
    assert weights(elsewhere)[0] == weights(plain)[0]
    assert decided(whole)["projector"]["value"] == "CUDA0"
    assert decided(whole)["adapters"]["value"] == 2
    assert decided(whole)["load_mode"]["value"] == "none"
    assert decided(elsewhere)["projector"] == {
        "setting": "projector", "value": "CPU", "overridden": True,
        "reason": decided(elsewhere)["projector"]["reason"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "setting", "value"),
    [
        (("--load-mode", "none"), "load_mode", "none"),
        (("--flash-attn", "off"), "flash_attn", "off"),
        (("--threads", "3"), "threads", 3),
        (("--threads-batch", "5"), "threads_batch", 5),
        (("--op-offload", "off"), "op_offload", False),
        (("--op-offload-min-batch", "64"), "op_offload_min_batch", 64),
        (("--type-v", "q4_0", "--type-k", "f32"), "type_k", "f32"),
        (("--ctx", "512"), "n_ctx", 512),
        (("--ubatch", "64"), "n_ubatch", 64),
        (("--batch", "256"), "n_batch", 256),
        (("--sequences", "4"), "n_seq_max", 4),
        (("--pipeline", "on"), "pipeline", "on"),
        (("--pipeline", "off"), "pipeline", "off"),
    ],
)
def test_every_setting_can_be_chosen(
    capsys: pytest.CaptureFixture[str], folder: Path, words: tuple[str, ...], setting: str, value: object
) -> None:
    model = folder / "wide.gguf"
    write_tiny_llama(model, n_embd=128, n_head=4, n_head_kv=4)  # heads of 32
    answer = run_here(capsys, "plan", model, "--json", *words)
    assert answer.code == 0, answer
    found = decided(answer.document)[setting]
    assert (found["value"], found["overridden"]) == (value, True)
    assert answer.document["layout"]["context"][setting] == value


@pytest.mark.parametrize("setting", [each for each in SETTINGS if not each.decided_by], ids=lambda each: each.key)
def test_settings_that_nobody_decides_can_be_chosen(
    capsys: pytest.CaptureFixture[str], folder: Path, setting: Setting
) -> None:
    for value in others(setting):
        context = plan(capsys, folder, setting.flag, setting.kind.text_of(value))["layout"]["context"]
        assert context[setting.key] == value


def test_an_option_leaves_open_again_what_a_layout_file_chose(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    document = plan(capsys, folder, "--threads", "3")
    assert document["layout"]["context"]["threads"] == 3
    layout = folder / "threads.json"
    layout.write_text(json.dumps(document["layout"]), encoding="utf-8")
    assert plan(capsys, folder, "--layout", layout)["layout"]["context"]["threads"] == 3
    assert plan(capsys, folder, "--layout", layout, "--threads", "auto")["layout"]["context"]["threads"] is None


def test_a_context_left_to_us(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    for words in (("--ctx", "auto"), ("--ctx", "auto", "--auto", "balanced"), ("--ctx", "auto", "--auto", "context")):
        document = plan(capsys, folder, *words)
        assert document["layout"]["context"]["n_ctx"] == decided(document)["n_ctx"]["value"] == 4096
    layout = folder / "auto.json"
    document["layout"]["context"]["n_ctx"] = "auto"
    layout.write_text(json.dumps(document["layout"]), encoding="utf-8")
    assert decided(plan(capsys, folder, "--layout", layout))["n_ctx"]["value"] == 4096


def test_decisions_are_told_to_people(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    answer = run_here(capsys, "plan", folder / "m.gguf", "--rig", folder / "rig.json", "--threads", "2")
    lines = [line.split() for line in answer.out.splitlines()]
    assert ["threads", "2:", "Set", "explicitly."] in lines
    assert any(line[:2] == ["load_mode", "mmap:"] for line in lines)


def test_counts_may_be_written_with_k(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    words = (
        "plan",
        folder / "m.gguf",
        "--rig",
        folder / "rig.json",
        "--ctx",
        "8k",
        "--batch",
        "1K",
        "--ubatch",
        "1 024",
    )
    answer = run_here(capsys, *words, "--json")
    context = json.loads(answer.out)["layout"]["context"]
    assert (context["n_ctx"], context["n_batch"], context["n_ubatch"]) == (8192, 1024, 1024)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--lora", "m.gguf"), 4, "m.gguf: is a model (llama), not a LoRA adapter"),
        (("--mmproj", "lora.gguf"), 4, "lora.gguf: is an adapter"),
        (("--mmproj", "gone.gguf"), 4, "gone.gguf: there is no such file"),
        (("--lora", "gone.gguf=0.5"), 4, "gone.gguf: there is no such file"),
        (("--lora", "lora.gguf=much"), 2, '"much" is not a scale'),
        (("--lora", "lora.gguf=nan"), 2, '"nan" is not a scale'),
        (("--mmproj-device", "CUDA0"), 2, "name its file with --mmproj"),
        (("--mmproj", "mmproj.gguf", "--mmproj-device", "CUDA9"), 2, "CUDA9 is not among the devices (CUDA0, CPU)"),
        (("--threads", "0"), 2, "not a whole number above 0"),
        (("--threads", "9999"), 2, "the maximum is 512"),
        (("--ctx", "long"), 2, "not a whole number above 0"),
        (("--op-offload", "maybe"), 2, '"maybe" is not one of auto, on, off'),
        (("--sequences", "257"), 2, "257 sequences are too many; the maximum is 256"),
        (("--type-k", "q9"), 2, '"q9" is not one of f32, f16'),
        (("--batch", "auto"), 2, '"auto" is not a whole number above 0'),
    ],
)
@pytest.mark.parametrize("command", ["plan", "load"])
def test_bad_values_are_one_sentence(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    command: str,
    words: tuple[str, ...],
    code: int,
    says: str,
) -> None:
    monkeypatch.chdir(folder)
    answer = run_here(capsys, command, "m.gguf", "--rig", "rig.json", "--json", *words)
    assert answer.code == code
    assert says in answer.error["message"]


def test_what_a_projector_computes_in_is_a_part_of_its_own(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """The engine tells it, so that only a probe has it; it grows with the limit for images."""
    model = write_tiny_llama(
        folder / "qwen.gguf", n_layers=2, architecture="qwen2vl",
        extra_metadata={"qwen2vl.rope.dimension_sections": [2, 3, 3, 0]},
    )  # fmt: skip
    projector = write_tiny_projector(folder / "qwen-mmproj.gguf", kind="qwen2vl_merger")
    words = ("plan", model, "--mmproj", projector, "--ctx", "512", "--device", "CPU", "--probe")

    def host_row(*more: str) -> dict[str, Any]:
        answer = run_here(capsys, *words, "--json", *more)
        assert answer.code == 0, answer
        row: dict[str, Any] = answer.document["devices"][-1]
        return row

    plain = run_here(capsys, *words[:2], "--ctx", "512", "--device", "CPU", "--probe", "--json").document["devices"][-1]
    small, large = host_row("--image-max-tokens", "64"), host_row("--image-max-tokens", "256")
    assert plain["projector_bytes"] == 0 < small["projector_bytes"] < large["projector_bytes"]
    for row in (small, large):
        assert row["compute_bytes"] - row["projector_bytes"] == plain["compute_bytes"]
    told = run_here(capsys, *words, "--image-max-tokens", "64")
    assert "The projector computes the largest image in " in told.out
    assert "is not included" not in told.out
    guessed = run_here(capsys, *words[:-1])
    assert "The projector's compute buffer for images is not included; a probe measures it (--probe)." in guessed.out


def test_a_limit_below_the_projectors_minimum_is_refused_before_a_load(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    projector = write_tiny_projector(folder / "several-mmproj.gguf", kind="qwen2vl_merger")
    for command in ("plan", "load"):
        answer = run_here(
            capsys, command, folder / "m.gguf", "--device", "CPU", "--mmproj", projector, "--image-max-tokens", "4"
        )
        assert answer.code == 2, answer
        assert "The largest image (4 tokens) is below the projector's minimum of 8 tokens" in answer.out + answer.err
        assert "reading" not in answer.err
