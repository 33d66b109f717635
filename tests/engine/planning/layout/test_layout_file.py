"""The layout file: written layouts are read back, and each fault gives one error with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.base.errors import LayoutError
from engine.planning.layout.layout import Layout, Override, Run
from engine.planning.layout.layout_file import (
    LayoutFile,
    encode_layout,
    free_name,
    parse_layout,
    read_layout,
    write_layout,
)
from engine.planning.settings.context_settings import AUTO_CONTEXT, ContextSettings
from tests.support.strategies import any_layouts, contexts, names

RUNS = [{"device": "A", "layers": "0-3"}, {"device": "CPU", "layers": "4"}, {"device": "B", "layers": "5-9"}]


def document(**changes: object) -> dict[str, object]:
    return {"version": 1, "model": {"name": "m", "layers": 10}, "runs": RUNS, **changes}


def parse(**changes: object) -> LayoutFile:
    return parse_layout(json.dumps(document(**changes)), source="l.json")


@given(any_layouts(), contexts, names)
def test_what_is_written_is_read_back(layout: Layout, context: ContextSettings, name: str) -> None:
    file = LayoutFile(name, layout, context)
    assert parse_layout(encode_layout(file), n_layers=layout.n_layers) == file


def test_the_shortest_file_takes_the_defaults() -> None:
    file = parse_layout('{"version": 1, "runs": [{"device": "CPU", "layers": "0-7"}]}')
    assert file == LayoutFile("", Layout(8, (Run("CPU", 0, 7),), "CPU"), ContextSettings())


def test_one_layer_may_be_written_as_a_range_and_neighbours_on_one_device_merge() -> None:
    runs = [{"device": "A", "layers": "0-0"}, {"device": "A", "layers": "1-4"}, {"device": "B", "layers": "5-9"}]
    assert parse(runs=runs).layout.runs == (Run("A", 0, 4), Run("B", 5, 9))


def test_overrides_and_shares_are_read() -> None:
    overrides = [{"part": "experts", "layers": "5", "device": "X"}, {"pattern": "^output", "device": "CPU"}]
    file = parse(split_mode="row", tensor_split={"A": 3, "B": 1.5}, main_device="A", overrides=overrides)
    assert file.layout.overrides == (Override("X", part="experts", first=5, last=5), Override("CPU", pattern="^output"))
    assert file.layout.tensor_split == (("A", 3.0), ("B", 1.5))
    assert file.layout.main_device == "A"


@pytest.mark.parametrize(
    ("changes", "place", "words"),
    [
        ({"version": 2}, "version", "update Layerdeck"),
        ({"version": 0}, "version", "versions begin at 1"),
        ({"version": "1"}, "version", "whole number"),
        ({"version": True}, "version", "whole number"),
        ({"colour": 1}, "", 'unknown key "colour"'),
        ({"model": {"name": "m", "layer": 3}}, "model", 'unknown key "layer"'),
        ({"model": {"name": 5, "layers": 10}}, "model.name", "text in quotes"),
        ({"model": {"name": "m", "layers": 0}}, "model.layers", "outside of 1"),
        ({"model": {"name": "m", "layers": 32}}, "runs[2].layers", "layers 0-31"),
        ({"model": {"name": "m", "layers": 8}}, "runs[2].layers", "layers 0-7"),
        ({"model": []}, "model", "an object, not a list"),
        ({"runs": {}}, "runs", "a list, not an object"),
        ({"runs": []}, "runs", "no layer is assigned"),
        ({"runs": ["A"]}, "runs[0]", 'an object, not "A"'),
        ({"runs": [{"device": "A"}]}, "runs[0].layers", "key is missing"),
        ({"runs": [{"layers": "0-9"}]}, "runs[0].device", "key is missing"),
        ({"runs": [{"device": "A", "layers": 5}]}, "runs[0].layers", "text in quotes, not 5"),
        ({"runs": [{"device": "A", "layers": "0-9", "x": 1}]}, "runs[0]", 'unknown key "x"'),
        ({"runs": [{"device": "a b", "layers": "0-9"}]}, "runs[0].device", "not a device id"),
        ({"runs": [{"device": "A", "layers": "7-3"}]}, "runs[0].layers", "write 3-7"),
        ({"runs": [{"device": "A", "layers": "-3"}]}, "runs[0].layers", 'written as "5" or "0-15"'),
        ({"runs": [{"device": "A", "layers": "٣"}]}, "runs[0].layers", 'written as "5" or "0-15"'),
        ({"runs": [{"device": "A", "layers": "0-99999999"}]}, "runs[0].layers", 'written as "5" or "0-15"'),
        ({"runs": [{"device": "A", "layers": "1-9"}]}, "runs[0].layers", "start at layer 0"),
        ({"runs": [*RUNS[:1], RUNS[2]]}, "runs[1].layers", "layer 4 is on no device"),
        ({"runs": [RUNS[0], {"device": "A", "layers": "5-9"}]}, "runs[1].layers", "layer 4 is on no device"),
        ({"runs": [*RUNS, {"device": "A", "layers": "9"}]}, "runs[3].layers", "overlaps"),
        ({"runs": [*RUNS[::2], RUNS[1]]}, "runs[1].layers", "layer 4 is on no device"),
        ({"output": 3}, "output", "text in quotes"),
        ({"output": ""}, "output", "not a device id"),
        ({"split_mode": "columns"}, "split_mode", "layer, none, tensor, row"),
        ({"split_mode": "none"}, "split_mode", "on one device"),
        ({"tensor_split": {"A": 1}}, "tensor_split", "belong to split modes tensor and row"),
        ({"main_device": "A"}, "main_device", "split mode row"),
        ({"split_mode": "tensor"}, "tensor_split", "at least one share"),
        ({"split_mode": "tensor", "tensor_split": {"A": -1}}, "tensor_split.A", "0 or above"),
        ({"split_mode": "tensor", "tensor_split": {"A": 0}}, "tensor_split", "at least one share"),
        ({"split_mode": "tensor", "tensor_split": {"A": 10**30}}, "tensor_split.A", "too large"),
        ({"split_mode": "tensor", "tensor_split": {"A": "3"}}, "tensor_split.A", "a number"),
        ({"split_mode": "tensor", "tensor_split": {"A": 1}, "main_device": "A"}, "main_device", "split mode row"),
        ({"overrides": [{"part": "ffn"}]}, "overrides[0].device", "missing"),
        ({"overrides": [{"device": "A"}]}, "overrides[0]", "either a part or a pattern"),
        ({"overrides": [{"device": "A", "part": "nose"}]}, "overrides[0].part", "experts, ffn, attention, all"),
        ({"overrides": [{"device": "A", "part": "ffn", "layers": "5-10"}]}, "overrides[0].layers", "within 0-9"),
        ({"overrides": [{"device": "A", "pattern": "["}]}, "overrides[0].pattern", "not a regular expression"),
        ({"context": {"n_ctx": 0}}, "context.n_ctx", "outside of 1"),
        ({"context": {"n_ctx": 1 << 31}}, "context.n_ctx", "outside of 1"),
        ({"context": {"n_ctx": 1e3}}, "context.n_ctx", "whole number, not 1000.0"),
        ({"context": {"n_ctx": None}}, "context.n_ctx", "whole number, not null"),
        ({"context": {"n_batch": 0}}, "context.n_batch", "outside of 1"),
        ({"context": {"n_ubatch": -1}}, "context.n_ubatch", "outside of 1"),
        ({"context": {"n_seq_max": 257}}, "context.n_seq_max", "outside of 1 to 256"),
        ({"context": {"threads": 513}}, "context.threads", "outside of 1 to 512"),
        ({"context": {"type_k": "q9"}}, "context.type_k", "is not one of f32, f16"),
        ({"context": {"type_v": 8}}, "context.type_v", "text in quotes"),
        ({"context": {"flash_attn": True}}, "context.flash_attn", "text in quotes, not true"),
        ({"context": {"swa_full": 1}}, "context.swa_full", "true or false, not 1"),
        ({"context": {"load_mode": "magic"}}, "context.load_mode", "auto, mmap"),
        ({"context": {"nctx": 1}}, "context", 'unknown key "nctx"'),
    ],
)
def test_a_fault_is_one_sentence_with_its_place(changes: dict[str, object], place: str, words: str) -> None:
    with pytest.raises(LayoutError) as raised:
        parse(**changes)
    assert raised.value.location == place
    assert words in raised.value.reason
    assert str(raised.value).startswith("l.json: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "invalid JSON at line 1"),
        (b"\xff\xfe{}", "not UTF-8 text at byte 0"),
        (b"[]", "one object, not a list"),
        (b"null", "one object, not null"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b" " * (1 << 20) + b"{}", "larger than 1 MiB"),
        (b'{"version": 1, "version": 1}', '"version" occurs twice'),
        (b'{"version": 1, "runs": [{"device": "A", "device": "B"}]}', '"device" occurs twice'),
        (b'{"version": NaN}', "NaN is not a JSON number"),
        (b'{"version": 1, "tensor_split": {"A": -Infinity}}', "-Infinity is not a JSON number"),
        (b'{"version": ' + b"9" * 5000 + b"}", "a number in the file has 5000 digits"),
        (b'{"runs": []}', "version: this required key is missing"),
        (b'{"version": 1}', "runs: this required key is missing"),
        (b'{"version": 1, "model": {"name": "\\ud800"}, "runs": []}', "model.name: the text contains a lone surrogate"),
        # Python 3.13 tells the place of the comma, earlier ones that behind it.
        (b'{"version": 1,}', "invalid JSON at line 1, column 1"),
    ],
)
def test_what_is_no_layout_file_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(LayoutError, match=r"l\.json") as raised:
        parse_layout(data, source="l.json")
    assert words in str(raised.value)
    assert len(str(raised.value)) < 300


@given(st.binary(max_size=200) | st.text(max_size=200))
def test_any_bytes_give_a_layout_or_a_layout_error(data: bytes | str) -> None:
    with pytest.raises(LayoutError):
        parse_layout(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(any_layouts(), contexts, st.data())
def test_any_value_anywhere_gives_a_layout_or_a_layout_error(
    layout: Layout, context: ContextSettings, data: st.DataObject
) -> None:
    root = json.loads(encode_layout(LayoutFile("m", layout, context)))
    spot = root
    while True:
        key = data.draw(st.sampled_from(sorted(spot) if isinstance(spot, dict) else range(len(spot))))
        if not isinstance(spot[key], dict | list) or not spot[key] or data.draw(st.booleans()):
            break
        spot = spot[key]
    spot[key] = data.draw(json_values)
    try:
        file = parse_layout(json.dumps(root))
    except LayoutError:
        return
    assert parse_layout(encode_layout(file)) == file


def test_a_layout_for_another_model_is_refused() -> None:
    with pytest.raises(LayoutError, match="for a model of 10 layers, but this model has 32") as raised:
        parse_layout(json.dumps(document()), n_layers=32)
    assert raised.value.location == "model.layers"


def test_files_are_replaced_whole_and_faults_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "l.json"
    path.write_text("what was here before")
    file = parse()
    write_layout(path, file)
    assert read_layout(path, n_layers=10) == file
    assert [entry.name for entry in tmp_path.iterdir()] == ["l.json"]
    with pytest.raises(LayoutError, match=r"missing\.json: the layout file cannot be read \(No such file"):
        read_layout(tmp_path / "missing.json")
    with pytest.raises(LayoutError, match="cannot be written"):
        write_layout(tmp_path / "no" / "folder.json", file)
    with pytest.raises(LayoutError, match="cannot be read"):
        read_layout(tmp_path)


def test_a_link_is_followed_and_keeps_pointing(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "l.json")
    write_layout(tmp_path / "link.json", parse())
    assert (tmp_path / "link.json").is_symlink()
    assert read_layout(tmp_path / "l.json") == parse()


def test_what_is_left_to_us_is_written_and_read_again() -> None:
    context = ContextSettings(n_ctx=AUTO_CONTEXT, op_offload="auto", op_offload_min_batch=64)
    layout = Layout(4, (Run("CPU", 0, 3),), "CPU")
    data = encode_layout(LayoutFile("m", layout, context))
    assert json.loads(data)["context"]["n_ctx"] == "auto"
    assert parse_layout(data).context == context


def test_a_threshold_that_is_the_engines_own_is_not_written() -> None:
    data = encode_layout(LayoutFile("m", Layout(4, (Run("CPU", 0, 3),), "CPU"), ContextSettings()))
    assert "op_offload_min_batch" not in json.loads(data)["context"]


def test_free_names() -> None:
    assert free_name("one", ()) == "one"
    assert free_name("one", ("one", "one 2")) == "one 3"
