"""Random faults of a lending machine and of the link to it: every load and request must end, with a clear sentence.

    python -m benchmarks.machine_faults OUT.jsonl [--number 1000] [--first 1] [--summary]

Each round loads a small model across the CPU and a device that is lent through the real tunnel, asks for an answer, and
saves the KV state. At a random moment a fault occurs: in a relay between both ends of the tunnel, or by a signal to a
process. OUT.jsonl gets a line with the findings of each round; a second call with the same file runs the missing
rounds. A table of all rounds by fault is printed.

Goals: each step ends, the message of each failure names the machine, and the device is usable again within 30 s.
Otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from msgspec import Struct, field

from engine.base.errors import EngineError
from engine.base.units import MIB
from engine.devices.device import Rig
from engine.machines.rigs.discovery import host_device
from engine.machines.rigs.remote_machines import LendingMachine, RemoteMachines
from engine.machines.rigs.secure_serving import Lending
from engine.machines.tunnel.calling import pair_with
from engine.machines.tunnel.pairings import Pairing
from engine.machines.tunnel.tunnels import Tunnels
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import Layout, Run
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.requests import Generate, SaveSequence
from engine.runtime.session.events import Answered, AnyEvent, Done, Loaded, Token
from engine.runtime.session.status import Phase
from tests.support.faulty_relay import Fault, Relay
from tests.support.lending import Served
from tests.support.load_specs import spec_of
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from tests.support.session_log import SessionLog
from tests.support.tunnels import Home

N_LAYERS = 6
CAP_BYTES = 64 * MIB
SMALL_CAP_BYTES = MIB
STALL_S = 5.0
"""Stall limit of the sessions in seconds, far below the default, so that a silent link does not make rounds long."""
LIMIT_S = 90.0
"""Seconds after which a step counts as never ending. The longest regular step is a stall with the greeting after it."""
USABLE_S = 30.0
TOKENS = 20
CONTEXT = ContextSettings(n_ctx=512, n_batch=64, n_ubatch=64, threads=1, threads_batch=1, load_mode="none")
DEVICE = "attic-CPU"
LAYOUT = Layout(N_LAYERS, (Run("CPU", 0, 2), Run(DEVICE, 3, N_LAYERS - 1)), DEVICE)
PHASES = ("load", "load", "answer", "answer", "save", "idle")
KILLED_WORKER, FROZEN_WORKER, STOPPED, KILLED_TUNNEL = (
    "worker killed",
    "worker frozen",
    "lending stopped",
    "tunnel killed",
)
PROCESS_FAULTS = (KILLED_WORKER, FROZEN_WORKER, STOPPED, KILLED_TUNNEL)
QUICK = tuple(each.value for each in Fault if each not in (Fault.SILENT, Fault.SLOW))
"""Faults of the relay after which a round need not wait for a limit. They are chosen more often."""
RETURNS = ("as before", "as before", "with less memory", "with another certificate")
LOAD_BYTES, ANSWER_BYTES, SAVE_BYTES = 2_400_000, 180_000, 150_000
"""Approximate bytes that pass the relay in each phase.

