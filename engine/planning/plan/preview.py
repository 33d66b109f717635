"""`Preview`: the numbers of a plan that the window draws, and `LoadedLayout`, the layout that is loaded now.

All bars and warnings of the window show values of one `Preview`. Each step of a drag makes a new one by `make_preview`.
That is fast because `PreviewCache` were computed when the model was opened.
"""

from __future__ import annotations

from functools import cached_property

from msgspec import Struct

from engine.devices.device import Rig
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.engine_parameters import leading_cpu_layers
from engine.planning.layout.layout import Layout
from engine.planning.layout.parts import EMBEDDING, ties_embedding
from engine.planning.memory.backends import HOST_RULE
from engine.planning.memory.drafts import uses_mtp
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.mtp import mtp_error
from engine.planning.plan.edit import Edit
from engine.planning.plan.placement_check import DeviceDifference
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import DeviceRow, FitReport
from engine.planning.plan.slices import Slices, layer_slices
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.prediction import CostModel, LastAnswer, SpeedForecast, anchored
from engine.planning.speed.speeds import NO_MEASUREMENTS, HopCosts, Sending, Speeds, hop_costs, sendings
from engine.planning.speed.work import TokenWork


class LayerBytes(Struct, frozen=True):
    """Bytes of one layer as drawn in the layout editor: weights by part, and KV cache or recurrent state."""

    index: int
    attention_bytes: int
    ffn_bytes: int
    expert_bytes: int
    other_bytes: int
    kv_bytes: int

    @property
    def weights_bytes(self) -> int:
        return self.attention_bytes + self.ffn_bytes + self.expert_bytes + self.other_bytes


class DraftBlock(Struct, frozen=True):
    """The draft model or the MTP heads as drawn in the layout editor.

    `name`: file name of the draft model; empty for MTP heads.
    `devices`: ids of the devices.
    `n_tokens`: largest number of tokens that are drafted for one step.
    `size_bytes`: weights, KV cache and buffers on all devices. Mapped weights are not included, nor are the weights of
    MTP heads, which are a layer of the model.
    """

    name: str
    devices: tuple[str, ...]
    n_tokens: int
    size_bytes: int


class Preview(Struct, frozen=True):
    """The numbers that the window draws for an edit on a rig.

    `rig`: the devices.
    `edit`: layout, settings and side files.
    `layers`: bytes of each layer.
    `report`: memory forecast of each device.
    `speed`: predicted speed of answers; None if the edit does not fit, or if the speed cannot be predicted. If the
    model has given an answer, the prediction is scaled by the measured speed of that answer (`anchored`), and is for
    the same number of tokens in the context. So it agrees with the speed that the user has just seen.
    `answered_per_second`: tokens per second of the last answer with this edit; None before the first one.
    `usual_speed`: predicted speed for the default number of tokens in the context (`usual_fill`); None if `speed` is
    for that number.
    `sendings`: bytes of weights that a load sends to each RPC worker; only for workers whose link was measured.
    `embedding_moves`: whether the token embedding can be put on a device; it cannot if the output layer uses it too.
    `slices`: parts of each layer on the devices of modes tensor and row; None in other modes.
    `hops`: seconds for passing a token's hidden state from device to device; None if unknown.
    `draft`: the draft model or the MTP heads; None if there are none.
    """

    model_name: str
    rig: Rig
    edit: Edit
    layers: tuple[LayerBytes, ...]
    token_embedding_bytes: int
    output_weights_bytes: int
    report: FitReport
    speed: SpeedForecast | None = None
    answered_per_second: float | None = None
    usual_speed: SpeedForecast | None = None
    sendings: tuple[Sending, ...] = ()
    embedding_moves: bool = False
    slices: Slices | None = None
    hops: HopCosts | None = None
    draft: DraftBlock | None = None

    @property
    def layout(self) -> Layout:
        return self.edit.layout

    @property
    def context(self) -> ContextSettings:
        return self.edit.context


class LoadedLayout(Struct, frozen=True):
    """The layout of the loaded model.

    `edit`: layout and settings that the user requested.
    `measured`: memory of each device after the load.
    `forecast`: memory of each device that was forecast before the load.
    `used`: settings that the load used; None if unknown.
    `flash_attention`: whether llama.cpp uses flash attention; None if it did not report that.
    `elsewhere`: layers and caches that are on another device than in the layout.
    """

    edit: Edit
    measured: tuple[DeviceRow, ...]
    forecast: tuple[DeviceRow, ...]
    used: ContextSettings | None = None
    flash_attention: bool | None = None
    elsewhere: tuple[DeviceDifference, ...] = ()

    def differs_from(self, edit: Edit) -> bool:
        """Return whether `edit` has another layout, other settings or other side files than the loaded edit."""
        return self.edit != edit


