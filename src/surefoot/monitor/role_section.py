"""How parameters move, for the report: the update size of every role over the run, and its last rate, decay and update in a table."""

import math
from collections.abc import Sequence
from dataclasses import replace
from html import escape

from surefoot.monitor.charts import DOMAIN_LOOKS, Chart, drawn
from surefoot.monitor.role_figures import RoleFigures, role_names
from surefoot.monitor.run import Run
from surefoot.monitor.wording import rate


def role_charts(run: Run) -> list[Chart]:
    """The size of an update against the weights it changed, a line for each role; nothing for a run without probes."""
    history = run.history()
    lines = []
    for place, role in enumerate(role_names(history)):
        look = DOMAIN_LOOKS[place % len(DOMAIN_LOOKS)]
        # there are more roles than colours
        again = place >= len(DOMAIN_LOOKS)
        lines += [
            replace(line, dashed=again) for line in drawn(history, f"inside/{role}/update_ratio", look, role, dots=True)
        ]
    chart = Chart(
        "How parameters move",
        "The size of one update over the size of the weights it changed, for each role of parameters. A thousandth is common for "
        "matrices late in a run; a role that jumps away from its own past has a rate that no longer suits it.",
        "update over weights",
        lines,
        logarithmic=True,
    )
    return [chart] if lines else []


def role_table(roles: Sequence[RoleFigures]) -> str:
    """Rate, decay and update of every role as HTML, to stand under the chart; empty where nothing was probed."""
    if not roles:
        return ""
    rows = "".join(
        f"<tr><td>{escape(r.role)}</td><td>{_figure(r.lr)}</td><td>{_figure(r.weight_decay)}</td><td>{_figure(r.update_ratio)}</td></tr>"
        for r in roles
    )
    head = "<tr><th>role</th><th>learning rate</th><th>decay per step</th><th>update over weights</th></tr>"
    text = f"At step {max(r.step for r in roles):,}, the last that was looked at. The decay is the share of a weight that one step takes off."
    return f'<p class="soft small">{text}</p><div class="wide"><table class="roles">{head}{rows}</table></div>'


def _figure(value: float) -> str:
    return rate(value) if math.isfinite(value) else "–"
