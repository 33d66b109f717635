"""Parser for commands of llama-server, llama-cli and related programs of llama.cpp.

Options and defaults are those of llama.cpp's `common/arg.cpp`. Some options of older versions are accepted too, such as
`--no-mmap` and `--mlock`. The text is untrusted, so number and length of words are limited.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

from engine.base.errors import LayoutError
from engine.base.language import tr
from engine.base.texts import clean
from engine.base.values import replace
from engine.planning.exchange.command_words import (
    COMMAND_ENDS,
    CONTAINER_OPTIONS,
    MAX_WORDS,
    VARIABLE,
    find_variables,
    split_words,
)
from engine.planning.exchange.foreign_load import (
    MAX_NUMBER,
    ForeignDraft,
    ForeignLoad,
    ForeignOptions,
    ForeignOverride,
    real_number,
    share_number,
    whole_number,
)
from engine.planning.exchange.server_command import LOAD_MODE_WORDS, MIN_BATCH_VARIABLE
from engine.planning.exchange.server_variables import by_name, option_of
from engine.planning.layout.engine_parameters import MATCHES_NO_TENSOR, MAX_DEVICES
from engine.planning.layout.layout import SPLIT_MODES
from engine.planning.layout.layout_file import DraftKind
from engine.planning.settings.context_settings import AUTO_CONTEXT, KV_TYPES
from engine.planning.settings.table import MOST_DRAFTED, SETTINGS

MAX_OVERRIDES = 256
MAX_ADAPTERS = 64
SERVER = "llama-server"
_PROGRAM = re.compile(r"(?:llama-[a-z0-9-]+|llama|server|main)(?:\.exe)?", re.ASCII)
_NUMBER = re.compile(r"-(?:\d|\.\d)")
_DENSE = r"\.ffn_(up|down|gate)\."
"""`LLM_FFN_DENSE_REGEX` of llama.cpp: the weights of `--n-cpu-ffn`."""
_YARN = re.compile(r"--yarn-")
_DRAFT = re.compile(r"--(spec|draft|model-draft|mtp|dflash|eagle3)|-md$|.*-draft$|-[a-z]+d$")
_SERVER_SLOTS = 4
"""Number of slots that llama-server has by default if `--parallel` is not given; they then share one KV cache."""


def read_command(text: str, environment: Sequence[str] = ()) -> ForeignLoad:
    """Parse a command of a llama.cpp program, and return its load options.

    `environment`: environment variables of the command ("NAME=VALUE"), in addition to those in `text`.

    Raises:
        LayoutError: the text has no option of llama.cpp, unclosed quotes, or too many words.
    """
    words = split_words(text)
    program, start = _program(words)
    reader = _Reader(ForeignOptions(program))
    # As llama.cpp: first the variables, so that an option wins.
    for name, value in by_name([*environment, *find_variables(words, start)]).items():
        reader.read_variable(name, value)
    reader.read(words[start:])
    if not reader.n_known:
        raise LayoutError(tr("the text is not a llama.cpp command: it contains no option of llama.cpp"))
    return reader.done()


def _program(words: list[str]) -> tuple[str, int]:
    """Return the name of the llama.cpp program in a command, and the index of the first word after the name.

    The name is searched in the words before the options. Several of these words may look like a program, because a
    folder may have such a name, for example `/opt/llama`. Then the last word that begins with `llama-` is used, or else
    the last one.

    If no word names a program, the program is llama-server. The index is then that of the first word of the command
    that has options.
    """
    found, start, has_options = None, 0, False
    for index, (before, word) in enumerate(zip(["", *words], words, strict=False)):
        if word in COMMAND_ENDS:
            found, start = None, start if has_options else index + 1
        elif word.startswith("-"):
            if found is not None or not index:
                break
            has_options = True
        # The value of an option or a variable, such as an alias, may be a program's name too.
        elif before in _VALUES or before in _OTHERS_WITH_VALUE or VARIABLE.fullmatch(word):
            continue
        # After `llama-server` a word such as `/data/llama` is not the program.
        elif (name := _program_name(word)) and (
            found is None or name.startswith("llama-") or not _program_name(words[found]).startswith("llama-")
        ):
            found = index
    if found is None:
        return SERVER, start
    return _program_name(words[found]), found + 1


def _program_name(word: str) -> str:
    """Return the name of the llama.cpp program in `word`, a name or path; empty if there is none."""
    # The last part of a path, of either kind of slash.
    name = PurePath(word.replace("\\", "/")).name
    return name.removesuffix(".exe") if _PROGRAM.fullmatch(name) else ""


class _Reader:
    """Parser for the words of a command, which adds each option to `options`.

    `n_known`: number of known options so far.
    """

    def __init__(self, options: ForeignOptions) -> None:
        self.options = options
        self.n_known = 0
        self._yarn: list[str] = []
        self._drafts: list[str] = []
        self._others: list[str] = []

    def read(self, words: Sequence[str]) -> None:
        index = 0
        while index < len(words):
            word = words[index]
            index += 1
            if word in COMMAND_ENDS:
                self.options.notes.append(
                    tr("Only the first command was read. The text after {word} was ignored.", word=clean(word))
                )
                return
            if not word.startswith("-"):
                # A variable, or a word before the options, such as `run` of a container.
                if not VARIABLE.fullmatch(word):
                    self.options.unknown.append(word)
                continue
            name, sign, given = word.partition("=")
            value = given if sign else words[index] if index < len(words) else None
            # As llama.cpp: the value of a key or prompt may begin with "-".
            if not sign and value is not None and name not in _OTHERS_WITH_VALUE and not _is_value(value):
                value = None
            if name in _SWITCHES:
                self.n_known += 1
                _SWITCHES[name](self)
            elif name in _VALUES:
                self.n_known += 1
                index += not sign and value is not None
                if value is None and name in ("-fa", "--flash-attn"):
                    # A switch in older versions.
                    value = "on"
                if value is None:
                    self.options.notes.append(
                        tr("{name} has no value, so this option was not imported.", name=clean(name))
                    )
                else:
                    _VALUES[name](self, name, value)
            else:
                index += not sign and value is not None
                self._leave_out(name, value)

    def read_variable(self, name: str, value: str) -> None:
        """Add the option that the environment variable `name` sets. A note on a wrong value mentions the variable."""
        if name == MIN_BATCH_VARIABLE:
            self.options.take_value("op_offload_min_batch", name, value)
            return
        try:
            option = option_of(name, value)
        except ValueError:
            self.options.refuse(name, value)
            return
        if option is None:
            self.options.unknown.append(name)
            return
        self.n_known += 1
        if option in _SWITCHES:
            _SWITCHES[option](self)
        elif option in _VALUES:
            _VALUES[option](self, name, value)
        elif option:
            self._leave_out(option, value)

    def done(self) -> ForeignLoad:
        """Return the collected options as a `ForeignLoad`.

        Defaults of llama-server and notes on options that were left out are added first.
        """
        options = self.options
        options.load = replace(options.load, given={**options.load.given, **options.context})
        if options.load.program == SERVER and "n_seq_max" not in options.context:
            options.context.update(n_seq_max=_SERVER_SLOTS, kv_unified=True)
            options.notes.append(
                tr("Without --parallel llama-server answers {count} requests at a time.", count=_SERVER_SLOTS)
            )
        if "n_ctx" not in options.context:
            options.notes.append(
                tr("The context length is auto (as much as fits), because the command does not set it (-c).")
            )
        if self._yarn:
            options.notes.append(
                tr(
                    "Not imported: {names}. Layerdeck uses the YaRN values of the model file instead, so answers with "
                    "a longer context may be worse.",
                    names=", ".join(self._yarn),
                )
            )
        if self._drafts:
            options.notes.append(
                tr(
                    "Not imported, because Layerdeck does not support this part of speculative decoding: {names}.",
                    names=", ".join(self._drafts),
                )
            )
        if self._others:
            options.notes.append(
                tr(
                    "Not imported, because these options are not part of a layout: {names}.",
                    names=", ".join(self._others),
                )
            )
        return options.done()

    def _leave_out(self, name: str, value: str | None) -> None:
        shown = clean(name if value is None else f"{name} {value}")
        if name in CONTAINER_OPTIONS and value is not None and VARIABLE.fullmatch(value):
            # Read before the options.
            return
        if _YARN.match(name):
            self._yarn.append(shown)
        elif name in _OTHERS or name in _OTHERS_WITH_VALUE:
            self.n_known += 1
            # llama-swap's own port.
            if value == "${PORT}":
                return
            # Keys and prompts stay out of sentences.
            self._others.append(clean(name))
        elif _DRAFT.match(name):
            self._drafts.append(shown)
        else:
            self.options.unknown.append(name)

    # ------------------------------------------------------------------ options with a value

    def model(self, _name: str, value: str) -> None:
        self.options.load = replace(self.options.load, model=value)

    def hub(self, name: str, value: str) -> None:
        self.options.notes.append(
            tr(
                "{name} {value} names a model to download; download the model first with layerdeck-cli download.",
                name=name,
                value=clean(value),
            )
        )

    def layers(self, name: str, value: str) -> None:
        self.options.take_layers(name, value)

    def main(self, name: str, value: str) -> None:
        self.options.take_main(name, value)

    def devices(self, name: str, value: str) -> None:
        names = () if value == "none" else tuple(value.split(","))
        if len(names) > MAX_DEVICES:
            self.options.refuse(name, value)
        else:
            self.options.load = replace(self.options.load, devices=names)

    def servers(self, name: str, value: str) -> None:
        servers = tuple(value.split(","))
        if len(servers) > MAX_DEVICES:
            self.options.refuse(name, value)
        else:
            known = (*self.options.load.servers, *servers)[:MAX_DEVICES]
            self.options.load = replace(self.options.load, servers=known)

    def split(self, name: str, value: str) -> None:
        numbers = [share_number(part) for part in re.split(r"[,/]+", value)]
        shares = tuple(number for number in numbers if number is not None)
        if len(shares) < len(numbers) or len(shares) > MAX_DEVICES:
            self.options.refuse(name, value)
        else:
            self.options.load = replace(self.options.load, shares=shares)

    def mode(self, name: str, value: str) -> None:
        found = next((mode for mode in SPLIT_MODES if mode == value), None)
        if found is None:
            self.options.refuse(name, value)
        else:
            load = self.options.load
            self.options.load = replace(load, split_mode=found, given={**load.given, "split_mode": found})

    def override(self, name: str, value: str) -> None:
        for part in value.split(","):
            pattern, sign, buffer = part.partition("=")
            if not sign or not buffer:
                self.options.refuse(name, part)
            elif pattern == MATCHES_NO_TENSOR:
                self.options.load = replace(self.options.load, stops_pipeline=True)
            else:
                self._add(ForeignOverride(pattern, buffer))

    def experts(self, name: str, value: str) -> None:
        number = whole_number(value)
        if number is None or number < 0:
            self.options.refuse(name, value)
        elif number:
            self._add(ForeignOverride(n_experts=number))

    def dense(self, name: str, value: str) -> None:
        number = whole_number(value)
        if number is None or not 0 <= number < MAX_WORDS:
            self.options.refuse(name, value)
        elif number:
            self._add(ForeignOverride(rf"^blk\.({'|'.join(map(str, range(number)))}){_DENSE}", "CPU"))

    def _add(self, override: ForeignOverride) -> None:
        if len(self.options.overrides) < MAX_OVERRIDES:
            self.options.overrides.append(override)
        elif len(self.options.overrides) == MAX_OVERRIDES:
            self.options.notes.append(tr("Only the first {count} overrides were read.", count=MAX_OVERRIDES))

    def context(self, name: str, value: str) -> None:
        # 0: as long as the model was trained for, which is our open length.
        if whole_number(value) == 0:
            self.options.context["n_ctx"] = AUTO_CONTEXT
        else:
            self.options.take_value("n_ctx", name, value)

    def rope_scale(self, name: str, value: str) -> None:
        # llama.cpp's `rope_freq_scale` is the inverse of it.
        factor = real_number(value)
        if factor is None or factor <= 0:
            self.options.refuse(name, value)
        else:
            self.options.take_value("rope_freq_scale", name, f"{1 / factor:.9g}")

    def parallel(self, name: str, value: str) -> None:
        # -1: left to the program.
        if whole_number(value) != -1:
            self.options.take_value("n_seq_max", name, value)

    def positive(self, key: str, name: str, value: str) -> None:
        number = whole_number(value)
        # 0 and below: all processors, or the projector's own limit, which a layout leaves open.
        if number is not None and number <= 0:
            self.options.context[key] = None
        else:
            self.options.take_value(key, name, value)

    def flash(self, name: str, value: str) -> None:
        words = {"1": "on", "true": "on", "enabled": "on", "0": "off", "false": "off", "disabled": "off", "-1": "auto"}
        self.options.take_value("flash_attn", name, words.get(value, value))

    def load_mode(self, name: str, value: str) -> None:
        ours = {word: mode for mode, word in LOAD_MODE_WORDS.items()}.get(value)
        if ours is None:
            self.options.refuse(name, value)
        else:
            self.options.context["load_mode"] = ours

    def draft_model(self, _name: str, value: str) -> None:
        self._draft(model=value)

    def draft_types(self, name: str, value: str) -> None:
        found = tuple(each.strip() for each in value.split(","))
        unknown = [each for each in found if kind_of_draft(each) is None and each != NO_DRAFT]
        if unknown:
            self._drafts.append(clean(f"{name} {','.join(unknown)}"))
        self._draft(types=found)

    def draft_tokens(self, name: str, value: str) -> None:
        number = whole_number(value)
        if number is None or number < 1:
            self.options.refuse(name, value)
        else:
            self._draft(n_tokens=min(number, MOST_DRAFTED))

    def draft_layers(self, name: str, value: str) -> None:
        number = {"auto": MAX_NUMBER, "all": MAX_NUMBER}.get(value, whole_number(value))
        if number is None:
            self.options.refuse(name, value)
        else:
            self._draft(n_gpu_layers=MAX_NUMBER if number < 0 else number)

    def draft_devices(self, _name: str, value: str) -> None:
        self._draft(devices=() if value == "none" else tuple(filter(None, value.split(","))))

    def draft_cache(self, key: str, name: str, value: str) -> None:
        if value in KV_TYPES:
            self._draft(**{key: value})
        else:
            self.options.refuse(name, value)

    def _draft(self, **change: Any) -> None:
        load = self.options.load
        self.options.load = replace(load, draft=replace(load.draft or ForeignDraft(), **change))

    def fit(self, _name: str, _value: str) -> None:
        """Ignore option `--fit`, which only chooses values for options that the command does not set.

        No note is added here, because other notes mention options that are not set.
        """

    def projector(self, _name: str, value: str) -> None:
        self.options.load = replace(self.options.load, projector=value)

    def projector_device(self, _name: str, value: str) -> None:
        self.options.load = replace(self.options.load, projector_device=value)

    def adapter(self, name: str, value: str) -> None:
        for path in _fields(value):
            self._adapter(name, path, 1.0)

    def scaled_adapter(self, name: str, value: str) -> None:
        for each in _fields(value):
            path, sign, scale_text = each.rpartition(":")
            scale = real_number(scale_text)
            if not sign or scale is None:
                self.options.refuse(name, each)
            else:
                self._adapter(name, path, scale)

    def _adapter(self, name: str, path: str, scale: float) -> None:
        if not path or len(self.options.adapters) >= MAX_ADAPTERS:
            self.options.refuse(name, path)
        else:
            self.options.adapters.append((path, scale))

    # ------------------------------------------------------------------ switches

    def set(self, key: str, value: object) -> None:
        self.options.context[key] = value

    def memory_lock(self) -> None:
        self.set("load_mode", "mlock" if self.options.context.get("load_mode") == "none" else "mmap_mlock")

    def no_mapping(self) -> None:
        locked = self.options.context.get("load_mode") in ("mlock", "mmap_mlock")
        self.set("load_mode", "mlock" if locked else "none")

    def all_experts(self) -> None:
        self._add(ForeignOverride(n_experts=0))

    def no_repack(self) -> None:
        self.options.notes.append(
            tr(
                "--no-repack was not imported: Layerdeck repacks weights, unless a check of this computer found a "
                "fault in repacked weights."
            )
        )


NO_DRAFT = "none"
"""llama.cpp's word for no speculative decoding, in the option that lists types of speculative decoding."""


