"""`--when-used`: waiting for a lent device that another user has in use, or leaving it out."""

from __future__ import annotations

import msgspec
import pytest

from app.cli.arguments import make_parser
from app.cli.used_devices import settle
from engine.base.units import GIB
from engine.devices.device import Device, Rig, make_host
from engine.machines.rigs.remote_machines import LendingMachine
from engine.machines.tunnel.offers import Offer, OfferedDevice

LENT = tuple(
    Device(f"attic-{name}", "attic", "RPC", "gpu", GIB, GIB, endpoint=f"192.0.2.7:50052/{name}", fingerprint="ab" * 32)
    for name in ("CUDA0", "CPU")
)
LOCAL = Device("CUDA0", "card", "CUDA", "gpu", GIB, GIB)
RIG = Rig((LOCAL, *LENT), make_host("host", GIB))


def offer(**users: str) -> Offer:
    plain = [OfferedDevice(name=name, kind="gpu", total_bytes=GIB) for name in ("CUDA0", "CPU")]
    return Offer("attic", tuple(msgspec.structs.replace(each, user=users.get(each.name, "")) for each in plain))


def test_who_uses_a_device_is_told_once_and_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [offer(CUDA0="Ann"), offer(CUDA0="Ann"), offer(CUDA0="Bob"), offer()]
    pauses: list[float] = []

    def ask(machine: LendingMachine) -> Offer:
        assert machine.endpoint == "192.0.2.7:50052"
        return answers.pop(0)

    assert settle(RIG, "wait", ask, pauses.append) == RIG
    assert len(pauses) == 3
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1].split(";")[0] for line in lines] == [
        "attic-CUDA0 is used by Ann",
        "attic-CUDA0 is used by Bob",
    ]


def test_what_is_left_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    left = settle(RIG, "skip", lambda _machine: offer(CUDA0="Ann"))
    assert left.ids == ("CUDA0", "attic-CPU", "CPU")
    assert "attic-CUDA0 is used by Ann; it is left out." in capsys.readouterr().err


def test_our_own_use_is_nobody_elses() -> None:
    mine = Offer("attic", (OfferedDevice(name="CPU", kind="cpu", total_bytes=GIB, user="me", is_yours=True),))
    assert settle(RIG, "wait", lambda _machine: mine) == RIG


@pytest.mark.parametrize("command", ["load", "chat", "embed"])
def test_the_choice_is_an_option(command: str) -> None:
    words = [command, "m.gguf", *(["text"] if command == "embed" else []), "--when-used", "wait"]
    assert make_parser(words).parse_args(words).when_used == "wait"
