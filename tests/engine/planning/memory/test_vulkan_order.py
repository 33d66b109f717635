"""The order of graph nodes on Vulkan: within a split, and across sections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.base.values import replace
from engine.planning.memory.compute_graph.building import graph_tables
from engine.planning.memory.compute_graph.ggml.graph import Graph, Tensor
from engine.planning.memory.compute_graph.ggml.pass_cache import SectionName
from engine.planning.memory.compute_graph.ggml.sections import DistantReadError, Section, partition_graph
from engine.planning.memory.compute_graph.ggml.vulkan_order import Order, SeenNode, reorder
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import FlashAttention
from tests.support.selection import some
from tests.support.truth import TruthCase, stand_in_rig, truth_cases, truth_model

OPS = ("mul_mat", "add", "mul", "rms_norm", "unary", "rope", "scale", "view", "reshape", "set_rows", "soft_max")


def _seen_node(nodes: Sequence[Tensor]) -> list[SeenNode]:
    uses = Counter(source for node in nodes for source in node.src)
    return [
        SeenNode(
            node,
            id(node),
            id(node.view_src or node),
            tuple([id(source) for source in node.src]),
            tuple([id(source.view_src or source) for source in node.src]),
            tuple([source.op == "none" for source in node.src]),
            uses[node],
        )
        for node in nodes
    ]


def _reorder(nodes: Sequence[Tensor]) -> Order:
    return reorder(_seen_node(nodes))


def _words(graph: Graph) -> list[str]:
    return [graph.nodes[index].op for index in _reorder(graph.nodes).indices]


@st.composite
def _graphs(draw: st.DrawFn) -> list[Tensor]:
    """Draw nodes of one shape, each reading one or two of those before it."""
    graph = Graph()
    made = [graph.new_input("f32", 64, 4), graph.new_input("f32", 64, 4)]
    for _ in range(draw(st.integers(1, 40))):
        op = draw(st.sampled_from(OPS))
        first, second = (draw(st.sampled_from(made)) for _ in range(2))
        if op in ("view", "reshape"):
            made.append(graph.view(first, first.ne, op=op))
        elif op == "set_rows":
            made.append(graph.write(op, second, first, made[0]))
        else:
            made.append(graph.like(op, first, second))
    return made[2:]


@given(nodes=_graphs())
def test_every_node_is_computed_once_and_behind_what_it_reads(nodes: list[Tensor]) -> None:
    order = _reorder(nodes)
    assert sorted(order.indices) == list(range(len(nodes)))
    turn = {id(nodes[index]): number for number, index in enumerate(order.indices)}
    for node in nodes:
        assert all(turn[id(source)] < turn[id(node)] for source in node.src if id(source) in turn)


@given(nodes=_graphs())
def test_what_writes_over_a_tensor_stays_behind_those_that_read_it(nodes: list[Tensor]) -> None:
    order = _reorder(nodes)
    turn = {id(nodes[index]): number for number, index in enumerate(order.indices)}
    for number, node in enumerate(nodes):
        if node.op != "set_rows":
            continue
        target = node.view_src or node
        for before in nodes[:number]:
            reads = before.op not in ("view", "reshape") and any(
                (each.view_src or each) is target for each in before.src
            )
            assert not reads or turn[id(before)] < turn[id(node)]


@given(nodes=_graphs(), data=st.data())
def test_a_split_can_be_put_in_order_part_by_part(nodes: list[Tensor], data: st.DataObject) -> None:
    seen, whole = _seen_node(nodes), _reorder(nodes).indices
    end = data.draw(st.integers(0, len(nodes)))
    first = reorder(seen, end=end).indices
    assert whole[: len(first)] == first
    assert set(range(end)) <= set(first)
    distance = reorder(seen[end:], used={index - end for index in first if index >= end}, goes_on=True).indices
    assert whole[len(first) :] == tuple(index + end for index in distance)


def test_products_that_need_nothing_of_each_other_are_computed_side_by_side() -> None:
    graph = Graph()
    source = graph.new_input("f32", 64, 4)
    query, key, value = (graph.mul_mat(graph.new_input("f32", 64, 64), source) for _ in range(3))
    for each in (query, key):
        graph.build_forward_expand(graph.like("rope", graph.reshape(each, 16, 4, 4), graph.new_input("i32", 4)))
    graph.build_forward_expand(graph.scale(value))
    assert _words(graph) == ["mul_mat", "mul_mat", "mul_mat", "reshape", "reshape", "rope", "rope", "scale"]


def test_a_norm_is_computed_with_its_weights_though_something_else_could_come_between() -> None:
    graph = Graph()
    source = graph.new_input("f32", 64, 4)
    normed = graph.mul(graph.like("rms_norm", source), graph.new_input("f32", 64))
    graph.build_forward_expand(normed)
    graph.build_forward_expand(graph.scale(source))
    assert _words(graph) == ["rms_norm", "mul", "scale"]


def test_what_the_choice_of_experts_reads_is_kept_until_it_is_done() -> None:
    graph = Graph()
    logits = graph.mul_mat(graph.new_input("f32", 64, 8), graph.new_input("f32", 64, 4))
    chances = graph.like("soft_max", logits)
    chosen = graph.argsort_top_k(chances, 2)
    weights = graph.reshape(chances, 1, 8, 4)
    graph.build_forward_expand(chances)
    graph.build_forward_expand(weights)
    graph.build_forward_expand(chosen)
    graph.build_forward_expand(graph.get_rows(weights, chosen))
    ops = [node.op for node in graph.nodes]
    assert ops[1:] == ["soft_max", "reshape", "argsort", "view", "get_rows"]
    order = _reorder(graph.nodes)
    ((until, readings),) = order.kept
    assert graph.nodes[until].op == "get_rows"
    assert [graph.nodes[index].src[number] for index, number in readings] == [logits]


NAMES = ("falcon-dense", "gemma4-moe", "llama-dense", "mamba2-dense", "qwen3next-moe")


def _cases(name: str, flash_attn: FlashAttention) -> list[TruthCase]:
    """Return real loads of a model as Vulkan devices would have them."""
    rig = stand_in_rig("vulkan")
    cases = [case for case in truth_cases(name) if case.name.startswith("rpc real ") and case.refused is None]
    return [
        replace(case, rig=rig, context=msgspec.structs.replace(case.context, flash_attn=flash_attn))
        for case in some([case for case in cases if case.layout.split_mode == "layer"])
    ]


def _sizes(name: str, cases: list[TruthCase]) -> list[dict[str, int]]:
    buft = ModelMemory(truth_model(name))
    found = (buft.estimate(case.layout, case.context, case.rig).devices for case in cases)
    return [{device_id: each.compute_bytes for device_id, each in devices.items()} for devices in found]


def _refuse(chain: graph_tables.SectionMaker, name: SectionName) -> Section:
    """Have the graph made as a whole."""
    raise DistantReadError


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("flash_attn", ["auto", "off"])
def test_sections_are_put_in_order_as_the_whole_graph_is(
    name: str, flash_attn: FlashAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = _cases(name, flash_attn)
    found = _sizes(name, cases)
    assert all(found)
    monkeypatch.setattr(graph_tables.SectionMaker, "section", _refuse)
    monkeypatch.setattr(graph_tables, "partition_graph", lambda graph, _, common: partition_graph(graph, (), common))
    assert _sizes(name, cases) == found
