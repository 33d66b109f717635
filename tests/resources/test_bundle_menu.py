"""The script that adds the unpacked tarball to the menu, run from folders of any name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import DEADLINE_S

RESOURCES = Path(__file__).resolve().parents[2] / "resources"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="menus are made of desktop entries on Linux alone")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A home."""
    return {"HOME": str(tmp_path / "home"), "PATH": os.environ["PATH"]}


def unpack(folder: Path, told: Path) -> Path:
    """Lay out what the script needs of the bundle in `folder`, with a program that writes its arguments into `told`."""
    entries = folder / "share" / "applications"
    entries.mkdir(parents=True)
    shutil.copyfile(RESOURCES / "desktop" / "layerdeck.desktop", entries / "layerdeck.desktop")
    script = folder / "add-to-menu"
    shutil.copyfile(RESOURCES / "bundle" / "menu.sh", script)
    program = folder / "layerdeck"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{told}"\n')
    for path in (script, program):
        path.chmod(0o755)
    return script


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("plain", '"{}/plain/layerdeck"'),
        ("Ünï cödé", '"{}/Ünï cödé/layerdeck"'),
        ("a&b %f", 'env "{}/a&b %%f/layerdeck"'),
        ('d$e`f"g', r'''"{}/d\\$e\\`f\\"g/layerdeck"'''),
        ("h|i\\j", r'''"{}/h|i\\\\j/layerdeck"'''),
    ],
    ids=["plain", "letters", "signs", "shell", "sed"],
)
def test_the_entry_starts_the_program_from_a_folder_of_any_name(
    name: str, command: str, environment: dict[str, str], tmp_path: Path
) -> None:
    told = tmp_path / "told"
    os.mkfifo(told)
    script = unpack(tmp_path / name, told)
    subprocess.run([str(script)], env=environment, check=True, stdout=subprocess.DEVNULL)
    entry = Path(environment["HOME"], ".local", "share", "applications", "layerdeck.desktop")
    assert f"Exec={command.format(tmp_path)} %F" in entry.read_text("utf-8").splitlines()
    if shutil.which("gio"):
        model = tmp_path / "a model.gguf"
        model.touch()
        subprocess.run(["gio", "launch", str(entry), str(model)], env=environment, check=True)
        said = subprocess.run(["cat", str(told)], capture_output=True, text=True, check=True, timeout=DEADLINE_S)
        assert said.stdout.splitlines() == [str(model)]


def test_what_it_says_at_its_end_names_what_stays(environment: dict[str, str], tmp_path: Path) -> None:
    script = unpack(tmp_path / "here", tmp_path / "told")
    subprocess.run([str(script)], env=environment, check=True, stdout=subprocess.DEVNULL)
    told = subprocess.run([str(script), "--remove"], env=environment, check=True, capture_output=True, text=True).stdout
    home = environment["HOME"]
    for place in (".local/share/layerdeck", ".config/layerdeck", ".cache/huggingface"):
        assert f"{home}/{place}" in told
    models = next(line for line in told.splitlines() if line.startswith("Models"))
    assert "share/layerdeck" not in models
    assert not Path(home, ".local", "share", "applications", "layerdeck.desktop").exists()
