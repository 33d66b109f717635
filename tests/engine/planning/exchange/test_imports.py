"""Imported commands and files of other programs, in many spellings, and invalid texts."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.base.errors import LayoutError
from engine.base.units import GIB
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.exchange.command_words import MAX_WORDS
from engine.planning.exchange.importing import MAX_TEXT, Imported, arrange, model_names, read_foreign
from engine.planning.exchange.llama_swap import MAX_ALIASES, MAX_DEPTH, MAX_NODES
from engine.planning.exchange.server_variables import _FLAGS, _OPTIONS, _SWITCHES
from engine.planning.layout.layout import Override
from engine.planning.settings.context_settings import AUTO_CONTEXT
from tests.support.load_specs import N_LAYERS, made_up_model, worker_device
from tests.support.models import write_tiny_moe

RIG = Rig(
    (
        Device("CUDA0", "CUDA0", "CUDA", "gpu", 24 * GIB, 18 * GIB),
        Device("CUDA1", "CUDA1", "CUDA", "gpu", 8 * GIB, 6 * GIB),
        Device("Vulkan2", "Vulkan2", "Vulkan", "igpu", 8 * GIB, 6 * GIB),
        worker_device("attic", "10.0.0.7:50052"),
    ),
    make_host("host", 64 * GIB, 60 * GIB),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    """Return a model of seven layers with experts: eight positions."""
    return read_model(write_tiny_moe(tmp_path_factory.mktemp("models") / "moe.gguf", n_layers=7))


def imported(text: str, model: ModelFile, name: str | None = None) -> Imported:
    """Return the layout of a text."""
    return arrange(read_foreign(text, name=name), model, RIG)


def homes(found: Imported) -> str:
    """Return a letter for each layer and the output layer: C the CPU, 0 and 1 the cards, a the worker, else ?."""
    letters = {CPU_ID: "C", "CUDA0": "0", "CUDA1": "1", "attic": "a", "Vulkan2": "v"}
    return "".join(letters.get(each, "?") for each in (*found.layout.assignment(), found.layout.output_device))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("-ngl 99", "00000011"),  # By free memory, 18 to 6 GiB.
        ("-ngl 4 -ts 1,1", "CCCC0011"),
        ("-ngl all -ts 0,1", "11111111"),
        ("-ngl 99 -sm none", "00000000"),
        ("-ngl 99 -sm none -mg 1", "11111111"),
        ("-ngl 3 -sm none -mg 1", "CCCCC111"),
        ("-ngl 0", "CCCCCCCC"),
        ("-ngl 99 -dev none", "CCCCCCCC"),
        ("-ngl 99 -dev Vulkan2", "vvvvvvvv"),
        ("-ngl 99 --rpc 10.0.0.7:50052 -ts 1,1,2", "aa001111"),
        ("-ngl 99 --rpc 10.0.0.7:50052 -dev CUDA1,RPC0 -ts 3,1", "111111aa"),
        ("-ngl 99 -dev CUDA0,CUDA1,CUDA0 -ts 2,4,2", "00111100"),
        ("--n-gpu-layers 99 --tensor-split 3/1", "00000011"),
        ("-ngl 99 -dev CUDA7", "????????"),
    ],
)
def test_layers_are_where_llama_server_puts_them(options: str, expected: str, model: ModelFile) -> None:
    assert homes(imported(f"llama-server -m x.gguf {options}", model)) == expected


def test_servers_are_matched_by_endpoint_and_never_by_name(model: ModelFile) -> None:
    rig = Rig((*RIG.devices, worker_device("RPC0", "10.0.0.5:50052")), RIG.host)

    def placed(options: str) -> tuple[list[tuple[str, int]], str]:
        found = arrange(read_foreign(f"llama-server -m x -c 512 -np 1 -ngl 99 {options}"), model, rig)
        return [(run.device, run.length) for run in found.layout.runs], " ".join(found.notes)

    gone = "10.0.0.9-50052"
    runs, notes = placed("--rpc 10.0.0.9:50052 -dev RPC0,CUDA0 -ts 1,1")
    assert runs == [(f"{gone}-0", 4), ("CUDA0", 3)]
    assert f"does not have: {gone}-0." in notes
    assert "No device of Layerdeck has the address 10.0.0.9:50052." in notes
    # A server that the rig lacks keeps its place in the list.
    assert placed("--rpc 10.0.0.9:50052,10.0.0.5:50052 -ts 2,2,4")[0] == [(f"{gone}-0", 2), ("RPC0", 2), ("CUDA0", 3)]
    assert placed("--rpc 10.0.0.5:50052,10.0.0.9:50052 -dev RPC1,RPC2 -ts 1,1")[0] == [
        (f"{gone}-0", 4),
        (f"{gone}-1", 3),
    ]
    # Without shares its memory, which is unknown, counts as the mean of the others.
    assert (f"{gone}-0", 3) in placed("--rpc 10.0.0.9:50052")[0]
    assert placed("--rpc 10.0.0.5:50052 -dev RPC0") == ([("RPC0", 7)], "")
    long = "a-very-long-name-" * 4
    assert [count for _, count in placed(f"--rpc {long}:50052,{long}:50053 -dev RPC0,RPC1 -ts 1,3")[0]] == [2, 5]


def test_split_modes_with_shares(model: ModelFile) -> None:
    found = imported("llama-server -m x -ngl 5 -sm row -ts 3,1 -mg 1", model).layout
    assert (found.split_mode, found.tensor_split, found.main_device) == (
        "row",
        (("CUDA0", 3.0), ("CUDA1", 1.0)),
        "CUDA1",
    )
    assert [(run.device, run.length) for run in found.runs] == [(CPU_ID, 3), ("CUDA0", 4)]
    assert imported("llama-server -m x -sm tensor -ngl 99", model).layout.tensor_split == (
        ("CUDA0", 1.0),
        ("CUDA1", 1.0),
    )


@pytest.mark.parametrize(
    ("options", "override"),
    [
        ("--n-cpu-moe 3", Override(CPU_ID, "experts", 0, 2)),
        ("-ncmoe 99", Override(CPU_ID, "experts", 0, 6)),
        ("-cmoe", Override(CPU_ID, "experts")),
        (r'-ot "blk\.[0-3]\.ffn_.*_exps=CPU"', Override(CPU_ID, pattern=r"blk\.[0-3]\.ffn_.*_exps")),
        (r"-ot 'attn=RPC0[10.0.0.7:50052]'", Override("attic", pattern="attn")),
        ("-ncffn 2", Override(CPU_ID, pattern=r"^blk\.(0|1)\.ffn_(up|down|gate)\.")),
    ],
)
def test_overrides(options: str, override: Override, model: ModelFile) -> None:
    assert imported(f"llama-server -m x -ngl 99 {options}", model).layout.overrides == (override,)


def test_several_overrides_in_one_word(model: ModelFile) -> None:
    found = imported("llama-server -m x -ngl 99 -ot a=CPU,b=CUDA1", model).layout.overrides
    assert found == (Override(CPU_ID, pattern="a"), Override("CUDA1", pattern="b"))


def test_settings_of_old_and_new_versions(model: ModelFile) -> None:
    found = imported(
        "GGML_OP_OFFLOAD_MIN_BATCH=64 /opt/llama.cpp/llama-server.exe --model x -c 4096 -b 256 -ub 128 -np 2 -fa "
        "-ctk q8_0 -ctv q4_0 -nkvo --no-op-offload --swa-full -kvu --no-mmap --mlock -t 3 -tb 0 "
        "--rope-freq-base 1e6 --rope-scale 8 --rope-scaling yarn --yarn-orig-ctx 32768",
        model,
    ).context
    said = (found.n_ctx, found.n_batch, found.n_ubatch, found.n_seq_max, found.type_k, found.type_v, found.flash_attn)
    assert said == (4096, 256, 128, 2, "q8_0", "q4_0", "on")
    assert (found.offload_kqv, found.op_offload, found.swa_full, found.kv_unified) == (False, False, True, True)
    assert (found.load_mode, found.threads, found.threads_batch, found.op_offload_min_batch) == ("mlock", 3, None, 64)
    assert (found.rope_freq_base, found.rope_freq_scale) == (1e6, 0.125)
    assert (found.rope_scaling, found.yarn_orig_ctx) == ("yarn", 32768)


def test_defaults_are_those_of_the_program(model: ModelFile) -> None:
    server = imported("llama-server -m x -ngl 0", model)
    assert (server.context.n_ctx, server.context.n_seq_max, server.context.kv_unified) == (AUTO_CONTEXT, 4, True)
    assert any("4 requests" in note for note in server.notes)
    assert imported("llama-cli -m x -ngl 0", model).context.n_seq_max == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--frobnicate 3", "Not imported, because Layerdeck does not know these options: --frobnicate."),
        ("--port 80 --api-key secret", "these options are not part of a layout: --port, --api-key."),
        ("--yarn-beta-fast 16", "Not imported: --yarn-beta-fast 16. Layerdeck uses the YaRN values of the model"),
        ("--draft-min 2 -otd a=CPU", "this part of speculative decoding: --draft-min 2, -otd a=CPU."),
        ("--spec-type draft-eagle3", "this part of speculative decoding: --spec-type draft-eagle3."),
        ("--draft-max x", 'cannot read --draft-max "x"'),
        ("-md gone.gguf -ngld 0", "gone.gguf cannot be read, so the device of the draft model is chosen automatically"),
        ("-hf owner/name:Q4_0", "download the model first with layerdeck-cli download"),
        ("-ts 1,x", 'cannot read -ts "1,x"'),
        ("-ts 1e-50,1e-50", 'cannot read -ts "1e-50,1e-50"'),
        ("-ts 1e39,1", 'cannot read -ts "1e39,1"'),
        ("-c", "-c has no value"),
        ("-c -5", 'cannot read -c "-5"'),
        ("-ctk q3_k", 'cannot read -ctk "q3_k"'),
        ("-ot (=CPU", "was not imported: the pattern"),
        ("-ot a=Nobody[1]", "no device here has the buffer type"),
        ("-dev CUDA0,CPU", '"CPU" cannot hold layers'),
        ("-dev CUDA0,CUDA5", "The layout uses devices that this computer does not have: CUDA5"),
        ("&& rm -rf /", "Only the first command was read"),
        ("LLAMA_ARG_FIT=1", "the context length"),
    ],
)
def test_what_is_left_out_is_told_and_the_rest_is_taken(options: str, words: str, model: ModelFile) -> None:
    found = imported(f"llama-server -m x -b 99 -ngl 99 -sm none {options}", model)
    assert found.context.n_batch == 99
    assert words.lower() in "\n".join(found.notes).lower()
    assert "secret" not in "\n".join(found.notes)


def test_lines_comments_and_containers(model: ModelFile) -> None:
    text = "# my model\ndocker run -v /m:/m image llama-server \\\n  -m '/m/it is.gguf' \\\n"
    text += "  # faster\n  -ngl 99 -dev CUDA1\n"
    load = read_foreign(text)
    assert (load.model, homes(imported(text, model))) == ("/m/it is.gguf", "11111111")


@pytest.mark.parametrize(
    ("text", "program", "path"),
    [
        ("docker run -p 80:80 image:server-cuda -m x.gguf -ngl 5 -a llama-3-8b -b 99", "llama-server", "x.gguf"),
        ("docker run image -m x.gguf -ngl 5 -b 99 --alias llama", "llama-server", "x.gguf"),
        ("cd /opt/llama && ./llama-server -m x.gguf -ngl 5 -b 99", "llama-server", "x.gguf"),
        ("cd /opt/llama\n./llama-cli -m x.gguf -ngl 5 -b 99", "llama-cli", "x.gguf"),
        ("mkdir -p /a && llama-cli -m x.gguf -ngl 5 -b 99", "llama-cli", "x.gguf"),
        ("docker pull image && docker run image -m x.gguf -ngl 5 -b 99", "llama-server", "x.gguf"),
        (r"C:\llama\llama-cli.exe -m C:\m\x.gguf -ngl 5 -b 99", "llama-cli", r"C:\m\x.gguf"),
        (r"llama-server -m a\ b.gguf -ngl 5 -b 99", "llama-server", "a b.gguf"),
        (r"llama-server --model=C:\m\x.gguf -ngl 5 -b 99", "llama-server", r"C:\m\x.gguf"),
        (r".\llama-server.exe -m m\x.gguf -ngl 5 -b 99", "llama-server", r"m\x.gguf"),
        (r'llama-cli -m "C:\m\x.gguf" -p "a 5\" disk" -ngl 5 -b 99', "llama-cli", r"C:\m\x.gguf"),
        (r'llama-cli -m C:\x.gguf -sys "say \"-ngl 1 -b 2\"" -ngl 5 -b 99', "llama-cli", r"C:\x.gguf"),
        ("llama-cli /data/llama -m x.gguf -ngl 5 -b 99", "llama-cli", "x.gguf"),
    ],
)
def test_the_program_is_found_among_folders_aliases_and_commands(text: str, program: str, path: str) -> None:
    load = read_foreign(text)
    assert (load.program, load.model, load.n_gpu_layers, load.context.n_batch) == (program, path, 5, 99)


def test_the_value_of_a_key_or_prompt_may_begin_with_a_dash(model: ModelFile) -> None:
    found = imported("llama-server -m x --api-key -Zsecret -sys '- be kind' -b 99 --color -ngl 0", model)
    notes = " ".join(found.notes)
    assert found.context.n_batch == 99
    assert "these options are not part of a layout: --api-key, -sys, --color." in notes
    assert "secret" not in notes
    assert "kind" not in notes


CONFIG = """
healthCheckTimeout: 100
macros:
  base: /opt/llama-server --port ${PORT}
  more: "${base} -b 99"
