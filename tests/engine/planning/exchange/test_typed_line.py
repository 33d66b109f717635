"""Pasted lines with llama.cpp's options: the layouts they make, named unknown options, and errors."""

from __future__ import annotations

import msgspec
import pytest

from engine.base.errors import LayoutError
from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.exchange.typed_line import Typed, layers_by_share, take_line
from engine.planning.layout.layout import Layout, Override, make_layout, single_device
from engine.planning.layout.parts import place_part
from engine.planning.layout.split_modes import layout_in_mode
from engine.planning.settings.context_settings import AUTO_CONTEXT, ContextSettings
from tests.support.models import write_tiny_moe
from tests.support.previews import make_gpu

RIG = Rig((make_gpu("CUDA0", 24), make_gpu("CUDA1", 12), make_gpu("CUDA2", 12)), make_host("host", 64 * GIB, 60 * GIB))
ON_CPU = single_device(12, CPU_ID)
CONTEXT = ContextSettings(n_ctx=2048)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return read_model(write_tiny_moe(tmp_path_factory.mktemp("files") / "moe.gguf", n_layers=12))


def counts(layout: Layout) -> dict[str, int]:
    return {run.device: run.length for run in layout.runs}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("-ngl 7 -ts 24,12", {CPU_ID: 6, "CUDA0": 5, "CUDA1": 1}),
        ("llama-server -m other.gguf -ngl 99 -dev CUDA1", {"CUDA1": 12}),
        ("-ngl 0", {CPU_ID: 12}),
    ],
)
def test_options_place_layers_as_llama_cpp_does(model: ModelFile, text: str, wanted: dict[str, int]) -> None:
    taken = take_line(text, ON_CPU, CONTEXT, model, RIG)
    assert counts(taken.layout) == wanted
    assert taken.context == CONTEXT, "what the line does not name stays"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("3,1,2", {"CUDA0": 6, "CUDA1": 2, "CUDA2": 4}),
        ("1 / 1", {"CUDA0": 6, "CUDA1": 6}),
        ("5,4,3", {"CUDA0": 5, "CUDA1": 4, "CUDA2": 3}),
        ("0,1", {"CUDA1": 12}),
        ("24,12,12", {"CUDA0": 6, "CUDA1": 3, "CUDA2": 3}),
        ("1000,1", {"CUDA0": 12}),
    ],
)
def test_bare_shares_count_layers_alone(model: ModelFile, text: str, wanted: dict[str, int]) -> None:
    """llama.cpp's arithmetic, in which the output is one more layer, is for `-ts`."""
    taken = take_line(text, ON_CPU, CONTEXT, model, RIG)
    assert counts(taken.layout) == wanted
    assert taken.layout.output_device == list(wanted)[-1]


def test_shares_are_rounded_to_all_layers() -> None:
    assert layers_by_share(6, (3, 1, 2)) == (3, 1, 2)
    assert layers_by_share(7, (1, 1, 1)) == (3, 2, 2)
    assert layers_by_share(126, (24, 12, 0.1)) == (84, 42, 0)


def test_experts_go_to_the_cpu_and_layers_stay(model: ModelFile) -> None:
    layout = place_part(make_layout(12, ["CUDA0"] * 8 + ["CUDA1"] * 4), "experts", 10, 11, CPU_ID)
    taken = take_line("--n-cpu-moe 3", layout, CONTEXT, model, RIG)
    assert taken == Typed(Layout(12, layout.runs, "CUDA1", overrides=(Override(CPU_ID, "experts", 0, 2),)), CONTEXT)
    assert take_line("-cmoe", layout, CONTEXT, model, RIG).layout.overrides == (Override(CPU_ID, "experts"),)


def test_a_tensor_override_comes_first(model: ModelFile) -> None:
    layout = place_part(single_device(12, "CUDA0"), "experts", 0, 1, CPU_ID)
    taken = take_line(r"-ot 'blk\.5\.ffn_up_exps=CUDA1'", layout, CONTEXT, model, RIG)
    assert taken.layout.overrides == (Override("CUDA1", pattern=r"blk\.5\.ffn_up_exps"), *layout.overrides)


def test_a_tensor_override_comes_first_also_if_the_layout_has_it_already(model: ModelFile) -> None:
    hidden, all_experts = Override("CUDA1", pattern=r"blk\.5\.ffn_up_exps"), Override(CPU_ID, "experts")
    layout = replace(single_device(12, "CUDA0"), overrides=(all_experts, hidden))
    taken = take_line(r"-ot 'blk\.5\.ffn_up_exps=CUDA1'", layout, CONTEXT, model, RIG)
    assert taken.layout.overrides == (hidden, all_experts)


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("-ub 512", {"n_ubatch": 512}),
        ("-ctk f16 -fa auto", {"type_k": "f16", "flash_attn": "auto"}),
        ("-np 4", {"n_seq_max": 4}),
        ("-np 6", {"n_seq_max": 6}),
        ("-kvo --op-offload", {"offload_kqv": True, "op_offload": True}),
        ("-c 0 -t 0", {"n_ctx": AUTO_CONTEXT, "threads": None}),
        ("-no-kvu", {"kv_unified": False}),
    ],
)
def test_an_option_is_taken_if_its_value_is_a_default_too(
    model: ModelFile, text: str, changed: dict[str, object]
) -> None:
    context = ContextSettings(
        n_ctx=2048, n_ubatch=256, n_seq_max=2, type_k="q8_0", flash_attn="on", offload_kqv=False, op_offload=False,
        kv_unified=True, threads=3,
    )  # fmt: skip
    taken = take_line(text, ON_CPU, context, model, RIG)
    assert taken == Typed(ON_CPU, msgspec.structs.replace(context, **changed))


