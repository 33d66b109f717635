"""The `search` command."""

from __future__ import annotations

from argparse import Namespace

from app.cli import exit_codes
from app.cli.hub import find_hub
from app.cli.output import print_document, print_line
from engine.hub.client import search_models
from engine.hub.listing import HubModel, SearchQuery


def run_search(options: Namespace) -> int:
    """Print the GGUF repositories that a text finds."""
    hub = find_hub()
    query = SearchQuery(
        text=" ".join(options.text),
        author=options.author or "",
        tags=tuple(options.tag),
        order=options.sort,
        limit=options.limit,
    )
    found = search_models(query, hub.settings, hub.token)
    if options.json:
        print_document({"models": [_document(model) for model in found]})
    else:
        print_line("\n".join(map(_line, found)) or "Nothing was found; try fewer words.")
    return exit_codes.OK


def _document(model: HubModel) -> dict[str, object]:
    return {
        "repo": model.repo,
        "downloads": model.downloads,
        "likes": model.likes,
        "updated": model.updated or None,
        "gated": model.gated,
        "task": model.task or None,
        "licence": model.licence or None,
        "architecture": model.architecture or None,
        "n_ctx_train": model.n_ctx_train,
        "n_parameters": model.n_parameters,
        "tags": list(model.tags),
    }


def _line(model: HubModel) -> str:
    facts = [f"{model.downloads:,} downloads", f"{model.likes:,} likes"]
    if model.n_parameters:
        facts.append(f"{model.n_parameters / 1e9:.3g} billion weights")
    facts += [text for text in (model.architecture, model.licence, model.updated) if text]
    if model.gated:
        facts.append("gated")
    return f"{model.repo}\n    {', '.join(facts)}"
