"""Names by which sections of a graph refer to tensors of other sections (`Key`), and placeholders for devices.

A section is the nodes of one layer (`sections.py`).
"""

from __future__ import annotations

ON_CPU = -2
"""Placeholder for the index of the CPU backend in `Tensor.backend`."""

Key = tuple[object, ...]
"""Name by which sections refer to a tensor that more than one of them uses. In ggml it would be the tensor's address.

`("in", n)`: input `n` of the graph.
`("view", "in", n, ne, nb)`: a view of input `n` with shape `ne` and strides `nb`.
`("weight", buft)`: a weight that layers share, in a buffer type.
`("embd", n)`: tensor `n` of those made before the first layer.
`(0, n)`: tensor `n` of this section. `(-1, n)`: tensor `n` of the section before.
`("copy", key, backend)`: the copy of the tensor `key` for a backend.
`("at", n)`: tensor `n` of a whole graph that `partition_graph` cuts.
`(n, EARLY, index)`: tensor `index` of the section `n` sections later, if Vulkan computes it before that section.
"""
EARLY = "early"
"""Second element of the name of a tensor that Vulkan computes before the tensor's own section."""


def buft_at(number: int, kernel_class: int = 0) -> str:
    """Return the placeholder for the buffer type of a layer's device, such as "@0.1".

    `number`: number of the layer in its section (consecutive nodes of the graph).
    `kernel_class`: number of the device's kernel class. Devices of one class lack kernels for the same weights.
    """
    return f"@{number}.{kernel_class}"


def is_placeholder(buft: str) -> bool:
    """Return whether a buffer type is a placeholder such as "@0.1" (see `buft_at`) instead of a real buffer type."""
    return buft.startswith("@")


def layer_of(buft: str) -> int:
    """Return the layer's number in a placeholder made by `buft_at`."""
    return int(buft[1:].partition(".")[0])


def pin_at(number: int) -> int:
    """Return the placeholder for the backend to which a layer's norms are pinned.

    `number`: number of the layer in its section (consecutive nodes of the graph).
    """
    return ON_CPU - 1 - number


def name_after(key: Key) -> Key | None:
    """Translate `key`, the name of a tensor in one section (the nodes of one layer), to its name in the next section.

    None if the next section has no name for the tensor. A section can name its own tensors, those of the section before
    it, and the output of the section two before it.
    """
    if key[0] == "copy":
        original = name_after(key[1])  # type: ignore[arg-type]
        return None if original is None else ("copy", original, key[2])
    if isinstance(key[0], str):
        return key
    if key[1] == EARLY:
        return (key[0] - 1, *key[1:]) if key[0] else None  # type: ignore[operator]
    if key[0] == 0:
        return (-1, key[1])
    return (-2, "out") if key == (-1, "out") else None


def is_shared(key: Key) -> bool:
    """Return whether `key` names the same tensor in every section (the nodes of one layer).

    Such tensors are inputs and shared weights.
    """
    return is_shared(key[1]) if key[0] == "copy" else isinstance(key[0], str)  # type: ignore[arg-type]


def is_early(key: Key) -> bool:
    """Return whether `key` names a tensor that Vulkan computes early: before the section (layer) that it belongs to."""
    return key[1] == EARLY


def name_before(key: Key) -> Key | None:
    """Translate `key`, the name of a tensor in one section (the nodes of one layer), to its name in the section before.

    None if the section itself makes the tensor, so that the section before has no name for it.
    """
    if key[0] == "copy":
        original = name_before(key[1])  # type: ignore[arg-type]
        return None if original is None else ("copy", original, key[2])
    if isinstance(key[0], str):
        return key
    return (key[0] + 1, *key[1:]) if key[0] in (-1, -2) or key[1] == EARLY else None  # type: ignore[operator]


def original_name(key: Key) -> object:
    """Return the name of the copied tensor if `key` names a copy, else `key`."""
    return key[1] if key[0] == "copy" else key
