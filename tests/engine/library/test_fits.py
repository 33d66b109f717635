"""Forecasts for the list of models: their kinds, and when they are computed again."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.base.cancellation import CancelToken
from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import Device, Rig, make_host
from engine.library.children import plan_models
from engine.library.facts import read_facts
from engine.library.fit import (
    Fit,
    fit_speed_text,
    fit_text,
    layout_key,
    place_text,
    projector_text,
    sourced_speed_text,
    speed_range_text,
)
from engine.library.fitting import find_fit
from engine.library.grouping import group, join_parts
from engine.library.listed import ALL, ORDERS, Listed, ListFilter, Order, arrange, fingerprints_of, listed
from engine.library.notes import Notes
from engine.library.planning import Job, jobs, rig_key, settled_rig, settled_speeds
from engine.library.scan import scan
from engine.library.starters import STARTERS, starters_for
from engine.library.stores import Store
from engine.model.gguf.model_file import ModelFile, TensorInfo
from engine.model.gguf.reader import read_model
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS
from engine.planning.layout.layout import make_layout, single_device
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.side_files import Projector, SideFiles
from engine.planning.plan.decisions.context_length import default_context
from engine.planning.speed.prediction import CostModel
from engine.planning.speed.speeds import NO_MEASUREMENTS, Link, Speeds
from engine.planning.speed.texts import predicted_rate_text
from engine.planning.speed.work import TokenWork
from tests.support.models import write_header_only, write_tiny_llama
from tests.support.side_models import write_tiny_projector
from tests.support.stores import model_bytes, put

CARD = Device("CUDA0", "RTX 3090", "CUDA", "gpu", 24 * GIB, 23 * GIB, margin_bytes=512 * MIB)
HOST = make_host("PC", 64 * GIB, 50 * GIB)
RIG = Rig((CARD,), HOST)


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    path = tmp_path_factory.mktemp("fit") / "Seven-Q4_K_M.gguf"
    write_header_only(path, n_layers=32, n_embd=4096, n_head=32, n_head_kv=8, n_ff=14336, n_vocab=32000)
    return read_model(path)


def fit_on(model: ModelFile, card_bytes: int, host_bytes: int = 50 * GIB) -> Fit:
    devices = (replace(CARD, free_bytes=card_bytes),) if card_bytes else ()
    return find_fit(model, Rig(devices, replace(HOST, free_bytes=host_bytes)), "fewest", NO_CONSTRAINTS)


def test_each_kind_has_its_words(seven: ModelFile) -> None:
    whole, split, alone = fit_on(seven, 23 * GIB), fit_on(seven, 4 * GIB), fit_on(seven, 0)
    assert (whole.kind, whole.n_ctx, whole.layers) == ("devices", 8192, (("CUDA0", 32),))
    assert fit_text(whole) == "fits on CUDA0"
    assert place_text(whole) == "32 layers on CUDA0"
    assert whole.fastest > whole.slowest > alone.fastest > 0
    assert fit_speed_text(whole) == f"about {predicted_rate_text(whole.speed)} tokens/s"
    assert sourced_speed_text(whole).endswith(" tokens/s, ±40 % (from the graphics card's specifications)")
    assert speed_range_text(whole).startswith(f"Predicted: {sourced_speed_text(whole)}; at least ")
    assert fit_speed_text(alone).startswith("roughly ")
    assert sourced_speed_text(alone).endswith(" tokens/s (not measured)"), "nobody knows how far off a guess is"
    assert whole.fastest > whole.expected > whole.slowest
    assert split.kind == "split"
    assert sum(count for _, count in split.layers) == 32
    assert fit_text(split) == f"{dict(split.layers)['CPU']} of 32 layers on the CPU"
    assert (alone.kind, fit_text(alone)) == ("cpu", "fits in memory")
    assert all(fit.fits for fit in (whole, split, alone))


def test_the_speed_is_the_one_that_the_editor_shows(seven: ModelFile) -> None:
    fit = fit_on(seven, 23 * GIB)
    context = default_context(seven)
    layout = single_device(32, "CUDA0")
    tables = ModelMemory(seven).for_context(context)
    shown = CostModel(TokenWork(seven), RIG, context, tables, NO_MEASUREMENTS).answer(layout)
    assert (fit.expected, fit.source, fit.layout) == (shown.tokens_per_second, shown.source, layout_key(layout))


def test_keys_tell_layouts_apart() -> None:
    assert layout_key(single_device(4, "CPU")) == "CPU"
    keys = {layout_key(make_layout(4, ["A"] * count + ["B"] * (4 - count))) for count in range(5)}
    assert len(keys) == 5
    assert layout_key(make_layout(2, "AB")) == layout_key(make_layout(2, ["A", "B"]))


def test_what_the_disk_would_have_to_serve_does_not_fit(seven: ModelFile) -> None:
    fit = fit_on(seven, 2 * GIB, 2 * GIB)
    assert (fit.kind, fit.fits, fit_speed_text(fit)) == ("disk", False, "")
    assert "read from disk" in fit.reason


def test_the_rig_is_settled_until_it_really_changes() -> None:
    settled = settled_rig(RIG)
    assert settled.devices[0].free_bytes == 23 * GIB // (384 * MIB) * (384 * MIB)
    busier = Rig((replace(CARD, free_bytes=23 * GIB - 100 * MIB),), replace(HOST, free_bytes=50 * GIB + 300 * MIB))
    assert settled_rig(busier, settled) is settled
    taken = Rig((replace(CARD, free_bytes=20 * GIB),), HOST)
    assert settled_rig(taken, settled) != settled
    assert settled_rig(Rig((), HOST), settled).ids == ("CPU",)


def test_what_forecasts_are_kept_under() -> None:
    key = rig_key(RIG, NO_CONSTRAINTS, "fewest")
    assert key == rig_key(RIG, NO_CONSTRAINTS, "fewest")
    others = [
        rig_key(RIG, NO_CONSTRAINTS, "fastest"),
        rig_key(RIG, NO_CONSTRAINTS, "fewest", text_only=True),
        rig_key(RIG, replace(NO_CONSTRAINTS, one_backend=True), "fewest"),
        rig_key(Rig((replace(CARD, margin_bytes=GIB),), HOST), NO_CONSTRAINTS, "fewest"),
        rig_key(RIG, replace(NO_CONSTRAINTS, off=frozenset({"CUDA0"})), "fewest"),
        rig_key(RIG, replace(NO_CONSTRAINTS, speeds=Speeds(bandwidths={"CUDA0": 8e11})), "fewest"),
    ]
    assert len({key, *others}) == 7


def test_speeds_are_settled_until_answers_teach_something_else() -> None:
    planned = Speeds(bandwidths={"CUDA0": 8e11}, links={"CUDA0": Link(1e-5, 1e10)})
    assert settled_speeds(planned, None) is planned
    nearly = replace(planned, bandwidths={"CUDA0": 7.9e11}, factors={"CUDA0": 1.05}, ratios={"layer gpu": 0.95})
    assert settled_speeds(nearly, planned) is planned
    learnt = replace(planned, factors={"CUDA0": 1.5})
    assert settled_speeds(learnt, planned) is learnt
    assert settled_speeds(planned, learnt) is planned
    keys = {rig_key(RIG, replace(NO_CONSTRAINTS, speeds=each), "fewest") for each in (planned, nearly, learnt)}
    assert len(keys) == 2, "what is nearly alike is kept under one key"


def listing(folder: Path, fits: dict[str, Fit] | None = None, notes: dict[str, Notes] | None = None) -> list[Listed]:
    files = scan([Store("folder", folder)]).files
    facts = {copy.path: read_facts(copy.paths) for copy in join_parts(files)}
    return [listed(entry, notes or {}, fits or {}) for entry in group(files, facts)]


def test_a_whole_list_is_planned_once(tmp_path: Path) -> None:
    for name in ("Ada-Q8_0", "Ada-Q4_K_M", "Bob-Q8_0"):
        put(tmp_path / f"{name}.gguf", model_bytes(name, template=name))
    put(tmp_path / "bad.gguf", model_bytes()[:100])
    entries = [model.entry for model in listing(tmp_path)]
    wanted = jobs(entries, {})
    assert [job.path.name for job in wanted] == ["Ada-Q4_K_M.gguf", "Bob-Q8_0.gguf", "Ada-Q8_0.gguf"]
    found: dict[str, Fit] = {}
    token = CancelToken()

    def tell(mark: str, fit: Fit) -> None:
        found[mark] = fit
        if len(found) == 2:
            token.cancel()

    plan_models(wanted, RIG, "fewest", NO_CONSTRAINTS, tell, token)
    assert len(found) == 2
    assert [job.path.name for job in jobs(entries, found)] == ["Ada-Q8_0.gguf"]
    # These headers lack what a forecast needs: that is said, and not asked again.
    assert {fit.kind for fit in found.values()} == {"unknown"}


def test_a_forecast_counts_the_projector_that_belongs_to_the_model(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "ada-Q8_0.gguf")
    write_tiny_projector(tmp_path / "mmproj-ada.gguf")
    entries = [model.entry for model in listing(tmp_path)]
    (job,) = jobs(entries, {})
    assert job.projector == tmp_path / "mmproj-ada.gguf"
    found: dict[str, Fit] = {}
    plan_models([job], RIG, "fewest", NO_CONSTRAINTS, found.__setitem__, CancelToken())
    with_it = found[job.mark]
    assert (with_it.kind, with_it.projector) == ("devices", "mmproj-ada.gguf")
    assert projector_text(with_it) == "with the projector"
    assert jobs(entries, found) == (), "it is not made twice"
    (plain,) = jobs(entries, found, text_only=True)
    assert plain.projector is None
    plan_models([plain], RIG, "fewest", NO_CONSTRAINTS, found.__setitem__, CancelToken())
    assert projector_text(found[job.mark]) == ""
    assert [each.projector for each in jobs(entries, found)] == [job.projector]


def test_a_projector_takes_the_room_of_layers(seven: ModelFile) -> None:
    projector = Projector(Path("mmproj.gguf"), (TensorInfo("v", (GIB,), "I8", GIB, 0, 0),))
    rig = Rig((replace(CARD, free_bytes=6 * GIB + 256 * MIB),), HOST)
    assert find_fit(seven, rig, "fewest", NO_CONSTRAINTS).kind == "devices"
    with_it = find_fit(seven, rig, "fewest", replace(NO_CONSTRAINTS, side_files=SideFiles(projector)))
    assert with_it.kind == "split"


def test_a_projector_that_cannot_be_read_is_not_counted(seven: ModelFile, tmp_path: Path) -> None:
    put(tmp_path / "mmproj.gguf", b"no projector")
    found: dict[str, Fit] = {}
    job = Job("mark", seven.paths[0], tmp_path / "mmproj.gguf")
    plan_models([job], RIG, "fewest", NO_CONSTRAINTS, found.__setitem__, CancelToken())
    assert (found["mark"].kind, found["mark"].projector) == ("devices", "")


def test_the_largest_that_fits_is_opened(tmp_path: Path) -> None:
    for name in ("Ada-Q2_K", "Ada-Q3_K_S", "Ada-Q4_K_M"):
        put(tmp_path / f"{name}.gguf", model_bytes(name) + bytes(int(name[5]) * 32))
    (model,) = listing(tmp_path)
    assert model.chosen.label == "Q4_K_M"
    marks = dict(zip(("Q2_K", "Q3_K_S", "Q4_K_M"), fingerprints_of(model.entry), strict=True))
    fits = {marks["Q2_K"]: Fit("devices"), marks["Q3_K_S"]: Fit("cpu"), marks["Q4_K_M"]: Fit("no")}
    (model,) = listing(tmp_path, fits)
    assert model.chosen.label == "Q3_K_S"
    assert model.fit == Fit("cpu")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> list[Listed]:
    folder = tmp_path_factory.mktemp("shelf")
    for number, name in enumerate(("Ada", "Bob", "Cy", "Dee")):
        template = "{{ tools }}" if name == "Bob" else ""
        put(folder / f"{name}-Q8_0.gguf", model_bytes(name, template=template, n_embd=32 * (4 - number)))
    marks = {model.entry.title: fingerprints_of(model.entry)[0] for model in listing(folder)}
    fits = {
        marks["Ada"]: Fit("no"),
        marks["Bob"]: Fit("devices", slowest=10, fastest=20),
        marks["Cy"]: Fit("cpu", slowest=1, fastest=3, layout="CPU"),
    }
    notes = {
        marks["Cy"]: Notes(
            is_favourite=True, tags=("code",), text="Fine", last_used=9.0, measured=50.0, measured_on="CPU"
        )
    }
    return listing(folder, fits, notes)


@pytest.mark.parametrize(
    ("wanted", "titles"),
    [
        (ALL, "Ada Bob Cy Dee"),
        (ListFilter(descending=True), "Dee Cy Bob Ada"),
        (ListFilter(order="size"), "Dee Cy Bob Ada"),
        (ListFilter(order="fit"), "Bob Cy Ada Dee"),
        (ListFilter(order="speed"), "Cy Bob Ada Dee"),
        (ListFilter(order="speed", descending=True), "Bob Cy Ada Dee"),
        (ListFilter(order="used"), "Cy Ada Bob Dee"),
        (ListFilter(fit="fits"), "Bob Cy"),
        (ListFilter(fit="devices"), "Bob"),
        (ListFilter(capabilities=frozenset({"tools"})), "Bob"),
        (ListFilter(only_favourites=True), "Cy"),
        (ListFilter(tag="code"), "Cy"),
        (ListFilter(text="q8_0 LLAMA bob-q"), "Bob"),
        (ListFilter(text="fine"), "Cy"),
        (ListFilter(max_bytes=0), ""),
    ],
)
def test_search_filter_and_order(shelf: list[Listed], wanted: ListFilter, titles: str) -> None:
    assert " ".join(model.entry.title for model in arrange(shelf, wanted)) == titles


@given(st.sampled_from(ORDERS), st.booleans(), st.text(max_size=3))
def test_whatever_is_wanted_nothing_is_made_up_or_shown_twice(
    shelf: list[Listed], order: Order, descending: bool, text: str
) -> None:
    shown = arrange(shelf, ListFilter(text=text, order=order, descending=descending))
    assert len({model.entry.key for model in shown}) == len(shown)
    assert all(model in shelf for model in shown)
    if not text.strip():
        assert len(shown) == len(shelf)


def test_a_newcomer_is_offered_what_fits() -> None:
    assert [starter.name for starter in starters_for(RIG)] == [starter.name for starter in STARTERS[-3:]]
    small = starters_for(Rig((), make_host("PC", 4 * GIB, 4 * GIB)))
    assert [starter.name for starter in small] == [starter.name for starter in STARTERS[:2]]
    assert starters_for(Rig((), make_host("PC", GIB, GIB // 4))) == STARTERS[:1]
