"""The IPv4 addresses of this machine's network interfaces."""

from __future__ import annotations

import ifaddr


def own_addresses() -> tuple[str, ...]:
    """Return the IPv4 addresses of all network interfaces, loopback addresses last; at least 127.0.0.1."""
    found = {str(each.ip) for adapter in ifaddr.get_adapters() for each in adapter.ips if each.is_IPv4}
    return tuple(sorted(found | {"127.0.0.1"}, key=lambda each: (each.startswith("127."), each)))
