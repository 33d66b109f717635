"""Client of the server benchmarks, in a process of its own: sends chat requests, and reads their streams in parallel.

    python -m benchmarks._stream_client PORT TOKENS PROMPTS

PROMPTS is a JSON list of texts. Prints one JSON object:

`seconds`: from the first request to the end of the last answer.
`tokens`: of all answers together.
`first_s`: for each prompt, the seconds from its request to the first text of the answer.
`texts`, `finish_reasons`: for each prompt.
`evaluated`: for each prompt, its tokens that were not cached.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from typing import Any

from msgspec import Struct, field


class _Stream(Struct):
    """The lines of one streamed answer.

    They are decoded after the measurement, since the server uses the same processors.
    """

    lines: list[bytes] = field(default_factory=list)
    first_s: float = 0.0

    @property
    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(line[6:]) for line in self.lines if line.startswith(b"data: {")]


def main() -> None:
    """Send all requests at once, and print the figures of their answers."""
    port, tokens, prompts = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    streams = [_Stream() for _ in prompts]
    connections = [http.client.HTTPConnection("127.0.0.1", port) for _ in prompts]
    for connection in connections:
        connection.connect()

    def ask(number: int) -> None:
        body = {"messages": [{"role": "user", "content": prompts[number]}], "max_tokens": tokens, "stream": True,
                "temperature": 0, "repetition": "continue", "stream_options": {"include_usage": True}}  # fmt: skip
        stream = streams[number]
        begun_s = time.perf_counter()
        connections[number].request("POST", "/v1/chat/completions", json.dumps(body))
        reply = connections[number].getresponse()
        while line := reply.readline():
            stream.lines.append(line)
            if not stream.first_s and b'"content":"' in line and b'"content":""' not in line:
                stream.first_s = time.perf_counter() - begun_s

    begun_s = time.perf_counter()
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begun_s
    print(json.dumps({"seconds": seconds} | _figures(streams)))


def _figures(streams: list[_Stream]) -> dict[str, Any]:
    """Return tokens, times, texts, finish reasons and evaluated prompt tokens of the streams.

    Raises:
        RuntimeError: an answer is not a complete stream.
    """
    tokens, texts, finish_reasons, evaluated = 0, [], [], []
    for stream in streams:
        documents = stream.documents
        choices = [choice for document in documents for choice in document.get("choices", ())]
        usage = next((document["usage"] for document in documents if document.get("usage")), None)
        if usage is None:
            raise RuntimeError(f"no whole stream came: {b''.join(stream.lines)[:1000]!r}")
        tokens += usage["completion_tokens"]
        texts.append("".join(choice["delta"].get("content") or "" for choice in choices))
        finish_reasons.append(next(choice["finish_reason"] for choice in choices if choice["finish_reason"]))
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        evaluated.append(usage["prompt_tokens"] - cached)
    return {
        "tokens": tokens, "first_s": [stream.first_s for stream in streams], "texts": texts,
        "finish_reasons": finish_reasons, "evaluated": evaluated,
    }  # fmt: skip


if __name__ == "__main__":
    main()
