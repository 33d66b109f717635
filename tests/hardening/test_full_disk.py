"""A disk that becomes full during a chat: messages stay readable, and are written once there is space."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.chat.store import ChatStore
from tests.support.faulty_children import build_preload
from tests.support.patience import DEADLINE_S

LINUX_ONLY = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the fault is preloaded, as Linux does it")
ROOT = Path(__file__).parents[2]
TALK = """
import json, os, sys
from pathlib import Path
from engine.chat.conversation import Conversation
from engine.chat.message import Attachment, Message
from engine.chat.store import ChatStore
from engine.chat.tree import MessageTree, add
from engine.base.errors import ChatError
import msgspec

folder, full = Path(sys.argv[1]), Path(sys.argv[2])
store = ChatStore(folder / "chats.sqlite")
store.save(Conversation(id="before")).result()

def outcome(future):
    try:
        future.result()
    except ChatError as error:
        return error.summary()
    return ""

def turn(chat, tree, name, attachments=()):
    words = "Question " + name
    question = Message(id="q" + name, role="user", content=words, parent=tree.leaf, attachments=attachments)
    after = add(tree, question)
    answer = Message(id="a" + name, role="assistant", content="", parent=question.id, state="writing")
    after = add(after, answer)
    said = [store.apply(chat, tree, after)]
    for piece in range(30):
        said.append(store.append(answer.id, f"{piece} "))
    whole = msgspec.structs.replace(answer, content="".join(f"{piece} " for piece in range(30)), state="done")
    said.append(store.finish(chat, whole))
    return MessageTree({**after.messages, answer.id: whole}, answer.id), said

tree, said = turn("before", MessageTree(), "0")
assert not any(map(outcome, said))
full.touch()
tree, said = turn("before", tree, "1")
sha256, kept = store.keep_file(bytes(300_000))
said += [kept, store.save(Conversation(id="new", title="New"))]
attached = Attachment(id="f", kind="image", name="i.png", mime="image/png", sha256=sha256, size_bytes=300_000)
new, more = turn("new", MessageTree(), "2", (attached,))
sentences = {outcome(each) for each in (*said, *more)}
store.settled().result()
seen = {
    "chats": sorted(each.id for each in store.conversations()),
    "before": [each.content for each in store.tree("before").path],
    "new": [each.content for each in store.tree("new").path],
    "file": len(store.file(sha256) or b""),
    "found": len(store.search("Question 2")),
}
full.unlink()
new, said = turn("new", new, "3")
for each in said:
    outcome(each)  # those that come before the next look are told that there was no room
while store.is_behind:
    store.settled().result()
assert not outcome(store.append("a3", ""))
print(json.dumps({"sentences": sorted(sentences), "seen": seen, "sha256": sha256}))
if "killed" in sys.argv:
    sys.stdout.flush()
    os.kill(os.getpid(), 9)
store.close()
"""
WORDS = "".join(f"{piece} " for piece in range(30))


@LINUX_ONLY
@pytest.mark.parametrize("ending", ["closed", "killed"])
def test_what_had_no_room_is_read_and_written_later(tmp_path: Path, ending: str) -> None:
    """A conversation that began on a full disk was never kept, however much room there was later."""
    told = run_on_faulty_disk(TALK, tmp_path, {}, ending)
    assert len(told["sentences"]) == 1
    assert "check the disk's free space" in told["sentences"][0]
    assert told["seen"] == {
        "chats": ["before", "new"],
        "before": ["Question 0", WORDS, "Question 1", WORDS],
        "new": ["Question 2", WORDS],
        "file": 300_000,
        "found": 1,
    }
    store = ChatStore(tmp_path / "disk" / "chats.sqlite")
    try:
        assert [each.content for each in store.tree("before").path] == ["Question 0", WORDS, "Question 1", WORDS]
        assert [each.content for each in store.tree("new").path] == ["Question 2", WORDS, "Question 3", WORDS]
        assert len(store.file(told["sha256"]) or b"") == 300_000
    finally:
        store.close()


CHAT = """
import json, sys
from pathlib import Path
from PySide6.QtCore import QEventLoop
from PySide6.QtWidgets import QApplication
from tests.app.chats.bench import Bench

