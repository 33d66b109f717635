"""`rig lab` and `rig serve`: RPC workers on this machine, until interrupted."""

from __future__ import annotations

import signal
import sys
import threading
from argparse import Namespace
from pathlib import Path
from types import FrameType

from app.cli import exit_codes
from app.cli.output import print_line
from engine.devices.rig_file import encode_rig
from engine.errors import ArgumentError
from engine.runner.lab import LabRig, serve


def run_rig(options: Namespace) -> int:
    """Run lab workers, or serve one device, until SIGINT, SIGTERM or SIGHUP."""
    ended = _wait_for_signals()
    if options.rig_command == "serve":
        serve(port=options.port, host=options.host, device=options.device, cap_bytes=options.cap, until=ended)
        return exit_codes.OK
    with LabRig(options.workers, on_worker_ended=_report_end) as lab:
        document = encode_rig(lab.rig)
        if not lab.caps_enforced:
            sys.stderr.write("layerdeck-cli: this system cannot limit a worker's memory; the caps are not enforced.\n")
        if options.out is not None:
            _write(options.out, document)
        print_line(document.decode())
        while not ended.wait(timeout=1.0):
            pass
    return exit_codes.OK


def _wait_for_signals() -> threading.Event:
    ended = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        ended.set()

    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), end)
    return ended


def _report_end(device_id: str, sentence: str) -> None:
    sys.stderr.write(f"layerdeck-cli: {device_id}: {sentence}\n")


def _write(path: Path, document: bytes) -> None:
    try:
        path.write_bytes(document + b"\n")
    except OSError as error:
        raise ArgumentError(f"Could not write {path}: {error.strerror}. Choose another file for --out.") from error
