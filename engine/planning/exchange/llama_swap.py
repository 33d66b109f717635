"""Import and export of llama-swap's YAML configuration.

Imported text is untrusted. Its size is limited, and its YAML nodes are counted before it is loaded with the safe
loader, because nested aliases (`<<: [*a, *a]`) double with each level.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from textwrap import indent
from typing import TYPE_CHECKING

from engine.base.errors import LayoutError
from engine.base.language import tr
from engine.base.texts import clean, quote
from engine.planning.exchange.exported import Exported
from engine.planning.exchange.server_command import server_command, shell_lines
from engine.planning.plan.plan import Plan

if TYPE_CHECKING:
    import yaml

MAX_NODES = 20_000
MAX_DEPTH = 20
MAX_ALIASES = 32
_MAX_SHOWN = 10
_MACRO = re.compile(r"\$\{([A-Za-z0-9_.-]{1,64})\}", re.ASCII)
_MAX_EXPANDED = 1 << 16
_MAX_PASSES = 4


def export_swap(plan: Plan) -> Exported:
    """Return the plan as an entry for llama-swap's `config.yaml`.

    Raises:
        RuleViolationError: the plan breaks a rule of llama.cpp.
        LayoutError: the layout cannot be translated.
    """
    command = server_command(plan)
    lines = shell_lines((("--port", "${PORT}"), *command.groups))
    # shlex quotes the dollar sign, and llama-swap replaces the macro before it splits the words.
    lines = lines.replace("'${PORT}'", "${PORT}")
    # Every text of JSON is one of YAML, too. A block of lines takes printable characters only.
    block = "|\n" + indent(lines, " " * 6) if lines.replace("\n", "").isprintable() else _quoted(lines)
    text = f"models:\n  {_quoted(plan.model.paths[0].stem)}:\n    cmd: {block}\n"
    if command.environment:
        text += "    env:\n" + "".join(f"      - {_quoted(f'{name}={value}')}\n" for name, value in command.environment)
    return Exported(text, command.notes, "llama-swap.yaml")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=not text.isprintable())


def swap_commands(text: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return (command, environment) of each model in a configuration or in a single entry, by model name.

    The name is "" for a single entry that is not below `models`.

    Raises:
        LayoutError: the text is not YAML, too large, or no configuration of llama-swap.
    """
    document = _read(text)
    if not isinstance(document, dict):
        raise LayoutError(tr('the text is not a configuration of llama-swap: it lacks the key "models"'))
    macros = _pairs(document.get("macros"))
    if isinstance(document.get("cmd"), str):
        return {"": _command(document, macros)}
    models = document.get("models", document)
    entries = models.items() if isinstance(models, dict) else ()
    found = {
        clean(str(name)): _command(entry, {**macros, **_pairs(entry.get("macros")), "MODEL_ID": str(name)})
        for name, entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("cmd"), str)
    }
    if not found:
        raise LayoutError(tr('the text is not a configuration of llama-swap: no model has the key "cmd"'))
    return found


def choose_command(
    commands: Mapping[str, tuple[str, tuple[str, ...]]], name: str | None
) -> tuple[str, tuple[str, ...]]:
    """Return the command of the model called `name`; if `name` is None, the command of the only model.

    Raises:
        LayoutError: there is no model of this name, or there are several and `name` is None.
    """
    if name is None and len(commands) == 1:
        return next(iter(commands.values()))
    if name is not None and name in commands:
        return commands[name]
    names = ", ".join(list(commands)[:_MAX_SHOWN]) + (", …" if len(commands) > _MAX_SHOWN else "")
    if name is None:
        raise LayoutError(tr("the configuration has several models; name one of {names}", names=names))
    raise LayoutError(
        tr("the configuration has no model {name}; its models are {names}", name=quote(name), names=names)
    )


def _command(entry: Mapping[object, object], macros: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    listed = entry.get("env")
    variables = (each for each in listed if isinstance(each, str)) if isinstance(listed, list) else ()
    environment = tuple(_expanded(each, macros) for each in variables)
    return _expanded(str(entry["cmd"]), macros), environment


def _expanded(text: str, macros: Mapping[str, str]) -> str:
    """Return `text` with its macros expanded.

    Unknown macros such as ${PORT}, which llama-swap sets itself, are unchanged.
    """
    # A macro may name others; passes and length are bounded, because they may name each other.
    for _ in range(_MAX_PASSES):
        known = [match for match in _MACRO.finditer(text) if match[1] in macros]
        if not known:
            break
        # Before they are put in: a text of 200 KiB may stand for gigabytes.
        if len(text) + sum(len(macros[match[1]]) - len(match[0]) for match in known) > _MAX_EXPANDED:
            raise LayoutError(tr("a command of the configuration is too long after its macros are replaced"))
        text = _MACRO.sub(lambda match: macros.get(match[1], match[0]), text)
    return text


def _pairs(document: object) -> dict[str, str]:
    """Return the macros of a configuration by name.

    `document`: value of the key `macros`, a mapping or a list of mappings. The result is empty for any other value.
    """
    mappings = document if isinstance(document, list) else [document]
    return {
        str(name): str(value)
        for mapping in mappings
        if isinstance(mapping, dict)
        for name, value in mapping.items()
        if isinstance(value, str | int | float)
    }


def _read(text: str) -> object:
    import yaml

    try:
        _check_events(yaml.parse(text, Loader=yaml.SafeLoader))
        return yaml.safe_load(text)
    # ValueError: a date that no calendar has.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = clean(str(getattr(error, "problem", None) or error))
        mark = getattr(error, "problem_mark", None)
        location = tr("line {number}", number=mark.line + 1) if mark is not None else ""
        raise LayoutError(tr("the text is not YAML: {reason}", reason=reason), location=location) from None


def _check_events(events: Iterator[yaml.Event]) -> None:
    """Raise `LayoutError` if a YAML document has too many nodes, levels or aliases."""
    import yaml

    depth = aliases = 0
    for count, event in enumerate(events):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        aliases += isinstance(event, yaml.AliasEvent)
        if count > MAX_NODES or depth > MAX_DEPTH or aliases > MAX_ALIASES:
            raise LayoutError(
                tr(
                    "the YAML is too large or too deeply nested; at most {nodes} values, {depth} levels and {aliases} "
                    "aliases are read",
                    nodes=MAX_NODES,
                    depth=MAX_DEPTH,
                    aliases=MAX_ALIASES,
                )
            )
