"""Export of a plan as a command of llama-server."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Iterator

from msgspec import Struct

from engine.base.language import tr
from engine.devices.device import CPU_ID, is_on_this_machine, names_of
from engine.planning.exchange.device_names import DeviceNames, foreign_names, used_servers
from engine.planning.exchange.exported import Exported
from engine.planning.exchange.placement_words import MAX_SPLIT, PlacementWords, placement_words
from engine.planning.layout.engine_parameters import TensorOverride
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import AUTO_CONTEXT, OFFLOAD_MIN_BATCH
from engine.planning.settings.table import SETTINGS

PROGRAM = "llama-server"
MIN_BATCH_VARIABLE = "GGML_OP_OFFLOAD_MIN_BATCH"
LOAD_MODE_WORDS = {
    "auto": "auto",
    "mmap": "mmap",
    "none": "none",
    "mlock": "mlock",
    "mmap_mlock": "mmap+mlock",
    "direct_io": "dio",
}


class ServerCommand(Struct, frozen=True):
    """A command of llama-server.

    `groups`: words of each option with its value; the program's name is not included.
    `environment`: (name, value) of each environment variable to set.
    `notes`: sentences for the user on differences from the plan.
    """

    groups: tuple[tuple[str, ...], ...]
    environment: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def export_server(plan: Plan) -> Exported:
    """Return the plan as a llama-server command for a POSIX shell.

    Raises:
        RuleViolationError: the plan breaks a rule of llama.cpp.
        LayoutError: the layout cannot be translated.
    """
    command = server_command(plan)
    setting = "".join(f"{name}={shlex.quote(value)} " for name, value in command.environment)
    return Exported(f"{setting}{shell_lines(command.groups)}\n", command.notes, "llama-server.sh")


def shell_lines(groups: tuple[tuple[str, ...], ...]) -> str:
    """Return the llama-server command for a POSIX shell, with one option on each line.

    `groups`: words of each option with its value.
    """
    return " \\\n  ".join((PROGRAM, *map(shlex.join, groups)))


def server_command(plan: Plan) -> ServerCommand:
    """Return the options that make llama-server load the model of the plan with the plan's layout and settings.

    Raises:
        RuleViolationError: the plan breaks a rule of llama.cpp.
        LayoutError: the layout cannot be translated.
    """
    words = placement_words(plan)
    projector = plan.resolved.projector_device if plan.edit.side_files.projector is not None else CPU_ID
    devices = (*words.devices, *(each.device for each in words.overrides if isinstance(each, TensorOverride)))
    used = tuple(dict.fromkeys((*devices, projector, *plan.draft_devices)))
    names = DeviceNames(plan.rig, used_servers(plan.rig, used))
    side_words, side_notes = _side_files(plan, names)
    groups = (
        ("-m", str(plan.model.paths[0])),
        *_placement(words, names),
        *_settings(plan),
        *side_words,
        *_draft(plan, names),
    )
    notes = (*words.notes, *side_notes, *_draft_notes(plan), *_setting_notes(plan), *device_notes(plan, used))
    batch = plan.settings.offload_batch
    return ServerCommand(
        groups, ((MIN_BATCH_VARIABLE, str(batch)),) if batch != OFFLOAD_MIN_BATCH else (), (*notes, *_split(words))
    )


def _placement(words: PlacementWords, names: DeviceNames) -> Iterator[tuple[str, ...]]:
    # --rpc comes first: it makes the names that -dev and -ot use.
    if names.servers:
        yield "--rpc", ",".join(names.servers)
    yield "-dev", ",".join(map(names.device, words.devices)) or "none"
    yield "-ngl", str(words.n_gpu_layers if words.devices else 0)
    if words.devices:
        yield "-sm", words.split_mode
    if len(words.devices) > 1 or words.split_mode in ("tensor", "row"):
        yield "-ts", ",".join(map(number_text, words.counts))
    if words.split_mode == "row":
        yield "-mg", str(words.main_gpu)
    for each in words.overrides:
        yield each if isinstance(each, tuple) else ("-ot", f"{each.pattern}={names.buffer(each.device)}")
    # Otherwise llama-server changes what was not said to fit its own forecast.
    yield "-fit", "off"


def _settings(plan: Plan) -> Iterator[tuple[str, ...]]:
    used = plan.settings
    for setting in SETTINGS:
        value = getattr(used, setting.key)
        # llama-server's default is the same for a rare setting, and for one that was left open.
        if setting.server_options and value is not None and not (setting.rare and value == setting.default):
            yield setting.server_options[0], setting.kind.text_of(value)
    yield ("-kvu",) if used.kv_unified else ("-no-kvu",)
    if not used.offload_kqv:
        yield ("--no-kv-offload",)
    if not used.op_offload:
        yield ("--no-op-offload",)
    if used.swa_full:
        yield ("--swa-full",)
    yield "-lm", LOAD_MODE_WORDS[used.load_mode]
    if not plan.parameters.extra_buffers:
        yield ("--no-repack",)


def _side_files(plan: Plan, names: DeviceNames) -> tuple[list[tuple[str, ...]], list[str]]:
    files = plan.edit.side_files
    words: list[tuple[str, ...]] = []
    notes: list[str] = []
    if files.projector is not None:
        device = plan.resolved.projector_device
        words.append(("--mmproj", str(files.projector.path)))
        words.append(("--mmproj-device", "none" if device == CPU_ID else names.device(device)))
    for adapter in files.adapters:
        path = str(adapter.path)
        if adapter.scale == 1.0:
            words.append(("--lora", csv_field(path)))
        # `--lora-scaled` splits its value at each colon and refuses more than two parts.
        elif ":" in path:
            notes.append(
                tr(
                    "The scale {scale} of the LoRA adapter {file} cannot be exported, because the path of the file has "
                    "a colon; rename the file or folder.",
                    scale=number_text(adapter.scale),
                    file=adapter.path.name,
                )
            )
        else:
            words.append(("--lora-scaled", csv_field(f"{path}:{number_text(adapter.scale)}")))
    return words, notes


def _draft(plan: Plan, names: DeviceNames) -> Iterator[tuple[str, ...]]:
    draft, placed = plan.edit.side_files.draft, plan.resolved.draft
    if draft is None:
        return
    if draft.kind == "ngram":
        yield "--spec-type", "ngram-simple"
        yield "--spec-ngram-simple-size-m", str(draft.n_tokens)
        return
    if draft.kind == "mtp":
        yield "--spec-type", "draft-mtp"
        yield "--spec-draft-n-max", str(draft.n_tokens)
        return
    if draft.model is None or placed is None:
        return
    cards = [device for device in placed.devices if device != CPU_ID]
    n_gpu_layers = sum(run.length for run in placed.layout.runs if run.device != CPU_ID)
    yield "--spec-type", "draft-simple"
    yield "-md", str(draft.path)
    yield "--spec-draft-n-max", str(draft.n_tokens)
    yield "-devd", ",".join(map(names.device, cards)) or "none"
    # The output layer counts as one.
    yield "-ngld", str(n_gpu_layers + 1 if cards else 0)
    yield "-ctkd", placed.context.type_k
    yield "-ctvd", placed.context.type_v


def _draft_notes(plan: Plan) -> Iterator[str]:
    draft, placed = plan.edit.side_files.draft, plan.resolved.draft
    if draft is not None and draft.kind == "ngram":
        yield tr("llama-server finds repeated text differently from Layerdeck, so it drafts other tokens.")
    if placed is not None and len(placed.devices) > 1:
        yield tr("llama-server divides the layers of the draft model among the devices by their free memory.")


def csv_field(text: str) -> str:
    """Return `text` quoted as a field of a comma-separated list, as llama.cpp's `parse_csv_row` parses it."""
    # The module csv and `parse_csv_row` agree: a field is put in quotes, and a quote in it is doubled.
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow([text])
    return line.getvalue()


