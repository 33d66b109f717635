"""llama.cpp's split mode row: how many rows of each weight each device has, and which device computes each layer.

In llama-cpp-python 0.3.36 only ggml-sycl has a split buffer type (`ggml_backend_sycl_split_buffer_type`). SYCL devices
accept every operation with any buffer type, and llama.cpp tries the split buffer first (`make_gpu_buft_list`). So all
weights of the split layers and of the output layer are split, also norms and biases. (stable-diffusion.cpp splits only
matrices of at least 256 x 256 inside layers.) KV cache and computations are on the layer's own device (`dev_layer`),
which follows from the shares as in mode layer.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from engine.base.language import tr
from engine.devices.device import CPU_ID, Rig
from engine.model.gguf.model_file import ModelFile, TensorInfo
from engine.planning.layout.engine_parameters import float32, leading_cpu_layers, split_members, tensor_overrides
from engine.planning.layout.layout import Layout, Violation, make_layout
from engine.planning.layout.patterns import pattern_finder

ROW_BACKENDS = frozenset({"SYCL"})
"""Backends whose split buffers this module can compute. Hexagon's split buffer is an ordinary buffer of one device."""

_ROUNDING = {
    **dict.fromkeys(("F32", "F16"), 1),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q8_0", "Q6_K"), 64),
    **dict.fromkeys(
        (
            "Q1_0", "Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M",
            "IQ3_XXS", "IQ3_S", "IQ4_XS", "IQ4_NL",
        ),
        128,
    ),
}  # fmt: skip
"""Multiples to which the rows of a device's slice are rounded, by tensor type, on GPUs of generation 9 and later.

Source: `get_row_rounding` of ggml-sycl, which aborts the process for other types.
"""


def rows_of_members(tensor: TensorInfo, shares: Sequence[float]) -> tuple[int, ...]:
    """Return the number of rows of `tensor` on each device with a share.

    Computed in float32 and rounded down, as in `get_row_split` of ggml-sycl.
    """
    n_rows = math.prod(tensor.shape[1:])
    rounding = _ROUNDING.get(tensor.type_name, 1)
    sums = _sums(shares)
    bounds = [0]
    for before in sums[:-1]:
        bound = int(float32(n_rows * float32(before / sums[-1])))
        bounds.append(bound - bound % rounding)
    bounds.append(n_rows)
    return tuple(high - low for low, high in pairwise(bounds))


def _sums(shares: Sequence[float]) -> list[float]:
    return list(accumulate(map(float32, shares), lambda a, b: float32(a + b)))


def with_homes(layout: Layout) -> Layout:
    """Return a layout in split mode layer, with each layer on the device that computes it in split mode row.

    `layout` must be in split mode row. llama.cpp calls this device `dev_layer`; it also has the
    layer's KV cache. Mirrors `llama_model_base::load_tensors`.
    """
    members, leading = split_members(layout), leading_cpu_layers(layout)
    sums = _sums([share for _, share in layout.tensor_split if share > 0])
    bounds = [float32(total / sums[-1]) for total in sums]
    # llama.cpp counts the output layer as a layer, and searches with `std::upper_bound` in float32.
    n_split = layout.n_layers + 1 - leading
    homes = [members[bisect_right(bounds, float32(position / n_split))] for position in range(n_split)]
    assignment = [*[CPU_ID] * leading, *homes]
    found = make_layout(layout.n_layers, assignment[:-1], assignment[-1])
    return Layout(found.n_layers, found.runs, found.output_device, overrides=layout.overrides)


def row_violations(layout: Layout, model: ModelFile, rig: Rig) -> Iterator[Violation]:
    """Yield violations of the rule `row_weights`: weights that make ggml-sycl abort in split mode row.

    These are three-dimensional weights, and weights of unsupported types.
    """
    backends = {device.backend for device in rig.devices if device.id in split_members(layout)}
    if not backends & ROW_BACKENDS or layout.n_layers != model.n_layers:
        return
    moved = [pattern_finder(each.pattern) for each in tensor_overrides(layout)]
    leading = leading_cpu_layers(layout)
    tensors = [tensor for block in model.blocks[leading:] for tensor in block.tensors]
    tensors += [tensor for tensor in model.global_tensors if tensor.name.startswith("output")]
    split = [tensor for tensor in tensors if not any(finds(tensor.name) for finds in moved)]
    # `ggml_sycl_mul_mat_id` and `ggml_sycl_op_mul_mat` assert that no split weight has a third dimension.
    stack = next((tensor for tensor in split if math.prod(tensor.shape[2:]) > 1), None)
    if stack is not None:
        yield Violation(
            "row_weights",
            tr("In split mode row the engine aborts with three-dimensional weights such as {name}.", name=stack.name),
            tr("Move these weights (mostly experts) to the CPU by an override, or choose split mode layer."),
        )
    odd = next((tensor for tensor in split if tensor.type_name not in _ROUNDING), None)
    if odd is not None:
        yield Violation(
            "row_weights",
            tr(
                "In split mode row the engine cannot split {type_name} weights such as {name}, and aborts.",
                type_name=odd.type_name,
                name=odd.name,
            ),
            tr("Choose split mode layer, or a file with weights of another type."),
        )
