"""Keep-alive, eviction and reloads of several models, as values with a simulated clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.base.units import GIB, MIB
from engine.devices.device import Device, make_host
from engine.model.gguf.model_file import FileIdentity
from engine.planning.fit.loaded_models import (
    AFTER_THE_ANSWER_S,
    UNTIL_UNLOADED_S,
    HeldModel,
    choose_victims,
    expired,
    held_bytes,
    next_expiry_s,
)
from engine.planning.layout.layout import single_device
from engine.planning.memory.estimate import DeviceMemory, Grade
from engine.planning.plan.edit import Edit
from engine.planning.plan.preview import LoadedLayout
from engine.planning.plan.report import DeviceRow, make_row
from engine.planning.settings.context_settings import ContextSettings

GONE_ENOUGH = Callable[[Sequence[HeldModel]], bool]


def loaded(name: str, *, keep_alive_s: float = 300.0, idle_since_s: float | None = 0.0, size: int = 0) -> HeldModel:
    key = FileIdentity(((1, hash(name), 0, 0),))
    return HeldModel(key, name, {"CUDA0": size}, keep_alive_s=keep_alive_s, idle_since_s=idle_since_s)


def one_goes(leaving: Sequence[HeldModel]) -> bool:
    return len(leaving) >= 1


def enough_bytes(wanted: int) -> GONE_ENOUGH:
    return lambda leaving: sum(model.held_bytes["CUDA0"] for model in leaving) >= wanted


def names(models: Sequence[HeldModel] | None) -> list[str] | None:
    return None if models is None else [model.name for model in models]


# ---------------------------------------------------------------------- keep-alive


@pytest.mark.parametrize(
    ("keep_alive_s", "now_s", "gone"),
    [(300.0, 299.9, False), (300.0, 300.0, True), (UNTIL_UNLOADED_S, 1e9, False), (AFTER_THE_ANSWER_S, 0.0, True)],
)
def test_an_idle_model_goes_when_its_time_is_over(keep_alive_s: float, now_s: float, gone: bool) -> None:
    model = loaded("a", keep_alive_s=keep_alive_s, idle_since_s=None).idle(0.0, answered=True)
    assert (expired([model], now_s) == (model,)) is gone


def test_an_answering_model_does_not_expire_and_its_time_begins_anew() -> None:
    answering = loaded("a").busy()
    assert expired([answering], 1e9) == ()
    assert next_expiry_s([answering]) is None
    answered = answering.idle(1000.0, answered=True)
    assert next_expiry_s([answered]) == 1300.0
    assert expired([answered], 1299.0) == ()


def test_after_the_answer_means_the_next_answer() -> None:
    model = loaded("a").busy().idle(5.0, answered=True).kept_alive(AFTER_THE_ANSWER_S, 6.0)
    assert expired([model], 1e9) == ()
    assert expired([model.busy().idle(20.0, answered=True)], 20.0) != ()


def test_another_keep_alive_counts_from_the_choice() -> None:
    model = loaded("a").kept_alive(60.0, 1000.0)
    assert next_expiry_s([model, loaded("b", keep_alive_s=inf)]) == 1060.0
    assert loaded("a").busy().kept_alive(60.0, 5.0).is_busy


# ---------------------------------------------------------------------- eviction


def test_the_idle_model_goes_although_its_keep_alive_is_longer() -> None:
    models = [loaded("A", keep_alive_s=1, idle_since_s=None), loaded("B", keep_alive_s=2)]
    assert names(choose_victims(models, one_goes)) == ["B"]


def test_of_answering_models_the_one_with_the_shortest_keep_alive_goes() -> None:
    models = [loaded("B", keep_alive_s=2, idle_since_s=None), loaded("A", keep_alive_s=1, idle_since_s=None)]
    assert names(choose_victims(models, one_goes)) == ["A"]


@pytest.mark.parametrize(
    ("models", "wanted", "expected"),
    [
        ([loaded("a", size=1), loaded("b", size=1)], 0, []),
        ([loaded("a", size=1), loaded("b", size=1)], 3, None),
        ([loaded("a", keep_alive_s=9, size=4), loaded("b", keep_alive_s=1, size=4)], 4, ["b"]),
        ([loaded("a", keep_alive_s=1, size=2), loaded("b", keep_alive_s=inf, size=4)], 4, ["b"]),
        ([loaded("a", size=2, idle_since_s=7), loaded("b", size=2, idle_since_s=3)], 2, ["b"]),
        ([loaded("a", size=2), loaded("b", size=2, idle_since_s=None), loaded("c", size=1)], 3, ["a", "c"]),
        ([loaded("a", size=2), loaded("b", size=4, idle_since_s=None), loaded("c", size=1)], 5, ["a", "b"]),
    ],
)
def test_the_fewest_idle_models_go(models: list[HeldModel], wanted: int, expected: list[str] | None) -> None:
    assert names(choose_victims(models, enough_bytes(wanted))) == expected


models_of_any_kind = st.lists(
    st.builds(
        lambda number, keep, idle, size: loaded(f"m{number}", keep_alive_s=keep, idle_since_s=idle, size=size),
        st.integers(0, 9),
        st.sampled_from([0.0, 60.0, 300.0, inf]),
        st.none() | st.floats(0, 100),
        st.integers(0, 50),
    ),
    max_size=6,
    unique_by=lambda model: model.key,
)


@given(models_of_any_kind, st.integers(0, 200))
def test_victims_are_enough_few_and_not_answering_without_need(models: list[HeldModel], wanted: int) -> None:
    is_enough = enough_bytes(wanted)
    victims = choose_victims(models, is_enough)
    if victims is None:
        assert not is_enough(models)
        return
    assert is_enough(victims)
    assert all(not is_enough([each for each in victims if each is not one]) for one in victims)
    idle = [model for model in models if not model.is_busy]
    if is_enough(idle):
        assert not any(victim.is_busy for victim in victims)
        assert not victims or not any(map(is_enough, combinations(idle, len(victims) - 1)))


@given(models_of_any_kind, st.floats(0, 500))
def test_expiry_and_the_next_time_agree(models: list[HeldModel], now_s: float) -> None:
    due_s = next_expiry_s(models)
    assert bool(expired(models, now_s)) == (due_s is not None and due_s <= now_s)
    assert all(model.idle_since_s is not None for model in expired(models, now_s))


# ---------------------------------------------------------------------- what a load holds


def test_a_load_holds_what_was_measured_and_what_its_process_takes_besides() -> None:
    card, host = Device("CUDA0", "card", "CUDA", "gpu", GIB), make_host("host", GIB)

    def rows(overhead_bytes: int, grade: Grade) -> tuple[DeviceRow, ...]:
        memory = DeviceMemory(weights_bytes=300 * MIB, overhead_bytes=overhead_bytes)
        return make_row(card, memory, grade), make_row(host, DeviceMemory(), grade)

    edit = Edit(single_device(4, "CUDA0"), ContextSettings())
    told = LoadedLayout(edit, rows(0, Grade.MEASURED), rows(50 * MIB, Grade.ESTIMATED))
    assert held_bytes(told) == {"CUDA0": 350 * MIB}
    assert held_bytes(LoadedLayout(edit, rows(0, Grade.MEASURED), ())) == {"CUDA0": 300 * MIB}
