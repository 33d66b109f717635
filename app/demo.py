"""The demo models of the window: one that answers, fetched by the set-up or in the bundle, else one that is made up."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from app.paths import demo_path, fetched_models_path
from engine.base.units import MIB
from engine.model.demo.speaking import FILE_NAME, LAB_CAPS_BYTES, is_fetched

MADE_UP_CAPS_BYTES = (256 * MIB, 256 * MIB, 512 * MIB)


@dataclass(frozen=True, slots=True)
class Demo:
    """A model to try, and the caps of lab workers on which it is worth dragging its layers."""

    path: Path
    caps_bytes: tuple[int, ...]


def find_demo() -> Demo:
    """Return the best demo there is; the made-up model is written where it is needed and not there. Blocks.

    Raises:
        EngineError: when it cannot be written.
    """
    fetched = fetched_demo()
    return Demo(ensure_demo(), MADE_UP_CAPS_BYTES) if fetched is None else Demo(fetched, LAB_CAPS_BYTES)


def fetched_demo() -> Path | None:
    """Return the path of the demo model that answers, None where neither set-up nor bundle brought it. Blocks."""
    paths = (folder / FILE_NAME for folder in (fetched_models_path(), *_models_beside_program()))
    return next((path for path in paths if is_fetched(path)), None)


def _models_beside_program() -> tuple[Path, ...]:
    """Return the folders of models that came with the program: `models` beside the bundle's executable."""
    if not getattr(sys, "frozen", False):
        return ()
    program = Path(sys.executable).parent
    # On macOS what is signed lies beside the executable, and nothing else.
    return (program.parent / "Resources" / "models" if sys.platform == "darwin" else program / "models",)


def ensure_demo() -> Path:
    """Return the made-up demo model's path; it is written where it is not there yet, or of an older version. Blocks.

    Raises:
        EngineError: when it cannot be written.
    """
    # Imported when it is needed: what the writer uses would add a fifth to the start of the window.
    from engine.model.demo.writer import is_current_demo, write_demo_model

    path = demo_path()
    if not is_current_demo(path):
        write_demo_model(path)
    return path
