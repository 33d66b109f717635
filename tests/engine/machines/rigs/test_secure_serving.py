"""A worker served through the tunnel: pairing, a load and an answer, which equals that over plain RPC."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from engine.base.cancellation import CancelToken
from engine.base.errors import EngineError
from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import Device, Rig, make_host, routes_of
from engine.devices.endpoint import GreetingStatus, greet, greet_all
from engine.devices.telemetry.sample import Sample
from engine.machines.rigs import secure_serving
from engine.machines.rigs.discovery import host_device
from engine.machines.rigs.lab import LabRig
from engine.machines.rigs.remote_machines import LendingMachine, RemoteMachines, with_offer
from engine.machines.rigs.secure_serving import Lending, _supervise, _Worker
from engine.machines.rigs.speeds import measure_speeds
from engine.machines.tunnel import refusals
from engine.machines.tunnel.calling import pair_with
from engine.machines.tunnel.door import Key
from engine.machines.tunnel.offers import TunnelError
from engine.machines.tunnel.streams import BrokenTalkError
from engine.machines.tunnel.tunnels import Tunnels
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import Layout, Run
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.probing.probe import probe
from engine.runtime.process.outcome import EndReason, ProcessOutcome
from engine.runtime.protocol.messages import Serving
from engine.runtime.protocol.requests import Generate, SaveSequence
from engine.runtime.session.events import Done, Failed, Loaded, Token
from tests.support.faulty_relay import Fault, Relay
from tests.support.lending import CAP_BYTES, Served, reached
from tests.support.load_specs import plan_of, spec_of
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from tests.support.session_log import SessionLog
from tests.support.tunnels import Home, Session

N_LAYERS = 4
CONTEXT = ContextSettings(n_ctx=2048, n_batch=64, n_ubatch=64, threads=1, threads_batch=1)
LAYOUT = Layout(N_LAYERS, (Run("CPU", 0, 1), Run("attic-CPU", 2, N_LAYERS - 1)), "attic-CPU")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("attic")) as served:
        yield served


@pytest.fixture(scope="module")
def rig(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with reached(served, tmp_path_factory.mktemp("laptop")) as rig:
        yield rig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return read_model(write_tiny_llama(path, n_layers=N_LAYERS, n_ctx_train=1 << 16))


def answer_on(model: ModelFile, rig: Rig, layout: Layout = LAYOUT) -> str:
    with SessionLog() as log:
        log.session.load(spec_of(model, rig, layout, CONTEXT))
        (loaded,) = log.wait_for_endings(1)
        assert isinstance(loaded, Loaded), loaded
        log.session.ask(Generate(prompt="tell me", max_tokens=24, temperature=0.0, seed=1))
        assert isinstance(log.wait_for_endings(2)[1], Done)
        # How the text is divided into events depends on the time that tokens take.
        return "".join(event.text for event in log.events if isinstance(event, Token))


def test_the_answer_through_the_tunnel_is_that_of_plain_rpc(rig: Rig, model: ModelFile) -> None:
    secure = answer_on(model, rig)
    assert secure
    with LabRig([CAP_BYTES]) as lab:
        layout = Layout(N_LAYERS, (Run("CPU", 0, 1), Run("RPC0", 2, N_LAYERS - 1)), "RPC0")
        assert answer_on(model, lab.rig, layout) == secure


def test_the_engines_own_plan_comes_through_the_tunnel(rig: Rig, model: ModelFile) -> None:
    assert probe(plan_of(model, rig, LAYOUT, CONTEXT)).probed is not None


@pytest.mark.exhaustive
def test_a_round_trip_is_measured_through_the_tunnel(rig: Rig) -> None:
    measured = measure_speeds(rig)
    assert measured.problems == ()
    assert measured.speeds["attic-CPU"].round_trip_s > 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux lets a socket refuse by port")
def test_nobody_else_of_this_machine_reaches_the_worker_itself(served: Served, rig: Rig) -> None:
    assert served.serving.is_guarded
    worker_ports = [
        connection.laddr.port
        for child in psutil.Process().children()
        for connection in child.net_connections("tcp4")
        if connection.status == psutil.CONN_LISTEN and f"127.0.0.1:{connection.laddr.port}" != rig.devices[0].via
    ]
    (port,) = worker_ports
    endpoint = f"{served.endpoint}/CPU"
    assert greet("127.0.0.1", port, 0.3).status is GreetingStatus.TIMED_OUT
    assert greet_all([endpoint], DEADLINE_S, routes=routes_of(rig.devices))[endpoint].ok


def test_a_machine_without_a_tunnel_is_never_asked_in_the_clear(served: Served, rig: Rig, model: ModelFile) -> None:
    bare = Rig((replace(rig.devices[0], via=None),), rig.host)
    with SessionLog() as log:
        log.session.load(spec_of(model, bare, LAYOUT, CONTEXT))
        (ending,) = log.wait_for_endings(1)
    assert isinstance(ending, Failed)
    assert "not paired with this computer" in ending.message


def test_a_worker_that_a_borrower_has_ended_is_lent_again_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(secure_serving, "MAX_QUICK_ENDS", 2)
    monkeypatch.setattr(secure_serving, "RESTART_AFTER_S", 10 * DEADLINE_S)
    # A kill that meets the session of a greeting would count against the borrower, not as a quick end.
    monkeypatch.setattr(secure_serving, "_blame", lambda *_: False)
    before = set(psutil.Process().children())
    with Served(tmp_path / "attic") as served, reached(served, tmp_path / "laptop") as rig:
        endpoint = f"{served.endpoint}/CPU"
        for _ in range(2):
            worker = worker_beside(before)
            worker.kill()
            before.add(worker)
            replacement = worker_beside(before)
            assert replacement != worker
            greeting = greet_all([endpoint], DEADLINE_S, routes=routes_of(rig.devices))[endpoint]
            while not greeting.ok:
                assert "does not run" in greeting.sentence
                greeting = greet_all([endpoint], DEADLINE_S, routes=routes_of(rig.devices))[endpoint]
        replacement.kill()
        served.wait_for_end()
        assert "was ended by SIGKILL" in served.problem
    assert [record.message.partition(":")[0] for record in caplog.records] == ["the worker of CPU is started again"] * 2


def test_a_borrower_that_ends_the_worker_again_and_again_is_refused_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(secure_serving, "MAX_QUICK_ENDS", 0)
    monkeypatch.setattr(refusals, "MAX_ENDS", 2)
    before = set(psutil.Process().children())
    with Served(tmp_path / "attic") as served, reached(served, tmp_path / "laptop") as rig:
        endpoint, laptop = f"{served.endpoint}/CPU", Home(tmp_path / "laptop")
        for _ in range(2):
            worker = worker_beside(before)
            session = opened(served, laptop)
            worker.kill()
            with pytest.raises((BrokenTalkError, OSError)):
                session.receive(1)
            session.close()
            before.add(worker)
        greeting = greet_all([endpoint], DEADLINE_S, routes=routes_of(rig.devices))[endpoint]
        while not greeting.sentence.endswith("give that device no layers."):
            assert "does not run" in greeting.sentence
            greeting = greet_all([endpoint], DEADLINE_S, routes=routes_of(rig.devices))[endpoint]
        assert "refuses this computer for 5 min" in greeting.sentence
        garden = Home(tmp_path / "garden")
        pair_with(served.endpoint, served.code.renew(), garden.identity, "garden", DEADLINE_S)
        # The worker may still be starting again.
        opened(served, garden).close()
    assert served.problem == ""
    words = [record.getMessage() for record in caplog.records]
    assert [each for each in words if "refused" in each] == [
        "laptop is refused for 5 min: its models ended workers 5 times, last on CPU."
    ]


def opened(served: Served, home: Home) -> Session:
    """Return a session of a paired machine with the lent CPU, when its worker is free."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            return Session(served.endpoint, served.home.identity.certificate, home.identity, device="CPU")
        except TunnelError:
            assert time.monotonic() < deadline_s


