"""The endpoints of the API (routes and their handlers) as an ASGI application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from secrets import token_hex
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.api.server.answering import answer_chat, send_answers
from engine.api.server.asking import ask
from engine.api.server.exchange import Endpoint, Exchange, Handler
from engine.api.server.forecasts import Forecasts
from engine.api.server.guard import Access, App, Guard, Scope
from engine.api.server.journal import Journal
from engine.api.server.metrics import metrics_text
from engine.api.server.pool import ModelPool
from engine.api.server.pooled_model import LoadedModel
from engine.api.wire.answer import PlainReader
from engine.api.wire.anthropic import MessageWriter, read_messages
from engine.api.wire.api_request import count_request, prompt_characters
from engine.api.wire.completions import CompletionWriter, completion_requests, counting_requests, read_completion
from engine.api.wire.embeddings import embeddings_document, read_embedding
from engine.api.wire.errors import ApiError, check_length, context_exceeded
from engine.api.wire.names import ModelEntry
from engine.api.wire.openai_chat import ChatWriter, read_chat
from engine.api.wire.responses import ResponseWriter, read_responses
from engine.api.wire.texts import read_detokenise, read_tokenise, tokens_document
from engine.runtime.protocol.messages import Counted, Detokenised, Embedded, Tokenised
from engine.runtime.protocol.requests import Detokenise, Embed

_LARGE_BODY_BYTES = 1 << 16
"""Size above which request bodies are parsed in a thread, to keep the event loop free.

