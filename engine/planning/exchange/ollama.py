"""Import and export of ollama's Modelfile."""

from __future__ import annotations

from collections.abc import Iterator

from engine.base.errors import LayoutError
from engine.base.language import tr
from engine.base.texts import clean
from engine.base.values import replace
from engine.planning.exchange.exported import Exported, lost_placement, lost_settings, offloaded_layers
from engine.planning.exchange.foreign_load import ForeignLoad, ForeignOptions
from engine.planning.exchange.server_command import number_text
from engine.planning.plan.plan import Plan

PROGRAM = "ollama"
_SUPPORTED = frozenset({"n_ctx", "n_batch", "n_ubatch", "n_seq_max", "type_k", "type_v", "flash_attn", "threads"})
_CACHE_TYPES = ("f16", "q8_0", "q4_0")
_TEXTS = ("template", "system", "license", "message", "parser", "renderer", "requires")
_QUOTES = '"""'
MAX_LINES = 20_000


def export_modelfile(plan: Plan) -> Exported:
    """Return the plan as a Modelfile of ollama.

    Raises:
        RuleViolationError: the plan breaks a rule of llama.cpp.
        LayoutError: the layout cannot be translated.
    """
    used = plan.settings
    files = plan.edit.side_files
    # num_ctx is the context of one request: ollama multiplies it by OLLAMA_NUM_PARALLEL.
    lines = [f"FROM {_path(str(plan.model.paths[0].absolute()))}"]
    if files.projector is not None:
        lines.append(f"FROM {_path(str(files.projector.path.absolute()))}")
    lines += [f"ADAPTER {_path(str(each.path.absolute()))}" for each in files.adapters]
    parameters = {"num_ctx": used.n_ctx_each, "num_gpu": offloaded_layers(plan), "num_batch": used.n_ubatch}
    if used.threads is not None:
        parameters["num_thread"] = used.threads
    lines += [f"PARAMETER {key} {value}" for key, value in parameters.items()]
    notes = (*_server_notes(plan), *_file_notes(plan), *lost_placement(plan, PROGRAM), *_settings_notes(plan))
    return Exported("\n".join(lines) + "\n", notes, "Modelfile")


def _path(path: str) -> str:
    return f'"{path}"' if " " in path else path


def _server_notes(plan: Plan) -> Iterator[str]:
    """Yield sentences on settings that apply to ollama's whole server, not to one model."""
    used = plan.settings
    variables = {"OLLAMA_NUM_PARALLEL": str(used.n_seq_max)}
    if used.flash_attn != "auto":
        variables["OLLAMA_FLASH_ATTENTION"] = "1" if used.flash_attn == "on" else "0"
    if used.type_k == used.type_v and used.type_k in _CACHE_TYPES:
        variables["OLLAMA_KV_CACHE_TYPE"] = used.type_k
    else:
        yield tr(
            "K cache {type_k} and V cache {type_v} cannot be exported. ollama uses one type for both caches, and "
            "supports only {types}.",
            type_k=used.type_k,
            type_v=used.type_v,
            types=", ".join(_CACHE_TYPES),
        )
    yield tr(
        "Some settings belong to ollama's server and not to a Modelfile. Start the server with these environment "
        "variables: {variables}",
        variables=" ".join(f"{name}={value}" for name, value in variables.items()),
    )


def _file_notes(plan: Plan) -> Iterator[str]:
    for adapter in plan.edit.side_files.adapters:
        if adapter.scale != 1.0:
            yield tr(
                "The scale {scale} of {file} cannot be exported; ollama applies adapters with scale 1.",
                scale=number_text(adapter.scale),
                file=adapter.path.name,
            )
    if plan.edit.side_files.draft is not None:
        yield tr("The draft model was not exported: a Modelfile has no option for a draft model.")
    if len(plan.model.paths) > 1:
        yield tr(
            "The model has {count} files, but ollama needs one file. Merge the files with `llama-gguf-split --merge`.",
            count=len(plan.model.paths),
        )


