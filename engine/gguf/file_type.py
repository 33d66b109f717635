"""Names of the mixes that quantisers write (`general.file_type`), as people know them from file names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.gguf.model_file import MetadataValue, ModelFile, TensorInfo

_FILE_TYPES = {
    # enum llama_ftype in llama.h; numbers missing here were withdrawn upstream
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K",
    19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL",
    26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0",
    37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4", 40: "Q1_0", 41: "Q2_0",
}  # fmt: skip
_MIX_OF_TENSOR_TYPE = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
_GUESSED = 1024
"""LLAMA_FTYPE_GUESSED, a flag on top of the number."""


def file_type_name(model: ModelFile) -> str:
    """Return the name of the model's mix; where the header has none, that of the type with the most elements."""
    return mix_name(model.metadata, model.tensors)


def mix_name(metadata: Mapping[str, MetadataValue], tensors: Iterable[TensorInfo]) -> str:
    """Return the same by what the header of any file says; empty where it has no tensors either."""
    number = metadata.get("general.file_type")
    if isinstance(number, int) and number & ~_GUESSED in _FILE_TYPES:
        return _FILE_TYPES[number & ~_GUESSED]
    n_elements: dict[str, int] = {}
    for tensor in tensors:
        n_elements[tensor.type_name] = n_elements.get(tensor.type_name, 0) + tensor.n_elements
    most = max(n_elements, key=lambda name: n_elements[name], default="")
    return _MIX_OF_TENSOR_TYPE.get(most, most)