def kind_of_draft(name: str) -> DraftKind | None:
    """Translate llama.cpp's name of a type of speculative decoding, such as "draft-mtp"; None if not supported."""
    if name.startswith("ngram"):
        return "ngram"
    kinds: dict[str, DraftKind] = {"draft-simple": "model", "draft": "model", "draft-mtp": "mtp", "mtp": "mtp"}
    return kinds.get(name)


def _is_value(word: str) -> bool:
    return not word.startswith("-") or _NUMBER.match(word) is not None or word == "-"


def _fields(text: str) -> list[str]:
    """Return the fields of a comma-separated list, as llama.cpp's `parse_csv_row` parses it.

    Empty if it cannot be parsed.
    """
    try:
        return next(csv.reader([text]), [])
    except csv.Error:
        return []


_Value = Callable[[_Reader, str, str], None]
_Switch = Callable[[_Reader], None]


def _setting(key: str) -> _Value:
    return lambda reader, name, value: reader.options.take_value(key, name, value)


def _draft_cache(key: str) -> _Value:
    return lambda reader, name, value: reader.draft_cache(key, name, value)


def _positive(key: str) -> _Value:
    return lambda reader, name, value: reader.positive(key, name, value)


def _set(key: str, value: object) -> _Switch:
    return lambda reader: reader.set(key, value)


