"""Scans of model stores: layouts of each program, links, loops, unfinished and unreadable files."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path

import pytest

from engine.library.census import Census
from engine.library.scan import is_stale, scan
from engine.library.stores import Store, known_stores, models_folder, opened_stores
from engine.library.walking import MAX_DEPTH
from tests.support.stores import model_bytes, projector_bytes, put, put_in_hub_cache, put_in_ollama

HOME = Path("/home/ada")


def folder(root: Path) -> Store:
    return Store("folder", root)


def names(census: Census) -> list[str]:
    return [file.name for file in census.files]


def test_the_environment_says_where_stores_are() -> None:
    roots = {store.root: store.owner for store in known_stores({}, HOME)}
    assert roots[HOME / ".cache/huggingface/hub"] == "Hugging Face cache"
    assert roots[HOME / ".cache/llama.cpp"] == "llama.cpp"
    assert roots[HOME / ".lmstudio/models"] == "LM Studio"
    assert roots[HOME / ".ollama/models"] == "Ollama"
    named = {"HF_HOME": "/hf", "LLAMA_CACHE": "/llama", "OLLAMA_MODELS": "~/o", "XDG_CACHE_HOME": "/cache"}
    chosen = [store.root for store in known_stores(named, HOME)]
    assert chosen[:3] == [Path("/llama"), Path("/hf/hub"), Path("/cache/llama.cpp")]
    assert HOME / "o" in chosen
    assert Path("/x") in [store.root for store in known_stores({"HF_HUB_CACHE": "/x", "HF_HOME": "/hf"}, HOME)]
    not_utf8 = {"HF_HOME": os.fsdecode(b"/caf\xe9"), "OLLAMA_MODELS": os.fsdecode(b"/caf\xe9")}
    assert not [store for store in known_stores(not_utf8, HOME) if "caf" in str(store.root)]


def test_a_folder_is_walked_and_what_is_unfinished_is_left_out(tmp_path: Path) -> None:
    put(tmp_path / "a.gguf", b"x")
    put(tmp_path / "deep/er/b.gguf", b"x")
    put(tmp_path / "c.gguf.part", b"x")
    put(tmp_path / "d.gguf", b"x")
    put(tmp_path / "d.gguf.aria2", b"x")
    put(tmp_path / "empty.gguf", b"")
    put(tmp_path / ".trash/e.gguf", b"x")
    (tmp_path / "folder.gguf").mkdir()
    os.mkfifo(tmp_path / "pipe.gguf")
    assert sorted(names(scan([folder(tmp_path)]))) == ["a.gguf", "b.gguf"]


def test_loops_and_depth_end(tmp_path: Path) -> None:
    put(tmp_path / "a/x.gguf", b"x")
    (tmp_path / "a/up").symlink_to(tmp_path)
    (tmp_path / "nowhere.gguf").symlink_to(tmp_path / "gone")
    (tmp_path / "self").symlink_to(tmp_path / "self")
    deep = tmp_path.joinpath(*["d"] * (MAX_DEPTH + 2))
    put(deep / "far.gguf", b"x")
    assert names(scan([folder(tmp_path)])) == ["x.gguf"]


def test_a_store_within_a_store_counts_once(tmp_path: Path) -> None:
    put(tmp_path / "in/x.gguf", b"x")
    assert names(scan([folder(tmp_path), folder(tmp_path / "in")])) == ["x.gguf"]


@pytest.mark.parametrize("shared", [False, True])
def test_the_hub_cache_is_read_through_its_links(tmp_path: Path, shared: bool) -> None:
    content = model_bytes("one")
    for commit in ("aaa", "bbb"):
        put_in_hub_cache(tmp_path, "org/Model-GGUF", "Model-Q8_0.gguf", content, commit=commit, shared=shared)
    put_in_hub_cache(tmp_path, "org/Model-GGUF", "sub/Model-Q4_0.gguf", model_bytes("two"), commit="bbb", shared=shared)
    put(tmp_path / "models--org--Model-GGUF/blobs/123.incomplete", b"x")
    found = scan([Store("huggingface", tmp_path, "Hugging Face cache")]).files
    assert [(file.name, file.title) for file in found] == [
        ("Model-Q8_0.gguf", "org/Model-GGUF"),
        ("Model-Q4_0.gguf", "org/Model-GGUF"),
    ]
    assert "bbb" in found[0].path.parts  # main's snapshot
    assert found[0].sha256 == sha256(content).hexdigest()


def test_the_old_llama_cpp_cache_is_flat(tmp_path: Path) -> None:
    put(tmp_path / "org_repo_Model-Q8_0.gguf", model_bytes())
    put(tmp_path / "org_repo_Model-Q8_0.gguf.json", b"{}")
    put(tmp_path / "other.gguf.downloadInProgress", b"x")
    put_in_hub_cache(tmp_path, "org/New", "New-Q8_0.gguf", model_bytes("new"))
    found = scan([Store("llama_cpp", tmp_path, "llama.cpp")]).files
    assert sorted(file.name for file in found) == ["New-Q8_0.gguf", "org_repo_Model-Q8_0.gguf"]


def test_lm_studio_names_publisher_and_model(tmp_path: Path) -> None:
    put(tmp_path / "pub/Model-GGUF/Model-Q8_0.gguf", model_bytes())
    assert scan([Store("lm_studio", tmp_path, "LM Studio")]).files[0].title == "pub/Model-GGUF"


def test_ollama_names_what_its_numbers_are(tmp_path: Path) -> None:
    layers = {"model": model_bytes(), "projector": projector_bytes(), "template": b"{{ .Prompt }}", "params": b"{}"}
    blobs = put_in_ollama(tmp_path, "gemma3:4b-it-q4_K_M", layers)
    put(tmp_path / "blobs/sha256-abc-partial", b"x")
    census = scan([Store("ollama", tmp_path, "Ollama")])
    model, projector = census.files
    assert (model.name, model.role, model.path) == ("gemma3:4b-it-q4_K_M", "model", blobs["model"])
    assert model.sha256 == sha256(layers["model"]).hexdigest()
    assert dict(model.texts) == {kind: blobs[kind] for kind in ("manifest", "template", "params")}
    assert (projector.role, projector.beside) == ("projector", blobs["model"])
    assert census.problems == ()


def test_a_manifest_cannot_lead_elsewhere_and_a_damaged_one_is_said(tmp_path: Path) -> None:
    root = tmp_path / "ollama"
    put(tmp_path / "secret.gguf", b"x")
    tags = root / "manifests/registry.ollama.ai/library/evil"
    layer = '{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "%s", "size": 1}]}'
    put(tags / "up", (layer % "sha256:../../secret.gguf").encode())
    put(tags / "lost", (layer % f"sha256:{'a' * 64}").encode())
    put(tags / "broken", b"{")
    census = scan([Store("ollama", root, "Ollama")])
    assert census.files == ()
    assert [problem.sentence.count("pull the model again") for problem in census.problems] == [1, 1]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_said_by_everyone(tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir(mode=0)
    problem = scan([Store("ollama", tmp_path, "Ollama service")]).problems[0]
    assert "join the group ollama" in problem.sentence


def test_a_folder_that_refuses_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "closed/a.gguf", b"x")
    put(tmp_path / "open/b.gguf", b"x")
    scandir = os.scandir

    def refuse(path: str) -> object:
        if path.endswith("closed"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    census = scan([folder(tmp_path)])
    assert names(census) == ["b.gguf"]
    assert "closed: cannot be read" in census.problems[0].sentence


def test_a_look_is_stale_once_something_changes(tmp_path: Path) -> None:
    later = tmp_path / "later"
    path = put(tmp_path / "here/a.gguf", b"x")
    census = scan([folder(tmp_path / "here"), folder(later)])
    assert not is_stale(census)
    path.write_bytes(b"longer")
    assert is_stale(census)
    census = scan([folder(tmp_path / "here"), folder(later)])
    later.mkdir()
    assert is_stale(census)
    census = scan([folder(tmp_path / "here"), folder(later)])
    path.unlink()
    assert is_stale(census)


def test_what_was_opened_is_listed_where_it_is(tmp_path: Path) -> None:
    parts = [put(tmp_path / f"big-0000{number}-of-00002.gguf", b"x") for number in (1, 2)]
    alone, elsewhere = put(tmp_path / "a.gguf", b"x"), put(tmp_path / "lm/p/m/b.gguf", b"x")
    lm_studio = Store("lm_studio", tmp_path / "lm", "LM Studio")
    census = scan([lm_studio, *opened_stores([parts[0], alone, elsewhere, tmp_path / "gone.gguf"])])
    assert len(census.files) == 4
    assert {file.path: file.store.words for file in census.files} == {
        elsewhere: "LM Studio",
        parts[0]: "Opened",
        parts[1]: "Opened",
        alone: "Opened",
    }
    assert not is_stale(census)
    put(tmp_path / "gone.gguf", b"x")
    assert is_stale(census)


def test_file_dialogs_begin_where_models_are(tmp_path: Path) -> None:
    """They began in the folder that the program was started in."""
    opened, added, store = tmp_path / "opened" / "m.gguf", tmp_path / "added", tmp_path / "lm"
    stores = (Store("ollama", tmp_path, "Ollama"), Store("lm_studio", store, "LM Studio"))
    assert models_folder((opened,), (added,), stores) is None
    too_long = Store("huggingface", Path("/" + "a" * 5000), "Hugging Face cache")
    assert models_folder((), (), (too_long, *stores)) is None
    for folder in (store, added, opened.parent):
        folder.mkdir()
        assert models_folder((tmp_path / "gone" / "m.gguf", opened), (added,), stores) == folder
