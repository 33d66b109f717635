"""Renders a conversation to a prompt: by a chat template in a child process, or in the plain format ChatML."""

from __future__ import annotations

from collections.abc import Sequence

from engine.base.errors import EngineError, WorkerStalledError
from engine.runtime.protocol.messages import Message
from engine.runtime.protocol.requests import NO_INPUT, ChatMessage, Job, TemplateInput

RENDER_SECONDS = 2.0
MAX_TEMPLATE_CHARACTERS = 1 << 18


class Render(Job, frozen=True, tag="render", kw_only=True):
    """Request to render a conversation by a chat template; answered by `RenderedChat`.

    `beginning_of_text`, `end_of_text`: texts of the BOS and EOS tokens.
    """

    template: str
    messages: tuple[ChatMessage, ...]
    beginning_of_text: str
    end_of_text: str
    template_input: TemplateInput = NO_INPUT


class RenderedChat(Message, frozen=True, tag="rendered_chat", kw_only=True):
    """The answer to `Render`.

    `text`: the rendered prompt.
    `fault`: why the template failed; empty if it did not.
    `for_log`: the same reason for the log, without text that the template wrote: that text may quote the conversation.
    """

    text: str = ""
    fault: str = ""
    for_log: str = ""


class TemplateError(Exception):
    """Error: a chat template failed. The message is the reason.

    `for_log`: the same reason for the log, without text that the template wrote: that text may quote the conversation.
    """

    def __init__(self, reason: str, for_log: str = "") -> None:
        super().__init__(reason)
        self.for_log = for_log or reason


class TemplateProcess:
    """Renders chat templates in a child process, which is killed if a template takes too much time or memory.

    Use an object from one thread only.
    """

    def __init__(self) -> None:
        # Imported here: a load, and requests with raw text, need no supervision of a child.
        from engine.runtime.process.blocking_child import PersistentChild

        self._child = PersistentChild("renderer", RenderedChat)

    @property
    def pid(self) -> int | None:
        """Process id of the child; None if there is no child."""
        return self._child.pid

    def render(
        self,
        template: str,
        messages: Sequence[ChatMessage],
        template_input: TemplateInput = NO_INPUT,
        *,
        beginning_of_text: str,
        end_of_text: str,
    ) -> str:
        """Return the prompt of a conversation, with the generation prompt of the assistant at its end.

        `beginning_of_text`, `end_of_text`: texts of the BOS and EOS tokens.

        Raises:
            TemplateError: the template is invalid, refuses the conversation, or takes too much time or memory.
        """
        if len(template) > MAX_TEMPLATE_CHARACTERS:
            raise TemplateError("it is too long")
        request = Render(
            template=template,
            messages=tuple(messages),
            beginning_of_text=beginning_of_text,
            end_of_text=end_of_text,
            template_input=template_input,
            seconds=RENDER_SECONDS,
        )
        try:
            answer = self._child.ask(request, RenderedChat)
        except WorkerStalledError:
            raise TemplateError(f"it takes longer than {RENDER_SECONDS:g} s") from None
        except EngineError:
            raise TemplateError("the process that renders it crashed or could not be started") from None
        if answer.fault:
            raise TemplateError(answer.fault, answer.for_log)
        return answer.text

    def end(self) -> None:
        """Kill the child process, if there is one."""
        self._child.end()


def render_plain_chat(messages: Sequence[ChatMessage]) -> str:
    """Return a prompt in ChatML, for models without a usable template. Many models know this format."""
    turns = [f"<|im_start|>{message.role}\n{message.content}<|im_end|>\n" for message in messages]
    return "".join(turns) + "<|im_start|>assistant\n"
