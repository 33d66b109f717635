"""Client of the hub's REST API: search, one repository, and the files of a repository at one commit.

Three endpoints are used: `/api/models`, `/api/models/REPO` and `/api/models/REPO/tree/COMMIT`. Answers are bounded and
parsed into values whose texts are safe to show. Requests go through `engine.library.hub.web`. Calls share no state, so
several threads may make them. Each call waits for the network, so it must not be made in the GUI thread.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import datetime
from email.message import Message
from itertools import islice
from typing import TypeVar
from urllib.parse import quote as quoted
from urllib.parse import urlencode, urljoin, urlsplit

import msgspec
from msgspec import Struct

from engine.base.json_file import UNREADABLE
from engine.base.language import tr
from engine.base.texts import clean, quote
from engine.library.hub.addresses import is_commit, is_repo_id, is_sha256
from engine.library.hub.listing import HubFile, HubModel, RepoListing, SearchOrder, SearchQuery, make_listing
from engine.library.hub.settings import HubError, HubSettings, same_origin
from engine.library.hub.web import error_of_status, open_url, require_safe

MAX_RESULTS = 200
MAX_FILES = 20_000
MAX_RESPONSE_BYTES = 16 * 1024 * 1024
# Most pages of one list; the longest known has about twenty.
MAX_PAGES = 100
# Most bytes of all pages of a list; 20,000 files take about 5 MB.
MAX_LIST_BYTES = 2 * MAX_RESPONSE_BYTES
# Seconds for all pages of a list. A server that sends each page slowly could hold it for hours otherwise.
MAX_LIST_S = 120.0
TIMEOUT_S = 20.0
_MAX_TAGS = 100
_SORTS: dict[SearchOrder, str] = {
    "trending": "trendingScore",
    "downloads": "downloads",
    "likes": "likes",
    "updated": "lastModified",
    "created": "createdAt",
}
_SHOWN = ("author", "createdAt", "downloads", "gated", "gguf", "lastModified", "likes", "pipeline_tag", "tags")
_NEXT_PAGE = re.compile(r'<([^<>]*)>\s*;\s*rel="?next"?', re.IGNORECASE)
# Error message for an unknown token. Any other 401 means that the repository does not exist or is private.
_BAD_TOKEN = "Invalid credentials in Authorization header"
_Answer = TypeVar("_Answer")


class _Model(Struct):
    """A repository in the JSON of the API. `gguf` has values from the file's header, which may be of any type."""

    id: str
    sha: str | None = None
    downloads: int | None = None
    likes: int | None = None
    lastModified: datetime | None = None
    gated: bool | str | None = None
    pipeline_tag: str | None = None
    tags: list[str] | None = None
    gguf: object = None


class _LargeFile(Struct):
    """Field `lfs` of a file in the API's JSON, for a large file in Git LFS. `oid`: SHA-256 of the file."""

    oid: str


class _Entry(Struct):
    """A file or folder in the JSON of the API's tree.

    `type`: "file" or "directory".
    `oid`: hash of the git object.
    `lfs`: SHA-256 of a large file, which is in Git LFS; None for a small file.
    """

    type: str
    path: str
    oid: str
    size: int | None = None
    lfs: _LargeFile | None = None


def search_models(query: SearchQuery, hub: HubSettings, token: str | None = None) -> tuple[HubModel, ...]:
    """Return the GGUF repositories that `query` finds, in the sort order of the query.

    Raises:
        HubError: if the hub does not answer properly.
    """
    limit = min(query.limit, MAX_RESULTS)
    asked = {
        "search": clean(query.text),
        "author": query.author,
        "filter": ["gguf", *query.tags],
        "pipeline_tag": query.task,
        "sort": _SORTS[query.order],
        "limit": limit,
        "expand": _SHOWN,
    }
    url = f"{hub.endpoint}/api/models?{urlencode({key: value for key, value in asked.items() if value}, doseq=True)}"
    found = islice(_items(hub, token, url, list[_Model], tr("the search")), limit)
    return tuple(_model_of(each) for each in found if is_repo_id(each.id))


def list_repo(repo: str, hub: HubSettings, token: str | None = None, *, revision: str = "main") -> RepoListing:
    """Return the files of `repo` at the present commit of `revision` (branch, tag or commit).

    Raises:
        HubError: if the hub does not answer properly.
    """
    hub.require_online()
    address = f"{hub.endpoint}/api/models/{repo}"
    url = f"{address}/revision/{quoted(revision, safe='')}?expand=sha&expand=gated"
    state, _, _ = _ask(hub, token, url, _Model, repo)
    commit = state.sha or ""
    if not is_commit(commit):
        raise HubError("answer", tr("The hub did not report a commit for {repo}; try again later.", repo=repo))
    # Listed at the commit, so that all pages show one state of the repository.
    entries = _items(hub, token, f"{address}/tree/{commit}?recursive=true&expand=false", list[_Entry], repo)
    files = [_file_of(each) for each in islice(entries, MAX_FILES) if each.type == "file"]
    return make_listing(repo, commit, files, gated=bool(state.gated), revision=revision)


