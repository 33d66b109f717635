"""Recipes for macOS and Windows, as far as Linux can check them: complete, and no file type is taken over unasked."""

from __future__ import annotations

import plistlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from resources.bundle.desktop_files import draw_icon
from resources.macos.info import INFO, MODEL_TYPE

RESOURCES = Path(__file__).resolve().parents[2] / "resources"
NOT_RUN = "THIS SCRIPT HAS NOT BEEN RUN YET"


@pytest.mark.parametrize("name", ["macos/pack.sh", "windows/pack.ps1", "windows/layerdeck.iss"])
def test_scripts_say_that_they_have_not_been_run_and_name_only_files_that_are_there(name: str) -> None:
    text = (RESOURCES / name).read_text("utf-8")
    assert NOT_RUN in text.splitlines()[0] + text.splitlines()[1]
    named = re.findall(r"resources[\\/][\w\\/.-]+\.(?:svg|plist|iss|sh|ps1)", text)
    assert all((RESOURCES.parent / path.replace("\\", "/")).exists() for path in named)


@pytest.mark.parametrize("name", ["macos/pack.sh", "windows/pack.ps1"])
def test_the_application_is_made_with_the_engine_for_any_processor(name: str) -> None:
    lines = (RESOURCES / name).read_text("utf-8").splitlines()
    assert any(line.endswith(" make.py bundle") and not line.startswith("#") for line in lines)
    assert not [line for line in lines if "resources.bundle.build" in line], "that takes the set-up's own engine"


@pytest.mark.skipif(shutil.which("sh") is None, reason="there is no shell here")
def test_the_script_for_macos_can_be_read_by_a_shell() -> None:
    subprocess.run(["sh", "-n", str(RESOURCES / "macos" / "pack.sh")], check=True)


def test_macos_is_told_of_models_without_taking_them_over() -> None:
    told = plistlib.loads(plistlib.dumps(INFO))
    (document,) = told["CFBundleDocumentTypes"]
    assert (document["LSHandlerRank"], document["LSItemContentTypes"]) == ("Alternate", [MODEL_TYPE])
    (declared,) = told["UTImportedTypeDeclarations"]
    assert declared["UTTypeIdentifier"] == MODEL_TYPE
    assert declared["UTTypeTagSpecification"]["public.filename-extension"] == ["gguf"]
    entitlements = plistlib.loads((RESOURCES / "macos" / "entitlements.plist").read_bytes())
    assert set(entitlements.values()) == {True}


def test_windows_is_offered_the_program_and_keeps_its_default() -> None:
    lines = (RESOURCES / "windows" / "layerdeck.iss").read_text("utf-8").splitlines()
    registry = [line for line in lines if line.startswith("Root:")]
    assert any(r".gguf\OpenWithProgids" in line for line in registry)
    assert not [line for line in registry if r'"Software\Classes\.gguf"' in line], "that would be the default"
    assert all("HKA" in line for line in registry)
    removed = re.findall(r'Subkey: "([^"]+)".*Flags: uninsdelete', "\n".join(registry))
    places = re.findall(r'Subkey: "([^"]+)"', "\n".join(registry))
    assert not [place for place in places if not place.startswith(tuple(removed))], "nothing of it is left behind"


@pytest.mark.parametrize(("name", "beginning"), [("icon.ico", b"\x00\x00\x01\x00"), ("icon.png", b"\x89PNG")])
def test_icons_of_every_kind_are_drawn(name: str, beginning: bytes, tmp_path: Path) -> None:
    draw_icon(RESOURCES / "layerdeck.svg", 64, tmp_path / "folder" / name)
    assert (tmp_path / "folder" / name).read_bytes().startswith(beginning)
