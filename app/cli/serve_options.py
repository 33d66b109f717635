"""Options of `serve`: listening address, keys and permitted origins, and the idle time of models."""

from __future__ import annotations

import argparse
import re
from argparse import Namespace
from functools import partial
from pathlib import Path

from app.cli.output import print_notice
from app.cli.settings_options import port_number
from app.paths import serve_settings_path
from app.serving.address import is_loopback, own_names
from app.serving.key_file import read_keys
from engine.api.server.guard import Access, key_digest
from engine.api.server.preferences import Preferences, check_alias, read_preferences
from engine.api.server.server import Address
from engine.api.wire.api_request import keep_alive_seconds
from engine.api.wire.errors import ApiError
from engine.base.errors import ArgumentError

# Browsers send scheme, host and port without a path (RFC 6454). "*" would let any web page ask.
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#@*]+")
_HOST_NAME = re.compile(r"[^\s/:*]+")


def add_serve_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of `serve` to its parser."""
    command.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default 127.0.0.1)"
    )
    command.add_argument(
        "--port",
        type=partial(port_number, least=0),
        default=8080,
        metavar="P",
        help="port (default 8080; 0: any free port)",
    )
    command.add_argument(
        "--api-key-file",
        type=Path,
        metavar="F",
        help="file with API keys, one per line; created with a new key if it is missing",
    )
    command.add_argument(
        "--models",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="also offer the models in this folder; may be repeated",
    )
    command.add_argument("--only", action="store_true", help="offer only the named models")
    command.add_argument(
        "--keep-alive",
        metavar="TIME",
        help="unload models after this idle time: 5m (default), 30s, 0, -1 for never",
    )
    command.add_argument(
        "--alias", type=_alias, action="append", default=[], metavar="NAME=FILE",
        help="another name for a file, or for a model of the library; may be repeated",
    )  # fmt: skip
    command.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name of this computer that requests may use; may be repeated",
    )
    command.add_argument(
        "--allow-origin", action="append", default=[], metavar="ORIGIN",
        help="origin of web pages that may send requests, such as http://localhost:3000; may be repeated",
    )  # fmt: skip
    command.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate for https, PEM")
    command.add_argument("--tls-key", type=Path, metavar="FILE", help="private key of the certificate, PEM")
    command.add_argument(
        "--plain-http",
        action="store_true",
        help="allow requests without TLS on an address that other computers can reach",
    )


def address_of(options: Namespace) -> Address:
    """Return the address to listen on.

    Raises:
        ArgumentError: if other computers could reach the server without a key, or if they could reach it without TLS
            and --plain-http is not given.
    """
    if (options.tls_cert is None) != (options.tls_key is None):
        raise ArgumentError("--tls-cert and --tls-key belong together; give both.")
    if not is_loopback(options.host):
        if options.api_key_file is None:
            raise ArgumentError(
                f"Other computers can reach {options.host}: add --api-key-file FILE, so that they need a key."
            )
        if options.tls_cert is None and not options.plain_http:
            raise ArgumentError(
                f"Other computers can reach {options.host}, and others on the network could read the requests: add"
                " --tls-cert and --tls-key, or --plain-http to allow that."
            )
    certificate, key = options.tls_cert, options.tls_key
    return Address(
        options.host, options.port, "" if certificate is None else str(certificate), "" if key is None else str(key)
    )


def access_of(options: Namespace) -> Access:
    """Return the keys, host names and origins that the server accepts.

    Raises:
        ArgumentError: if a key, an origin or a host name is invalid.
    """
    for origin in options.allow_origin:
        if not _ORIGIN.fullmatch(origin):
            raise ArgumentError(f"--allow-origin: {origin} is not an origin; write it like http://localhost:3000.")
    for name in options.allow_host:
        if not _HOST_NAME.fullmatch(name):
            raise ArgumentError(f"--allow-host: {name} is not a host name; write it like box.example, without a port.")
    names = {name.lower().rstrip(".") for name in options.allow_host}
    names |= own_names(options.host)
    return Access(
        keys=tuple(map(key_digest, _keys(options.api_key_file))),
        hosts=frozenset(names),
        origins=frozenset(origin.lower() for origin in options.allow_origin),
        is_loopback=is_loopback(options.host),
    )


def keep_alive_of(options: Namespace) -> float | None:
    """Return the idle time of --keep-alive in seconds; None if the option is not given.

    A negative time means that models are never unloaded.
    """
    try:
        return keep_alive_seconds(options.keep_alive)
    except ApiError as error:
        raise ArgumentError(f"--keep-alive: {error.message}") from None


def preferences_of(options: Namespace) -> Preferences:
    """Return the preferences of the settings file, in which options of the command line replace stored values.

    Raises:
        ArgumentError: if the file cannot be used.
    """
    kept = read_preferences(serve_settings_path())
    aliases = dict(options.alias)
    options.alias = tuple(aliases)
    return Preferences(
        aliases={**kept.aliases, **aliases},
        keep_alive_s=kept.keep_alive_s,
        keep_alive_of=kept.keep_alive_of if options.keep_alive is None else {},
    )


def _alias(text: str) -> tuple[str, str]:
    name, equals, target = text.partition("=")
    if not equals or not target:
        raise argparse.ArgumentTypeError(f'"{text}" is not an alias; write NAME=FILE')
    try:
        return check_alias(name), target
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(error.summary()) from None


def _keys(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    found = read_keys(path, "--api-key-file")
    if found.is_new:
        print_notice(f"a new API key, saved in {path}: {found.keys[0]}")
    if found.is_exposed:
        print_notice(f"others on this computer can read {path}; `chmod 600` keeps the keys from them.")
    return found.keys
