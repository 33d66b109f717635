"""What a child gives up, tried from inside of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.base.confinement import code_folders, device_folders, landlock_version, make_driver_caches

needs_landlock = pytest.mark.skipif(not landlock_version(), reason="this system has no Landlock")

CHILD = """
import resource, subprocess, sys
from pathlib import Path
from engine.base.confinement import code_folders, confine, device_folders, refuse_core_files, system_folders

own, folder, other = map(Path, sys.argv[1:])
refuse_core_files()
assert confine((*code_folders(), *system_folders(), own), (*device_folders(), folder))
assert resource.getrlimit(resource.RLIMIT_CORE)[0] == 0


def refused(act):
    try:
        act()
    except OSError:
        return True
    return False


assert own.read_text() == "own"
assert refused(lambda: own.write_text("changed"))
assert refused(other.read_text)
assert refused(lambda: other.write_text("changed"))
assert refused(other.unlink)
assert refused(lambda: list(other.parent.iterdir()))
assert refused(lambda: other.with_name("new").write_text("new"))
assert refused(lambda: own.rename(folder / "moved"))
assert refused(lambda: Path.home().joinpath(".layerdeck-test").write_text(""))
(folder / "a").write_text("a")
(folder / "a").rename(folder / "b")
assert (folder / "b").read_text() == "a"
Path("/dev/null").write_text("x")
# children of it have no more than it has, and run
assert subprocess.run([sys.executable, "-c", "print(open(%r).read())" % str(other)], capture_output=True).returncode
assert "NoNewPrivs:\\t1" in Path("/proc/self/status").read_text()
print("done")
"""


@needs_landlock
def test_a_child_opens_what_it_was_told_and_nothing_else(tmp_path: Path) -> None:
    own, folder, other = tmp_path / "own", tmp_path / "folder", tmp_path / "others" / "other"
    folder.mkdir()
    other.parent.mkdir()
    own.write_text("own")
    other.write_text("other")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-P", "-c", CHILD, str(own), str(folder), str(other)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=False,
    )
    assert done.stdout == "done\n", done.stderr
    assert (own.read_text(), other.read_text()) == ("own", "other")


def test_folders_of_drivers_are_made_for_the_backends_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_CACHE_PATH", raising=False)
    make_driver_caches(["CPU", "RPC"])
    assert not list(tmp_path.iterdir())
    make_driver_caches(["CUDA"])
    assert [path.name for path in tmp_path.iterdir()] == [".nv"]
    assert tmp_path / ".nv" in device_folders()


def test_what_the_environment_names_for_a_driver_is_within_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, libraries, pipes = tmp_path / "kept", tmp_path / "libraries", tmp_path / "pipes"
    monkeypatch.setenv("CUDA_CACHE_PATH", str(kept))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(pipes))
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{libraries}")
    make_driver_caches(["CUDA"])
    assert kept.is_dir()
    assert {kept, pipes} <= set(device_folders())
    assert libraries in code_folders()
    assert Path() not in code_folders()