def _by_name(table: dict[tuple[str, ...], _Value]) -> dict[str, _Value]:
    return {name: take for names, take in table.items() for name in names}


_VALUES = _by_name(
    {
        ("-m", "--model"): _Reader.model,
        ("-hf", "-hfr", "--hf-repo", "-mu", "--model-url", "-dr", "--docker-repo"): _Reader.hub,
        ("-ngl", "--gpu-layers", "--n-gpu-layers"): _Reader.layers,
        ("-dev", "--device"): _Reader.devices,
        ("--rpc",): _Reader.servers,
        ("-ts", "--tensor-split"): _Reader.split,
        ("-sm", "--split-mode"): _Reader.mode,
        ("-mg", "--main-gpu"): _Reader.main,
        ("-ot", "--override-tensor"): _Reader.override,
        ("-ncmoe", "--n-cpu-moe"): _Reader.experts,
        ("-ncffn", "--n-cpu-ffn"): _Reader.dense,
        **{setting.server_options: _setting(setting.key) for setting in SETTINGS if setting.server_options},
        # Of these llama-server has further values.
        ("-c", "--ctx-size"): _Reader.context,
        ("-np", "--parallel"): _Reader.parallel,
        ("-fa", "--flash-attn"): _Reader.flash,
        ("-t", "--threads"): _positive("threads"),
        ("-tb", "--threads-batch"): _positive("threads_batch"),
        ("--image-min-tokens",): _positive("image_min_tokens"),
        ("--image-max-tokens",): _positive("image_max_tokens"),
        ("-lm", "--load-mode"): _Reader.load_mode,
        ("-fit", "--fit"): _Reader.fit,
        ("--rope-scale",): _Reader.rope_scale,
        ("-mm", "--mmproj"): _Reader.projector,
        ("-mmdev", "--mmproj-device"): _Reader.projector_device,
        ("-md", "--model-draft", "--spec-draft-model"): _Reader.draft_model,
        ("--spec-type",): _Reader.draft_types,
        ("--draft", "--draft-n", "--draft-max", "--spec-draft-n-max"): _Reader.draft_tokens,
        ("--spec-ngram-simple-size-m", "--spec-ngram-size-m"): _Reader.draft_tokens,
        ("-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft", "--spec-draft-ngl"): _Reader.draft_layers,
        ("-devd", "--device-draft", "--spec-draft-device"): _Reader.draft_devices,
        ("-ctkd", "--cache-type-k-draft", "--spec-draft-type-k"): _draft_cache("type_k"),
        ("-ctvd", "--cache-type-v-draft", "--spec-draft-type-v"): _draft_cache("type_v"),
        ("--lora",): _Reader.adapter,
        ("--lora-scaled",): _Reader.scaled_adapter,
    }
)
_SWITCHES: dict[str, _Switch] = {
    **dict.fromkeys(("-kvu", "--kv-unified"), _set("kv_unified", True)),
    **dict.fromkeys(("-no-kvu", "--no-kv-unified"), _set("kv_unified", False)),
    **dict.fromkeys(("-kvo", "--kv-offload"), _set("offload_kqv", True)),
    **dict.fromkeys(("-nkvo", "--no-kv-offload"), _set("offload_kqv", False)),
    "--op-offload": _set("op_offload", True),
    "--no-op-offload": _set("op_offload", False),
    "--swa-full": _set("swa_full", True),
    "--mmap": _set("load_mode", "mmap"),
    "--no-mmap": _Reader.no_mapping,
    "--mlock": _Reader.memory_lock,
    **dict.fromkeys(("-dio", "--direct-io"), _set("load_mode", "direct_io")),
    **dict.fromkeys(("-cmoe", "--cpu-moe"), _Reader.all_experts),
    **dict.fromkeys(("-nr", "--no-repack"), _Reader.no_repack),
    "--no-mmproj-offload": lambda reader: reader.projector_device("", "none"),
}
_OTHER_SWITCHES = """
    --metrics --slots --no-slots --props --jinja --no-jinja --embedding --embeddings --reranking --rerank
    --context-shift --no-context-shift --cache-prompt --no-cache-prompt --no-warmup --warmup --verbose -v --log-disable
    -cnv --conversation -no-cnv -i --interactive --color -co --ignore-eos --no-webui --webui --no-ui --ui --offline
    --cont-batching -cb --no-cont-batching -nocb --no-perf --perf --repack --check-tensors --no-mmproj --mmproj-auto
    --mmproj-offload -h --help --version
"""
_OTHERS = frozenset(_OTHER_SWITCHES.split())
"""Names of switches that do not affect the layout: for the server, chat, sampling and logs.

Some of them have a value in some versions.
"""
_OTHER_OPTIONS = """
    --host --port --alias -a --api-key --api-key-file --path --api-prefix --timeout -to --threads-http --chat-template
    --chat-template-file --chat-template-kwargs --reasoning-format --reasoning-budget --reasoning --pooling --temp
    --temperature --top-k --top-p --min-p --seed -s --repeat-penalty --repeat-last-n --presence-penalty
    --frequency-penalty --samplers --mirostat --grammar --grammar-file --json-schema -j -n --predict --n-predict -p
    --prompt -f --file -sys --system-prompt --keep --cache-reuse --cache-ram -cram --ctx-checkpoints -ctxcp
    --slot-save-path --log-file -lv --verbosity --prio --poll --tags --ssl-key-file --ssl-cert-file --sleep-idle-seconds
    --models-dir --models-max --fit-target -fitt --fit-ctx -fitc --image --audio --lazy-mode -lzm --defrag-thold -dt
    --slot-prompt-similarity -sps
"""
_OTHERS_WITH_VALUE = frozenset(_OTHER_OPTIONS.split())
"""Names of options with a value that do not affect the layout."""
