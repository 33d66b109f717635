"""`python -m engine.chat.importer`: the child process that imports the conversations of a file into the database.

Parsing a large file takes seconds, and Python's JSON parser holds the interpreter lock (GIL) meanwhile. In a child
process this does not block the window. The file may come from a stranger, so the child can access only this file and
the database's folder, and ends after one request.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

from engine.base.confinement import IMPORTER
from engine.base.errors import ChatError, EngineError, WorkerStalledError
from engine.base.language import tr
from engine.base.values import replace
from engine.chat.conversation import Conversation
from engine.chat.imports import Imported, read_conversations
from engine.chat.message import now_ms
from engine.chat.tree import MessageTree
from engine.runtime.process.decoders import ask_decoder
from engine.runtime.protocol.messages import Message
from engine.runtime.protocol.pipe import Limits, run_child
from engine.runtime.protocol.requests import Job

SECONDS = 600.0


class ImportFile(Job, frozen=True, tag="import_file", kw_only=True):
    """The request to import a file's conversations.

    `database`, `file`: paths as bytes, which need not be valid UTF-8.
    """

    database: bytes
    file: bytes


class FileImported(Message, frozen=True, tag="file_imported", kw_only=True):
    """Answer to `ImportFile`: the imported conversations. `fault`: a sentence on why there are none; empty if the
    import succeeded.
    """

    conversations: tuple[Conversation, ...] = ()
    fault: str = ""


def import_file(database: Path, path: Path, cancelled: Callable[[], bool] | None = None) -> tuple[Conversation, ...]:
    """Import the conversations of a file in a child process, and return them. Blocks until it ends.

    `cancelled`: returns whether to stop.

    Raises:
        ChatError: the file cannot be imported; the sentence names it.
    """
    request = ImportFile(database=os.fsencode(database.absolute()), file=os.fsencode(path.absolute()), seconds=SECONDS)
    try:
        taken = ask_decoder("importer", request, FileImported, cancelled=cancelled)
    except EngineError as error:
        # The system ends a process that takes too much memory by a signal; the alarm is one as well.
        if isinstance(error, WorkerStalledError) or getattr(error, "signal", None) is not None:
            raise ChatError(_too_much(path)) from None
        raise ChatError(tr("{name} cannot be imported. {reason}", name=path.name, reason=error.summary())) from None
    if taken.fault:
        raise ChatError(taken.fault)
    return taken.conversations


def _too_much(path: Path) -> str:
    return tr("Importing {name} takes too much time or memory; split the file.", name=path.name)


def main() -> None:
    """Run the child process: answer requests until the parent ends it."""
    run_child(ImportFile, _limits, lambda request, send: send(_imported(request)))


def _limits(request: ImportFile) -> Limits:
    folder = Path(os.fsdecode(request.database)).parent
    # Only the database's folder stays writable, so SQLite's temporary files must go there. SQLite reads the variable
    # when it is loaded, which happens after this.
    os.environ["SQLITE_TMPDIR"] = str(folder)
    return Limits(IMPORTER, (Path(os.fsdecode(request.file)),), (folder,))


def _imported(request: ImportFile) -> FileImported:
    database, path = Path(os.fsdecode(request.database)), Path(os.fsdecode(request.file))
    try:
        return FileImported(conversations=_take_in(database, read_conversations(path)))
    except MemoryError:
        return FileImported(fault=_too_much(path))
    except ChatError as error:
        return FileImported(fault=error.summary())


def _take_in(database: Path, found: tuple[Imported, ...]) -> tuple[Conversation, ...]:
    """Store the conversations, and return them as they are stored.

    They are marked as deleted until all are stored, and the mark is removed in one transaction. So an import that fails
    or is killed leaves nothing in the list, and can be repeated.
    """
    # Imported after `_limits`, which sets the folder for SQLite's temporary files.
    from engine.chat.store import ChatStore

    with closing(ChatStore(database, makes_copies=False)) as store:
        hidden = [replace(each.conversation, deleted_ms=now_ms(), updated_ms=now_ms()) for each in found]
        begun: list[Future[None]] = []
        for each, conversation in zip(found, hidden, strict=True):
            begun += [store.keep_file(data)[1] for data in each.files.values()]
            begun += [store.save(conversation), store.apply(conversation.id, MessageTree(), each.tree)]
        for future in begun:
            future.result()
        shown = [each.conversation for each in found]
        try:
            store.save_all(tuple(zip(shown, hidden, strict=True))).result()
            return tuple(filter(None, (store.conversation(each.id) for each in hidden)))
        except ChatError:
            # The change may wait in memory, and closing the store writes it. This one is written after it.
            store.save_all(tuple(zip(hidden, shown, strict=True)))
            raise


if __name__ == "__main__":
    main()
