"""The tables of kept conversations, and how a database of an earlier version becomes one of this version.

The version is SQLite's `user_version`; each script of `SCRIPTS` leads to the next one and stays as it is once shipped.
Text that is being written comes in as rows of `piece`, so that a long answer is not written anew with each; the text
index holds a message when nothing is written to it any more.
"""

from __future__ import annotations

import sqlite3

_FIRST = (
    """CREATE TABLE conversation (
        id TEXT PRIMARY KEY, title TEXT NOT NULL, folder TEXT NOT NULL, pinned INTEGER NOT NULL, leaf TEXT,
        system TEXT NOT NULL, preset TEXT NOT NULL, settings TEXT NOT NULL, template TEXT NOT NULL,
        draft TEXT NOT NULL, forked_from TEXT, created_ms INTEGER NOT NULL, updated_ms INTEGER NOT NULL,
        deleted_ms INTEGER)""",
    "CREATE INDEX conversation_by_time ON conversation (deleted_ms, pinned, updated_ms)",
    """CREATE TABLE message (
        number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE,
        conversation TEXT NOT NULL REFERENCES conversation (id) ON DELETE CASCADE,
        place INTEGER NOT NULL, parent TEXT, role TEXT NOT NULL, content TEXT NOT NULL,
        reasoning TEXT NOT NULL, details TEXT NOT NULL, state TEXT NOT NULL, writer TEXT,
        pinned INTEGER NOT NULL, created_ms INTEGER NOT NULL)""",
    "CREATE INDEX message_by_conversation ON message (conversation, place)",
    "CREATE INDEX message_being_written ON message (writer) WHERE writer IS NOT NULL",
    """CREATE TABLE piece (
        number INTEGER PRIMARY KEY, message TEXT NOT NULL REFERENCES message (id) ON DELETE CASCADE,
        content TEXT NOT NULL, reasoning TEXT NOT NULL)""",
    "CREATE INDEX piece_by_message ON piece (message, number)",
    """CREATE TABLE attachment (
        number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE,
        message TEXT NOT NULL REFERENCES message (id) ON DELETE CASCADE,
        kind TEXT NOT NULL, name TEXT NOT NULL, mime TEXT NOT NULL, sha256 TEXT NOT NULL,
        size_bytes INTEGER NOT NULL, text TEXT NOT NULL)""",
    "CREATE INDEX attachment_by_message ON attachment (message, number)",
    "CREATE INDEX attachment_by_content ON attachment (sha256)",
    "CREATE TABLE file (sha256 TEXT PRIMARY KEY, data BLOB NOT NULL)",
    """CREATE VIRTUAL TABLE message_text USING fts5 (
        content, content='message', content_rowid='number', tokenize='trigram')""",
    """CREATE TRIGGER message_added AFTER INSERT ON message WHEN new.state <> 'writing' BEGIN
        INSERT INTO message_text (rowid, content) VALUES (new.number, new.content); END""",
    """CREATE TRIGGER message_gone AFTER DELETE ON message WHEN old.state <> 'writing' BEGIN
        INSERT INTO message_text (message_text, rowid, content) VALUES ('delete', old.number, old.content); END""",
    """CREATE TRIGGER message_taken_out AFTER UPDATE OF content, state ON message
        WHEN old.state <> 'writing' AND (new.state = 'writing' OR new.content IS NOT old.content) BEGIN
        INSERT INTO message_text (message_text, rowid, content) VALUES ('delete', old.number, old.content); END""",
    """CREATE TRIGGER message_taken_in AFTER UPDATE OF content, state ON message
        WHEN new.state <> 'writing' AND (old.state = 'writing' OR new.content IS NOT old.content) BEGIN
        INSERT INTO message_text (rowid, content) VALUES (new.number, new.content); END""",
)
_IMAGES = tuple(
    f"ALTER TABLE attachment ADD COLUMN {side}_px INTEGER NOT NULL DEFAULT 0" for side in ("width", "height")
)
_SOUNDS = ("ALTER TABLE attachment ADD COLUMN length_ms INTEGER NOT NULL DEFAULT 0",)
SCRIPTS: tuple[tuple[str, ...], ...] = (_FIRST, _IMAGES, _SOUNDS)
"""What leads from version 0 (nothing) to 1, from 1 to 2 and so on."""
VERSION = len(SCRIPTS)


def version_of(connection: sqlite3.Connection) -> int:
    """Return the version of an open database, 0 of one that is new."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def upgrade(connection: sqlite3.Connection) -> None:
    """Bring a database to this version, whole or not at all."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        # asked again inside: another process may have done it meanwhile
        for number in range(version_of(connection), VERSION):
            for statement in SCRIPTS[number]:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number + 1}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
