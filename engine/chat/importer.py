"""`python -m engine.chat.importer`: takes the conversations of a file into the database, beside the window.

A large file takes seconds to parse, in which Python's parser holds up all threads of a process. The file is a
stranger's: the process reaches that file and the database's folder alone, and ends with its one answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from engine.base.confinement import device_folders, system_folders
from engine.base.errors import ChatError, EngineError
from engine.base.language import tr
from engine.chat.conversation import Conversation
from engine.chat.imports import Imported, read_conversations
from engine.chat.tree import MessageTree
from engine.runtime.process.decoders import ask_decoder
from engine.runtime.protocol.messages import Job, Message
from engine.runtime.protocol.pipe import Limits, run_child

SECONDS = 600.0


class ImportFile(Job, frozen=True, tag="import_file", kw_only=True):
    """Take the conversations of a file into the database. Paths are bytes, as the system has them."""

    database: bytes
    file: bytes


class FileImported(Message, frozen=True, tag="file_imported", kw_only=True):
    """The new conversations, or why there are none."""

    conversations: tuple[Conversation, ...] = ()
    fault: str = ""


def import_file(database: Path, path: Path, cancelled: Callable[[], bool] | None = None) -> tuple[Conversation, ...]:
    """Have a process of its own take the conversations of a file into the database; return them.

    Raises:
        ChatError: one sentence that names the file.
    """
    request = ImportFile(database=os.fsencode(database.absolute()), file=os.fsencode(path.absolute()), seconds=SECONDS)
    try:
        taken = ask_decoder("importer", request, FileImported, cancelled=cancelled)
    except EngineError:
        raise ChatError(tr("{name} takes too much time or memory to import; split it.", name=path.name)) from None
    if taken.fault:
        raise ChatError(taken.fault)
    return taken.conversations


def main() -> None:
    """Import files until the parent has what it wants."""
    run_child(ImportFile, _limits, lambda request, send: send(_imported(request)))


def _limits(request: ImportFile) -> Limits:
    folder = Path(os.fsdecode(request.database)).parent
    # no other folder can be written from here on; SQLite reads this when it is imported
    os.environ["SQLITE_TMPDIR"] = str(folder)
    return Limits(readable=(*system_folders(), Path(os.fsdecode(request.file))), writable=(*device_folders(), folder))


def _imported(request: ImportFile) -> FileImported:
    database, path = Path(os.fsdecode(request.database)), Path(os.fsdecode(request.file))
    try:
        return FileImported(conversations=_take_in(database, read_conversations(path)))
    except ChatError as error:
        return FileImported(fault=error.summary())


def _take_in(database: Path, found: tuple[Imported, ...]) -> tuple[Conversation, ...]:
    from engine.chat.store import ChatStore

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
