"""What is kept between runs: window state, theme, recent models, warnings already given."""

from __future__ import annotations

from pathlib import Path

from platformdirs import user_config_path, user_data_path, user_log_path
from PySide6.QtCore import QByteArray, QSettings

from app.theme import THEME_NAMES, ThemeName

APPLICATION = "layerdeck"
MAX_RECENT = 12


def demo_path() -> Path:
    """Return where the window keeps the demo model."""
    return user_data_path(APPLICATION, appauthor=False) / "demo.gguf"


def log_path() -> Path:
    """Return the log file."""
    return user_log_path(APPLICATION, appauthor=False) / "layerdeck.log"


class Settings:
    """Typed access to one INI file. A value that cannot be read is as if it had never been written."""

    def __init__(self, path: Path | None = None) -> None:
        file = path or user_config_path(APPLICATION, appauthor=False) / "layerdeck.ini"
        file.parent.mkdir(parents=True, exist_ok=True)
        self._store = QSettings(str(file), QSettings.Format.IniFormat)

    @property
    def theme(self) -> ThemeName:
        name = self._store.value("theme", "system")
        return next((known for known in THEME_NAMES if known == name), "system")

    @theme.setter
    def theme(self, name: ThemeName) -> None:
        self._store.setValue("theme", name)

    @property
    def recent_models(self) -> tuple[Path, ...]:
        stored = self._store.value("recent_models", [])
        names = [stored] if isinstance(stored, str) else stored if isinstance(stored, list) else []
        return tuple(Path(name) for name in names if isinstance(name, str) and name)

    def add_recent_model(self, path: Path) -> None:
        """Put `path` first among the recent models."""
        kept = [path, *(other for other in self.recent_models if other != path)][:MAX_RECENT]
        self._store.setValue("recent_models", [str(each) for each in kept])

    def forget_recent_models(self) -> None:
        self._store.remove("recent_models")

    @property
    def remote_warning_given(self) -> bool:
        return self._store.value("remote_warning_given", "false") == "true"

    @remote_warning_given.setter
    def remote_warning_given(self, given: bool) -> None:
        self._store.setValue("remote_warning_given", "true" if given else "false")

    def window_state(self) -> tuple[QByteArray, QByteArray] | None:
        """Return geometry and dock state as last saved."""
        geometry, state = self._store.value("window/geometry"), self._store.value("window/state")
        if isinstance(geometry, QByteArray) and isinstance(state, QByteArray):
            return geometry, state
        return None

    def save_window_state(self, geometry: QByteArray, state: QByteArray) -> None:
        self._store.setValue("window/geometry", geometry)
        self._store.setValue("window/state", state)

    def sync(self) -> None:
        """Write to disk now."""
        self._store.sync()
