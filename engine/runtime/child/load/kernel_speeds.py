"""Measures kernels whose speed a plain matrix product does not predict: experts, repacked weights, attention, scans.

On CPUs these kernels are up to 20 times as fast or as slow as a plain product, and decide the speed of prompts.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, Self

from engine.runtime.child.native.bindings import Bindings, InitParams
from engine.runtime.child.native.devices import CPU_ID
from engine.runtime.child.native.failures import failure
from engine.runtime.protocol.requests import MeasureSpeed

_F32, _F16, _I32 = 0, 1, 26
_TOKENS = 128
_EXPERTS, _USED = 8, 2
_WIDTH, _ROWS = 1024, 128
"""Numbers of columns and rows of a measured matrix."""
_LARGE_BYTES = 64 << 20
"""Size in bytes of weights that do not fit into a CPU's cache, so that they are read from memory."""
_KV_HEADS, _QUERIES, _CELLS = 8, 2, 1024
"""Number of KV heads, number of query heads for each KV head, and number of cells in the KV cache.

With several heads in a cell, the rows of one head are read with a stride, which takes up to three times as long on a
CPU.
"""
_HEAD_WIDTHS = (64, 128, 256)
_SCANS = {"scan": (128, 64, 32), "scan.decays": (16, 1, 1024)}
"""(Width of the state, width of a head, number of heads) by kernel. "scan" has Mamba 2's shape, "scan.decays" Mamba's.

Mamba's scan computes a decay for each element of the state. The scans of Mamba 2 and later models compute one for each
head.
"""
_CONVOLVED, _CHANNELS = 4, 512
"""Kernel width of a convolution in tokens, the computed token included, and number of channels."""
_MEASURED_S = 0.06
_MAX_PASSES = 40
_N_TENSORS = 4096
_GROWTH = (1, 4, 16)
"""Factors that enlarge a measured operation, in the order in which they are tried.

The next factor is used if one computation of the operation takes less than `SHORT_S` seconds.
"""
SHORT_S = 0.002
_TOO_SHORT_S = 0.00005
"""Shortest usable duration of one computation of an operation, in seconds.

In a shorter one the start of the kernel takes too large a part.
"""
_REPACKED_BUFFER = b"CPU_REPACK"

Speeds = dict[str, float]


