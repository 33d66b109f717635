"""The prompt of a conversation: by the model's own template, which a child renders, or in a plain form of ours."""

from __future__ import annotations

from collections.abc import Sequence

from engine.base.errors import EngineError, WorkerStalledError
from engine.runtime.protocol.messages import ChatMessage, Job, Message

RENDER_SECONDS = 2.0
MAX_TEMPLATE_CHARACTERS = 1 << 18


class Render(Job, frozen=True, tag="render", kw_only=True):
    """Render a conversation by a template."""

    template: str
    messages: tuple[ChatMessage, ...]
    beginning_of_text: str
    end_of_text: str


class RenderedChat(Message, frozen=True, tag="rendered_chat", kw_only=True):
    """The prompt, or the fault of the template; `for_log` as of `TemplateError`."""

    text: str = ""
    fault: str = ""
    for_log: str = ""


class TemplateError(Exception):
    """A chat template that cannot be used, with the reason.

    `for_log`: the reason without what the template itself says, which may quote the conversation.
    """

    def __init__(self, reason: str, for_log: str = "") -> None:
        super().__init__(reason)
        self.for_log = for_log or reason


class TemplateProcess:
    """The child that renders templates. It is killed if one takes too long or too much. For one thread."""

    def __init__(self) -> None:
        # A load and raw text have no use for what supervises a child.
        from engine.runtime.process.questions import KeptChild

        self._child = KeptChild("renderer", RenderedChat)

    @property
    def pid(self) -> int | None:
        """Its process id; None if none runs."""
        return self._child.pid

    def render(
        self, template: str, messages: Sequence[ChatMessage], *, beginning_of_text: str, end_of_text: str
    ) -> str:
        """Return the prompt that asks the assistant to go on, by the model's own template.

        Raises:
            TemplateError: the template is broken, refuses the conversation or takes too much time or space.
        """
        if len(template) > MAX_TEMPLATE_CHARACTERS:
            raise TemplateError("it is too long")
        request = Render(
            template=template,
            messages=tuple(messages),
            beginning_of_text=beginning_of_text,
            end_of_text=end_of_text,
            seconds=RENDER_SECONDS,
        )
        try:
            answer = self._child.ask(request, RenderedChat)
        except WorkerStalledError:
            raise TemplateError(f"it takes longer than {RENDER_SECONDS:g} s") from None
        except EngineError:
            raise TemplateError("the process that renders it broke down or could not be started") from None
        if answer.fault:
            raise TemplateError(answer.fault, answer.for_log)
        return answer.text

    def end(self) -> None:
        """Kill the process, if there is one."""
        self._child.end()


def render_plain_chat(messages: Sequence[ChatMessage]) -> str:
    """Return a prompt in the form that many models know, for those without a usable template."""
    turns = [f"<|im_start|>{message.role}\n{message.content}<|im_end|>\n" for message in messages]
    return "".join(turns) + "<|im_start|>assistant\n"
