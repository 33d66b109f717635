"""Every file that we write, on faulty disks: the old or the new content, complete, and an error for a failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.faulty_children import build_preload
from tests.support.patience import DEADLINE_S

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the fault is preloaded, as Linux does it")

ROOT = Path(__file__).parents[2]
SQLITE_ERRORS = ("full", "short", "slow", "readonly", "sync", "rename", "gone")
FAIL = frozenset(SQLITE_ERRORS) - {"short", "slow"}
WRITES = """
import json, os, sys
from pathlib import Path
from engine.devices.device import Device, Rig, make_host
from engine.devices.rig_file import write_rig
from engine.model.demo.writer import write_demo_model
from engine.base.errors import EngineError
from engine.planning.fit.calibration import Calibration, write_calibration
from engine.planning.fit.speed_book import EMPTY_BOOK, write_speed_book

from engine.chat.presets import Preset, write_presets
from engine.planning.layout.layout import single_device
from engine.planning.layout.layout_file import LayoutFile, write_layout
from engine.machines.rigs.self_test import SelfTest, keep_verdict
from engine.planning.settings.context_settings import ContextSettings
from engine.devices.packs.signing import PackKeys, Publisher
from engine.devices.packs.store import PackBook, write_book
from engine.machines.doctor.report import Report, write_report
from engine.machines.rigs.check_results import CheckResults, write_check_results
from engine.machines.tunnel.pairings import PairingStore, make_pairing
from engine.runtime.child.generate.saved_kv_state import (
    ModelIdentity, SequenceFileError, SequenceHeader, write_sequence,
)

identity = ModelIdentity(
    description="m", architecture="llama", n_layer=1, n_embd=1, n_vocab=1, n_params=1, size_bytes=1, metadata=""
)


def write_state(path):
    def header(digest):
        return SequenceHeader(
            model=identity, type_k="f16", type_v="f16", swa_full=False, streams=1, flash_attention=None, tokens=2,
            state_bytes=1000, digest=digest,
        )

    write_sequence(path, [1, 2], [memoryview(bytes(1000))], header)


rig = Rig((Device("CUDA0", "card", "CUDA", "gpu", 1 << 34),), make_host("host", 1 << 36))
writes = {
    "rig.json": lambda path: write_rig(path, rig),
    "calibration.json": lambda path: write_calibration(path, Calibration({"CUDA a": (1,)})),
    "speeds.json": lambda path: write_speed_book(path, EMPTY_BOOK),
    "self_test.json": lambda path: keep_verdict(path, rig.devices[0], SelfTest(1, 0)),
    "demo.gguf": write_demo_model,
    "presets.json": lambda path: write_presets(path, [Preset(name="p")]),
    "pairings.json": lambda path: PairingStore(path)._write([make_pairing("server", "attic", b"certificate")]),
    "c.state": write_state,
    "packs.json": lambda path: write_book(path, PackBook(off=("vulkan",))),
    "publishers.json": lambda path: PackKeys(path, path)._keep((Publisher("ed25519:" + "A" * 43 + "=", "Ada"),)),
    "checks.json": lambda path: write_check_results(path, CheckResults()),
    "report.json": lambda path: write_report(path, Report()),
    "layout.json": lambda path: write_layout(path, LayoutFile("m", single_device(4, "CPU"), ContextSettings())),
}
said = {}
for folder in map(Path, sys.argv[1:]):
    fault = os.environ["FAULTY_DISK_FAULT"] = folder.name.split("-")[1]
    for name, write in writes.items():
        if name == "demo.gguf" and fault not in ("full", "rename", "short"):
            continue  # it is large, and written as the others are
        try:
            write(folder / name)
            said[f"{folder.name}/{name}"] = ""
        except EngineError as error:
            said[f"{folder.name}/{name}"] = error.summary()
        except SequenceFileError as error:
            said[f"{folder.name}/{name}"] = str(error)