def test_unknown_options_are_named_and_the_rest_is_taken(model: ModelFile) -> None:
    taken = take_line("--bogus 3 -ngl 99 -c 8192 --frob", ON_CPU, CONTEXT, model, RIG)
    assert taken.notes == ("Not imported, because Layerdeck does not know these options: --bogus, --frob.",)
    assert taken.context == ContextSettings(n_ctx=8192)
    assert CPU_ID not in counts(taken.layout)


def test_shares_are_those_inside_layers_in_split_mode_tensor(model: ModelFile) -> None:
    able = tuple(make_gpu(f"CUDA{index}", 12) for index in range(2))
    rig = Rig(able, RIG.host)
    tensor = layout_in_mode(single_device(12, "CUDA0").with_split_mode("tensor"), "tensor", rig)
    assert take_line("3,1", tensor, CONTEXT, model, rig).layout.tensor_split == (("CUDA0", 3.0), ("CUDA1", 1.0))


def test_options_stay_in_split_mode_tensor_or_row_unless_the_line_has_a_mode(model: ModelFile) -> None:
    devices = ("CUDA0", "CUDA1", "CUDA2")
    shares = tuple(zip(devices, (1.0, 2.0, 3.0), strict=True))
    row = replace(single_device(12, "CUDA0"), split_mode="row", tensor_split=shares, main_device="CUDA1")

    def taken(text: str) -> Layout:
        return take_line(text, row, CONTEXT, model, RIG).layout

    assert taken("-ts 3,1") == replace(row, tensor_split=(("CUDA0", 3.0), ("CUDA1", 1.0)))
    assert taken("-ngl 9").tensor_split == shares
    assert counts(taken("-ngl 9")) == {CPU_ID: 4, "CUDA0": 8}
    assert taken("-ts 3,0,1 -mg 2").main_device == "CUDA2"
    assert taken("-ts 1,0,1").main_device == "CUDA0"
    assert taken("-sm row") == row
    assert taken("-sm layer -ts 1").split_mode == "layer"
    assert taken("-sm layer").split_mode == "layer"


@pytest.mark.parametrize("text", ["-mg 1", "-sm none -mg 1", "-mg 1 -dev CUDA2,CUDA1"])
def test_the_main_gpu_has_the_whole_model_in_split_mode_none(model: ModelFile, text: str) -> None:
    whole = single_device(12, "CUDA0").with_split_mode("none")
    assert take_line(text, whole, CONTEXT, model, RIG) == Typed(
        single_device(12, "CUDA1").with_split_mode("none"), CONTEXT
    )


def test_the_main_gpu_alone_moves_no_layer_in_split_mode_row(model: ModelFile) -> None:
    shares = (("CUDA0", 1.0), ("CUDA1", 1.0))
    layout = make_layout(12, [CPU_ID] * 4 + ["CUDA0"] * 8)
    row = replace(layout, split_mode="row", tensor_split=shares, main_device="CUDA0")
    assert take_line("-mg 1", row, CONTEXT, model, RIG).layout == replace(row, main_device="CUDA1")
    with pytest.raises(LayoutError, match="CUDA2 has no share of the layers"):
        take_line("-mg 2", row, CONTEXT, model, RIG)


def test_the_main_gpu_has_no_effect_in_split_mode_layer(model: ModelFile) -> None:
    layered = make_layout(12, ["CUDA0"] * 8 + ["CUDA1"] * 4)
    note = (
        "-mg chooses a device only in split modes none and row. Add -sm none to place the whole model on that device."
    )
    assert take_line("-mg 1", layered, CONTEXT, model, RIG) == Typed(layered, CONTEXT, (note,))
    assert take_line("-ngl 99 -ts 2,1 -mg 1", layered, CONTEXT, model, RIG).notes == (note,)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("-sm none -mg 3", "there is no device 3; -mg counts these devices from 0: CUDA0, CUDA1, CUDA2"),
        ("-sm row -mg -1", "there is no device -1; -mg counts these devices from 0: CUDA0, CUDA1, CUDA2"),
        ("-sm none -mg 1 -dev CUDA1", "there is no device 1; -mg counts these devices from 0: CUDA1"),
    ],
)
def test_a_main_gpu_that_does_not_exist_is_told(model: ModelFile, text: str, sentence: str) -> None:
    with pytest.raises(LayoutError, match=f"^{sentence}$"):
        take_line(text, ON_CPU, CONTEXT, model, RIG)


def test_workers_are_devices_for_a_line_too(model: ModelFile) -> None:
    worker = Device("attic", "attic", "RPC", "gpu", 8 * GIB, 8 * GIB, endpoint="127.0.0.1:50052")
    rig = Rig((worker, *RIG.devices[:1]), RIG.host)
    taken = take_line("-ngl 99 -ts 1,1", ON_CPU, CONTEXT, model, rig)
    assert counts(taken.layout) == {"attic": 7, "CUDA0": 5}
    assert taken.notes == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0,0,0", "the shares add up to 0"),
        ("-ts 0,0", "the shares add up to 0"),
        ("1,2,3,4", "there are 4 shares for 3 devices"),
        ("1..2,3", "is not a share"),
        (f"{'9' * 308},{'9' * 308}", "is not a share"),
        ("hello", "not a llama.cpp command"),
        ("-ot 'nonsense=CPU'", "matches no tensor"),
        ("-ot '.*=CPU'", "matches every tensor"),
    ],
)
def test_a_line_that_cannot_be_taken_gets_one_sentence(model: ModelFile, text: str, words: str) -> None:
    with pytest.raises(LayoutError) as caught:
        take_line(text, ON_CPU, CONTEXT, model, RIG)
    assert words in caught.value.summary()
