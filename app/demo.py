"""The demo model of the window, written on first use."""

from __future__ import annotations

from pathlib import Path

from app.paths import demo_path


def ensure_demo() -> Path:
    """Return the demo model's path; it is written where it is not there yet, or of an older version. Blocks.

    Raises:
        EngineError: when it cannot be written.
    """
    # Imported when it is needed: what the writer uses would add a fifth to the start of the window.
    from engine.demo.writer import is_current_demo, write_demo_model

    path = demo_path()
    if not is_current_demo(path):
        write_demo_model(path)
    return path
