"""Errors of the API: HTTP status, and the error object that OpenAI's clients expect."""

from __future__ import annotations

from collections.abc import Mapping

from engine.runtime.session.events import Cancelled, Crashed, Failed, OutOfMemory

_STATUS_OF_KIND = {"argument": 400, "layout": 503, "rig": 503, "model_file": 503, "does_not_fit": 503}
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


class ApiError(Exception):
    """An error response of the API with the HTTP status `status`.

    `type`: OpenAI's error type; by default the usual type of the status.
    `code`: error code for programs; None: no code.
    `param`: name of the request's wrong field; None: the error is not about one field.
    `fields`: further keys of the error object.
    `headers`: further HTTP headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "",
        code: str | None = None,
        param: str | None = None,
        fields: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.type = type or _TYPES.get(status, "server_error")
        self.code, self.param = code, param
        self.fields, self.headers = dict(fields or {}), dict(headers or {})

    def document(self) -> dict[str, object]:
        """Return the body of the answer in OpenAI's form."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": {**error, **self.fields}}

    def anthropic_document(self) -> dict[str, object]:
        """Return the body of the answer in Anthropic's form."""
        kind = {503: "overloaded_error", 413: "request_too_large"}.get(self.status, self.type)
        known = kind if kind.endswith("_error") or kind == "request_too_large" else "api_error"
        return {"type": "error", "error": {"type": known, "message": self.message, **self.fields}}


def invalid(message: str, param: str | None = None) -> ApiError:
    """Return the error for an invalid request (status 400).

    `param`: name of the wrong field; None: the error is not about one field.
    """
    return ApiError(400, message, param=param)


def context_exceeded(n_prompt_tokens: int, n_ctx: int, *, at_least: bool = False) -> ApiError:
    """Return the error for a prompt that leaves no room for an answer, in the form of llama.cpp's server.

    `at_least`: whether `n_prompt_tokens` is only a lower bound.
    """
    return ApiError(
        400,
        f"The prompt takes {'at least ' * at_least}{n_prompt_tokens} tokens, and the context of one request holds"
        f" {n_ctx}. Shorten the conversation, or load the model with a longer context.",
        type="exceed_context_size_error",
        code="context_length_exceeded",
        fields={"n_prompt_tokens": n_prompt_tokens, "n_ctx": n_ctx},
    )


MAX_TOKEN_CHARACTERS = 256
"""Upper limit for the characters of one token; more than any token of the common vocabularies has."""


def check_length(n_characters: int, n_ctx: int) -> None:
    """Refuse a prompt that is too long for the context even if each token has `MAX_TOKEN_CHARACTERS` characters.

    The model's child process would take minutes to count the tokens of such a prompt.

    Raises:
        ApiError: the prompt is too long; the error has a lower bound of the number of its tokens.
    """
    if n_characters // MAX_TOKEN_CHARACTERS >= n_ctx:
        raise context_exceeded(n_characters // MAX_TOKEN_CHARACTERS, n_ctx, at_least=True)


def error_of(ending: OutOfMemory | Failed | Crashed | Cancelled) -> ApiError:
    """Return the HTTP error for a load or a model request that failed or was stopped. `ending`: its final event."""
    match ending:
        case OutOfMemory():
            fields = {
                "device": ending.device,
                "requested_bytes": ending.requested_bytes,
                "free_bytes": ending.free_bytes,
                "proposals": ending.proposals,
            }
            return ApiError(503, ending.message, type="out_of_memory_error", code="does_not_fit", fields=fields)
        case Failed():
            return ApiError(_STATUS_OF_KIND.get(ending.kind, 503), ending.message, code=ending.kind)
        case Crashed():
            return ApiError(503, ending.message, type="server_error", code=ending.kind)
        case Cancelled():
            return ApiError(503, "The request was stopped: the model is being unloaded.", code="cancelled")
