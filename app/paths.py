"""Paths of our files, in the folders that the system has for settings, data, caches and logs."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

from platformdirs import user_cache_path, user_config_path, user_data_path, user_log_path

APPLICATION = "layerdeck"


def make_folder(folder: Path) -> None:
    """Make a folder of ours if it is missing, and check that files can be made in it.

    Raises:
        OSError: the folder cannot be made, or no files can be made in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def demo_path() -> Path:
    """Return the path of the generated demo model."""
    return user_data_path(APPLICATION, appauthor=False) / "demo.gguf"


def fetched_models_path() -> Path:
    """Return the folder of models that the set-up downloads (`model_folder` in `resources/setup/places.py`)."""
    return user_cache_path(APPLICATION, appauthor=False) / "models"


def calibration_path() -> Path:
    """Return the file of memory overheads learnt from loads (`engine.planning.fit.calibration`)."""
    return user_data_path(APPLICATION, appauthor=False) / "calibration.json"


def self_test_path() -> Path:
    """Return the file with the test results that say which devices may occur twice in llama.cpp's device list."""
    return user_data_path(APPLICATION, appauthor=False) / "self_test.json"


def engine_checks_path() -> Path:
    """Return the file with the results of the engine checks, which find features that are broken on a device."""
    return user_data_path(APPLICATION, appauthor=False) / "engine_checks.json"


def speeds_path() -> Path:
    """Return the file of measured speeds of devices, links and layouts."""
    return user_cache_path(APPLICATION, appauthor=False) / "speeds.json"


def downloads_path() -> Path:
    """Return the file that stores the download queue."""
    return user_data_path(APPLICATION, appauthor=False) / "downloads.json"


def remote_headers_path() -> Path:
    """Return the folder that caches GGUF headers of models on the Hugging Face hub."""
    return user_cache_path(APPLICATION, appauthor=False) / "headers"


def library_path() -> Path:
    """Return the database file of the library (SQLite): headers, notes and forecasts of models."""
    return user_data_path(APPLICATION, appauthor=False) / "library.sqlite"


def chats_path() -> Path:
    """Return the database file of conversations (SQLite)."""
    return user_data_path(APPLICATION, appauthor=False) / "chats.sqlite3"


def presets_path() -> Path:
    """Return the file of chat presets; people may edit it."""
    return user_data_path(APPLICATION, appauthor=False) / "presets.json"


def weight_cache_path() -> Path:
    """Return the folder of weights that RPC workers of this machine cache for their clients."""
    return user_cache_path(APPLICATION, appauthor=False) / "weights"


def saved_states_path() -> Path:
    """Return the folder of saved KV states."""
    return user_cache_path(APPLICATION, appauthor=False) / "states"


def api_key_path() -> Path:
    """Return the file with the key of the window's API server."""
    return user_data_path(APPLICATION, appauthor=False) / "api_key"


def packs_path() -> Path:
    """Return the folder of installed engine packs."""
    return user_data_path(APPLICATION, appauthor=False) / "packs"


def pack_book_path() -> Path:
    """Return the file with the check results of engine packs, and the names of disabled packs."""
    return user_data_path(APPLICATION, appauthor=False) / "packs.json"


def pack_key_path() -> Path:
    """Return the file with the key of this computer for signing engine packs."""
    return user_data_path(APPLICATION, appauthor=False) / "pack_key.pem"


def pack_publishers_path() -> Path:
    """Return the file that lists the publishers of engine packs whom the user trusts."""
    return user_data_path(APPLICATION, appauthor=False) / "pack_publishers.json"


def identity_path() -> Path:
    """Return the file with the key and the certificate of this computer, for the tunnel to paired machines."""
    return user_data_path(APPLICATION, appauthor=False) / "tunnel" / "identity.pem"


def pairings_path() -> Path:
    """Return the file that lists the machines with which this one is paired."""
    return user_data_path(APPLICATION, appauthor=False) / "tunnel" / "pairings.json"


def machines_path() -> Path:
    """Return the rig file with the devices of paired machines that the window has used."""
    return user_data_path(APPLICATION, appauthor=False) / "tunnel" / "machines.json"


def settings_path() -> Path:
    """Return the INI file of preferences and window state."""
    return user_config_path(APPLICATION, appauthor=False) / "layerdeck.ini"


def serve_settings_path() -> Path:
    """Return the file of names and idle times of models for the API server; people may edit it."""
    return user_config_path(APPLICATION, appauthor=False) / "serve.json"


def run_records_path() -> Path:
    """Return the folder of run marks: files that exist while a window runs, so that a crash is noticed later."""
    return user_data_path(APPLICATION, appauthor=False) / "running"


def log_path() -> Path:
    """Return the log file of the window."""
    return user_log_path(APPLICATION, appauthor=False) / "layerdeck.log"


def command_log_path() -> Path:
    """Return the log file of commands that load a model."""
    return user_log_path(APPLICATION, appauthor=False) / "layerdeck-cli.log"


def instance_name() -> str:
    """Return the name of the local socket on which the first window listens for later starts.

    It depends on the user's data folder, so that users get different names.
    """
    home = str(user_data_path(APPLICATION, appauthor=False).absolute())
    # A hash, since Unix limits the path of a local socket to about 100 bytes.
    return f"{APPLICATION}-{hashlib.sha256(home.encode(errors='surrogateescape')).hexdigest()[:16]}"
