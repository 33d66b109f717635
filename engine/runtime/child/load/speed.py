"""Measures the speed of a device with ggml's own kernels on a matrix of zeros.

- The product of a large matrix with one column gives the rate at which weights are read. This limits the speed of
  answers. It is measured for each tensor type, because on CPUs the time to unpack quantised weights dominates.
- The product with many columns gives the arithmetic speed. This limits the speed of prompts.
- A graph with many additions of one column gives the cost of a graph node that reads almost nothing.
- Reading a few bytes of the result back gives the round trip. It also waits for the end of the computation, because
  ggml does not wait on RPC devices.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any, Self

from engine.base.values import replace
from engine.runtime.child.load.kernel_speeds import SHORT_S, clock_of, kernel_speeds
from engine.runtime.child.native.bindings import Bindings, InitParams
from engine.runtime.child.native.devices import CPU_ID, resolve_devices
from engine.runtime.child.native.failures import failure
from engine.runtime.protocol.messages import DeviceSpeed, ThreadSpeeds
from engine.runtime.protocol.requests import DeviceRef, MeasureSpeed, MeasureThreads

_F16, _F32 = 1, 0
_Q4_K = 12
"""ggml type (Q4_K) of the matrix in `measure_threads`.

Most models have this type. Its kernel computes more per byte than that of F16.
"""
_COLUMNS = 4096
_MIN_ROWS = 64
_SENT_BYTES = 4 << 20
"""Size in bytes of a copy to the device.

For 10 MiB or more, RPC clients would first ask the server's cache for the tensor.
"""
_ROUND_TRIPS = 20
_MEASURED_S = 0.4
_MEASURED_TYPE_S = 0.25
_MAX_PASSES = 50
_PART_S = 0.008
"""Duration in seconds of a product of the whole matrix above which parts of the matrix are measured too.

On a busy machine a short measurement is disturbed less.
"""
_MAX_PARTS = 32
_SUMS = 256
_TOKENS = 128
"""Number of columns of the product for prompts, enough for arithmetic to limit the speed instead of memory."""
_PRODUCT_COLUMNS, _ROWS = 2048, (256, 1024, 4096)
"""Size of the matrix whose product is measured for prompts: its columns, and the numbers of rows to try, ascending.

The next larger number is used if one product takes less than `SHORT_S` seconds.
"""
_THREAD_ROWS = 1024
"""Number of matrix rows in `measure_threads` for the product with many columns.