models:
  one:
    cmd: |
      # a comment
      ${more}
      -m /models/${MODEL_ID}.gguf -ngl 99
    env: ["GGML_OP_OFFLOAD_MIN_BATCH=7"]
  two: {cmd: "llama-server -m two.gguf -ngl 0"}
"""


def test_a_configuration_of_llama_swap(model: ModelFile) -> None:
    assert model_names(CONFIG) == ("one", "two")
    load = read_foreign(CONFIG, name="one")
    assert (load.model, load.context.n_batch, load.context.op_offload_min_batch) == ("/models/one.gguf", 99, 7)
    assert homes(imported(CONFIG, model, "two")) == "CCCCCCCC"
    assert read_foreign("cmd: llama-server -m a.gguf -ngl 1").model == "a.gguf"
    assert read_foreign("one:\n  cmd: llama-server -m a.gguf -ngl 1\n", "llama-swap").model == "a.gguf"
    assert model_names("llama-server -m x") == ()


@pytest.mark.parametrize(
    "text",
    [
        "LLAMA_ARG_N_GPU_LAYERS=4 LLAMA_ARG_TENSOR_SPLIT=1,1 LLAMA_ARG_CTX_SIZE=4096 llama-server -m x",
        "export LLAMA_ARG_CTX_SIZE=4096\nLLAMA_ARG_N_GPU_LAYERS=9 llama-server -m x -ngl 4 -ts 1,1",
        "docker run -p 80:80 -e LLAMA_ARG_N_GPU_LAYERS=4 --env LLAMA_ARG_TENSOR_SPLIT=1,1 "
        "--env=LLAMA_ARG_CTX_SIZE=4096 -e LLAMA_ARG_MODEL=/m/llama image:server -v",
        "docker run -e LLAMA_ARG_N_GPU_LAYERS=4 -e LLAMA_ARG_CTX_SIZE=4096 image llama-server -m x -ts 1,1",
        "LLAMA_ARG_N_GPU_LAYERS=4 llama-server -c 4096 -ts 1,1 & LLAMA_ARG_CTX_SIZE=9 llama-server -m x",
        "LLAMA_ARG_N_GPU_LAYERS=4 LLAMA_ARG_TENSOR_SPLIT=1,1 LLAMA_ARG_CTX_SIZE=4096",
        "docker run -e=LLAMA_ARG_N_GPU_LAYERS=4 -eLLAMA_ARG_TENSOR_SPLIT=1,1 -e LLAMA_ARG_CTX_SIZE=4096 image:server",
        "export LLAMA_ARG_N_GPU_LAYERS=4; export LLAMA_ARG_CTX_SIZE=4096; llama-server -m x -ts 1,1",
        "$env:LLAMA_ARG_N_GPU_LAYERS = '4'; $Env:LLAMA_ARG_CTX_SIZE=4096\n.\\llama-server.exe -m x -ts 1,1",
        "set LLAMA_ARG_N_GPU_LAYERS=4\nset LLAMA_ARG_CTX_SIZE=4096\nllama-server.exe -m x -ts 1,1",
        "taskset -c 0-7 env LLAMA_ARG_N_GPU_LAYERS=4 LLAMA_ARG_CTX_SIZE=4096 llama-server -m x -ts 1,1",
        "models:\n  x:\n    macros: {n: 4}\n    cmd: llama-server -c 4096\n"
        "    env: ['LLAMA_ARG_N_GPU_LAYERS=${n}', 'LLAMA_ARG_TENSOR_SPLIT=1,1', 'LLAMA_ARG_CTX_SIZE=9']\n",
    ],
)
def test_variables_are_read_as_options_and_an_option_wins(text: str, model: ModelFile) -> None:
    found = imported(text, model)
    assert (homes(found), found.context.n_ctx) == ("CCCC0011", 4096)
    assert "LLAMA_ARG" not in " ".join(found.notes)
    assert "-e," not in " ".join(found.notes)


@pytest.mark.parametrize(
    ("variables", "key", "value"),
    [
        ("LLAMA_ARG_BATCH=99", "n_batch", 99),
        ("LLAMA_ARG_N_PARALLEL=3", "n_seq_max", 3),
        ("LLAMA_ARG_FLASH_ATTN=off", "flash_attn", "off"),
        ("LLAMA_ARG_KV_OFFLOAD=false", "offload_kqv", False),
        # Any value of the negative, which wins, as in `common_arg::get_value_from_env`.
        ("LLAMA_ARG_NO_KV_OFFLOAD=0 LLAMA_ARG_KV_OFFLOAD=1", "offload_kqv", False),
        ("LLAMA_ARG_SWA_FULL=1", "swa_full", True),
        ("LLAMA_ARG_SWA_FULL=0", "swa_full", False),
        ("LLAMA_ARG_LOAD_MODE=none", "load_mode", "none"),
        ("LLAMA_ARG_ROPE_SCALING_TYPE=linear", "rope_scaling", "linear"),
        ("LLAMA_ARG_BATCH=1 LLAMA_ARG_BATCH=2", "n_batch", 2),
        ("LLAMA_ARG_MLOCK=1 LLAMA_ARG_MMAP=1", "load_mode", "mmap_mlock"),
    ],
)
def test_a_variable_sets_its_option(variables: str, key: str, value: object) -> None:
    assert getattr(read_foreign(f"{variables} llama-server -m x").context, key) == value


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("LLAMA_ARG_CTX_SIZE=much", 'cannot read LLAMA_ARG_CTX_SIZE "much"'),
        ("LLAMA_ARG_KV_UNIFIED=perhaps", 'cannot read LLAMA_ARG_KV_UNIFIED "perhaps"'),
        # No variable of llama.cpp, although there is an option.
        ("LLAMA_ARG_LORA=a.gguf", "does not know these options: LLAMA_ARG_LORA"),
        ("LLAMA_API_KEY=secret", "not part of a layout: --api-key"),
        ("LLAMA_ARG_HF_REPO=a/b", "LLAMA_ARG_HF_REPO a/b names a model to download"),
    ],
)
def test_variables_that_are_left_out_are_told(variable: str, words: str) -> None:
    notes = " ".join(read_foreign(f"{variable} llama-server -m x").notes)
    assert words in notes
    assert "secret" not in notes


def test_variables_and_their_options_are_known() -> None:
    names = [*_OPTIONS, *_FLAGS, *_SWITCHES, *(name.replace("ARG_", "ARG_NO_") for name in _SWITCHES)]
    for name in names:
        notes = " ".join(read_foreign(f"{name}=1 llama-server -m x").notes)
        assert "does not know" not in notes, name


def test_a_modelfile(model: ModelFile) -> None:
    text = (
        '# mine\nFROM "/m/a b.gguf"\nFROM mm.gguf\nADAPTER lora.gguf\nPARAMETER num_gpu 3\nparameter num_ctx 4096\n'
        "PARAMETER num_batch 64\nPARAMETER num_thread 2\nPARAMETER use_mmap false\nPARAMETER temperature 0.3\n"
        'SYSTEM """Be\nPARAMETER num_ctx 1\nshort"""\nTEMPLATE x\nWHATEVER y\n'
    )
    load = read_foreign(text)
    found = arrange(load, model, RIG)
    assert (load.model, load.projector, load.adapters) == ("/m/a b.gguf", "mm.gguf", (("lora.gguf", 1.0),))
    said = (
        found.context.n_ctx,
        found.context.n_batch,
        found.context.n_ubatch,
        found.context.threads,
        found.context.load_mode,
    )
    assert said == (4096, 64, 64, 2, "none")
    assert homes(found) == "CCCCC000"
    assert any("temperature" in note for note in found.notes)
    assert any("WHATEVER" in note for note in found.notes)


def test_a_modelfile_may_have_tabs() -> None:
    load = read_foreign("FROM\t./x.gguf\nPARAMETER\tnum_gpu\t5\nPARAMETER num_ctx \t4096\n")
    assert (load.model, load.n_gpu_layers, load.context.n_ctx) == ("./x.gguf", 5, 4096)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no text"),
        ("x" * (MAX_TEXT + 1), "characters"),
        ("hello world", "not a llama.cpp command"),
        ("llama-server 'open", "not closed"),
        ("llama-server -m x " + "-t 1 " * MAX_WORDS, "words"),
        ("FROM\nFROM", "is left"),
        ("models: [", "not YAML"),
        ("models: 2001-99-99", "not YAML"),
        ("models: {a: {cmd: 3}}", 'has the key "cmd"'),
        ("models:\n- x", 'has the key "cmd"'),
        ("models: " + "[" * (MAX_DEPTH + 1), "deeply nested"),
        ("models: [" + "1," * MAX_NODES + "1]", "too large"),
        ("models: &a [1]\nb: [" + "*a," * (MAX_ALIASES + 1) + "]", "aliases"),
        ("models: !!python/object/apply:os.system ['true']", "not YAML"),
        ("macros: {a: '${b}${b}${b}${b}'" + ", b: '" + "x" * 60000 + "'}\nmodels: {m: {cmd: '${a}'}}", "too long"),
        (CONFIG, "several models; name one of one, two"),
        ("models: {m: {cmd: ''}}", "not a llama.cpp command"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_sentence(text: str, words: str, model: ModelFile) -> None:
    if words == "is left":
        # Two empty names: a model without a file, which the command line asks for.
        assert read_foreign(text).model == ""
        return
    with pytest.raises(LayoutError, match=words):
        read_foreign(text)


def test_a_short_text_that_stands_for_a_huge_command_is_refused_before_it_is_made() -> None:
    text = "macros: {a: '" + "x" * 10_000 + "'}\nmodels: {m: {cmd: '" + "${a}" * 10_000 + "'}}"
    tracemalloc.start()
    try:
        with pytest.raises(LayoutError, match="too long"):
            read_foreign(text)
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(LayoutError, match='no model "three"; its models are one, two'):
        read_foreign(CONFIG, name="three")


@given(st.lists(st.sampled_from([
    "-ngl", "99", "-ts", "1,1", "-ot", "a=CPU", "x", "-dev", "CUDA0", "--rpc", "h:1", "-sm", "row", "none", "-mg", "-7",
    "-c", "0", "''", "=", ",", "--lora-scaled", "a:b", "--n-cpu-moe", "-1", "1e999", "nan", "\\\n", "#", "-",
]), max_size=12))  # fmt: skip
def test_any_words_give_a_layout_or_a_sentence(words: list[str]) -> None:
    try:
        load = read_foreign("llama-server " + " ".join(words))
    except LayoutError:
        return
    found = arrange(load, made_up_model(), RIG)
    assert found.layout.n_layers == N_LAYERS


@given(st.text(max_size=200), st.sampled_from(["", "FROM x\n", "models:\n  a:\n    cmd: ", "llama-server -m x "]))
def test_any_text_gives_a_load_or_a_sentence(text: str, head: str) -> None:
    with suppress(LayoutError):
        read_foreign(head + text)
