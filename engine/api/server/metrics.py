"""The document of `/metrics`, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.api.server.journal import Journal


def metrics_text(journal: Journal, states: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the metrics: totals since the server began, and current numbers of requests and models.

    `states`: state of each loaded or requested model as JSON fields, by the model's id (`ModelPool.states`).
    """
    totals = journal.totals
    lines: list[str] = []

    def add(name: str, kind: str, text: str, value: float) -> None:
        lines.extend(
            (f"# HELP layerdeck_{name} {text}", f"# TYPE layerdeck_{name} {kind}", f"layerdeck_{name} {value}")
        )

    add("requests_total", "counter", "Requests that have ended.", totals.requests)
    add("requests_failed_total", "counter", "Requests that have ended with an error, or whose client went away.",
        totals.failed)  # fmt: skip
    add("prompt_tokens_total", "counter", "Tokens of prompts.", totals.prompt_tokens)
    add("prompt_tokens_cached_total", "counter", "Tokens of prompts that were in the cache.", totals.cached_tokens)
    add("answer_tokens_total", "counter", "Tokens of answers.", totals.answer_tokens)
    add("requests_under_way", "gauge", "Requests that have not ended.", len(journal.under_way))
    add(
        "requests_waiting", "gauge", "Requests that wait for a model.", sum(each["waiting"] for each in states.values())
    )
    loaded = [(name, state) for name, state in states.items() if state["state"] == "loaded"]
    add("models_loaded", "gauge", "Models that are loaded.", len(loaded))
    lines.extend(("# HELP layerdeck_device_bytes Measured bytes of a model on a device.",
                  "# TYPE layerdeck_device_bytes gauge"))  # fmt: skip
    for name, state in loaded:
        for row in state["devices"]:
            if row.need_bytes:
                labels = f'model="{_escaped(name)}",device="{_escaped(row.id)}"'
                lines.append(f"layerdeck_device_bytes{{{labels}}} {row.need_bytes}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
