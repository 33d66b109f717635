"""--layers, --gpu-layers, --ratio, --experts and --override: the layouts they make, and the errors for wrong values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.cli.arguments import make_parser
from app.cli.serve import Catalogue
from engine.api.server.preferences import Preferences
from engine.base.values import replace
from engine.devices.rig_file import read_rig
from engine.planning.layout.layout import single_device
from engine.planning.layout.layout_file import LayoutFile, encode_layout
from engine.planning.settings.context_settings import ContextSettings
from tests.support.command_line import run_here
from tests.support.models import write_tiny_llama, write_tiny_moe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a mixture-of-experts model of 12 layers, a dense one, and a rig of two cards."""
    folder = tmp_path_factory.mktemp("files")
    write_tiny_moe(folder / "moe.gguf", n_layers=12)
    write_tiny_llama(folder / "dense.gguf", n_layers=12)
    cards = [{"id": name, "backend": "CUDA", "total_bytes": "12GiB"} for name in ("CUDA0", "CUDA1")]
    rig = {"version": 1, "devices": cards, "host": {"total_bytes": "32GiB"}}
    (folder / "rig.json").write_text(json.dumps(rig), encoding="utf-8")
    return folder


def run(capsys: pytest.CaptureFixture[str], folder: Path, *words: str, model: str = "moe.gguf") -> Any:
    return run_here(capsys, "plan", folder / model, "--rig", folder / "rig.json", "--json", *words)


def layout_of(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> dict[str, Any]:
    answer = run(capsys, folder, *words)
    assert answer.code == 0, answer
    layout: dict[str, Any] = answer.document["layout"]
    return layout


def runs_of(layout: dict[str, Any]) -> dict[str, str]:
    return {run["device"]: run["layers"] for run in layout["runs"]}


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        (("--layers", "CUDA0=7,cuda1=5"), {"CUDA0": "0-6", "CUDA1": "7-11"}),
        (("--layers", "CUDA1=4, CUDA0=3"), {"CPU": "0-4", "CUDA1": "5-8", "CUDA0": "9-11"}),
        (("--gpu-layers", "0"), {"CPU": "0-11"}),
        # As llama.cpp: the output layer counts, so 5 are four layers and the output.
        (("--gpu-layers", "5", "--ratio", "1,1"), {"CPU": "0-7", "CUDA0": "8-10", "CUDA1": "11"}),
        (("--gpu-layers", "all", "--ratio", "1,0"), {"CUDA0": "0-11"}),
        (("--ratio", "3,1"), {"CUDA0": "0-9", "CUDA1": "10-11"}),
        (("--ratio", "3,1", "--device", "CUDA1,CUDA0"), {"CUDA1": "0-9", "CUDA0": "10-11"}),
        (("--gpu-layers", "999", "--device", "CUDA1"), {"CUDA1": "0-11"}),
    ],
)
def test_layers_are_where_they_were_placed(
    capsys: pytest.CaptureFixture[str], folder: Path, words: tuple[str, ...], runs: dict[str, str]
) -> None:
    assert runs_of(layout_of(capsys, folder, *words)) == runs