They are few, because a single thread computes this product too.
"""
_MEASURED_PRODUCT_S = 0.15
_GRAPH_NODES = 512


def measure(engine: Bindings, request: MeasureSpeed | MeasureThreads) -> DeviceSpeed | ThreadSpeeds:
    """Carry out a request to measure one device, or the CPU with several numbers of threads.

    Raises:
        RequestError: the device is gone, or has no room for the matrix.
    """
    return measure_threads(engine, request) if isinstance(request, MeasureThreads) else measure_speed(engine, request)


def measure_speed(engine: Bindings, request: MeasureSpeed) -> DeviceSpeed:
    """Measure one device. This takes some seconds, and the request's `size_bytes` of the device's memory.

    When the request's `enough_s` seconds are over, no further tensor type is measured: on a slow device one type may
    take as long as all types on a fast device.

    Raises:
        RequestError: the device is gone, or has no room for the matrix.
    """
    end = time.perf_counter() + request.enough_s
    device = resolve_devices(engine, [request.device], [request.device.id]).by_id[request.device.id]
    with _Graph(engine, device, request) as graph:
        speed = graph.measure()
    with _Graph(engine, device, request, sums=_SUMS) as graph:
        op_s = graph.op_s(_MEASURED_TYPE_S)
    by_type: dict[str, float] = {}
    products: dict[str, float] = {}
    for name, number in request.types.items():
        if time.perf_counter() > end:
            break
        with _Graph(engine, device, request, type_number=number) as graph:
            by_type[name] = graph.read_bytes_per_second(_MEASURED_TYPE_S)
    for name, number in {"F16": _F16, **request.types}.items():
        if time.perf_counter() > end:
            break
        products[name] = _products_per_second(engine, device, request, number)
    read, others = kernel_speeds(engine, device, request, end)
    by_type |= read
    products |= others
    return replace(speed, by_type=by_type, op_s=op_s, products=products)


def measure_threads(engine: Bindings, request: MeasureThreads) -> ThreadSpeeds:
    """Measure matrix products on the CPU with each number of threads: with one column, and with many.

    The product with one column is divided into many graph nodes, because threads wait for each other after each node of
    a model's graph too.

    Raises:
        RequestError: the host has no room for the matrix.
    """
    host = DeviceRef(id=CPU_ID, backend="CPU")
    asked = MeasureSpeed(device=host, size_bytes=request.size_bytes, n_threads=1, enough_s=0.0)
    device = resolve_devices(engine, [host], [CPU_ID]).by_id[CPU_ID]
    rates: dict[str, list[float]] = {"answers": [], "prompts": []}
    with (
        _Graph(engine, device, asked, type_number=_Q4_K) as answer,
        _Graph(engine, device, asked, type_number=_Q4_K, rows=_THREAD_ROWS, tokens=_TOKENS) as prompt,
    ):
        for count in request.counts:
            for name, graph in (("answers", answer), ("prompts", prompt)):
                graph.use_threads(engine, device, count)
                rates[name].append(1 / graph.parts_s(request.measured_s))
    return ThreadSpeeds(answers=tuple(rates["answers"]), prompts=tuple(rates["prompts"]))


def _products_per_second(engine: Bindings, device: int, request: MeasureSpeed, type_number: int) -> float:
    """Return the speed of a matrix product for many tokens, as for a prompt, in multiplications per second.

    There is one multiplication for each weight and token. A larger matrix is measured if one product takes less than
    `SHORT_S` seconds.
    """
    for rows in _ROWS:
        with _Graph(
            engine, device, request, type_number=type_number, rows=rows, tokens=_TOKENS, columns=_PRODUCT_COLUMNS
        ) as graph:
            seconds = graph.work_s(_MEASURED_PRODUCT_S if rows == _ROWS[-1] else 0.0)
            if seconds > SHORT_S:
                seconds = graph.work_s(_MEASURED_PRODUCT_S)
        if seconds > SHORT_S:
            break
    return graph.rows * _PRODUCT_COLUMNS * _TOKENS / seconds


class _Graph:
    """A graph whose computation is timed: by default the product of a matrix with one or more columns, on a device.

    It is a context manager that frees its tensors.

    `type_number`: ggml type of the matrix.
    `sums`: 0 for the product; else the graph has this number of nodes that add a column, and no product.
    `rows`: rows of the matrix; 0: as many as fit into `size_bytes` of the request.
    `tokens`: number of columns that the matrix is multiplied with, one for each token of a batch.
    `columns`: width of the matrix.
    """

    def __init__(
        self,
        engine: Bindings,
        device: int,
        request: MeasureSpeed,
        *,
        type_number: int = _F16,
        sums: int = 0,
        rows: int = 0,
        tokens: int = 1,
        columns: int = _COLUMNS,
    ) -> None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        bind = engine.bind
        self._clock = clock_of(request)
        self._free_backend = bind("ggml_backend_free", None, pointer)
        self._free_tensors = bind("ggml_free", None, pointer)
        self._free_buffer = engine.free_buffer
        self._compute = bind("ggml_backend_graph_compute", number, pointer, pointer)
        self._set = bind("ggml_backend_tensor_set", None, pointer, pointer, size, size)
        self._get = bind("ggml_backend_tensor_get", None, pointer, pointer, size, size)
        new_tensor = bind("ggml_new_tensor_2d", pointer, pointer, number, ctypes.c_int64, ctypes.c_int64)
        row_bytes = bind("ggml_row_size", size, number, ctypes.c_int64)(type_number, columns)
        most_rows = max(_MIN_ROWS, request.size_bytes // row_bytes)
        self.rows = rows = _MIN_ROWS if sums else min(rows or most_rows, most_rows)
        self._matrix_bytes = row_bytes * rows
        self._buffer: int | None = None
        self._backend = bind("ggml_backend_dev_init", pointer, pointer, ctypes.c_char_p)(device, None)
        if not self._backend:
            raise failure("unreachable", f"{request.device.id} cannot be used now. List the devices again.")
        if request.device.id == CPU_ID:
            self.use_threads(engine, device, request.n_threads)
        n_tensors, n_graphs = sums + 2 * _MAX_PARTS + 64, 2 + 2 * _MAX_PARTS
        room = n_tensors * bind("ggml_tensor_overhead", size)()
        room += n_graphs * bind("ggml_graph_overhead_custom", size, size, ctypes.c_bool)(_GRAPH_NODES, False)
        self._tensors = bind("ggml_init", pointer, InitParams)(InitParams(room, None, True))
        self._matrix = new_tensor(self._tensors, type_number, columns, rows)
        column = new_tensor(self._tensors, _F32, columns, tokens)
        self._result = bind("ggml_mul_mat", pointer, pointer, pointer, pointer)(self._tensors, self._matrix, column)
        if sums:
            add = bind("ggml_add", pointer, pointer, pointer, pointer)
            self._result = column
            for _ in range(sums):
                self._result = add(self._tensors, self._result, column)
        self._sums = sums
        self._graph = self._graph_of(engine, self._result)
        self._parts: list[int] = []
        self._chain = self._graph
        if not sums and tokens == 1:
            rows_each = max(_MIN_ROWS, rows // _MAX_PARTS)
            view = bind("ggml_view_2d", pointer, pointer, pointer, ctypes.c_int64, ctypes.c_int64, size, size)
            products = []
            for first in range(0, rows - rows_each + 1, rows_each):
                part = view(self._tensors, self._matrix, columns, rows_each, row_bytes, first * row_bytes)
                product = bind("ggml_mul_mat", pointer, pointer, pointer, pointer)(self._tensors, part, column)
                self._parts.append(self._graph_of(engine, product))
                products.append(product)
            self._part_bytes = rows_each * row_bytes
            self._chain = self._graph_of(engine, *products)
        # All tensors in one buffer on the device, as weights are.
        self._buffer = bind("ggml_backend_alloc_ctx_tensors", pointer, pointer, pointer)(self._tensors, self._backend)
        if not self._buffer:
            self._free()
            raise failure("busy", f"{request.device.id} has no room for a test of its speed. Unload models first.")
        # Linux maps memory that was never written to one shared page of zeros: reading it would measure the CPU's
        # cache.
        bind("ggml_backend_buffer_clear", None, pointer, ctypes.c_uint8)(self._buffer, 0)

    def _graph_of(self, engine: Bindings, *results: int) -> int:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        new_graph = engine.bind("ggml_new_graph_custom", pointer, pointer, size, ctypes.c_bool)
        graph: int = new_graph(self._tensors, _GRAPH_NODES, False)
        for result in results:
            engine.bind("ggml_build_forward_expand", None, pointer, pointer)(graph, result)
        return graph

    def use_threads(self, engine: Bindings, device: int, n_threads: int) -> None:
        """Compute with `n_threads` threads from now on. `device`: ggml's handle of the CPU."""
        # Not in ggml's C interface: each CPU backend has a function of its own, which the registry knows by name.
        address = engine.registry_function(engine.device_registry(device), b"ggml_backend_set_n_threads")
        if address:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(address)(self._backend, n_threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._free()

    # Other programs make a pass slower, never faster. So the best of several passes counts.

    def measure(self) -> DeviceSpeed:
        """Return the speed of reading F16 weights, the round trip, and the speed of copies to the device."""
        block = ctypes.create_string_buffer(min(_SENT_BYTES, self._matrix_bytes))

        def send() -> None:
            self._set(self._matrix, block, 0, len(block))
            self._ask()

        # The first pass is not measured: it may compile kernels and wake the device.
        self._work()
        sent_s = max(_best(send, _MEASURED_S, time.perf_counter) - self._round_trip_s(), 1e-9)
        return DeviceSpeed(
            read_bytes_per_second=self.read_bytes_per_second(_MEASURED_S),
            round_trip_s=self._round_trip_s(),
            sent_bytes_per_second=len(block) / sent_s,
        )

    def read_bytes_per_second(self, measured_s: float) -> float:
        """Return the bytes per second at which the matrix is read. `measured_s`: duration of the measurement."""
        # One pass first: it may compile kernels and wake the device.
        self._work()
        whole_s, trip_s = _best(self._work, measured_s, self._clock), self._round_trip_s()
        found = float(self._matrix_bytes) / max(whole_s - trip_s, 1e-9)
        if whole_s <= _PART_S:
            return found
        end = time.perf_counter() + measured_s
        while time.perf_counter() < end:
            for graph in self._parts:
                part_s = _seconds(lambda graph=graph: self._work(graph), self._clock)  # type: ignore[misc]
                found = max(found, self._part_bytes / max(part_s - trip_s, 1e-9))
        return found

    def op_s(self, measured_s: float) -> float:
        """Return the seconds of one graph node that adds two columns. `measured_s`: duration of the measurement."""
        return self.work_s(measured_s) / self._sums

    def work_s(self, measured_s: float) -> float:
        """Return the seconds of the whole graph, without the round trip. `measured_s`: duration of the measurement."""
        self._work()
        return max(_best(self._work, measured_s, self._clock) - self._round_trip_s(), 1e-9)

    def parts_s(self, measured_s: float) -> float:
        """Return the seconds of a product that is divided into many graph nodes, each for some rows of the matrix.

        A product with several columns is not divided; return the seconds of its single node.
        """
        self._work(self._chain)
        return max(_best(lambda: self._work(self._chain), measured_s, self._clock), 1e-9)

    def _round_trip_s(self) -> float:
        return min(_seconds(self._ask) for _ in range(_ROUND_TRIPS))

    def _ask(self) -> None:
        word = ctypes.create_string_buffer(4)
        self._get(self._result, word, 0, len(word))

    def _work(self, graph: int | None = None) -> None:
        self._compute(self._backend, self._graph if graph is None else graph)
        self._ask()

    def _free(self) -> None:
        """Free the buffer, the tensors and the backend, in this order, because each of them uses the next one."""
        if self._buffer:
            self._free_buffer(self._buffer)
        self._free_tensors(self._tensors)
        self._free_backend(self._backend)


def _best(work: Callable[[], Any], measured_s: float, clock: Callable[[], float]) -> float:
    """Return the duration in seconds of the fastest call of `work`, by `clock`.

    `measured_s`: seconds for which the call is repeated.
    """
    end = time.perf_counter() + measured_s
    best = _seconds(work, clock)
    for _ in range(_MAX_PASSES):
        if time.perf_counter() >= end:
            break
        best = min(best, _seconds(work, clock))
    return best


def _seconds(work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    begun = clock()
    work()
    return clock() - begun
