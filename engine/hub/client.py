"""The hub's API through huggingface_hub, which takes half a second to import and is so only where it is used.

Nothing of it outlives a call: answers become values of ours, bounded and with names that may be shown, and errors one
sentence each. For any thread but one that draws: every call waits for the network.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import Request

from engine.gguf.quoting import clean, quote
from engine.hub.errors import HubError
from engine.hub.found import HubModel, SearchOrder, SearchQuery
from engine.hub.listing import HubFile, RepoListing, make_listing
from engine.hub.names import is_commit, is_repo_id, is_sha256
from engine.hub.settings import HubSettings, is_safe_url
from engine.hub.web import exchange, fault_of, fault_of_status
from engine.language import tr

if TYPE_CHECKING:
    import httpx2
    from huggingface_hub import HfApi

MAX_RESULTS = 200
MAX_FILES = 20_000
MAX_ANSWER_BYTES = 16 * 1024 * 1024
MAX_ANSWERS = 100
"""To one question: pages of a list and redirects; the longest list has some twenty."""
TIMEOUT_S = 20.0
_MAX_TAGS = 100
_SORTS: dict[SearchOrder, Any] = {
    "trending": "trending_score",
    "downloads": "downloads",
    "likes": "likes",
    "updated": "last_modified",
    "created": "created_at",
}
_SHOWN: list[Any] = [
    "author",
    "createdAt",
    "downloads",
    "gated",
    "gguf",
    "lastModified",
    "likes",
    "pipeline_tag",
    "tags",
]
_SENT = ("content-length", "transfer-encoding")
_TRANSFERRED = ("content-encoding", *_SENT)
"""Headers about bytes on the line, which are no longer true of an answer that was read."""
_once = threading.Lock()
_Answer = TypeVar("_Answer")


def search_models(query: SearchQuery, hub: HubSettings, token: str | None = None) -> tuple[HubModel, ...]:
    """Return the GGUF repositories that `query` finds, best first.

    Raises:
        HubError: where the hub does not answer as it should.
    """

    def ask(api: HfApi) -> list[HubModel]:
        found = api.list_models(
            search=clean(query.text) or None,
            author=query.author or None,
            filter=["gguf", *query.tags],
            pipeline_tag=query.task or None,
            sort=_SORTS[query.order],
            limit=min(query.limit, MAX_RESULTS),
            expand=_SHOWN,
        )
        taken = islice(found, min(query.limit, MAX_RESULTS))
        return [_model_of(each) for each in taken if is_repo_id(str(each.id))]

    return tuple(_asked(hub, token, tr("the search"), ask))


def find_model(repo: str, hub: HubSettings, token: str | None = None) -> HubModel:
    """Return what the hub says of one repository; raises as `search_models`."""
    return _asked(hub, token, repo, lambda api: _model_of(api.model_info(repo, expand=_SHOWN)))


def list_repo(repo: str, hub: HubSettings, token: str | None = None, *, revision: str = "main") -> RepoListing:
    """Return what `repo` offers at the commit that `revision` is now; raises as `search_models`."""

    def ask(api: HfApi) -> RepoListing:
        state = api.model_info(repo, revision=revision, expand=["sha", "gated"])
        commit = str(state.sha or "")
        if not is_commit(commit):
            raise HubError("answer", tr("The hub does not say which commit of {repo} it has.", repo=repo))
        tree = api.list_repo_tree(repo, recursive=True, revision=commit)
        files = list(_files_of(islice(tree, MAX_FILES)))
        return make_listing(repo, commit, files, gated=bool(state.gated), revision=revision)

    return _asked(hub, token, repo, ask)


def file_url(hub: HubSettings, repo: str, revision: str, path: str) -> str:
    """Return the address of a file; the hub answers with its bytes or a signed link to them."""
    from urllib.parse import quote as quoted

    return f"{hub.endpoint}/{repo}/resolve/{quoted(revision, safe='')}/{quoted(path)}"


def _model_of(found: Any) -> HubModel:
    gguf = found.gguf if isinstance(found.gguf, dict) else {}
    tags = tuple(clean(str(tag)) for tag in islice(found.tags or (), _MAX_TAGS))
    return HubModel(
        repo=str(found.id),
        downloads=_count(found.downloads) or 0,
        likes=_count(found.likes) or 0,
        updated=found.last_modified.date().isoformat() if found.last_modified else "",
        gated=bool(found.gated),
        task=clean(str(found.pipeline_tag or "")),
        licence=next((tag.removeprefix("license:") for tag in tags if tag.startswith("license:")), ""),
        tags=tags,
        architecture=clean(str(gguf.get("architecture") or "")),
        n_ctx_train=_count(gguf.get("context_length")),
        n_parameters=_count(gguf.get("total")),
    )


def _files_of(entries: Iterable[Any]) -> Iterator[HubFile]:
    for entry in entries:
        size_bytes = _count(getattr(entry, "size", None))
        if size_bytes is None:
            continue  # a folder
        sha256 = str(entry.lfs.sha256) if entry.lfs is not None else None
        if sha256 is not None and not is_sha256(sha256):
            sha256 = None
        etag = sha256 or clean(str(entry.blob_id))
        yield HubFile(str(entry.path), size_bytes, etag, sha256)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else None


class _AnswersLeft(threading.local):
    """How many more answers the question of this thread may take: a hub may name one next page after another."""

    n_left = MAX_ANSWERS

    def count(self, url: str) -> None:
        self.n_left -= 1
        if self.n_left < 0:
            host = urlsplit(url).netloc
            raise HubError("answer", tr("{host} gives one page after another without an end; it is no hub.", host=host))


_answers_left = _AnswersLeft()


def _asked(hub: HubSettings, token: str | None, what: str, ask: Callable[[HfApi], _Answer]) -> _Answer:
    hub.require_online()
    api = _api(hub, token)
    _answers_left.n_left = MAX_ANSWERS
    with _as_hub_errors(hub, what):
        return ask(api)


def _api(hub: HubSettings, token: str | None) -> HfApi:
    with _once:
        import huggingface_hub
        from huggingface_hub import constants

        constants.HF_HUB_DISABLE_TELEMETRY = True
        constants.HF_HUB_OFFLINE = False  # `HubSettings.offline` is asked instead, at each call.
        huggingface_hub.set_client_factory(_make_client)
    # False: no token, rather than the one that the library would look for itself.
    return huggingface_hub.HfApi(endpoint=hub.endpoint, token=token or False, library_name="layerdeck")


def _make_client() -> httpx2.Client:
    """A client with an end to every wait and to every answer, that is sent to https only."""
    import httpx2

    class Line(httpx2.BaseTransport):
        # The library's own has an end for each wait, but not for an answer that comes a byte now and then.
        def handle_request(self, request: httpx2.Request) -> httpx2.Response:
            headers = {**request.headers, "accept-encoding": "identity"}
            _answers_left.count(str(request.url))
            asked = Request(str(request.url), request.read() or None, headers, method=request.method)
            status, said, data = exchange(asked, MAX_ANSWER_BYTES + 1, TIMEOUT_S)
            kept = [pair for pair in said.items() if pair[0].lower() not in _SENT]
            return httpx2.Response(status, headers=kept, stream=httpx2.ByteStream(data))

    class Bounded(httpx2.Client):
        def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
            # The library would try again five times, in this thread and with words of its own.
            try:
                response = super().send(request, **{**options, "stream": True})
                try:
                    return _bounded(response)
                finally:
                    response.close()
            except httpx2.HTTPError as error:
                raise _line_fault(error, str(request.url)) from error

    def refuse(request: httpx2.Request) -> None:
        if not is_safe_url(str(request.url)):
            raise HubError(
                "redirect", tr("The hub redirects to {host}, which is no https address.", host=request.url.host)
            )

    return Bounded(transport=Line(), event_hooks={"request": [refuse]}, follow_redirects=True)


def _bounded(response: httpx2.Response) -> httpx2.Response:
    """Return the whole answer; one that says "later" ends the call, for the library would wait as long as it is told.

    Raises:
        HubError: for these, and for an answer that is larger than any of a hub.
    """
    import httpx2

    url = str(response.request.url)
    if response.status_code == httpx2.codes.TOO_MANY_REQUESTS or response.status_code >= 500:
        raise fault_of_status(response.status_code, response.headers, url)
    data = bytearray()
    for part in response.iter_bytes(1 << 16):
        data += part
        if len(data) > MAX_ANSWER_BYTES:
            raise HubError(
                "answer", tr("{host} sent far more than an answer; it is no hub.", host=response.request.url.host)
            )
    headers = [(name, value) for name, value in response.headers.multi_items() if name not in _TRANSFERRED]
    return httpx2.Response(response.status_code, headers=headers, content=bytes(data), request=response.request)


@contextmanager
def _as_hub_errors(hub: HubSettings, what: str) -> Iterator[None]:
    from huggingface_hub import errors

    shown = clean(what)
    try:
        yield
    except HubError:
        raise
    except errors.GatedRepoError as error:
        raise HubError(
            "gated", tr("{shown} is given only to those who accepted its terms: do so on its page, then enter an "
"access token of that account.", shown=shown),
        ) from error  # fmt: skip
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            "not_found",
            tr("The hub has no {shown}, or shows it to its owner's access token only; check the name.", shown=shown),
        ) from error
    except (errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        raise HubError(
            "not_found", tr("{shown} has no such version or file; check the address.", shown=shown)
        ) from error
    except errors.HfHubHTTPError as error:
        raise fault_of_status(error.response.status_code, error.response.headers, hub.endpoint) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HubError(
            "answer",
            tr(
                "What came for {shown} is no answer of a hub ({name__}); check the address.",
                shown=shown,
                name__=quote(type(error).__name__),
            ),
        ) from error


def _line_fault(error: httpx2.HTTPError, url: str) -> HubError:
    import httpx2

    if isinstance(error, httpx2.TimeoutException):
        return fault_of(TimeoutError(), url)
    if isinstance(error, httpx2.ProxyError):
        return HubError("proxy", tr("The proxy did not connect to the hub ({clean}).", clean=clean(str(error))))
    return fault_of(_root_of(error), url)


def _root_of(error: BaseException) -> BaseException:
    """Return the system's own error below those of the libraries, where there is one."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError):
            return found
        found = found.__cause__ or found.__context__
    return OSError(str(error))
