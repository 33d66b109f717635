"""Memory of all layouts of one model: tables that are made once, and estimates that are fast enough for mouse drags.

`ModelMemory` is the class that other packages use. It reads the hyper-parameters (`hyper_parameters`) and has tables of
weights (`weights`). For each set of context settings it has tables of state and compute buffers (`ContextMemory`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from engine.base.errors import CancelledError
from engine.base.language import tr
from engine.base.texts import quote
from engine.devices.device import CPU_ID, Rig
from engine.model.architectures.record import Architecture
from engine.model.architectures.registry import find_architecture
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.engine_parameters import split_members
from engine.planning.layout.layout import Layout
from engine.planning.layout.row_mode import ROW_BACKENDS
from engine.planning.memory.backends import SizeRule
from engine.planning.memory.context_memory import ContextMemory
from engine.planning.memory.cuda_pools import PoolBytes
from engine.planning.memory.estimate import DeviceMemory, Grade, MemoryEstimate, MemoryKind
from engine.planning.memory.hyper_parameters import (
    HyperParameters,
    MissingNumberError,
    count_skipped_blocks,
    read_state,
)
from engine.planning.memory.mtp import MtpMemory, hidden_bytes, mtp_error
from engine.planning.memory.placement import Placement, place
from engine.planning.memory.tensor_split import MemberTables, member_rules
from engine.planning.memory.tensors import OverrideMatches
from engine.planning.memory.weights import WeightTables
from engine.planning.memory.work_limit import TooMuchWorkError, limited
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.settings.table import SETTINGS

if TYPE_CHECKING:
    from engine.planning.memory.compute_graph.building.graph_tables import GraphTables
    from engine.planning.memory.compute_graph.forecast import ComputeForecast
    from engine.planning.memory.compute_graph.ggml.allocator import Size

FORECAST_SECONDS = 10.0
"""Default limit for computing the compute buffers of one layout, in seconds of processor time."""
UNFORESEEN = (LookupError, ArithmeticError, ValueError, TypeError, AttributeError, AssertionError, RecursionError,
              MemoryError)  # fmt: skip
"""Exceptions that the arithmetic may raise for a malformed header, such as a missing tensor."""
_UNFORESEEN = tr("the header of the model file is not supported")
_ENDLESS = tr("the compute graph of the model is too large for a forecast in the available time")
_log = logging.getLogger("layerdeck.memory")
_Answer = TypeVar("_Answer")

MOST_TABLES = 12
"""Number of sets of context settings for which tables of state and compute buffers (`ContextMemory`) are cached.

If the context length is "auto", lengths from 262,144 down to 256 are tried, each half of the one before: 11 lengths.
"""
FEW_TABLES = 4
"""Number of sets of context settings for which a search with a fixed context length caches `ContextMemory` tables.

Such a search tries many settings; each table is used for a short time, and needs half a megabyte even for a small
model.
"""
_OF_PLACEMENT = ("op_offload", "op_offload_min_batch")
"""Context settings that only the graph's scheduler uses. They are in `Placement`, so tables do not depend on them."""
_DECIDING = tuple(
    setting.key for setting in SETTINGS if setting.effect == "context" and setting.key not in _OF_PLACEMENT
)
_EVERYTHING: tuple[MemoryKind, ...] = ("weights", "state", "compute")


