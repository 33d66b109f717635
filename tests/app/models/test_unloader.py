"""The choice of the model that is unloaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from PySide6.QtCore import QObject, Signal
from pytestqt.qtbot import QtBot

from app.models.unloader import Unloader
from app.notices import Notices
from engine.model.gguf.model_file import FileIdentity
from tests.support.load_specs import file_key


class Models(QObject):
    """Three loaded models with one name, as quantisations of one model have; the last one is current."""

    expired, added, parked_changed, model_changed = Signal(object), Signal(object), Signal(bool), Signal(object)

    def __init__(self) -> None:
        super().__init__()
        self.unloaded: list[FileIdentity] = []
        self.all = [self._model(file_key(name)) for name in ("Q4", "Q8", "F16")]
        self.current = self.all[-1]

    def _model(self, key: FileIdentity) -> SimpleNamespace:
        def unload() -> bool:
            self.unloaded.append(key)
            return True

        loading = SimpleNamespace(unload=unload)
        return SimpleNamespace(
            key=key, name="Gemma", held=object(), loading=loading, parked_changed=self.parked_changed
        )

    def find(self, key: FileIdentity) -> SimpleNamespace | None:
        """Return the model of this file."""
        return next((each for each in self.all if each.key == key), None)


def test_of_models_with_one_name_the_one_that_is_meant_goes(qtbot: QtBot) -> None:
    models, notices = Models(), Notices()
    unloader = Unloader(cast("Any", models), cast("Any", models), cast("Any", None), cast("Any", None), notices)
    unloader.unload_other(file_key("Q8"))
    assert models.unloaded == [file_key("Q8")]
    unloader.unload_other(file_key("F16"))
    unloader.unload_other(file_key("gone"))
    assert models.unloaded == [file_key("Q8")], "neither the current model nor another one in place of what is gone"
