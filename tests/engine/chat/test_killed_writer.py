"""A writing process killed at random moments: everything that it had acknowledged is stored, in order and complete."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.chat.store import ChatStore

WRITER = """
import os, sys, threading
from pathlib import Path
from engine.chat.conversation import Conversation
from engine.chat.message import Message
from engine.chat.store import ChatStore
from engine.chat.tree import MessageTree, add
import msgspec

store = ChatStore(Path(sys.argv[1]))

def say(word):
    # said by the writing thread, in one write: what has arrived had been kept before
    return lambda done: os.write(1, f"{word}\\n".encode()) if done.exception() is None else os._exit(3)

store.save(Conversation(id="c"))
tree = MessageTree()
for turn in range(1000):
    leaf = tree.leaf
    after = add(tree, Message(id=f"q{turn}", role="user", content=f"question {turn}", parent=leaf))
    after = add(after, Message(id=f"a{turn}", role="assistant", content="", parent=f"q{turn}", state="writing"))
    store.apply("c", tree, after).add_done_callback(say(f"q{turn}"))
    words = []
    for piece in range(40):
        words.append(f"{piece} ")
        kept = store.append(f"a{turn}", content=words[-1])
        kept.add_done_callback(say(f"a{turn} {piece}"))
        if piece % 7 == 0:
            kept.result()
    answer = msgspec.structs.replace(after.messages[f"a{turn}"], content="".join(words), state="done")
    store.finish("c", answer).add_done_callback(say(f"done{turn}"))
    tree = MessageTree({**after.messages, answer.id: answer}, answer.id)
"""


@pytest.mark.parametrize("heard", [1, 2, 17, 41, 42, 43, 90, 250])
def test_nothing_that_was_acknowledged_is_lost(tmp_path: Path, heard: int) -> None:
    path = tmp_path / "chats.sqlite"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = [child.stdout.readline().strip() for _ in range(heard)]
        child.kill()
        said += child.stdout.read().split("\n")[:-1]
    assert said[0] == "q0"
    store = ChatStore(path)
    try:
        messages = store.tree("c").messages
    finally:
        store.close()
    assert store.notice == ""
    assert not any(message.state == "writing" for message in messages.values())
    for line in said:
        word, _, piece = line.partition(" ")
        if word.startswith("q"):
            assert messages[word].content == f"question {word[1:]}"
        elif word.startswith("done"):
            answer = messages["a" + word.removeprefix("done")]
            assert (answer.state, answer.content.split()) == ("done", [str(number) for number in range(40)])
        else:
            answer = messages[word]
            assert answer.content.split()[: int(piece) + 1] == [str(number) for number in range(int(piece) + 1)]
