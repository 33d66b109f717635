"""The registry of architectures: one record for each, and no other table that names them."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from engine.model.architectures.record import Architecture, GraphRecord, Style
from engine.model.architectures.registry import ARCHITECTURES, RECORD_MODULES, architecture_rules, find_architecture
from engine.planning.memory.compute_graph import models
from engine.planning.memory.compute_graph.building.graph import find_builder
from tests.support.truth import MODEL_NAMES, truth_model

ROOT = Path(__file__).resolve().parents[4]
HOME = ROOT / "engine" / "model" / "architectures"
WRITES_MODELS = ROOT / "engine" / "model" / "demo"
"""What writes files names the one architecture and the one tokeniser that it writes."""
WORD = re.compile(r"[\w.-]+")
BUILDERS = {
    name
    for record in ARCHITECTURES.values()
    for graph in (record.graph, record.mtp)
    if graph is not None
    for name in (
        graph.embed,
        graph.layer,
        graph.attention,
        graph.recurrence,
        graph.before_layers,
        graph.after_layers,
        graph.logits,
    )
    if name is not None
}


def _literals(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the words of strings that are values, with their lines; docstrings are none."""
    source = path.read_text(encoding="utf-8")
    # Most modules name no architecture, not even in a comment.
    if ARCHITECTURES.keys().isdisjoint(WORD.findall(source)):
        return
    docstrings = set[int]()
    # A statement comes before the value in it.
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr):
            docstrings.add(id(node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            # One name, or a list of them; sentences for people may speak of models.
            words = node.value.split()
            if all(word in ARCHITECTURES for word in words):
                yield from ((node.lineno, word) for word in words)


def test_no_other_module_names_architectures() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for folder in ("app", "engine", "widgets")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if HOME not in path.parents and WRITES_MODELS not in path.parents
        for line, word in _literals(path)
    ]
    assert found == []


def _written_names(module: ModuleType) -> Iterator[str]:
    """Yield the keys of the module's `RECORDS` as they are written, where a later one would replace an earlier one."""
    tree = ast.parse(Path(module.__file__ or "").read_text(encoding="utf-8"))
    written = next(
        node.value for node in tree.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "RECORDS"
    )
    assert isinstance(written, ast.Dict)
    for key, value in zip(written.keys, written.values, strict=True):
        name = key if key is not None else value.args[0] if isinstance(value, ast.Call) else None
        assert isinstance(name, ast.Constant), ast.unparse(value)
        yield from str(name.value).split()


def test_every_name_has_one_record() -> None:
    written = [name for module in RECORD_MODULES for name in _written_names(module)]
    assert sorted(written) == sorted(ARCHITECTURES)


def test_every_module_of_records_is_registered() -> None:
    registered = {Path(module.__file__ or "").name for module in RECORD_MODULES}
    holding = {path.name for path in HOME.glob("*.py") if "\nRECORDS: Records = " in path.read_text(encoding="utf-8")}
    assert registered == holding


def test_every_recorded_model_has_a_record() -> None:
    assert [name for name in MODEL_NAMES if find_architecture(truth_model(name).architecture) is None] == []


def test_a_name_without_a_record_has_the_rules_of_a_plain_model() -> None:
    assert find_architecture("unheard-of") is None
    assert architecture_rules("unheard-of") == Architecture()


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_builders_that_records_name_are_there(name: str) -> None:
    assert next(iter(inspect.signature(find_builder(name)).parameters)) == "ctx"


def _builder_modules() -> list[ModuleType]:
    paths = sorted(Path(models.__path__[0]).glob("*.py"))
    return [import_module(f"{models.__name__}.{path.stem}") for path in paths if path.stem != "__init__"]


def test_no_layer_is_built_that_no_record_names() -> None:
    layers = {
        f"{module.__name__.rpartition('.')[2]}.{name}"
        for module in _builder_modules()
        for name, value in vars(module).items()
        if name.endswith("_layer") and inspect.isfunction(value) and value.__module__ == module.__name__
    }
    assert {name for name in layers if not name.partition(".")[2].startswith("_")} <= BUILDERS


def test_the_file_decides_where_the_record_asks_it() -> None:
    model = truth_model("gptneox-parallel")
    record = ARCHITECTURES[model.architecture].graph
    assert record is not None
    assert record.style_of(model).parallel == "apart"
    assert GraphRecord(Style(layer_norm=True)).style_of(model) == Style(layer_norm=True)


def test_every_record_has_a_recording_but_for_those_that_llama_cpp_could_not_be_asked_about() -> None:
    recorded = {truth_model(name).architecture for name in MODEL_NAMES}
    drafters = {"dflash", "eagle3", "gemma4-assistant"}
    assert ARCHITECTURES.keys() - recorded == drafters | {"deepseek2-ocr", "plm", "step35", "wavtokenizer-dec"}
