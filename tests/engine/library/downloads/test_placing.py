"""Downloaded files in the chosen folder, or in the Hugging Face cache, where the hub's own tools find them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.base.errors import ArgumentError
from engine.base.files import hugging_face_cache, require_hugging_face_cache
from engine.library.downloads.job import hub_job, web_job
from engine.library.downloads.placing import in_cache, in_folder
from engine.library.hub.addresses import WebAddress
from engine.library.hub.client import list_repo
from engine.library.hub.listing import HubFile, make_listing
from engine.library.hub.settings import HubSettings, hub_settings
from engine.library.hub.tokens import TokenStore
from engine.library.stores import known_stores
from tests.support.hub_server import HubServer, Repo, hub_server
from tests.support.transfers import KIB, download_of, fetch, some_bytes

DATA = some_bytes(100 * KIB)


@pytest.fixture
def server() -> Iterator[HubServer]:
    with hub_server(Repo("org/m", {"Q8_0/m-Q8_0.gguf": DATA})) as found:
        yield found


def test_the_hub_s_own_library_finds_what_was_placed(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    hub = hub_settings(environment={"HF_ENDPOINT": server.url})
    listing = list_repo("org/m", hub)
    job = hub_job("1", listing, listing.find(None), hub)
    end = fetch(download_of(*job.files, refs=job.refs))
    from huggingface_hub import scan_cache_dir, try_to_load_from_cache

    found = try_to_load_from_cache("org/m", "Q8_0/m-Q8_0.gguf", cache_dir=str(tmp_path))
    assert [found] == [file.path for file in end.files]
    assert Path(end.files[0].path).read_bytes() == DATA
    (repo,) = scan_cache_dir(str(tmp_path)).repos
    assert (repo.repo_id, repo.size_on_disk, list(repo.refs)) == ("org/m", len(DATA), ["main"])
    again = fetch(download_of(*job.files, refs=job.refs))
    assert (again.succeeded, again.fetched_bytes) == (True, 0)


def test_in_a_folder_they_have_their_own_names(server: HubServer, tmp_path: Path) -> None:
    hub = hub_settings(environment={"HF_ENDPOINT": server.url})
    listing = list_repo("org/m", hub)
    job = hub_job("1", listing, listing.find(None), hub, tmp_path)
    assert fetch(download_of(*job.files)).succeeded
    assert [path.name for path in tmp_path.iterdir()] == ["m-Q8_0.gguf"]


@pytest.mark.parametrize("path", ["../m.gguf", "a/../../m.gguf", "/m.gguf", "con"])
def test_no_name_leads_out_of_its_folder(tmp_path: Path, path: str) -> None:
    hub = HubSettings()
    listing = make_listing("org/m", "c" * 40, [])
    file = HubFile(path, 1, "../../etag")
    with pytest.raises(ArgumentError, match="nothing was saved"):
        in_cache(listing, [file], hub, tmp_path)
    placed = [] if "/" not in path else in_folder(listing, [file], hub, tmp_path)
    assert all(Path(each.target).parent == tmp_path for each in placed)
    with pytest.raises(ArgumentError):
        web_job("1", WebAddress("https://files.example/x", path), tmp_path)


def test_two_files_of_one_name_do_not_share_a_place(tmp_path: Path) -> None:
    listing = make_listing("org/m", "c" * 40, [])
    with pytest.raises(ArgumentError, match="the same name"):
        in_folder(listing, [HubFile("a/m.gguf", 1, "x"), HubFile("b/m.gguf", 1, "y")], HubSettings(), tmp_path)


def test_where_the_cache_is() -> None:
    assert hugging_face_cache({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}) == Path("/a")
    assert hugging_face_cache({"HF_HOME": "/b"}) == Path("/b/hub")
    assert hugging_face_cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")


@pytest.mark.parametrize("name", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HF_TOKEN_PATH"])
def test_a_folder_of_an_unknown_user_is_no_bug(server: HubServer, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for other in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "~nobody-of-this-name/models")
    assert TokenStore().locate(HubSettings(server.url)) is None
    assert known_stores(os.environ, Path("/home/ada"))
    if name == "HF_TOKEN_PATH":
        return
    listing = list_repo("org/m", HubSettings(server.url))
    with pytest.raises(ArgumentError, match=f"{name} names a folder of an unknown user"):
        hub_job("1", listing, listing.find(None), HubSettings(server.url))


def test_a_relative_cache_is_looked_for_where_downloads_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", "models")
    stores = known_stores(os.environ, Path("/home/ada"))
    assert require_hugging_face_cache(os.environ) == tmp_path / "models"
    assert next(store.root for store in stores if store.kind == "huggingface") == tmp_path / "models"
