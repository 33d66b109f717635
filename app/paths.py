"""Where the program keeps its files, in the places that the system has for them."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

from platformdirs import user_cache_path, user_config_path, user_data_path, user_log_path

APPLICATION = "layerdeck"


def make_folder(folder: Path) -> None:
    """Make a folder of ours where it is not there yet, and see that files can be made in it.

    Raises:
        OSError: where they cannot.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def demo_path() -> Path:
    """Return where the window keeps the demo model that it makes up."""
    return user_data_path(APPLICATION, appauthor=False) / "demo.gguf"


def fetched_models_path() -> Path:
    """Return the folder of models that the set-up has fetched (`model_folder` of `resources/setup/places.py`)."""
    return user_cache_path(APPLICATION, appauthor=False) / "models"


def calibration_path() -> Path:
    """Return where is kept what loads took besides the forecast."""
    return user_data_path(APPLICATION, appauthor=False) / "calibration.json"


def self_test_path() -> Path:
    """Return where is kept which backends may be several entries of one layout."""
    return user_data_path(APPLICATION, appauthor=False) / "self_test.json"


def engine_checks_path() -> Path:
    """Return where is kept what the engine's check of itself found."""
    return user_data_path(APPLICATION, appauthor=False) / "engine_checks.json"


def speeds_path() -> Path:
    """Return where is kept how fast devices, links and layouts are."""
    return user_cache_path(APPLICATION, appauthor=False) / "speeds.json"


def downloads_path() -> Path:
    """Return where the list of downloads is kept."""
    return user_data_path(APPLICATION, appauthor=False) / "downloads.json"


def remote_headers_path() -> Path:
    """Return the folder with headers of models that are not here."""
    return user_cache_path(APPLICATION, appauthor=False) / "headers"


def library_path() -> Path:
    """Return where is kept what is known of models: their headers, notes, forecasts."""
    return user_data_path(APPLICATION, appauthor=False) / "library.sqlite"


def chats_path() -> Path:
    """Return where conversations are kept."""
    return user_data_path(APPLICATION, appauthor=False) / "chats.sqlite3"


def presets_path() -> Path:
    """Return where presets are kept, for people to edit."""
    return user_data_path(APPLICATION, appauthor=False) / "presets.json"


def kept_weights_path() -> Path:
    """Return the folder of weights that workers of this machine keep for their clients."""
    return user_cache_path(APPLICATION, appauthor=False) / "weights"


def kept_states_path() -> Path:
    """Return the folder of what models hold of conversations."""
    return user_cache_path(APPLICATION, appauthor=False) / "states"


def packs_path() -> Path:
    """Return the folder of installed engine packs."""
    return user_data_path(APPLICATION, appauthor=False) / "packs"


def pack_book_path() -> Path:
    """Return where is kept what checks of engine packs found, and which are switched off."""
    return user_data_path(APPLICATION, appauthor=False) / "packs.json"


def identity_path() -> Path:
    """Return the file with this computer's key and certificate, for machines that it is paired with."""
    return user_data_path(APPLICATION, appauthor=False) / "tunnel" / "identity.pem"


def pairings_path() -> Path:
    """Return the list of machines that this one is paired with."""
    return user_data_path(APPLICATION, appauthor=False) / "tunnel" / "pairings.json"


def settings_path() -> Path:
    """Return the file of settings."""
    return user_config_path(APPLICATION, appauthor=False) / "layerdeck.ini"


def runs_path() -> Path:
    """Return the folder with the marks of windows that run."""
    return user_data_path(APPLICATION, appauthor=False) / "running"


def log_path() -> Path:
    """Return the log file."""
    return user_log_path(APPLICATION, appauthor=False) / "layerdeck.log"


def command_log_path() -> Path:
    """Return the log file of commands that load a model."""
    return user_log_path(APPLICATION, appauthor=False) / "layerdeck-cli.log"


def instance_name() -> str:
    """Return the name under which this user's window listens for later starts; another home is another user."""
    home = str(user_data_path(APPLICATION, appauthor=False).absolute())
    return f"{APPLICATION}-{hashlib.sha256(home.encode(errors='surrogateescape')).hexdigest()[:16]}"