def kernel_speeds(engine: Bindings, device: int, request: MeasureSpeed, end: float) -> tuple[Speeds, Speeds]:
    """Return two tables of speeds by kernel name: bytes of weights read per second for one token, and multiplications
    per second.

    The names of kernels are defined in `engine/planning/speed/speeds.py`. Kernels that the device does not support are
    left out. No kernel is measured after the time `end` (seconds of `time.perf_counter`).
    """
    read: Speeds = {}
    products: Speeds = {}

    def measure(found: Speeds, name: str, count: float, build: Callable[..., int], *, repacked: bool = False) -> None:
        for growth in _GROWTH:
            if time.perf_counter() > end:
                return
            with _Kernel(engine, device, request, partial(build, growth=growth), repacked=repacked) as kernel:
                if not kernel.is_supported:
                    return
                if kernel.quick_s() < SHORT_S and growth != _GROWTH[-1]:
                    continue
                seconds = kernel.seconds()
                break
        if seconds > _TOO_SHORT_S:
            found[name] = count * growth / seconds

    row_size = engine.bind("ggml_row_size", ctypes.c_size_t, ctypes.c_int, ctypes.c_int64)
    for width in _HEAD_WIDTHS:
        for suffix, tokens, heads in (("", _TOKENS, _KV_HEADS), (".1", 1, _KV_HEADS), (".1.alone", 1, 1)):
            # Keys and values, two bytes each (F16).
            each_bytes = 2 * 2 * width * heads * _CELLS
            n_layers = 1 if tokens > 1 else max(1, min(request.size_bytes, _LARGE_BYTES) // each_bytes)
            count = float(_CELLS * _QUERIES * heads * 2 * width * tokens * n_layers)
            attention = partial(_Kernel.attention, width=width, n_tokens=tokens, n_heads=heads, n_layers=n_layers)
            measure(products, f"attention.{width}{suffix}", count, attention)
    for name, shape in _SCANS.items() if request.scans else ():
        count = float(prod(shape) * _TOKENS)
        measure(products, name, count, partial(_Kernel.scan, shape=shape, decays=name != "scan"))
    if request.scans:
        count = float((_CONVOLVED - 1) * _CHANNELS * _TOKENS)
        measure(products, "convolution", count, _Kernel.convolution)
    for name, number in {"F16": _F16, **request.types}.items():
        experts = partial(_Kernel.experts, type_number=number)
        count = float(_WIDTH * _ROWS * _USED * _TOKENS)
        measure(products, f"{name}.experts", count, experts)
        if name not in request.repacked:
            continue
        measure(products, f"{name}.repacked.experts", count, experts, repacked=True)
        count = float(_WIDTH * _ROWS * _TOKENS)
        product = partial(_Kernel.product, type_number=number, rows=_ROWS, n_tokens=_TOKENS)
        measure(products, f"{name}.repacked", count, product, repacked=True)
        # ggml repacks a matrix only if its rows are a multiple of 4 or 8 (ggml_repack_get_optimal_repack_type).
        rows = min(request.size_bytes, _LARGE_BYTES) // row_size(number, _WIDTH) // 8 * 8
        product = partial(_Kernel.product, type_number=number, rows=rows, n_tokens=1)
        measure(read, f"{name}.repacked", float(rows * row_size(number, _WIDTH)), product, repacked=True)
    return read, products


class _Kernel:
    """One operation on a device, with its tensors. A context manager that frees tensors, buffers and backend.

    `build`: adds the tensors and returns the address of the operation's result tensor.
    `repacked`: whether the weights are in a buffer of the CPU's type for repacked weights.
    `is_supported`: False if the device cannot compute the operation; then nothing is allocated.
    """

    def __init__(
        self,
        engine: Bindings,
        device: int,
        request: MeasureSpeed,
        build: Callable[[_Kernel], int],
        *,
        repacked: bool = False,
    ) -> None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._engine = engine
        self._clock = clock_of(request)
        self._compute = engine.bind("ggml_backend_graph_compute", number, pointer, pointer)
        self._get = engine.bind("ggml_backend_tensor_get", None, pointer, pointer, size, size)
        self._set = engine.bind("ggml_backend_tensor_set", None, pointer, pointer, size, size)
        self._n_bytes = engine.bind("ggml_nbytes", size, pointer)
        self._new = engine.bind("ggml_new_tensor_4d", pointer, pointer, number, *(ctypes.c_int64,) * 4)
        self._buffers: list[int] = []
        self._contents: list[tuple[int, bytes]] = []
        self._backend = engine.bind("ggml_backend_dev_init", pointer, pointer, ctypes.c_char_p)(device, None)
        if not self._backend:
            raise failure("unreachable", f"{request.device.id} cannot be used now. List the devices again.")
        room = _N_TENSORS * engine.bind("ggml_tensor_overhead", size)()
        room += engine.bind("ggml_graph_overhead_custom", size, size, ctypes.c_bool)(_N_TENSORS, False)
        init = engine.bind("ggml_init", pointer, InitParams)
        # Weights have a context of their own, because they may be in another kind of memory.
        self._weights, self._others = (init(InitParams(room, None, True)) for _ in range(2))
        self._results: list[int] = []
        self._result = build(self)
        supports = engine.bind("ggml_backend_dev_supports_op", ctypes.c_bool, pointer, pointer)
        weights_type = _repacked_buffer(engine, device) if repacked else engine.device_buffer_type(device)
        self.is_supported = bool(weights_type) and bool(supports(device, self._result))
        if not self.is_supported:
            return
        new_graph = engine.bind("ggml_new_graph_custom", pointer, pointer, size, ctypes.c_bool)
        self._graph = new_graph(self._others, _N_TENSORS, False)
        expand = engine.bind("ggml_build_forward_expand", None, pointer, pointer)
        for result in (*self._results, self._result):
            expand(self._graph, result)
        allocate = engine.bind("ggml_backend_alloc_ctx_tensors_from_buft", pointer, pointer, pointer)
        clear = engine.bind("ggml_backend_buffer_clear", None, pointer, ctypes.c_uint8)
        first = engine.bind("ggml_get_first_tensor", pointer, pointer)
        for context, kind in ((self._weights, weights_type), (self._others, engine.device_buffer_type(device))):
            if not first(context):
                continue
            buffer = allocate(context, kind)
            if not buffer:
                self._free()
                raise failure("busy", f"{request.device.id} has no room for a test of its speed. Unload models first.")
            self._buffers.append(buffer)
            # Memory that was never written is one shared page of zeros.
            clear(buffer, 0)
        for tensor, content in self._contents:
            self._set(tensor, content, 0, len(content))
        if request.device.id == CPU_ID:
            address = engine.registry_function(engine.device_registry(device), b"ggml_backend_set_n_threads")
            if address:
                ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(address)(self._backend, request.n_threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._free()

    def _tensor(self, kind: int, extents: Sequence[int], *, weights: bool = False) -> int:
        padded = (*extents, 1, 1, 1)[:4]
        tensor: int = self._new(self._weights if weights else self._others, kind, *padded)
        return tensor

    def _call(self, name: str, *arguments: Any, types: Sequence[Any] = ()) -> int:
        """Add an operation to the graph by calling the ggml function `name`; return the address of the result.

        `arguments`: tensors, followed by other values. `types`: ctypes of these other values.
        """
        n_tensors = len(arguments) - len(types)
        bound = self._engine.bind(name, ctypes.c_void_p, *(ctypes.c_void_p,) * (1 + n_tensors), *types)
        result: int = bound(self._others, *arguments)
        return result

    def product(self, type_number: int, rows: int, n_tokens: int, growth: int) -> int:
        """Add to the graph a product of one matrix with `n_tokens` columns, one for each token; return its address.

        `type_number`: ggml type of the matrix.
        `rows`, `growth`: the matrix has `rows` times `growth` rows. A larger `growth` makes a longer measurement.
        """
        matrix = self._tensor(type_number, (_WIDTH, rows * growth), weights=True)
        return self._call("ggml_mul_mat", matrix, self._tensor(_F32, (_WIDTH, n_tokens)))

    def experts(self, type_number: int, growth: int) -> int:
        """Add to the graph a product with expert matrices (`ggml_mul_mat_id`); return its address.

        Each of `_TOKENS` tokens uses `_USED` experts. All experts are used equally often.

        `type_number`: ggml type of the matrices.
        `growth`: factor for the number of rows, to make the measurement longer.
        """
        matrices = self._tensor(type_number, (_WIDTH, _ROWS * growth, _EXPERTS), weights=True)
        columns, ids = self._tensor(_F32, (_WIDTH, 1, _TOKENS)), self._tensor(_I32, (_USED, _TOKENS))
        chosen = [index % _EXPERTS for index in range(_USED * _TOKENS)]
        self._contents.append((ids, bytes((ctypes.c_int32 * len(chosen))(*chosen))))
        return self._call("ggml_mul_mat_id", matrices, columns, ids)

    def attention(self, width: int, n_tokens: int, n_heads: int, n_layers: int, growth: int) -> int:
        """Add to the graph, for each of `n_layers` layers, flash attention of `n_tokens` tokens to a KV cache in F16.

        Each layer has its own KV cache. With enough layers the processor's caches no longer hold a KV cache when it is
        read. Return the address of the last result.

        `width`: width of a head.
        `n_heads`, `growth`: there are `n_heads` times `growth` KV heads. A larger `growth` makes a longer measurement.
        """
        mask, n_heads = self._tensor(_F16, (_CELLS, n_tokens)), n_heads * growth
        real = ctypes.c_float
        for _ in range(n_layers):
            query = self._tensor(_F32, (width, n_tokens, _QUERIES * n_heads))
            keys, values = (self._cache(width, n_heads) for _ in range(2))
            tensors = (query, keys, values, mask)
            result = self._call("ggml_flash_attn_ext", *tensors, width**-0.5, 0.0, 0.0, types=(real, real, real))
            self._results.append(result)
        return result

    def _cache(self, width: int, n_heads: int) -> int:
        """Add a cache of keys or values to the graph, permuted so that each head has its own matrix.

        As in llama.cpp, the heads of a cell are neighbours in memory, so the rows of one head are read with a stride.

        Return the address of the permuted tensor.

        `width`: width of a head.
        """
        cache = self._tensor(_F16, (width, n_heads, _CELLS))
        return self._call("ggml_permute", cache, 0, 2, 1, 3, types=(ctypes.c_int,) * 4)

    def scan(self, shape: tuple[int, int, int], *, decays: bool, growth: int) -> int:
        """Add to the graph a scan of `_TOKENS` tokens over a recurrent state (`ggml_ssm_scan`); return its address.

        `shape`: width of the state, width of a head, number of heads.
        `decays`: whether each element of the state has its own decay.
        `growth`: factor for the number of heads, to make the measurement longer.
        """
        width, head, n_heads = shape[0], shape[1], shape[2] * growth
        state = self._tensor(_F32, (width, head, n_heads, 1))
        x, dt = self._tensor(_F32, (head, n_heads, _TOKENS, 1)), self._tensor(_F32, (n_heads, _TOKENS, 1))
        a = self._tensor(_F32, (width if decays else 1, n_heads))
        b, c = (self._tensor(_F32, (width, 1, _TOKENS, 1)) for _ in range(2))
        return self._call("ggml_ssm_scan", state, x, dt, a, b, c, self._tensor(_I32, (1,)), 1, types=(ctypes.c_int64,))

    def convolution(self, growth: int) -> int:
        """Add to the graph a convolution over `_TOKENS` tokens (`ggml_ssm_conv`); return its address.

        `growth`: factor for the number of channels, to make the measurement longer.
        """
        columns = self._tensor(_F32, (_CONVOLVED - 1 + _TOKENS, _CHANNELS * growth, 1))
        return self._call("ggml_ssm_conv", columns, self._tensor(_F32, (_CONVOLVED, _CHANNELS * growth)))

    def quick_s(self) -> float:
        """Return a rough duration of one computation in seconds: the shorter of two runs after a warm-up run."""
        self._pass()
        return min(self._timed(self._pass) for _ in range(2))

    def seconds(self) -> float:
        """Return the duration in seconds of the fastest of several computations.

        The fastest one counts, because other programs can only make a computation slower.
        """
        # Without the time of reading a result back, which is no part of the kernel.
        trip = min(self._timed(self._ask) for _ in range(5))
        end, best, n_passes = time.perf_counter() + _MEASURED_S, self._timed(self._pass), 1
        while time.perf_counter() < end and n_passes < _MAX_PASSES:
            best, n_passes = min(best, self._timed(self._pass)), n_passes + 1
        return max(best - trip, 1e-9)

    def _timed(self, work: Callable[[], None]) -> float:
        begun = self._clock()
        work()
        return self._clock() - begun

    def _pass(self) -> None:
        self._compute(self._backend, self._graph)
        self._ask()

    def _ask(self) -> None:
        """Read a few bytes of the result from the device, to wait until the computation has ended."""
        word = ctypes.create_string_buffer(4)
        self._get(self._result, word, 0, len(word))

    def _free(self) -> None:
        for buffer in self._buffers:
            self._engine.free_buffer(buffer)
        free = self._engine.bind("ggml_free", None, ctypes.c_void_p)
        free(self._weights)
        free(self._others)
        self._engine.bind("ggml_backend_free", None, ctypes.c_void_p)(self._backend)


def clock_of(request: MeasureSpeed) -> Callable[[], float]:
    """Return the clock for the measured device, in seconds.

    For the host the clock is the processor time of this thread, so that other programs on a busy machine do not count.
    The thread takes part in all computations and waits for the other threads without sleeping.
    """
    return time.thread_time if request.device.id == CPU_ID else time.perf_counter


def _repacked_buffer(engine: Bindings, device: int) -> int:
    """Return the buffer type of repacked weights; 0 if the CPU backend has none."""
    address = engine.registry_function(engine.device_registry(device), b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return 0
    found = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(device)
    name = engine.bind("ggml_backend_buft_name", ctypes.c_char_p, ctypes.c_void_p)
    index = 0
    while found and found[index]:
        if name(found[index]) == _REPACKED_BUFFER:
            return int(found[index])
        index += 1
    return 0
