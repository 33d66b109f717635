"""`python -m engine.machines.tunnel`: the child process that forwards local connections to one paired machine.

It opens further ports to the same machine on request. After the request `Browse` it does not forward, but searches the
local network for machines that announce themselves. It runs until the parent process ends.
"""

from __future__ import annotations

import base64
import os
import sys
import threading
import traceback
from pathlib import Path

from engine.base.confinement import TUNNEL, confine
from engine.base.errors import EngineError
from engine.runtime.protocol.messages import Failure
from engine.runtime.protocol.network import Browse, OpenTunnel, TunnelFailed, TunnelOpened, TunnelRequest
from engine.runtime.protocol.pipe import Pipe, Requests, begin_child
from engine.runtime.protocol.requests import Quit


def main() -> None:
    """Run the child: carry out requests until `Quit`, or until the parent ends."""
    pipe = begin_child("layerdeck tunnel")
    requests: Requests[TunnelRequest] = Requests(TunnelRequest, pipe)
    if not requests.read_first():
        return
    _carry_out(requests.next(), pipe)
    # After the first request: a search restricts its rights (Landlock), which holds only for threads that start later.
    # The end of standard input ends the process.
    requests.start_reading()
    while not isinstance(request := requests.next(), Quit):
        _carry_out(request, pipe)
    sys.stderr.flush()
    # No shutdown of the interpreter: the forwarding thread is still there.
    os._exit(0)


def _carry_out(request: TunnelRequest, pipe: Pipe) -> None:
    try:
        _begin(request, pipe)
        return
    except EngineError as error:
        kind, message = error.kind, error.summary()
    except Exception as error:
        traceback.print_exc()
        kind, message = "internal", f"A bug in Layerdeck: {error!r}"
    if isinstance(request, OpenTunnel):
        # The ports of other devices stay open.
        pipe.send(TunnelFailed(device=request.device, message=message))
    else:
        pipe.send(Failure(kind=kind, message=message))


def _begin(request: TunnelRequest, pipe: Pipe) -> None:
    match request:
        case OpenTunnel():
            # Imported here: a tunnel does not need zeroconf.
            import asyncio

            from engine.machines.tunnel.calling import Forwarder
            from engine.machines.tunnel.identity import read_identity

            identity = read_identity(Path(request.identity))
            try:
                certificate = base64.b64decode(request.certificate)
                forwarder = Forwarder(request.endpoint, certificate, identity, request.port, request.device)
            except OSError as error:
                raise EngineError(f"No tunnel can begin on this computer ({error.strerror or error}).") from None
            # The forwarder reads its key again for each connection.
            confine(TUNNEL, (Path(request.identity),))
            threading.Thread(target=lambda: asyncio.run(forwarder.run()), name="forwarder", daemon=True).start()
            pipe.send(TunnelOpened(port=forwarder.port, device=request.device))
        case Browse():
            from engine.machines.tunnel.local_network import browse

            browse(request.interfaces, pipe.send)
        case _:
            raise EngineError(f"{type(request).__name__} is not a request for a tunnel.")


if __name__ == "__main__":
    main()
