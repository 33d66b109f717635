"""Every file that we write, on disks with a fault: the old file or the new one, whole, and a sentence for a failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.faulty_children import build_preload

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the fault is preloaded, as Linux does it")

ROOT = Path(__file__).parents[2]
FAULTS = ("full", "short", "slow", "readonly", "sync", "rename", "gone")
FAIL = frozenset(FAULTS) - {"short", "slow"}
WRITES = """
import json, sys
from pathlib import Path
from engine.devices.device import Device, Rig, make_host
from engine.devices.rig_file import write_rig
from engine.demo.writer import write_demo_model
from engine.errors import EngineError
from engine.fit.calibration import Calibration, write_calibration
from engine.fit.speed_book import EMPTY_BOOK, write_speed_book

from engine.layout.layout import single_device
from engine.layout.layout_file import LayoutFile, write_layout
from engine.rigs.self_test import SelfTest, keep_verdict
from engine.settings.context_settings import ContextSettings


folder = Path(sys.argv[1])
rig = Rig((Device("CUDA0", "card", "CUDA", "gpu", 1 << 34),), make_host("host", 1 << 36))
writes = {
    "rig.json": lambda path: write_rig(path, rig),
    "calibration.json": lambda path: write_calibration(path, Calibration({"CUDA a": (1,)})),
    "speeds.json": lambda path: write_speed_book(path, EMPTY_BOOK),
    "self_test.json": lambda path: keep_verdict(path, rig.devices[0], SelfTest(1, 0)),
    "demo.gguf": write_demo_model,
    "layout.json": lambda path: write_layout(path, LayoutFile("m", single_device(4, "CPU"), ContextSettings())),
}
said = {}
for name, write in writes.items():
    try:
        write(folder / name)
        said[name] = ""
    except EngineError as error:
        said[name] = error.summary()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_preload("faulty_disk", tmp_path_factory.mktemp("library"))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("existing", [True, False])
def test_a_fault_of_the_disk_loses_nothing(tmp_path: Path, library: Path, fault: str, *, existing: bool) -> None:
    folder = tmp_path / "faulty"
    folder.mkdir()
    names = ("rig.json", "calibration.json", "speeds.json", "self_test.json", "demo.gguf", "layout.json")
    for name in names if existing else ():
        (folder / name).write_text("old")
    faults = {"FAULTY_DISK_FOLDER": str(folder), "FAULTY_DISK_FAULT": fault, "FAULTY_DISK_AFTER": "20"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", WRITES, str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "LD_PRELOAD": str(library), **faults},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert set(said) == set(names)
    for name, sentence in said.items():
        path = folder / name
        if fault in FAIL:
            assert name.split(".")[0].split("_")[0] in sentence or "written" in sentence, (name, sentence)
            assert path.read_text() == "old" if existing else not path.exists()
        else:
            assert sentence == ""
            assert path.stat().st_size > 20
    assert [path.name for path in folder.iterdir() if path.name.endswith(".tmp")] == []
