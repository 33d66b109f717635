"""Runs a long build as a child: progress on the terminal, output in a log file, and the cause of a failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from resources.setup.build_plan import ENGINE
from resources.setup.errors import SetupError
from resources.setup.failures import explain
from resources.setup.progress import Progress

TAIL_LINES = 30


def run_logged(command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
    """Run a build with progress on the terminal; its output goes to the file `log`.

    Raises:
        SetupError: the build failed. The text has the last lines of output, the cause and the remedy.
    """
    progress = Progress(sys.stdout)
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):
        output = process.stdout
        assert output is not None

        def read() -> None:
            for line in output:
                file.write(line)
                tail.append(line.rstrip())
                progress.see(line)

        reader = threading.Thread(target=read, name="build output")
        reader.start()
        try:
            while reader.is_alive():
                progress.tick()
                reader.join(timeout=0.5)
        except BaseException:
            stop_build(process)
            raise
        finally:
            reader.join()
            progress.end()
    if process.returncode != 0:
        cause, remedy = explain(log.read_text(encoding="utf-8", errors="replace"))
        failed = f"The build of {ENGINE} failed: {cause}; {remedy}. The whole log is {log}"
        raise SetupError("\n".join([*tail, failed]), exit_code=1)


def stop_build(process: subprocess.Popen[str]) -> None:
    """Terminate a build with the compilers that it started."""
    if sys.platform == "win32":
        process.terminate()
    else:
        os.killpg(process.pid, signal.SIGTERM)
