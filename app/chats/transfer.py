"""Export and import of conversations in the background."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from PySide6.QtCore import QObject

from app.chats.archive import ChatArchive
from app.notices import Notices
from engine.base.errors import ChatError
from engine.base.files import write_whole
from engine.base.language import tr, tr_count
from engine.chat.conversation import Conversation as Chat
from engine.chat.exports import as_html, as_json, as_openai
from engine.chat.importer import import_file
from engine.chat.llama_ui import as_jsonl
from engine.chat.markdown_file import as_markdown
from engine.chat.message import Message
from engine.chat.store import ChatStore
from engine.chat.tree import MessageTree


class Form(Struct, frozen=True):
    """A file format for export.

    `words`: name of the format for people. `ending`: file name extension.
    `holds_many`: whether a file can have several conversations with all branches.
    """

    words: str
    ending: str
    holds_many: bool = False

    @property
    def filter(self) -> str:
        """The format as a name filter of Qt's file dialog."""
        return f"{self.words} (*{self.ending})"


FORMS = (
    Form(tr("Markdown (shown branch only)"), ".md"),
    Form(tr("Web page (shown branch only)"), ".html"),
    Form(tr("Layerdeck JSON (all branches and attachments)"), ".json", holds_many=True),
    Form(tr("llama.cpp JSON lines (all branches)"), ".jsonl", holds_many=True),
    Form(tr("OpenAI messages (shown branch only)"), ".openai.json"),
)
READABLE = tr("Exported conversations (*.md *.json *.jsonl);;All files (*)")


class ChatTransfer(QObject):
    """Exports and imports conversations, and reports the results on the status line."""

    def __init__(self, archive: ChatArchive, notices: Notices, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._archive = archive
        self._notices = notices

    def export(self, chats: Sequence[str], path: Path, form: Form) -> None:
        """Write conversations to the file `path` in the background, in the format `form`. `chats`: their ids."""

        def work(store: ChatStore) -> int:
            found = [(chat, store.tree(chat.id)) for each in chats if (chat := store.conversation(each)) is not None]
            if not found:
                raise ChatError(tr("This conversation has no messages to export."))
            try:
                write_whole(path, encoded(found, form, store))
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                raise ChatError(
                    tr("{name} cannot be written ({reason}); choose another place.", name=path.name, reason=reason)
                ) from None
            return len(found)

        def show(count: int) -> None:
            self._notices.show(
                tr_count(
                    "Conversation exported to {name}",
                    "{count} conversations exported to {name}",
                    count,
                    name=path.name,
                )
            )

        self._archive.work(tr("Exporting {name}", name=path.name), work, show)

    def import_file(self, path: Path) -> None:
        """Add the conversations of an exported file to the database, in the background."""

        def work(store: ChatStore) -> tuple[Chat, ...]:
            return import_file(store.path, path)

        def add(chats: tuple[Chat, ...]) -> None:
            self._archive.take_in(chats)
            self._notices.show(
                tr_count(
                    "Conversation imported from {name}",
                    "{count} conversations imported from {name}",
                    len(chats),
                    name=path.name,
                )
            )

        self._archive.work(tr("Importing {name}", name=path.name), work, add)


def encoded(found: Sequence[tuple[Chat, MessageTree]], form: Form, store: ChatStore) -> bytes:
    """Return the content of an export file with the conversations in `found`, in the format `form`.

    If the format can hold only one conversation, the file has the first one.
    `found`: conversations with their messages. `store`: database from which the attachments are read.

    Raises:
        ChatError: the bytes of an attachment cannot be read.
    """
    chat, tree = found[0]
    match form.ending:
        case ".md":
            text = as_markdown(chat, tree.path, _files(tree.path, store))
        case ".html":
            text = as_html(chat, tree.path, _files(tree.path, store))
        case ".openai.json":
            return as_openai(chat, tree.path)
        case ".jsonl":
            return as_jsonl(found, _files(_messages(found), store))
        case _:
            return as_json(found, _files(_messages(found), store))
    # Models may generate lone surrogates, which UTF-8 cannot encode.
    return text.encode("utf-8", "replace")


def _messages(found: Sequence[tuple[Chat, MessageTree]]) -> list[Message]:
    return [message for _, tree in found for message in tree.messages.values()]


def _files(messages: Sequence[Message], store: ChatStore) -> dict[str, bytes]:
    """Return the bytes of the attachments of `messages` by SHA-256. Attachments that are not stored are left out."""
    names = {each.sha256 for message in messages for each in message.attachments if each.sha256}
    return {name: data for name in sorted(names) if (data := store.file(name)) is not None}


def form_of(path: Path, chosen: str, forms: Sequence[Form] = FORMS) -> tuple[Path, Form]:
    """Return the path and format for an export to the file `path`.

    The extension of the file name decides the format. If none of `forms` has this extension, the name filter that was
    selected in the file dialog (`chosen`) decides, and the extension of that format is appended to the path.
    """
    # The longest ending first: one may be the end of another.
    by_length = sorted(forms, key=lambda form: -len(form.ending))
    by_name = next((form for form in by_length if path.name.lower().endswith(form.ending)), None)
    if by_name is not None:
        return path, by_name
    form = next((form for form in forms if form.filter == chosen), forms[0])
    return path.with_name(path.name + form.ending), form
