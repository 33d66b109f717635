"""The `chat` command: a conversation in a terminal, stored in the database that the window uses, too."""

from __future__ import annotations

import re
from argparse import Namespace
from configparser import ConfigParser
from configparser import Error as ConfigError
from contextlib import closing
from pathlib import Path

from app.cli import exit_codes
from app.cli.chat_options import chosen_settings
from app.cli.chat_printers import ChatPrinter, JsonChat, TextChat
from app.cli.inputs import spec_of
from app.cli.output import check_text, print_document, print_line, print_stderr
from app.cli.talk import Talk, TalkOptions
from app.paths import chats_path, presets_path, saved_states_path, settings_path
from engine.base.errors import ArgumentError
from engine.base.files import read_at_most
from engine.base.texts import one_line
from engine.base.values import replace
from engine.chat.attachments import read_attachment
from engine.chat.context import shift_error
from engine.chat.conversation import Conversation
from engine.chat.message import new_id, now_ms
from engine.chat.presets import Preset, chat_sampling, read_presets
from engine.chat.saved_kv_states import KV_STATES_QUOTA_BYTES, SavedKvStates
from engine.chat.store import ChatStore
from engine.chat.tools import MAX_CHARACTERS, DefinitionError, read_tools
from engine.runtime.session.events import Cancelled


def run_chat(options: Namespace) -> int:
    """List or search conversations, or load a model and chat; return the exit code."""
    if options.file is None and not options.list and options.search is None:
        raise ArgumentError("`chat` needs a FILE.gguf, --list or --search.")
    # Arguments that are not UTF-8 arrive as lone surrogates, which the database cannot store.
    for text, what in ((options.prompt, "The prompt"), (options.system, "The system prompt")):
        if text is not None:
            check_text(text, what)
    only_reads = options.list or options.search is not None
    with closing(
        ChatStore(
            chats_path(),
            lambda error: print_stderr(error.summary()),
            makes_copies=not only_reads,
            only_reads=only_reads,
        )
    ) as store:
        if store.notice:
            print_stderr(store.notice)
        if options.list:
            return _list(store, as_json=options.json)
        if options.search is not None:
            return _search(store, options.search, as_json=options.json)
        return _talk(store, options)


def _talk(store: ChatStore, options: Namespace) -> int:
    known, conversation = _conversation(store, options)
    if options.tools is not None:
        conversation = replace(conversation, tools=_read_tools(options.tools))
    try:
        read_tools(conversation.tools)
    except DefinitionError as error:
        if options.tools is not None:
            raise ArgumentError(f"--tools: {error}") from None
        raise ArgumentError(
            f'--conversation: the tools saved in "{conversation.id}" cannot be used: {error}. Pass --tools.'
        ) from None
    preset = _preset(options.preset or conversation.preset)
    printer: ChatPrinter = JsonChat() if options.json else TextChat()
    try:
        spec = spec_of(options, printer.load.explain)
    except KeyboardInterrupt:
        # No session handles interrupts yet: the signal raises (`entry.raise_on_interrupt`).
        printer.load.show(Cancelled(stage="header"))
        return exit_codes.INTERRUPTED
    attached = tuple(map(read_attachment, options.attach))
    projector = spec.plan.edit.side_files.projector
    kinds = {file.attachment.kind for file in attached}
    if "image" in kinds and (projector is None or not projector.sees):
        raise ArgumentError("--attach: this model needs a projector for images; add --mmproj FILE.")
    if "audio" in kinds and (projector is None or not projector.hears):
        raise ArgumentError("--attach: this model needs a projector for sound; add --mmproj FILE.")
    sampling = chat_sampling(spec.plan.model, preset, {**conversation.settings, **chosen_settings(options)}).settings
    if fault := shift_error(sampling, spec.plan.settings):
        raise ArgumentError(f"--full-context: {fault}")
    # Stored only now: options that are refused change nothing.
    if known is not None:
        store.save(conversation, known).result()
    states = SavedKvStates(saved_states_path(), saved_states_quota(settings_path()))
    talk_options = TalkOptions(
        preset,
        chosen_settings(options),
        options.overflow,
        options.prompt,
        attached,
    )
    return Talk(store, states, spec, printer, conversation, talk_options).run()


def saved_states_quota(settings: Path) -> int:
    """Return the limit of saved KV states in bytes: the one that was chosen in the window, else the default.

    `settings`: the window's INI file (`Settings.saved_states_bytes`). It is read without `QSettings`, because the
    command line does not import Qt.
    """
    stored = ConfigParser(interpolation=None, strict=False)
    try:
        stored.read(settings, encoding="utf-8")
    except (OSError, UnicodeDecodeError, ConfigError):
        return KV_STATES_QUOTA_BYTES
    text = stored.get("chat", "kept_states_bytes", fallback="")
    # More digits may exceed 64 bits.
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else KV_STATES_QUOTA_BYTES


def _conversation(store: ChatStore, options: Namespace) -> tuple[Conversation | None, Conversation]:
    """Return the stored conversation to continue, and a copy with the system prompt and preset of the options.

    Without --conversation, the first value is None and the second one is a new conversation, not stored yet.
    """
    if options.conversation is None:
        time_ms = now_ms()
        return None, Conversation(
            id=new_id(),
            system=options.system or "",
            preset=options.preset or "",
            created_ms=time_ms,
            updated_ms=time_ms,
        )
    named = [each for each in store.conversations() if each.id.startswith(options.conversation)]
    # Every id begins with an empty text.
    if not options.conversation or len(named) != 1:
        found = "no conversation" if not named else f"{len(named)} conversations"
        raise ArgumentError(f'--conversation: {found} of this id: "{options.conversation}". See chat --list.')
    (known,) = named
    system = known.system if options.system is None else options.system
    return known, replace(known, system=system, preset=options.preset or known.preset)


def _read_tools(path: Path) -> str:
    """Return the text of the file for --tools; raises `ArgumentError` if it cannot be read."""
    try:
        return read_at_most(path, MAX_CHARACTERS * 4 + 1).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ArgumentError(f"--tools: {path.name} cannot be read ({reason}); check the path.") from None


def _preset(name: str) -> Preset | None:
    if not name:
        return None
    presets = read_presets(presets_path())
    found = next((preset for preset in presets if preset.name == name), None)
    if found is None:
        known = ", ".join(f'"{preset.name}"' for preset in presets) or "none"
        raise ArgumentError(
            f'--preset: there is no preset "{name}"; available are {known}. They are in {presets_path()}.'
        )
    return found


def _list(store: ChatStore, *, as_json: bool) -> int:
    kept = store.conversations()
    if as_json:
        fields = ("id", "title", "folder", "pinned", "created_ms", "updated_ms")
        print_document({"conversations": [{name: getattr(each, name) for name in fields} for each in kept]})
    else:
        for each in kept:
            print_line(f"{each.id}  {'* ' if each.pinned else ''}{one_line(each.title)}")
    return exit_codes.OK


def _search(store: ChatStore, text: str, *, as_json: bool) -> int:
    hits = store.search(text)
    if as_json:
        print_document({"hits": hits})
    else:
        for hit in hits:
            print_line(f"{hit.conversation}  {one_line(hit.title)}: {one_line(hit.snippet)}")
    return exit_codes.OK
