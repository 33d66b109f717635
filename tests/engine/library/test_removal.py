"""Removal of models: files that go to the trash, files that stay, and duplicates."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.base.cancellation import CancelToken
from engine.base.errors import LibraryError
from engine.library.duplicates import find_duplicates, sha256_of, suspects
from engine.library.entry import Entry
from engine.library.facts import read_facts
from engine.library.grouping import group, join_parts
from engine.library.removal import Removal, plan_removal, to_trash
from engine.library.scan import scan
from engine.library.stores import Store
from tests.support.stores import model_bytes, projector_bytes, put, put_in_hub_cache, put_in_ollama


def entries_in(*stores: Store) -> tuple[Entry, ...]:
    files = scan(stores).files
    return group(files, {copy.path: read_facts(copy.paths) for copy in join_parts(files)})


def removal_of(entries: tuple[Entry, ...], title: str) -> Removal:
    entry = next(entry for entry in entries if entry.title == title)
    return plan_removal(entry, entry.proposed, entry.proposed.copy, entries)


def test_a_models_side_files_go_with_it_unless_another_needs_them(tmp_path: Path) -> None:
    ada = put(tmp_path / "ada/Ada-Q8_0.gguf", model_bytes())
    own = put(tmp_path / "ada/mmproj-F16.gguf", projector_bytes())
    for name in ("Bob", "Bob-tuned"):
        put(tmp_path / f"bob/{name}-Q8_0.gguf", model_bytes(name))
    put(tmp_path / "bob/mmproj-Bob-F16.gguf", projector_bytes())
    entries = entries_in(Store("folder", tmp_path))
    removal = removal_of(entries, "Ada")
    assert removal.paths == (ada, own)
    assert removal.freed_bytes == ada.stat().st_size + own.stat().st_size
    question = removal.question("Ada Q8_0")
    assert "2 files" in question
    assert "mmproj-F16.gguf" in question
    assert "belongs to" not in question
    assert [path.name for path in removal_of(entries, "Bob").paths] == ["Bob-Q8_0.gguf"]


def test_a_hard_link_frees_nothing(tmp_path: Path) -> None:
    ada = put(tmp_path / "Ada-Q8_0.gguf", model_bytes())
    os.link(ada, tmp_path / "keep.bin")
    assert removal_of(entries_in(Store("folder", tmp_path)), "Ada").freed_bytes == 0


def test_a_blob_goes_with_all_links_to_it(tmp_path: Path) -> None:
    store = Store("huggingface", tmp_path, "Hugging Face cache")
    link = put_in_hub_cache(tmp_path, "org/Ada", "Ada-Q8_0.gguf", model_bytes(), commit="aaa")
    removal = removal_of(entries_in(store), "Ada")
    assert removal.paths == (link, link.resolve())
    assert removal.freed_bytes == len(model_bytes())
    assert "Hugging Face cache manages this file" in removal.question("Ada")
    put_in_hub_cache(tmp_path, "org/Ada", "Ada-Q8_0.gguf", model_bytes("another"), commit="bbb")
    newer = put_in_hub_cache(tmp_path, "org/Ada", "Ada-8bit.gguf", model_bytes(), commit="ccc")
    removal = removal_of(entries_in(store), "Ada-8bit")
    assert removal.paths == (newer, link, link.resolve())
    assert removal.freed_bytes == len(model_bytes())


def test_shared_blobs_are_left_to_their_own_program(tmp_path: Path) -> None:
    put_in_hub_cache(tmp_path, "org/Ada", "Ada-Q8_0.gguf", model_bytes(), shared=True)
    removal = removal_of(entries_in(Store("huggingface", tmp_path, "Hugging Face cache")), "Ada")
    assert removal.paths == ()
    assert "hf cache" in removal.refusal


def test_ollama_keeps_the_blobs_that_another_model_needs(tmp_path: Path) -> None:
    shared = {"model": model_bytes(), "template": b"t"}
    one = put_in_ollama(tmp_path, "ada:1b", {**shared, "params": b"{}"})
    two = put_in_ollama(tmp_path, "ada:best", shared)
    entries = entries_in(Store("ollama", tmp_path, "Ollama"))
    removal = removal_of(entries, "ada:1b")
    assert set(removal.paths) == {one["manifest"], one["params"]}
    two["manifest"].unlink()
    removal = removal_of(entries, "ada:1b")
    assert set(removal.paths) == set(one.values())
    one["manifest"].write_bytes(b"{")
    assert "ollama rm ada:1b" in removal_of(entries, "ada:1b").refusal


def test_the_trash_takes_files_and_says_which_stayed(tmp_path: Path) -> None:
    paths = [put(tmp_path / name, b"x") for name in "abc"]
    taken: list[str] = []

    def send(path: str) -> None:
        if path.endswith("c"):
            raise PermissionError(13, "no trash here")
        taken.append(path)

    with pytest.raises(LibraryError, match=r"c could not be moved .* already moved to the trash: 2"):
        to_trash(paths, send)
    assert taken == [str(path) for path in paths[:2]]


def test_links_and_copies_are_told_apart(tmp_path: Path) -> None:
    ada = put(tmp_path / "a/Ada-Q8_0.gguf", model_bytes())
    (tmp_path / "b").mkdir()
    os.link(ada, tmp_path / "b/Linked-Q8_0.gguf")
    copy = put(tmp_path / "b/Copied-Q8_0.gguf", model_bytes())
    put(tmp_path / "b/Other-Q8_0.gguf", model_bytes()[:-1] + b"\1")
    files = scan([Store("folder", tmp_path)]).files
    (linked,) = find_duplicates(files, {})
    assert linked.is_linked
    assert linked.wasted_bytes == 0
    assert len(suspects(files)) == 4
    hashes = {file.path: sha256_of(file.path, CancelToken()) or "" for file in suspects(files)}
    (found,) = find_duplicates(files, hashes)
    assert {file.path for file in found.files} == {ada, copy, tmp_path / "b/Linked-Q8_0.gguf"}
    assert found.wasted_bytes == copy.stat().st_size
    token = CancelToken()
    token.cancel()
    assert sha256_of(ada, token) is None
