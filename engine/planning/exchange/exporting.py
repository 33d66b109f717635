"""Export of a plan to another program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

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


def export_plan(plan: Plan, target: Target) -> Exported:
    """Return the command or file with which `target` loads a model as the plan does, with notes on differences.

    Raises:
        RuleViolationError: the plan breaks a rule, so no program could load it.
        LayoutError: the layout cannot be translated.
    """
    return _EXPORTS[target](plan)
