"""The stored speeds of devices, and predictions made with them."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import msgspec
import pytest

from engine.base.errors import DocumentError
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, MeasuredChoice, RemoteFacts, Rig
from engine.model.gguf.reader import read_model
from engine.planning.fit.speed_book import (
    EMPTY_BOOK,
    MAX_FILE_BYTES,
    SpeedBook,
    StoredDevice,
    change_speed_book,
    read_speed_book,
    speed_key,
    write_speed_book,
)
from engine.planning.fit.strategies.catalogue import auto_layout
from engine.planning.fit.strategies.constraints import Constraints
from engine.planning.fit.strategies.fastest import predict_layout
from engine.planning.layout.layout import Layout, Override, make_layout, single_device
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.preview import plan_speed
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.answers import MAX_TIMINGS, TokenTiming
from engine.planning.speed.prediction import DeviceTime, SpeedForecast
from engine.planning.speed.speeds import NO_MEASUREMENTS, Link, Speeds, layout_class
from engine.planning.speed.work import TokenWork
from tests.support.models import write_header_only
from tests.support.patience import DEADLINE_S
from tests.support.previews import make_gpu, make_rig

FAST = StoredDevice(9e11, 1e-4, 1e9)
SLOW = StoredDevice(3e10, 2e-3, 1e8)
RIG = make_rig(make_gpu("CUDA0", 24), make_gpu("CUDA1", 24, name="unheard of"))
CONTEXT = ContextSettings(n_ctx=4096)


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> ModelMemory:
    path = tmp_path_factory.mktemp("models") / "eight.gguf"
    return ModelMemory(read_model(write_header_only(path, n_layers=32, n_embd=4096, n_head=32, n_ff=14336)))


def test_changes_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    """A window learns from answers while `devices --measure` saves its measurements."""
    path, each = tmp_path / "speeds.json", 20

    def with_device(name: str, book: SpeedBook) -> SpeedBook:
        return replace(book, devices={**book.devices, name: FAST})

    def learn(first: int) -> None:
        for number in range(first, first + each):
            change_speed_book(path, partial(with_device, f"device {number}"))

    threads = [threading.Thread(target=learn, args=(at * each,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(read_speed_book(path).devices) == 4 * each


def test_devices_are_known_by_where_they_are(tmp_path: Path) -> None:
    card = replace(RIG.devices[0], pci_bus_id="0000:01:00.0")
    book = EMPTY_BOOK.with_device(card, FAST).with_device(RIG.host, SLOW)
    write_speed_book(tmp_path / "new" / "speeds.json", book)
    kept = read_speed_book(tmp_path / "new" / "speeds.json")
    assert kept == book
    renamed = Rig((replace(card, id="CUDA7"), replace(card, id="CUDA8", pci_bus_id="0000:02:00.0")), RIG.host)
    speeds = kept.speeds(renamed, {"CUDA8": 5e9, "CUDA7": 1.0})
    assert speeds.bandwidths == {"CUDA7": 9e11, CPU_ID: 3e10}
    assert speeds.links["CUDA7"] == Link(1e-4, 1e9), "what was measured counts more than what the slot promises"
    assert speeds.links["CUDA8"].bytes_per_second == 5e9
    assert CPU_ID not in speeds.links


@pytest.mark.parametrize("text", ["", "{}", '{"version": 9, "devices": {}}', "x" * (MAX_FILE_BYTES + 1)])
def test_a_damaged_file_is_an_empty_book(text: str, tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    path.write_text(text)
    assert read_speed_book(path) == EMPTY_BOOK
    assert read_speed_book(tmp_path / "missing.json") == EMPTY_BOOK


def test_files_of_earlier_versions_keep_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    kept = '{"read_bytes_per_second": 1e11, "round_trip_s": 1e-4, "sent_bytes_per_second": 1e9}'
    path.write_text(f'{{"version": 1, "devices": {{"CUDA cuda0": {kept}}}, "ratios": {{"layer gpu": [1.5]}}}}')
    assert read_speed_book(path) == SpeedBook({"CUDA cuda0": StoredDevice(1e11, 1e-4, 1e9)})


def test_numbers_that_cannot_be_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    kept = '{"read_bytes_per_second": %s, "round_trip_s": 1e-4, "sent_bytes_per_second": 1e9}'
    answer = '{"layout_class": "c", "parts": {"a": %s}, "seconds": %s}'
    answers = ", ".join(answer % pair for pair in ((0.1, 1e9), (-1, 0.1), (0.1, 0), (0, 0), (0.1, 0.15)))
    path.write_text(
        f'{{"version": 1, "devices": {{"a": {kept % "-1"}, "b": {kept % "1e11"}}}, "answers": [{answers}]}}'
    )
    book = read_speed_book(path)
    assert list(book.devices) == ["b"]
    assert book.answers == (TokenTiming("c", {"a": 0.1}, 0.15),)
    assert EMPTY_BOOK.with_device(RIG.host, StoredDevice(float("nan"), 1, 1)) == EMPTY_BOOK
    assert EMPTY_BOOK.with_device(RIG.host, StoredDevice(1.0, 1.0, 1.0, {"Q4_0": -1.0})) == EMPTY_BOOK


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DocumentError, match="speeds"):
        write_speed_book(tmp_path / "file" / "speeds.json", EMPTY_BOOK)


def speed_of(memory: ModelMemory, layout: Layout, rig: Rig = RIG, speeds: Speeds = NO_MEASUREMENTS) -> SpeedForecast:
    found = plan_speed(TokenWork(memory.model), Plan(memory, rig, Edit(layout, CONTEXT)), speeds, 1000)
    assert found is not None
    return found


def test_the_middle_of_the_last_answers_of_a_class_counts(memory: ModelMemory) -> None:
    predicted = speed_of(memory, single_device(memory.model.n_layers, "CUDA0"))
    book = EMPTY_BOOK
    for ratio in (9.0, 1.0, 1.2, 1.1, 1.3, 1.25):
        book = book.with_answer("layer gpu", RIG, predicted, 100, 1 / (predicted.token_s * ratio))
    speeds = book.speeds(RIG)
    assert speeds.ratios["layer gpu"] * speeds.factors["CUDA0"] == pytest.approx(1.2, rel=0.01)


def test_odd_answers_say_nothing(memory: ModelMemory) -> None:
    predicted = speed_of(memory, single_device(memory.model.n_layers, "CUDA0"))
    for tokens, rate in ((3, 10.0), (100, 0.0), (100, 1e-9), (100, 1e9)):
        assert EMPTY_BOOK.with_answer("layer gpu", RIG, predicted, tokens, rate) == EMPTY_BOOK


def test_one_answer_teaches_the_devices_it_used(memory: ModelMemory) -> None:
    layout = single_device(memory.model.n_layers, "CUDA0")
    plain = speed_of(memory, layout)
    book = EMPTY_BOOK.with_answer(layout_class(layout, RIG), RIG, plain, 100, 1 / (1.5 * plain.token_s))
    learnt = book.speeds(RIG)
    assert speed_of(memory, layout, speeds=learnt).token_s == pytest.approx(1.5 * plain.token_s, rel=1e-3)
    both = make_layout(memory.model.n_layers, ["CUDA0"] * 16 + [CPU_ID] * (memory.model.n_layers - 16))
    before, after = speed_of(memory, both), speed_of(memory, both, speeds=learnt)
    card, host = (next(each for each in after.devices if each.id == key) for key in ("CUDA0", CPU_ID))
    assert card.seconds == pytest.approx(1.5 * next(d for d in before.devices if d.id == "CUDA0").seconds, rel=0.01)
    assert host == next(each for each in before.devices if each.id == CPU_ID), "nothing was learnt of the host"
    assert (card.source, host.source, after.source) == ("answers", "guess", "guess")


def test_answers_of_several_layouts_tell_their_devices_apart(memory: ModelMemory) -> None:
    n_layers = memory.model.n_layers
    layouts = [make_layout(n_layers, ["CUDA0"] * n + ["CUDA1"] * (n_layers - n)) for n in (4, 12, 20, 28)]
    true = Speeds(factors={"CUDA0": 2.0, "CUDA1": 0.5})
    book = EMPTY_BOOK
    for layout in layouts[:3]:
        rate = speed_of(memory, layout, speeds=true).tokens_per_second
        book = book.with_answer(layout_class(layout, RIG), RIG, speed_of(memory, layout), 100, rate)
    found = speed_of(memory, layouts[3], speeds=book.speeds(RIG))
    assert found.token_s == pytest.approx(speed_of(memory, layouts[3], speeds=true).token_s, rel=0.1)


def test_what_is_off_on_one_measured_device_is_half_expected_on_others(memory: ModelMemory) -> None:
    book = EMPTY_BOOK.with_device(RIG.devices[0], FAST).with_device(RIG.devices[1], SLOW)
    layout = single_device(memory.model.n_layers, "CUDA0")
    bare = speed_of(memory, layout, speeds=book.speeds(RIG))
    book = book.with_answer(layout_class(layout, RIG), RIG, bare, 100, 1 / (1.44 * bare.token_s))
    factors = book.speeds(RIG).factors
    assert factors["CUDA1"] == pytest.approx(factors["CUDA0"] ** 0.5)
    assert factors["CUDA0"] == pytest.approx(1.44, rel=0.05)
    assert CPU_ID not in factors, "it was not measured"


def test_measuring_anew_forgets_what_answers_taught_of_it(memory: ModelMemory) -> None:
    layout = single_device(memory.model.n_layers, "CUDA0")
    book = EMPTY_BOOK.with_answer("layer gpu", RIG, speed_of(memory, layout), 100, 1.0)
    assert book.with_device(RIG.host, SLOW).answers == book.answers
    assert book.with_device(RIG.devices[0], FAST).answers == ()


def test_workers_of_this_machine_are_alike() -> None:
    worker = replace(RIG.devices[0], id="RPC0", backend="RPC", endpoint="127.0.0.1:50052")
    book = EMPTY_BOOK.with_device(worker, SLOW)
    others = Rig(
        (replace(worker, endpoint="127.0.0.1:61000"), replace(worker, id="RPC1", endpoint="192.0.2.1:61000")), RIG.host
    )
    assert book.speeds(others).bandwidths == {"RPC0": 3e10}


def test_a_measured_bandwidth_narrows_the_range(memory: ModelMemory) -> None:
    layout = single_device(memory.model.n_layers, "CUDA1")
    guessed = predict_layout(memory, RIG, layout, CONTEXT)
    known = predict_layout(memory, RIG, layout, CONTEXT, Speeds(bandwidths={"CUDA1": 3e11}))
    assert known.worst_s / known.best_s < guessed.worst_s / guessed.best_s


def test_fastest_goes_where_the_measured_speed_is(memory: ModelMemory) -> None:
    for quick, slow in (("CUDA0", "CUDA1"), ("CUDA1", "CUDA0")):
        speeds = Speeds(bandwidths={quick: 1e12, slow: 1e11})
        found = auto_layout("fastest", memory, RIG, CONTEXT, Constraints(speeds=speeds))
        assert found.layout.devices == (quick,)


def test_classes_of_layouts() -> None:
    rig = Rig((*RIG.devices, replace(RIG.devices[0], id="RPC0", backend="RPC", endpoint="10.0.0.1:50052")), RIG.host)
    layouts = [
        single_device(4, "CUDA0"),
        make_layout(4, ["CUDA0", "CUDA0", "CUDA1", "CUDA1"]),
        make_layout(4, [CPU_ID, "CUDA0", "CUDA0", "CUDA0"]),
        make_layout(4, ["RPC0", "CUDA0", "CUDA0", "CUDA0"]),
        replace(single_device(4, "CUDA0"), overrides=(Override(CPU_ID, part="experts"),)),
    ]
    assert [layout_class(layout, rig) for layout in layouts] == [
        "layer gpu", "layer gpu several", "layer cpu+gpu", "layer gpu+remote several", "layer cpu+gpu overrides",
    ]  # fmt: skip
    assert layout_class(single_device(4, "CUDA1"), rig) == layout_class(single_device(4, "CUDA0"), rig)


def test_a_full_book_forgets_the_oldest() -> None:
    predicted = SpeedForecast(0.1, 0, (DeviceTime(CPU_ID, 0.1, 0.0, "guess"),), "guess")
    book = EMPTY_BOOK
    for number in range(300):
        card = replace(RIG.devices[0], pci_bus_id=f"0000:{number:02x}:00.0")
        book = book.with_device(card, FAST).with_answer(f"class {number}", RIG, predicted, 100, 10.0)
    assert len(book.devices) == 128
    assert book.answers[-1].layout_class == "class 299"
    assert len(book.answers) == MAX_TIMINGS


def test_a_told_speed_counts_until_it_is_measured_here() -> None:
    facts = RemoteFacts("CUDA", None, 9e11, (("Q4_0", 5e11),), 2e-6, (("F16", 3e13),))
    lent = Device(
        "attic-CUDA0", "attic", "RPC", "gpu", 1 << 34, endpoint="192.0.2.7:50052/CUDA0", fingerprint="ab" * 32,
        remote=facts,
    )  # fmt: skip
    rig = make_rig(lent)
    told = SpeedBook({}).speeds(rig)
    assert (told.bandwidths, told.by_type) == ({"attic-CUDA0": 9e11}, {"attic-CUDA0": {"Q4_0": 5e11}})
    assert (told.op_seconds, told.products) == ({"attic-CUDA0": 2e-6}, {"attic-CUDA0": {"F16": 3e13}})
    # It says nothing about the link.
    assert told.links == {}
    measured = SpeedBook({}).with_device(lent, StoredDevice(4e11, 1e-3, 1e8)).speeds(rig)
    assert measured.bandwidths == {"attic-CUDA0": 4e11}
    assert measured.links == {"attic-CUDA0": Link(1e-3, 1e8)}


def test_choices_are_kept_one_for_each_setting_machine_and_load(tmp_path: Path) -> None:
    first = MeasuredChoice("n_ubatch", 1024, 512, 1.3, 1.2, 1.4, "here", "load")
    others = [msgspec.structs.replace(first, **{key: "other"}) for key in ("machine", "load")]
    anew = msgspec.structs.replace(first, value=256)
    book = EMPTY_BOOK.with_choices([first, *others]).with_choices([anew])
    assert book.choices == (*others, anew)
    path = tmp_path / "speeds.json"
    write_speed_book(path, book)
    assert read_speed_book(path) == book
    # Measured meanwhile by another process.
    assert EMPTY_BOOK.with_choices([first]).with_changes(EMPTY_BOOK, book).choices == book.choices


def test_changes_are_added_to_what_another_process_wrote_meanwhile() -> None:
    card, host = RIG.devices[0], RIG.host
    before = EMPTY_BOOK.with_device(card, FAST)
    after = before.with_device(host, SLOW)
    on_card, on_host = (TokenTiming("class", {speed_key(device): 1.0}, 2.0) for device in (card, host))
    meanwhile = replace(before.with_device(card, SLOW), answers=(on_card, on_host))
    found = meanwhile.with_changes(before, after)
    assert found.devices == {speed_key(card): SLOW, speed_key(host): SLOW}
    assert found.answers == (on_card,), "the host's answer belongs to its old measurement"


def test_choices_that_cannot_be_are_left_out(tmp_path: Path) -> None:
    good = MeasuredChoice("threads", 8, 16, 1.3, 1.2, 1.4, "here")
    odd = [
        msgspec.structs.replace(good, machine="a", value=0),
        msgspec.structs.replace(good, machine="b", value=10_000),
        msgspec.structs.replace(good, machine="c", ratio=-1.0),
        msgspec.structs.replace(good, machine="d", setting="bound_threads", value=2),
    ]
    write_speed_book(tmp_path / "speeds.json", SpeedBook({}, (), (), (good, *odd)))
    assert read_speed_book(tmp_path / "speeds.json").choices == (good,)
