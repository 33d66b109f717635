"""Random hyper-parameters of any architecture: an estimate, or "only by a probe", never an exception."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.model.architectures.registry import ARCHITECTURES
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.layout import Layout, Run
from engine.planning.memory.hyper_parameters import MissingNumberError, read_hyper_parameters
from engine.planning.memory.kv_cache import layer_states
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings
from tests.support.selection import examples
from tests.support.truth import truth_model

RIG = Rig((Device("D0", "", "CUDA", "gpu", 1 << 35), Device("D1", "", "CUDA", "gpu", 1 << 35)), make_host("", 1 << 36))
KEYS = (
    "attention.compress_ratios",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.indexer.key_length",
    "attention.indexer.types",
    "attention.key_length",
    "attention.key_length_mla",
    "attention.key_length_swa",
    "attention.recurrent_layers",
    "attention.shared_kv_layers",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.value_length",
    "attention.value_length_mla",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "full_attention_interval",
    "kda.head_dim",
    "nextn_predict_layers",
    "num_loops",
    "ple.layers",
    "shortconv.l_cache",
    "ssm.conv_kernel",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
    "token_shift_count",
    "wkv.head_size",
)

values = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 2, 3, 64, 1 << 31, 1 << 63]),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.sampled_from([-1, 0, 1, 4, 64]), max_size=4).map(tuple),
    st.lists(st.booleans(), max_size=4).map(tuple),
)
MODELS = ("llama-dense", "deepseek4-moe", "qwen4exp-moe", "glm5-next-moe", "dots3note-moe", "nemotron_h-dense")


def _with(model: ModelFile, architecture: str, changes: dict[str, Any]) -> ModelFile:
    metadata = {f"{architecture}.{key.split('.', 1)[1]}": value for key, value in model.metadata.items() if "." in key}
    metadata |= {f"{architecture}.{key}": value for key, value in changes.items()}
    return replace(model, architecture=architecture, metadata=metadata)


@settings(max_examples=examples(300))
@given(
    name=st.sampled_from(MODELS),
    architecture=st.sampled_from(sorted(ARCHITECTURES)),
    changes=st.dictionaries(st.sampled_from(KEYS), values, max_size=5),
    flash=st.sampled_from(["on", "off"]),
)
def test_state_is_read_or_left_to_the_probe(name: str, architecture: str, changes: dict[str, Any], flash: Any) -> None:
    model = _with(truth_model(name), architecture, changes)
    record = ARCHITECTURES[architecture]
    try:
        hyper = read_hyper_parameters(model, record)
    except MissingNumberError:
        return
    states = layer_states(hyper, record, ContextSettings(flash_attn=flash))
    assert len(states) == model.n_layers
    assert all(
        tensor.width >= 0 and tensor.n_rows > 0 for state in states for tensor in (*state.cache, *state.recurrent)
    )


@settings(max_examples=examples(60), deadline=None)
@given(
    name=st.sampled_from(MODELS),
    changes=st.dictionaries(st.sampled_from(KEYS), values, max_size=3),
    shares=st.tuples(st.floats(0.001, 1000), st.floats(0.001, 1000)),
)
def test_any_tensor_split_is_cut_or_left_to_the_probe(
    name: str, changes: dict[str, Any], shares: tuple[float, float]
) -> None:
    model = truth_model(name)
    split = (("D0", shares[0]), ("D1", shares[1]))
    layout = Layout(model.n_layers, (Run("D0", 0, model.n_layers - 1),), "D0", "tensor", split)
    found = ModelMemory(_with(model, model.architecture, changes)).estimate(
        layout, ContextSettings(), RIG, with_compute=False
    )
    for memory in found.devices.values():
        assert min(memory.weights_bytes, memory.mapped_bytes, memory.kv_cache_bytes, memory.recurrent_bytes) >= 0
    assert "weights" in found.unknown or found.devices["D0"].weights_bytes + found.devices["D1"].weights_bytes > 0
    assert set(found.devices) == {"D0", "D1", CPU_ID}
