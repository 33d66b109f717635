"""The bundle alone: without the system's Python and without PATH, with its own children and window."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from PIL import Image, ImageChops, ImageGrab

from engine.model.demo.speaking import FILE_NAME, SAMPLE_PROMPTS
from resources.bundle.contents import program_files
from resources.bundle.recipe import is_of_the_system
from tests.support.desktop import Desktop, open_desktop
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from widgets.common.palette import LIGHT

pytestmark = pytest.mark.bundle

NOBODY = 65534


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Nothing but a home."""
    home = tmp_path / "home"
    home.mkdir()
    return {"HOME": str(home)}


@pytest.fixture
def desktop() -> Iterator[Desktop]:
    with open_desktop() as opened:
        yield opened


def run_cli(bundle: Path, environment: Mapping[str, str], *words: str) -> str:
    done = subprocess.run(
        [str(bundle / "layerdeck-cli"), *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_finds_devices_loads_and_answers(bundle: Path, environment: dict[str, str], tmp_path: Path) -> None:
    assert json.loads(run_cli(bundle, environment, "devices"))["host"]["total_bytes"] > 0
    model = write_tiny_llama(tmp_path / "tiny.gguf", n_layers=2)
    words = ("load", str(model), "--ctx", "256", "--prompt", "hello", "-n", "4", "--json")
    events = [json.loads(line) for line in run_cli(bundle, environment, *words).splitlines()]
    kinds = [event["event"] for event in events]
    assert "loaded" in kinds
    assert kinds[-1] == "done"
    assert run_cli(bundle, environment, "plan", str(model), "--ctx", "256")


@pytest.fixture
def home_of_nobody() -> Iterator[Path]:
    """Return the home of the user that `as_nobody` makes of root; what pytest has is root's alone."""
    with tempfile.TemporaryDirectory(prefix="layerdeck-home-") as home:
        if os.geteuid() == 0:
            os.chown(home, NOBODY, NOBODY)
        yield Path(home)


def as_nobody() -> list[str]:
    """Return what runs a program as somebody who cannot write beside the bundle: root could, anyone else cannot."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]


def test_a_user_who_cannot_write_beside_it_loads_and_is_answered(bundle: Path, home_of_nobody: Path) -> None:
    model = home_of_nobody / "tiny.gguf"
    for words in (
        ("demo", str(model), "--generated"),
        ("devices",),
        ("load", str(model), "--ctx", "256", "--prompt", "hello", "-n", "4", "--json"),
    ):
        done = subprocess.run(
            [*as_nobody(), str(bundle / "layerdeck-cli"), *words],
            env={"HOME": str(home_of_nobody)},
            cwd=home_of_nobody,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["event"] == "done"
    tried = subprocess.run([*as_nobody(), "touch", str(bundle / "mine")], capture_output=True, check=False)
    assert tried.returncode != 0


def test_children_go_with_a_killed_parent(bundle: Path, environment: dict[str, str]) -> None:
    lab = psutil.Popen(
        [str(bundle / "layerdeck-cli"), "rig", "lab", "--workers", "64MiB,64MiB"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: len(lab.children(recursive=True)) >= 2, lab)
    children = lab.children(recursive=True)
    assert all("layerdeck" in child.name() for child in children)
    lab.kill()
    lab.wait()
    _, alive = psutil.wait_procs(children, timeout=DEADLINE_S)
    assert not alive


def test_the_window_opens_and_a_second_start_hands_its_file_over(
    bundle: Path, environment: dict[str, str], desktop: Desktop, tmp_path: Path
) -> None:
    environment |= {"DISPLAY": desktop.environment["DISPLAY"]}
    program = [str(bundle / "layerdeck")]
    first = psutil.Popen(program, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: "Layerdeck" in titles(desktop), first)
        # Its mark is written when everything behind the first picture is there, and it has time to answer.
        marks = Path(environment["HOME"]) / ".local" / "share" / "layerdeck" / "running"
        wait_until(lambda: any(marks.glob("*.json")), first)
        model = write_tiny_llama(tmp_path / "handed-over.gguf", n_layers=2)
        second = subprocess.run([*program, str(model)], env=environment, timeout=DEADLINE_S, check=False)
        assert second.returncode == 0
        wait_until(lambda: was_opened(model, environment), first)
        # As a double click in a file browser has it, after "Add to menu".
        words = environment | {"PATH": os.environ["PATH"]}
        subprocess.run([str(bundle / "add-to-menu")], env=words, check=True, stdout=subprocess.DEVNULL)
        entry = Path(environment["HOME"]) / ".local" / "share" / "applications" / "layerdeck.desktop"
        other = write_tiny_llama(tmp_path / "double click.gguf", n_layers=2)
        subprocess.run(["gio", "launch", str(entry), str(other)], env=words, timeout=DEADLINE_S, check=True)
        wait_until(lambda: was_opened(other, environment), first)
    finally:
        first.terminate()
        assert first.wait(DEADLINE_S) == 0


def test_the_first_page_leads_to_an_answer_and_a_kill_leaves_nothing(
    bundle: Path, environment: dict[str, str], desktop: Desktop
) -> None:
    environment |= {"DISPLAY": desktop.environment["DISPLAY"]}
    window = psutil.Popen(
        [str(bundle / "layerdeck"), "--theme", "light"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    children: list[psutil.Process] = []
    try:
        data = Path(environment["HOME"]) / ".local" / "share" / "layerdeck"
        wait_until(lambda: any((data / "running").glob("*.json")), window)
        # The only button of this colour between the panels: "Talk to a small model".
        click_coloured(desktop, LIGHT.accent, (0.2, 0.3, 0.75, 0.6), window)
        # The badge of the last load, the line to write in, and below it "Send", coloured when it can be used.
        wait_until(lambda: coloured(desktop, LIGHT.good, (0.18, 0.8, 0.5, 0.9)) is not None, window)
        desktop.click(1120, 700)
        desktop.type_text(SAMPLE_PROMPTS[0])
        click_coloured(desktop, LIGHT.accent, (0.8, 0.91, 1.0, 1.0), window)
        wait_until(lambda: "photosynthesis" in answers(data / "chats.sqlite3"), window)
        children = window.children(recursive=True)
        assert len(children) >= 3, "an engine, and workers of the lab"
    finally:
        window.kill()
        window.wait()
    _, alive = psutil.wait_procs(children, timeout=DEADLINE_S)
    assert not alive


def coloured(
    desktop: Desktop, colour: str, part: tuple[float, float, float, float]
) -> tuple[int, int, int, int] | None:
    """Return the frame of what has a colour within a part (shares of width and height) of the screen."""
    screen = ImageGrab.grab(xdisplay=desktop.environment["DISPLAY"]).convert("RGB")
    left, top = round(part[0] * screen.width), round(part[1] * screen.height)
    shown = screen.crop((left, top, round(part[2] * screen.width), round(part[3] * screen.height)))
    bands = ImageChops.difference(shown, Image.new("RGB", shown.size, colour)).split()
    differs = ImageChops.lighter(ImageChops.lighter(bands[0], bands[1]), bands[2])
    frame = differs.point(lambda value: 255 if value == 0 else 0).getbbox()
    return None if frame is None else (frame[0] + left, frame[1] + top, frame[2] + left, frame[3] + top)


def click_coloured(
    desktop: Desktop, colour: str, part: tuple[float, float, float, float], window: psutil.Popen
) -> None:
    """Click the middle of what has a colour, as soon as something has it."""
    wait_until(lambda: coloured(desktop, colour, part) is not None, window)
    frame = coloured(desktop, colour, part)
    assert frame is not None
    desktop.click((frame[0] + frame[2]) // 2, (frame[1] + frame[3]) // 2)


def answers(path: Path) -> str:
    """Return what models have said in the conversations that are kept at `path`."""
    if not path.exists():
        return ""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as kept:
        return "".join(row[0] for row in kept.execute("SELECT content FROM message WHERE role = 'assistant'"))


def was_opened(model: Path, environment: Mapping[str, str]) -> bool:
    """Say whether a window has noted `model` among what was opened last."""
    settings = Path(environment["HOME"]) / ".config"
    return any(model.name in read(path) for path in settings.rglob("*") if path.is_file())


def wait_until(condition: Callable[[], bool], process: psutil.Popen) -> None:
    """Wait until `condition` holds; `process`, whose doing it is, must not end before."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        with contextlib.suppress(psutil.TimeoutExpired):
            raise AssertionError(f"it ended with {process.wait(0.05)}")


def titles(desktop: Desktop) -> str:
    """Return the names of the windows on the screen."""
    words = ["xdotool", "search", "--onlyvisible", "--name", ".", "getwindowname", "%@"]
    return subprocess.run(words, env=desktop.environment, capture_output=True, text=True, check=False).stdout


def read(path: Path) -> str:
    return path.read_text("utf-8", "replace")


def test_its_size_is_under_the_limit(dist: Path) -> None:
    assert sum(path.stat().st_size for path in program_files(dist / "layerdeck")) < 250_000_000


def test_the_model_that_answers_is_in_it(bundle: Path, environment: dict[str, str], tmp_path: Path) -> None:
    target = tmp_path / "demo.gguf"
    told = json.loads(run_cli(bundle, environment, "demo", str(target), "--json"))
    assert told == {"path": str(target), "size_bytes": 98_362_432}
    words = ("load", str(target), "--ctx", "256", "--prompt", SAMPLE_PROMPTS[0], "-n", "32", "--temp", "0")
    assert "photosynthesis" in run_cli(bundle, environment, *words)


def test_what_drivers_use_too_is_the_systems(dist: Path) -> None:
    names = {path.name for path in (dist / "layerdeck").rglob("*.so*")}
    assert "libllama.so" in names
    assert sorted(filter(is_of_the_system, names)) == []
    (package,) = dist.glob("*.deb")
    fields = subprocess.run(
        ["dpkg-deb", "--field", str(package), "Depends"], capture_output=True, text=True, check=True
    ).stdout
    needed = {field.split()[0] for field in fields.split(",")}
    assert {"libc6", "libgcc-s1", "libstdc++6", "libx11-6", "libegl1", "libfontconfig1"} <= needed
    assert not {"libssl3", "libsqlite3-0", "zlib1g"} & needed, "they are in it"


def test_programs_that_it_starts_find_the_systems_libraries(
    bundle: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """A tool that the doctor asks for its version writes down what it is given."""
    tools, told = tmp_path / "tools", tmp_path / "told"
    tools.mkdir()
    (tools / "nvcc").write_text(f'#!/bin/sh\n/usr/bin/env > "{told}"\n')
    (tools / "nvcc").chmod(0o755)
    environment |= {"PATH": str(tools), "LD_LIBRARY_PATH": "/opt/mine"}
    run_cli(bundle, environment, "doctor")
    assert "LD_LIBRARY_PATH=/opt/mine" in told.read_text().splitlines()


def test_the_licences_of_what_is_in_it_are_named(dist: Path) -> None:
    text = read(dist / "layerdeck" / "THIRD-PARTY-NOTICES.txt")
    titles = {line for before, line in pairwise(text.splitlines()) if before == "=" * 78}
    for name in ("llama.cpp and ggml", FILE_NAME, "GNU General Public License, version 3"):
        assert name in titles
    for name in ("PySide6_Essentials", "shiboken6", "numpy", "llama_cpp_python", "msgspec"):
        assert any(title.startswith(f"{name} ") for title in titles)
    assert "GNU LESSER GENERAL PUBLIC LICENSE\n" in text
    assert "GNU GENERAL PUBLIC LICENSE\n" in text
    assert "The ggml authors" in text
    assert (dist / "layerdeck" / "LICENSE").exists()


def test_the_tarball_is_added_to_the_menu_and_taken_out_again(
    bundle: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    share = Path(environment["HOME"]) / ".local" / "share"
    environment |= {"PATH": os.environ["PATH"]}
    subprocess.run([str(bundle / "add-to-menu")], env=environment, check=True, stdout=subprocess.DEVNULL)
    entry = (share / "applications" / "layerdeck.desktop").read_text("utf-8")
    assert f'Exec=env "{str(bundle).replace("%", "%%")}/layerdeck" %F' in entry
    answer = subprocess.run(
        ["xdg-mime", "query", "filetype", str(write_tiny_llama(tmp_path / "model.gguf"))],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == "application/x-gguf"
    (share / "layerdeck").mkdir(exist_ok=True)
    (share / "layerdeck" / "chats.sqlite").write_text("kept")
    subprocess.run([str(bundle / "add-to-menu"), "--remove"], env=environment, check=True, stdout=subprocess.DEVNULL)
    assert not (share / "applications" / "layerdeck.desktop").exists()
    assert (share / "layerdeck" / "chats.sqlite").exists()


def test_the_package_is_in_order(dist: Path) -> None:
    (package,) = dist.glob("*.deb")
    found = subprocess.run(
        ["lintian", "--fail-on", "error", str(package)],
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in found.stdout.splitlines() if line.startswith("E:")]
    assert errors == []


def test_the_package_is_installed_and_removed_in_a_root_of_its_own(dist: Path, tmp_path: Path) -> None:
    (package,) = dist.glob("*.deb")
    root = tmp_path / "root"
    database = root / "var" / "lib" / "dpkg"
    (database / "updates").mkdir(parents=True)
    (database / "info").mkdir()
    (database / "status").write_text("")
    # Its script uses the shell of here: there is none in that root.
    dpkg = [
        "dpkg",
        f"--root={root}",
        "--force-depends",
        "--force-not-root",
        "--force-script-chrootless",
        "--no-triggers",
    ]
    subprocess.run([*dpkg, "--install", str(package)], check=True, capture_output=True)
    program = root / "usr" / "bin" / "layerdeck-cli"
    done = subprocess.run([str(program), "--help"], env={"HOME": str(tmp_path)}, capture_output=True, check=False)
    assert done.stdout.startswith(b"usage: layerdeck-cli")
    assert (root / "usr" / "share" / "applications" / "layerdeck.desktop").exists()
    told = subprocess.run([*dpkg, "--purge", "layerdeck"], check=True, capture_output=True, text=True).stdout
    assert told.count("chats and engine packs in\n~/.local/share/layerdeck") == 1
    assert not (root / "usr" / "lib" / "layerdeck").exists()
    assert not program.exists()


def test_desktop_data_is_valid(dist: Path) -> None:
    share = dist / "layerdeck" / "share"
    subprocess.run(["desktop-file-validate", str(share / "applications" / "layerdeck.desktop")], check=True)
    page = share / "metainfo" / "io.github.layerdeck.layerdeck.metainfo.xml"
    subprocess.run(["appstreamcli", "validate", "--no-net", str(page)], check=True, capture_output=True)