print(json.dumps(said))
"""


NAMES = (
    "rig.json", "calibration.json", "speeds.json", "self_test.json", "demo.gguf", "layout.json", "presets.json",
    "pairings.json", "c.state", "packs.json", "publishers.json", "checks.json", "report.json",
)  # fmt: skip


def test_a_fault_of_the_disk_loses_nothing(tmp_path: Path) -> None:
    library = build_preload("faulty_disk", tmp_path)
    folders = [tmp_path / f"{before}-{fault}" for before in ("old", "new") for fault in SQLITE_ERRORS]
    for folder in folders:
        folder.mkdir()
        for name in NAMES if folder.name.startswith("old") else ():
            (folder / name).write_text("old")
    faults = {"FAULTY_DISK_FOLDER": str(tmp_path), "FAULTY_DISK_AFTER": "20", "LD_PRELOAD": str(library)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", WRITES, *map(str, folders)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **faults},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert len(said) == (len(NAMES) - 1) * len(folders) + 6
    for place, sentence in said.items():
        path = tmp_path / place
        if path.parent.name.split("-")[1] in FAIL:
            assert "cannot be written" in sentence, (place, sentence)
            assert path.read_text() == "old" if place.startswith("old") else not path.exists()
        else:
            assert sentence == ""
            assert path.stat().st_size > 20
    assert [path for folder in folders for path in folder.iterdir() if path.name not in NAMES] == []


KEYS = """
import json, os, sys
from pathlib import Path
from app.serving.key_file import read_keys, replace_keys
from engine.base.errors import EngineError
from engine.devices.packs.signing import PackKeys
from engine.machines.tunnel.identity import read_identity

makers = {
    "api.key": lambda path: read_keys(path, "Key"),
    "api2.key": lambda path: replace_keys(path, "Key"),
    "identity.pem": read_identity,
    "packs.pem": lambda path: PackKeys(path, path.with_suffix(".ring")).own() or PackKeys(path, path)._make(),
}
said = {}
for folder in map(Path, sys.argv[1:]):
    for name, make in makers.items():
        for fault in (folder.name, ""):
            os.environ["FAULTY_DISK_FAULT"] = fault
            try:
                make(folder / name)
                told = ""
            except EngineError as error:
                told = error.summary()
            said.setdefault(f"{folder.name}/{name}", []).append([told, sorted(path.name for path in folder.iterdir())])
        for path in folder.iterdir():
            path.unlink()
print(json.dumps(said))
"""


def test_a_key_that_cannot_be_written_leaves_nothing_and_is_made_when_there_is_room(tmp_path: Path) -> None:
    """An empty file of API keys stayed behind, and was refused for good."""
    faults = {"FAULTY_DISK_FOLDER": str(tmp_path), "LD_PRELOAD": str(build_preload("faulty_disk", tmp_path))}
    folders = [tmp_path / fault for fault in ("full", "gone", "readonly", "sync")]
    for folder in folders:
        folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-P", "-c", KEYS, *map(str, folders)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **faults},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for place, ((sentence, left), later) in json.loads(done.stdout).items():
        assert "cannot be used" in sentence, (place, sentence)
        assert left == [], place
        assert later == ["", [place.split("/")[1]]], place


CHATS = """
import json, os, sys
from contextlib import closing
from pathlib import Path
from engine.chat.conversation import Conversation
from engine.chat.store import ChatStore
from engine.base.errors import ChatError

said = {}
for fault in ("full", "gone", "short"):
    path = Path(sys.argv[1], fault, "chats.sqlite3")
    with closing(ChatStore(path)) as store:
        store.save(Conversation(id="before", title="Before")).result()
        os.environ["FAULTY_DISK_FAULT"] = fault
        try:
            store.save(Conversation(id="amid", title="Amid")).result()
            said[fault] = ["kept"]
        except ChatError as error:
            said[fault] = [error.summary()]
        os.environ["FAULTY_DISK_FAULT"] = ""
        store.save(Conversation(id="after", title="After")).exception()  # what waits for room is tried at times
    with closing(ChatStore(path)) as store:
        said[fault] += [store.notice, sorted(each.id for each in store.conversations())]
