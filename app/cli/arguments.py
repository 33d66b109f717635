"""The argparse parsers of `layerdeck-cli`: one for each command."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from engine.base.errors import ArgumentError
from engine.base.units import parse_size

# Again here, since help must not import the engine. A test compares them.
EXPORT_TARGETS = ("llama-server", "llama-swap", "ollama", "lmstudio", "python")
IMPORT_SOURCES = ("command", "llama-swap", "ollama")
SEARCH_ORDERS = ("trending", "downloads", "likes", "updated", "created")


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `ArgumentError` instead of exiting, and accepts no abbreviated options."""

    def __init__(self, **options: Any) -> None:
        # argparse takes unique beginnings of options: a script would break when an option is added.
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        # argparse would print its usage and exit; with --json the error has to be a document.
        raise ArgumentError(f"{message[:1].upper()}{message[1:]}. Run `{self.prog} --help` for its options.")


def _size(text: str) -> int:
    try:
        size_bytes = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if size_bytes == 0:
        raise argparse.ArgumentTypeError("a size must be above 0")
    return size_bytes


def _quota(text: str) -> int:
    """Parse a size in bytes, such as "20GiB". Unlike for other sizes, 0 is allowed."""
    return 0 if text.strip() == "0" else _size(text)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_size(part) for part in text.split(","))


def _lent_size(text: str) -> tuple[str, int]:
    """Parse "ID=SIZE" to (id, bytes). The id is "" for a size alone, which means the only device."""
    name, _, size = text.rpartition("=")
    return name.strip(), _size(size)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 100.0:
        raise argparse.ArgumentTypeError(f'"{text}" is not a temperature; use a number from 0 to 100')
    return value


def _stall_limit(text: str) -> int:
    from engine.runtime.protocol.heartbeat import MAX_STALL_LIMIT_S, MIN_STALL_LIMIT_S

    seconds = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else -1
    if not MIN_STALL_LIMIT_S <= seconds <= MAX_STALL_LIMIT_S:
        raise argparse.ArgumentTypeError(
            f'"{text}" is not a stall limit; use {MIN_STALL_LIMIT_S} to {MAX_STALL_LIMIT_S} seconds, because a shorter '
            "one would stop loads that are still in progress"
        )
    return seconds


