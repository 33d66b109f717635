"""llama.cpp's arithmetic for placing layers, for comparison with ours."""

from __future__ import annotations

import struct
from bisect import bisect_right
from itertools import accumulate

from engine.devices.device import CPU_ID
from engine.planning.layout.engine_parameters import EngineParameters


def assignment_of(parameters: EngineParameters, n_layers: int) -> tuple[str, ...]:
    """Return the devices that llama.cpp chooses for layers 0 to n_layers-1 and the output layer, in float32 arithmetic.

    Follows `llama_model_base::load_tensors` in mode layer. Mode none with one device gives the same result.
    """
    positions = n_layers + 1
    offloaded = min(parameters.n_gpu_layers, positions) if parameters.devices else 0
    if offloaded == 0:
        return (CPU_ID,) * positions
    first = max(positions - parameters.n_gpu_layers, 0)
    sums = list(accumulate(parameters.tensor_split[: len(parameters.devices)], lambda a, b: _float32(a + b)))
    bounds = [_float32(total / sums[-1]) for total in sums]
    return tuple(
        parameters.devices[bisect_right(bounds, _float32((position - first) / offloaded))]
        if first <= position < first + offloaded
        else CPU_ID
        for position in range(positions)
    )


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])
