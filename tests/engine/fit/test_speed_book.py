"""Speeds kept between runs, and what predictions make of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.devices.device import CPU_ID, Rig, make_host
from engine.errors import PlacedError
from engine.fit.speed_book import (
    EMPTY_BOOK,
    KEPT_ANSWERS,
    MAX_FILE_BYTES,
    KeptDevice,
    SpeedBook,
    read_speed_book,
    write_speed_book,
)
from engine.fit.strategies.catalogue import auto_layout
from engine.fit.strategies.constraints import Constraints
from engine.fit.strategies.fastest import predict_layout
from engine.fit.strategies.speeds import Link, Speeds, layout_class
from engine.gguf.reader import read_model
from engine.layout.layout import Override, make_layout, single_device
from engine.memory.model_memory import ModelMemory
from engine.settings.context_settings import ContextSettings
from tests.support.models import write_header_only
from tests.support.previews import make_gpu, make_rig

FAST = KeptDevice(9e11, 1e-4, 1e9)
SLOW = KeptDevice(3e10, 2e-3, 1e8)
RIG = make_rig(make_gpu("CUDA0", 24), make_gpu("CUDA1", 24, name="unheard of"))
CONTEXT = ContextSettings(n_ctx=4096)


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> ModelMemory:
    path = tmp_path_factory.mktemp("models") / "eight.gguf"
    return ModelMemory(read_model(write_header_only(path, n_layers=32, n_embd=4096, n_head=32, n_ff=14336)))


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


@pytest.mark.parametrize("text", ["", "{}", '{"version": 9, "devices": {}, "ratios": {}}', "x" * (MAX_FILE_BYTES + 1)])
def test_a_damaged_file_is_an_empty_book(text: str, tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    path.write_text(text)
    assert read_speed_book(path) == EMPTY_BOOK
    assert read_speed_book(tmp_path / "missing.json") == EMPTY_BOOK


def test_numbers_that_cannot_be_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    kept = '{"read_bytes_per_second": %s, "round_trip_s": 1e-4, "sent_bytes_per_second": 1e9}'
    path.write_text(
        f'{{"version": 1, "devices": {{"a": {kept % "-1"}, "b": {kept % "1e11"}}}, "ratios": {{"c": [1e9, 1.5]}}}}'
    )
    book = read_speed_book(path)
    assert list(book.devices) == ["b"]
    assert book.ratios == {"c": (1.5,)}
    assert EMPTY_BOOK.with_device(RIG.host, KeptDevice(float("nan"), 1, 1)) == EMPTY_BOOK


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlacedError, match="speeds"):
        write_speed_book(tmp_path / "file" / "speeds.json", EMPTY_BOOK)


def test_the_middle_of_the_last_answers_counts() -> None:
    book = EMPTY_BOOK
    for ratio in (9.0, 1.0, 1.2, 1.1, 1.3, 1.25):
        book = book.with_answer("layer gpu", 0.1, 100, 1 / (0.1 * ratio))
    assert len(book.ratios["layer gpu"]) == KEPT_ANSWERS
    assert book.speeds(RIG).ratios == {"layer gpu": pytest.approx(1.2)}


@pytest.mark.parametrize(("tokens", "rate"), [(3, 10.0), (100, 0.0), (100, 1e-9), (100, 1e9)])
def test_odd_answers_say_nothing(tokens: int, rate: float) -> None:
    assert EMPTY_BOOK.with_answer("layer gpu", 0.1, tokens, rate) == EMPTY_BOOK


def test_predictions_follow_what_was_measured(memory: ModelMemory) -> None:
    layout = single_device(memory.model.n_layers, "CUDA0")
    plain = predict_layout(memory, RIG, layout, CONTEXT)
    assert plain.best_s < plain.middle_s < plain.worst_s
    name = layout_class(layout, RIG)
    rate = 1 / (1.5 * plain.middle_s)
    corrected = predict_layout(
        memory, RIG, layout, CONTEXT, EMPTY_BOOK.with_answer(name, plain.middle_s, 100, rate).speeds(RIG)
    )
    assert corrected.middle_s == pytest.approx(1.5 * plain.middle_s)
    assert corrected.worst_s - corrected.best_s < 1.5 * (plain.worst_s - plain.best_s)
    other = predict_layout(memory, RIG, single_device(memory.model.n_layers, CPU_ID), CONTEXT)
    assert layout_class(single_device(memory.model.n_layers, CPU_ID), RIG) != name
    assert other == predict_layout(
        memory, RIG, single_device(memory.model.n_layers, CPU_ID), CONTEXT, Speeds(ratios={name: 1.5})
    )


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
    book = SpeedBook({}, {})
    for number in range(300):
        book = book.with_device(make_host(f"host {number}", 1), FAST)
        book = book.with_answer(f"class {number}", 0.1, 100, 10.0)
    assert len(book.devices) == 1
    assert list(book.ratios)[-1] == "class 299"
    assert len(book.ratios) == 128
