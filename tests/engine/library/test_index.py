"""The library's index: stored between runs, shared by processes, and safe against damage and newer versions."""

from __future__ import annotations

import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.base.cancellation import CancelToken
from engine.base.errors import LibraryError
from engine.library import children, refresh
from engine.library.census import Census
from engine.library.facts import Facts, read_facts
from engine.library.fit import Fit
from engine.library.index import MAX_OPENED, SCHEMA_VERSION, LibraryIndex
from engine.library.notes import NO_NOTES, Notes, SavedDocument, tags_of
from engine.library.refresh import check_folder, current_facts, read_missing, rescan, unread
from engine.library.scan import scan
from engine.library.stores import Store
from tests.support.gguf_bytes import GgufBytes, text_value
from tests.support.stores import DIES_OF_SOME_FILES, model_bytes, put, put_in_ollama

DIES = [sys.executable, "-c", DIES_OF_SOME_FILES]

NOTES = Notes(is_favourite=True, tags=("code", "quick"), text="good at Rust", last_used=5.5, measured=12.0)
FIT = Fit("split", "fewest", 8192, (("CUDA0", 20), ("CPU", 12)), 3.0, 7.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "library.sqlite"


def test_everything_is_there_again(path: Path, tmp_path: Path) -> None:
    put_in_ollama(tmp_path / "ollama", "ada:1b", {"model": model_bytes(), "template": b"x"})
    census = scan([Store("ollama", tmp_path / "ollama", "Ollama")])
    facts = {tmp_path / "a.gguf": ((1, 2, 3), Facts(kind="model", n_layers=3, capabilities=("tools",)))}
    layout = SavedDocument("layout", "two cards", "{}")
    with closing(LibraryIndex(path)) as index:
        index.save_census(census)
        index.save_folders([tmp_path, tmp_path / "b", tmp_path])
        index.save_facts(facts)
        index.save_hash(tmp_path / "a.gguf", (1, 2, 3), "ff")
        index.change_notes(("mark", "other", ""), lambda _notes: NOTES)
        index.change_notes(("other",), lambda _notes: NO_NOTES)
        index.save_fits("rig", {"mark": FIT})
        index.save_document("mark", layout)
        index.save_document("mark", SavedDocument("layout", "gone", "{}"))
        index.forget_document("mark", "layout", "gone")
    with closing(LibraryIndex(path)) as index:
        assert index.census() == census
        assert index.folders() == (tmp_path, tmp_path / "b")
        assert index.facts() == facts
        assert index.hashes() == {tmp_path / "a.gguf": ((1, 2, 3), "ff")}
        assert index.notes() == {"mark": NOTES}
        assert index.fits("rig") == {"mark": FIT}
        assert index.fits("other rig") == {}
        assert index.documents("mark") == (layout,)
        assert index.set_aside is None


def test_two_programs_may_have_it_open(path: Path) -> None:
    with closing(LibraryIndex(path)) as window, closing(LibraryIndex(path)) as command:
        window.change_notes(("a",), lambda _notes: NOTES)
        command.change_notes(("b",), lambda _notes: NOTES)
        assert set(window.notes()) == {"a", "b"}


def test_notes_are_read_and_changed_in_one_transaction(path: Path) -> None:
    with closing(LibraryIndex(path)) as window, closing(sqlite3.connect(path, timeout=0)) as command:
        window.change_notes(("a",), lambda _notes: NOTES)
        before: list[Notes] = []

        def change(notes: Notes) -> Notes:
            before.append(notes)
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                command.execute("BEGIN IMMEDIATE")
            return msgspec.structs.replace(notes, preset="short")

        window.change_notes(("a", "b", ""), change)
        assert before == [NOTES, NO_NOTES]
        assert window.notes() == {"a": msgspec.structs.replace(NOTES, preset="short"), "b": Notes(preset="short")}


def test_a_damaged_file_is_kept_aside(path: Path) -> None:
    put(path, b"this is no database, it was written over by something else" * 100)
    with closing(LibraryIndex(path)) as index:
        assert index.set_aside == path.with_name("library-kept-1.sqlite")
        assert index.set_aside.read_bytes().startswith(b"this is no database")
        assert index.census() == Census()


def test_a_newer_file_is_kept_aside(path: Path) -> None:
    with closing(LibraryIndex(path)) as index:
        index.change_notes(("a",), lambda _notes: NOTES)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with closing(LibraryIndex(path)) as index:
        assert index.notes() == {}
        aside = index.set_aside
    assert aside is not None
    with closing(sqlite3.connect(aside)) as connection:
        assert connection.execute("SELECT fingerprint FROM notes").fetchall() == [("a",)]


def test_a_row_that_cannot_be_read_is_as_if_it_were_not_there(path: Path) -> None:
    with closing(LibraryIndex(path)) as index:
        index.change_notes(("a",), lambda _notes: NOTES)
        index.change_notes(("b",), lambda _notes: NOTES)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE notes SET notes = x'c1' WHERE fingerprint = 'a'")
        connection.execute("INSERT OR REPLACE INTO census VALUES (1, x'00')")
    with closing(LibraryIndex(path)) as index:
        assert set(index.notes()) == {"b"}
        assert index.census() == Census()


def test_an_index_that_cannot_be_written_is_in_memory_and_says_so(tmp_path: Path) -> None:
    put(tmp_path / "file", b"x")
    with closing(LibraryIndex(tmp_path / "file" / "library.sqlite")) as index:
        assert "library.sqlite" in index.not_saved
        index.save_folders([tmp_path])
        assert index.folders() == (tmp_path,)


def test_an_index_that_cannot_be_written_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(LibraryIndex(path)) as index:
        index.save_folders([path.parent])
        assert index.not_saved == ""
    connect = sqlite3.connect

    def connect_reading(place: str | Path, **options: Any) -> sqlite3.Connection:
        if place == path:
            place, options["uri"] = f"file:{place}?mode=ro", True
        found: sqlite3.Connection = connect(place, **options)
        return found

    monkeypatch.setattr(sqlite3, "connect", connect_reading)
    with closing(LibraryIndex(path)) as index:
        assert "cannot be saved" in index.not_saved
        assert index.folders() == (path.parent,)


def test_headers_are_read_once(path: Path, tmp_path: Path) -> None:
    store = Store("folder", tmp_path / "models")
    file = put(store.root / "a.gguf", model_bytes())
    put(store.root / "b.gguf", model_bytes("b"))
    with closing(LibraryIndex(path)) as index:
        census, _ = rescan(index, [store])
        read_missing(index, census, unread(census, {}), lambda _path, _facts: None, CancelToken())
        assert unread(census, current_facts(census, index.facts())) == ()
        file.write_bytes(model_bytes("longer name"))
        census, _ = rescan(index, [store])
        assert unread(census, current_facts(census, index.facts())) == ((file,),)


def test_the_headers_of_a_split_model_are_read_again_when_another_part_changes(path: Path, tmp_path: Path) -> None:
    store = Store("folder", tmp_path / "models")
    parts = [store.root / f"ada-0000{number}-of-00002.gguf" for number in (1, 2)]
    contents = [model_bytes(part=(number, 2)) for number in (0, 1)]
    put(parts[0], contents[0])
    with closing(LibraryIndex(path)) as index:
        assert read_new(index, store)[parts[0]].n_parameters == read_facts((parts[0],)).n_parameters
        put(parts[1], contents[1])
        assert read_new(index, store)[parts[0]].n_parameters == read_facts(tuple(parts)).n_parameters
        assert read_new(index, store) == {}
        parts[1].unlink()
        assert list(read_new(index, store)) == [parts[0]]


def test_headers_that_could_not_be_read_are_tried_again(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store("folder", tmp_path / "models")
    file = put(store.root / "ada.gguf", model_bytes())
    # It was read, and will be no language model tomorrow either.
    put(store.root / "picture.gguf", GgufBytes(pairs={"general.architecture": text_value("flux")}).build())
    with closing(LibraryIndex(path)) as index:
        with monkeypatch.context() as patch:
            # A disk that fails, or permissions that are missing: the file itself does not change.
            patch.setattr(children, "child_argv", lambda _name: [sys.executable, "-c", "raise SystemExit"])
            assert all(facts.error for facts in read_new(index, store).values())
        found = read_new(index, store)
        assert found[file].error == ""
        assert found[store.root / "picture.gguf"].error == "holds no language model"
        assert read_new(index, store) == {}


def test_a_file_that_crashed_the_reader_is_tried_again_when_it_or_the_program_changes(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store("folder", tmp_path / "models")
    deadly = put(store.root / "deadly.gguf", model_bytes())
    put(store.root / "sound.gguf", model_bytes())
    monkeypatch.setattr(children, "child_argv", lambda _name: DIES)
    with closing(LibraryIndex(path)) as index:
        assert read_new(index, store)[deadly].error == "crashed the process that read it"
        assert read_new(index, store) == {}
        census, _ = rescan(index, [store])
        assert current_facts(census, index.facts())[deadly].error == "crashed the process that read it"
        deadly.write_bytes(model_bytes("longer name"))
        assert list(read_new(index, store)) == [deadly]
        monkeypatch.setattr(refresh, "own_version", lambda: "9.9")
        assert list(read_new(index, store)) == [deadly]


def test_a_file_whose_reader_was_killed_by_the_system_is_tried_again(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the OOM killer: the file need not be the cause."""
    store = Store("folder", tmp_path / "models")
    deadly = put(store.root / "deadly.gguf", model_bytes())
    killed = DIES_OF_SOME_FILES.replace("os._exit(3)", "os.kill(os.getpid(), 9)")
    monkeypatch.setattr(children, "child_argv", lambda _name: [sys.executable, "-c", killed])
    with closing(LibraryIndex(path)) as index:
        assert read_new(index, store)[deadly].error == "crashed the process that read it"
        assert list(read_new(index, store)) == [deadly]


def test_headers_read_before_an_error_are_saved(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store("folder", tmp_path / "models")
    for name in ("deadly-1", "deadly-2", "sound"):
        put(store.root / f"{name}.gguf", model_bytes())
    monkeypatch.setattr(children, "child_argv", lambda _name: DIES)
    monkeypatch.setattr(children, "MAX_BREAKDOWNS", 3)
    with closing(LibraryIndex(path)) as index:
        with pytest.raises(LibraryError, match="keep crashing"):
            read_new(index, store)
        # The next scan goes on from there.
        assert index.facts()


def test_a_file_that_cannot_be_read_is_tried_again_only_if_asked(path: Path, tmp_path: Path) -> None:
    store = Store("folder", tmp_path / "models")
    put(store.root / "pointer.gguf", b"version https://git-lfs.github.com/spec/v1")
    sound = put(store.root / "sound.gguf", model_bytes())
    with closing(LibraryIndex(path)) as index:
        read_new(index, store)
        later = put(store.root / "later.gguf", model_bytes("later"))
        census, _ = rescan(index, [store])
        facts = current_facts(census, index.facts())
        assert unread(census, facts, retries=False) == ((later,),)
        assert len(unread(census, facts)) == 2
        assert unread(census, {}, retries=False)
        assert (sound,) not in unread(census, facts)


def read_new(index: LibraryIndex, store: Store) -> dict[Path, Facts]:
    """Scan, and return what is read because the index does not have it."""
    found: dict[Path, Facts] = {}
    census, _ = rescan(index, [store])
    wanted = unread(census, current_facts(census, index.facts()))
    read_missing(index, census, wanted, found.__setitem__, CancelToken())
    return found


def test_moved_gone_and_missing_are_told(path: Path, tmp_path: Path) -> None:
    own, foreign = Store("folder", tmp_path / "own"), Store("lm_studio", tmp_path / "lm", "LM Studio")
    moved = put(own.root / "moved.gguf", model_bytes("m"))
    lost = put(own.root / "lost.gguf", model_bytes("l"))
    gone = put(foreign.root / "p/m/gone.gguf", model_bytes("g"))
    with closing(LibraryIndex(path)) as index:
        census, changes = rescan(index, [own, foreign])
        assert changes.sentence() == ""
        read_missing(index, census, unread(census, {}), lambda _path, _facts: None, CancelToken())
        (own.root / "sub").mkdir()
        moved.rename(own.root / "sub/moved.gguf")
        lost.unlink()
        gone.unlink()
        census, changes = rescan(index, [own, foreign])
        assert [(old.path.name, new.path.parent.name) for old, new in changes.moved] == [("moved.gguf", "sub")]
        sentence = changes.sentence()
        assert all(
            word in sentence for word in ("moved.gguf was moved to", "gone.gguf was removed (LM Studio)", "lost.gguf")
        )
        assert [(file.name, file.is_missing) for file in census.files] == [("moved.gguf", False), ("lost.gguf", True)]
        census, changes = rescan(index, [own, foreign])
        assert changes.sentence() == ""  # said once
        assert [file.name for file in census.files if file.is_missing] == ["lost.gguf"]
        put(lost, model_bytes("l"))
        census, changes = rescan(index, [own, foreign])
        assert [file.is_missing for file in census.files] == [False, False]
        rescan(index, [foreign])
        assert rescan(index, [own, foreign])[1].sentence() == ""


def test_tags_and_folders_are_checked(tmp_path: Path) -> None:
    assert tags_of(" code , quick,,code,  two  words ") == ("code", "quick", "two words")
    assert check_folder(tmp_path) == tmp_path
    with pytest.raises(LibraryError, match="is a file"):
        check_folder(put(tmp_path / "a", b"x"))
    with pytest.raises(LibraryError, match="choose another"):
        check_folder(tmp_path / "none")
    not_utf8 = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    not_utf8.mkdir()
    with pytest.raises(LibraryError, match="is not valid text"):
        check_folder(not_utf8)


def test_what_was_opened_is_remembered_latest_first(path: Path) -> None:
    with closing(LibraryIndex(path)) as index:
        for number in range(MAX_OPENED + 3):
            index.save_opened(Path(f"/m/{number}.gguf"), float(number))
        index.save_opened(Path("/m/5.gguf"), 1e6)
        index.forget_opened([Path(f"/m/{MAX_OPENED + 2}.gguf")])
        found = index.opened()
    assert found[:2] == (Path("/m/5.gguf"), Path(f"/m/{MAX_OPENED + 1}.gguf"))
    assert len(found) == MAX_OPENED - 1


def test_an_index_of_the_first_version_learns_what_is_opened(path: Path) -> None:
    with closing(LibraryIndex(path)) as index:
        index.change_notes(["a"], lambda _notes: Notes(text="kept"))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE opened")
    with closing(LibraryIndex(path)) as index:
        assert index.opened() == ()
        assert index.notes()["a"].text == "kept"
