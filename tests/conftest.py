"""What holds for every test: no display, no files of the user, nothing left running, no unexpected log warning."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.support import selection
from tests.support.leftovers import Watch, record_thread_starts
from tests.support.patient_bot import PatientBot

if TYPE_CHECKING:
    from PySide6.QtWidgets import QApplication

OUR_LOGGERS = ("app", "engine", "layerdeck", "widgets", "resources")


def _register_profiles(count: int) -> None:
    hypothesis.settings.register_profile(
        "layerdeck",
        max_examples=count,
        deadline=None,  # no assertions about time: the machine may be busy
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.register_profile(
        "ci", hypothesis.settings.get_profile("layerdeck"), derandomize=True, database=None
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the switch for the long run."""
    parser.addoption("--all", action="store_true", help="run the long tests as well")
    parser.addoption(
        "--bundle", action="store_true", help="run the tests of dist/, and those of the command line with it"
    )
    parser.addoption("--engine", default="", help="run the tests that need an engine with this backend and no others")


def pytest_configure(config: pytest.Config) -> None:
    """Choose what has to be known before the first test module is imported."""
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    if config.option.bundle:
        made = Path(__file__).resolve().parents[1] / "dist" / "layerdeck"
        os.environ.setdefault(selection.BUNDLE_VARIABLE, str(made))
    selection.begin_run(does_all=config.option.all)
    _register_profiles(selection.examples(60))
    hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "layerdeck")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Take three workers for two cores, none beside this process where there is little to do."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return selection.worker_count(config.args, cores or 1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the exhaustive tests and most of many cases out, unless all are wanted, or those of a marker.

    Tests of the bundle, and those of an engine with another backend, run alone.
    """
    if config.option.bundle:
        _keep(config, items, [item for item in items if any(map(item.get_closest_marker, ("bundle", "program")))])
    else:
        _keep(config, items, [item for item in items if _beside_the_set_up(item) == config.option.engine])
    if config.option.all or config.option.markexpr:
        return
    dropped = set(selection.left_out(items, config.args))
    kept = [item for item in items if item not in dropped]
    spare = selection.spare_cases([item.nodeid for item in kept], config.args)
    _keep(config, items, [item for item in kept if item.nodeid not in spare])


def _beside_the_set_up(item: pytest.Item) -> str:
    """Return what a test needs that the set-up alone does not make: the bundle, or an engine by its backend."""
    if item.get_closest_marker("bundle"):
        return "bundle"
    engine = item.get_closest_marker("engine")
    return str(engine.args[0]) if engine else ""


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Keep the half million objects that collected tests are out of garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make captured text sendable: tests write halves of characters, which the process that reports cannot be told."""
    report = yield
    report.sections = [(title, text.encode("utf-8", "backslashreplace").decode()) for title, text in report.sections]
    return report


def _keep(config: pytest.Config, items: list[pytest.Item], kept: list[pytest.Item]) -> None:
    """Leave out what is not among `kept`."""
    if len(kept) < len(items):
        stay = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in stay])
        items[:] = kept


@pytest.fixture
def qtbot(qapp: QApplication, request: pytest.FixtureRequest) -> PatientBot:
    """Take the place of pytest-qt's own, which gives up after 5 seconds."""
    return PatientBot(request)


@pytest.fixture(scope="session", autouse=True)
def home_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the session, and the processes it starts, a home of its own."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HOME", "USERPROFILE"):
            patch.setenv(name, str(home))
        for name in ("CACHE_HOME", "CONFIG_HOME", "DATA_HOME", "STATE_HOME", "RUNTIME_DIR"):
            folder = home / name.lower()
            folder.mkdir(mode=0o700)
            patch.setenv(f"XDG_{name}", str(folder))
        yield


@pytest.fixture(scope="session", autouse=True)
def session_leaves_nothing(home_of_tests: None) -> Iterator[None]:
    """Fail a run whose shared fixtures leave something running."""
    with record_thread_starts():
        watch = Watch()
        yield
        _fail_on(watch.leftovers(), "Left behind by the shared fixtures of this run")


@pytest.fixture(autouse=True)
def test_leaves_nothing() -> Iterator[None]:
    """Fail a test that leaves a process or a thread running."""
    watch = Watch()
    yield
    _fail_on(watch.leftovers(), "Left behind by this test")


@pytest.fixture(autouse=True)
def log_stays_calm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which our code logs a warning or worse; a test that expects one asks for `caplog` and looks."""
    seen: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name.partition(".")[0] in OUR_LOGGERS:
                seen.append(f"{record.levelname} {record.name}: {record.getMessage()}")

    collector = Collector(logging.WARNING)
    logging.getLogger().addHandler(collector)
    # Commands silence our log, which must not outlast the test: another one waits for an entry.
    ours = logging.getLogger("layerdeck")
    before = ours.level, ours.propagate
    yield
    ours.setLevel(before[0])
    ours.propagate = before[1]
    logging.getLogger().removeHandler(collector)
    if "caplog" not in request.fixturenames:
        _fail_on(seen, "Logged during this test")


def _fail_on(lines: list[str], title: str) -> None:
    if lines:
        pytest.fail("\n  ".join([f"{title}:", *lines]), pytrace=False)
