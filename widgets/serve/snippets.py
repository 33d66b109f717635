"""Commands and settings for other programs that use the API server, to be copied."""

from __future__ import annotations

import json
import shlex

PROGRAMS = ("curl", "Python", "Open WebUI", "Continue", "Zed")
"""Names of the programs for which there is a snippet, in the order in which they are offered."""
NO_KEY = "none"
"""Text that snippets have in place of the API key if the server needs none, because some programs refuse an empty key.
"""


def snippet(program: str, url: str, key: str, model: str, n_ctx: int) -> str:
    """Return a command or settings to copy into `program` (one of `PROGRAMS`), so that it uses the API server.

    `url`: address of the API server.
    `key`: API key of the server; empty if the server needs no key.
    `model`: name by which the server knows the model.
    `n_ctx`: context of one request, in tokens.
    """
    base, known = f"{url}/v1", key or NO_KEY
    match program:
        case "curl":
            return _curl(base, key, model)
        case "Python":
            return _python(base, known, model)
        case "Open WebUI":
            # Its own default port is 8080, as the server's.
            return (
                f"OPENAI_API_BASE_URL={shlex.quote(base)} OPENAI_API_KEY={shlex.quote(known)} \\\n"
                "  open-webui serve --port 3000\n"
            )
        case "Continue":
            return _continue(base, known, model)
    return _zed(base, known, model, n_ctx)


def _curl(base: str, key: str, model: str) -> str:
    asked = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]}, ensure_ascii=False)
    header = f"  -H {shlex.quote(f'Authorization: Bearer {key}')} \\\n" if key else ""
    return (
        f"curl {shlex.quote(f'{base}/chat/completions')} \\\n{header}"
        f"  -H 'Content-Type: application/json' \\\n  -d {shlex.quote(asked)}\n"
    )


def _python(base: str, key: str, model: str) -> str:
    # JSON strings are strings of Python too.
    return (
        "from openai import OpenAI\n\n"
        f"client = OpenAI(base_url={_quoted(base)}, api_key={_quoted(key)})\n"
        "answer = client.chat.completions.create(\n"
        f"    model={_quoted(model)},\n"
        '    messages=[{"role": "user", "content": "Hello"}],\n'
        ")\n"
        "print(answer.choices[0].message.content)\n"
    )


def _continue(base: str, key: str, model: str) -> str:
    # ~/.continue/config.yaml; JSON strings are strings of YAML too.
    return (
        "name: Layerdeck\nversion: 0.0.1\nschema: v1\nmodels:\n"
        f"  - name: {_quoted(model)}\n    provider: openai\n    model: {_quoted(model)}\n"
        f"    apiBase: {_quoted(base)}\n    apiKey: {_quoted(key)}\n    roles: [chat, edit, apply]\n"
    )


def _zed(base: str, key: str, model: str, n_ctx: int) -> str:
    # Zed reads keys from the environment, by the name of the provider, and not from its settings.
    settings = {
        "language_models": {
            "openai_compatible": {
                "Layerdeck": {"api_url": base, "available_models": [{"name": model, "max_tokens": n_ctx}]}
            }
        }
    }
    return f"// LAYERDECK_API_KEY={key}\n{json.dumps(settings, indent=2, ensure_ascii=False)}\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
