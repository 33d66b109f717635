"""The claim of a loaded model: whoever learns of a generation finds it begun."""

from __future__ import annotations

import threading

import pytest

from engine.errors import ArgumentError
from engine.runner.board import Board, Receivers
from engine.runner.runs import GenerationRun, RunnerState


def ready_board() -> Board:
    board = Board(Receivers(lambda event: None))
    board.set_state(RunnerState.READY)
    return board


def test_a_generation_handed_on_is_there_for_who_got_it() -> None:
    board = ready_board()
    handed: list[GenerationRun] = []
    found: list[GenerationRun | None] = []
    threads: list[threading.Thread] = []

    def put(generation: GenerationRun) -> bool:
        handed.append(generation)
        threads.append(threading.Thread(target=lambda: found.append(board.generation)))
        threads[0].start()
        threads[0].join(0.2)  # as long as the runner's thread may be ahead of the caller's
        return True

    board.begin_generation(put)
    threads[0].join(10)
    assert found == handed
    assert board.state is RunnerState.GENERATING
    assert not board.claim(RunnerState.STOPPING)


def test_a_generation_that_nobody_takes_has_not_begun() -> None:
    board = ready_board()
    with pytest.raises(ArgumentError, match="load one first"):
        board.begin_generation(lambda generation: False)
    assert board.generation is None
    assert board.claim(RunnerState.STOPPING)
    with pytest.raises(ArgumentError, match="load one first"):
        board.begin_generation(lambda generation: True)
