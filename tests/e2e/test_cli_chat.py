"""`chat` with the real engine and a database of its own: answers, stops, kills and restarts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.cli.talk import NOT_STORED, STORED_AGAIN
from app.paths import APPLICATION
from app.settings import Settings
from engine.base.errors import ChatError
from engine.chat.conversation import title_of
from engine.chat.message import Message
from engine.chat.presets import Preset, write_presets
from engine.chat.store import ChatStore
from engine.planning.plan.plan import Plan
from engine.runtime.session.events import Done
from tests.support.command_line import ROOT, program, run_here
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from tests.support.pictures import picture
from tests.support.side_models import write_tiny_ear, write_tiny_projector
from tests.support.sounds import tone

pytestmark = pytest.mark.program

Event = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=2)


class Home:
    """A user's folders."""

    def __init__(self, folder: Path) -> None:
        self.environment = {
            **os.environ,
            "XDG_DATA_HOME": str(folder / "data"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "XDG_CONFIG_HOME": str(folder / "config"),
        }
        self.settings = folder / "config" / APPLICATION / "layerdeck.ini"
        self.data = folder / "data" / APPLICATION
        self.states = folder / "cache" / APPLICATION / "states"

    def run(self, *words: str | Path, lines: str = "") -> subprocess.CompletedProcess[str]:
        """Run `chat` to its end with these lines as its input."""
        return subprocess.run(
            [*program(), "chat", *map(str, words)],
            cwd=ROOT,
            env=self.environment,
            input=lines,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def events(self, *words: str | Path, lines: str = "") -> list[Event]:
        done = self.run(*words, "--json", lines=lines)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    @contextmanager
    def start(self, *words: str | Path) -> Iterator[subprocess.Popen[str]]:
        """Start `chat` with pipes; what is left of it at the end of the block is killed."""
        with subprocess.Popen(
            [*program(), "chat", *map(str, words), "--json"],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def path(self, conversation: str) -> tuple[Message, ...]:
        """Return what is kept of a conversation and shown."""
        with closing(ChatStore(self.data / "chats.sqlite3")) as store:
            return store.tree(conversation).path


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_text_that_is_not_kept_is_said_to_be_so(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    right, n_written = ChatStore.append, 0

    def append(store: ChatStore, *added: Any, **more: Any) -> Future[None]:
        nonlocal n_written
        n_written += 1
        written = right(store, *added, **more)
        if n_written != 1:
            return written
        refused: Future[None] = Future()
        refused.set_exception(ChatError("The disk is full."))
        return refused

    monkeypatch.setattr(ChatStore, "append", append)
    answer = run_here(capsys, "chat", model, "--prompt", "Tell a story", "--max-tokens", "40", "--json")
    events = [json.loads(line) for line in answer.out.splitlines()]
    told = [event.get("message", "text") for event in events if event["event"] in ("notice", "token")]
    assert told[0] == f"The disk is full. {NOT_STORED}", "said before the first text that is not kept"
    assert (told.count("text") > 0, told.count(told[0]), told.count(STORED_AGAIN)) == (True, 1, 1)


def of(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event["event"] == kind]


def text_of(events: list[Event]) -> str:
    return "".join(event["text"] for event in of(events, "token"))


def wait_for(process: subprocess.Popen[str], kind: str, count: int = 1) -> list[Event]:
    """Read events until so many of a kind have come."""
    assert process.stdout is not None
    events: list[Event] = []
    for line in process.stdout:
        events.append(json.loads(line))
        count -= events[-1]["event"] == kind
        if not count:
            return events
    raise AssertionError(f"too few {kind} in {events}")


def test_a_conversation_is_kept_found_and_gone_on_with_without_reading_it_again(home: Home, model: Path) -> None:
    long_line = "A line that is long enough for its state to be worth a file. " * 4
    words = ("--threads", "1", "--ctx", "1024", "--max-tokens", "12", "--seed", "1")
    first = home.events(model, *words, lines=f"{long_line}\n/again\n")
    (begun,) = of(first, "conversation")
    assert [event["stop_reason"] for event in of(first, "done")] == ["length"] * 2
    assert first[-1]["event"] == "done"
    path = home.path(begun["id"])
    assert [message.role for message in path] == ["user", "assistant"]
    assert path[-1].content == text_of(first)[-len(path[-1].content) :]
    timings = path[-1].timings
    assert timings is not None
    assert timings.generated_tokens == 12
    assert path[-1].settings == {"max_tokens": 12, "seed": 1}
    assert path[-1].layout == "CPU 0–1", "as the window writes it"
    (state,) = home.states.iterdir()

    again = home.events(model, *words, "--conversation", begun["id"][:6], "--prompt", "And then?")
    (done,) = of(again, "done")
    assert done["cached_tokens"] > len(long_line)
    assert len(home.path(begun["id"])) == 4
    assert list(home.states.iterdir()) == [state]

    listed = json.loads(home.run("--list", "--json").stdout)["conversations"]
    assert [(each["id"], each["title"]) for each in listed] == [(begun["id"], title_of(long_line))]
    hits = json.loads(home.run("--search", "and THEN", "--json").stdout)["hits"]
    assert [hit["conversation"] for hit in hits] == [begun["id"]]

    # A load with a context that is too short, for the question too, leaves the state for a longer one.
    kept = state.read_bytes()
    refused = home.run(
        model, "--threads", "1", "--ctx", "256", "--conversation", begun["id"], "--prompt", long_line * 2
    )
    assert refused.returncode != 0
    assert state.read_bytes() == kept

    state.write_bytes(b"damaged")
    fresh = home.events(model, *words, "--conversation", begun["id"], "--prompt", "Go on")
    assert of(fresh, "done")[0]["cached_tokens"] == 0


def test_no_kv_states_are_saved_if_the_window_turned_them_off(home: Home, model: Path) -> None:
    home.settings.parent.mkdir(parents=True)
    settings = Settings(home.settings)
    settings.saved_states_bytes = 0
    settings.sync()
    long_line = "A line that is long enough for its state to be worth a file. " * 4
    words = ("--threads", "1", "--ctx", "1024", "--max-tokens", "12", "--seed", "1")
    events = home.events(model, *words, "--prompt", long_line)
    assert of(events, "done")
    assert not home.states.exists()


def test_each_answer_teaches_the_speed_book(
    home: Home, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, home.environment[name])
    taught: list[tuple[Plan, Done]] = []
    monkeypatch.setattr("app.cli.talk.learn_speed", lambda plan, done: taught.append((plan, done)))
    answer = run_here(capsys, "chat", model, "--prompt", "tell", "--max-tokens", "8", "--json")
    assert answer.code == 0
    ((plan, done),) = taught
    assert plan.model.paths == (model,)
    assert plan.edit.layout.devices == ("CPU",)
    assert done.generated_tokens == json.loads(answer.out.splitlines()[-1])["generated_tokens"]


@pytest.mark.exhaustive
def test_a_template_that_was_replaced_is_said_once(
    home: Home,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, home.environment[name])
    template = {"tokenizer.chat_template": "{{ raise_exception('only in turns') }}"}
    odd = write_tiny_llama(tmp_path / "odd.gguf", n_layers=2, extra_metadata=template)
    words = ("--threads", "1", "--ctx", "256", "--max-tokens", "2")
    talked = home.run(odd, *words, lines="One\nTwo\n")
    assert talked.returncode == 0
    assert talked.stderr.count("only in turns") == 1
    told = run_here(capsys, "chat", odd, *words, "--prompt", "One", "--json")
    assert "only in turns" in json.loads(told.out.splitlines()[-1])["replaced"]
    told = run_here(capsys, "chat", model, *words, "--prompt", "One", "--json")
    assert "replaced" not in json.loads(told.out.splitlines()[-1])


def test_every_token_that_was_told_survives_a_kill(home: Home, model: Path) -> None:
    with home.start(model, "--threads", "1", "--ctx", "4096", "--prompt", "Hello", "--seed", "2") as process:
        events = wait_for(process, "token", 5)
        process.kill()
        assert process.stdout is not None
        events += [json.loads(line) for line in process.stdout.read().split("\n")[:-1]]
    (begun,) = of(events, "conversation")
    answer = home.path(begun["id"])[-1]
    assert answer.content.startswith(text_of(events))
    assert answer.state == "interrupted"


def test_an_answer_that_breaks_off_with_the_engine_is_kept_as_the_window_keeps_it(home: Home, model: Path) -> None:
    with home.start(model, "--threads", "1", "--ctx", "8192", "--prompt", "Hello", "--seed", "2") as process:
        events = wait_for(process, "token", 3)
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # A child of a killed one ends by itself.
                child.kill()
        assert process.stdout is not None
        events += [json.loads(line) for line in process.stdout]
        assert process.wait(DEADLINE_S) == 5
    assert (events[-1]["event"], events[-1].get("request")) == ("crashed", None)
    answer = home.path(of(events, "conversation")[0]["id"])[-1]
    assert (answer.content, answer.state) == (text_of(events), "interrupted")
    assert answer.note == "The engine ended during this answer. The partial answer was kept."
    assert answer.timings is not None
    assert answer.timings.generated_tokens > 2


def test_an_interrupt_stops_the_answer_and_keeps_it_and_a_second_one_ends(home: Home, model: Path) -> None:
    with home.start(model, "--threads", "1", "--ctx", "4096", "--seed", "3") as process:
        assert process.stdin is not None
        process.stdin.write("Hello\n")
        process.stdin.flush()
        events = wait_for(process, "token", 3)
        process.send_signal(signal.SIGINT)
        events += wait_for(process, "done")
        assert events[-1]["stop_reason"] == "stopped"
        answer = home.path(of(events, "conversation")[0]["id"])[-1]
        assert (answer.content, answer.state) == (text_of(events), "stopped")
        process.send_signal(signal.SIGINT)
        assert wait_for(process, "cancelled")
        assert process.wait(DEADLINE_S) == 130


def test_a_second_interrupt_ends_a_chat_whose_engine_does_not_react(home: Home, model: Path) -> None:
    with home.start(model, "--threads", "1", "--ctx", "8192", "--seed", "3") as process:
        assert process.stdin is not None
        process.stdin.write("Hello\nAnd then?\n")
        process.stdin.flush()
        events = wait_for(process, "token", 3)
        for child in psutil.Process(process.pid).children():
            child.suspend()
        # Two signals, because the second one of a kind is dropped while the first one waits.
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        # First to the end: a full pipe would keep the program from ending.
        events += [json.loads(line) for line in process.stdout]
        assert process.wait(DEADLINE_S) == 130
    assert events[-1]["event"] == "cancelled"
    (answer,) = [message for message in home.path(of(events, "conversation")[0]["id"]) if message.role == "assistant"]
    assert (answer.content, answer.state) == (text_of(events), "interrupted")


@pytest.mark.exhaustive
def test_old_turns_are_left_out_once_and_said_once(home: Home, model: Path) -> None:
    lines = "".join(f"{letter * 60}\n" for letter in "abcdefgh")
    events = home.events(
        model, "--threads", "1", "--ctx", "256", "--max-tokens", "8", "--temperature", "0", lines=lines
    )
    assert len(of(events, "done")) == 8
    (notice,) = of(events, "notice")
    assert "oldest messages" in notice["message"]
    assert len(home.path(of(events, "conversation")[0]["id"])) == 16
    conversation = of(events, "conversation")[0]["id"]
    assert ["context is full" in message.note for message in home.path(conversation)].count(True) == 1
    words = (model, "--threads", "1", "--ctx", "256", "--max-tokens", "8", "--temperature", "0")
    again = home.events(*words, "--conversation", conversation, "--prompt", "i")
    assert not of(again, "notice")
    (done,) = of(again, "done")
    assert done["prompt_tokens"] - done["cached_tokens"] < 40
    full = home.events(
        model, "--threads", "1", "--ctx", "256", "--overflow", "stop", lines=lines[:61] + "x" * 400 + "\n"
    )
    assert "too long for the context" in of(full, "notice")[0]["message"]


LETTERS = (
    "--grammar",
    "root ::= [a-z]*",
    "--temperature",
    "0",
    "--max-tokens",
    "300",
    "--threads",
    "1",
    "--ctx",
    "256",
)


@pytest.mark.exhaustive
def test_an_answer_goes_on_in_a_full_context_where_that_was_chosen(home: Home, model: Path) -> None:
    events = home.events(model, *LETTERS, "--full-context", "shift", "--prompt", "Begin")
    (shifted,) = of(events, "shifted")
    assert shifted.keys() == {"event", "kept_tokens", "dropped_tokens"}
    (notice,) = of(events, "notice")
    assert f"the first {shifted['kept_tokens']}" in notice["message"]
    (done,) = of(events, "done")
    assert (done["stop_reason"], done["generated_tokens"]) == ("length", 300)
    assert done["dropped_tokens"] == shifted["dropped_tokens"]
    assert home.path(of(events, "conversation")[0]["id"])[-1].note == notice["message"]
    assert not list(home.states.glob("*.state")), "the state is not that of the conversation"
    ended = home.events(model, *LETTERS, "--prompt", "Begin")
    (done,) = of(ended, "done")
    assert (done["stop_reason"], "dropped_tokens" in done) == ("context_full", False)
    assert list(home.states.glob("*.state"))


def test_a_shift_with_a_quantised_cache_is_refused_before_the_load(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, home.environment[name])
    model = write_tiny_llama(tmp_path / "wide.gguf", n_layers=1, n_embd=128)
    words = ("--type-v", "q8_0", "--flash-attn", "on", "--full-context", "shift", "--prompt", "Begin", "--json")
    answer = run_here(capsys, "chat", model, *words)
    assert answer.code == 2
    assert "--full-context: A full context cannot be shifted" in answer.document["error"]["message"]
    assert "f16 and q8_0" in answer.document["error"]["message"]


@pytest.mark.exhaustive
def test_presets_give_a_system_prompt_and_settings(home: Home, model: Path) -> None:
    home.data.mkdir(parents=True)
    write_presets(home.data / "presets.json", [Preset(name="Yes", settings={"grammar": 'root ::= "yes"'})])
    people = home.run(
        model, "--threads", "1", "--ctx", "256", "--preset", "Yes", "--system", "Agree.", "--prompt", "Is it so?"
    )
    assert (people.returncode, people.stdout) == (0, "yes\n")


def test_a_question_that_is_not_asked_ends_with_an_error_where_it_is_the_only_one(
    home: Home, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, home.environment[name])
    answer = run_here(
        capsys, "chat", model, "--threads", "1", "--ctx", "256", "--prompt", "x" * 400, "--overflow", "stop", "--json"
    )
    last = json.loads(answer.out.splitlines()[-1])
    assert (answer.code, last["event"], last["kind"]) == (2, "failed", "argument")
    assert "too long for the context" in last["message"]


@pytest.mark.exhaustive
def test_a_kept_conversation_gets_another_system_prompt_and_preset_for_good(
    home: Home, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, home.environment[name])
    home.data.mkdir(parents=True)
    write_presets(home.data / "presets.json", [Preset(name="Yes", settings={"grammar": 'root ::= "yes"'})])
    words = ("chat", model, "--threads", "1", "--ctx", "256", "--max-tokens", "4", "--json")
    first = run_here(capsys, *words, "--prompt", "One")
    conversation = next(line for line in map(json.loads, first.out.splitlines()) if line["event"] == "conversation")
    changed = (*words, "--conversation", conversation["id"], "--system", "Be brief.", "--preset", "Yes")
    asked = json.loads(run_here(capsys, *changed, "--prompt", "Two").out.splitlines()[-1])["prompt_tokens"]
    with closing(ChatStore(home.data / "chats.sqlite3")) as store:
        kept = store.conversation(conversation["id"])
    assert kept is not None
    assert (kept.system, kept.preset) == ("Be brief.", "Yes")
    again = run_here(capsys, *words, "--conversation", conversation["id"], "--prompt", "Three")
    assert home.path(conversation["id"])[-1].content == "yes"
    assert json.loads(again.out.splitlines()[-1])["prompt_tokens"] > asked


def test_a_file_goes_with_the_first_question(home: Home, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("print(1)")
    words = (model, "--threads", "1", "--ctx", "256", "--max-tokens", "1", "--attach", file)
    events = home.events(*words, lines="One\nTwo\n")
    path = home.path(of(events, "conversation")[0]["id"])
    assert [[each.text for each in message.attachments] for message in path] == [["print(1)"], [], [], []]
    assert of(events, "done")[0]["prompt_tokens"] > len("File: a.py print(1) One")


@pytest.mark.exhaustive
def test_an_attached_image_goes_to_a_model_that_sees(home: Home, model: Path, tmp_path: Path) -> None:
    image, projector = tmp_path / "a.png", write_tiny_projector(tmp_path / "mmproj.gguf")
    image.write_bytes(picture())
    words = (model, "--threads", "1", "--ctx", "256", "--max-tokens", "4", "--attach", image, "--prompt", "What?")
    events = home.events(*words, "--mmproj", projector)
    conversation = of(events, "conversation")[0]["id"]
    assert [each.kind for each in home.path(conversation)[0].attachments] == ["image"]
    assert of(events, "done")[0]["prompt_tokens"] == len("What?") + 4 + 4, "four of the template, four of the image"
    refused = home.run(*words, "--json")
    assert refused.returncode == 2
    assert "needs a projector for images; add --mmproj" in refused.stdout + refused.stderr


@pytest.mark.exhaustive
def test_an_attached_sound_goes_to_a_model_that_hears(home: Home, model: Path, tmp_path: Path) -> None:
    sound, projector = tmp_path / "a.wav", write_tiny_ear(tmp_path / "mmproj.gguf")
    sound.write_bytes(tone())
    words = (model, "--threads", "1", "--ctx", "256", "--max-tokens", "4", "--attach", sound, "--prompt", "What?")
    events = home.events(*words, "--mmproj", projector)
    conversation = of(events, "conversation")[0]["id"]
    assert [each.length_ms for each in home.path(conversation)[0].attachments] == [400]
    marks = len("<|audio><audio|>")
    assert of(events, "done")[0]["prompt_tokens"] == len("What?") + 4 + 10 + marks, "640 samples are a token"
    refused = home.run(*words, "--json")
    assert refused.returncode == 2
    assert "needs a projector for sound; add --mmproj" in refused.stdout + refused.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "needs a FILE.gguf"),
        (("none.gguf", "--conversation", "zz"), "no conversation of this id"),
        (("none.gguf", "--preset", "zz"), 'there is no preset "zz"'),
        (("none.gguf", "--top-p", "2"), "2 is outside of 0 to 1"),
        (("none.gguf", "--mirostat", "3"), "use off, 1, 2"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    home: Home,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    sentence: str,
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", home.environment["XDG_DATA_HOME"])
    answer = run_here(capsys, "chat", *words, "--json")
    assert answer.code == 2
    assert sentence in answer.error["message"]


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"properties": {"town": {"type": "string"}}}}}]
CALLS = (
    '<tool_call>{"name": "look", "arguments": {"town": "Bonn"}}</tool_call>'
    '<tool_call>{"name": "look", "arguments": {"town": "Ulm"}}</tool_call>'
)


@pytest.mark.exhaustive
def test_calls_are_told_and_their_results_are_read_from_the_input(home: Home, model: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS))
    words = ("--threads", "1", "--ctx", "4096", "--max-tokens", "400", "--seed", "1")
    forced = ("--grammar", f"root ::= {json.dumps(CALLS)}")
    events = home.events(model, *words, *forced, "--tools", tools, lines="Where is it warm?\n")
    called = of(events, "tool_call")
    assert [(each["name"], json.loads(each["arguments"])) for each in called] == [
        ("look", {"town": "Bonn"}),
        ("look", {"town": "Ulm"}),
    ]
    assert events[-1]["event"] == "done"
    (begun,) = of(events, "conversation")
    # Results in a later run; the first of two does not ask the model, an empty line is a result, too.
    again = home.events(
        model, *words[:-3], "8", "--seed", "1", "--conversation", begun["id"], lines="12 degrees\n\nThanks.\n"
    )
    assert len(of(again, "done")) == 2
    path = home.path(begun["id"])
    assert [each.role for each in path] == ["user", "assistant", "tool", "tool", "assistant", "user", "assistant"]
    assert [(each.content, each.call_id) for each in path[2:4]] == [
        ("12 degrees", called[0]["id"]),
        ("", called[1]["id"]),
    ]


def test_a_prompt_reads_results_until_the_answer(home: Home, model: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS))
    words = ("--threads", "1", "--ctx", "4096", "--max-tokens", "400", "--tools", tools, "--prompt", "Where?")
    done = home.run(model, *words, "--grammar", f"root ::= {json.dumps(CALLS)}", lines="12\n/quit\n")
    assert done.returncode == 0
    assert done.stdout.strip().split("\n") == ['call of look: { "town": "Bonn" }', 'call of look: { "town": "Ulm" }']


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("{", "--tools: The tools are not JSON"), (json.dumps(TOOLS * 2), "--tools: Two tools have the name look")],
)
def test_faulty_tools_are_refused_before_the_load(
    home: Home, model: Path, tmp_path: Path, text: str, sentence: str
) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(text)
    done = home.run(model, "--tools", tools, "--prompt", "Hi")
    assert done.returncode != 0
    assert sentence in done.stderr
    missing = home.run(model, "--tools", tmp_path / "none.json", "--prompt", "Hi")
    assert "none.json cannot be read" in missing.stderr
