"""Environment variables that llama.cpp's programs read as options.

Names are those of `set_env` in llama.cpp's `common/arg.cpp`. The variables for memory mapping (`LLAMA_ARG_MMAP`,
`LLAMA_ARG_MLOCK`) exist only in older versions of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable

_PREFIX = "LLAMA_ARG_"
_NEGATIVE = "LLAMA_ARG_NO_"
_SAME_NAME = """
    THREADS CTX_SIZE FLASH_ATTN ROPE_SCALE ROPE_FREQ_BASE ROPE_FREQ_SCALE YARN_ORIG_CTX YARN_EXT_FACTOR
    YARN_ATTN_FACTOR YARN_BETA_SLOW YARN_BETA_FAST CACHE_TYPE_K CACHE_TYPE_V DEFRAG_THOLD MMPROJ IMAGE_MIN_TOKENS
    IMAGE_MAX_TOKENS RPC LOAD_MODE LAZY_MODE NUMA DEVICE OVERRIDE_TENSOR N_CPU_MOE N_CPU_FFN N_GPU_LAYERS SPLIT_MODE
    TENSOR_SPLIT MAIN_GPU FIT FIT_TARGET FIT_CTX MODEL MODEL_URL DOCKER_REPO HF_REPO SPEC_DRAFT_MODEL SPEC_DRAFT_N_MAX
    SPEC_DRAFT_N_MIN SPEC_DRAFT_P_MIN SPEC_DRAFT_P_SPLIT SPEC_DRAFT_N_CPU_MOE SPEC_TYPE DRAFT_MAX DRAFT_MIN
    N_GPU_LAYERS_DRAFT CTX_CHECKPOINTS CACHE_RAM N_PREDICT TOP_K TOP_P MIN_P REPEAT_PENALTY PRESENCE_PENALTY
    FREQUENCY_PENALTY TEMPERATURE POOLING ALIAS TAGS HOST PORT API_PREFIX API_KEY_FILE SSL_KEY_FILE SSL_CERT_FILE
    CHAT_TEMPLATE CHAT_TEMPLATE_FILE CHAT_TEMPLATE_KWARGS TIMEOUT THREADS_HTTP CACHE_REUSE MODELS_DIR MODELS_MAX
    REASONING LOG_FILE
"""
_OPTIONS = {
    **{_PREFIX + name: "--" + name.lower().replace("_", "-") for name in _SAME_NAME.split()},
    "LLAMA_ARG_BATCH": "--batch-size",
    "LLAMA_ARG_UBATCH": "--ubatch-size",
    "LLAMA_ARG_N_PARALLEL": "--parallel",
    "LLAMA_ARG_ROPE_SCALING_TYPE": "--rope-scaling",
    "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K": "--spec-draft-type-k",
    "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V": "--spec-draft-type-v",
    "LLAMA_ARG_STATIC_PATH": "--path",
    "LLAMA_ARG_THINK": "--reasoning-format",
    "LLAMA_ARG_THINK_BUDGET": "--reasoning-budget",
    "LLAMA_ARG_LOG_VERBOSITY": "--verbosity",
    "LLAMA_API_KEY": "--api-key",
    "MTMD_BACKEND_DEVICE": "--mmproj-device",
}
"""Option with a value, by the variable's name."""
_SWITCHES = {
    "LLAMA_ARG_KV_UNIFIED": ("--kv-unified", "--no-kv-unified"),
    "LLAMA_ARG_KV_OFFLOAD": ("--kv-offload", "--no-kv-offload"),
    "LLAMA_ARG_REPACK": ("--repack", "--no-repack"),
    "LLAMA_ARG_MMAP": ("--mmap", "--no-mmap"),
    "LLAMA_ARG_MMPROJ_AUTO": ("--mmproj-auto", "--no-mmproj"),
    "LLAMA_ARG_MMPROJ_OFFLOAD": ("--mmproj-offload", "--no-mmproj-offload"),
    "LLAMA_ARG_CONTEXT_SHIFT": ("--context-shift", "--no-context-shift"),
    "LLAMA_ARG_CONT_BATCHING": ("--cont-batching", "--no-cont-batching"),
    "LLAMA_ARG_CACHE_PROMPT": ("--cache-prompt", "--no-cache-prompt"),
    "LLAMA_ARG_PERF": ("--perf", "--no-perf"),
    "LLAMA_ARG_UI": ("--ui", "--no-ui"),
    "LLAMA_ARG_JINJA": ("--jinja", "--no-jinja"),
    "LLAMA_ARG_ENDPOINT_SLOTS": ("--slots", "--no-slots"),
}
"""Options for the values true and false, by the variable's name."""
_FLAGS = {
    "LLAMA_ARG_SWA_FULL": "--swa-full",
    "LLAMA_ARG_CPU_MOE": "--cpu-moe",
    "LLAMA_ARG_MLOCK": "--mlock",
    "LLAMA_ARG_EMBEDDINGS": "--embeddings",
    "LLAMA_ARG_RERANKING": "--reranking",
    "LLAMA_ARG_ENDPOINT_METRICS": "--metrics",
    "LLAMA_ARG_ENDPOINT_PROPS": "--props",
    "LLAMA_ARG_OFFLINE": "--offline",
}
"""Option for the value true, by the variable's name. Any other value leaves the option out."""
_LATE = {"LLAMA_ARG_MLOCK": 1, "LLAMA_ARG_CPU_MOE": 1, "LLAMA_ARG_N_CPU_MOE": 2, "LLAMA_ARG_N_CPU_FFN": 3}
"""Variables that are read after those of the same settings; of several patterns for tensors the first one counts."""
_TRUE = frozenset({"on", "enabled", "true", "1"})
_FALSE = frozenset({"off", "disabled", "false", "0"})


def by_name(variables: Iterable[str]) -> dict[str, str]:
    """Return the values of variables "NAME=VALUE" by name. If a name occurs several times, its last value counts.

    Names that affect the same setting are in the order in which llama.cpp reads them. So `LLAMA_ARG_NO_KV_OFFLOAD`
    comes after `LLAMA_ARG_KV_OFFLOAD`, and overrides it.
    """
    pairs = (variable.partition("=") for variable in variables)
    values = {name: value for name, _, value in pairs}
    return dict(sorted(values.items(), key=lambda pair: (pair[0].startswith(_NEGATIVE), _LATE.get(pair[0], 0))))


def option_of(name: str, value: str) -> str | None:
    """Return the option that the variable `name` with `value` sets; empty for no option, None for an unknown variable.

    Raises:
        ValueError: the variable sets a switch, and `value` is neither true nor false.
    """
    if (negated := _SWITCHES.get(name.replace(_NEGATIVE, _PREFIX, 1))) and name.startswith(_NEGATIVE):
        # With any value, as in `common_arg::get_value_from_env`.
        return negated[1]
    if pair := _SWITCHES.get(name):
        if value not in _TRUE | _FALSE:
            raise ValueError(value)
        return pair[value in _FALSE]
    if flag := _FLAGS.get(name):
        return flag if value in _TRUE else ""
    return _OPTIONS.get(name)