class MeasuredAnswer(Struct, frozen=True):
    """The measured speed of a model's last answer, and the layout and settings with which it was given."""

    edit: Edit
    answer: LastAnswer


class PreviewCache:
    """Values of an opened model that do not change while layers are dragged in the editor; all its previews use them.

    Only one thread may use an object at a time.
    """

    def __init__(self, model: ModelFile | ModelMemory) -> None:
        self.memory = model if isinstance(model, ModelMemory) else ModelMemory(model)
        self._last: tuple[ContextSettings, tuple[LayerBytes, ...]] | None = None
        self._last_slices: tuple[tuple[object, ...], Slices | None] | None = None
        self._answered: tuple[MeasuredAnswer, Rig, Speeds, SpeedForecast | None] | None = None

    @cached_property
    def work(self) -> TokenWork:
        """Bytes that are read and operations that are computed for one token, in each layer."""
        return TokenWork(self.memory.model)

    @cached_property
    def embedding_moves(self) -> bool:
        """Whether the token embedding can be put on a device of its own. It cannot if the output layer uses it."""
        model = self.memory.model
        return any(each.name == EMBEDDING for each in model.global_tensors) and not ties_embedding(model)

    def answered_speed(self, plan: Plan, speeds: Speeds, answered: MeasuredAnswer) -> SpeedForecast | None:
        """Return the predicted speed for the layout and settings with which the answer `answered` was given.

        The caller compares this prediction with the measured speed of the answer. None if that layout cannot be loaded
        on the devices of `plan`, or if its memory cannot be computed. The last result is cached, because it does not
        change while layers are dragged in the editor.
        """
        known, answer = self._answered, answered.answer
        if known is None or known[0] != answered or known[1].ids != plan.rig.ids or known[2] is not speeds:
            there = Plan(self.memory, plan.rig, answered.edit)
            found = plan_speed(self.work, there, speeds, answer.fill_tokens, answer.prompt_tokens)
            self._answered = known = (answered, plan.rig, speeds, found)
        return known[3]

    def slices(self, plan: Plan) -> Slices | None:
        """Return the parts of each layer by device for a layout of mode tensor or row; None in other modes.

        The last result is cached until shares or settings change.
        """
        layout = plan.edit.layout
        if layout.split_mode not in ("tensor", "row"):
            return None
        key = (layout.split_mode, layout.tensor_split, leading_cpu_layers(layout))
        if self._last_slices is None or self._last_slices[0] != key:
            tables = self.memory.for_context(plan.settings)
            found = layer_slices(layout, self.memory.model, None if tables is None else tables.hyper)
            self._last_slices = (key, found)
        return self._last_slices[1]

    def layers(self, context: ContextSettings) -> tuple[LayerBytes, ...]:
        """Return the bytes of each layer: weights, and KV cache or recurrent state for these settings.

        The last result is cached, because settings do not change while layers are dragged.
        """
        if self._last is None or self._last[0] != context:
            self._last = (context, _layers(self.memory, context))
        return self._last[1]


def cost_model(work: TokenWork, plan: Plan, speeds: Speeds) -> CostModel | None:
    """Return the object that predicts the speed of layouts on the rig and with the settings of `plan`.

    None if the plan breaks a rule or its memory cannot be computed.
    `work`: bytes read and operations computed for one token, by layer of the plan's model.
    """
    # A layout that cannot be loaded has no speed, and the cost model relies on valid runs and shares.
    tables = None if plan.violations else plan.memory.for_context(plan.settings)
    return None if tables is None else CostModel(work, plan.rig, plan.settings, tables, speeds)


def plan_speed(
    work: TokenWork, plan: Plan, speeds: Speeds, fill_tokens: int | None = None, prompt_tokens: int = 0
) -> SpeedForecast | None:
    """Return the predicted speed of answers; None if `plan` breaks a rule or its memory cannot be computed.

    `work`: bytes read and operations computed for one token, by layer of the plan's model.
    `fill_tokens`: number of tokens in the context; None for the default (`usual_fill`).
    `prompt_tokens`: length in tokens of a prompt whose speed is predicted as well; 0: as long as `fill_tokens`.
    """
    costs = cost_model(work, plan, speeds)
    return None if costs is None else costs.answer(plan.edit.layout, fill_tokens, prompt_tokens)


