"""The `packs` command: engine packs listed, installed, checked, switched and removed."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable

from app.cli import exit_codes
from app.cli.output import print_document, print_line, say
from app.packs import pack_checks
from engine.engine_build import engine_build, engine_version
from engine.packs.book import read_book, write_book
from engine.packs.listing import ListedPack, list_packs
from engine.rigs.pack_checks import PackChecks


def run_packs(options: Namespace) -> int:
    """Do what is asked and print what there is then; a pack that does not work after its check is exit code 5."""
    packs = pack_checks()
    checked = _change(packs, options)
    listed = list_packs(packs.store, read_book(packs.book), engine_build())
    if options.json:
        print_document({"version": 1, "engine": engine_version(), "packs": [each.document() for each in listed]})
    else:
        _print(listed)
    broken = [each for each in listed if each.name in checked and each.state == "broken"]
    return exit_codes.exit_code("crashed") if broken else exit_codes.OK


def _change(packs: PackChecks, options: Namespace) -> set[str]:
    """Do it; return the names of packs that were checked."""
    match options.packs_command:
        case "install":
            pack = packs.store.install(options.file, engine_version())
            say(f"Installed {pack.name} in {pack.folder}. Checking it.")
            write_book(packs.book, read_book(packs.book).switched(pack.name, on=True))
            packs.check(pack)
            return {pack.name}
        case "remove":
            folder = packs.store.remove(options.name)
            write_book(packs.book, read_book(packs.book).without(folder).switched(options.name, on=True))
        case "on" | "off":
            name = packs.store.pack(options.name).name
            write_book(packs.book, read_book(packs.book).switched(name, on=options.packs_command == "on"))
        case "check" if options.name is not None:
            return {packs.check(packs.store.pack(options.name)).name}
        case "check":
            return {verdict.name for verdict in packs.check_all(lambda pack: say(f"Checking {pack.name}"))}
    return set()


def _print(listed: Iterable[ListedPack]) -> None:
    rows = [(each.name, each.backend, each.words) for each in listed]
    if not rows:
        print_line("No engine packs are installed. `layerdeck-cli packs install FILE` installs one.")
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    for *cells, words in rows:
        print_line("  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), words]))