def _settings_notes(plan: Plan) -> Iterator[str]:
    used = plan.settings
    if used.n_batch != used.n_ubatch:
        yield tr(
            "ollama has one setting for batch and micro batch. The export sets it to the micro batch size, "
            "{n_ubatch}, because that determines the memory.",
            n_ubatch=used.n_ubatch,
        )
    yield from lost_settings(plan, PROGRAM, _SUPPORTED)


def read_modelfile(text: str) -> ForeignLoad:
    """Parse a Modelfile, and return its load options.

    Raises:
        LayoutError: there is no FROM instruction, or there are too many lines.
    """
    options = ForeignOptions(PROGRAM)
    # `num_ctx` is the context of one request; the number of requests is a setting of the server.
    options.context["n_seq_max"] = 1
    sources: list[str] = []
    left_out: list[str] = []
    for word, rest in _instructions(text):
        if word == "from":
            sources.append(_plain(rest))
        elif word == "adapter":
            options.adapters.append((_plain(rest), 1.0))
        elif word == "parameter":
            key, value = _split(rest)
            if not _take(options, key.lower(), value.strip()):
                left_out.append(clean(key))
        elif word not in _TEXTS:
            options.unknown.append(clean(word.upper()))
    if not sources:
        raise LayoutError(tr("the Modelfile has no FROM line, which names the model"))
    projector = sources[1] if len(sources) > 1 else ""
    options.load = replace(options.load, model=sources[0], projector=projector)
    if left_out:
        options.notes.append(
            tr(
                "Not imported, because these parameters are not part of a layout: {names}.",
                names=", ".join(dict.fromkeys(left_out)),
            )
        )
    options.notes.append(
        tr(
            "Cache types, flash attention and parallel requests are settings of ollama's server and not of a "
            "Modelfile. The imported layout uses Layerdeck's defaults for them."
        )
    )
    return options.done()


def _take(options: ForeignOptions, key: str, value: str) -> bool:
    """Add a PARAMETER of a Modelfile to `options`; return False if it has no effect on a layout or its settings."""
    if key == "num_ctx":
        options.take_value("n_ctx", key, value)
    # ollama has one batch size, for both of llama.cpp's.
    elif key == "num_batch":
        options.take_value("n_batch", key, value)
        options.take_value("n_ubatch", key, value)
    elif key == "num_thread":
        options.take_value("threads", key, value)
    elif key == "num_gpu":
        options.take_layers(key, value)
    elif key == "main_gpu":
        options.take_main(key, value)
    elif key == "use_mmap":
        options.context["load_mode"] = "none" if value.lower() in ("false", "0") else "mmap"
    elif key == "use_mlock":
        if value.lower() not in ("false", "0"):
            options.context["load_mode"] = "mlock"
    else:
        return False
    return True


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield (instruction in lower case, rest of the line) for each instruction of a Modelfile.

    Further lines of a text in triple quotes are skipped.
    """
    lines = iter(text.splitlines()[: MAX_LINES + 1])
    for count, line in enumerate(lines):
        if count >= MAX_LINES:
            raise LayoutError(tr("the Modelfile has more than {count} lines", count=MAX_LINES))
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        word, rest = _split(line)
        # The outer loop uses the same iterator, so it continues after the closing quotes.
        if rest.count(_QUOTES) == 1:
            for further in lines:
                if _QUOTES in further:
                    break
        yield word.lower(), rest


def _split(text: str) -> tuple[str, str]:
    """Return the first word of `text` and the rest after spaces or tabs; each may be empty."""
    word, rest = (*text.split(None, 1), "", "")[:2]
    return word, rest


def _plain(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def looks_like_modelfile(text: str) -> bool:
    """Return whether the first instruction of `text` is FROM."""
    first = next((line.split() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), [])
    return bool(first) and first[0].lower() == "from"
