"""Writes small llama models with a byte-level vocabulary as GGUF files, for the demo and for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from msgspec import Struct

UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
SPACE = "\u2581"
"""SentencePiece's character for a space. It is a token of its own, so that a space takes one token."""
TURN_MARKERS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_NORMAL = int(gguf.TokenType.NORMAL)
_CONTROL = int(gguf.TokenType.CONTROL)


class Vocabulary(Struct, frozen=True):
    """The tokens of a vocabulary, and llama.cpp's type of each, by token id. All tokens have the same score."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    def id_of(self, token: str) -> int:
        return self.tokens.index(token)


def byte_token(value: int) -> str:
    """Return the SentencePiece token for one byte, such as `<0x41>`."""
    return f"<0x{value:02X}>"


def byte_vocabulary(size: int | None = None) -> Vocabulary:
    """Return a vocabulary with a token for each byte.

    `size`: number of tokens, reached by adding unused words; None: no padding.
    """
    # With a token for each byte any text can be tokenised.
    tokens = [UNKNOWN, BEGIN, END, *(byte_token(value) for value in range(256)), SPACE, *TURN_MARKERS]
    types = [int(gguf.TokenType.UNKNOWN), _CONTROL, _CONTROL, *[int(gguf.TokenType.BYTE)] * 256, _NORMAL]
    types += [_CONTROL] * len(TURN_MARKERS)
    n_missing = 0 if size is None else size - len(tokens)
    if n_missing < 0:
        raise ValueError(f"a byte vocabulary has at least {len(tokens)} tokens, {size} were asked for")
    tokens += [f"{SPACE}word{number}" for number in range(n_missing)]
    types += [_NORMAL] * n_missing
    return Vocabulary(tuple(tokens), tuple(types))


def add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    """Write the tokenizer metadata that llama.cpp needs for `vocabulary`."""
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_scores([0.0] * len(vocabulary))
    writer.add_token_types(list(vocabulary.types))
    writer.add_bos_token_id(vocabulary.id_of(BEGIN))
    writer.add_eos_token_id(vocabulary.id_of(END))
    writer.add_eot_token_id(vocabulary.id_of("<|end|>"))
    writer.add_unk_token_id(vocabulary.id_of(UNKNOWN))
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)


Matrix = npt.NDArray[np.float32]
WeightSource = Callable[[str, tuple[int, ...]], Matrix]
"""A function that returns the values of a tensor by name and shape (rows first, as in numpy)."""
ExtraMetadata = Mapping[str, int | float | bool | str | list[int] | list[float] | list[bool] | list[str]]

RMS_EPSILON = 1e-5


class LlamaShape(Struct, frozen=True):
    """Hyper-parameters of a llama model to write.

    `n_expert`: number of experts in each feed-forward part; 0: no experts.
    `tied`: whether the token embedding is also the output matrix.
    `rope_factors`: whether the file has RoPE factors.
    """

    n_layers: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_ff: int
    n_ctx_train: int
    n_expert: int = 0
    n_expert_used: int = 0
    tied: bool = False
    rope_factors: bool = False

    @property
    def head_width(self) -> int:
        return self.n_embd // self.n_head


def llama_tensors(shape: LlamaShape, n_vocab: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape (rows first) of each tensor, in the order of the file."""
    yield "token_embd.weight", (n_vocab, shape.n_embd)
    if shape.rope_factors:
        # A factor for each rotated pair of a head.
        yield "rope_freqs.weight", (shape.head_width // 2,)
    for index in range(shape.n_layers):
        for name, extents in _block_tensors(shape):
            yield f"blk.{index}.{name}.weight", extents
    yield "output_norm.weight", (shape.n_embd,)
    if not shape.tied:
        yield "output.weight", (n_vocab, shape.n_embd)


def _block_tensors(shape: LlamaShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    n_embd, n_ff = shape.n_embd, shape.n_ff
    n_embd_kv = shape.n_head_kv * shape.head_width
    yield "attn_norm", (n_embd,)
    yield "attn_q", (n_embd, n_embd)
    yield "attn_k", (n_embd_kv, n_embd)
    yield "attn_v", (n_embd_kv, n_embd)
    yield "attn_output", (n_embd, n_embd)
    yield "ffn_norm", (n_embd,)
    if shape.n_expert == 0:
        yield from (("ffn_gate", (n_ff, n_embd)), ("ffn_up", (n_ff, n_embd)), ("ffn_down", (n_embd, n_ff)))
        return
    experts = shape.n_expert
    yield "ffn_gate_inp", (experts, n_embd)
    yield from (("ffn_gate_exps", (experts, n_ff, n_embd)), ("ffn_up_exps", (experts, n_ff, n_embd)))
    yield "ffn_down_exps", (experts, n_embd, n_ff)


def stored_type(
    name: str, extents: tuple[int, ...], matrix_type: gguf.GGMLQuantizationType
) -> gguf.GGMLQuantizationType:
    """Return the type in which a tensor is stored: F32 for vectors and routers, as converters do,
    else `matrix_type`.
    """
    if len(extents) == 1 or name.endswith("ffn_gate_inp.weight"):
        return gguf.GGMLQuantizationType.F32
    return matrix_type


def write_llama(
    path: Path,
    shape: LlamaShape,
    vocabulary: Vocabulary,
    *,
    name: str,
    weights: WeightSource | None,
    matrix_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F16,
    architecture: str = "llama",
    extra_metadata: ExtraMetadata | None = None,
) -> None:
    """Write a llama model as a GGUF file.

    `name`: the model's name in the file (`general.name`).
    `matrix_type`: tensor type of the matrices.
    `architecture`: name of the architecture in the file (`general.architecture`).
    `extra_metadata`: further metadata values by key; None for none.
    `weights`: function that returns the values of a tensor; None: the file has its full size, but the tensor data is a
    hole (sparse file).

    Raises:
        OSError: if the file cannot be written.
    """
    writer = gguf.GGUFWriter(path, architecture)
    try:
        _add_metadata(writer, shape, vocabulary, name=name, matrix_type=matrix_type)
        for key, value in (extra_metadata or {}).items():
            _add_value(writer, key, value)
        for tensor_name, extents in llama_tensors(shape, len(vocabulary)):
            kind = stored_type(tensor_name, extents, matrix_type)
            if weights is None:
                n_bytes = int(np.prod(extents, dtype=np.int64)) // gguf.GGML_QUANT_SIZES[kind][0]
                n_bytes *= gguf.GGML_QUANT_SIZES[kind][1]
                writer.add_tensor_info(tensor_name, extents, np.dtype(np.float32), n_bytes, raw_dtype=kind)
            else:
                values = np.ascontiguousarray(weights(tensor_name, extents))
                writer.add_tensor(tensor_name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        if weights is not None:
            writer.write_tensors_to_file()
        else:
            _write_hole(writer)
    finally:
        writer.close()


def _write_hole(writer: gguf.GGUFWriter) -> None:
    n_bytes = sum(writer.ggml_pad(tensor.nbytes, writer.data_alignment) for tensor in writer.tensors[0].values())
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    file = writer.fout[0]
    # `truncate` makes a hole, so that a test model of many GiB needs no space on the disk.
    file.truncate(writer.ggml_pad(file.tell(), writer.data_alignment) + n_bytes)


def _add_metadata(
    writer: gguf.GGUFWriter,
    shape: LlamaShape,
    vocabulary: Vocabulary,
    *,
    name: str,
    matrix_type: gguf.GGMLQuantizationType,
) -> None:
    writer.add_name(name)
    writer.add_file_type(_FILE_TYPES[matrix_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(len(vocabulary))
    writer.add_context_length(shape.n_ctx_train)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_layer_norm_rms_eps(RMS_EPSILON)
    if shape.n_expert:
        writer.add_expert_count(shape.n_expert)
        writer.add_expert_used_count(shape.n_expert_used)
    add_vocabulary(writer, vocabulary)


def _add_value(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    # Before `int`: a bool is an int in Python.
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, str(value))


_FILE_TYPES = {
    gguf.GGMLQuantizationType.F32: int(gguf.LlamaFileType.ALL_F32),
    gguf.GGMLQuantizationType.F16: int(gguf.LlamaFileType.MOSTLY_F16),
    gguf.GGMLQuantizationType.BF16: int(gguf.LlamaFileType.MOSTLY_BF16),
    gguf.GGMLQuantizationType.Q8_0: int(gguf.LlamaFileType.MOSTLY_Q8_0),
    gguf.GGMLQuantizationType.Q4_0: int(gguf.LlamaFileType.MOSTLY_Q4_0),
    gguf.GGMLQuantizationType.Q4_K: int(gguf.LlamaFileType.MOSTLY_Q4_K_M),
    gguf.GGMLQuantizationType.Q6_K: int(gguf.LlamaFileType.MOSTLY_Q6_K),
}
