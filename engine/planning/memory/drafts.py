"""`Draft`: the source of drafted tokens for speculative decoding, and the memory of a draft model.

A draft model is a second model in the same child process, with its own devices, cache types and context. The main model
checks the drafted tokens in one batch, which needs an output row for each of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from engine.base.errors import ModelFileError
from engine.base.language import tr
from engine.base.texts import quote
from engine.base.values import ComparedWithout, replace
from engine.model.gguf.model_file import FileIdentity, ModelFile, identify
from engine.model.gguf.reader import read_model
from engine.model.gguf.vocabulary import vocabulary_mismatch
from engine.planning.layout.layout import Layout
from engine.planning.layout.layout_file import DRAFT_SETTINGS, FOLLOWING, DraftEntry, DraftKind
from engine.planning.memory.estimate import DeviceMemory, MemoryEstimate
from engine.planning.memory.hyper_parameters import MissingNumberError, read_state
from engine.planning.settings.context_settings import AUTO_CONTEXT, ContextSettings
from engine.planning.settings.table import DRAFTED_TOKENS, for_draft_model


class Draft(ComparedWithout, frozen=True):
    """The source of drafted tokens for speculative decoding.

    `kind`: "ngram" (repeats of the text itself), "model" (a draft model) or "mtp" (MTP heads of the main model).
    `n_tokens`: largest number of tokens that are drafted for one step.
    `model`: the draft model; None for other kinds.
    `files`: identity of the draft model's files, by which drafts are compared.
    `layout`: devices of the draft model; None if the program chooses one device.
    `context`: the draft model's own settings (`DRAFT_SETTINGS`). Its context length is in tokens for one request;
    `AUTO_CONTEXT` for the length of the main model.
    """

    # `files` stands for it: else metadata and tensors would be compared.
    not_compared: ClassVar[str] = "model"
    kind: DraftKind
    n_tokens: int = DRAFTED_TOKENS
    model: ModelFile | None = None
    files: FileIdentity | None = None
    layout: Layout | None = None
    context: ContextSettings = FOLLOWING

    @property
    def path(self) -> Path | None:
        """Path of the draft model; None if tokens are drafted without a draft model."""
        return None if self.model is None else self.model.paths[0]


def read_draft(path: Path, model: ModelFile, n_tokens: int = DRAFTED_TOKENS) -> Draft:
    """Read the header of a draft model, compare its vocabulary with that of `model`, and return the draft.

    Both files are read, so this must not be called in the GUI thread.

    Raises:
        ModelFileError: the file is no model, writes no text, has recurrent state, or its vocabulary differs.
    """
    found = read_model(path)
    if found.metadata.get("general.type") == "mmproj" or found.architecture == "clip":
        raise ModelFileError(path, tr("is a projector, not a draft model. Choose a small text model"))
    if not drafts_for(found):
        raise ModelFileError(
            path,
            tr("is a model ({architecture}) that writes no text, so it cannot draft. Choose a small text model",
               architecture=quote(found.architecture)),
        )  # fmt: skip
    if _keeps_state(found):
        raise ModelFileError(
            path,
            tr("has recurrent state, from which rejected tokens cannot be removed. Choose another draft model"),
        )
    fault = vocabulary_mismatch(model, found)
    if fault:
        raise ModelFileError(
            path,
            tr("cannot draft for this model: {fault}. Choose a small model of the same family", fault=fault),
        )
    return Draft("model", n_tokens, found, identify(found.paths))


def draft_file(draft: Draft | None) -> DraftEntry | None:
    """Return `draft` in the form that a layout file stores; None if there is no draft."""
    if draft is None:
        return None
    path = "" if draft.path is None else str(draft.path.absolute())
    return DraftEntry(draft.kind, path, draft.n_tokens, draft.layout, draft.context)


def draft_of_file(entry: DraftEntry | None, model: ModelFile, folder: Path) -> Draft | None:
    """Return the draft that a layout file names; None if it names none.

    A draft model is looked up by its path, then by its file name in the folders of the layout file and of the model.
    Its file is read, so this must not be called in the GUI thread.

    `folder`: folder of the layout file.

    Raises:
        ModelFileError: the file cannot be the draft model of `model` (see `read_draft`), or the layout of the draft
        model is for another number of layers.
    """
    if entry is None or entry.kind != "model":
        return None if entry is None else Draft(entry.kind, entry.n_tokens)
    asked = Path(entry.model)
    paths = (folder / asked, folder / asked.name, model.paths[0].parent / asked.name)
    path = next((each for each in paths if each.is_file()), paths[0])
    found = read_draft(path, model, entry.n_tokens)
    assert found.model is not None
    if entry.layout is not None and entry.layout.n_layers != found.model.n_layers:
        raise ModelFileError(
            path,
            tr(
                "has {n_layers} layers, but the layout of the draft model is for {wanted} layers. Remove the layout of "
                "the draft model",
                n_layers=found.model.n_layers,
                wanted=entry.layout.n_layers,
            ),
        )
    return replace(found, layout=entry.layout, context=entry.context)


def drafts_for(model: ModelFile) -> bool:
    """Return whether `model` generates text token by token; only then can it be a draft model or use one."""
    embeds = model.hyper_parameter("attention.causal") is False or model.hyper_parameter("pooling_type") is not None
    encodes = any(tensor.name.startswith("enc.") for tensor in model.tensors)
    return model.has_vocabulary and not embeds and not encodes


def _keeps_state(model: ModelFile) -> bool:
    """Return whether the model has layers with recurrent state; False if the header is malformed."""
    try:
        return any(read_state(model)[0].recurrent)
    # A malformed header is named when the model is loaded.
    except (MissingNumberError, LookupError, ArithmeticError, ValueError, TypeError, AttributeError):
        return False


def draft_context(draft: Draft, main: ContextSettings) -> ContextSettings:
    """Return the context settings of the draft model or MTP heads. `main`: context settings of the main model.

    Both contexts have the same batch sizes and number of sequences. Pipeline parallelism is off for the draft model,
    because it computes one token after another.
    """
    own = draft.context
    chosen = {key: getattr(own, key) for key in DRAFT_SETTINGS if key != "n_ctx"}
    # MTP heads are a part of the main model.
    main = main if uses_mtp(draft) else for_draft_model(main)
    found = replace(main, **chosen, pipeline="off", image_max_tokens=None, image_min_tokens=None)
    return found if own.n_ctx == AUTO_CONTEXT else found.with_each(own.n_ctx)


def drafted_tokens(draft: Draft | None) -> int:
    """Return the largest number of tokens that are drafted for one step; 0 if there is no draft."""
    return 0 if draft is None else draft.n_tokens


def uses_mtp(draft: Draft | None) -> bool:
    """Return whether tokens are drafted by the model's own MTP heads instead of a draft model."""
    return draft is not None and draft.kind == "mtp"


