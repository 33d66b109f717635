"""Loads a model: allocate and read the weights, load side files, make the context, warm up.

`ModelLoader` carries out a `Load` and reports exactly how it ended; another `ModelLoader` then loads the draft model.
`ModelParameters` and `context_struct` translate our settings to llama.cpp's structs, for loads and probes alike. Every
field is written, because the defaults of llama.cpp and of the binding differ from ours.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from engine.base.processor import default_threads
from engine.base.values import replace
from engine.planning.layout.engine_parameters import (
    ENGINE_SPLIT_MODES,
    MATCHES_NO_TENSOR,
    EngineParameters,
    TensorOverride,
)
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.settings.table import ENGINE_LOAD_MODES, engine_fields
from engine.runtime.child.load.draft_model import (
    check_rotation,
    check_source,
    check_vocabulary,
    context_without_rope,
    draft_load,
    failure_of_draft,
    of_draft,
)
from engine.runtime.child.load.early_weights import Links, send_early
from engine.runtime.child.load.loaded_context import LoadedContext, output_buffer_bytes
from engine.runtime.child.load.media import Media
from engine.runtime.child.load.mtp_context import CONTEXT_TYPE, check_engine, check_heads, keep_hidden, wants_mtp
from engine.runtime.child.load.side_files import LoadedSideFiles, SideFileLoader
from engine.runtime.child.load.warm_up import StageReporter, WarmUp
from engine.runtime.child.native import breakdown
from engine.runtime.child.native.bindings import Bindings, TensorOverrideEntry
from engine.runtime.child.native.breakdown import logged_buffers
from engine.runtime.child.native.devices import CPU_ID, ResolvedDevices, resolve_devices
from engine.runtime.child.native.failures import RequestError, failure
from engine.runtime.child.native.log import (
    EngineLog,
    FreeMemory,
    LoggedBuffer,
    allocation_failure,
    context_failure,
    model_failure,
)
from engine.runtime.child.native.members import MemberBuffers
from engine.runtime.child.native.stop import StopFlag
from engine.runtime.protocol.messages import AllocationFailure, BufferMemory, LoadedModel, SentWeights, Stopped
from engine.runtime.protocol.requests import Load, Probe

NUMA_STRATEGIES = {"off": 0, "distribute": 1, "isolate": 2, "numactl": 3}
"""`ggml_numa_strategy` of ggml-cpu.h. `mirror` (4) is not implemented there."""
LAZY_AUTO = 1
UNSPECIFIED = -1
_HEADS = "MTP heads"


class ModelParameters:
    """`llama_model_params` with the arrays to which it points. This object must live until the model is loaded.

    `dry`: whether to load without memory (`no_alloc`). `mtp`: whether to load MTP heads.
    """

    def __init__(
        self,
        engine: Bindings,
        parameters: EngineParameters,
        devices: ResolvedDevices,
        context: ContextSettings,
        *,
        dry: bool,
        mtp: bool = False,
    ) -> None:
        # The list of devices is ours, so that a device may be there twice; it ends with a null pointer.
        entries = [devices.by_id[device_id] for device_id in parameters.devices]
        self._devices = (ctypes.c_void_p * (len(entries) + 1))(*entries, None)
        split_length = engine.low.llama_max_devices()
        self._split = (ctypes.c_float * split_length)(*parameters.tensor_split[:split_length])
        overrides = parameters.overrides or _stop_of_pipeline(parameters, context)
        self._overrides = _override_table(engine, overrides, devices)
        self._callback = engine.low.llama_progress_callback()
        struct = engine.low.llama_model_default_params()
        struct.devices = ctypes.addressof(self._devices)
        struct.tensor_buft_overrides = ctypes.addressof(self._overrides) if overrides else None
        struct.n_gpu_layers = parameters.n_gpu_layers
        struct.split_mode = ENGINE_SPLIT_MODES[parameters.split_mode]
        # llama.cpp asserts that a load with no_alloc does not map the file.
        struct.load_mode = ENGINE_LOAD_MODES["none" if dry else context.load_mode]
        struct.lazy_mode = LAZY_AUTO
        # llama.cpp refuses an index into an empty device list; -1 means that there is no device.
        struct.main_gpu = parameters.main_gpu if entries else -1
        struct.tensor_split = self._split
        struct.progress_callback = self._callback
        struct.progress_callback_user_data = None
        struct.kv_overrides = None
        struct.vocab_only = False
        struct.check_tensors = False
        struct.use_extra_bufts = parameters.extra_buffers
        struct.no_host = False
        struct.no_alloc = dry
        struct.load_mtp = mtp
        self.struct: Any = struct

    def report_progress_to(self, callback: Any) -> None:
        """Set the C callback `callback(fraction, data) -> bool` for progress.

        If the callback returns False, the load ends.
        """
        self._callback = callback
        self.struct.progress_callback = callback


def context_struct(engine: Bindings, context: ContextSettings, stop: StopFlag | None) -> Any:
    """Return `llama_context_params` for these settings.

    `stop`: flag that aborts a computation on the CPU between two graph nodes; None for a probe.
    """
    low = engine.low
    struct = low.llama_context_default_params()
    for key, value in engine_fields(context).items():
        setattr(struct, key, value)
    struct.n_rs_seq = 0
    struct.n_outputs_max = 0
    struct.n_outputs_max_per_seq = 1
    struct.n_threads = context.threads or default_threads()
    struct.n_threads_batch = context.threads_batch or context.threads or default_threads()
    struct.ctx_type = 0
    # As the model's file says.
    struct.pooling_type = UNSPECIFIED
    struct.attention_type = UNSPECIFIED
    struct.defrag_thold = -1.0
    struct.cb_eval = low.ggml_backend_sched_eval_callback()
    struct.cb_eval_user_data = None
    struct.abort_callback = low.ggml_abort_callback() if stop is None else stop.native_callback(low.ggml_abort_callback)
    struct.abort_callback_data = None if stop is None else stop.address
    struct.embeddings = False
    # llama.cpp's own timings are not used: the decode loop measures.
    struct.no_perf = True
    struct.samplers = None
    struct.n_samplers = 0
    struct.ctx_other = None
    return struct


def _stop_of_pipeline(parameters: EngineParameters, context: ContextSettings) -> tuple[TensorOverride, ...]:
    """Return a tensor override that matches no tensor, to prevent pipeline parallelism; empty if none is needed.

    llama.cpp has no parameter against pipeline parallelism, but does not use it if there is any tensor override
    (llama_context: `pipeline_parallel`).
    """
    several = parameters.split_mode == "layer" and len(parameters.devices) > 1
    return (TensorOverride(MATCHES_NO_TENSOR, CPU_ID),) if several and context.pipeline != "on" else ()


def _override_table(engine: Bindings, overrides: tuple[TensorOverride, ...], devices: ResolvedDevices) -> Any:
    table = (TensorOverrideEntry * (len(overrides) + 1))()
    for entry, override in zip(table, overrides, strict=False):
        entry.pattern = override.pattern.encode()
        if override.device == CPU_ID:
            entry.buffer_type = engine.cpu_buffer_type()
        else:
            entry.buffer_type = engine.device_buffer_type(devices.by_id[override.device])
    return table


MAPPING_MODES = ("auto", "mmap", "mmap_mlock")
PLAIN_HOST_BUFFER = "CPU"
"""Name of the buffer type whose weights are mapped instead of read, in a load mode with mmap."""


class ModelLoader:
    """Carries out one `Load`, from the request to the loaded context. Use it in the main thread only.

    `target`: the loaded main model, if this load is that of its draft model; else None.
    """

    def __init__(
        self,
        engine: Bindings,
        log: EngineLog,
        stop: StopFlag,
        reporter: StageReporter,
        load: Load,
        target: LoadedContext | None = None,
    ) -> None:
        self._engine = engine
        self._log = log
        self._stop = stop
        self._reporter = reporter
        self._load = load
        self._target = target
        log.begin()
        # All devices of both models at once: the log names devices of either.
        self._devices = resolve_devices(engine, load.devices, wanted_devices(load)) if not target else target.devices
        log.devices = self._devices
        self._free = FreeMemory(self._devices)
        log.on_failed = self._free.note
        self._sent: tuple[SentWeights, ...] = ()
        split = load.parameters.split_mode == "tensor"
        members = {device: self._devices.by_id[device] for device in load.parameters.devices} if split else {}
        self._members = MemberBuffers(engine, members, self._end_refused)
        self._side_file_loader = SideFileLoader(engine, self._devices, log, self._free, stop, reporter.send_final)

    def run(self) -> tuple[LoadedContext, LoadedModel]:
        """Load the model; return the loaded context and the message `LoadedModel`.

        Raises:
            RequestError: with `AllocationFailure`, `Failure` or `Stopped`. Nothing stays allocated.
        """
        check_source(self._load.draft)
        if wants_mtp(self._load):
            check_engine(self._engine)
        with self._members:
            loaded, message = self._run()
        if loaded.draft is not None and loaded.draft.kind == "mtp":
            try:
                self._make_heads(loaded)
            except RequestError:
                loaded.free()
                raise
            return loaded, replace(message, parts=loaded.parts())
        request = draft_load(self._load) if loaded.draft is not None else None
        if request is None:
            return loaded, message
        try:
            self._load_draft(loaded, request)
        except RequestError:
            loaded.free()
            raise
        return loaded, replace(message, parts=(*message.parts, *loaded.draft_buffers))

    def _run(self) -> tuple[LoadedContext, LoadedModel]:
        check_file(self._load.path)
        # For the whole process, and before its first computation; with "off" llama.cpp does nothing.
        self._engine.low.llama_numa_init(NUMA_STRATEGIES[self._load.context.numa])
        with Links(self._engine, self._devices, self._load.devices) as links:
            send_early(self._engine, self._devices, self._load, links, self._stop, self._reporter)
            self._reporter.enter("allocate")
            self._members.weights_begin()
            model = self._read_model()
            self._sent = links.sent()
        side_files: LoadedSideFiles | None = None
        try:
            if wants_mtp(self._load):
                check_heads(self._engine, model, Path(self._load.path).name)
            check_rotation(self._engine.low, model, Path(self._load.path).name)
            if self._target is not None:
                check_vocabulary(self._engine.low, self._target.model, model, Path(self._load.path).name)
            side_files = self._load_side_files(model)
            context = self._make_context(model, side_files)
        except RequestError:
            if side_files is not None:
                side_files.free()
            self._engine.low.llama_model_free(model)
            raise
        load = self._load
        positions = load.positions if self._target is None else context_without_rope(self._engine.low, model)
        loaded = LoadedContext(
            self._engine, self._log, self._devices, load.context, model, context, side_files, positions
        )
        loaded.name = Path(load.path).name
        loaded.limit_operations(self._stop, on_devices=set(self._devices.by_id) != {CPU_ID})
        loaded.draft = load.draft if loaded.makes_text else None
        if loaded.draft is not None and loaded.draft.kind == "mtp":
            # Before the warm-up, at which llama.cpp makes room for the states in the output buffer.
            keep_hidden(loaded)
        side_files.adapters.apply(context)
        if side_files.projector is not None:
            loaded.media = Media(side_files.projector, int(self._engine.low.llama_model_n_embd_inp(model)))
        try:
            WarmUp(loaded, self._free, self._stop, self._reporter).run(load.context, is_known=load.is_known)
        except RequestError:
            loaded.free()
            raise
        return loaded, self._describe(loaded)

    def _load_draft(self, loaded: LoadedContext, request: Load) -> None:
        """Load the draft model in addition to the main model. The main model stays allocated if this fails.

        Raises:
            RequestError: with `AllocationFailure`, `Failure` or `Stopped`.
        """
        # `log.begin` of the second loader replaces the facts.
        placed, facts = loaded.parts(), self._log.facts
        self._reporter.begin_draft(lambda message: failure_of_draft(message, placed).message)
        try:
            draft, message = ModelLoader(self._engine, self._log, self._stop, self._reporter, request, loaded).run()
        except RequestError as end:
            raise failure_of_draft(end.message, placed) from None
        finally:
            # The facts of the model itself are needed for its parts, as long as it is loaded.
            self._log.facts = facts
        loaded.draft_model, loaded.draft_buffers = draft, of_draft(message.parts)

    def _make_heads(self, loaded: LoadedContext) -> None:
        """Make the context of the model's MTP heads. The model stays allocated if this fails.

        Raises:
            RequestError: with `AllocationFailure`, `Failure` or `Stopped`.
        """
        placed, facts = loaded.parts(), self._log.facts
        self._reporter.begin_draft(lambda message: failure_of_draft(message, placed, _HEADS).message)
        self._log.begin()
        self._log.on_failed = self._free.note
        try:
            context = self._make_context(loaded.model, loaded.side_files, CONTEXT_TYPE)
            heads = LoadedContext(
                self._engine, self._log, self._devices, loaded.settings, loaded.model, context, is_mtp=True
            )
            loaded.draft_model = heads
            keep_hidden(heads)
            WarmUp(heads, self._free, self._stop, self._reporter).run(loaded.settings)
            loaded.draft_buffers = of_draft(heads.parts())
        except RequestError as end:
            raise failure_of_draft(end.message, placed, _HEADS) from None
        finally:
            self._log.facts = facts

    def _read_model(self) -> int:
        parameters = ModelParameters(
            self._engine, self._load.parameters, self._devices, self._load.context, dry=False, mtp=wants_mtp(self._load)
        )
        # The callback is the only way to end a load: llama.cpp frees everything if it returns False.
        parameters.report_progress_to(self._engine.low.llama_progress_callback(self._on_read))
        # A stop that came before the native call is not seen until its first callback, which may take long.
        self._check_stop()
        model = self._engine.low.llama_model_load_from_file(self._load.path.encode(), parameters.struct)
        if model:
            self._members.weights_done()
            return int(model)
        if self._stop.requested:
            raise RequestError(Stopped(stage=self._reporter.stage))
        self._raise_allocation_failure(self._placed_before_weights())
        raise RequestError(model_failure(self._load.path, self._log.facts))

    def _on_read(self, fraction: float, _data: object) -> bool:
        # llama.cpp allocates all buffers before it reads: the first call ends the stage "allocate".
        if self._reporter.stage == "allocate":
            self._reporter.enter("read", 0.0)
        self._reporter.advance(min(1.0, max(0.0, fraction)))
        return not self._stop.requested

    def _load_side_files(self, model: int) -> LoadedSideFiles:
        placed = self._placed_before_context(model) if self._load.adapters or self._load.projector else ()
        return self._side_file_loader.load(self._load, model, placed)

    def _make_context(self, model: int, side_files: LoadedSideFiles | None, context_type: int = 0) -> int:
        self._check_stop()
        self._reporter.enter("context")
        self._log.on_buffer = self._on_buffer
        struct = context_struct(self._engine, self._load.context, self._stop)
        struct.ctx_type = context_type
        context = self._engine.low.llama_init_from_model(model, struct)
        self._log.on_buffer = None
        if context:
            return int(context)
        self._check_stop()
        parts = () if side_files is None else side_files.parts
        self._raise_allocation_failure((*self._placed_before_context(model), *parts))
        raise RequestError(context_failure(self._load.context.n_ctx, self._log.facts))

    def _on_buffer(self, buffer: LoggedBuffer) -> None:
        self._members.note(buffer)
        self._reporter.name_device(self._devices.id_of_buffer_name(buffer.buffer_type))

    def _end_refused(self, device: str, requested_bytes: int) -> None:
        """Report that a device of a tensor split refused memory, and exit the process.

        If the process continued, llama.cpp would abort with an assertion.
        """
        buffer_type = self._engine.buffer_type_name(self._engine.device_buffer_type(self._devices.by_id[device]))
        self._reporter.send_final(
            AllocationFailure(
                stage=self._reporter.stage,
                device=device,
                buffer_type=buffer_type,
                requested_bytes=requested_bytes,
                free_bytes=self._devices.free_bytes(device),
                parts=self._members.placed(),
                text=f"failed to allocate {buffer_type} buffer of size {requested_bytes}",
            )
        )
        # From a native callback there is no way to end the load with an exception.
        os._exit(1)

    def _describe(self, loaded: LoadedContext) -> LoadedModel:
        facts = self._log.facts
        names = {name: self._devices.id_of_name(name) for name in self._logged_names()}
        return LoadedModel(
            parts=self._members.split(loaded.parts()),
            n_ctx=int(self._engine.low.llama_n_ctx(loaded.context)),
            n_ctx_seq=loaded.context_tokens,
            slots=max(1, self._load.context.n_seq_max),
            n_vocab=loaded.vocabulary_size,
            flash_attention=facts.flash_attention,
            chat_template=bool(self._engine.low.llama_model_chat_template(loaded.model, None)),
            layer_devices=tuple(names[name] for _, name in sorted(facts.layer_devices.items())),
            kv_devices=tuple((layer, names[name]) for layer, name in sorted(facts.cache_devices.items())),
            sent=self._sent,
        )

    def _logged_names(self) -> set[str]:
        return {*self._log.facts.layer_devices.values(), *self._log.facts.cache_devices.values()}

    def _check_stop(self) -> None:
        if self._stop.requested:
            raise RequestError(Stopped(stage=self._reporter.stage))

    def _raise_allocation_failure(self, parts: tuple[BufferMemory, ...]) -> None:
        failed = allocation_failure(self._devices, self._log.facts, self._free, self._reporter.stage, parts)
        if failed is not None:
            raise RequestError(failed)

    def _placed_before_weights(self) -> tuple[BufferMemory, ...]:
        """Return the weight buffers that were allocated before an allocation failed; empty if none failed.

        The sizes come from a load without allocation (`no_alloc`), because llama.cpp logs them only after the last
        allocation. llama.cpp allocates the buffers in the order of the names of their types. So the buffers with names
        before that of the failed one were allocated.
        """
        # llama_model_loader::ctx_map is a std::map ordered by ggml_backend_buft_comparator, which compares names.
        failed = self._log.facts.failed
        if not failed:
            return ()
        sizes = dry_weights(self._engine, self._devices, self._load)
        names = {self._engine.buffer_type_name(key): size for key, size in sizes.items()}
        mapping = self._load.context.load_mode in MAPPING_MODES
        return tuple(
            BufferMemory(
                device=self._devices.id_of_buffer_name(name),
                buffer_type=name,
                weights_bytes=size.model_bytes,
                mapped=mapping and name == PLAIN_HOST_BUFFER,
            )
            for name, size in sorted(names.items())
            if name < failed[-1].buffer_type and size.model_bytes
        )

    def _placed_before_context(self, model: int) -> tuple[BufferMemory, ...]:
        vocabulary = self._engine.low.llama_model_get_vocab(model)
        rows = max(1, self._load.context.n_seq_max)
        output_bytes = output_buffer_bytes(self._engine.low.llama_vocab_n_tokens(vocabulary), rows)
        weights = breakdown.model_bytes(self._engine, model)
        return logged_buffers(self._devices, self._log.facts, weights, output_bytes)


def dry_weights(engine: Bindings, devices: ResolvedDevices, load: Load) -> dict[int, breakdown.BufferBytes]:
    """Return the bytes of weights in each buffer type, from a dry load (`no_alloc`); empty if the dry load fails."""
    parameters = ModelParameters(engine, load.parameters, devices, load.context, dry=True, mtp=wants_mtp(load))
    model = engine.low.llama_model_load_from_file(load.path.encode(), parameters.struct)
    if not model:
        return {}
    try:
        return breakdown.model_bytes(engine, model) or {}
    finally:
        engine.low.llama_model_free(model)


def wanted_devices(request: Load | Probe) -> tuple[str, ...]:
    """Return the ids of all devices that a request uses."""
    projector = () if request.projector is None else (request.projector.device,)
    draft = draft_load(request) if isinstance(request, Load) else None
    further = () if draft is None else wanted_devices(draft)
    overrides = (override.device for override in request.parameters.overrides)
    return (*request.parameters.devices, *overrides, *projector, *further)


def check_file(path: str) -> None:
    """Raise `RequestError` if the model's file is missing, cannot be read, or is not a regular file."""
    try:
        # Before opening: to open a named pipe waits until somebody writes to it.
        if not Path(path).is_file() and Path(path).exists():
            raise failure("model_file", f"{Path(path).name} is not a regular file; choose the .gguf file itself.")
        with Path(path).open("rb"):
            return
    except OSError as error:
        raise failure("model_file", f"{Path(path).name}: {error.strerror or error}.") from None
