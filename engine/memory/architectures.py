"""What llama.cpp decides by architecture in code: one short record each, nothing that the file's header says itself.

A record tells where state departs from "every layer keeps keys and values of the whole context". Sources are
`load_arch_hparams` of each file in llama.cpp's src/models, and `llama_model::create_memory`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Window:
    """Sliding-window attention.

    `period`: every how many layers one attends to everything (the last of them, or the first with `full_first`);
    0 where the file has to list the sliding layers. A list or period in the file wins.
    `n_tokens`: the window where the file names none; with `fixed` whatever it names.
    `optional`: without a window in the file there is none. `none_if_zero`: a window of 0 means none.
    `only_with_layers`: layer count of the one size that has a window.
    """

    period: int = 0
    full_first: bool = False
    n_tokens: int | None = None
    fixed: bool = False
    optional: bool = False
    none_if_zero: bool = False
    only_with_layers: int | None = None


COMPRESSED_RATIOS = (4, 128)
"""What DeepSeek 4 compresses by: layers of the first ratio have an indexer."""

RecurrentLayers = Literal["all", "no_kv_heads", "no_kv_heads_no_ffn", "interval"]
"""Which layers are recurrent: all, those without key heads (and feed-forward), all but every n-th."""

RecurrentState = Literal["mamba", "mamba_groups", "rwkv", "short_convolution", "kda", "lightning"]
"""Whose formula sizes the state (`llama_hparams::n_embd_r` and `n_embd_s`)."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """State that does not grow with the context. `beside_attention`: its layers keep keys and values as well;
    `interval`: every how many layers one is attention, where the file does not tell."""

    layers: RecurrentLayers
    state: RecurrentState
    beside_attention: bool = False
    interval: int = 4


@dataclass(frozen=True, slots=True)
class Indexer:
    """A second cache with one key head, for the layers that choose what others attend to.

    `layers`: "all", those that the file's list marks, or all after the leading dense ones; `default`: what layers are
    without a list; `with_values`: it holds values too; `optional`: only where the file names how many tokens to keep;
    `pooled`: rows hold three vectors where the file pools keys.
    """

    layers: Literal["all", "listed", "after_dense"] = "all"
    default: bool = False
    with_values: bool = False
    optional: bool = False
    pooled: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """`has_cache`: keeps state between batches at all (encoders and diffusion models do not).
    `causal`: tokens attend to those before them; a file may say that they do not, some architectures always do.

    `latent`: keys and values are one compressed vector where the file has lengths for it (MLA).
    `n_kv_layers`: only so many layers from the start have a cache, the rest read theirs; `shares_kv`: the file tells.
    `compressed`: beside their window layers keep compressed keys, by the ratios that the file lists;
    `states_heads`: the file states how large heads are, and its first layer may have none;
    `hashed`: some layers keep the inputs of a hash of tokens; `looped`: the file tells how often its layers run;
    `routed`: one more layer with a single head picks adapters.
    `ties_output`: a file without an output matrix uses the token embedding for it; `output_first`: the engine asks for
    that copy before the embedding, so that it is there twice even in one buffer.
    `turns_by_table`: only layers that attend to everything use the file's rope table.
    `reads_lazily`: large embeddings per layer stay in the file and are read as needed.
    `keeps_encoded`: beside the logits what was made of the tokens is kept.
    `refused`: why the arithmetic leaves the state to the probe.
    """

    has_cache: bool = True
    causal: bool = True
    window: Window | None = None
    recurrence: Recurrence | None = None
    indexer: Indexer | None = None
    latent: bool = False
    n_kv_layers: int | None = None
    shares_kv: bool = False
    compressed: bool = False
    hashed: bool = False
    looped: bool = False
    routed: bool = False
    states_heads: bool = False
    ties_output: bool = True
    output_first: bool = False
    turns_by_table: bool = False
    reads_lazily: bool = False
    keeps_encoded: bool = False
    refused: str | None = None


_LISTED_WINDOW = Architecture(window=Window())
_MAMBA2 = Recurrence("no_kv_heads", "mamba_groups")
_DELTA_NET = Architecture(recurrence=Recurrence("interval", "mamba_groups"))
_KDA = Architecture(latent=True, recurrence=Recurrence("no_kv_heads", "kda"))
_RWKV = Architecture(recurrence=Recurrence("all", "rwkv"))

_PLAIN = """
    apertus arcee arctic baichuan bailingmoe bailingmoe2 bloom chameleon chatglm codeshell cogvlm command-r dbrx deci
    deepseek deepseek2-ocr dots1 ernie4_5 ernie4_5-moe exaone falcon gemma glm4 glm4moe gpt2 gptneox granite
    granitemoe grok grovemoe hrm_text hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 internlm2 jais jais2 llama
    llama-embed maincoder minicpm minicpm3 minimax-m2 mistral3 mpt nemotron olmo olmoe openelm orion paddleocr
    pangu-embedded phi2 phi3 phimoe plamo plm pockettts qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3tts qwen3vl
    qwen3vlmoe refact seed_oss smollm3 stablelm starcoder starcoder2 t5encoder talkie xverse
"""
_ENCODERS = """
    bert eurobert jina-bert-v2 jina-bert-v3 neo-bert nomic-bert nomic-bert-moe wavtokenizer-dec
