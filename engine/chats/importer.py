"""`python -m engine.chats.importer`: takes the conversations of a file into the database, beside the window.

A large file takes seconds to parse, in which Python's parser holds up all threads of a process. The file is a
stranger's: the process reaches that file and the database's folder alone, and ends when it has said what came of it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec

from engine.chats.conversation import Conversation
from engine.chats.imports import Imported, read_conversations
from engine.chats.tree import MessageTree
from engine.confinement import code_folders, confine, device_folders, refuse_core_files, system_folders
from engine.errors import ChatError
from engine.json_file import UNREADABLE
from engine.language import tr
from engine.programs import ask_once, child_argv, never

_TIMEOUT_S = 600.0
_MAX_ORDER_BYTES = 1 << 16
_MAX_ANSWER_BYTES = 256 << 20


class _Order(msgspec.Struct, frozen=True, kw_only=True):
    """Paths as the system has them, in bytes."""

    database: bytes
    file: bytes


class _TakenIn(msgspec.Struct, frozen=True, kw_only=True):
    """The new conversations, or why there are none."""

    conversations: tuple[Conversation, ...] = ()
    fault: str = ""


def import_file(database: Path, path: Path, cancelled: Callable[[], bool] = never) -> tuple[Conversation, ...]:
    """Have a process of its own take the conversations of a file into the database; return them.

    Raises:
        ChatError: one sentence that names the file.
    """
    order = _Order(database=os.fsencode(database.absolute()), file=os.fsencode(path.absolute()))
    try:
        answer = ask_once(
            child_argv("importer"),
            msgspec.json.encode(order),
            timeout_s=_TIMEOUT_S,
            max_bytes=_MAX_ANSWER_BYTES,
            own_group=False,
            cancelled=cancelled,
            name="importer",
        )
        taken = msgspec.json.decode(answer, type=_TakenIn)
    except (OSError, *UNREADABLE):
        raise ChatError(tr("{name} takes too much time or memory to import; split it.", name=path.name)) from None
    if taken.fault:
        raise ChatError(taken.fault)
    return taken.conversations


def main() -> None:
    """Take one order, carry it out, answer and end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    refuse_core_files()
    data = sys.stdin.buffer.read(_MAX_ORDER_BYTES)
    if not data:
        return
    order = msgspec.json.decode(data, type=_Order)
    database, path = Path(os.fsdecode(order.database)), Path(os.fsdecode(order.file))
    # no other folder can be written from here on; SQLite reads this when it is imported
    os.environ["SQLITE_TMPDIR"] = str(database.parent)
    confine(
        readable=(*code_folders(), *system_folders(), path),
        writable=(*device_folders(), database.parent),
    )
    try:
        found = _TakenIn(conversations=_take_in(database, read_conversations(path)))
    except ChatError as error:
        found = _TakenIn(fault=error.summary())
    sys.stdout.buffer.write(msgspec.json.encode(found))


def _take_in(database: Path, found: tuple[Imported, ...]) -> tuple[Conversation, ...]:
    from engine.chats.store import ChatStore

    with closing(ChatStore(database, makes_copies=False)) as store:
        for each in found:
            for data in each.files.values():
                store.keep_file(data)
            store.save(each.conversation)
            last = store.apply(each.conversation.id, MessageTree(), each.tree)
        try:
            last.result()
        except ChatError:
            for each in found:  # whoever is told that it failed imports it once more
                store.delete(each.conversation.id)
            raise
    return tuple(each.conversation for each in found)


if __name__ == "__main__":
    main()