Bodies with images or sounds are parsed in a thread whatever their size.
"""

_BARE = frozenset({"/v1/models", "/v1/chat/completions", "/v1/embeddings", "/v1/responses"})
"""Paths that are also served without `/v1`. Not `/v1/completions`: llama.cpp uses `/completions` for another
request.
"""
READERS = 2
"""Number of threads that parse large bodies. Each decodes images and sounds one at a time, in a child process."""

_MAX_PATH = 200
"""Number of characters to which the path of a refused request is cut in the journal of requests."""


class Api:
    """The handlers of all endpoints, and the objects that they share.

    `version`: Layerdeck's version.
    `on_start`: called in the event loop when the server has started.
    """

    def __init__(self, pool: ModelPool, journal: Journal, access: Access, version: str) -> None:
        self.pool, self.journal, self._access, self._version = pool, journal, access, version
        self._begun_s = time.time()
        self._forecasts = Forecasts(pool)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="api-body")
        self.on_start: Callable[[], None] = lambda: None

    def application(self) -> App:
        """Return the ASGI application: the routes inside a `Guard`, which checks host names, origins, keys and
        sizes.
        """
        routes = [
            self._route("/health", "GET", self._health),
            self._route("/metrics", "GET", self._metrics),
            self._route("/v1/models", "GET", self._models),
            self._route("/v1/models/{name:path}", "GET", self._model),
            self._route("/v1/layerdeck/status", "GET", self._status),
            self._route("/v1/chat/completions", "POST", self._chat),
            self._route("/v1/completions", "POST", self._complete),
            self._route("/v1/embeddings", "POST", self._embed),
            self._route("/v1/responses", "POST", self._responses),
            self._route("/v1/messages", "POST", self._messages),
            self._route("/v1/messages/count_tokens", "POST", self._count_tokens),
            self._route("/tokenize", "POST", self._tokenise),
            self._route("/detokenize", "POST", self._detokenise),
        ]
        # llama.cpp's clients, and those whose base address has no /v1.
        routes += [
            Route(each.path.removeprefix("/v1"), each.endpoint, methods=[*(each.methods or ())])
            for each in routes
            if each.path in _BARE
        ]
        app = Starlette(
            routes=routes,
            lifespan=self._lifespan,
            exception_handlers={
                404: _refuse(404, "There is nothing here; docs/api.md lists the endpoints."),
                405: _refuse(405, "This endpoint does not accept this HTTP method."),
            },
        )
        return Guard(app, self._access, self._note_refused)

    def _note_refused(self, scope: Scope, error: ApiError) -> None:
        """Add a refused request to the journal of requests, so that users see clients without a valid API key."""
        client = scope.get("client")
        # Cut, because a stranger may send long ones.
        self.journal.begin(client[0] if client else "", scope["path"][:_MAX_PATH]).end(error.status, error.code or "")

    def _route(self, path: str, method: str, handler: Handler) -> Route:
        # Starlette takes an object for an ASGI application; it would call a function with a request of its own.
        return Route(path, Endpoint(self.journal, handler), methods=[method])

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        self.pool.start()
        self.on_start()
        try:
            yield
        finally:
            await self._forecasts.close()
            await self.pool.close()
            self._readers.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ about the server

    async def _health(self, exchange: Exchange) -> None:
        await exchange.respond({"status": "ok"})

    async def _metrics(self, exchange: Exchange) -> None:
        text = metrics_text(self.journal, self.pool.states())
        await exchange.respond_raw(text.encode(), "text/plain; version=0.0.4; charset=utf-8")

    async def _status(self, exchange: Exchange) -> None:
        await exchange.respond(
            {
                "version": self._version,
                "started_s": self._begun_s,
                "models": self.pool.states(),
                "requests": self.journal.under_way,
                "totals": self.journal.totals,
            }
        )

    async def _models(self, exchange: Exchange) -> None:
        entries = await self.pool.entries()
        states = self.pool.states()
        await self._forecasts.prepare([each for each in entries if not _is_loaded(states, each)])
        states = self.pool.states()
        await exchange.respond({"object": "list", "data": [self._model_document(each, states) for each in entries]})

    async def _model(self, exchange: Exchange) -> None:
        entry = await self.pool.entry(exchange.path_name)
        if not _is_loaded(self.pool.states(), entry):
            await self._forecasts.of(entry)
        await exchange.respond(self._model_document(entry, self.pool.states()))

    def _model_document(self, entry: ModelEntry, states: dict[str, dict[str, Any]]) -> dict[str, object]:
        state = states.get(entry.id, {"state": "unloaded"})
        return {
            "id": entry.id,
            "object": "model",
            "created": int(self._begun_s),
            "owned_by": "layerdeck",
            "names": entry.names,
            "quantisation": entry.quantisation or None,
            "size_bytes": entry.size_bytes,
            "capabilities": entry.capabilities,
            "n_ctx_train": entry.n_ctx_train,
            "has_kept_layout": bool(entry.layout),
            **{key: state[key] for key in ("state", "n_ctx_seq", "parallel", "layout") if key in state},
            **({} if state["state"] == "loaded" else self._forecasts.known(entry)),
        }

    # ------------------------------------------------------------------ texts

    async def _chat(self, exchange: Exchange) -> None:
        api_request = await self._read(exchange, read_chat)
        created, id = int(time.time()), token_hex(12)
        await answer_chat(exchange, self.pool, api_request, lambda model: ChatWriter(id, model, created, api_request))

    async def _responses(self, exchange: Exchange) -> None:
        api_request, request = await self._read(exchange, read_responses)
        created, id = int(time.time()), token_hex(12)
        await answer_chat(
            exchange, self.pool, api_request, lambda model: ResponseWriter(id, model, created, api_request, request)
        )

    async def _messages(self, exchange: Exchange) -> None:
        api_request = await self._read(exchange, read_messages)
        id = token_hex(12)
        await answer_chat(exchange, self.pool, api_request, lambda model: MessageWriter(id, model))

    async def _count_tokens(self, exchange: Exchange) -> None:
        api_request = await self._read(exchange, read_messages)
        async with self.pool.use(api_request.model, api_request.keep_alive_s) as model:
            exchange.record.name_model(model.id)
            counting = count_request(api_request, model.profile)
            check_length(prompt_characters(counting), model.n_ctx)
            counted = await ask(model, counting)
        assert isinstance(counted, Counted)
        await exchange.respond({"input_tokens": counted.prompt})

    async def _complete(self, exchange: Exchange) -> None:
        wanted = await self._read(exchange, read_completion)
        created, id, streams = int(time.time()), token_hex(12), bool(wanted.stream)
        if streams:
            exchange.keep_open(CompletionWriter(id, wanted.model or "", created, wanted, ()).fail)
        async with self.pool.use(wanted.model or "", wanted.keep_alive_s) as model:
            exchange.record.name_model(model.id)
            texts = [await self._text(model, prompt) for prompt in wanted.prompts]
            check_length(max(map(len, texts)), model.n_ctx)
            asked = completion_requests(wanted, texts, model.profile)
            writer = CompletionWriter(id, model.id, created, wanted, texts)
            readers = [PlainReader() for _ in asked]
            counting = counting_requests(asked)
            await send_answers(
                exchange, model, asked, readers, counting, writer, streams=streams, per_prompt=wanted.count
            )

    async def _embed(self, exchange: Exchange) -> None:
        wanted = await self._read(exchange, read_embedding)
        async with self.pool.use(wanted.model or "", wanted.keep_alive_s) as model:
            exchange.record.name_model(model.id)
            texts = [await self._text(model, text) for text in wanted.texts]
            check_length(max(map(len, texts)), model.n_ctx)
            answer = await ask(model, Embed(texts=tuple(texts)))
        assert isinstance(answer, Embedded)
        exchange.record.note_prompt(answer.prompt_tokens)
        await exchange.respond(embeddings_document(answer, model.id, wanted))

    @staticmethod
    async def _text(model: LoadedModel, prompt: str | tuple[int, ...]) -> str:
        """Return a prompt as text. Some clients send tokens; then the model detokenises them.

        Raises:
            ApiError: the tokens are more than the context holds, or the model cannot detokenise them.
        """
        if isinstance(prompt, str):
            return prompt
        # The model's child process answers nothing else while it detokenises.
        if len(prompt) > model.n_ctx:
            raise context_exceeded(len(prompt), model.n_ctx)
        answer = await ask(model, Detokenise(tokens=prompt))
        assert isinstance(answer, Detokenised)
        return answer.text

    async def _tokenise(self, exchange: Exchange) -> None:
        wanted = read_tokenise(exchange.body)
        async with self.pool.use(wanted.model or "", wanted.keep_alive_s) as model:
            exchange.record.name_model(model.id)
            answer = await ask(model, wanted.request())
        assert isinstance(answer, Tokenised)
        await exchange.respond(tokens_document(answer, with_pieces=wanted.with_pieces))

    async def _detokenise(self, exchange: Exchange) -> None:
        wanted = read_detokenise(exchange.body)
        async with self.pool.use(wanted.model or "", wanted.keep_alive_s) as model:
            exchange.record.name_model(model.id)
            answer = await ask(model, wanted.request())
        assert isinstance(answer, Detokenised)
        await exchange.respond({"content": answer.text})

    async def _read(self, exchange: Exchange, read: Callable[[bytes], Any]) -> Any:
        body = exchange.body
        if len(body) > _LARGE_BODY_BYTES or b"data:" in body or b"base64" in body or b"input_audio" in body:
            return await asyncio.get_running_loop().run_in_executor(self._readers, read, body)
        return read(body)


def _is_loaded(states: dict[str, dict[str, Any]], entry: ModelEntry) -> bool:
    return bool(states.get(entry.id, {}).get("state") == "loaded")


def _refuse(status: int, message: str) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return an exception handler that answers with `status` and a JSON error, for unknown paths and wrong methods."""
    body = msgspec.json.encode(ApiError(status, message).document())

    async def refuse(_request: Request, _error: Exception) -> Response:
        return Response(body, status, media_type="application/json")

    return refuse
