"""`rig serve --install` and `--uninstall`: a systemd user unit that lends this computer's devices after each boot."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from app.cli import exit_codes
from app.cli.output import print_document, print_line
from app.cli.secure import check_host
from app.lending import find_lendings
from engine.base.errors import ArgumentError, EngineError
from engine.base.files import write_whole
from engine.base.texts import one_line

UNIT = "layerdeck-rig.service"
_COMMAND_S = 10.0
_PLAIN = re.compile(r"[A-Za-z0-9_./:=@-]+", re.ASCII)


def unit_path() -> Path:
    """Return the path of Layerdeck's unit in the user's folder of systemd units (systemd.unit(5))."""
    config = os.environ.get("XDG_CONFIG_HOME", "")
    # Relative paths are invalid by the XDG specification, and are ignored.
    folder = Path(config) if Path(config).is_absolute() else Path.home() / ".config"
    return folder / "systemd" / "user" / UNIT


def run_service(options: Namespace) -> int:
    """Write or remove the systemd user unit, print the commands that the user still has to run; return the exit code.

    Raises:
        ArgumentError: if an option is not valid for the unit, or this system has no systemd.
        EngineError: if the file cannot be written or removed.
    """
    if options.install and options.uninstall:
        raise ArgumentError("--install and --uninstall exclude each other; give one.")
    if not sys.platform.startswith("linux"):
        raise ArgumentError("--install writes a systemd unit, which needs Linux; start `rig serve` by hand.")
    return _uninstall(options) if options.uninstall else _install(options)


def _install(options: Namespace) -> int:
    if options.port is not None and not options.secure:
        raise ArgumentError("--install lends to paired computers only; add --secure to --port.")
    # Wrong options would show only in the log of the service.
    check_host(options.host)
    find_lendings(only=options.device, without=options.without, caps=options.cap, margins=options.margin)
    path = unit_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, unit_text(service_command(options)).encode())
    except OSError as error:
        raise EngineError(f"The unit {path} cannot be written ({error.strerror or error}); check the folder.") from None
    reloaded = _systemctl("daemon-reload")
    steps = [
        *([] if reloaded else ["systemctl --user daemon-reload"]),
        f"systemctl --user enable --now {UNIT}",
        # Without it user units end at log-out, and start at log-in.
        "loginctl enable-linger",
    ]
    if options.json:
        print_document({"unit": str(path), "next": steps})
    else:
        print_line(f"Written: {path}. To start it now and after each start of this computer, run:")
        for step in steps:
            print_line(f"  {step}")
        print_line(f"`journalctl --user -u {UNIT}` shows its pairing code. Remove it with `rig serve --uninstall`.")
    return exit_codes.OK


def _uninstall(options: Namespace) -> int:
    path = unit_path()
    is_there = path.exists()
    if is_there:
        _systemctl("disable", "--now", UNIT)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise EngineError(f"The unit {path} cannot be removed ({error.strerror or error}); check the folder.") from None
    if is_there:
        _systemctl("daemon-reload")
    if options.json:
        print_document({"unit": str(path), "removed": is_there})
    else:
        print_line(f"Removed: {path}." if is_there else f"There is no unit {path}.")
    return exit_codes.OK


def service_command(options: Namespace) -> list[str]:
    """Return the command line that runs this executable to lend devices with the same `options`."""
    # `layerdeck --cli` is the command line (`app/program.py`), in the bundle's one executable too.
    program = [sys.executable] if getattr(sys, "frozen", False) else [sys.executable, "-P", "-m", "app.program"]
    words = [*program, "--cli", "rig", "serve", "--secure"]
    # Option and value are one word, because a name may begin with "-".
    single = (("--host", options.host), ("--port", options.port), ("--name", options.name), ("--keep", options.keep))
    words += [f"{option}={value}" for option, value in single if value is not None]
    for option, names in (("--device", options.device), ("--except", options.without)):
        words += [f"{option}={name}" for name in names]
    for option, sizes in (("--cap", options.cap), ("--margin", options.margin)):
        words += [f"{option}={name}={size}" if name else f"{option}={size}" for name, size in sizes]
    flags = (("--pair", options.pair), ("--announce", options.announce))
    return [*words, *(flag for flag, is_given in flags if is_given)]


def unit_text(command: Sequence[str]) -> str:
    """Return the text of a unit file that runs `command`."""
    words = " ".join(map(_quoted, command))
    return f"""[Unit]
Description=Layerdeck lends the devices of this computer to paired ones
Wants=network-online.target
After=network-online.target

[Service]
ExecStart={words}
Restart=on-failure
RestartSec=10

[Install]
WantedBy=default.target
"""


def _quoted(word: str) -> str:
    """Return a word quoted for `ExecStart`, in which "%", "$" and the backslash are special (systemd.service(5))."""
    text = one_line(word).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return text if _PLAIN.fullmatch(text) else f'"{text}"'


def _systemctl(*words: str) -> bool:
    """Run systemctl for the user's units; return whether it succeeded."""
    try:
        done = subprocess.run(["systemctl", "--user", *words], capture_output=True, timeout=_COMMAND_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0
