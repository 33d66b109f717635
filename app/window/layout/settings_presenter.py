"""The presenter of the load settings dialog.

It shows the settings of the next load, and for each setting on "auto" the value that the program has chosen.
"""

from __future__ import annotations

from pathlib import Path

from PySide6.QtWidgets import QWidget

from app.library.library import Library
from app.models.document import LayoutDocument
from app.models.open_models import OpenModels
from app.models.side_files import SideFileController
from app.settings import Settings
from app.window import dialogs
from app.window.dialogs import OneDialog
from engine.base.language import tr
from engine.base.units import format_bytes
from engine.base.values import replace
from engine.devices.device import Rig
from engine.library.drafts import draft_candidates
from engine.model.gguf.model_file import ModelFile
from engine.planning.memory.drafts import Draft
from engine.planning.memory.mtp import mtp_error
from engine.planning.memory.side_files import SideFiles
from engine.planning.plan.decisions.attention import refused_cache_types
from engine.planning.plan.preview import LoadedLayout, Preview
from widgets.controls.decided import value_text
from widgets.controls.settings_bar import SettingsBar
from widgets.controls.settings_dialog import SettingsDialog
from widgets.controls.values import AdapterName, DraftChoice, ProposedDraft, SideFileNames


class SettingsPresenter(OneDialog[SettingsDialog]):
    """Opens the dialog with the settings for the next load of the current model, and applies changes at once."""

    def __init__(
        self,
        document: LayoutDocument,
        models: OpenModels,
        side_files: SideFileController,
        library: Library,
        *,
        bar: SettingsBar,
        settings: Settings,
        window: QWidget,
    ) -> None:
        super().__init__(self._make_dialog, lambda _dialog: self.refresh(), window)
        self._document = document
        self._models = models
        self._side_files = side_files
        self._library = library
        self._window = window
        self._settings = settings
        bar.all_settings_requested.connect(self.show)
        bar.setting_requested.connect(lambda key: self.open().show_row(key))
        bar.show_details(settings.shows_load_details)
        bar.details_toggled.connect(self._keep_details)
        document.preview_changed.connect(self._on_preview_changed)
        models.current_changed.connect(self.refresh)
        models.changed.connect(self.refresh)
        library.contents_changed.connect(lambda _contents: self.refresh())

    def _make_dialog(self) -> SettingsDialog:
        # Models of the library are proposed as drafts.
        if not self._library.is_awake:
            self._library.wake()
        dialog, files = SettingsDialog(self._window), self._side_files
        dialog.context_changed.connect(self._document.set_context)
        form = dialog.side_files
        form.projector_requested.connect(self._ask_projector)
        form.projector_removed.connect(files.remove_projector)
        form.projector_device_chosen.connect(files.place_projector)
        form.adapter_requested.connect(self._ask_adapter)
        form.adapter_removed.connect(files.remove_adapter)
        form.adapter_scaled.connect(files.scale_adapter)
        form.draft.removed.connect(files.remove_draft)
        form.draft.ngram_chosen.connect(files.draft_by_ngrams)
        form.draft.mtp_chosen.connect(files.draft_by_mtp)
        form.draft.file_chosen.connect(lambda path: files.choose_draft(Path(path)))
        form.draft.file_requested.connect(self._ask_draft)
        form.draft.device_chosen.connect(files.place_draft)
        form.draft.tokens_chosen.connect(files.set_drafted_tokens)
        return dialog

    def _keep_details(self, shown: bool) -> None:
        self._settings.shows_load_details = shown

    def _ask_projector(self) -> None:
        path = dialogs.ask_open(self._window, tr("Choose a projector"), dialogs.MODEL_FILTER, self._folder())
        if path is not None:
            self._side_files.choose_projector(path)

    def _ask_adapter(self) -> None:
        path = dialogs.ask_open(self._window, tr("Add a LoRA adapter"), dialogs.MODEL_FILTER, self._folder())
        if path is not None:
            self._side_files.add_adapter(path)

    def _ask_draft(self) -> None:
        path = dialogs.ask_open(self._window, tr("Choose a draft model"), dialogs.MODEL_FILTER, self._folder())
        if path is not None:
            self._side_files.choose_draft(path)

    def _proposed_drafts(self, model: ModelFile) -> tuple[ProposedDraft, ...]:
        entries = [each.entry for each in self._library.contents.models]
        return tuple(
            ProposedDraft(str(each.path), f"{each.title}, {format_bytes(each.size_bytes)}")
            for each in draft_candidates(model, entries)
        )

    def _folder(self) -> Path | None:
        model = self._document.model
        return None if model is None else model.paths[0].parent

    def _on_preview_changed(self, _preview: Preview | None) -> None:
        # A hidden dialog is filled when it opens: during a drag there is a preview for each frame.
        if self.dialog is not None and self.dialog.isVisible():
            self.refresh()

    def refresh(self) -> None:
        """Fill the dialog with the settings of the current model."""
        dialog, plan = self.dialog, self._document.plan
        if dialog is None:
            return
        dialog.setEnabled(plan is not None)
        if plan is None:
            return
        dialog.set_settings(plan.edit.context, plan.decisions, refused_cache_types(plan.model, plan.settings))
        names = replace(_names(plan.edit.side_files), proposed_drafts=self._proposed_drafts(plan.model))
        names = replace(names, has_mtp=not mtp_error(plan.model))
        dialog.set_side_files(names, _side_file_devices(plan.rig), plan.decisions)
        dialog.set_loaded(loaded_text(self._models.current.loading.loaded))


def _names(files: SideFiles) -> SideFileNames:
    projector = files.projector
    return SideFileNames(
        projector="" if projector is None else str(projector.path),
        device=None if projector is None else projector.device,
        adapters=tuple(AdapterName(str(each.path), each.scale) for each in files.adapters),
        draft=_draft_choice(files.draft),
    )


def _draft_choice(draft: Draft | None) -> DraftChoice:
    if draft is None:
        return DraftChoice()
    layout = draft.layout
    device = None if layout is None else ", ".join(layout.devices)
    return DraftChoice(draft.kind, "" if draft.path is None else str(draft.path), draft.n_tokens, device)


def _side_file_devices(rig: Rig) -> tuple[str, ...]:
    # ggml's accelerator devices (such as BLAS) only work together with the CPU backend.
    return tuple(device.id for device in rig.all_devices if device.kind != "accel")


def loaded_text(loaded: LoadedLayout | None) -> str:
    """Return a sentence with the settings of the loaded model; empty if none is loaded.

    Flash attention is as llama.cpp reported it, since llama.cpp decides `auto`.
    """
    if loaded is None or loaded.used is None:
        return ""
    used, flash = loaded.used, loaded.flash_attention
    words = (
        tr("{n_ctx} tokens of context", n_ctx=value_text(used.n_ctx)),
        tr("K cache {type_k} and V cache {type_v}", type_k=used.type_k, type_v=used.type_v)
        if used.type_k != used.type_v
        else tr("KV cache {type_k}", type_k=used.type_k),
        "" if flash is None else tr("flash attention {flash}", flash=value_text(flash)),
        tr("load mode {load_mode}", load_mode=used.load_mode),
        tr(
            "{threads} CPU threads, {threads_batch} for prompts", threads=used.threads, threads_batch=used.threads_batch
        ),
        tr("op_offload {used}", used=value_text(bool(used.op_offload))),
        tr("pipeline parallelism") if used.pipeline == "on" else "",
    )
    return tr("Settings of the loaded model: {names}.", names=", ".join(filter(None, words)))
