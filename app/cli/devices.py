"""The commands `devices` and `packs`, and the devices of this computer for all other commands."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence

from app.cli import exit_codes
from app.cli.output import check_text, error_of, print_document, print_line, print_stderr, print_text, report_error
from app.packs import find_all_devices, pack_installer, pack_keys
from app.paths import engine_checks_path, self_test_path, speeds_path
from engine.base.engine_build import engine_version
from engine.base.errors import ArgumentError, EngineError
from engine.base.texts import show
from engine.devices.device import Device, Rig, with_free_ids
from engine.devices.hiding_variables import find_hiding
from engine.devices.packs.manifest import Manifest
from engine.devices.packs.store import NO_PACKS, PACKS_VARIABLE, ListedPack
from engine.devices.rig_file import encode_rig
from engine.machines.bench.thread_counts import with_threads
from engine.machines.rigs.pack_installer import PackInstaller
from engine.machines.rigs.speeds import measured_book, speed_lines
from engine.planning.fit.speed_book import change_speed_book, read_speed_book


def find_machine(rpc_endpoints: Sequence[str] = (), lent: Sequence[Device] = ()) -> Rig:
    """Return the devices of this computer, of the RPC workers at `rpc_endpoints`, and those `lent` by paired computers.

    New engine packs are checked first. The call waits for the network.

    Raises:
        ArgumentError: if one of `rpc_endpoints` is not an address host:port, or is listed twice.
        EngineError: if an endpoint does not answer or is busy, or if the engine cannot list its devices.
    """
    _check_new_packs()
    rig = find_all_devices(self_test_path(), rpc_endpoints, checks=engine_checks_path())
    return Rig((*rig.devices, *with_free_ids(lent, rig.ids)), rig.host)


def _check_new_packs() -> None:
    """Check the installed engine packs (ggml backends) that were not yet checked with this version of the engine.

    Child processes load checked packs only. The window checks new packs too.
    """
    if os.environ.get(PACKS_VARIABLE) == NO_PACKS:
        return
    keeper = pack_installer()
    names = [pack.name for pack in keeper.listed() if pack.state == "unchecked"]
    if not names:
        return
    print_stderr(f"Checking new engine packs: {', '.join(names)}")
    try:
        verdicts = keeper.check_new()
    except EngineError as error:
        # Not fatal: devices without packs are found all the same.
        print_stderr(error.summary())
        return
    for verdict in verdicts:
        if not verdict.ok:
            print_stderr(f"{verdict.name} is not used. {verdict.reason}")


DOCUMENT_VERSION = 1


def run_packs(options: Namespace) -> int:
    """Run the subcommand of `packs`, and print all packs. The exit code is 5 if a checked pack does not work."""
    keeper = pack_installer()
    if options.packs_command in ("trust", "distrust"):
        return _run_keys(options)
    agreed = _agreed(keeper, options) if options.packs_command == "install" else None
    if options.packs_command == "install" and agreed is None:
        return exit_codes.INTERRUPTED
    checked = _change(keeper, options, agreed)
    listed = keeper.listed()
    if options.json:
        packs = [each.document() for each in listed]
        print_document({"version": DOCUMENT_VERSION, "engine": engine_version(), "packs": packs})
    else:
        _print(listed)
    broken = any(each.name in checked and each.state == "broken" for each in listed)
    return exit_codes.exit_code("crashed") if broken else exit_codes.OK


def _agreed(keeper: PackInstaller, options: Namespace) -> Manifest | None:
    """Print who signed the pack that is to be installed, and return its manifest; None if the user declines.

    If this publisher is not trusted, the user is asked, unless --yes is given.

    Raises:
        ArgumentError: if standard input is not a terminal, so that nobody can be asked.
    """
    manifest, maker = keeper.store.read_archive(options.file)
    print_stderr(f"{options.file.name}: {maker.words}")
    if maker.is_trusted or options.yes:
        return manifest
    if not sys.stdin.isatty():
        raise ArgumentError("A pack is a program that runs with your rights. Add --yes to install it all the same.")
    print_stderr("A pack is a program that runs with your rights. Install it? [y/N] ", end="")
    return manifest if sys.stdin.readline().strip().lower() in ("y", "yes") else None


def _run_keys(options: Namespace) -> int:
    """Trust or distrust a publisher's key, then print the trusted keys; return the exit code."""
    keys = pack_keys()
    if options.packs_command == "distrust":
        keys.distrust(options.key)
    elif options.key is not None:
        check_text(options.name, "The name")
        keys.trust(options.key, options.name)
    own, publishers = keys.own(), keys.publishers()
    if options.json:
        trusted = [{"key": each.key, "name": each.name} for each in publishers]
        print_document({"version": DOCUMENT_VERSION, "own": own or None, "trusted": trusted})
        return exit_codes.OK
    if own:
        print_line(f"{own}  this computer")
    for each in publishers:
        print_line(f"{each.key}  {show(each.name) or 'no name'}, trusted")
    if not own and not publishers:
        print_line("No keys: this computer has signed no pack, and no publisher is trusted.")
    return exit_codes.OK


def _change(keeper: PackInstaller, options: Namespace, agreed: Manifest | None) -> set[str]:
    """Install, remove, enable, disable or check packs as `options` say; return the names of the checked packs.

    `agreed`: manifest of the pack to install.
    """
    match options.packs_command:
        case "install":
            print_stderr(f"Installing and checking {options.file.name}")
            return {keeper.install(options.file, agreed).name}
        case "remove":
            keeper.remove(options.name)
        case "on" | "off":
            keeper.switch(options.name, on=options.packs_command == "on")
        case "check" if options.name is not None:
            return {keeper.check(keeper.store.pack(options.name)).name}
        case "check":
            return {verdict.name for verdict in keeper.check_all(lambda pack: print_stderr(f"Checking {pack.name}"))}
    return set()


def _print(listed: Iterable[ListedPack]) -> None:
    rows = [(each.name, each.backend, each.words) for each in listed]
    if not rows:
        print_line("No engine packs are installed. `layerdeck-cli packs install FILE` installs one.")
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    for *cells, words in rows:
        print_line("  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), words]))


def run_devices(options: Namespace) -> int:
    """Print the rig file of this computer. It is always JSON, because it is meant to be saved."""
    lent = options.tunnels.lent_devices(options.peer)
    rig = find_machine(options.rpc, lent)
    for hiding in find_hiding():
        print_stderr(hiding.sentence)
    problem = None
    if options.measure:
        before = read_speed_book(speeds_path())
        book, problems = measured_book(rig, before)
        book, threads = with_threads(book, rig.host)
        # Read again: the measurement took minutes, and a window may have written to the book meanwhile.
        problem = error_of(lambda: change_speed_book(speeds_path(), lambda stored: stored.with_changes(before, book)))
        for line in (*speed_lines(rig, book), *problems, *threads):
            print_stderr(line)
    print_text(encode_rig(rig).decode())
    if problem is not None:
        # Not as a second document.
        report_error(problem, as_json=False)
        return exit_codes.exit_code(problem.kind)
    return exit_codes.OK
