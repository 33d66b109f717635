"""From the options of `load` and `embed` to what is to be loaded."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

from app.cli.auto_options import constraints_of
from app.cli.inputs import read_inputs
from engine.errors import EngineError, RuleViolationError
from engine.plan.plan import Plan
from engine.probing.probe import probe
from engine.session.load_order import LoadOrder, RetryPolicy


def order_of(options: Namespace, explain: Callable[[str], None]) -> LoadOrder:
    """Return the load that `options` ask for; `explain` is told why an automatic layout is so.

    Raises:
        EngineError: for what cannot be read or must not be loaded.
    """
    asked = read_inputs(options)
    if asked.explanation is not None:
        explain(asked.explanation)
    plan = asked.plan
    if plan.violations:
        raise RuleViolationError(tuple((v.rule, v.message, v.remedy) for v in plan.violations))
    if plan.report.probe_only is not None:
        plan = _probed(plan)
    return LoadOrder(plan, RetryPolicy(options.retry, constraints_of(options, plan.rig, plan.model.n_layers)))


def _probed(plan: Plan) -> Plan:
    """Return a plan that only a probe can forecast with its numbers; as it is where that fails: the load says why."""
    try:
        return probe(plan)
    except EngineError:
        return plan
