"""`rig lab` and `rig serve`: RPC workers on this machine, until interrupted."""

from __future__ import annotations

import ipaddress
import threading
from argparse import Namespace

from app.cli import exit_codes
from app.cli.interrupts import on_interrupt
from app.cli.output import print_text, say
from engine.devices.rig_file import encode_rig, write_rig
from engine.protocol.messages import Serving
from engine.rigs.lab import CAPS_NOT_ENFORCED, LabRig, serve

_POLL_S = 0.5
"""Python runs signal handlers in the main thread only: a wait without limit would hold them up on Windows."""
OPEN_TO_ALL = "RPC has no authentication and no encryption: whoever reaches this port can use the device."


def run_rig(options: Namespace) -> int:
    """Run lab workers, or serve one device, until SIGINT, SIGTERM or SIGHUP."""
    ended = threading.Event()
    with on_interrupt(ended.set):
        if options.rig_command == "serve":
            _serve(options, ended)
        else:
            _run_lab(options, ended)
    return exit_codes.OK


def _run_lab(options: Namespace, ended: threading.Event) -> None:
    with LabRig(options.workers, on_worker_ended=lambda _, sentence: _say(sentence)) as lab:
        if not lab.caps_enforced:
            _say(CAPS_NOT_ENFORCED)
        if options.out is not None:
            write_rig(options.out, lab.rig)
        print_text(encode_rig(lab.rig).decode())
        while not ended.wait(_POLL_S):
            pass


def _serve(options: Namespace, ended: threading.Event) -> None:
    def report(serving: Serving) -> None:
        _say(f"{options.device} is served on {options.host}:{serving.port}. End it with Ctrl+C.")
        if options.cap is not None and not serving.caps_enforced:
            _say(CAPS_NOT_ENFORCED)
        if not _is_loopback(options.host):
            _say(OPEN_TO_ALL)

    serve(
        port=options.port,
        host=options.host,
        device=options.device,
        cap_bytes=options.cap,
        until=ended,
        on_serving=report,
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _say(sentence: str) -> None:
    say(f"layerdeck-cli: {sentence}")
