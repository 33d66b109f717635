"""`--device` and `--place`: devices by name, for a whole model and for its modules, and errors for wrong names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import run_here
from tests.support.models import write_header_only, write_tiny_encoder, write_tiny_llama
from tests.support.side_models import write_tiny_projector


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an 8B model (4.2 GiB), a tied one, one that embeds texts, a projector, and a rig."""
    folder = tmp_path_factory.mktemp("files")
    write_header_only(folder / "m.gguf", n_layers=32, n_embd=4096, n_head=32, n_ff=14336, n_vocab=4096)
    write_tiny_llama(folder / "tied.gguf", n_layers=4, tied=True)
    write_tiny_projector(folder / "mmproj.gguf", n_embd=4096)
    cards = [
        {"id": name, "backend": name[:-1], "total_bytes": size}
        for name, size in {"CUDA0": "24GiB", "CUDA1": "12GiB", "Vulkan0": "16GiB"}.items()
    ]
    rig = {"version": 1, "devices": cards, "host": {"total_bytes": "32GiB"}}
    (folder / "rig.json").write_text(json.dumps(rig), encoding="utf-8")
    return folder


def run(capsys: pytest.CaptureFixture[str], folder: Path, *words: str | Path, model: str = "m.gguf") -> Any:
    return run_here(capsys, "plan", folder / model, "--rig", folder / "rig.json", "--json", *words)


def layout_of(
    capsys: pytest.CaptureFixture[str], folder: Path, *words: str | Path, model: str = "m.gguf"
) -> dict[str, Any]:
    answer = run(capsys, folder, *words, model=model)
    assert answer.code == 0, answer
    layout: dict[str, Any] = answer.document["layout"]
    return layout


def devices_of(layout: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys([*(run["device"] for run in layout["runs"]), layout["output"]]))


@pytest.mark.parametrize(
    ("names", "devices"),
    [
        ("CUDA1", ["CUDA1"]),
        ("CUDA0,CUDA1", ["CUDA0", "CUDA1"]),
        ("CUDA1,CUDA0", ["CUDA1", "CUDA0"]),
        ("vulkan0", ["Vulkan0"]),
        ("vulk , cuda1", ["Vulkan0", "CUDA1"]),
        ("CPU", ["CPU"]),
        ("none", ["CPU"]),
    ],
)
def test_a_model_is_on_the_listed_devices_alone(
    capsys: pytest.CaptureFixture[str], folder: Path, names: str, devices: list[str]
) -> None:
    assert devices_of(layout_of(capsys, folder, "--device", names)) == devices


