"""The text of each export, and its notes about what it cannot express."""

from __future__ import annotations

import ast
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.base.errors import RuleViolationError
from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.model.gguf.reader import read_model
from engine.planning.exchange.exporting import TARGETS, export_plan
from engine.planning.exchange.importing import arrange, read_foreign
from engine.planning.layout.layout import Layout, Override, Run, make_layout
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.side_files import Adapter, Projector, SideFiles
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from tests.support.load_specs import worker_device
from tests.support.models import write_tiny_llama, write_tiny_moe


def card(device_id: str) -> Device:
    """Return a card with 24 GiB."""
    return Device(device_id, device_id, "CUDA", "gpu", 24 * GIB, 24 * GIB)


HOST = make_host("host", 64 * GIB, 60 * GIB)
RIG = Rig(
    (card("CUDA0"), card("CUDA1"), worker_device("attic", "10.0.0.7:50052"), worker_device("RPC9", "127.0.0.1:4001")),
    HOST,
)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> ModelMemory:
    """Return a model of eight layers in a folder with a space and a quotation mark."""
    folder = tmp_path_factory.mktemp("it's here")
    return ModelMemory(read_model(write_tiny_llama(folder / "tiny $HOME.gguf", n_embd=128)))


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> ModelMemory:
    """Return a model of four layers with experts."""
    return ModelMemory(read_model(write_tiny_moe(tmp_path_factory.mktemp("moe") / "moe.gguf")))


def plan_of(memory: ModelMemory, homes: str, output: str = "", rig: Rig = RIG, **changes: object) -> Plan:
    """Return a plan with a device for each letter: C the CPU, 0 and 1 the cards, a and 9 the workers."""
    named = {"C": CPU_ID, "0": "CUDA0", "1": "CUDA1", "a": "attic", "9": "RPC9"}
    layout = make_layout(len(homes), [named[letter] for letter in homes], named.get(output))
    overrides = changes.pop("overrides", ())
    side_files = changes.pop("side_files", SideFiles())
    assert isinstance(overrides, tuple)
    assert isinstance(side_files, SideFiles)
    return Plan(memory, rig, Edit(replace(layout, overrides=overrides), ContextSettings(**changes), side_files))  # type: ignore[arg-type]


def words(plan: Plan) -> list[str]:
    """Return the words of llama-server's command, as a shell reads them."""
    return shlex.split(export_plan(plan, "llama-server").text.replace("\\\n", " "))


def value(found: list[str], option: str) -> str:
    """Return the word after `option`, which is there once."""
    assert found.count(option) == 1
    return found[found.index(option) + 1]


def test_a_split_over_cards_and_workers(dense: ModelMemory) -> None:
    found = words(plan_of(dense, "CC00019a", "a"))
    assert found[:3] == ["llama-server", "-m", str(dense.model.paths[0])]
    # Numbers of RPC devices count in the order of --rpc, whatever they are called here.
    assert value(found, "--rpc") == "10.0.0.7:50052,127.0.0.1:4001"
    assert value(found, "-dev") == "CUDA0,CUDA1,RPC1,RPC0"
    assert (value(found, "-ngl"), value(found, "-sm"), value(found, "-ts")) == ("7", "layer", "3,1,1,2")
    assert value(found, "-fit") == "off"
    assert value(found, "-ot") == "^no tensor$=CPU"


def test_everything_on_the_cpu(dense: ModelMemory) -> None:
    found = words(plan_of(dense, "CCCCCCCC"))
    assert (value(found, "-dev"), value(found, "-ngl")) == ("none", "0")
    assert "-ts" not in found


def test_settings_become_options(dense: ModelMemory) -> None:
    chosen: dict[str, Any] = {
        "n_ctx": 4096, "n_batch": 256, "n_ubatch": 128, "n_seq_max": 3, "type_k": "q8_0", "type_v": "q4_0",
        "flash_attn": "on", "offload_kqv": False, "op_offload": False, "op_offload_min_batch": 64, "swa_full": True,
        "kv_unified": True, "load_mode": "mmap_mlock", "threads": 3, "threads_batch": 5, "numa": "isolate",
        "image_min_tokens": 16, "image_max_tokens": 256, "rope_freq_base": 500000.0, "rope_freq_scale": 0.125,
        "rope_scaling": "yarn", "yarn_orig_ctx": 32768,
    }  # fmt: skip
    found = words(plan_of(dense, "00000000", **chosen))
    assert found[0] == "GGML_OP_OFFLOAD_MIN_BATCH=64"
    said = {"-c": "4096", "-b": "256", "-ub": "128", "-np": "3", "-ctk": "q8_0", "-ctv": "q4_0", "-fa": "on",
            "-lm": "mmap+mlock", "-t": "3", "-tb": "5", "--numa": "isolate", "--image-min-tokens": "16",
            "--image-max-tokens": "256", "--rope-freq-base": "500000", "--rope-freq-scale": "0.125",
            "--rope-scaling": "yarn", "--yarn-orig-ctx": "32768"}  # fmt: skip
    assert {option: value(found, option) for option in said} == said
    assert {"-kvu", "--no-kv-offload", "--no-op-offload", "--swa-full"} <= set(found)