def with_draft_memory(estimate: MemoryEstimate, of_draft: MemoryEstimate, subject: str = "") -> MemoryEstimate:
    """Return `estimate` with the memory of a draft model or of MTP heads added; each device's overhead is counted once.

    Weights, state and buffers of the draft model become `draft_bytes` of a device. Its mapped weights and its
    `answering_bytes` are added to those of the main model.

    `of_draft`: memory of the draft model or MTP heads alone.
    `subject`: name for messages, such as that of the MTP heads; empty for a draft model.
    """
    devices = dict(estimate.devices)
    for device_id, memory in of_draft.devices.items():
        own_bytes = memory.need_bytes - memory.overhead_bytes - memory.answering_bytes
        if not own_bytes and not memory.mapped_bytes:
            continue
        before = devices.get(device_id, DeviceMemory())
        devices[device_id] = replace(
            before,
            mapped_bytes=before.mapped_bytes + memory.mapped_bytes,
            # One process loads both models, so a device has the overhead once.
            overhead_bytes=before.overhead_bytes or memory.overhead_bytes,
            answering_bytes=before.answering_bytes + memory.answering_bytes,
            late_bytes=before.late_bytes + memory.late_bytes,
            draft_bytes=before.draft_bytes + own_bytes,
        )
    reason = estimate.probe_only
    if reason is None and of_draft.probe_only is not None:
        reason = tr("the draft model: {reason}", reason=of_draft.probe_only)
        reason = f"{subject}: {of_draft.probe_only}" if subject else reason
    unknown = (*estimate.unknown, *(part for part in of_draft.unknown if part not in estimate.unknown))
    return replace(estimate, devices=devices, probe_only=reason, unknown=unknown)