class ModelMemory:
    """Memory of all layouts of one model.

    Create one object for each open model and reuse it, because it caches the tables that make estimates fast.

    `probe_only`: sentence on why a probe (a load without allocation) is needed; None if everything can be computed.
    `unknown`: parts that cannot be computed.
    `most_tables`: number of sets of context settings for which tables are cached.
    Only one thread may use an object at a time.
    """

    def __init__(self, model: ModelFile, most_tables: int = MOST_TABLES) -> None:
        self.model = model
        self._most_tables = most_tables
        homes = OverrideMatches(model)
        self.weights = WeightTables(model, find_architecture(model.architecture), count_skipped_blocks(model), homes)
        self.probe_only: str | None = None
        self.unknown: tuple[MemoryKind, ...] = ()
        self._state: tuple[HyperParameters, Architecture] | None = None
        self._graphs: GraphTables | None = None
        self._last: tuple[ContextSettings, ContextMemory] | None = None
        self._tables: dict[tuple[object, ...], ContextMemory] = {}
        self._last_members: tuple[tuple[tuple[float, ...], tuple[SizeRule, ...]], MemberTables] | None = None
        self._second_model: ModelMemory | None = None
        self._homes = homes
        self._weights_with_mtp: WeightTables | None = None
        self._mtp: MtpMemory | None = None
        try:
            self._state = read_state(model)
        except MissingNumberError as error:
            self._give_up_state(str(error))
            return
        except UNFORESEEN:
            _log.info("the arithmetic cannot read the numbers of %s", quote(model.name), exc_info=True)
            self._give_up_state(_UNFORESEEN)
            return
        # Imported here: the graph builders are a third of what the window imports, and it starts without a model.
        from engine.planning.memory.compute_graph.building.graph_tables import GraphTables

        try:
            with limited(FORECAST_SECONDS):
                self._graphs = GraphTables(model, *self._state, homes)
        except MissingNumberError as error:
            self._give_up_compute(str(error))
        except TooMuchWorkError:
            self._give_up_compute(_ENDLESS)
        except UNFORESEEN:
            _log.info("the arithmetic cannot make graphs of %s", quote(model.name), exc_info=True)
            self._give_up_compute(_UNFORESEEN)

    def _give_up_state(self, reason: str) -> None:
        self.probe_only = tr(
            "{reason}; KV cache and compute buffers are known only after a probe (a load without allocation)",
            reason=reason,
        )
        self.unknown = ("state", "compute")

    def _give_up_compute(self, reason: str) -> None:
        """Stop estimating compute buffers for this model, because each further attempt would fail in the same way.

        Only a probe (a load without allocation) can then find their sizes. `reason`: why the computation failed.
        """
        self.probe_only = tr(
            "{reason}; compute buffers are known only after a probe (a load without allocation)", reason=reason
        )
        self.unknown = ("compute",)
        self._graphs = None
        self._tables.clear()
        self._last = None

    def for_context(self, context: ContextSettings) -> ContextMemory | None:
        """Return the `ContextMemory` (state and compute buffers) for these settings; None if the state cannot be
        computed.

        The results of the latest settings are cached.
        """
        if self._state is None:
            return None
        last = self._last
        # A drag comes with the same object again and again. Comparing identities is quicker than hashing all fields.
        if last is not None and last[0] is context:
            return last[1]
        key = _deciding_fields(context)
        try:
            # Taken out here and put in again below, so that the dict is in order of use and its first key is the
            # oldest.
            tables = self._tables.pop(key, None) or ContextMemory(*self._state, self._graphs, context)
        except UNFORESEEN:
            _log.info("the arithmetic cannot tell the state of %s", quote(self.model.name), exc_info=True)
            self._state = None
            self._give_up_state(_UNFORESEEN)
            return None
        self._tables[key] = tables
        while len(self._tables) > self._most_tables:
            del self._tables[next(iter(self._tables))]
        self._last = (context, tables)
        return tables

    def of_draft(self, model: ModelFile) -> ModelMemory:
        """Return the `ModelMemory` of a draft model.

        The latest one is cached. It may be used only in the thread that uses this object.
        """
        if self._second_model is None or self._second_model.model is not model:
            self._second_model = ModelMemory(model, FEW_TABLES)
        return self._second_model

    def mtp_estimate(self, layout: Layout, context: ContextSettings, rig: Rig) -> MemoryEstimate | None:
        """Return the memory of the context of the model's MTP heads.

        The weights of the heads are not included; `estimate` counts them if `mtp` is set. None if the heads cannot
        draft, or if the layout is not in mode layer or is for another number of layers.
        """
        if self._state is None or mtp_error(self.model) or layout.split_mode != "layer":
            return None
        if layout.n_layers != self.model.n_layers:
            return None
        try:
            with limited(FORECAST_SECONDS):
                if self._mtp is None:
                    self._mtp = MtpMemory(self.model, self._state)
                return self._mtp.estimate(layout, context, rig)
        except MissingNumberError as error:
            return _nothing_known(
                rig, tr("{error}; the memory is known only after a probe (a load without allocation)", error=error)
            )
        except (TooMuchWorkError, *UNFORESEEN):
            _log.info("the arithmetic cannot tell the MTP heads of %s", quote(self.model.name), exc_info=True)
            return _nothing_known(
                rig,
                tr("{reason}; the memory is known only after a probe (a load without allocation)", reason=_UNFORESEEN),
            )

    def _weights_of(self, *, mtp: bool) -> WeightTables:
        """Return the tables of weights. `mtp`: whether MTP heads are loaded."""
        if not mtp:
            return self.weights
        if self._weights_with_mtp is None:
            architecture = find_architecture(self.model.architecture)
            self._weights_with_mtp = WeightTables(self.model, architecture, 0, self._homes)
        return self._weights_with_mtp

    def _refusal(self, layout: Layout, rig: Rig) -> str | None:
        """Return a sentence on why no memory can be computed for `layout`; None if at least a part can."""
        n_layers = self.model.n_layers
        if layout.n_layers != n_layers:
            return tr(
                "the layout is for {layout_layers} layers, but the model has {model_layers}",
                layout_layers=layout.n_layers,
                model_layers=n_layers,
            )
        if layout.split_mode == "row" and not _knows_rows(layout, rig):
            return tr("memory of split mode row is known only after a probe (a load without allocation)")
        if layout.split_mode == "tensor" and self._state is None:
            return self.probe_only
        return None

    def estimate(
        self,
        layout: Layout,
        context: ContextSettings,
        rig: Rig,
        *,
        with_compute: bool = True,
        n_drafted: int = 0,
        mtp: bool = False,
    ) -> MemoryEstimate:
        """Return the memory of `layout` on every device of `rig`.

        `with_compute`: whether compute buffers are computed; without them the estimate is much faster.
        `n_drafted`: largest number of tokens that are drafted for one step. A batch has an output row for each of them.
        `mtp`: whether MTP heads are loaded; the output buffer then has a hidden state for each token of a batch.
        """
        mtp = mtp and not mtp_error(self.model)
        refusal = self._refusal(layout, rig)
        if refusal is not None:
            return _nothing_known(rig, refusal)
        placement = place(layout, rig, context)
        tables = self.for_context(context)
        try:
            members = self._member_tables(placement)
            on_device, host = self._weights_of(mtp=mtp).split(placement, members)
            kv, recurrent = tables.state_bytes(placement, members) if tables else ({}, {})
        except MissingNumberError as error:
            return _nothing_known(
                rig, tr("{error}; the memory is known only after a probe (a load without allocation)", error=error)
            )
        except UNFORESEEN:
            _log.info("the arithmetic cannot place %s", quote(self.model.name), exc_info=True)
            return _nothing_known(
                rig,
                tr("{reason}; the memory is known only after a probe (a load without allocation)", reason=_UNFORESEEN),
            )
        compute: Mapping[str, Size] = {}
        if tables is not None and tables.compute is not None and with_compute:
            compute = self._forecast(lambda forecast: forecast.device_sizes(placement), tables.compute) or {}
        n_outputs = tables.n_outputs(n_drafted) if tables else 0
        rows_bytes = tables.output_bytes(n_outputs) if tables else 0
        if tables and mtp:
            rows_bytes += hidden_bytes(tables.hyper, tables.shape.n_batch)
        pool_bytes = (
            {}
            if tables is None
            else self._pool_bytes(tables, placement, members, with_compute=bool(compute), n_outputs=n_outputs)
        )
        return MemoryEstimate(
            devices={
                device_id: DeviceMemory(
                    # The system can reclaim mapped pages, so only committed memory is part of the host's need.
                    weights_bytes=host.committed_bytes if device_id == CPU_ID else on_device.get(device_id, 0),
                    mapped_bytes=host.mapped_bytes if device_id == CPU_ID else 0,
                    kv_cache_bytes=kv.get(device_id, 0),
                    recurrent_bytes=recurrent.get(device_id, 0),
                    compute_bytes=compute[device_id].size_bytes if device_id in compute else 0,
                    output_bytes=rows_bytes if device_id == CPU_ID else 0,
                    overhead_bytes=placement.traits[device_id].overhead_bytes if device_id in placement.entries else 0,
                    pipeline_bytes=compute[device_id].pipeline_bytes if device_id in compute else 0,
                    answering_bytes=pool_bytes[device_id].total_bytes if device_id in pool_bytes else 0,
                    late_bytes=pool_bytes[device_id].late_bytes if device_id in pool_bytes else 0,
                )
                for device_id in rig.ids
            },
            grade=Grade.ESTIMATED,
            probe_only=self.probe_only,
            unknown=self.unknown,
        )

    def _pool_bytes(
        self,
        tables: ContextMemory,
        placement: Placement,
        members: MemberTables | None,
        *,
        with_compute: bool,
        n_outputs: int,
    ) -> dict[str, PoolBytes]:
        """Return the bytes that devices allocate during generation, by device id; empty if they cannot be computed."""
        # The graph has just been computed, so whether flash attention suits is known.
        flash: bool | None = tables.flash_attention != "off"
        if flash and with_compute and tables.compute is not None:
            flash = self._forecast(lambda forecast: forecast.uses_flash_attention(placement), tables.compute)
        try:
            found = tables.pools(self.model).of(placement, members, flash=flash is not False, n_outputs=n_outputs)
        except UNFORESEEN:
            _log.info("the arithmetic cannot tell the pools of %s", quote(self.model.name), exc_info=True)
            return {}
        grown: dict[str, int] = {}
        if with_compute and tables.compute is not None:
            grown = self._forecast(lambda forecast: forecast.grown_bytes(placement), tables.compute) or {}
        for device, size_bytes in grown.items():
            before = found.get(device, PoolBytes())
            found[device] = PoolBytes(before.total_bytes + size_bytes, before.late_bytes + size_bytes)
        return found

    def uses_flash_attention(self, layout: Layout, context: ContextSettings, rig: Rig) -> bool | None:
        """Return whether llama.cpp will use flash attention; None if that cannot be computed."""
        tables = self.for_context(context)
        if tables is None or tables.compute is None:
            return None
        placement = place(layout, rig, context)
        return self._forecast(lambda forecast: forecast.uses_flash_attention(placement), tables.compute)

    def _forecast(self, ask: Callable[[ComputeForecast], _Answer], forecast: ComputeForecast) -> _Answer | None:
        """Return a result of the forecast of compute buffers; None if it takes too long or fails.

        After a failure, this object computes no more compute buffers. Only a probe (a load without allocation) can then
        find their sizes.

        `ask`: function that computes the result from `forecast`.
        """
        try:
            with limited(FORECAST_SECONDS):
                return ask(forecast)
        except TooMuchWorkError:
            self._give_up_compute(_ENDLESS)
        except UNFORESEEN:
            _log.info("the arithmetic cannot run %s", quote(self.model.name), exc_info=True)
            self._give_up_compute(_UNFORESEEN)
        except CancelledError:
            # Cancelled in the middle of an update, so the tables may be inconsistent.
            self._tables.clear()
            self._last = None
            raise
        return None

    def _member_tables(self, placement: Placement) -> MemberTables | None:
        """Return the tables of tensor slices for split mode tensor; None in other modes. The latest result is cached.

        Raises:
            MissingNumberError: the rig lacks a device that has a share.
        """
        if not placement.shares or self._state is None:
            return None
        rules = member_rules(placement)
        if rules is None:
            raise MissingNumberError(tr("a device with a share of the model is not available"))
        key = (placement.shares, rules)
        if self._last_members is None or self._last_members[0] != key:
            tables = MemberTables(self.model, self._state[0], placement.shares, rules)
            self._last_members = (key, tables)
        return self._last_members[1]


def _knows_rows(layout: Layout, rig: Rig) -> bool:
    """Return whether the sizes of split buffers (split mode row) can be computed for all devices with a share."""
    members = [rig.device(device_id) for device_id in split_members(layout)]
    return all(device is not None and device.backend in ROW_BACKENDS for device in members)


def _deciding_fields(context: ContextSettings) -> tuple[object, ...]:
    """Return the settings on which the sizes of KV caches and graphs depend, as a key for cached tables."""
    return tuple(getattr(context, key) for key in _DECIDING)


def _nothing_known(rig: Rig, reason: str | None) -> MemoryEstimate:
    nothing = {device_id: DeviceMemory() for device_id in rig.ids}
    return MemoryEstimate(nothing, Grade.ESTIMATED, reason, _EVERYTHING)
