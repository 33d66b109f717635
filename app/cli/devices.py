"""The `devices` command."""

from __future__ import annotations

from argparse import Namespace

from app.cli import exit_codes
from app.cli.machine import find_machine
from app.cli.output import print_text, say
from app.paths import speeds_path
from engine.devices.rig_file import encode_rig
from engine.fit.speed_book import read_speed_book, write_speed_book
from engine.rigs.speeds import measured_book, speed_lines


def run_devices(options: Namespace) -> int:
    """Print this machine's rig file (always JSON: it is meant to be kept)."""
    peers = options.tunnels.peers(options.peer)
    rig = find_machine(options.rpc, peers)
    if options.measure:
        book, problems = measured_book(rig, read_speed_book(speeds_path()))
        write_speed_book(speeds_path(), book)
        for line in (*speed_lines(rig, book), *problems):
            say(line)
    print_text(encode_rig(rig).decode())
    return exit_codes.OK