def worker_beside(known: set[psutil.Process]) -> psutil.Process:
    """Wait for an RPC worker among our children that is not in `known`, and return it."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if child not in known and "lent-CPU" in child.cmdline():
                    return child
    raise AssertionError("there is no worker")


def test_a_link_that_breaks_for_a_moment_keeps_the_answer_so_far(
    served: Served, tmp_path: Path, model: ModelFile
) -> None:
    with (
        Relay(served.serving.port) as relay,
        reached(served, tmp_path / "laptop", relay.endpoint) as rig,
        SessionLog() as log,
    ):
        log.session.load(spec_of(model, rig, LAYOUT, CONTEXT))
        assert isinstance(log.wait_for_endings(1)[0], Loaded)
        log.session.ask(Generate(prompt="tell me", max_tokens=1900, temperature=0.0))
        log.wait_for_event(Token)
        relay.arm(Fault.DROP)
        lost = log.wait_for_endings(2)[1]
        assert isinstance(lost, Failed), lost
        words = (
            f"The connection to attic-CPU ({relay.endpoint}/CPU) was lost during the answer. "
            f"{relay.endpoint}/CPU answers. Load the model again."
        )
        assert (lost.kind, lost.message) == ("unreachable", words)
        assert "".join(event.text for event in log.events if isinstance(event, Token))
        log.session.load(spec_of(model, rig, LAYOUT, CONTEXT))
        assert isinstance(log.wait_for_endings(3)[2], Loaded)


def test_a_machine_that_goes_in_the_middle_of_an_answer_is_named(tmp_path: Path, model: ModelFile) -> None:
    with Served(tmp_path / "attic") as served, reached(served, tmp_path / "laptop") as rig, SessionLog() as log:
        log.session.load(spec_of(model, rig, LAYOUT, CONTEXT))
        assert isinstance(log.wait_for_endings(1)[0], Loaded)
        log.session.ask(Generate(prompt="tell me", max_tokens=1900, temperature=0.0))
        log.wait_for_event(Token)
        served.stop()
        lost = log.wait_for_endings(2)[1]
        assert isinstance(lost, Failed), lost
        assert lost.kind == "unreachable"
        words = f"The connection to attic-CPU ({served.endpoint}/CPU) was lost during the answer."
        assert lost.message.startswith(words)
        assert str(rig.devices[0].via) not in lost.message
        log.session.load(spec_of(model, rig, LAYOUT, CONTEXT))
        refused = log.wait_for_endings(3)[2]
        assert isinstance(refused, Failed)
        words = "nothing is lent there; start Devices > Lend This Computer or `rig serve` there."
        assert refused.message == f"attic-CPU: {served.endpoint}/CPU refused the connection: {words}"


@pytest.mark.parametrize("after_bytes", [200, 20_000])
def test_a_machine_that_vanishes_in_the_middle_of_a_load_is_named(
    served: Served, tmp_path: Path, model: ModelFile, after_bytes: int
) -> None:
    with (
        Relay(served.serving.port) as relay,
        reached(served, tmp_path / "laptop", relay.endpoint) as rig,
        SessionLog() as log,
    ):
        relay.arm(Fault.GONE, after_bytes)
        log.session.load(spec_of(model, rig, LAYOUT, CONTEXT))
        lost = log.wait_for_endings(1)[0]
        assert isinstance(lost, Failed), lost
        assert lost.kind == "unreachable"
        assert "attic-CPU" in lost.message
        assert relay.endpoint in lost.message
        relay.heal()
        log.session.load(spec_of(model, rig, LAYOUT, CONTEXT))
        assert isinstance(log.wait_for_endings(2)[1], Loaded)


def test_a_machine_that_vanishes_in_the_middle_of_a_save_leaves_no_part_of_it(
    served: Served, tmp_path: Path, model: ModelFile
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    with (
        Relay(served.serving.port) as relay,
        reached(served, tmp_path / "laptop", relay.endpoint) as rig,
        SessionLog(sequences=kept) as log,
    ):
        log.session.load(spec_of(model, rig, LAYOUT, CONTEXT))
        assert isinstance(log.wait_for_endings(1)[0], Loaded)
        number = log.session.ask(Generate(prompt="tell me", max_tokens=8, temperature=0.0))
        assert isinstance(log.wait_for_endings(2)[1], Done)
        relay.arm(Fault.GONE, 10)
        log.session.ask(SaveSequence(path=str(kept / "state"), of=number))
        lost = log.wait_for_endings(3)[2]
        assert isinstance(lost, Failed), lost
        assert lost.message.startswith(f"The connection to attic-CPU ({relay.endpoint}/CPU) was lost")
    assert list(kept.iterdir()) == []


def test_a_machine_that_comes_back_with_less_memory_and_without_a_device_is_asked_again(tmp_path: Path) -> None:
    with Relay(1) as relay:
        with Served(tmp_path / "attic", (Lending(host_device(), CAP_BYTES),)) as served:
            relay.target_port = served.serving.port
            with reached(served, tmp_path / "laptop", relay.endpoint) as rig:
                (before,) = rig.devices
        laptop = Home(tmp_path / "laptop")
        with (
            Served(tmp_path / "attic", (Lending(host_device(), CAP_BYTES // 4),)) as again,
            Tunnels(laptop.folder / "identity.pem", laptop.book) as tunnels,
        ):
            relay.target_port = again.serving.port
            machines = RemoteMachines(laptop.folder / "identity.pem", laptop.book, tunnels, tmp_path / "checks.json")
            offer = machines.ask(LendingMachine(relay.endpoint, before.fingerprint or "", "attic"), DEADLINE_S)
            now = {each.name: each for each in offer.devices}
            assert with_offer(before, now.get("CPU")).total_bytes == CAP_BYTES // 4 < before.total_bytes
            assert with_offer(replace(before, id="attic-CUDA0"), now.get("CUDA0")).away == "not lent now"


def test_a_worker_that_ended_for_good_is_not_offered() -> None:
    until = CancelToken()
    told: list[str] = []

    class Ended(_Worker):
        def look(self) -> EngineError | None:
            return EngineError("It ended.")

    class Running(_Worker):
        def look(self) -> EngineError | None:
            until.cancel()
            return None

    host = Lending(make_host("host", 8 << 30))
    card = Lending(Device("CUDA0", "card", "CUDA", "gpu", 8 << 30, 8 << 30))
    with Key() as key:
        ended, running = Ended(card, key, None, ""), Running(host, key, None, "")
        _supervise([ended, running], until, told.append)
    assert told == ["CUDA0 is no longer lent. It ended."]
    assert ended.describe() is None
    assert running.describe() is not None


def test_the_offer_of_a_card_has_the_memory_that_is_free_now(monkeypatch: pytest.MonkeyPatch) -> None:
    used_bytes: list[int | None] = [GIB]

    class Readings:
        def __init__(self, devices: Sequence[Device]) -> None:
            (self._device,) = devices

        def read(self) -> tuple[Sample, ...]:
            return (Sample(self._device.id, 0.0, used_bytes=used_bytes[-1], total_bytes=8 * GIB),)

        def close(self) -> None:
            pass

    monkeypatch.setattr(secure_serving, "DeviceReadings", Readings)
    # A search found 8 GiB free; then another program took some.
    card = Lending(Device("CUDA0", "card", "CUDA", "gpu", 8 * GIB, 8 * GIB), margin_bytes=GIB)
    with Key() as key:
        worker = _Worker(card, key, None, "")
        for used, free in ((GIB, 7 * GIB), (6 * GIB, 2 * GIB), (None, None)):
            used_bytes.append(used)
            offered = worker.describe()
            assert offered is not None
            assert (offered.free_bytes, offered.margin_bytes) == (free, GIB)


def test_neither_a_stop_nor_other_workers_wait_for_one_that_starts_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that was started again has a port when it says so, and no device until then."""
    made: list[Child] = []

    class Child:
        serving: Serving | None = None
        outcome: ProcessOutcome | None = None

        def __init__(self, *_: object, **__: object) -> None:
            made.append(self)

        def start(self) -> None:
            pass

        def wait_for_end(self, _timeout_s: float) -> ProcessOutcome | None:
            return self.outcome

        def wait_until_serving(self, deadline_s: float) -> Serving:
            assert deadline_s <= time.monotonic(), "it waits"
            raise EngineError("It has no memory.")

    monkeypatch.setattr(secure_serving, "ServingChild", Child)
    with Key() as key:
        worker = _Worker(Lending(make_host("host", 8 << 30)), key, None, "")
        worker.start()
        made[0].serving = Serving(port=5000, caps_enforced=True, baseline_bytes=0)
        assert worker.look() is None
        made[0].outcome = ProcessOutcome(EndReason.ITSELF, exit_code=1)
        assert worker.look() is None
        assert len(made) == 2
        with pytest.raises(ConnectionRefusedError):
            worker.reach()
        assert worker.look() is None
        made[1].serving = Serving(port=5001, caps_enforced=True, baseline_bytes=0)
        assert worker.look() is None
        assert worker.serving is made[1].serving
        made[1].outcome = ProcessOutcome(EndReason.ITSELF, exit_code=1)
        assert worker.look() is None
        made[2].outcome = ProcessOutcome(EndReason.ITSELF, exit_code=1)
        error = worker.look()
        assert error is not None
        assert error.summary() == "It has no memory."
    assert len(caplog.records) == 2
