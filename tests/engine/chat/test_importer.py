"""Import of conversations in a child process: a large file blocks no thread of ours."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from engine.base.errors import ChatError
from engine.chat import imports
from engine.chat.conversation import Conversation
from engine.chat.exports import as_json
from engine.chat.importer import import_file
from engine.chat.message import Message
from engine.chat.store import ChatStore
from engine.chat.tree import MessageTree, tree_of
from engine.runtime.process import decoders
from tests.support.kept_conversation import CHAT, DATA, kept_tree


def test_all_of_a_file_is_there_with_its_attachments(tmp_path: Path) -> None:
    path, database = tmp_path / "ex\udcffport.json", tmp_path / "data" / "chats.sqlite3"
    tree = kept_tree()
    names = {each.sha256 for message in tree.messages.values() for each in message.attachments if each.sha256}
    path.write_bytes(as_json([(CHAT, tree)], dict.fromkeys(names, DATA)))
    with closing(ChatStore(database)) as store:
        (found,) = import_file(database, path)
        assert [chat.id for chat in store.conversations()] == [found.id]
        assert (found.title, found.system) == (CHAT.title, CHAT.system)
        back = store.tree(found.id)
        assert [message.content for message in back.path] == [message.content for message in tree.path]
        assert {name: store.file(name) for name in names} == dict.fromkeys(names, DATA)


def test_what_is_wrong_is_the_same_sentence(tmp_path: Path) -> None:
    path, database = tmp_path / "bad.json", tmp_path / "chats.sqlite3"
    with pytest.raises(ChatError, match=r"^bad.json cannot be read \(No such file"):
        import_file(database, path)
    path.write_text("{}")
    with pytest.raises(ChatError, match=r"^bad.json cannot be imported"):
        import_file(database, path)
    path.write_text(json.dumps([{"conv": {"name": "a"}, "messages": []}]))
    (tmp_path / "file").touch()
    with pytest.raises(ChatError, match="check the folder"):
        import_file(tmp_path / "file" / "chats.sqlite3", path)


def test_nothing_is_parsed_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser holds up all threads of its process for as long as a file takes."""
    monkeypatch.setattr(imports, "parse_conversations", None)
    path, database = tmp_path / "old.json", tmp_path / "chats.sqlite3"
    message = {"id": "a", "role": "user", "content": "x"}
    path.write_text(json.dumps([{"conv": {"name": str(number)}, "messages": [message]} for number in range(300)]))
    assert [chat.title for chat in import_file(database, path)] == [str(number) for number in range(300)]
    with closing(ChatStore(database)) as store:
        assert len(store.conversations()) == 300


def test_an_answer_that_is_being_written_stays_open(tmp_path: Path) -> None:
    """The import runs in a confined process, which took all other processes for ended: text was lost with a kill."""
    path, database = tmp_path / "one.json", tmp_path / "chats.sqlite3"
    path.write_bytes(as_json([(CHAT, kept_tree())], {}))
    question = Message(id="q", role="user", content="Why?")
    answer = Message(id="a", role="assistant", parent="q", content="", state="writing")
    with closing(ChatStore(database)) as store:
        store.save(Conversation(id="c"))
        store.apply("c", MessageTree(), tree_of([question, answer], "a"))
        store.append("a", content="some ").result()
        import_file(database, path)
        store.append("a", content="words").result()
        found = store.tree("c").path[-1]
        assert (found.content, found.state) == ("some words", "writing")


def test_a_process_that_does_not_answer_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "child_argv", lambda _child: [sys.executable, "-c", "import os; os.abort()"])
    with pytest.raises(ChatError, match=r"^Importing big.json takes too much"):
        import_file(tmp_path / "chats.sqlite3", tmp_path / "big.json")


def test_the_database_engine_is_told_its_folder_before_it_begins() -> None:
    """It asks once where temporary files may be, and a confined process can write in one folder alone."""
    code = "import sys, engine.chat.importer; sys.exit('sqlite3' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
