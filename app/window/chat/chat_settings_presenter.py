"""The presenter of a conversation's settings: system prompt, preset, samplers, chat template and tools."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QInputDialog, QWidget

from app.chats.preset_store import PresetStore
from app.models.open_model import OpenModel
from engine.base.language import tr
from engine.base.values import replace
from engine.chat.context import shift_error
from engine.chat.presets import MAX_NAME_CHARACTERS, Preset
from engine.planning.settings.sampling_settings import SamplingSettings
from engine.planning.settings.sampling_sources import usable_settings
from engine.planning.settings.sampling_table import SAMPLING, SAMPLING_BY_KEY
from widgets.chat.chat_pane import ChatPane
from widgets.chat.settings_panel import SettingChange, SettingRow, SettingsPanel


class ChatSettingsPresenter(QObject):
    """Connects the settings of one model's conversation with their panel.

    Invalid input shows an error and is not stored.
    """

    def __init__(self, model: OpenModel, presets: PresetStore, pane: ChatPane, window: QWidget) -> None:
        super().__init__(window)
        self._conversation, self._loading = model.conversation, model.loading
        self._presets = presets
        self._window = window
        self._panel: SettingsPanel | None = None
        self._shown_chat = ""
        model.conversation.chat_changed.connect(self._show)
        model.loading.loaded_changed.connect(self._show)
        presets.changed.connect(self._show)
        # The pane makes its panel when people open it for the first time.
        pane.settings_made.connect(self._on_made)

    def _on_made(self, panel: SettingsPanel) -> None:
        self._panel = panel
        panel.system_changed.connect(self._on_system)
        panel.preset_chosen.connect(self._on_preset)
        panel.preset_save_requested.connect(self._on_save)
        panel.preset_delete_requested.connect(self._on_delete)
        panel.value_changed.connect(self._on_value)
        panel.template_changed.connect(self._on_template)
        panel.tools_changed.connect(self._on_tools)
        self._show()

    def _show(self) -> None:
        panel, conversation = self._panel, self._conversation
        if panel is None:
            return
        is_same = conversation.chat.id == self._shown_chat
        if is_same:
            panel.flush_texts()  # Text that is being typed is taken first, so that it is not overwritten.
        self._shown_chat = conversation.chat.id
        chat, preset, sampling = conversation.chat, conversation.preset, conversation.sampling
        panel.show_system(chat.system, "" if preset is None else preset.system)
        panel.template_field.show_template(chat.template, is_same=is_same)
        panel.tools_field.show_tools(chat.tools, conversation.tools_error, self._tools_note())
        panel.show_presets(list(self._presets.presets), chat.preset)
        panel.show_values(
            {
                setting.key: SettingRow(
                    setting.kind.text_of(getattr(sampling.settings, setting.key)),
                    sampling.explain(setting.key, preset=chat.preset),
                    sampling.sources[setting.key] == "chat",
                )
                for setting in SAMPLING
            },
            is_same=is_same,
        )

    def _on_system(self, text: str) -> None:
        chat = self._conversation.chat
        if text != chat.system:
            self._conversation.change_chat(replace(chat, system=text))

    def _on_template(self, text: str) -> None:
        chat = self._conversation.chat
        if text != chat.template:
            self._conversation.change_chat(replace(chat, template=text))

    def _on_tools(self, text: str) -> None:
        # Faulty text is kept too, so that nothing is lost; nothing is sent until it is right.
        chat = self._conversation.chat
        if text != chat.tools:
            self._conversation.change_chat(replace(chat, tools=text))

    def _tools_note(self) -> str:
        """Return a sentence if the chat template does not support tools; empty if it does, or if no model is loaded."""
        tools = self._conversation.tools
        if self._loading.model is None or not tools.tools or tools.knows_tools:
            return ""
        return tr("The chat template of this model does not support tools, so the system prompt describes them.")

    def _on_preset(self, name: str) -> None:
        chat = self._conversation.chat
        self._conversation.change_chat(replace(chat, preset=name))

    def _on_value(self, change: SettingChange) -> None:
        chat = self._conversation.chat
        settings = dict(chat.settings)
        setting = SAMPLING_BY_KEY[change.key]
        fault = ""
        # The value of the preset or of the model counts again.
        if change.text is None:
            settings.pop(change.key, None)
        else:
            try:
                settings[change.key] = setting.kind.typed(change.text)
            except ValueError as error:
                fault = tr("{label}: {error}. The value was not changed.", label=setting.label, error=error)
            else:
                fault = self._shift_error(settings)
        if self._panel is not None:
            self._panel.show_error(fault)
        # The field still has the invalid text; the stored value is shown instead.
        if fault:
            self._show()
        else:
            self._conversation.change_chat(replace(chat, settings=settings))

    def _shift_error(self, settings: Mapping[str, object]) -> str:
        """Return why the loaded model cannot do the context shift that `settings` ask for; empty if it can."""
        loaded = self._loading.snapshot.loaded
        mode = settings.get("full_context", "end")
        if loaded is None or mode != "shift":
            return ""
        return shift_error(SamplingSettings(full_context="shift"), loaded.context)

    def _on_delete(self) -> None:
        self._presets.delete(self._conversation.chat.preset)

    def _on_save(self) -> None:
        dialog = QInputDialog(self._window)
        dialog.setWindowTitle(tr("Save as preset"))
        dialog.setLabelText(tr("Name of the preset:"))
        dialog.setTextValue(self._conversation.chat.preset)
        dialog.textValueSelected.connect(self._save)
        dialog.open()

    def _save(self, name: str) -> None:
        name = " ".join(name.split())[:MAX_NAME_CHARACTERS]
        if not name:
            return
        conversation, chat, preset = self._conversation, self._conversation.chat, self._conversation.preset
        settings = {} if preset is None else dict(preset.settings)
        # Values of the conversation win over those of its preset.
        settings |= usable_settings(chat.settings)

        def follow() -> None:
            """Replace the conversation's own values by the saved preset, so that changes of the preset apply to it."""
            now = conversation.chat
            if now.id == chat.id:
                system = "" if now.system == chat.system else now.system
                saved = chat.settings
                own = {key: value for key, value in now.settings.items() if key not in saved or saved[key] != value}
                conversation.change_chat(replace(now, preset=name, system=system, settings=own))

        self._presets.save(Preset(name=name, system=conversation.system, settings=settings), follow)