def _items(hub: HubSettings, token: str | None, url: str, kind: type[list[_Answer]], what: str) -> Iterator[_Answer]:
    """Yield the items of a list of the API, page by page. Count, bytes and time of all pages are bounded.

    `url`: address of the first page.
    `kind`: type of the decoded list.
    `what`: name of the request in error messages.
    """
    hub.require_online()
    left_bytes, deadline_s = MAX_LIST_BYTES, time.monotonic() + MAX_LIST_S
    for _ in range(MAX_PAGES):
        items, next_url, size_bytes = _ask(hub, token, url, kind, what, min(left_bytes, MAX_RESPONSE_BYTES))
        yield from items
        left_bytes -= size_bytes
        if next_url is None:
            return
        if left_bytes <= 0 or time.monotonic() > deadline_s:
            break
        url = next_url
    host = urlsplit(url).netloc
    raise HubError(
        "answer",
        tr("{host} sends an endless list. The server does not behave like a hub; check the address.", host=host),
    )


def _ask(
    hub: HubSettings,
    token: str | None,
    url: str,
    kind: type[_Answer],
    what: str,
    max_bytes: int = MAX_RESPONSE_BYTES,
) -> tuple[_Answer, str | None, int]:
    """Send one request to the API and parse its answer.

    Return the answer, the address of the next page (None for the last page), and the size of the answer in bytes.

    `url`: address of the requested page.
    `kind`: type of the decoded answer.
    `what`: name of the request in error messages.
    `max_bytes`: largest size of the answer.
    """
    shown = clean(what)

    def error_of_response(status: int, headers: Message, at: str) -> HubError:
        return _error_of_response(status, headers, at, shown)

    require_safe(url, hub.endpoint)
    # The token is for the hub; a next page may be somewhere else.
    allowed = token if same_origin(url, hub.endpoint) else None
    with open_url(url, token=allowed, timeout_s=TIMEOUT_S, error_of_response=error_of_response) as response:
        data = response.read_whole(max_bytes)
        link = _NEXT_PAGE.search(response.headers.get("Link", ""))
    try:
        answer = msgspec.json.decode(data, type=kind)
    except UNREADABLE as error:
        raise HubError(
            "answer",
            tr(
                "The server's answer for {shown} is not that of a Hugging Face hub ({error}); check the address of the "
                "hub.",
                shown=shown,
                error=quote(type(error).__name__),
            ),
        ) from error
    try:
        return answer, urljoin(url, link[1]) if link else None, len(data)
    # `urljoin` raises it for addresses such as `http://[`.
    except ValueError as error:
        raise HubError(
            "answer",
            tr("The hub sent an invalid address for the next page of {shown}; check the hub's address.", shown=shown),
        ) from error


def _error_of_response(status: int, headers: Message, url: str, shown: str) -> HubError:
    """Return the error for a response with the status code `status`, by the hub's header `X-Error-Code`.

    `shown`: name of the repository or search in the message.
    """
    code = headers.get("X-Error-Code", "")
    if code == "GatedRepo":
        return HubError(
            "gated", tr(
                "{shown} is gated. Sign in on the page of the model and accept the terms, then enter an access token "
                "of your account.", shown=shown),
        )  # fmt: skip
    if code == "RepoNotFound" or (status == 401 and headers.get("X-Error-Message", "") != _BAD_TOKEN):
        return HubError(
            "not_found",
            tr(
                "{shown} does not exist on the hub, or is private. Check the name, or enter an access token.",
                shown=shown,
            ),
        )
    if code in ("RevisionNotFound", "EntryNotFound"):
        return HubError("not_found", tr("{shown} has no such version or file; check the address.", shown=shown))
    return error_of_status(status, headers, url)


def _model_of(found: _Model) -> HubModel:
    gguf = found.gguf if isinstance(found.gguf, dict) else {}
    tags = tuple(clean(tag) for tag in islice(found.tags or (), _MAX_TAGS))
    return HubModel(
        repo=found.id,
        downloads=_count(found.downloads) or 0,
        likes=_count(found.likes) or 0,
        updated=found.lastModified.date().isoformat() if found.lastModified else "",
        gated=bool(found.gated),
        task=clean(found.pipeline_tag or ""),
        licence=next((tag.removeprefix("license:") for tag in tags if tag.startswith("license:")), ""),
        tags=tags,
        architecture=clean(str(gguf.get("architecture") or "")),
        n_ctx_train=_count(gguf.get("context_length")),
        n_parameters=_count(gguf.get("total")),
    )


def _file_of(entry: _Entry) -> HubFile:
    sha256 = entry.lfs.oid if entry.lfs is not None and is_sha256(entry.lfs.oid) else None
    return HubFile(entry.path, _count(entry.size) or 0, sha256 or clean(entry.oid), sha256)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else None