def test_a_cpu_run_between_cards_keeps_its_weights_there_and_is_told(dense: ModelMemory) -> None:
    exported = export_plan(plan_of(dense, "000CC111", "C"), "llama-server")
    found = shlex.split(exported.text.replace("\\\n", " "))
    assert (value(found, "-dev"), value(found, "-ts")) == ("CUDA0,CUDA1", "5,4")
    patterns = [found[index + 1] for index, word in enumerate(found) if word == "-ot"]
    assert patterns == [r"^blk\.(3|4)\.=CPU", r"^(output|output_norm|token_embd)\.=CPU"]
    assert exported.notes[0].startswith("Layers 3-4 on CPU cannot be exported")
    assert "KV cache and attention are on CUDA0" in exported.notes[0]
    assert exported.notes[1].startswith("The output layer on CPU cannot be exported")


def test_experts_are_an_option_only_where_it_is_the_same(sparse: ModelMemory) -> None:
    def said(*overrides: Override) -> list[str]:
        found = words(plan_of(sparse, "0011", overrides=overrides))
        return [each for each in found if each.endswith("cpu-moe") or each == "-ot"]

    assert said(Override(CPU_ID, "experts")) == ["--cpu-moe"]
    assert said(Override(CPU_ID, "experts", 0, 2)) == ["--n-cpu-moe"]
    assert said(Override(CPU_ID, "experts", 1, 2)) == ["-ot"]
    assert said(Override("CUDA1", "experts")) == ["-ot"]


@pytest.mark.parametrize("pattern", [r"blk\.1\.ffn_(up|down)", "ffn_(up){1,2}", "(ffn_up)+", "blk.1.attn_[=q]"])
def test_patterns_reach_the_engine_whole(dense: ModelMemory, pattern: str) -> None:
    """A comma or an equals sign would end the pattern; a repeated group could match without end."""
    plan = plan_of(dense, "00000000", overrides=(Override(CPU_ID, pattern=pattern),))
    said, _, buffer = value(words(plan), "-ot").rpartition("=")
    assert buffer == "CPU"
    assert not set(",=") & set(said)
    again = plan.with_edit(arranged(plan))
    assert again.parameters.overrides == plan.parameters.overrides


def arranged(plan: Plan) -> Edit:
    """Return the edit that llama-server's command for `plan` is imported as."""
    found = arrange(read_foreign(export_plan(plan, "llama-server").text), plan.model, plan.rig)
    return Edit(found.layout, found.context)


def test_side_files_and_their_scales(dense: ModelMemory) -> None:
    files = SideFiles(
        Projector(Path("/models/mm proj.gguf"), (), "CUDA1"),
        (Adapter(Path("/a,b.gguf"), ()), Adapter(Path("/c.gguf"), (), 0.5), Adapter(Path("/d:e.gguf"), (), 2.0)),
    )
    plan = plan_of(dense, "00000000", side_files=files)
    exported = export_plan(plan, "llama-server")
    found = shlex.split(exported.text.replace("\\\n", " "))
    assert (value(found, "--mmproj"), value(found, "--mmproj-device")) == ("/models/mm proj.gguf", "CUDA1")
    assert (value(found, "--lora"), value(found, "--lora-scaled")) == ('"/a,b.gguf"', "/c.gguf:0.5")
    assert any("d:e.gguf" in note for note in exported.notes)
    back = arrange(read_foreign(exported.text), plan.model, plan.rig)
    assert (back.projector, back.projector_device) == ("/models/mm proj.gguf", "CUDA1")
    assert back.adapters == (("/a,b.gguf", 1.0), ("/c.gguf", 0.5))


def test_workers_are_told_about(dense: ModelMemory) -> None:
    paired = Rig((replace(worker_device("attic", "10.0.0.7:50052"), fingerprint="0" * 64),), HOST)
    assert "encrypted tunnel" in export_plan(plan_of(dense, "aaaaaaaa", rig=paired), "python").notes[0]
    assert "one program at a time" in export_plan(plan_of(dense, "99999999"), "llama-server").notes[0]
    assert not export_plan(plan_of(dense, "00000000"), "llama-server").notes


