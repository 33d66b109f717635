"""The commands `rig lab` and `rig serve`, which run RPC workers until an interrupt, and `rig kept` (cached weights)."""

from __future__ import annotations

import ipaddress
from argparse import Namespace

from app.cli import exit_codes
from app.cli.entry import on_interrupt
from app.cli.output import print_document, print_line, print_notice, print_text
from app.cli.serving import print_serving, weight_cache
from app.paths import weight_cache_path
from engine.base.cancellation import CancelToken
from engine.base.errors import ArgumentError
from engine.base.numa import left_nodes_sentence, read_nodes
from engine.base.units import format_bytes
from engine.base.weight_cache import cached_files, empty
from engine.devices.rig_file import encode_rig, write_rig
from engine.machines.rigs.lab import CAPS_NOT_ENFORCED, LabRig, memory_not_bound, numa_rig, serve
from engine.runtime.protocol.messages import Serving

# Seconds of one wait.
# Python runs signal handlers in the main thread only, and on Windows an endless wait delays them.
_POLL_S = 0.5
OPEN_TO_ALL = "RPC has no authentication and no encryption: anyone who can reach this port can use the device."


def run_rig(options: Namespace) -> int:
    """Run the subcommand of `rig`, and return the exit code. Workers run until SIGINT, SIGTERM or SIGHUP."""
    if options.rig_command == "kept":
        return _run_kept(options)
    if options.rig_command in ("pair", "peers"):
        # Imported late: the tunnel takes a while to import.
        from app.cli.secure import run_pair, run_peers

        return run_pair(options) if options.rig_command == "pair" else run_peers(options)
    if options.rig_command == "serve" and (options.install or options.uninstall):
        from app.cli.service import run_service

        return run_service(options)
    ended = CancelToken()
    # Here an interrupt is the regular end: the token lets workers be closed in order.
    with on_interrupt(ended.cancel):
        # Plain RPC is open to everybody, so it needs a port that somebody wrote.
        if options.rig_command == "serve" and (options.secure or options.port is None):
            from app.cli.secure import run_secure

            run_secure(options, ended)
        elif options.rig_command == "serve":
            _serve(options, ended)
        else:
            _run_lab(options, ended)
    return exit_codes.OK


def _run_lab(options: Namespace, ended: CancelToken) -> None:
    if options.numa_nodes == bool(options.workers):
        raise ArgumentError("rig lab needs either --workers SIZE[,SIZE...] or --numa-nodes; give one of them.")

    def on_ended(_device: str, sentence: str) -> None:
        print_notice(sentence)

    nodes = read_nodes() if options.numa_nodes else ()
    if left := left_nodes_sentence(nodes):
        print_notice(left)
    made = (
        numa_rig(nodes, on_worker_ended=on_ended)
        if options.numa_nodes
        else LabRig(options.workers, on_worker_ended=on_ended)
    )
    with made as lab:
        if warning := memory_not_bound(lab.unbound_nodes):
            print_notice(warning)
        if not lab.caps_enforced:
            print_notice(CAPS_NOT_ENFORCED)
        if options.out is not None:
            write_rig(options.out, lab.rig)
        print_text(encode_rig(lab.rig).decode())
        while not ended.wait(_POLL_S):
            pass


def _serve(options: Namespace, ended: CancelToken) -> None:
    if options.pair or options.announce or options.name:
        raise ArgumentError("--pair, --announce and --name need --secure; add it.")
    if len(options.device) > 1 or len(options.cap) > 1 or options.without or options.margin:
        raise ArgumentError("Plain RPC serves one device; add --secure to lend several through one port.")
    device = options.device[0] if options.device else "CPU"
    named, cap_bytes = options.cap[0] if options.cap else ("", None)
    if named not in ("", device):
        raise ArgumentError(f'--cap: "{named[:60]}" is not served; it serves {device}.')

    def report(serving: Serving) -> None:
        print_notice(f"{device} is served on {options.host}:{serving.port}. End it with Ctrl+C.")
        print_serving(options, caps_enforced=serving.caps_enforced)
        if not _is_loopback(options.host):
            print_notice(OPEN_TO_ALL)

    serve(
        port=options.port,
        host=options.host,
        device=device,
        cap_bytes=cap_bytes,
        kept=weight_cache(options),
        until=ended,
        on_serving=report,
    )


def _run_kept(options: Namespace) -> int:
    """Print the size of the cached weights, and return the exit code. With --empty, delete them first."""
    folder = weight_cache_path()
    freed_bytes = empty(folder) if options.empty else 0
    files = cached_files(folder)
    size_bytes = sum(file.size_bytes for file in files)
    if options.json:
        document = {"folder": str(folder), "size_bytes": size_bytes, "files": len(files), "freed_bytes": freed_bytes}
        print_document(document)
    else:
        freed = f"{format_bytes(freed_bytes)} removed; " if options.empty else ""
        print_line(f"{freed}{format_bytes(size_bytes)} of weights are cached in {folder}.")
    return exit_codes.OK


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