def make_parser(words: Sequence[str]) -> Parser:
    """Return the parser of `layerdeck-cli` for the arguments `words`.

    The parser knows all commands, but only the options of the command in `words`: some options are generated from
    tables of the engine, whose import takes time.
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
        "--rpc",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="also use the devices of this RPC worker; may be repeated",
    )
    _add_peer_argument(command)
    command.add_argument(
        "--measure", action="store_true", help="also measure how fast each device is, for plan --auto fastest"
    )


def _add_peer_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME",
        help="also use the devices of this paired computer; may be repeated",
    )


def _add_plan_arguments(command: argparse.ArgumentParser) -> None:
    _add_layout_arguments(command)
    command.add_argument(
        "--probe", action="store_true", help="check the forecast with the engine, by a load that allocates no memory"
    )
    command.add_argument(
        "--with", dest="added", action="append", default=[], metavar="CARD",
        help='compare with a card that this computer does not have, such as "RTX 3090" or "2 x RTX 3090"; '
        "may be repeated",
    )  # fmt: skip
    command.add_argument("--against", type=Path, metavar="L", help="compare with this layout file")


def _add_together_arguments(command: argparse.ArgumentParser) -> None:
    from app.cli.auto_options import STRATEGIES, add_off_argument
    from app.cli.settings_options import positive

    command.add_argument("files", type=Path, nargs="+", metavar="FILE", help="models, the most important one first")
    command.add_argument("--rig", type=Path, metavar="R", help="rig file (default: this computer)")
    command.add_argument(
        "--auto", default="fewest", metavar="STRATEGY", help="how each model is placed: " + ", ".join(STRATEGIES)
    )
    command.add_argument("--ctx", type=positive, metavar="N", help="context of each model, at most its trained length")
    add_off_argument(command)
    command.add_argument("--out", type=Path, metavar="DIR", help="also write a layout file for each model here")


def _add_load_arguments(command: argparse.ArgumentParser) -> None:
    from app.cli.settings_options import positive

    _add_layout_arguments(command)
    _add_retry_argument(command)
    _add_used_argument(command)
    command.add_argument("--prompt", metavar="TEXT")
    command.add_argument(
        "--prompts", type=Path, metavar="FILE", help="file with a JSON list of prompts, each of which is answered"
    )
    command.add_argument("-n", dest="max_tokens", type=positive, metavar="N", help="generate at most N tokens")
    command.add_argument("--seed", type=int, metavar="S")
    command.add_argument(
        # The default of llama.cpp (`common_params_sampling::temp`).
        "--temp",
        type=_temperature,
        default=0.8,
        metavar="T",
        help="temperature; 0 always takes the most likely token",
    )


def _add_embed_arguments(command: argparse.ArgumentParser) -> None:
    _add_layout_arguments(command)
    _add_retry_argument(command)
    _add_used_argument(command)
    command.add_argument("texts", nargs="+", metavar="TEXT")


def _add_chat_arguments(command: argparse.ArgumentParser) -> None:
    from app.cli.chat_options import add_chat_arguments

    _add_layout_arguments(command, file_needed=False)
    _add_retry_argument(command)
    _add_used_argument(command)
    add_chat_arguments(command)


def _add_serve_arguments(command: argparse.ArgumentParser) -> None:
    from app.cli.serve_options import add_serve_arguments

    _add_layout_arguments(command, several_files=True)
    _add_retry_argument(command)
    add_serve_arguments(command)


def _add_bench_arguments(command: argparse.ArgumentParser) -> None:
    from app.cli.auto_options import add_auto_arguments
    from app.cli.bench_options import add_bench_arguments
    from app.cli.hand_options import add_hand_arguments
    from app.cli.placing_options import add_place_argument
    from app.cli.settings_options import add_settings_arguments

    add_bench_arguments(command)
    add_auto_arguments(command)
    add_place_argument(command)
    add_hand_arguments(command)
    add_settings_arguments(command)


def _add_used_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--when-used",
        choices=("wait", "skip"),
        help="if somebody else uses a lent device of the rig: wait until it is free, or leave it out "
        "(default: the load says who uses it, and ends)",
    )


def _add_retry_argument(command: argparse.ArgumentParser) -> None:
    from app.cli.settings_options import positive
    from engine.runtime.process.child import DEFAULT_STALL_LIMIT_S
    from engine.runtime.session.load_spec import DEFAULT_RETRIES

    command.add_argument(
        "--stall-limit",
        type=_stall_limit,
        metavar="SECONDS",
        help=f"end a load or an answer after this time without progress (default {DEFAULT_STALL_LIMIT_S:g})",
    )
    command.add_argument(
        "--retry",
        type=positive,
        nargs="?",
        const=DEFAULT_RETRIES,
        default=0,
        metavar="N",
        help=f"if it does not fit, try up to N other layouts (default {DEFAULT_RETRIES})",
    )


def _add_layout_arguments(
    command: argparse.ArgumentParser, *, file_needed: bool = True, several_files: bool = False
) -> None:
    from app.cli.auto_options import add_auto_arguments
    from app.cli.hand_options import add_hand_arguments
    from app.cli.placing_options import add_place_argument
    from app.cli.settings_options import add_settings_arguments

    if several_files:
        command.add_argument(
            "names", metavar="FILE|NAME", nargs="*", help="file of a model, or its name in the library"
        )
    else:
        command.add_argument("file", type=Path, metavar="FILE", nargs=None if file_needed else "?")
    command.add_argument("--rig", type=Path, metavar="R", help="rig file (default: this computer)")
    command.add_argument("--layout", type=Path, metavar="L", help="layout file (default: the initial layout)")
    add_auto_arguments(command)
    add_place_argument(command)
    add_hand_arguments(command)
    add_settings_arguments(command)


def _add_search_arguments(command: argparse.ArgumentParser) -> None:
    from app.cli.settings_options import positive

    command.add_argument("text", nargs="*", metavar="TEXT", help="words to search for; without words: trending models")
    command.add_argument("--sort", choices=SEARCH_ORDERS, default=SEARCH_ORDERS[0], help="sort order")
    command.add_argument("--limit", type=positive, default=20, metavar="N", help="show at most N (default 20)")
    command.add_argument("--author", metavar="NAME", help="only repositories of this owner")
    command.add_argument(
        "--tag", action="append", default=[], metavar="TAG", help="only repositories with this tag; may be repeated"
    )


def _add_fit_arguments(command: argparse.ArgumentParser) -> None:
    from app.cli.auto_options import add_auto_arguments
    from app.cli.settings_options import add_context_arguments

    command.add_argument(
        "repo", metavar="REPO[:QUANT]", help="such as owner/name, or the address of its page on Hugging Face"
    )
    command.add_argument("--rig", type=Path, metavar="R", help="rig file (default: this computer)")
    _add_text_only_argument(command)
    add_auto_arguments(command)
    add_context_arguments(command)


def _add_text_only_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--text-only", action="store_true", help="do not count the projector that belongs to a model (images, sound)"
    )


def _add_download_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "address",
        metavar="REPO[:QUANT]",
        help="such as owner/name:Q4_K_M, or the address of a page or file on Hugging Face",
    )
    command.add_argument("--to", type=Path, metavar="DIR", help="target folder (default: the Hugging Face cache)")
    command.add_argument(
        "--restart", action="store_true", help="download files again if they have changed since their download began"
    )
    command.add_argument(
        "--reserve", type=_size, metavar="SIZE", help="leave this much of the disk free (default 1GiB)"
    )


def _add_library_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--folder",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="also list models in this folder; may be repeated",
    )
    command.add_argument("--fit", action="store_true", help="also forecast how each model fits on this computer")
    command.add_argument("--rig", type=Path, metavar="R", help="with --fit: forecast for the devices of this rig file")
    _add_text_only_argument(command)


def _add_export_arguments(command: argparse.ArgumentParser) -> None:
    _add_layout_arguments(command)
    command.add_argument("--to", choices=EXPORT_TARGETS, required=True, help="the other program")
    command.add_argument("--out", type=Path, metavar="OUT", help="write the text here instead of printing it")


def _add_import_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "file", type=Path, nargs="?", metavar="FILE", help='file with the command or entry; "-" for standard input'
    )
    command.add_argument("--text", metavar="TEXT", help="the command or entry itself")
    command.add_argument("--from", dest="source", choices=IMPORT_SOURCES, help="kind of the text (default: detected)")
    command.add_argument(
        "--name", metavar="NAME", help="name of the model in a llama-swap configuration with several models"
    )
    command.add_argument(
        "--model", type=Path, metavar="GGUF", help="file of the model (default: the file that the text names)"
    )
    command.add_argument("--rig", type=Path, metavar="R", help="rig file (default: this computer)")
    command.add_argument("--out", type=Path, metavar="L", help="write the layout file here instead of printing it")


def _add_rig_arguments(rig: argparse.ArgumentParser) -> None:
    from app.cli.settings_options import port_number

    # SUPPRESS below, or the default of a command would overwrite the value of `rig --json`.
    names = "lab|serve|pair|peers|kept"
    commands = rig.add_subparsers(dest="rig_command", required=True, metavar=names, parser_class=Parser)
    lab = commands.add_parser("lab", help="simulate devices: run RPC workers with a memory limit until interrupted")
    lab.add_argument(
        "--workers",
        type=_sizes,
        metavar="SIZE[,SIZE...]",
        help="memory limit of each worker, such as 512M,1G",
    )
    lab.add_argument(
        "--numa-nodes",
        action="store_true",
        help="instead of --workers: one worker bound to each NUMA node of this computer",
    )
    lab.add_argument("--out", type=Path, metavar="FILE", help="also write the rig file here")
    lab.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    serve = commands.add_parser("serve", help="lend devices to other computers: to paired ones, or as plain RPC")
    serve.add_argument(
        "--port",
        type=port_number,
        metavar="P",
        help="port to listen on (default 50052, with --secure); a port without --secure serves plain RPC to everybody",
    )
    serve.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="numeric address to listen on (default 127.0.0.1)"
    )
    serve.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="ID",
        help="device to lend; may be repeated (default: all; CPU for plain RPC)",
    )
    serve.add_argument(
        "--except",
        dest="without",
        action="append",
        default=[],
        metavar="ID",
        help="lend all devices but this one; may be repeated",
    )
    serve.add_argument(
        "--cap",
        type=_lent_size,
        action="append",
        default=[],
        metavar="[ID=]SIZE",
        help="lend at most this much of a device's memory; may be repeated",
    )
    serve.add_argument(
        "--margin",
        type=_lent_size,
        action="append",
        default=[],
        metavar="[ID=]SIZE",
        help="leave this much of a device's free memory for this computer; may be repeated",
    )
    serve.add_argument(
        "--keep",
        type=_quota,
        metavar="SIZE",
        help="cache this much of the weights that clients send (default 20GiB; 0 for none)",
    )
    serve.add_argument("--secure", action="store_true", help="serve paired computers only, through an encrypted tunnel")
    serve.add_argument("--pair", action="store_true", help="with --secure: show a pairing code")
    serve.add_argument(
        "--announce", action="store_true", help="with --secure: announce this worker in the local network"
    )
    serve.add_argument("--name", metavar="NAME", help="with --secure: name under which other computers list this one")
    serve.add_argument(
        "--install", action="store_true", help="write a systemd user unit that lends with these options, and exit"
    )
    serve.add_argument("--uninstall", action="store_true", help="remove the systemd user unit, and exit")
    serve.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    pair = commands.add_parser("pair", help="pair with a computer that shows a pairing code")
    pair.add_argument("endpoint", metavar="HOST:PORT")
    pair.add_argument("code", metavar="CODE", help="such as K7QM-3XHD-9RWP-T2FV")
    pair.add_argument("--name", metavar="NAME", help="name under which the other computer lists this one")
    pair.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    peers = commands.add_parser("peers", help="list the paired computers")
    peers.add_argument("--forget", metavar="NAME", help="delete the pairing with the computer NAME on this computer")
    peers.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    kept = commands.add_parser("kept", help="show the size of the weights that workers of this computer cache")
    kept.add_argument("--empty", action="store_true", help="delete the cached weights; clients then send them again")
    kept.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _add_packs_arguments(packs: argparse.ArgumentParser) -> None:
    commands = packs.add_subparsers(
        dest="packs_command", metavar="list|install|remove|check|on|off|trust|distrust", parser_class=Parser
    )
    texts = {
        "list": "list installed packs and the results of their checks (the default)",
        "install": "install a pack from a .tar.gz, and check it",
        "remove": "remove an installed pack",
        "check": "check packs anew: all, or one",
        "on": "use a pack again that was turned off",
        "off": "turn a pack off",
        "trust": "trust a publisher's key; without a key, print the trusted keys and that of this computer",
        "distrust": "stop trusting a key",
    }
    for name, text in texts.items():
        command = commands.add_parser(name, help=text, description=text)
        # SUPPRESS, or the default of this parser would overwrite the value of `packs --json`.
        command.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        if name == "install":
            command.add_argument("file", type=Path, metavar="FILE")
            command.add_argument(
                "--yes", action="store_true", help="install it without asking whether its publisher is trusted"
            )
        elif name in ("trust", "distrust"):
            command.add_argument("key", metavar="KEY", nargs="?" if name == "trust" else None)
            if name == "trust":
                command.add_argument("--name", default="", help="your name for the publisher")
        elif name != "list":
            command.add_argument("name", metavar="NAME", nargs="?" if name == "check" else None)


def _add_demo_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", type=Path, metavar="PATH")
    command.add_argument(
        "--generated",
        action="store_true",
        help="write the model with random weights, even if the trained one is installed",
    )


def _add_doctor_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--rpc", action="append", default=[], metavar="HOST:PORT", help="also examine this RPC worker; may be repeated"
    )
    _add_peer_argument(command)
    command.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON document here")
    command.add_argument("--engine", action="store_true", help="run the engine's self-test only")


_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "inspect": ("show architecture, layers and sizes of a model", _add_inspect_arguments),
    "devices": ("print the rig file of this computer", _add_devices_arguments),
    "plan": ("forecast the memory of each device", _add_plan_arguments),
    "plan-together": ("find layouts for several models that are loaded at once", _add_together_arguments),
    "load": ("load a layout and, with --prompt, generate", _add_load_arguments),
    "chat": ("chat with a model; conversations are saved", _add_chat_arguments),
    "bench": ("compare the speeds of layouts by measuring them alternately", _add_bench_arguments),
    "embed": ("load an embedding model and print a vector for each text", _add_embed_arguments),
    "serve": ("serve models to other programs by the OpenAI and Anthropic APIs", _add_serve_arguments),
    "search": ("search for models on Hugging Face", _add_search_arguments),
    "fit": ("forecast how a model on Hugging Face fits, before it is downloaded", _add_fit_arguments),
    "download": ("download a model; run it again to resume", _add_download_arguments),
    "library": ("list the models on this computer", _add_library_arguments),
    "export": ("print the command or file with which another program loads the same layout", _add_export_arguments),
    "import": ("make a layout file from a llama.cpp command, a llama-swap entry or a Modelfile", _add_import_arguments),
    "rig": ("run RPC workers", _add_rig_arguments),
    "packs": ("manage engine packs, which add a backend (Vulkan, CUDA) to the bundle", _add_packs_arguments),
    "demo": ("write a demo model", _add_demo_arguments),
    "doctor": ("examine this computer: devices, engine, forecasts, speeds", _add_doctor_arguments),
}
