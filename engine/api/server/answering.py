"""Sends the answers to chat requests, as one JSON document or as a stream of events; `AnswerWriter`s make the JSON."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from engine.api.server.asking import Requests, failure_of
from engine.api.server.exchange import Exchange
from engine.api.server.pool import ModelPool
from engine.api.server.pooled_model import LoadedModel
from engine.api.wire.answer import AnswerDelta, AnswerReader, AnswerWriter, Reader, WrittenAnswer
from engine.api.wire.api_request import ApiRequest, count_request, generate_request, prompt_characters
from engine.api.wire.errors import check_length
from engine.base.texts import escape
from engine.base.values import replace
from engine.runtime.protocol.requests import WHOLE_INTERVAL_S, CountTokens, Generate, Tokenise
from engine.runtime.session.events import Done, Reading, RequestEnding, RequestEvent, Token

_log = logging.getLogger("layerdeck.server")


async def answer_chat(
    exchange: Exchange, pool: ModelPool, api_request: ApiRequest, make_writer: Callable[[str], AnswerWriter]
) -> None:
    """Answer a chat request over HTTP.

    `make_writer`: returns the writer of the API's JSON for the id of the answering model.

    Raises:
        ApiError: the request cannot be answered, and nothing has been sent yet.
    """
    if api_request.streams:
        # A load may take minutes: comments keep the stream open meanwhile.
        exchange.keep_open(lambda error: make_writer(api_request.model).fail(error))
    async with pool.use(api_request.model, api_request.keep_alive_s) as model:
        exchange.record.name_model(model.id)
        counted = count_request(api_request, model.profile)
        check_length(prompt_characters(counted), model.n_ctx)
        asked = [generate_request(api_request, model.profile, choice) for choice in range(api_request.n)]
        readers = [AnswerReader(api_request, model.profile) for _ in asked]
        counting = [counted] * len(asked)
        writer = make_writer(model.id)
        await send_answers(
            exchange, model, asked, readers, counting, writer, streams=api_request.streams, per_prompt=len(asked)
        )


async def send_answers(
    exchange: Exchange,
    model: LoadedModel,
    asked: Sequence[Generate],
    readers: Sequence[Reader],
    counting: Sequence[CountTokens | Tokenise],
    writer: AnswerWriter,
    *,
    streams: bool,
    per_prompt: int = 1,
) -> None:
    """Send several requests to the model at once, and send the answers to the client, streamed or whole.

    `asked`: a model request for each answer.
    `readers`: a reader for each answer, which splits the text into thought, text and tool calls.
    `counting`: for each answer, a request that counts the tokens of the prompt. It is sent if an answer failed because
    the prompt may be too long.
    `per_prompt`: number of consecutive answers to the same prompt.
    `writer`: makes the API's JSON from the answers.
    `streams`: whether to send the answers as a stream of events.

    Raises:
        ApiError: an answer failed, and nothing has been sent yet.
    """
    if not streams:
        asked = [replace(each, text_interval_s=WHOLE_INTERVAL_S) for each in asked]
    answers = _Answers(exchange, model, asked, readers, counting, per_prompt)
    try:
        if streams:
            await answers.stream(writer)
        else:
            await answers.send_whole(writer)
    # The handler is cancelled when the client disconnects; then the model must stop computing.
    finally:
        answers.close()


class _Answers:
    """The answers to one HTTP request, which grow while the model writes them."""

    def __init__(
        self,
        exchange: Exchange,
        model: LoadedModel,
        asked: Sequence[Generate],
        readers: Sequence[Reader],
        counting: Sequence[CountTokens | Tokenise],
        per_prompt: int,
    ) -> None:
        self._per_prompt = per_prompt
        self._exchange, self._model, self._readers, self._counting = exchange, model, readers, counting
        self._answers = [WrittenAnswer() for _ in asked]
        self._requests = Requests(model, asked)

    def close(self) -> None:
        """Stop the model requests that have not ended."""
        self._requests.close()

    async def send_whole(self, writer: AnswerWriter) -> None:
        while not self._requests.is_over:
            for index, event in await self._requests.next():
                await self._check(index, event)
                self._answers[index].add(self._part(index, event))
        await self._exchange.respond(writer.whole(self._answers))

    async def stream(self, writer: AnswerWriter) -> None:
        self._exchange.keep_open(writer.fail)
        # Until the prompt is accepted an error has a status of its own, unless a ping has begun the stream.
        events = await self._requests.next()
        for index, event in events:
            await self._check(index, event)
        await self._exchange.begin_stream()
        prompts = {index: event for index, event in events if isinstance(event, Reading)}
        begins = [writer.begin(index, prompts.get(index)) for index in range(len(self._answers))]
        await self._exchange.send(b"".join(begins))
        while True:
            await self._exchange.send(await self._written(events, writer))
            if self._requests.is_over:
                break
            events = await self._requests.next()
        await self._exchange.end_stream(writer.close([each.done for each in self._answers if each.done is not None]))

    async def _written(self, events: Sequence[tuple[int, RequestEvent]], writer: AnswerWriter) -> bytes:
        written: list[bytes] = []
        for index, event in events:
            await self._check(index, event)
            part = self._part(index, event)
            if part:
                written.append(writer.part(index, part))
            if isinstance(event, Done):
                written.append(writer.end(index, event, has_calls=self._readers[index].has_calls))
        return b"".join(written)

    def _part(self, index: int, event: RequestEvent) -> AnswerDelta:
        """Return the text and tool calls that an event adds to answer `index`; record the event in the journal of
        requests.
        """
        if isinstance(event, Token):
            self._exchange.record.note_first_token()
            self._exchange.record.note_answered(event.text)
            return self._readers[index].add(event)
        if isinstance(event, Done):
            self._answers[index].done = event
            # Answers to one prompt are consecutive; the prompt counts with the first of them.
            self._exchange.record.note_done(event, has_own_prompt=index % self._per_prompt == 0)
            if event.replaced_for_log:
                _log.info("%s: %s", escape(self._model.id), event.replaced_for_log)
            return self._readers[index].end()
        return AnswerDelta()

    async def _check(self, index: int, event: RequestEvent) -> None:
        """Raise an error if an event ends the answer `index` without success. All answers are stopped first.

        Raises:
            ApiError: the answer failed or was stopped.
        """
        if isinstance(event, RequestEnding) and not isinstance(event, Done):
            self.close()
            raise await failure_of(self._model, self._counting[index], event)
