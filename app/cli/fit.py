"""The `fit` command: forecasts every quantisation of a repository before it is downloaded."""

from __future__ import annotations

from argparse import Namespace

from app.cli import exit_codes
from app.cli.auto_options import check_auto_options, constraints_of, with_margins
from app.cli.hub import find_hub, repo_of
from app.cli.inputs import patience, this_machine
from app.cli.output import print_document, print_line
from app.cli.placing_options import rig_of
from app.cli.settings_options import context_of
from app.paths import remote_headers_path, speeds_path
from engine.base.units import format_bytes
from engine.base.values import replace
from engine.devices.rig_file import read_rig
from engine.library.hub.client import list_repo
from engine.library.hub.fit import QuantisationFit, RepoFit
from engine.library.hub.forecast import FitOptions, fit_listing
from engine.library.hub.remote_header import HeaderCache
from engine.machines.rigs.speeds import known_speeds
from engine.model.gguf.model_file import ModelFile
from engine.planning.fit.speed_book import read_speed_book
from engine.planning.fit.strategies.catalogue import find_strategy
from engine.planning.fit.strategies.constraints import SearchLimit
from engine.planning.fit.together import DEFAULT_STRATEGY
from engine.planning.layout.layout_file import LayoutFile, layout_document
from engine.planning.speed.texts import predicted_rate_text, source_text


def run_fit(options: Namespace) -> int:
    """Print a forecast for each quantisation of a repository, with the proposed one marked; return the exit code."""
    options.auto = options.auto or DEFAULT_STRATEGY
    check_auto_options(options)
    # Before anything is fetched: an unknown strategy is an error of the command line.
    find_strategy(options.auto)
    hub = find_hub()
    address = repo_of(options.repo, hub)
    rig = with_margins(read_rig(options.rig) if options.rig is not None else this_machine(), options.margin)
    speeds = known_speeds(rig, read_speed_book(speeds_path()))

    def options_of(model: ModelFile) -> FitOptions:
        constraints = constraints_of(options, rig, model.n_layers)
        watched = replace(constraints, speeds=speeds, watch=SearchLimit(on_tried=patience()))
        return FitOptions(
            rig_of(options, rig), options.auto, context_of(options, model, None), watched, options.text_only
        )

    listing = list_repo(address.repo, hub.settings, hub.token, revision=address.revision)
    found = fit_listing(listing, address, hub.settings, hub.token, HeaderCache(remote_headers_path()), options_of)
    if options.json:
        print_document(_document(found, options.auto))
    else:
        print_line(_text(found))
    return exit_codes.OK if found.best is not None else exit_codes.DOES_NOT_FIT


def _document(found: RepoFit, strategy: str) -> dict[str, object]:
    return {
        "repo": found.listing.repo,
        "commit": found.listing.commit,
        "strategy": strategy,
        "architecture": found.model.architecture,
        "n_layer": found.model.n_layers,
        "best": found.best,
        "why": found.why,
        "quantisations": [_row(fit, found.model.name) for fit in found.fits],
        "projectors": [file.path for file in found.listing.projectors],
    }


def _row(fit: QuantisationFit, name: str) -> dict[str, object]:
    speed = fit.tokens_per_second
    return {
        "name": fit.quantisation.name,
        "quantisation": fit.quantisation.tag or None,
        "files": [file.path for file in fit.quantisation.files],
        "size_bytes": fit.quantisation.size_bytes,
        "verdict": fit.verdict,
        "grade": fit.grade,
        "message": fit.sentence,
        "n_layers_on_cpu": fit.n_layers_on_cpu,
        "n_experts_on_cpu": fit.n_experts_on_cpu,
        "n_ctx": fit.n_ctx or None,
        "need_bytes": fit.need_bytes,
        "tokens_per_second": None if speed is None else [round(each, 2) for each in speed],
        "expected_tokens_per_second": None if speed is None else round(fit.expected_per_second, 2),
        "speed_source": None if speed is None else fit.speed_source,
        "projector": None if fit.projector is None else fit.projector.path,
        "layout": _layout(fit, name),
        "devices": list(fit.rows),
    }


def _layout(fit: QuantisationFit, name: str) -> dict[str, object] | None:
    if fit.layout is None or fit.context is None:
        return None
    return layout_document(LayoutFile(name, fit.layout, fit.context))


def _text(found: RepoFit) -> str:
    lines = [f"{found.listing.repo}: {found.model.architecture}, {found.model.n_layers} layers", ""]
    width = max((len(fit.quantisation.label) for fit in found.fits), default=0)
    for fit in found.fits:
        speed = _speed(fit) if fit.tokens_per_second is not None and fit.fits else ""
        mark = "*" if fit.quantisation.name == found.best else " "
        size = format_bytes(fit.quantisation.size_bytes)
        lines.append(f"{mark} {fit.quantisation.label:<{width}}  {size:>10}  {fit.sentence}{speed}")
    lines += ["", found.why]
    others = [fit.quantisation.label for fit in found.fits if fit.grade == "header"]
    lines.append(f"Read from the header of {', '.join(others)}; the others are estimated by the size of their files.")
    if any(fit.projector is not None for fit in found.fits):
        lines.append("Projectors are counted; --text-only leaves them out.")
    elif found.listing.projectors:
        lines.append("Its projectors are not counted (--text-only).")
    return "\n".join(lines)


def _speed(fit: QuantisationFit) -> str:
    sureness = "Roughly" if fit.speed_source == "guess" else "About"
    return f" {sureness} {predicted_rate_text(fit.expected_per_second)} tokens/s ({source_text(fit.speed_source)})."
