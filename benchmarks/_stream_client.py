"""The client of `server_overhead`: reads streams in a process of its own, and prints what it saw."""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time


def main() -> None:
    """Ask so many times at once; print seconds of the whole, tokens, and first tokens."""
    port, count, tokens, prompt = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    firsts: list[float] = []
    totals: list[int] = []
    connections = [http.client.HTTPConnection("127.0.0.1", port) for _ in range(count)]
    for connection in connections:
        connection.connect()

    def ask(number: int) -> None:
        body = {"messages": [{"role": "user", "content": f"{prompt} {number}"}], "max_tokens": tokens, "stream": True,
                "temperature": 0, "stream_options": {"include_usage": True}}  # fmt: skip
        begun_s = time.perf_counter()
        connections[number].request("POST", "/v1/chat/completions", json.dumps(body))
        reply = connections[number].getresponse()
        first_s = 0.0
        usage = None
        while line := reply.readline():
            if line.startswith(b"data: {"):
                if not first_s and b'"content":"' in line:
                    first_s = time.perf_counter() - begun_s
                if b'"usage"' in line:
                    usage = json.loads(line[6:])["usage"]
        firsts.append(first_s)
        totals.append(usage["completion_tokens"] if usage else 0)

    begun_s = time.perf_counter()
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"seconds": time.perf_counter() - begun_s, "tokens": sum(totals), "first_s": firsts}))


if __name__ == "__main__":
    main()
