"""Fixtures and hooks for every test: no display, a temporary home, no left-over processes, no warnings in our log."""

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
        "same", hypothesis.settings.get_profile("layerdeck"), derandomize=True, database=None
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options `--all`, `--bundle` and `--engine`."""
    parser.addoption("--all", action="store_true", help="run the long tests as well")
    parser.addoption(
        "--bundle", action="store_true", help="run the tests of dist/, and those of the command line with it"
    )
    parser.addoption("--engine", default="", help="run the tests that need an engine with this backend and no others")


def pytest_configure(config: pytest.Config) -> None:
    """Set what must be known before the first test module is imported: platform, bundle, number of examples."""
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    if config.option.bundle:
        made = Path(__file__).resolve().parents[1] / "dist" / "layerdeck"
        os.environ.setdefault(selection.BUNDLE_VARIABLE, str(made))
    selection.begin_run(does_all=config.option.all)
    _register_profiles(selection.examples(60))
    # A new defect found by a new example is for `--all`, not for everybody's first run.
    is_random = config.option.all and not os.environ.get("CI")
    hypothesis.settings.load_profile("layerdeck" if is_random else "same")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of test workers: three for two cores, none for a few files."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return selection.worker_count(config.args, cores or 1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect exhaustive tests and most cases of slow ones, except with `--all` or `-m`.

    Tests of the bundle run only with `--bundle`, tests of an engine with another backend only with `--engine`.
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
    """Return what a test needs besides the set-up: "bundle", or the backend of an engine; empty for most tests."""
    if item.get_closest_marker("bundle"):
        return "bundle"
    engine = item.get_closest_marker("engine")
    return str(engine.args[0]) if engine else ""


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exclude the half million objects of the collected tests from garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Delete widgets and collect garbage only between tests with Qt, in the main thread: see `app/garbage.py`."""
    if "qapp" not in getattr(item, "fixturenames", ()):
        return (yield)
    # Imported here: tests without Qt do not need it.
    from PySide6.QtCore import QCoreApplication, QEvent

    gc.disable()
    try:
        return (yield)
    finally:
        # Qt deletes widgets in an event loop, and most tests run none after the end of their window. Each change of the
        # style sheet would take longer by the widgets that are left.
        if QCoreApplication.instance() is not None:
            QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)
        gc.collect(1)
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Replace lone surrogates in captured text: tests write them, and pytest-xdist cannot encode them."""
    report = yield
    report.sections = [(title, text.encode("utf-8", "backslashreplace").decode()) for title, text in report.sections]
    return report


def _keep(config: pytest.Config, items: list[pytest.Item], kept: list[pytest.Item]) -> None:
    """Deselect all items that are not in `kept`."""
    if len(kept) < len(items):
        stay = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in stay])
        items[:] = kept


@pytest.fixture
def qtbot(qapp: QApplication, request: pytest.FixtureRequest) -> PatientBot:
    """Replace pytest-qt's fixture, whose waits end after 5 seconds."""
    return PatientBot(request)


@pytest.fixture(scope="session", autouse=True)
def home_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the test run and the processes that it starts a temporary home folder."""
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
    """Fail the run if its shared fixtures leave a process or thread running."""
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
    """Fail a test in which a logger of Layerdeck gets a warning or an error.

    A test that expects one uses `caplog` and checks it.
    """
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
