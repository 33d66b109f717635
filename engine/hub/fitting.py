"""From an address to how everything that is offered there would fit a rig, without a byte of weights."""

from __future__ import annotations

from collections.abc import Callable

from engine.gguf.model_file import ModelFile
from engine.hub.addresses import HubAddress
from engine.hub.client import list_repo
from engine.hub.fit import RepoFit
from engine.hub.forecast import FitWish, forecast_repo
from engine.hub.listing import RepoListing
from engine.hub.remote_header import HeaderCache, read_remote_model
from engine.hub.settings import HubSettings


def fit_repo(
    address: HubAddress,
    hub: HubSettings,
    token: str | None,
    cache: HeaderCache | None,
    wish_of: Callable[[ModelFile], FitWish],
    tell: Callable[[int], None] | None = None,
) -> RepoFit:
    """Return how the quantisations at `address` fit. The one that it names is read, else the preferred one.

    `wish_of` says for a model what it is to be planned for; `tell` hears how many quantisations are done.

    Raises:
        HubError: where the hub does not give what is asked for.
        ArgumentError: where there is no such quantisation, or no model.
        ModelFileError: for what is no model.
        CancelledError: the wish's watch says that nobody waits any more.
    """
    listing = list_repo(address.repo, hub, token, revision=address.revision)
    return fit_listing(listing, address, hub, token, cache, wish_of, tell)


def fit_listing(
    listing: RepoListing,
    address: HubAddress,
    hub: HubSettings,
    token: str | None,
    cache: HeaderCache | None,
    wish_of: Callable[[ModelFile], FitWish],
    tell: Callable[[int], None] | None = None,
) -> RepoFit:
    """Return the same for a repository whose files are known; raises as `fit_repo`."""
    read = listing.find(address.quantisation, address.path)
    model = read_remote_model(listing, read, hub, cache, token)
    return forecast_repo(listing, read, model, wish_of(model), tell)
