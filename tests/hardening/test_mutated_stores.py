"""Our stored files and those of other programs, damaged at random places: read, or reported with an error."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from engine.base.errors import ChatError, EngineError, LibraryError
from engine.base.texts import MAX_SENTENCE
from engine.chat.conversation import Conversation
from engine.chat.exports import as_json
from engine.chat.imports import parse_conversations
from engine.chat.llama_ui import as_jsonl
from engine.chat.message import Attachment, Message
from engine.chat.presets import parse_presets
from engine.chat.store import ChatStore
from engine.chat.tree import MessageTree, tree_of
from engine.library.downloads.part_file import Journal, Origin, count_bytes, read_journal
from engine.library.facts import Facts
from engine.library.hub.addresses import is_repo_id, is_safe_path
from engine.library.hub.client import list_repo, search_models
from engine.library.hub.listing import SearchQuery
from engine.library.hub.settings import HubError, HubSettings, hub_settings
from engine.library.index import LibraryIndex
from engine.library.notes import Notes
from engine.library.scan import scan
from engine.library.stores import Store
from engine.machines.rigs.check_results import read_check_results
from tests.support.hub_server import HubServer, Repo, hub_server
from tests.support.mutation import mutate_json
from tests.support.patience import DEADLINE_S
from tests.support.selection import examples
from tests.support.stores import model_bytes, put_in_ollama
from tests.support.transfers import KIB, download_of, fetch, hub_file, some_bytes

FILE = Attachment(id="f", kind="text", name="a.py", mime="text/x-python", sha256="0" * 64, size_bytes=3, text="abc")
TALK = tree_of(
    (
        Message(id="q", role="user", content="What is a trigram?", attachments=(FILE,), created_ms=2),
        Message(id="a", role="assistant", parent="q", content="Three letters.", reasoning="hm", created_ms=3),
    ),
    "a",
)
CHAT = Conversation(id="c", title="Letters", created_ms=1, updated_ms=4)


def mutated(document: Any, numbers: random.Random) -> bytes:
    """Return a changed document as JSON; one in ten is not even that."""
    for _ in range(numbers.randrange(1, 4)):
        document = mutate_json(document, numbers)
    data = json.dumps(document, ensure_ascii=numbers.random() < 0.5).encode("utf-8", "surrogatepass")
    return damaged(data, numbers) if numbers.random() < 0.1 else data


def damaged(data: bytes, numbers: random.Random) -> bytes:
    """Return bytes with a piece of them cut out, made others, made nothing, or the end missing."""
    place = numbers.randrange(len(data))
    length = min(numbers.choice((1, 2, 16, 4096, len(data))), len(data) - place)
    match numbers.randrange(4):
        case 0:
            return data[:place] + data[place + length :]
        case 1:
            return data[:place] + numbers.randbytes(length) + data[place + length :]
        case 2:
            return data[:place] + bytes(length) + data[place + length :]
        case _:
            return data[:place]


@contextmanager
def told_in_a_sentence(kind: type[EngineError], seed: int) -> Iterator[None]:
    """Pass over a refusal that people can read."""
    refusal = None
    try:
        yield
    except kind as error:
        refusal = error.summary()
    assert refusal is None or (refusal.isprintable() and 0 < len(refusal) <= MAX_SENTENCE), (seed, refusal)


# ------------------------------------------------------------------ databases


def _use_chats(path: Path) -> None:
    """Do all that a window does with a database of conversations."""
    with closing(ChatStore(path)) as store:
        calls: list[Callable[[], object]] = [
            store.conversations,
            lambda: store.tree("c"),
            lambda: store.search("trigram"),
            lambda: store.apply("c", MessageTree(), tree_of((Message(id="n", role="user", content="x"),), "n")).result(
                DEADLINE_S
            ),
            lambda: store.save(Conversation(id="d", title="New", created_ms=1, updated_ms=1)).result(DEADLINE_S),
        ]
        for call in calls:
            with suppress(ChatError):
                call()


def _use_index(path: Path) -> None:
    with closing(LibraryIndex(path)) as index:
        calls: list[Callable[[], object]] = [
            index.census,
            index.folders,
            index.facts,
            index.notes,
            index.hashes,
            lambda: index.fits("rig"),
            lambda: index.documents("mark"),
            lambda: index.change_notes(("mark",), lambda _notes: Notes(text="new")),
        ]
        for call in calls:
            with suppress(LibraryError):
                call()


def _make_chats(path: Path) -> None:
    with closing(ChatStore(path)) as store:
        store.save(CHAT).result(DEADLINE_S)
        store.apply("c", MessageTree(), TALK).result(DEADLINE_S)
        store.keep_file(b"abc")[1].result(DEADLINE_S)


def _make_index(path: Path) -> None:
    with closing(LibraryIndex(path)) as index:
        index.save_folders([path.parent])
        index.save_facts({path: ((1, 2, 3), Facts(kind="model", n_layers=3))})
        index.change_notes(("mark",), lambda _notes: Notes(text="good"))


@pytest.mark.parametrize(("make", "use"), [(_make_chats, _use_chats), (_make_index, _use_index)])
def test_a_damaged_database_is_used_or_kept_aside(
    tmp_path: Path, make: Callable[[Path], None], use: Callable[[Path], None]
) -> None:
    whole = tmp_path / "whole.sqlite"
    make(whole)
    data = whole.read_bytes()
    for seed in range(examples(120)):
        numbers = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        path = folder / "kept.sqlite"
        spoiled = damaged(data, numbers)
        path.write_bytes(spoiled)
        if numbers.random() < 0.2:
            (folder / "kept.sqlite-wal").write_bytes(numbers.randbytes(5000))
        with told_in_a_sentence(EngineError, seed):
            use(path)
        for aside in folder.glob("kept-*.sqlite"):
            assert aside.stat().st_size >= len(spoiled), f"{seed}: what was kept aside is not what was there"
        shutil.rmtree(folder)


# ------------------------------------------------------------------ documents


@pytest.mark.parametrize(
    "lines",
    [[as_json([(CHAT, TALK)], {FILE.sha256: b"abc"})], as_jsonl([(CHAT, TALK)]).splitlines()],
    ids=["json", "lines"],
)
def test_conversations_from_elsewhere_are_taken_or_refused(lines: list[bytes]) -> None:
    documents = [json.loads(line) for line in lines]
    n_taken = 0
    for seed in range(examples(4000)):
        numbers = random.Random(seed)
        place = numbers.randrange(len(documents))
        changed = [json.dumps(document).encode() for document in documents]
        changed[place] = mutated(documents[place], numbers)
        with told_in_a_sentence(ChatError, seed):
            taken = parse_conversations(b"\n".join(changed), source="x.json")
            n_taken += 1
            for each in taken:
                as_json([(each.conversation, each.tree)], each.files)
    assert n_taken > 0


PRESETS = {"version": 1, "presets": [{"name": "Cold", "system": "Be brief.", "settings": {"temperature": 0.1}}]}


def test_presets_that_were_changed_are_read_or_refused() -> None:
    for seed in range(examples(2000)):
        with told_in_a_sentence(EngineError, seed):
            parse_presets(mutated(PRESETS, random.Random(seed)), source="presets.json")


def test_what_the_engine_was_found_to_do_is_read_or_forgotten(tmp_path: Path) -> None:
    found = {"feature": "weights", "of": "q4_0", "ok": False, "reason": "dies"}
    book = {"version": 1, "devices": {"1 | | CPU": [found]}}
    path = tmp_path / "checks.json"
    for seed in range(examples(1000)):
        path.write_bytes(mutated(book, random.Random(seed)))
        read_check_results(path)


def test_manifests_of_others_are_read_or_told_about(tmp_path: Path) -> None:
    manifest = put_in_ollama(tmp_path, "ada:1b", {"model": model_bytes(), "template": b"x"})["manifest"]
    document = json.loads(manifest.read_bytes())
    outside = tmp_path.parent / "outside"
    n_found = 0
    for seed in range(examples(1000)):
        manifest.write_bytes(mutated(document, random.Random(seed)))
        census = scan([Store("ollama", tmp_path, "Ollama")])
        n_found += len(census.files)
        for file in census.files:
            assert tmp_path in file.path.parents
            assert outside not in file.path.parents
        for problem in census.problems:
            assert problem.sentence
    assert n_found > 0


# ------------------------------------------------------------------ the hub and downloads


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    with hub_server(Repo("org/m", {"m-Q8_0.gguf": some_bytes(256 * KIB), "mmproj-F16.gguf": b"x"})) as found:
        yield found


@pytest.fixture
def hub(server: HubServer) -> Iterator[HubSettings]:
    yield hub_settings(environment={"HF_ENDPOINT": server.url})
    server.change = None


def test_answers_of_a_hub_become_values_or_a_sentence(server: HubServer, hub: HubSettings) -> None:
    n_values = 0
    for seed in range(examples(240)):
        numbers = random.Random(seed)
        server.change = lambda document, numbers=numbers: mutated(document, numbers)
        with told_in_a_sentence(HubError, seed):
            for model in search_models(SearchQuery("m"), hub):
                assert is_repo_id(model.repo)
            listing = list_repo("org/m", hub)
            n_values += 1
            for quantisation in listing.quantisations:
                assert all(is_safe_path(file.path) and file.size_bytes >= 0 for file in quantisation.files), seed
    assert n_values > 0


def test_a_journal_that_lies_costs_bytes_and_never_a_wrong_file(tmp_path: Path, server: HubServer) -> None:
    data = some_bytes(256 * KIB)
    for seed in range(examples(24)):
        numbers = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        download = download_of(hub_file(server, "org/m", "m-Q8_0.gguf", folder), connections=1, block_bytes=64 * KIB)
        file = download.files[0]
        path = folder / "m-Q8_0.gguf.part.json"
        origin = Origin(url=file.url, etag=None, sha256=file.sha256, size_bytes=len(data))
        with closing(Journal(path, origin, ())) as journal:
            journal.note(((0, 64 * KIB), (128 * KIB, 160 * KIB)), synced=True)
        (folder / "m-Q8_0.gguf.part").write_bytes(numbers.randbytes(numbers.randrange(len(data))))
        lines = path.read_bytes().splitlines()
        place = numbers.randrange(len(lines))
        lines[place] = mutated(json.loads(lines[place]), numbers)
        path.write_bytes(b"\n".join(lines))
        kept = read_journal(path)
        assert kept is None or count_bytes(kept[1]) >= 0
        end = fetch(download)
        target = folder / "m-Q8_0.gguf"
        if end.succeeded:
            assert target.read_bytes() == data, seed
        else:
            assert not target.exists(), seed
            assert end.message.isprintable(), seed
            assert fetch(download).succeeded, f"{seed}: the second call does not get it either: {end}"
        shutil.rmtree(folder)
