"""The `load` command: loads a layout, prints events, and answers prompts."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from app.cli import exit_codes
from app.cli.follow import BadEnding, Follower, exit_code_of
from app.cli.inputs import learn_speed, spec_of
from app.cli.output import check_text
from app.cli.printers import JsonPrinter, Printer, TextPrinter
from engine.base.errors import ArgumentError
from engine.base.files import read_at_most
from engine.base.json_file import UNREADABLE
from engine.base.values import replace
from engine.runtime.protocol.requests import ChatMessage, Generate
from engine.runtime.session.events import Cancelled, Done, Loaded, OutOfMemory, Token
from engine.runtime.session.load_spec import LoadSpec

# Bounds the memory that a wrong file for --prompts, such as a model, would take.
_MAX_BYTES = 64 * 1024 * 1024

AnswerEnding = Done | BadEnding
Ending = AnswerEnding | Loaded
_E = TypeVar("_E", Token, AnswerEnding)


def run_load(options: Namespace) -> int:
    """Load a layout, print events, and answer the prompts of --prompt or --prompts; return the exit code."""
    printer: Printer = JsonPrinter() if options.json else TextPrinter()
    # Before the model is read: a bad file of prompts is an error of the command line.
    requests = tuple(_generate_request(prompt, options) for prompt in prompts_of(options))
    try:
        spec = spec_of(options, printer.explain)
    except KeyboardInterrupt:
        printer.show(Cancelled(stage="header"))
        return exit_codes.INTERRUPTED
    return LoadCommand(spec, requests, printer, numbered=options.prompts is not None).run()


def _generate_request(prompt: str, options: Namespace) -> Generate:
    return Generate(
        messages=(ChatMessage(role="user", content=prompt),),
        max_tokens=options.max_tokens,
        seed=options.seed,
        temperature=options.temp,
    )


class LoadCommand:
    """One run of the command `load`: a load, and the answers to the prompts. Interrupts cancel it.

    `requests`: a request for each prompt.
    `numbered`: whether events of answers carry the index of their prompt, and a last event sums up all answers.
    """

    def __init__(
        self, spec: LoadSpec, requests: Sequence[Generate], printer: Printer, *, numbered: bool = False
    ) -> None:
        self._spec = spec
        self._requests, self._numbered = requests, numbered
        self._printer = printer
        self._follower = Follower()
        self._indices: dict[int, int] = {}
        """Index of the prompt by the number of the request for its answer."""
        self._left = list(range(len(requests)))
        """Indices of the prompts whose answers have not ended."""
        self._summary = AnswerCollector()
        self._texts = [""] * len(requests)
        self._tokens = [0] * len(requests)

    def run(self) -> int:
        """Run the command, and return the exit code. All child processes have ended when the call returns."""
        with self._follower.loading(self._spec):
            ending: Ending = self._follower.load(self._printer)
            plan = self._follower.loaded_plan
            if isinstance(ending, Loaded) and self._requests:
                self._printer.show(ending)
                ending = self._answers()
                while plan is not None and self._follower.step_back(self._spec.with_plan(plan), ending):
                    ending = self._follower.load(self._printer)
                    plan = self._follower.loaded_plan
                    if isinstance(ending, Loaded):
                        self._printer.show(ending)
                        ending = self._answers()
                if self._follower.interrupted:
                    # What was asked for last was to stop, whatever came of the answers meanwhile.
                    ending = self._follower.cancelled
            self._printer.show(ending)
        # Prompts that are answered at once share the devices, which no prediction is about.
        if isinstance(ending, Done) and len(self._requests) == 1 and plan is not None:
            learn_speed(plan, ending)
        return exit_code_of(ending)

    def _answers(self) -> Ending:
        """Print the events of all answers as they arrive. Return the last event, which is not printed.

        If answers ran out of memory, this method is called again after another load. The answers then continue.
        """
        answers, open_requests = self._summary, set[int]()
        may_go_on = self._spec.retry.retries > 0
        try:
            for index in self._left:
                number = self._follower.session.ask(self._request(index))
                self._indices[number] = index
                open_requests.add(number)
        except ArgumentError:
            pass  # The model was lost a moment ago; its ending, or that of what was asked before, comes next.
        for news in self._follower.news():
            if isinstance(news, Token):
                index = self._indices[news.request or 0]
                self._texts[index] += news.text
                self._tokens[index] += 1
                self._printer.show(self._shown(news))
            elif isinstance(news, AnswerEnding):
                if news.request is None:
                    return news
                open_requests.remove(news.request)
                # The model is lost for all prompts. Each is awaited, and all unfinished answers continue after a retry.
                if may_go_on and isinstance(news, OutOfMemory) and self._follower.loaded_plan is None:
                    if open_requests:
                        continue
                    return replace(news, request=None)
                self._left.remove(self._indices[news.request])
                answers.add(news)
                if not self._numbered:
                    return self._shown(news)
                self._printer.show(self._shown(news))
                if not open_requests:
                    return answers.summary()
        raise AssertionError("news have no end")

    def _shown(self, event: _E) -> _E:
        """Return `event` for printing. Its request number is the index of the prompt.

        With a single prompt, events are not numbered, and the number is None.
        """
        number = self._indices.get(event.request or 0) if self._numbered else None
        return replace(event, request=number)

    def _request(self, index: int) -> Generate:
        """Return the request for the prompt at `index`. It continues the answer if a part was generated before."""
        request, text = self._requests[index], self._texts[index]
        if not text:
            return request
        left = None if request.max_tokens is None else max(1, request.max_tokens - self._tokens[index])
        return replace(request, begun=text, max_tokens=left)


class AnswerCollector:
    """Collects the final event of each of several answers, and measures the time since this object was made."""

    def __init__(self) -> None:
        self._endings: list[AnswerEnding] = []
        self._begun_s = time.perf_counter()

    def add(self, ending: AnswerEnding) -> None:
        """Record the final event of an answer, such as `Done`."""
        self._endings.append(ending)

    def summary(self) -> Ending:
        """Return one event for all answers: the first failure, or else sums of tokens with their overall speeds."""
        # Never 0: speeds are divided by it, and some clocks move in steps.
        seconds = max(time.perf_counter() - self._begun_s, 1e-9)
        bad = next((each for each in self._endings if not isinstance(each, Done)), None)
        if bad is not None:
            return replace(bad, request=None)
        done = [each for each in self._endings if isinstance(each, Done)]
        prompt_tokens = sum(each.prompt_tokens for each in done)
        generated_tokens = sum(each.generated_tokens for each in done)
        return Done(
            prompt_tokens=prompt_tokens,
            generated_tokens=generated_tokens,
            prompt_tokens_per_second=prompt_tokens / seconds,
            generation_tokens_per_second=generated_tokens / seconds,
            stop_reason=done[-1].stop_reason,
        )


def prompts_of(options: Namespace) -> tuple[str, ...]:
    """Return the prompts of --prompt or --prompts; none if neither option is given.

    Raises:
        ArgumentError: for both options at once, a file that is not a list of texts, or text that is not UTF-8.
    """
    if options.prompts is not None:
        if options.prompt is not None:
            raise ArgumentError("--prompt and --prompts exclude each other; remove one.")
        return _read(options.prompts)
    if options.prompt is None:
        return ()
    check_text(options.prompt, "The prompt")
    return (options.prompt,)


def _read(path: Path) -> tuple[str, ...]:
    try:
        data = read_at_most(path, _MAX_BYTES)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--prompts: {path} cannot be read: {error}.") from None
    try:
        prompts = msgspec.json.decode(data, type=tuple[str, ...])
    except UNREADABLE as error:
        raise ArgumentError(f"--prompts: {path} is not a JSON list of texts: {error}.") from None
    if not prompts:
        raise ArgumentError(f"--prompts: {path} contains no prompt; it must be a JSON list of texts.")
    return prompts
