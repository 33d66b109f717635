"""The `library` command: lists the models on this computer."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from app.cli import exit_codes
from app.cli.output import print_document, print_line, print_notice
from app.paths import library_path
from engine.base.cancellation import CancelToken
from engine.base.errors import ArgumentError, LibraryError
from engine.library.census import Census
from engine.library.document import library_document, library_text
from engine.library.facts import Facts
from engine.library.fit import Fit
from engine.library.index import LibraryIndex
from engine.library.listed import Listed
from engine.library.refresh import check_folder, current_facts, list_models, read_missing, unread
from engine.library.scan import scan
from engine.library.stores import folder_stores, known_stores, opened_stores


def run_library(options: Namespace) -> int:
    """Print the models in the library's folders, in the folders of --folder, and in model folders of other programs.

    Return the exit code.
    """
    named = [checked_folder(folder) for folder in options.folder]
    with closing(LibraryIndex(library_path())) as index:
        if index.set_aside is not None:
            print_notice(f"the library's index could not be used. It was renamed to {index.set_aside}.")
        if index.not_saved:
            print_notice(index.not_saved)
        census, facts = scan_library(index, named)
        # The forecasts need a list of models, and the final list shows the forecasts.
        models = list_models(census.files, facts, index.notes(), {})
        if options.fit:
            models = list_models(census.files, facts, index.notes(), _fits(index, models, options))
    for problem in census.problems:
        print_notice(problem.sentence)
    if options.json:
        print_document(library_document(census, models))
    else:
        print_line(library_text(models))
    return exit_codes.OK


def scan_library(
    index: LibraryIndex, folders: Sequence[Path], *, retries: bool = True
) -> tuple[Census, dict[Path, Facts]]:
    """Return the models of the library and of `folders`, and the data from the GGUF header of each file.

    `index`: the library's database, which stores the data of headers.
    `retries`: whether headers that could not be read before are tried again.
    """
    added = dict.fromkeys((*index.folders(), *folders))
    stores = (*folder_stores(added), *known_stores(os.environ, Path.home()), *opened_stores(index.opened()))
    census = scan(stores)
    return census, _facts(index, census, retries=retries)


def checked_folder(folder: Path) -> Path:
    """Return `folder`, which an option names; raises `ArgumentError` if it cannot be scanned."""
    try:
        return check_folder(folder)
    except LibraryError as error:
        raise ArgumentError(error.summary()) from error


def _facts(index: LibraryIndex, census: Census, *, retries: bool) -> dict[Path, Facts]:
    """Return the data from the GGUF headers of all files in `census`, the result of a scan.

    Headers whose data are not in `index` are read, and their data are saved in it.
    """
    facts = current_facts(census, index.facts())
    read_missing(index, census, unread(census, facts, retries=retries), facts.__setitem__, CancelToken())
    return facts


def _fits(index: LibraryIndex, models: tuple[Listed, ...], options: Namespace) -> dict[str, Fit]:
    """Return a forecast for each of `models`, by the fingerprint of its file.

    The forecasts are for the devices of this computer, or of the rig file of --rig.
    Forecasts that `index` lacks are computed and saved in it.
    """
    # Imported for --fit only: a plain list needs neither strategies nor devices.
    from app.cli.auto_options import STRATEGIES
    from app.cli.inputs import this_machine
    from app.paths import speeds_path
    from engine.devices.rig_file import read_rig
    from engine.library.children import plan_models
    from engine.library.planning import jobs, rig_key, settled_rig
    from engine.machines.rigs.speeds import known_speeds
    from engine.planning.fit.speed_book import read_speed_book
    from engine.planning.fit.strategies.constraints import Constraints

    rig = settled_rig(read_rig(options.rig) if options.rig is not None else this_machine())
    strategy, constraints = STRATEGIES[0], Constraints(speeds=known_speeds(rig, read_speed_book(speeds_path())))
    key = rig_key(rig, constraints, strategy, text_only=options.text_only)
    fits = index.fits(key)
    found: dict[str, Fit] = {}
    wanted = jobs((model.entry for model in models), fits, text_only=options.text_only)
    plan_models(wanted, rig, strategy, constraints, found.__setitem__, CancelToken())
    index.save_fits(key, found)
    return fits | found
