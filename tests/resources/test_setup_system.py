"""Missing system packages, and the message about them."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from resources.setup.debian import call_apt, install_packages, missing_packages, wanted_packages
from resources.setup.errors import SetupError
from resources.setup.system import require_system
from resources.vulkan import needs as vulkan_needs


def test_missing_packages_are_those_neither_installed_nor_provided() -> None:
    listed = (
        "ii |libegl1|\n"
        "rc |libgl1|libgl1-mesa-glx (= 1.0)\n"
        "ii |libglib2.0-0t64|libglib2.0-0 (= 2.84.1)\n"
        "un |xvfb|\n"
        "ii |mesa|libone, libtwo (= 3)\n"
    )
    wanted = ["libegl1", "libgl1", "libglib2.0-0", "xvfb", "g++", "libone", "libtwo"]
    assert missing_packages(wanted, listed) == ["g++", "libgl1", "xvfb"]


def test_packages_follow_what_is_to_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vulkan_needs, "SYSTEM_FOLDERS", {sys.platform: (str(tmp_path),)})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("VULKAN_SDK", raising=False)
    least = wanted_packages(tests=False, backend="cpu", has_compiler=True, has_venv=True)
    most = wanted_packages(tests=True, backend="vulkan", has_compiler=False, has_venv=False)
    assert set(most) - set(least) == {
        "g++",
        "python3-venv",
        "xvfb",
        "xdotool",
        "openbox",
        "glslc",
        "libvulkan-dev",
        "spirv-headers",
    }


@pytest.mark.skipif(sys.platform == "win32", reason="apt-get and user ids are not on Windows")
def test_without_root_the_packages_are_named_in_one_line_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SetupError) as caught:
        install_packages(["g++", "libegl1"])
    line = str(caught.value).splitlines()[-1].strip()
    assert line == "sudo apt-get update && sudo apt-get install -y --no-install-recommends g++ libegl1"
    assert caught.value.exit_code == 2


@pytest.fixture
def apt(tmp_path: Path) -> list[str]:
    """Return a command that fails three times with apt-get's text for a held lock. It writes a line for each call."""
    program = tmp_path / "apt"
    program.write_text(
        f"""#!/bin/sh
echo call >> {tmp_path}/calls
test "$(wc -l < {tmp_path}/calls)" -gt 3 && exit 0
echo "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 1 (apt-get)"
exit 100
"""
    )
    program.chmod(0o755)
    return [str(program), "update"]


@pytest.mark.skipif(sys.platform == "win32", reason="apt-get is not on Windows")
def test_the_set_up_waits_for_another_package_manager(apt: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    call_apt(apt, pause_s=0.0)
    assert capsys.readouterr().out == "Another program is installing packages. Waiting for it.\n"
    assert Path(apt[0]).with_name("calls").read_text().count("call") == 4


@pytest.mark.skipif(sys.platform == "win32", reason="apt-get is not on Windows")
def test_a_package_manager_that_does_not_end_is_named(apt: list[str]) -> None:
    with pytest.raises(SetupError, match=r"(?s)lists/lock. It is held by process 1.*update failed \(exit code 100\)"):
        call_apt(apt, wait_s=0.0)
    assert Path(apt[0]).with_name("calls").read_text().count("call") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="apt-get is not on Windows")
def test_another_failure_of_apt_is_not_repeated(tmp_path: Path) -> None:
    program = tmp_path / "apt"
    program.write_text("#!/bin/sh\necho 'E: Unable to locate package none'\nexit 100\n")
    program.chmod(0o755)
    with pytest.raises(SetupError, match=r"Unable to locate package none"):
        call_apt([str(program), "install"], pause_s=0.0)


def test_what_is_missing_is_named_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resources.setup.system.has_debian_packages", lambda: False)
    monkeypatch.setattr("resources.setup.machine.find_compiler", lambda *_: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr("resources.setup.system.find_uv", lambda: None)
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(SetupError, match=r"(?s)nothing was built.*C\+\+ compiler: install g\+\+.*ensurepip"):
        require_system(tests=False, backend="cpu")
