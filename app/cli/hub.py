"""What `search`, `fit` and `download` have in common: the hub they ask, its token, and addresses."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ArgumentError
from engine.hub.addresses import HubAddress, parse_address
from engine.hub.settings import HubSettings, hub_settings
from engine.hub.tokens import TokenStore


@dataclass(frozen=True, slots=True)
class Hub:
    """The hub that the environment names, and the token for it, None where there is none."""

    settings: HubSettings
    token: str | None


def find_hub() -> Hub:
    """Return the hub to ask; raises `ArgumentError` for an address in the environment that is none."""
    settings = hub_settings()
    return Hub(settings, TokenStore().find(settings))


def repo_of(text: str, hub: Hub) -> HubAddress:
    """Return the repository that `text` names; raises `ArgumentError` for anything else."""
    address = parse_address(text, hub.settings.endpoint)
    if not isinstance(address, HubAddress):
        raise ArgumentError(f"{address} is a file of another server; name a repository as owner/name.")
    return address