def test_listed_devices_share_by_their_free_memory(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    counts = {}
    for run_ in layout_of(capsys, folder, "--device", "CUDA0,CUDA1")["runs"]:
        first, last = run_["layers"].split("-")
        counts[run_["device"]] = int(last) - int(first) + 1
    assert counts == {"CUDA0": 22, "CUDA1": 10}, "22 GiB and 10 GiB are free but for the headroom"


def test_a_strategy_uses_the_listed_devices_only(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    layout = layout_of(capsys, folder, "--device", "CUDA1,Vulkan0", "--auto", "fewest")
    assert devices_of(layout) == ["Vulkan0"]


def test_modules_are_where_they_were_placed(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    words = ("--mmproj", folder / "mmproj.gguf", "--place", "mmproj=cuda1", "--place", "output=CPU")
    answer = run(capsys, folder, *words)
    decisions = {each["setting"]: each for each in answer.document["decisions"]}
    assert (decisions["projector"]["value"], decisions["projector"]["overridden"]) == ("CUDA1", True)
    assert answer.document["layout"]["output"] == "CPU"
    assert {run["device"] for run in answer.document["layout"]["runs"]} != {"CPU"}
    for others in (("--auto", "fewest"), ("--device", "CUDA1,Vulkan0")):
        assert layout_of(capsys, folder, *others, "--place", "output=Vulkan0")["output"] == "Vulkan0"


def test_a_layout_file_keeps_its_layers(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    kept = layout_of(capsys, folder, "--device", "CUDA1,CUDA0")
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(kept))
    placed = layout_of(capsys, folder, "--layout", path, "--place", "output=CPU", "--place", "embedding=CUDA0")
    assert placed["runs"] == kept["runs"]
    assert placed["output"] == "CPU"
    assert placed["overrides"] == [{"pattern": r"^token_embd\.weight$", "device": "CUDA0"}]


def test_an_embedding_is_on_the_cpu_or_moved(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    plain = layout_of(capsys, folder, "--device", "CUDA0")
    assert layout_of(capsys, folder, "--device", "CUDA0", "--place", "Embedding=CPU") == plain
    moved = run(capsys, folder, "--device", "CUDA0", "--place", "embedding=CUDA1").document
    held = {row["id"]: row["weights_bytes"] for row in moved["devices"]}
    assert held["CUDA1"] > 4096 * 4096 // 2, "the token embedding, quantised"
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(moved["layout"]))
    back = layout_of(capsys, folder, "--layout", path, "--place", "embedding=CPU")
    assert not back.get("overrides"), "on the CPU it needs none"


def test_the_projector_of_a_listed_model_is_on_the_first_of_its_devices(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    for names, device in (("CUDA1,CUDA0", "CUDA1"), ("none", "CPU")):
        answer = run(capsys, folder, "--device", names, "--mmproj", folder / "mmproj.gguf")
        decisions = {each["setting"]: each["value"] for each in answer.document["decisions"]}
        assert decisions["projector"] == device


REFUSED = {
    "--device CUDA": '--device: "CUDA" matches CUDA0 and CUDA1; write one of them in full.',
    "--device CUDA7": '--device: there is no device "CUDA7" here; there are CUDA0, CUDA1, Vulkan0, CPU.',
    "--device CUDA0,": "is not a list of devices; write CUDA0,CUDA1",
    "--device CUDA0,cuda0": "--device: CUDA0 is in the list 2 times; list it once.",
    "--device CUDA0,CPU": "the CPU takes what the devices have no room for; leave it out of the list",
    "--device CUDA0 --layout {layout}": "--device and --layout exclude each other",
    "--device CUDA0 --auto fewest --pin 0=CUDA1": "CUDA1 is excluded but has pinned layers",
    "--place output": "places nothing; write MODULE=ID such as mmproj=CUDA1",
    "--place vae=CUDA0": '--place: there is no module "vae"; there are mmproj, draft, output, embedding.',
    "--place draft=CUDA0": "has no draft here; it has output and embedding. Name its file with --draft.",
    "--place mmproj=CUDA0": "has no mmproj here; it has output and embedding. Name its file with --mmproj.",
    "--place output=CU": '--place output: "CU" matches CUDA0 and CUDA1; write one of them in full.',
    "--place output=CUDA7": ('--place output: there is no device "CUDA7" here; there are CUDA0, CUDA1, Vulkan0, CPU.'),
    "--place output=CUDA0 --place output=CPU": "--place output: CUDA0 and CPU were given; give one.",
    "--place output=CUDA0 --device CUDA1": "--place output: CUDA0 is not among the devices of --device; add it there.",
    "--place output=CUDA0 --auto fewest --pin output=CPU": "is pinned to CPU and to CUDA0; pin it to one device",
    "--place mmproj=CUDA0 --mmproj {mmproj} --mmproj-device CPU": "contradicts --place mmproj=CUDA0; remove one",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_exist_is_answered_with_what_does(
    capsys: pytest.CaptureFixture[str], folder: Path, words: str
) -> None:
    filled = [word.format(layout=folder / "l.json", mmproj=folder / "mmproj.gguf") for word in words.split()]
    answer = run(capsys, folder, *filled)
    assert (answer.code, answer.error["kind"]) == (2, "argument")
    assert REFUSED[words] in answer.error["message"]


def test_a_tied_embedding_is_not_moved_without_its_output(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    answer = run(capsys, folder, "--place", "embedding=CUDA0", model="tied.gguf")
    assert answer.code == 2
    assert "output layer is its embedding" in answer.error["message"]
    assert layout_of(capsys, folder, "--place", "output=CPU", model="tied.gguf")["output"] == "CPU"


def test_a_model_without_an_output_layer_has_none_to_place(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    write_tiny_encoder(folder / "encoder.gguf")
    answer = run(capsys, folder, "--place", "output=CPU", model="encoder.gguf")
    assert answer.code == 2
    assert "has no output here; it has embedding" in answer.error["message"]
