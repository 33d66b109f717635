"""The context length of each slot."""

from __future__ import annotations

from engine.planning.settings.context_settings import AUTO_CONTEXT, ContextSettings


def test_each_request_has_its_part_of_the_context() -> None:
    assert ContextSettings(n_ctx=8192, n_seq_max=4).n_ctx_each == 2048
    assert ContextSettings(n_ctx=8192, n_seq_max=4, kv_unified=True).n_ctx_each == 8192
    assert ContextSettings(n_ctx=AUTO_CONTEXT, n_seq_max=4).n_ctx_each == AUTO_CONTEXT


def test_more_requests_keep_the_context_of_each() -> None:
    four = ContextSettings(n_ctx=4096).with_requests(4)
    assert (four.n_ctx, four.n_seq_max) == (16384, 4)
    assert four.with_requests(1) == ContextSettings(n_ctx=4096)
    unified = ContextSettings(n_ctx=4096, kv_unified=True)
    assert unified.with_requests(4).n_ctx == 4096


def test_a_context_that_is_left_open_stays_open() -> None:
    assert ContextSettings(n_ctx=AUTO_CONTEXT).with_requests(4).n_ctx == AUTO_CONTEXT
