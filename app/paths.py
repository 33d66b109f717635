"""Where the program keeps its files, in the places that the system has for them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from platformdirs import user_cache_path, user_data_path, user_log_path

APPLICATION = "layerdeck"


def demo_path() -> Path:
    """Return where the window keeps the demo model."""
    return user_data_path(APPLICATION, appauthor=False) / "demo.gguf"


def calibration_path() -> Path:
    """Return where is kept what loads took besides the forecast."""
    return user_data_path(APPLICATION, appauthor=False) / "calibration.json"


def self_test_path() -> Path:
    """Return where is kept which backends may be several entries of one layout."""
    return user_data_path(APPLICATION, appauthor=False) / "self_test.json"


def speeds_path() -> Path:
    """Return where is kept how fast devices, links and layouts are."""
    return user_cache_path(APPLICATION, appauthor=False) / "speeds.json"


def chats_path() -> Path:
    """Return where conversations are kept."""
    return user_data_path(APPLICATION, appauthor=False) / "chats.sqlite3"


def presets_path() -> Path:
    """Return where presets of conversations are kept."""
    return user_data_path(APPLICATION, appauthor=False) / "presets.json"


def log_path() -> Path:
    """Return the log file."""
    return user_log_path(APPLICATION, appauthor=False) / "layerdeck.log"


def instance_name() -> str:
    """Return the name under which this user's window listens for later starts; another home is another user."""
    home = str(user_data_path(APPLICATION, appauthor=False).absolute())
    return f"{APPLICATION}-{hashlib.sha256(home.encode(errors='surrogateescape')).hexdigest()[:16]}"
