"""`python -m engine.machines.tunnel`: the child that forwards to one machine.

It also looks for machines that announce themselves. One request on standard input; the end of the parent is the end
of this process.
"""

from __future__ import annotations

import base64
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

import msgspec

from engine.base.confinement import refuse_core_files
from engine.base.errors import EngineError
from engine.runtime.protocol.messages import PROTOCOL_VERSION, Failure, Hello
from engine.runtime.protocol.network import Browse, OpenTunnel, TunnelOpened, TunnelRequest
from engine.runtime.protocol.pipe import Pipe

_decoder: msgspec.json.Decoder[TunnelRequest] = msgspec.json.Decoder(TunnelRequest)


def main() -> None:
    """Do what is asked until the input ends."""
    # An interrupt typed in the terminal reaches the whole group; the parent decides and closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    refuse_core_files()
    pipe = Pipe()
    pipe.send(Hello(protocol=PROTOCOL_VERSION, engine="layerdeck tunnel", pid=os.getpid()))
    line = sys.stdin.buffer.readline()
    if not line.strip():
        return
    try:
        _begin(_decoder.decode(line), pipe)
    except EngineError as error:
        pipe.send(Failure(kind=error.kind, message=error.summary()))
    except Exception as error:
        traceback.print_exc()
        pipe.send(Failure(kind="internal", message=f"A bug in Layerdeck: {error!r}"))
    _wait_for_end()
    sys.stderr.flush()
    os._exit(0)


def _begin(request: TunnelRequest, pipe: Pipe) -> None:
    match request:
        case OpenTunnel():
            import asyncio

            from engine.machines.tunnel.calling import Forwarder
            from engine.machines.tunnel.identity import read_identity

            identity = read_identity(Path(request.identity))
            try:
                forwarder = Forwarder(request.endpoint, base64.b64decode(request.certificate), identity, request.port)
            except OSError as error:
                raise EngineError(f"No tunnel can begin on this computer ({error.strerror or error}).") from None
            threading.Thread(target=lambda: asyncio.run(forwarder.run()), name="forwarder", daemon=True).start()
            pipe.send(TunnelOpened(port=forwarder.port))
        case Browse():
            from engine.machines.tunnel.local_network import browse

            browse(request.interfaces, pipe.send)
        case _:
            raise EngineError(f"{type(request).__name__} is no request for a tunnel.")


def _wait_for_end() -> None:
    # A wish to quit ends it as well: whatever comes.
    sys.stdin.buffer.readline()


if __name__ == "__main__":
    main()
