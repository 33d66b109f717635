"""The preference for details of the settings bar and of the load report."""

from __future__ import annotations

from app.wiring import WindowParts
from tests.support.windows import WindowOpener


def test_details_are_remembered(window: WindowParts, open_window: WindowOpener) -> None:
    bar, report = window.main.settings_bar, window.views.current.report
    assert not bar.context_editor.details_button.isChecked()
    assert not report.details_button.isChecked()
    bar.context_editor.details_button.click()
    report.details_button.click()
    again = open_window()
    assert again.main.settings_bar.context_editor.details_button.isChecked()
    assert again.views.current.report.details_button.isChecked()