def test_lent_devices_are_exported_as_plain_servers(dense: ModelMemory) -> None:
    """Another program cannot name a device behind a port, so each gets a port of its own."""
    names = ("CUDA0", "CUDA1")
    lent = Rig(
        tuple(replace(worker_device(name, f"10.0.0.7:50052/{name}"), fingerprint="0" * 64) for name in names), HOST
    )
    exported = export_plan(plan_of(dense, "00001111", rig=lent), "llama-server")
    found = shlex.split(exported.text.replace("\\\n", " "))
    assert value(found, "--rpc") == "10.0.0.7:50053,10.0.0.7:50054"
    serve = "`layerdeck-cli rig serve --host 10.0.0.7 --port"
    assert exported.notes[-1].endswith(f"{serve} 50053 --device CUDA0`, {serve} 50054 --device CUDA1`.")


def test_the_entry_of_llama_swap_is_yaml_with_the_same_command(dense: ModelMemory) -> None:
    plan = plan_of(dense, "00001111", op_offload_min_batch=99)
    models = yaml.safe_load(export_plan(plan, "llama-swap").text)["models"]
    assert list(models) == ["tiny $HOME"]
    entry = models["tiny $HOME"]
    assert entry["env"] == ["GGML_OP_OFFLOAD_MIN_BATCH=99"]
    said = shlex.split(entry["cmd"].replace("\\\n", " "))
    assert said[:3] == ["llama-server", "--port", "${PORT}"]
    assert said[3:] == words(plan)[2:]


def test_a_modelfile_has_what_ollama_can_say(dense: ModelMemory) -> None:
    plan = plan_of(dense, "CC00019a", n_ctx=4096, n_seq_max=2, type_k="q8_0", type_v="q8_0", swa_full=True)
    exported = export_plan(plan, "ollama")
    lines = exported.text.splitlines()
    assert lines[0] == f'FROM "{dense.model.paths[0]}"'
    assert {"PARAMETER num_ctx 2048", "PARAMETER num_gpu 7", "PARAMETER num_batch 512"} <= set(lines)
    said = " ".join(exported.notes)
    assert "OLLAMA_NUM_PARALLEL=2" in said
    assert "OLLAMA_KV_CACHE_TYPE=q8_0" in said
    assert "RPC workers" in said
    assert "--swa-full" in said
    back = arrange(read_foreign(exported.text), plan.model, RIG)
    assert (back.layout.runs[0], back.context.n_ctx) == (Run(CPU_ID, 0, 1), 2048)


def test_lm_studio_has_a_ratio(dense: ModelMemory) -> None:
    exported = export_plan(plan_of(dense, "CC000111", type_k="bf16"), "lmstudio")
    config = json.loads(exported.text)
    assert config["gpu"] == {"ratio": 0.7778}
    assert "llamaKCacheQuantizationType" not in config
    assert any("7 of 9" in note for note in exported.notes)
    assert any("which layers go to which device" in note for note in exported.notes)


def test_the_python_script_can_say_everything(dense: ModelMemory) -> None:
    exported = export_plan(plan_of(dense, "00CC9a11", "C", n_seq_max=2, image_max_tokens=64), "python")
    values = {
        statement.targets[0].id: ast.literal_eval(statement.value)
        for statement in ast.parse(exported.text).body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and statement.targets[0].id in ("DEVICES", "SPLIT", "MODEL", "CONTEXT_PARAMS", "PROJECTOR_PARAMS")
    }
    assert values["DEVICES"] == ["CUDA0", "CPU", ("127.0.0.1:4001", 0), ("10.0.0.7:50052", 0), "CUDA1", "CPU"]
    assert values["SPLIT"] == [2.0, 2.0, 1.0, 1.0, 2.0, 1.0]
    assert values["MODEL"] == str(dense.model.paths[0])
    assert values["CONTEXT_PARAMS"]["n_seq_max"] == 2
    assert values["PROJECTOR_PARAMS"] == {"image_max_tokens": 64}


@pytest.mark.parametrize("target", TARGETS)
def test_a_plan_that_breaks_a_rule_is_not_exported(dense: ModelMemory, target: str) -> None:
    plan = Plan(dense, RIG, Edit(Layout(3, (Run("CUDA0", 0, 2),), "CUDA0"), ContextSettings()))
    with pytest.raises(RuleViolationError):
        export_plan(plan, target)  # type: ignore[arg-type]
