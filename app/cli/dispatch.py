"""Runs a command: parses the arguments, imports its module, and converts errors to error documents and exit codes.

Only the module of the command is imported: some commands need hardly anything, others most of the engine.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING

from app.cli import exit_codes
from app.cli.arguments import make_parser
from app.cli.output import (
    OutputError,
    prepare_streams,
    print_compact,
    print_document,
    print_stderr,
    report_error,
    silence_stdout,
)
from app.surroundings import repair_home
from engine.base.errors import EngineError

if TYPE_CHECKING:
    from engine.devices.device import Device, Rig
    from engine.machines.rigs.remote_machines import LendingMachine
    from engine.machines.tunnel.offers import Offer
    from engine.machines.tunnel.tunnels import Tunnels


class CommandTunnels:
    """Context manager for one command, which owns the tunnels to paired computers and closes them at the end.

    Imports happen on first use, since most commands need no tunnels.
    """

    def __init__(self) -> None:
        self._tunnels: Tunnels | None = None

    def __enter__(self) -> CommandTunnels:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tunnels is not None:
            self._tunnels.close()

    def reach(self, rig: Rig) -> Rig:
        """Open tunnels to the paired computers of `rig`; return `rig` with the tunnels' addresses in its devices.

        Raises:
            EngineError: if a tunnel does not open.
        """
        if all(device.fingerprint is None for device in rig.devices):
            return rig
        return self._made().reach(rig)

    def offer_of(self, machine: LendingMachine) -> Offer:
        """Return the devices that a paired computer lends now, and who uses them.

        Raises:
            EngineError: if the computer is not paired or does not answer.
        """
        from app.paths import engine_checks_path, identity_path, pairings_path
        from engine.machines.rigs.remote_machines import RemoteMachines
        from engine.machines.tunnel.pairings import PairingStore

        book = PairingStore(pairings_path())
        return RemoteMachines(identity_path(), book, self._made(), engine_checks_path()).ask(machine)

    def lent_devices(self, names: Sequence[str]) -> tuple[Device, ...]:
        """Return the devices that the paired computers with these names lend, each reached through a tunnel.

        Raises:
            EngineError: if a name is not paired, a computer does not answer, or no tunnel can be opened.
        """
        if not names:
            return ()
        from app.paths import engine_checks_path, identity_path, pairings_path
        from engine.machines.rigs.remote_machines import LendingMachine, RemoteMachines
        from engine.machines.tunnel.pairings import PairingStore

        book = PairingStore(pairings_path())
        found = {each.fingerprint: each for each in map(book.server, names)}
        machines = RemoteMachines(identity_path(), book, self._made(), engine_checks_path())
        return tuple(
            device
            for each in found.values()
            for device in machines.find(LendingMachine(each.endpoint, each.fingerprint, each.name))
        )

    def known_names(self) -> tuple[str, ...]:
        """Return the names and addresses of all paired computers that lend devices to this one."""
        from app.paths import pairings_path
        from engine.machines.tunnel.pairings import PairingStore

        return tuple(
            text for each in PairingStore(pairings_path()).all("server") for text in (each.name, each.endpoint)
        )

    def _made(self) -> Tunnels:
        if self._tunnels is None:
            from app.paths import identity_path, pairings_path
            from engine.machines.tunnel.pairings import PairingStore
            from engine.machines.tunnel.tunnels import Tunnels

            self._tunnels = Tunnels(identity_path(), PairingStore(pairings_path()))
        return self._tunnels


# Commands without a child process, which have to start fast.
WITHOUT_CHILDREN = frozenset({"inspect"})


# Modules with more than one command.
_FAMILY = {
    "search": "hub",
    "download": "hub",
    "packs": "devices",
    "export": "exchange",
    "import": "exchange",
    "plan-together": "together",
}
# Commands whose log states how their child processes ended.
LOGGED = frozenset({"load", "chat", "embed", "serve", "bench"})


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments`, and return its exit code. `KeyboardInterrupt` is not caught.

    `arguments`: None for the arguments of the process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Looked up by hand: if the arguments are wrong, there are no parsed options.
    as_json = "--json" in words
    prepare_streams()
    if aside := repair_home(os.environ):
        print_stderr(aside)
    try:
        return _run_to_exit_code(words, as_json=as_json)
    except BrokenPipeError:
        silence_stdout()  # The reader has gone, which is how `| head` ends a command.
        return exit_codes.OK
    except OutputError as error:
        silence_stdout()
        # A sentence on standard error: standard output cannot be written.
        report_error(error, as_json=False)
        return exit_codes.exit_code(error.kind)


def _run_to_exit_code(words: list[str], *, as_json: bool) -> int:
    try:
        return _run(words)
    # `OutputError` is an `EngineError`, but must not be reported on the output that failed.
    except (BrokenPipeError, OutputError):
        raise
    except EngineError as error:
        report_error(error, as_json=as_json)
        return exit_codes.exit_code(error.kind)
    except Exception as error:
        import traceback

        traceback.print_exc()
        if as_json:
            print_document({"error": {"kind": "internal", "message": f"A bug in Layerdeck: {error!r}"}})
        return exit_codes.INTERNAL


def _run(words: list[str]) -> int:
    try:
        options = make_parser(words).parse_args(words)
        _quieten_logs()
        run_command = _import_command(options.command)
    except KeyboardInterrupt:
        # Imports take up to a second. From here on the command itself tells that it was interrupted.
        if "--json" in words and (last := _cancelled(words)) is not None:
            print_compact(last)
        raise
    # The tunnels close first, while the log is still open.
    with _log(options.command), _collections(options.command), CommandTunnels() as options.tunnels:
        return run_command(options)


def _cancelled(words: list[str]) -> object | None:
    """Return the JSON document that a command prints if it was interrupted before it began; None if it prints none."""
    match next((word for word in words if not word.startswith("-")), ""):
        case "load":
            return {"event": "cancelled", "stage": "header"}
        case "chat" if not any(word.startswith(("--list", "--search")) for word in words):
            return {"event": "cancelled", "stage": "header"}
        case "download":
            return {"event": "cancelled", "stage": "fetch"}
        case "embed":
            return {"error": {"kind": "cancelled", "message": "Cancelled before the texts were embedded."}}
        case "doctor":
            from engine.machines.doctor.report import Report, document

            return document(Report(is_whole=False))
    return None


def _quieten_logs() -> None:
    """Hide the log messages of the engine, which are for the window's log file. Bugs still print a traceback."""
    import logging

    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    logging.getLogger("layerdeck").setLevel(logging.CRITICAL)


def _import_command(name: str) -> Callable[[Namespace], int]:
    """Import the module of a command, and return its function `run_NAME`."""
    if name not in WITHOUT_CHILDREN:
        from app.packs import use_packs

        # Before any child starts: children inherit the environment variable.
        use_packs()
    module = import_module(f"app.cli.{_FAMILY.get(name, name)}")
    run_command: Callable[[Namespace], int] = getattr(module, f"run_{name.replace('-', '_')}")
    return run_command


def _log(command: str) -> AbstractContextManager[None]:
    if command not in LOGGED:
        return nullcontext()
    from app.log_file import command_log
    from app.paths import command_log_path

    return command_log(command_log_path())


def _collections(command: str) -> AbstractContextManager[None]:
    """Return a context manager that sets the thresholds of Python's garbage collector for a command.

    Full collections are made rare, because they would slow down a command that ends soon. Python's defaults stay for
    commands that load a model, because they may run for long, and for commands that start no child process.
    """
    if command in LOGGED or command in WITHOUT_CHILDREN:
        return nullcontext()
    from app.allocator import rare_full_collections

    return rare_full_collections()
