"""The command line's grammar."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from engine.base.errors import ArgumentError
from engine.base.units import parse_size

SEARCH_ORDERS = ("trending", "downloads", "likes", "updated", "created")


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `ArgumentError` instead of leaving the program, and takes options as written."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message[:1].upper()}{message[1:]}. Run `{self.prog} --help` for what it takes.")


def _size(text: str) -> int:
    try:
        size_bytes = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if size_bytes == 0:
        raise argparse.ArgumentTypeError("a size must be above 0")
    return size_bytes


def _quota(text: str) -> int:
    """Return a size that may be 0."""
    return 0 if text.strip() == "0" else _size(text)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_size(part) for part in text.split(","))


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 1 << 16:
        raise argparse.ArgumentTypeError(f'"{text}" is not a port; use a number from 1 to 65535')
    return int(text)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 100.0:
        raise argparse.ArgumentTypeError(f'"{text}" is not a temperature; use a number from 0 to 100')
    return value


def make_parser(words: Sequence[str]) -> Parser:
    """Return the parser of `layerdeck-cli` for `words`.

    It knows all commands, but only the arguments of the one that `words` name: some are made from tables of the engine.
    """
    parser = Parser(
        prog="layerdeck-cli", description="Place the layers of a GGUF model on your devices and load exactly that."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    named = next((word for word in words if not word.startswith("-")), "")
    for name, (text, add_arguments) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", action="store_true", help="print JSON for programs")
        if name == named:
            add_arguments(command)
    return parser


def _add_inspect_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", type=Path, metavar="FILE")


def _add_devices_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--rpc", action="append", default=[], metavar="HOST:PORT", help="also ask this RPC worker; may repeat"
    )
    _add_peer_argument(command)
    command.add_argument(
        "--measure", action="store_true", help="also measure how fast each device is, for plan --auto fastest"
    )


def _add_peer_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--peer", action="append", default=[], metavar="NAME", help="also ask this paired computer; may repeat"
    )


def _add_plan_arguments(command: argparse.ArgumentParser) -> None:
    _add_layout_arguments(command)
    command.add_argument("--probe", action="store_true", help="ask the engine itself (a load without allocation)")


def _add_load_arguments(command: argparse.ArgumentParser) -> None:
    from app.cli.settings_options import positive

    _add_layout_arguments(command)
    _add_retry_argument(command)
    command.add_argument("--prompt", metavar="TEXT")
    command.add_argument("--prompts", type=Path, metavar="FILE", help="answer each text of this JSON list")
    command.add_argument("-n", dest="max_tokens", type=positive, metavar="N", help="generate at most N tokens")
    command.add_argument("--seed", type=int, metavar="S")
    command.add_argument(
        "--temp", type=_temperature, default=0.8, metavar="T", help="temperature; 0 takes the likeliest token"
    )


def _add_embed_arguments(command: argparse.ArgumentParser) -> None:
    _add_layout_arguments(command)
    _add_retry_argument(command)
    command.add_argument("texts", nargs="+", metavar="TEXT")


def _add_chat_arguments(command: argparse.ArgumentParser) -> None:
    from app.cli.chat_options import add_chat_arguments

    _add_layout_arguments(command, file_needed=False)
    _add_retry_argument(command)
    add_chat_arguments(command)


def _add_retry_argument(command: argparse.ArgumentParser) -> None:
    from app.cli.settings_options import positive
    from engine.runtime.session.load_order import DEFAULT_RETRIES

    command.add_argument(
        "--retry",
        type=positive,
        nargs="?",
        const=DEFAULT_RETRIES,
        default=0,
        metavar="N",
        help=f"when it does not fit, step back to at most N other layouts (default {DEFAULT_RETRIES})",
    )


def _add_layout_arguments(command: argparse.ArgumentParser, *, file_needed: bool = True) -> None:
    from app.cli.auto_options import add_auto_arguments
    from app.cli.settings_options import add_settings_arguments

    command.add_argument("file", type=Path, metavar="FILE", nargs=None if file_needed else "?")
    command.add_argument("--rig", type=Path, metavar="R", help="rig file; without it, this machine")
    command.add_argument("--layout", type=Path, metavar="L", help="layout file; without it, the initial layout")
    add_auto_arguments(command)
    add_settings_arguments(command)


def _add_search_arguments(command: argparse.ArgumentParser) -> None:
    from app.cli.settings_options import positive

    command.add_argument("text", nargs="*", metavar="TEXT", help="words to look for; none: what is trending")
    command.add_argument("--sort", choices=SEARCH_ORDERS, default=SEARCH_ORDERS[0], help="what comes first")
    command.add_argument("--limit", type=positive, default=20, metavar="N", help="show at most N (default 20)")
    command.add_argument("--author", metavar="NAME", help="of this owner only")
    command.add_argument("--tag", action="append", default=[], metavar="TAG", help="with this tag; may repeat")


def _add_fit_arguments(command: argparse.ArgumentParser) -> None:
    from app.cli.auto_options import add_auto_arguments
    from app.cli.settings_options import add_context_arguments

    command.add_argument("repo", metavar="REPO[:QUANT]", help="such as owner/name, or a page of the hub")
    command.add_argument("--rig", type=Path, metavar="R", help="rig file; without it, this machine")
    add_auto_arguments(command)
    add_context_arguments(command)


def _add_download_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "address", metavar="REPO[:QUANT]", help="such as owner/name:Q4_K_M, a page of the hub, or a file's address"
    )
    command.add_argument("--to", type=Path, metavar="DIR", help="folder for it; without it, the Hugging Face cache")
    command.add_argument("--restart", action="store_true", help="begin anew what has changed since its download began")
    command.add_argument("--reserve", type=_size, metavar="SIZE", help="leave so much of the disk free (default 1GiB)")


def _add_library_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--folder", type=Path, action="append", default=[], metavar="DIR", help="also look here; may repeat"
    )
    command.add_argument("--fit", action="store_true", help="also forecast what each would do on this machine")
    command.add_argument("--rig", type=Path, metavar="R", help="with --fit: on the devices of this rig file")


def _add_rig_arguments(rig: argparse.ArgumentParser) -> None:
    names = "lab|serve|pair|peers|kept"
    commands = rig.add_subparsers(dest="rig_command", required=True, metavar=names, parser_class=Parser)
    lab = commands.add_parser("lab", help="run capped RPC workers on this machine until interrupted")
    lab.add_argument(
        "--workers", type=_sizes, required=True, metavar="SIZE[,SIZE...]", help="one cap per worker: 512MiB,1GiB"
    )
    lab.add_argument("--out", type=Path, metavar="FILE", help="also write the rig file here")
    lab.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    serve = commands.add_parser("serve", help="be an RPC worker for other machines")
    serve.add_argument("--port", type=_port, required=True, metavar="P")
    serve.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="numeric address to listen on (default 127.0.0.1)"
    )
    serve.add_argument("--device", default="CPU", metavar="D", help="ggml device to offer (default CPU)")
    serve.add_argument("--cap", type=_size, metavar="SIZE", help="offer at most this much memory")
    serve.add_argument(
        "--keep",
        type=_quota,
        metavar="SIZE",
        help="keep weights that clients send, so that they are sent once, up to this much (default 20GiB; 0: none)",
    )
    serve.add_argument(
        "--secure", action="store_true", help="only to paired computers, through an encrypted and authenticated tunnel"
    )
    serve.add_argument("--pair", action="store_true", help="with --secure: show a pairing code")
    serve.add_argument("--announce", action="store_true", help="with --secure: be found in the local network")
    serve.add_argument("--name", metavar="NAME", help="with --secure: what others call this computer")
    serve.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    pair = commands.add_parser("pair", help="pair with a computer that shows a pairing code")
    pair.add_argument("endpoint", metavar="HOST:PORT")
    pair.add_argument("code", metavar="CODE", help="such as K7QM-3XHD-9RWP-T2FV")
    pair.add_argument("--name", metavar="NAME", help="what the other computer calls this one")
    pair.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    peers = commands.add_parser("peers", help="which computers this one is paired with")
    peers.add_argument("--forget", metavar="NAME", help="end the pairing with this one, on this side")
    peers.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    kept = commands.add_parser("kept", help="how much of weights workers of this machine keep")
    kept.add_argument("--empty", action="store_true", help="remove them; they are sent anew")
    kept.add_argument("--json", action="store_true", help=argparse.SUPPRESS)


def _add_packs_arguments(packs: argparse.ArgumentParser) -> None:
    commands = packs.add_subparsers(
        dest="packs_command", metavar="list|install|remove|check|on|off", parser_class=Parser
    )
    texts = {
        "list": "what is installed, and what its check found (also without a word)",
        "install": "install a pack from a .tar.gz, and check it",
        "remove": "remove an installed pack",
        "check": "check packs anew: all, or one",
        "on": "use a pack again that was switched off",
        "off": "leave a pack unused",
    }
    for name, text in texts.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        if name == "install":
            command.add_argument("file", type=Path, metavar="FILE")
        elif name != "list":
            command.add_argument("name", metavar="NAME", nargs="?" if name == "check" else None)


def _add_demo_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", type=Path, metavar="PATH")
    command.add_argument(
        "--generated", action="store_true", help="the made-up model, also where the one that answers was fetched"
    )


def _add_doctor_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--rpc", action="append", default=[], metavar="HOST:PORT", help="also examine this RPC worker; may repeat"
    )
    _add_peer_argument(command)
    command.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON document here")
    command.add_argument("--engine", action="store_true", help="only the engine's check of itself")


_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "inspect": ("show what a model is made of", _add_inspect_arguments),
    "devices": ("print this machine's rig file", _add_devices_arguments),
    "plan": ("forecast what each device would hold", _add_plan_arguments),
    "load": ("load a layout and, with --prompt, generate", _add_load_arguments),
    "chat": ("talk with a model; conversations are kept", _add_chat_arguments),
    "embed": ("load an embedding model and print a vector for each text", _add_embed_arguments),
    "search": ("look for models on the hub", _add_search_arguments),
    "fit": ("forecast how a model of the hub would fit, before it is downloaded", _add_fit_arguments),
    "download": ("download a model; the same call goes on where it ended", _add_download_arguments),
    "library": ("list the models that this computer has", _add_library_arguments),
    "rig": ("run RPC workers", _add_rig_arguments),
    "packs": ("engine packs: what makes a backend (Vulkan, CUDA) of the bundle's engine", _add_packs_arguments),
    "demo": ("write a demo model", _add_demo_arguments),
    "doctor": ("examine this machine: devices, engine, forecasts, speeds", _add_doctor_arguments),
}