print(json.dumps(said))
"""


def test_conversations_survive_a_fault_of_the_disk(tmp_path: Path) -> None:
    """And a disk that is full is not taken for a damaged database."""
    faults = {"FAULTY_DISK_FOLDER": str(tmp_path), "LD_PRELOAD": str(build_preload("faulty_disk", tmp_path))}
    done = subprocess.run(
        [sys.executable, "-P", "-c", CHATS, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **faults},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    for fault in ("full", "gone"):
        sentence, notice, kept = said[fault]
        assert "cannot be saved" in sentence, said
        assert "check the disk" in sentence
        assert (notice, kept) == ("", ["after", "amid", "before"]), fault
    assert said["short"] == ["kept", "", ["after", "amid", "before"]]
    assert not list(tmp_path.rglob("*.damaged"))


NTH_WRITES = """
import json, os, sqlite3, sys
from contextlib import closing
from pathlib import Path
from engine.base.errors import EngineError
from engine.chat.conversation import Conversation
from engine.chat.store import ChatStore
from engine.library.downloads.part_file import Origin, PartFile, StorageError, read_journal
from engine.library.index import LibraryIndex

root, faults = Path(sys.argv[1]), 0


def begin(nth):
    os.environ["FAULTY_DISK_NTH"], os.environ["FAULTY_DISK_FAULT"] = str(nth), "nth"


def end():
    os.environ["FAULTY_DISK_FAULT"] = ""