def plan_prompt(work: TokenWork, plan: Plan, speeds: Speeds, n_tokens: int) -> SpeedForecast | None:
    """Return the predicted speed of a prompt of `n_tokens` tokens.

    None if `plan` breaks a rule or its memory cannot be computed.
    `work`: bytes read and operations computed for one token, by layer of the plan's model.
    """
    costs = cost_model(work, plan, speeds)
    return None if costs is None else costs.prompt(plan.edit.layout, n_tokens)


def plan_sendings(plan: Plan, speeds: Speeds) -> tuple[Sending, ...]:
    """Return the bytes of weights that a load of `plan` sends to each RPC worker, and the seconds for sending them."""
    return sendings({row.id: row.weights_bytes for row in plan.report.rows}, plan.rig, speeds)


def make_preview(
    tables: PreviewCache, plan: Plan, speeds: Speeds = NO_MEASUREMENTS, answered: MeasuredAnswer | None = None
) -> Preview:
    """Return the preview of `plan`.

    `tables`: the tables of the plan's model.
    `speeds`: measured speeds of the devices.
    `answered`: last answer of the model with the layout and settings of `plan`, else with others; None if there was no
    answer yet.
    """
    usual = plan_speed(tables.work, plan, speeds) if plan.report.fits else None
    speed = usual
    if usual is not None and answered is not None:
        usual, speed = _anchored_speeds(tables, plan, speeds, answered, usual)
    same = answered is not None and answered.edit == plan.edit
    return Preview(
        model_name=plan.model.name,
        rig=plan.rig,
        edit=plan.edit,
        layers=tables.layers(plan.settings),
        token_embedding_bytes=plan.memory.weights.token_embedding_bytes,
        output_weights_bytes=plan.memory.weights.output_bytes(HOST_RULE),
        report=plan.report,
        # A layout that does not fit has no speed: "short 30 GiB" and "49 tokens/s" side by side help nobody.
        speed=speed,
        answered_per_second=answered.answer.tokens_per_second if answered is not None and same else None,
        usual_speed=usual if usual is not None and speed is not None and usual.n_tokens != speed.n_tokens else None,
        sendings=plan_sendings(plan, speeds),
        embedding_moves=tables.embedding_moves,
        slices=tables.slices(plan),
        hops=hop_costs(tables.work.hop_bytes, plan.rig, speeds),
        draft=_draft_block(plan),
    )


def _anchored_speeds(
    tables: PreviewCache, plan: Plan, speeds: Speeds, answered: MeasuredAnswer, usual: SpeedForecast
) -> tuple[SpeedForecast, SpeedForecast]:
    """Return two predictions for `plan`, both scaled by the measured speed of the answer `answered`.

    The first is `usual`, a prediction for the default number of tokens in the context (`usual_fill`). The second is for
    as many tokens in the context as the answer had.
    """
    answer = answered.answer
    fill_tokens = min(answer.fill_tokens, plan.settings.n_ctx_each)
    here = plan_speed(tables.work, plan, speeds, fill_tokens, answer.prompt_tokens)
    there = here if answered.edit == plan.edit else tables.answered_speed(plan, speeds, answered)
    if here is None or there is None:
        return usual, usual
    return anchored(usual, there, answer), anchored(here, there, answer)


def _draft_block(plan: Plan) -> DraftBlock | None:
    draft = plan.edit.side_files.draft
    size_bytes = sum(row.draft_bytes for row in plan.report.rows)
    if uses_mtp(draft) and draft is not None and not mtp_error(plan.model):
        return DraftBlock("", plan.edit.layout.assignment()[-1:], draft.n_tokens, size_bytes)
    if draft is None or draft.path is None:
        return None
    return DraftBlock(draft.path.name, plan.draft_devices, draft.n_tokens, size_bytes)


def _layers(memory: ModelMemory, context: ContextSettings) -> tuple[LayerBytes, ...]:
    tables = memory.for_context(context)
    blocks = memory.model.blocks
    kv_bytes = tables.layers_kv_bytes if tables is not None else (0,) * len(blocks)
    return tuple(
        LayerBytes(
            index=block.index,
            attention_bytes=block.attention_bytes,
            ffn_bytes=block.ffn_bytes,
            expert_bytes=block.expert_bytes,
            other_bytes=block.other_bytes,
            kv_bytes=layer_kv_bytes,
        )
        for block, layer_kv_bytes in zip(blocks, kv_bytes, strict=True)
    )