def test_experts_and_tensors_are_where_they_were_placed(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    words = ("--layers", "CUDA0=12", "--experts", "0-3,7=CPU", "--experts", "11=CUDA1")
    layout = layout_of(capsys, folder, *words, "--override", r"blk\.5\.attn_q=cuda1")
    assert layout["overrides"] == [
        {"pattern": r"blk\.5\.attn_q", "device": "CUDA1"},
        {"part": "experts", "layers": "0-3", "device": "CPU"},
        {"part": "experts", "layers": "7", "device": "CPU"},
        {"part": "experts", "layers": "11", "device": "CUDA1"},
    ]


@pytest.mark.parametrize("words", [("--experts", "all=CPU"), ("--auto", "fewest", "--pin", "experts:0-11=CPU")])
def test_a_strategy_leaves_placed_experts_where_they_are(
    capsys: pytest.CaptureFixture[str], folder: Path, words: tuple[str, ...]
) -> None:
    layout = layout_of(capsys, folder, *words)
    assert "CPU" not in runs_of(layout), "the rest fits on a card"
    assert layout["overrides"] == [{"part": "experts", "device": "CPU"}]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--ratio", "1e-50,1e-50"), '"1e-50" is not a share; write numbers from 0 on, such as 3,1'),
        (("--ratio", "0,0"), 'the shares "0,0" add up to 0; give at least one device a share above 0'),
        (("--ratio", "1,x"), '"x" is not a share; write numbers from 0 on, such as 3,1'),
        (("--ratio", "1,1,1"), "--ratio has 3 shares for 2 devices (CUDA0, CUDA1); give one for each device."),
        (("--layers", "CUDA0=13"), "--layers: 13 layers are placed, but the model has 12; place fewer."),
        (("--layers", "CUDA0=6,CUDA0=2"), "--layers: CUDA0 is in the list 2 times; list it once."),
        (("--layers", "CUDA0"), '"CUDA0" is not a count of layers; write CUDA0=20,CUDA1=12'),
        (("--layers", "CUDA9=1"), '--layers: there is no device "CUDA9" here; there are CUDA0, CUDA1, CPU.'),
        (("--layers", "CPU=2,CUDA0=4"), "--layers: 6 of 12 layers are placed; give the CPU 6 more, or leave it out."),
        (("--layers", "CUDA0=6", "--auto", "fewest"), "--layers and --auto exclude each other"),
        (("--layers", "CUDA0=6", "--ratio", "1"), "--layers and --ratio exclude each other"),
        (("--gpu-layers", "many"), '"many" is not a number of layers'),
        (("--experts", "0-3"), '"0-3" places no experts; write LAYERS=ID such as 0-11=CPU or all=CPU'),
        (("--experts", "3-0=CPU"), '"3-0=CPU" is in reverse order; write the lower layer first: 0-3'),
        (("--experts", "10-12=CPU"), "--experts: there is no layer 12; the model has layers 0-11."),
        (("--experts", "0=CPU", "--experts", "0=CUDA0"), "of layer 0: CPU and CUDA0; name one device."),
        (("--override", "nothing=CPU"), '--override: "nothing" matches no tensor of moe'),
        (("--override", ".=CPU"), '--override: "." matches every tensor; use --device CPU'),
        (("--override", "(=CPU"), "is not a regular expression"),
        (("--override", "CPU"), '"CPU" overrides nothing'),
        (("--pin", "experts:9-0=CPU", "--auto", "fewest"), "is in reverse order"),
    ],
)
def test_bad_input_gets_one_sentence(
    capsys: pytest.CaptureFixture[str], folder: Path, words: tuple[str, ...], sentence: str
) -> None:
    answer = run(capsys, folder, *words)
    assert answer.code == 2
    assert sentence in (answer.out + answer.err).replace('\\"', '"')


@pytest.mark.parametrize(
    ("words", "device"),
    [
        ((), "CUDA1"),
        (("--layers", "CUDA0=12"), "CUDA0"),
        (("--gpu-layers", "0"), "CPU"),
        (("--ratio", "1,0"), "CUDA0"),
    ],
)
def test_layers_of_a_served_model_come_before_its_saved_layout(
    folder: Path, words: tuple[str, ...], device: str
) -> None:
    line = ["serve", str(folder / "dense.gguf"), "--ctx", "512", *words]
    catalogue = Catalogue(make_parser(line).parse_args(line), Preferences())
    (entry,) = catalogue.named()
    saved = encode_layout(LayoutFile(entry.id, single_device(12, "CUDA1"), ContextSettings()))
    plan = catalogue.plan(replace(entry, layout=saved.decode()), read_rig(folder / "rig.json")).plan
    assert [run.device for run in plan.edit.layout.runs] == [device]


def test_a_dense_model_has_no_experts_to_place(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    answer = run(capsys, folder, "--experts", "0-3=CPU", model="dense.gguf")
    assert answer.code == 2
    assert "--experts: layers 0-3 of dense have no experts; name others, or remove the option." in answer.out
