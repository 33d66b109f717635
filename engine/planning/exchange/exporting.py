"""Export of a plan to another program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from engine.base.language import tr
from engine.base.values import replace
from engine.devices.endpoint import parse_endpoint, parse_lent_endpoint
from engine.planning.exchange.device_names import with_plain_servers
from engine.planning.exchange.exported import Exported
from engine.planning.exchange.llama_swap import export_swap
from engine.planning.exchange.lm_studio import export_lm_studio
from engine.planning.exchange.ollama import export_modelfile
from engine.planning.exchange.python_script import export_python
from engine.planning.exchange.server_command import export_server
from engine.planning.plan.plan import Plan

Target = Literal["llama-server", "llama-swap", "ollama", "lmstudio", "python"]
TARGETS: tuple[Target, ...] = get_args(Target)
_EXPORTS: dict[Target, Callable[[Plan], Exported]] = {
    "llama-server": export_server,
    "llama-swap": export_swap,
    "ollama": export_modelfile,
    "lmstudio": export_lm_studio,
    "python": export_python,
}
_WITH_SERVERS = ("llama-server", "llama-swap", "python")
"""Programs that can use RPC workers."""


def export_plan(plan: Plan, target: Target) -> Exported:
    """Return the command or file that makes the program `target` load the model with the plan's layout and settings.

    Its notes tell the user what differs from the plan.

    Raises:
        RuleViolationError: the plan breaks a rule, so no program could load it.
        LayoutError: the layout cannot be translated.
    """
    plain = with_plain_servers(plan.rig)
    if plain == plan.rig:
        return _EXPORTS[target](plan)
    exported = _EXPORTS[target](plan.on(plain))
    if target not in _WITH_SERVERS:
        return exported
    commands = [
        f"`layerdeck-cli rig serve --host {host} --port {port} --device {parse_lent_endpoint(lent.endpoint or '')[1]}`"
        for lent, device in zip(plan.rig.devices, plain.devices, strict=True)
        if device.endpoint not in (None, lent.endpoint) and device in plan.on(plain).devices_in_use
        for host, port in [parse_endpoint(device.endpoint or "")]
    ]
    note = tr(
        "To use the lent devices without the tunnel, run these commands on the computers that lend them: {commands}.",
        commands=", ".join(commands),
    )
    return replace(exported, notes=(*exported.notes, note) if commands else exported.notes)