for nth in range(1, int(sys.argv[2])):
    path = root / f"chats-{nth}" / "chats.sqlite3"
    with closing(ChatStore(path, makes_copies=False)) as store:
        store.save(Conversation(id="before", title="Before")).result()
        begin(nth)
        kept = ["before"]
        for number in range(6):
            try:
                store.save(Conversation(id=str(number), title="x" * 5000)).result()
                kept.append(str(number))
            except EngineError as error:
                faults += 1
                assert "cannot be saved" in error.summary(), error.summary()
        end()
    with closing(ChatStore(path, makes_copies=False)) as store:
        assert not store.notice, (nth, store.notice)
        there = {each.id for each in store.conversations()}
        assert there >= set(kept), (nth, kept, there)

    target = root / f"part-{nth}" / "m.gguf"
    done = 0
    begin(nth)
    try:
        part = PartFile(target, Origin(url="https://hub/m", size_bytes=1000), block_bytes=100)
        try:
            for at in range(0, 1000, 50):
                part.write(at, bytes([at // 50]) * 50)
                part.note()
                done = at + 50
        finally:
            part.close()
    except StorageError as error:
        faults += 1
        assert "cannot be written" in error.summary(), error.summary()
    end()
    noted = read_journal(target.with_name("m.gguf.part.json"))
    for first, last in () if noted is None else noted[1]:
        data = target.with_name("m.gguf.part").read_bytes()
        assert data[first:last] == b"".join(bytes([at // 50]) * 50 for at in range(0, 1000, 50))[first:last], nth
        assert last <= done + 50, (nth, last, done)
    with closing(PartFile(target, Origin(url="https://hub/m", size_bytes=1000), block_bytes=100)) as part:
        part.write(0, bytes(1))

    path = root / f"library-{nth}" / "library.sqlite"
    begin(nth)
    kept = False
    try:
        with closing(LibraryIndex(path)) as index:
            index.save_folders([root])
            kept = not index.not_saved
    except EngineError as error:
        faults += 1
    end()
    with closing(LibraryIndex(path)) as index:
        assert index.set_aside is None, nth
        assert not kept or index.folders() == (root,), nth
print(faults)
"""


@pytest.mark.parametrize("n_writes", [12, pytest.param(60, marks=pytest.mark.exhaustive)])
def test_whichever_write_fails_what_was_confirmed_is_there(tmp_path: Path, n_writes: int) -> None:
    faults = {"FAULTY_DISK_FOLDER": str(tmp_path), "LD_PRELOAD": str(build_preload("faulty_disk", tmp_path))}
    done = subprocess.run(
        [sys.executable, "-P", "-c", NTH_WRITES, str(tmp_path), str(n_writes)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **faults},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > n_writes // 2


LEFT_TO_THE_USER = """
import json, logging, os, sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from app.chats.transfer import FORMS, ChatTransfer
from app.library.named_layouts import NamedLayouts
from app.log_file import log_file
from app.run_records import OpenedModel, RunRecords
from app.settings import Settings
from app.window.dialogs import write_chosen
from app.window.layout.exchange_presenter import _write
from engine.base.errors import EngineError
from engine.chat.conversation import Conversation
from engine.chat.message import Message
from engine.chat.store import ChatStore
from engine.library.downloads.placing import write_refs
from engine.library.downloads.queue import DownloadQueue
from engine.library.hub.remote_header import HeaderCache
from engine.library.index import LibraryIndex
from engine.library.notes import SavedDocument
from engine.machines.bench import results

root = Path(sys.argv[1])
document = SavedDocument("layout", "mine", "x" * 500)
store = ChatStore(root / "home" / "chats.sqlite3")
store.save(Conversation(id="c", title="Chat")).result()
store.finish("c", Message(id="m", role="user", content="x" * 500)).result()
archive = SimpleNamespace(work=lambda what, work, then: work(store))
library = SimpleNamespace(run=lambda what, work, then: work())
layouts = SimpleNamespace(_library=library, _notices=None)
results.encode_document = lambda found: b"x" * 500
results.msgspec = SimpleNamespace(to_builtins=lambda found: found)


def export(form):
    return lambda path: ChatTransfer(archive, None).export(["c"], path, form)


def headers(path):
    cache = HeaderCache(path.parent)
    cache._path = lambda key: path
    cache.keep("key", b"x" * 500)


def mark(path):
    marks = RunRecords(path.parent)
    marks._path = path
    try:
        marks.keep((OpenedModel("x" * 500),), restored=False)
    except OSError:
        pass  # its caller writes a line into the log


def queue(path):
    # The thread is not needed for a list that is only written.
    downloads = SimpleNamespace(_path=path, _jobs=[])
    DownloadQueue._keep(downloads)


def settings(path):
    found = Settings(path)
    found.store.setValue("text", "x" * 500)
    found.sync()


writes = {
    "bench.json": lambda path: results.write_results(path, None),
    "readings.csv": lambda path: write_chosen(path, b"x" * 500),
    "history.png": lambda path: write_chosen(path, bytes(500)),
    **{f"chat{number}": export(form) for number, form in enumerate(FORMS)},
    "layout.json": lambda path: NamedLayouts.export_file(layouts, document, path),
    "command.txt": lambda path: _write(path, "x" * 500),
    "refs": lambda path: write_refs([(str(path), "x" * 500)]),
    "a.header": headers,
    "run.mark": mark,
    "queue.json": queue,
    "layerdeck.ini": settings,
}
said = {}
for folder in map(Path, sys.argv[2:]):
    for name, write in writes.items():
        path = folder / name
        for fault in (folder.name, ""):
            os.environ["FAULTY_DISK_FAULT"] = fault
            try:
                write(path)
                told = ""
            except EngineError as error:
                told = error.summary()
            os.environ["FAULTY_DISK_FAULT"] = ""
            said.setdefault(f"{folder.name}/{name}", []).append([told, path.read_text("latin-1") == "old"])
store.close()

# Files that are written bit by bit.
for fault in ("full", "gone"):
    path = root / fault / "library.sqlite"
    with closing(LibraryIndex(path)) as index:
        index.save_document("f", SavedDocument("layout", "before", "x"))
        os.environ["FAULTY_DISK_FAULT"] = fault
        try:
            index.save_document("f", SavedDocument("layout", "amid", "x"))
            told = ""
        except EngineError as error:
            told = error.summary()
        os.environ["FAULTY_DISK_FAULT"] = ""
    with closing(LibraryIndex(path)) as index:
        index.save_document("f", SavedDocument("layout", "after", "x"))
        names = sorted(each.name for each in index.documents("f"))
        said[f"{fault}/library"] = [told, index.set_aside is None, names]
    handler = log_file(root / fault / "log" / "app.log")
    for entry in ("before", "amid", "after"):
        os.environ["FAULTY_DISK_FAULT"] = fault if entry == "amid" else ""
        handler.handle(logging.makeLogRecord({"msg": entry}))
    handler.close()
    said[f"{fault}/log"] = (root / fault / "log" / "app.log").read_text()
print(json.dumps(said))
"""
USERS = (
    "bench.json", "readings.csv", "history.png", "chat0", "chat1", "chat2", "chat3", "chat4", "layout.json",
    "command.txt", "refs", "a.header", "run.mark", "queue.json", "layerdeck.ini",
)  # fmt: skip
SILENT = {"a.header", "run.mark", "queue.json", "layerdeck.ini"}
"""Files whose loss is noted in the log at most: caches, marks and lists that are written again with the next change."""


def test_what_a_fault_has_kept_from_a_file_is_written_when_there_is_room(tmp_path: Path) -> None:
    library = build_preload("faulty_disk", tmp_path)
    folders = [tmp_path / fault for fault in SQLITE_ERRORS]
    for folder in folders:
        folder.mkdir()
        for name in USERS:
            (folder / name).write_text("old")
    environment = {"FAULTY_DISK_FOLDER": str(tmp_path), "FAULTY_DISK_AFTER": "20", "LD_PRELOAD": str(library)}
    environment |= {"HOME": str(tmp_path / "home"), "QT_QPA_PLATFORM": "offscreen", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", LEFT_TO_THE_USER, str(tmp_path), *map(str, folders)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    for fault in ("full", "gone"):
        sentence, is_whole, names = said.pop(f"{fault}/library")
        assert "cannot be written" in sentence
        assert (is_whole, names) == (True, ["after", "before"]), fault
        lines = said.pop(f"{fault}/log").splitlines()
        # The entry in between is lost, or written from the buffer with the next one.
        assert [line.rpartition(" ")[2] for line in lines if "amid" not in line] == ["before", "after"], fault
    assert len(said) == len(USERS) * len(folders)
    for place, ((sentence, is_old), later) in said.items():
        fault, name = place.split("/")
        # QSettings replaces its file as we do, and does not sync it.
        if fault in FAIL and place != "sync/layerdeck.ini":
            assert name in SILENT or sentence, place
            assert is_old, place
        else:
            assert (sentence, is_old) == ("", False), place
        assert later == ["", False], place
    # Lock files of QSettings are its own, and stay for no longer than a write.
    assert [path.name for folder in folders for path in folder.iterdir() if path.is_file() and "tmp" in path.name] == []


SETTINGS = """
import json, os, sys
from pathlib import Path
from PySide6.QtCore import QCoreApplication
import app.settings
from app.settings import Settings

app.settings.RETRY_MS = 1
application = QCoreApplication([])
path = Path(sys.argv[1], "layerdeck.ini")
settings, said = Settings(path), []
settings.watch(lambda text, is_bad: said.append([text, is_bad]))
settings.serve_host = "before"
while not path.exists():
    application.processEvents()
os.environ["FAULTY_DISK_FAULT"] = sys.argv[2]
for host in ("amid", "later"):
    settings.serve_host = host
    application.processEvents()
while not said:
    application.processEvents()
for _ in range(1000):
    application.processEvents()
amid = [len(said), "before" in path.read_text()]
os.environ["FAULTY_DISK_FAULT"] = ""
while len(said) < 2:
    application.processEvents()
print(json.dumps([said, amid, Settings(path).serve_host, "later" in path.read_text()]))
"""


@pytest.mark.parametrize("fault", ["full", "gone", "readonly", "rename"])
def test_settings_that_cannot_be_stored_are_told_once_and_stored_when_there_is_room(fault: str, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    faults = {"FAULTY_DISK_FOLDER": str(tmp_path / "own"), "LD_PRELOAD": str(build_preload("faulty_disk", tmp_path))}
    done = subprocess.run(
        [sys.executable, "-P", "-c", SETTINGS, str(tmp_path / "own"), fault],
        env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), **faults},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    ((failed, is_bad), (again, is_still_bad)), amid, host, is_whole = json.loads(done.stdout)
    assert "Settings cannot be saved in" in failed
    assert "saved again" in again
    assert (is_bad, is_still_bad) == (True, False)
    assert amid == [1, True], "told once, and the file is whole"
    assert (host, is_whole) == ("later", True)