A fault comes after up to 1.1 times as many bytes; the last ones then occur after the phase.
"""
_log = logging.getLogger("layerdeck.benchmark")


class World(Struct, dict=True):
    """The borrowing machine (`laptop`), the lending one (`attic`), and the relay between them.

    `attic`: None while nothing is lent. A new object after each return of the machine.
    `worker`: the process that serves the lent device.
    `number`: how often the lending machine was set up anew.
    """

    folder: Path
    relay: Relay
    laptop: Home
    attic: Served | None = None
    pairing: Pairing | None = None
    tunnels: Tunnels | None = None
    worker: psutil.Process | None = None
    stack: ExitStack = field(default_factory=ExitStack)
    number: int = 0

    def begin(self, cap_bytes: int = CAP_BYTES, *, is_new: bool = False) -> None:
        """Start lending the CPU of the attic. `is_new`: the machine is set up anew, with another certificate."""
        self.number += is_new
        before = set(psutil.Process().children())
        attic = Served(self.folder / f"attic-{self.number}", (Lending(host_device(), cap_bytes),))
        attic.__enter__()
        self.attic = attic
        self.relay.target_port = attic.serving.port
        (self.worker,) = set(psutil.Process().children()) - before

    def pair(self) -> None:
        """Pair both machines, and open new tunnels."""
        assert self.attic is not None
        if self.tunnels is not None:
            self.tunnels.close()
        code = self.attic.code.renew()
        self.pairing = pair_with(self.relay.endpoint, code, self.laptop.identity, "laptop", DEADLINE_S)
        self.laptop.book.add(self.pairing)
        self.tunnels = Tunnels(self.laptop.folder / "identity.pem", self.laptop.book)

    def end(self) -> None:
        """Stop lending."""
        if self.worker is not None:
            with suppress(psutil.Error):
                self.worker.resume()
        if self.attic is not None:
            self.attic.stop()
        self.attic = None

    def find(self) -> Rig:
        """Return the rig of this machine with the lent device.

        Raises:
            EngineError: the lending machine cannot be reached, or refuses.
        """
        assert self.pairing is not None
        assert self.tunnels is not None
        machines = RemoteMachines(
            self.laptop.folder / "identity.pem", self.laptop.book, self.tunnels, self.folder / "checks.json"
        )
        found = machines.find(LendingMachine(self.pairing.endpoint, self.pairing.fingerprint, self.pairing.name))
        return Rig(found, host_device())

    def wait_until_usable(self) -> Rig | str:
        """Return the rig once the lent device answers and is free, or the last error message after `USABLE_S`."""
        deadline_s = time.monotonic() + USABLE_S
        while True:
            try:
                rig = self.find()
                if not any(device.away for device in rig.devices):
                    return rig
                problem = rig.devices[0].away
            except EngineError as error:
                problem = error.summary()
            if time.monotonic() > deadline_s:
                return problem
            time.sleep(0.2)

    def tunnel_child(self) -> psutil.Process | None:
        """Return the child process of the tunnel; None if none runs."""
        for each in psutil.Process().children():
            with suppress(psutil.Error):
                if any("machines.tunnel" in word for word in each.cmdline()):
                    return each
        return None

    def close(self) -> None:
        """End the tunnels and stop lending."""
        self.end()
        if self.tunnels is not None:
            self.tunnels.close()


@contextmanager
def world(folder: Path) -> Iterator[World]:
    """Yield two paired machines."""
    with Relay(1) as relay:
        made = World(folder, relay, Home(folder / "laptop"))
        try:
            made.begin()
            made.pair()
            yield made
        finally:
            made.close()


def strike(made: World, fault: str, after_bytes: int) -> Callable[[], None]:
    """Cause a fault once `after_bytes` more bytes have passed the relay; return a function that ends the fault.

    Faults of the relay occur later by themselves. For a signal or a stop of the lending this function waits for the
    bytes, at most 1.5 s.
    """
    if fault in tuple(Fault):
        made.relay.arm(Fault(fault), after_bytes)
        return made.relay.heal
    # Signals come when so many bytes have passed; the relay changes nothing.
    begun_bytes, begun_s = made.relay.passed_bytes, time.monotonic()

    def wait() -> None:
        while made.relay.passed_bytes - begun_bytes < after_bytes and time.monotonic() - begun_s < 1.5:
            time.sleep(0.002)

    wait()
    with suppress(psutil.Error, AttributeError):
        match fault:
            case "worker killed":
                made.worker.send_signal(signal.SIGKILL)  # type: ignore[union-attr]
            case "worker frozen":
                made.worker.send_signal(signal.SIGSTOP)  # type: ignore[union-attr]
            case "tunnel killed":
                made.tunnel_child().send_signal(signal.SIGKILL)  # type: ignore[union-attr]
            case _:
                made.end()
    return lambda: None


def step(log: SessionLog, count: int, begun_s: float) -> tuple[AnyEvent | None, float]:
    """Wait until the session has had `count` endings; return the last of them and its seconds since `begun_s`.

    The ending is None after `LIMIT_S`.
    """
    while time.monotonic() - begun_s < LIMIT_S:
        endings = log.endings
        if len(endings) >= count:
            return endings[count - 1], time.monotonic() - begun_s
        time.sleep(0.02)
    return None, time.monotonic() - begun_s


def play(made: World, model: ModelFile, rig: Rig, seed: int) -> tuple[dict[str, Any], Rig | str]:
    """Run one round; return its findings, and the rig for the next round.

    If the device did not become usable again, an error message takes the place of the rig.
    """
    chance = random.Random(f"machine {seed}")
    phase = chance.choice(PHASES)
    fault = chance.choice([*QUICK, *QUICK, *QUICK, Fault.SILENT.value, Fault.SLOW.value, *PROCESS_FAULTS])
    most = {"load": LOAD_BYTES, "answer": ANSWER_BYTES, "save": SAVE_BYTES, "idle": 0}[phase]
    # Half of the faults of a load come early, at the handshake and the greeting.
    if phase == "load" and chance.random() < 0.5:
        most //= 200
    after_bytes = chance.randint(0, round(most * 1.1))
    record: dict[str, Any] = {"seed": seed, "phase": phase, "fault": fault, "after_bytes": after_bytes, "steps": []}
    undo: Callable[[], None] = lambda: None  # noqa: E731
    with tempfile.TemporaryDirectory() as folder, SessionLog(stall_limit_s=STALL_S, sequences=Path(folder)) as log:
        path = Path(folder) / "kept"

        def begin(name: str, act: Callable[[], object]) -> AnyEvent | None:
            nonlocal undo
            number, begun_s = len(log.endings) + 1, time.monotonic()
            if name == phase and fault in tuple(Fault):
                undo = strike(made, fault, after_bytes)
            # A model that was lost while it was idle takes no request, and has told its end already.
            with suppress(EngineError):
                act()
            if name == phase and fault not in tuple(Fault):
                undo = strike(made, fault, after_bytes)
            ending, seconds = step(log, number, begun_s)
            record["steps"].append(
                {
                    "name": name,
                    "ending": "" if ending is None else type(ending).__name__,
                    "kind": getattr(ending, "kind", ""),
                    "message": getattr(ending, "message", ""),
                    "seconds": round(seconds, 2),
                }
            )
            return ending

        def ask() -> int:
            return log.session.ask(Generate(prompt="tell me of it", max_tokens=TOKENS, temperature=0.0, seed=seed))

        ending = begin("load", lambda: log.session.load(spec_of(model, rig, LAYOUT, CONTEXT)))
        number = 0
        if isinstance(ending, Loaded):
            if phase == "idle":
                undo = strike(made, fault, after_bytes)
                time.sleep(chance.uniform(0.0, 0.3))

            def first() -> None:
                nonlocal number
                number = ask()

            ending = begin("answer", first)
            record["text"] = sum(len(event.text) for event in log.events if isinstance(event, Token))
        if isinstance(ending, Done):
            ending = begin("save", lambda: log.session.ask(SaveSequence(path=str(path), of=number)))
            record["saved"] = path.stat().st_size if path.exists() else None
            record["leftovers"] = [each.name for each in Path(folder).iterdir() if each != path]
            if isinstance(ending, Answered):
                # The state of the slot counts again for the next answer.
                begin("again", ask)
        record["is_open"] = log.session.snapshot.phase not in (Phase.STOPPED, Phase.FAILED)
        undo()
    found, usable = come_back(made, fault, chance)
    return record | found, usable


def come_back(made: World, fault: str, chance: random.Random) -> tuple[dict[str, Any], Rig | str]:
    """Bring the lending machine back after `fault`, in a random way.

    Return findings, and what `wait_until_usable` returned.
    """
    found: dict[str, Any] = {}
    if made.attic is not None and fault == FROZEN_WORKER and made.worker is not None:
        with suppress(psutil.Error):
            made.worker.resume()
    if fault in (KILLED_WORKER, STOPPED):
        made.end()
        way = chance.choice(RETURNS)
        found["back"] = way
        match way:
            case "with less memory":
                made.begin(SMALL_CAP_BYTES)
                known = made.wait_until_usable()
                found["less"] = known if isinstance(known, str) else known.devices[0].total_bytes
                made.end()
                made.begin()
            case "with another certificate":
                made.begin(is_new=True)
                try:
                    made.find()
                    found["unseen"] = True
                except EngineError as error:
                    found["changed"] = error.summary()
                made.pair()
            case _:
                made.begin()
    if fault == KILLED_TUNNEL:
        made.pair()
    begun_s = time.monotonic()
    usable = made.wait_until_usable()
    found["usable_s"] = round(time.monotonic() - begun_s, 2)
    if isinstance(usable, str):
        found["unusable"] = usable
    return found, usable


def faults_of(record: dict[str, Any]) -> list[str]:
    """Return a sentence for each missed goal of a round."""
    found = [f"no ending of {each['name']}" for each in record["steps"] if not each["ending"]]
    found += [
        f"unnamed: {each['message'] or each['ending']}"
        for each in record["steps"]
        if each["ending"] not in ("", "Loaded", "Done", "Answered", "Cancelled") and "attic" not in each["message"]
    ]
    found += [f"unusable: {record['unusable']}"] if "unusable" in record else []
    found += ["another certificate was accepted"] if "unseen" in record else []
    found += [f"leftovers: {record['leftovers']}"] if record.get("leftovers") else []
    found += [f"less memory: {record['less']}"] if record.get("less", SMALL_CAP_BYTES) != SMALL_CAP_BYTES else []
    return found


def summary(records: Sequence[dict[str, Any]]) -> str:
    """Return a table of the rounds by fault, with the most frequent findings."""
    lines = [f"{'fault':16} rounds  struck  told  without ending  unnamed  longest s"]
    for fault in sorted({record["fault"] for record in records}):
        rounds = [record for record in records if record["fault"] == fault]
        steps = [each for record in rounds for each in record["steps"]]
        bad = [each for each in steps if each["ending"] not in ("", "Loaded", "Done", "Answered")]
        unnamed = sum("attic" not in each["message"] for each in bad)
        endless = sum(not each["ending"] for each in steps)
        struck = sum(any(e["ending"] not in ("Loaded", "Done", "Answered") for e in r["steps"]) for r in rounds)
        longest = max(each["seconds"] for each in steps)
        lines.append(f"{fault:16} {len(rounds):6} {struck:7} {len(bad):5} {endless:15} {unnamed:8} {longest:10}")
    told = Counter(faulty for record in records for faulty in faults_of(record))
    lines += [f"{count:4}  {words}" for words, count in told.most_common(30)]
    lines.append(f"{len(records)} rounds, {sum(bool(faults_of(record)) for record in records)} with findings")
    return "\n".join(lines)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the findings of all rounds in the file; none if it does not exist."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing rounds, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.machine_faults")
    parser.add_argument("out", type=Path, help="records are appended as lines of JSON")
    parser.add_argument("--number", type=int, default=1000)
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--summary", action="store_true", help="play nothing")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    done = {record["seed"] for record in read_records(options.out)}
    seeds = [seed for seed in range(options.first, options.first + options.number) if seed not in done]
    if seeds and not options.summary:
        with tempfile.TemporaryDirectory() as name, world(Path(name)) as made:
            path = Path(name) / "model.gguf"
            model = read_model(write_tiny_llama(path, n_layers=N_LAYERS, n_embd=128, n_head=4, n_ff=384, n_vocab=1024))
            rig = made.wait_until_usable()
            for seed in seeds:
                if isinstance(rig, str):
                    made.end()
                    made.begin()
                    made.pair()
                    rig = made.find()
                record, rig = play(made, model, rig, seed)
                with options.out.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(record) + "\n")
                    out.flush()
                    os.fsync(out.fileno())
    records = read_records(options.out)
    print(summary(records))
    return 1 if any(faults_of(record) for record in records) else 0


if __name__ == "__main__":
    raise SystemExit(main())
