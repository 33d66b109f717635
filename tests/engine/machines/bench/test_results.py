"""Results of a speed comparison: ratios, winner, files, tables."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import msgspec
import pytest

from engine.base.errors import ArgumentError
from engine.machines.bench.results import (
    MAX_DEPTHS,
    MAX_SAMPLES,
    BenchModel,
    TimedLoad,
    compare,
    import_note,
    parse_results,
    read_results,
    winner_of,
    write_results,
)
from engine.machines.bench.tables import csv_text, markdown_text, rows_of, text_of, winner_text
from tests.support.bench import measured, results_of

SLOW, FAST = [50.0, 51.0, 49.0, 50.0, 52.0], [70.0, 71.0, 69.0, 72.0, 70.0]


def test_a_faster_layout_wins() -> None:
    results = results_of(measured("one", SLOW), measured("two", FAST, against="one"))
    verdicts = {each.measure: each.verdict for each in results.comparisons}
    assert verdicts == {"prompt": "faster", "generation": "faster", "first_token": "faster", "answer": "faster"}
    assert results.winner == "two"
    assert winner_text(results) == "Fastest: two."


def test_no_difference_keeps_the_first() -> None:
    results = results_of(measured("one", SLOW), measured("two", [52.0, 49.0, 51.0, 50.0, 49.0], against="one"))
    assert {each.verdict for each in results.comparisons} == {"same"}
    assert results.winner == "one"
    assert "no difference seen" in text_of(results)


def test_a_faster_median_alone_wins_nothing() -> None:
    noisy = [100.0, 20.0, 90.0, 80.0, 30.0]
    assert winner_of((measured("one", SLOW), measured("two", noisy, against="one"))) == "one"


def test_too_few_rounds_have_no_verdict() -> None:
    results = results_of(measured("one", SLOW[:3]), measured("two", FAST[:3], against="one"))
    assert {each.verdict for each in results.comparisons} == {"open"}
    assert results.winner == "one"
    assert "too few rounds" in text_of(results)


def test_a_first_layout_that_failed_does_not_win() -> None:
    failed = msgspec.structs.replace(measured("one", []), problem="CPU ran out of memory.")
    results = results_of(failed, measured("two", FAST, against="one"))
    assert results.winner == "two"
    assert "CPU ran out of memory." in text_of(results)


def test_loads_are_compared_by_their_order() -> None:
    """A layout that stays loaded from one round to the next has no load in that round."""
    one = msgspec.structs.replace(measured("one", SLOW), loads=tuple(TimedLoad(at, 2.0) for at in (0, 2, 4, 6, 8)))
    two = msgspec.structs.replace(measured("two", SLOW), loads=tuple(TimedLoad(at, 1.0) for at in (0, 1, 3, 5, 7)))
    found = compare(one, two, "load")
    assert found is not None
    assert (found.ratio, found.verdict) == (2.0, "faster")


def test_the_first_difference_of_answers_is_named() -> None:
    results = results_of(measured("one", SLOW, text="The sea was calm."),
                         measured("two", SLOW, against="one", text="The sea was wild."))  # fmt: skip
    (check,) = results.answers
    assert not check.same
    assert 'character 13 on: "calm." with one, "wild." with two' in check.sentence
    assert results_of(measured("one", SLOW), measured("two", SLOW, against="one")).answers[0].same


def test_results_survive_a_file(tmp_path: Path) -> None:
    results = results_of(measured("one", SLOW), measured("two", FAST, against="one"))
    write_results(tmp_path / "r.json", results)
    assert read_results(tmp_path / "r.json") == results


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no results of a speed comparison"),
        ("[1]", "has no results of a speed comparison"),
        ('{"version": 1, "runs": []}', "has no results of a speed comparison"),
        (
            '{"format": "layerdeck-bench", "version": 9, "unknown": 1}',
            "of version 9, but this program reads version 1",
        ),
        ('{"format": "layerdeck-bench", "version": 1}', "r.json is damaged"),
    ],
)
def test_other_files_are_refused_with_a_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ArgumentError, match=sentence):
        read_results(tmp_path / "r.json")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prompt_per_second": 5e-324}, "a measurement of the layout one contains an impossible number"),
        ({"answer_per_second": 5e-324}, "a measurement of the layout one contains an impossible number"),
        ({"first_token_s": -1.0}, "a measurement of the layout one contains an impossible number"),
        ({"prompt_tokens": 10**400}, "a measurement of the layout one contains an impossible number"),
    ],
)
def test_numbers_that_cannot_be_are_refused(change: dict[str, float], sentence: str) -> None:
    one = measured("one", SLOW)
    samples = (msgspec.structs.replace(one.samples[0], **change), *one.samples[1:])
    results = msgspec.structs.replace(results_of(one), layouts=(msgspec.structs.replace(one, samples=samples),))
    with pytest.raises(ArgumentError, match=sentence):
        parse_results(json.dumps(msgspec.to_builtins(results)).encode(), "r.json")


def test_a_file_of_too_many_samples_or_depths_is_refused() -> None:
    one = measured("one", SLOW)
    crowd = tuple(msgspec.structs.replace(one.samples[0], round=number) for number in range(MAX_SAMPLES + 1))
    deep = tuple(msgspec.structs.replace(one.samples[0], depth=number) for number in range(MAX_DEPTHS + 1))
    for samples, words in ((crowd, "measurements"), (deep, "context depth")):
        data = msgspec.json.encode(results_of(msgspec.structs.replace(one, samples=samples)))
        with pytest.raises(ArgumentError, match=f"the file has more than .* {words}"):
            parse_results(data, "r.json")
    no_time = msgspec.structs.replace(one, loads=(TimedLoad(0, 0.0),))
    with pytest.raises(ArgumentError, match="a load time of the layout one is impossible"):
        parse_results(msgspec.json.encode(results_of(no_time)), "r.json")


def test_a_missing_file_and_a_full_folder_are_told(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="cannot be read"):
        read_results(tmp_path / "none.json")
    with pytest.raises(ArgumentError, match="cannot be written"):
        write_results(tmp_path / "none" / "r.json", results_of(measured("one", SLOW)))


def test_results_of_another_model_are_told() -> None:
    mine = BenchModel("mine", "llama", 10, 4)
    assert import_note(mine, mine) == ""
    assert "not comparable" in import_note(mine, BenchModel("yours", "llama", 10, 4))


def test_tables_have_the_same_rows() -> None:
    deep = measured("two", FAST, against="one", depth=4096).samples
    two = measured("two", FAST, against="one")
    results = results_of(measured("one|a", SLOW), msgspec.structs.replace(two, samples=(*two.samples, *deep)))
    rows = rows_of(results)
    written = list(csv.DictReader(io.StringIO(csv_text(results))))
    assert len(written) == len(rows) == 12
    assert [each["test"] for each in written[-4:]] == ["pp100 @ d4096", "tg32 @ d4096", "ttft @ d4096",
                                                      "pp100+tg32 @ d4096"]  # fmt: skip
    marked = markdown_text(results).splitlines()
    assert marked[2].startswith("| m | 1.0 MiB | one\\|a | pp100 | 500")
    assert len([line for line in marked if line.startswith("| m ")]) == 12
