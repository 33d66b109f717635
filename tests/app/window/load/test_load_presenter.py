"""The list of loaded models says what each of them does, in the language of the window."""

from __future__ import annotations

import pytest

from app.wiring import WindowParts
from engine.model.gguf.model_file import FileIdentity
from engine.planning.fit.loaded_models import HeldModel
from engine.runtime.session.status import Phase


@pytest.mark.parametrize(("phase", "said"), [(Phase.LOADING, "<loading>"), (Phase.STOPPING, "<cancelling>")])
def test_what_a_model_does_is_translated(
    window: WindowParts, monkeypatch: pytest.MonkeyPatch, phase: Phase, said: str
) -> None:
    monkeypatch.setattr("app.window.load.load_presenter.tr", lambda text, **_fields: f"<{text}>")
    model = window.desk.models.current
    monkeypatch.setattr(model, "held", HeldModel(FileIdentity(()), "ada", {"CPU": 1 << 20}))
    monkeypatch.setattr(model.loading, "phase", phase)
    window.desk.models.changed.emit()
    (row,) = window.main.model_panel.loaded_list.rows()
    assert said in row.accessibleName()
