"""The demo model: a small published model from the set-up or the bundle, or else one that this program generates."""

from __future__ import annotations

import sys
from pathlib import Path

from msgspec import Struct

from app.paths import demo_path, fetched_models_path
from engine.base.units import MIB
from engine.model.demo.speaking import FILE_NAME, LAB_CAPS_BYTES, is_fetched

MADE_UP_CAPS_BYTES = (256 * MIB, 256 * MIB, 512 * MIB)


class Demo(Struct, frozen=True):
    """A demo model for a lab rig (RPC workers on this computer).

    `path`: model file. `caps_bytes`: memory cap of each worker, in bytes, so that the workers share the layers.
    """

    path: Path
    caps_bytes: tuple[int, ...]


def find_demo() -> Demo:
    """Return the published demo model if it is installed, else the generated one.

    The call reads and may write files: not for the GUI thread.

    Raises:
        EngineError: the generated model cannot be written.
    """
    fetched = fetched_demo()
    return Demo(ensure_demo(), MADE_UP_CAPS_BYTES) if fetched is None else Demo(fetched, LAB_CAPS_BYTES)


def fetched_demo() -> Path | None:
    """Return the path of the published demo model, or None if it is not installed. Reads the disk."""
    paths = (folder / FILE_NAME for folder in (fetched_models_path(), *_bundled_models()))
    return next((path for path in paths if is_fetched(path)), None)


def _bundled_models() -> tuple[Path, ...]:
    """Return the models folder of the PyInstaller bundle, next to its executable; empty if this is not the bundle."""
    if not getattr(sys, "frozen", False):
        return ()
    program = Path(sys.executable).parent
    # On macOS only signed code may lie next to the executable; data belongs in Resources.
    return (program.parent / "Resources" / "models" if sys.platform == "darwin" else program / "models",)


def ensure_demo() -> Path:
    """Return the path of the generated demo model, which is written if it is missing or of an older version.

    Writing takes time: not for the GUI thread.

    Raises:
        EngineError: the model cannot be written.
    """
    # Imported late: the imports of the writer would make the start of the window a fifth longer.
    from engine.model.demo.writer import is_current_demo, write_demo_model

    path = demo_path()
    if not is_current_demo(path):
        write_demo_model(path)
    return path