def number_text(value: float) -> str:
    """Return a number as short text that converts back to exactly the same `float`."""
    text = f"{value:g}"
    return text if float(text) == value else repr(value)


def _setting_notes(plan: Plan) -> Iterator[str]:
    asked, used = plan.edit.context, plan.settings
    if asked.n_ctx == AUTO_CONTEXT:
        yield tr(
            "The context length is auto in Layerdeck. The export has a fixed length, {n_ctx} tokens, chosen "
            "for the memory that is free now.",
            n_ctx=used.n_ctx,
        )


def _split(words: PlacementWords) -> Iterator[str]:
    if len(words.devices) > MAX_SPLIT:
        yield tr(
            "llama-server refuses this command: its option -ts takes {most} numbers, and the layout has {count}.",
            most=MAX_SPLIT,
            count=len(words.devices),
        )


def device_notes(plan: Plan, used: tuple[str, ...]) -> Iterator[str]:
    """Yield sentences on devices that another program may be unable to use.

    These are devices that the other program may name differently, devices behind our encrypted tunnel, and workers of
    this program.

    `used`: ids of the devices that the command uses.
    """
    devices = [device for device in plan.rig.devices if device.id in used]
    for device_id in foreign_names(plan.rig, used):
        yield tr(
            "{device} may have another name in {program}; {program} --list-devices shows the name.",
            device=device_id,
            program=PROGRAM,
        )
    if paired := [device for device in devices if device.fingerprint is not None]:
        yield tr(
            "{devices}: only Layerdeck can use these devices, through its encrypted tunnel. Their workers "
            "refuse other programs.",
            devices=names_of(paired),
        )
    if local := [device for device in devices if device.fingerprint is None and is_on_this_machine(device)]:
        yield tr(
            "{devices} are workers on this computer. A worker serves one program at a time, so unload the model in "
            "Layerdeck first. A restart of the lab rig changes the ports of the workers.",
            devices=names_of(local),
        )
