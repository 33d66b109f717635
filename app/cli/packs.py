"""The `packs` command: engine packs listed, installed, checked, switched and removed."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable

from app.cli import exit_codes
from app.cli.output import print_document, print_line, say
from app.packs import pack_keeper
from engine.engine_build import engine_version
from engine.packs.store import ListedPack
from engine.rigs.pack_keeper import PackKeeper

DOCUMENT_VERSION = 1


def run_packs(options: Namespace) -> int:
    """Do what is asked and print what there is then; a pack that its check found not to work is exit code 5."""
    keeper = pack_keeper()
    checked = _change(keeper, options)
    listed = keeper.listed()
    if options.json:
        packs = [each.document() for each in listed]
        print_document({"version": DOCUMENT_VERSION, "engine": engine_version(), "packs": packs})
    else:
        _print(listed)
    broken = any(each.name in checked and each.state == "broken" for each in listed)
    return exit_codes.exit_code("crashed") if broken else exit_codes.OK


def _change(keeper: PackKeeper, options: Namespace) -> set[str]:
    """Do it; return the names of packs that were checked."""
    match options.packs_command:
        case "install":
            say(f"Installing {options.file.name} and checking it")
            return {keeper.install(options.file).name}
        case "remove":
            keeper.remove(options.name)
        case "on" | "off":
            keeper.switch(options.name, on=options.packs_command == "on")
        case "check" if options.name is not None:
            return {keeper.check(keeper.store.pack(options.name)).name}
        case "check":
            return {verdict.name for verdict in keeper.check_all(lambda pack: say(f"Checking {pack.name}"))}
    return set()


def _print(listed: Iterable[ListedPack]) -> None:
    rows = [(each.name, each.backend, each.words) for each in listed]
    if not rows:
        print_line("No engine packs are installed. `layerdeck-cli packs install FILE` installs one.")
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    for *cells, words in rows:
        print_line("  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), words]))