folder, full = Path(sys.argv[1]), Path(sys.argv[2])
application = QApplication(sys.argv[:1])

class Bot:
    def waitUntil(self, condition):
        while not condition():
            application.processEvents(QEventLoop.ProcessEventsFlag.WaitForMoreEvents, 50)

bench = Bench(Bot(), folder)
archive, told = bench.desk.archive, []
bench.desk.notices.given.connect(told.append)
bench.wait(lambda: archive.chats is not None and archive._store is not None)
bench.load(n_ctx=4096, sees=True)
bench.attach(1)
bench.attacher.take()
bench.say("Before")
first = bench.conversation.chat.id
full.touch()
bench.say("While it is full " * 100)
bench.settle()
bench.conversation.begin()
bench.attacher.add([folder / "1.png"])
bench.wait(lambda: not bench.attacher.is_reading)
answer = bench.say("What is on this image?")
second, shown = bench.conversation.chat.id, [message.content for message in bench.path]
bench.desk.chat_controller.open(first)
bench.wait(lambda: bench.conversation.chat.id == first)
states = [message.state for message in bench.path]
bench.desk.chat_controller.open(second)
bench.wait(lambda: bench.conversation.chat.id == second)
again = [message.content for message in bench.path]
meanwhile = [notice.text for notice in told if notice.bad]
full.unlink()
bench.wait(lambda: not archive._store.is_behind)
bench.say("And now?")
bench.wait(lambda: any("saved again" in notice.text for notice in told))
bench.desk.close()
print(json.dumps({
    "first": first, "second": second, "answer": [answer.state, answer.note], "states": states, "same": shown == again,
    "meanwhile": meanwhile, "bad": [notice.text for notice in told if notice.bad],
}))
"""


@pytest.mark.exhaustive
@LINUX_ONLY
def test_on_a_full_disk_a_chat_goes_on_and_is_whole_afterwards(tmp_path: Path) -> None:
    """With the real engine, an attached image and another conversation in between: one sentence, and one at the end."""
    folder = tmp_path / "disk"
    places = {f"XDG_{name}_HOME": str(folder / name) for name in ("DATA", "CACHE", "CONFIG", "STATE")}
    told = run_on_faulty_disk(CHAT, tmp_path, places)
    assert told["answer"] == ["done", ""]
    assert told["states"] == ["done"] * 4
    assert told["same"]
    (sentence,) = told["meanwhile"]
    assert "New messages are shown, but not saved" in sentence
    assert told["bad"] == told["meanwhile"]
    (path,) = folder.rglob("chats.sqlite3")
    kept = ChatStore(path)
    try:
        assert [len(kept.tree(told[name]).path) for name in ("first", "second")] == [4, 4]
        (image,) = kept.tree(told["second"]).path[0].attachments
        assert kept.file(image.sha256)
    finally:
        kept.close()


def run_on_faulty_disk(script: str, tmp_path: Path, places: Mapping[str, str], *words: str) -> Any:
    """Run `script` with a folder whose disk is full as long as a file is there; return what it says in JSON."""
    library = build_preload("faulty_disk", tmp_path)
    folder, full = tmp_path / "disk", tmp_path / "is-full"
    folder.mkdir()
    faults = {
        "FAULTY_DISK_FOLDER": str(folder),
        "FAULTY_DISK_FAULT": "full",
        "FAULTY_DISK_WHILE": str(full),
        "LD_PRELOAD": str(library),
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, str(folder), str(full), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **faults, **places},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == (-9 if "killed" in words else 0), done.stderr
    return json.loads(done.stdout)