"""
_DIFFUSION = "dream llada llada-moe rnd1"

ARCHITECTURES: dict[str, Architecture] = {
    **dict.fromkeys(_PLAIN.split(), Architecture()),
    **dict.fromkeys(_ENCODERS.split(), Architecture(has_cache=False, ties_output=False)),
    **dict.fromkeys(_DIFFUSION.split(), Architecture(has_cache=False, causal=False)),
    "gemma-embedding": Architecture(has_cache=False, causal=False, window=Window(6)),
    "modern-bert": Architecture(has_cache=False, ties_output=False, window=Window(3, full_first=True, optional=True)),
    "graniteswitch": Architecture(routed=True),
    "nanbeige": Architecture(looped=True),
    "t5": Architecture(keeps_encoded=True),
    "bitnet": Architecture(ties_output=False),
    "eagle3": Architecture(ties_output=False),
    # sliding windows
    "afmoe": Architecture(window=Window(4, optional=True)),
    "cohere2": Architecture(window=Window(4)),
    "cohere2moe": Architecture(window=Window(4, full_first=True)),
    "exaone-moe": Architecture(window=Window(4)),
    "exaone4": Architecture(window=Window(4, n_tokens=4096, only_with_layers=64)),
    "gemma2": Architecture(window=Window(2, n_tokens=4096)),
    "gemma3": Architecture(window=Window(6, optional=True)),
    "gemma3n": Architecture(window=Window(5), n_kv_layers=20, output_first=True),
    "gemma4": Architecture(window=Window(), shares_kv=True, output_first=True, turns_by_table=True, reads_lazily=True),
    "gpt-oss": Architecture(window=Window(2)),
    "granite_swa": _LISTED_WINDOW,
    "laguna": Architecture(window=Window(4, full_first=True, optional=True)),
    "llama4": Architecture(window=Window(4, n_tokens=8192, fixed=True, none_if_zero=True)),
    "maple": _LISTED_WINDOW,
    "mellum": Architecture(window=Window(4, optional=True)),
    "mimo2": _LISTED_WINDOW,
    "muse-glimmer": Architecture(window=Window(4)),
    "olmo2": Architecture(window=Window(4, optional=True)),
    "plamo3": Architecture(window=Window(8, optional=True)),
    "smallthinker": Architecture(window=Window(4, full_first=True, n_tokens=4096, fixed=True, optional=True)),
    "spark2_5": _LISTED_WINDOW,
    "step35": _LISTED_WINDOW,
    # compressed keys and values, indexers
    "deepseek2": Architecture(latent=True),
    "mistral4": Architecture(latent=True),
    "deepseek32": Architecture(latent=True, indexer=Indexer()),
    "glm-dsa": Architecture(latent=True, indexer=Indexer("listed", default=True)),
    "hy_v4": Architecture(latent=True, indexer=Indexer("listed", optional=True)),
    "dots3note": Architecture(latent=True, window=Window(), indexer=Indexer("listed")),
    "deepseek4": Architecture(window=Window(1), indexer=Indexer(), compressed=True),
    "minimax-m3": Architecture(indexer=Indexer("after_dense", with_values=True)),
    # recurrent and hybrid
    "mamba": Architecture(recurrence=Recurrence("all", "mamba")),
    "mamba2": Architecture(recurrence=Recurrence("all", "mamba_groups")),
    "rwkv6": _RWKV,
    "rwkv6qwen2": _RWKV,
    "rwkv7": _RWKV,
    "arwkv7": _RWKV,
    "jamba": Architecture(recurrence=Recurrence("no_kv_heads", "mamba")),
    "falcon-h1": Architecture(recurrence=Recurrence("all", "mamba_groups", beside_attention=True)),
    "plamo2": Architecture(recurrence=_MAMBA2, states_heads=True),
    "granitehybrid": Architecture(recurrence=_MAMBA2),
    "nemotron_h": Architecture(recurrence=Recurrence("no_kv_heads_no_ffn", "mamba_groups")),
    "nemotron_h_moe": Architecture(recurrence=Recurrence("no_kv_heads_no_ffn", "mamba_groups")),
    "lfm2": Architecture(window=Window(1, optional=True), recurrence=Recurrence("no_kv_heads", "short_convolution")),
    "lfm2moe": Architecture(recurrence=Recurrence("no_kv_heads", "short_convolution")),
    "qwen3next": _DELTA_NET,
    "qwen35": _DELTA_NET,
    "qwen35moe": _DELTA_NET,
    "qwen4exp": Architecture(
        recurrence=Recurrence("interval", "mamba_groups"), indexer=Indexer(), hashed=True, reads_lazily=True
    ),
    "minimax-01": Architecture(recurrence=Recurrence("interval", "lightning", interval=8)),
    "kimi-linear": _KDA,
    "kimi-k3": _KDA,
    "bailingmoe3": _KDA,
    "glm5-next": Architecture(
        latent=True,
        recurrence=Recurrence("no_kv_heads", "kda"),
        indexer=Indexer("listed", default=True, pooled=True),
    ),
    # left to the probe
    "dflash": Architecture(refused="it only runs beside another model"),
    "gemma4-assistant": Architecture(refused="it only runs beside another model"),
}


def find_architecture(name: str) -> Architecture | None:
    """Return the record of `name`, None where only a probe can tell."""
    return ARCHITECTURES.get(name)
