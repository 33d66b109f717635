"""HTTP server of one file for `download_rate`: prints its port, and ends when its standard input is closed.

It sends with `sendfile`, so that the server is not the limit of the rate.
"""

from __future__ import annotations

import re
import socketserver
import sys
import threading
from pathlib import Path

_RANGE = re.compile(rb"range: bytes=(\d+)-(\d*)", re.IGNORECASE)


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        asked = b""
        while b"\r\n\r\n" not in asked:
            asked += self.request.recv(65536)
        path = Path(sys.argv[1])
        size = path.stat().st_size
        match = _RANGE.search(asked)
        first = int(match[1]) if match else 0
        end = int(match[2]) + 1 if match and match[2] else size
        head = f'Content-Length: {end - first}\r\nETag: "file"\r\nConnection: close\r\n\r\n'
        if match:
            head = f"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {first}-{end - 1}/{size}\r\n{head}"
        else:
            head = f"HTTP/1.1 200 OK\r\n{head}"
        self.request.sendall(head.encode())
        with path.open("rb") as file:
            self.request.sendfile(file, first, end - first)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True


def main() -> None:
    """Serve until standard input is closed."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        print(server.server_address[1], flush=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sys.stdin.read()
        server.shutdown()


if __name__ == "__main__":
    main()
