"""The tables of a report: each once, for table.md and for the page."""

import csv
import html
import io
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, stdev

from core.rundir import short
from core.schema import flatten, show
from scripts.reporting.runs import METRICS, Metric, Run, Sweep
from scripts.reporting.statistics import Comparison, lowest, mean_curve, replicate_name
from sweeps.status import STATES, tally
from training.config import FaultOptions

HONEST = FaultOptions()
FLOOR_TOLERANCE = 0.01  # nats; as in scripts/audit.py


@dataclass(frozen=True)
class Table:
    """words: how many columns, from the left, hold text; the others hold numbers. folded: the page shows it closed."""

    columns: list[str]
    rows: list[list[str]]
    words: int = 1
    title: str = ""
    folded: bool = False

    def markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"

        rule = ["---" if i < self.words else "---:" for i in range(len(self.columns))]
        return "\n".join(map(line, [self.columns, rule, *self.rows])) + "\n"

    def html(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            kinds = ["" if i < self.words else ' class="number"' for i in range(len(cells))]
            return "".join(f"<{tag}{kind}>{html.escape(c)}</{tag}>" for kind, c in zip(kinds, cells, strict=True))

        body = "".join(f"<tr>{line(row, 'td')}</tr>\n" for row in self.rows)
        return f'<div class="table"><table><thead><tr>{line(self.columns, "th")}</tr></thead>\n{body}</table></div>'


def number(value: float | None, spec: str = ".4f") -> str:
    """For a reader: a dash where there is no value, a true minus sign."""
    return "–" if value is None else "> 1,000,000" if math.isinf(value) else format(value, spec).replace("-", "−")


def p_value(p: float | None) -> str:
    return "–" if p is None else "< 0.0001" if p < 0.0001 else f"{p:.4f}"


def mean_of(runs: Sequence[Run], key: str) -> float | None:
    values = [run.summary[key] for run in runs if run.summary.get(key) is not None]
    return fmean(values) if values else None


def mean_value(runs: Sequence[Run], metric: Metric) -> float | None:
    values = [value for run in runs if (value := run.value(metric)) is not None]
    return fmean(values) if values else None


def seconds(runs: Sequence[Run]) -> list[float]:
    return [run.summary["seconds"] for run in runs if run.summary.get("seconds") is not None]


def part_table(sweep: Sweep, settings: Sequence[str]) -> Table:
    """A row a setting, with both readings of "averaged minimum"."""
    papers = any(sweep.paper(setting) is not None for setting in settings)
    more = sweep.metrics[len(METRICS) :]
    in_paper = [metric for metric in more if any(sweep.paper(s, metric.key) is not None for s in settings)]
    columns = [
        "setting", "runs done", *["paper"] * papers, "minimum of the mean curve", "at iteration",
        "mean of the runs' minima", "SD", "mean iteration of the minimum", "final loss", "median seconds",
        *(f"mean of {metric.name}" if metric.of == "last" else metric.name for metric in more),
        *(f"paper's {metric.key}" for metric in in_paper),
    ]  # fmt: skip
    rows = []
    for setting in settings:
        planned, done = sweep.of(setting), sweep.done(setting)
        lost = Counter(run.state.state for run in planned.values() if not run.done)
        runs = f"{len(done)} of {len(planned)}" + "".join(f", {lost[s]} {s}" for s in STATES if lost[s])
        minimum, iteration = lowest(mean_curve(run.curve for run in done))
        minima = [run.summary["val/loss_min"] for run in done]
        rows.append([
            sweep.label(setting), runs, *[number(sweep.paper(setting), ".5f")] * papers, number(minimum),
            number(iteration, ",d"), number(mean_of(done, "val/loss_min")),
            number(stdev(minima) if len(minima) > 1 else None), number(mean_of(done, "iter_of_min"), ",.0f"),
            number(mean_of(done, "val/loss")), number(median(times) if (times := seconds(done)) else None, ",.1f"),
            *(number(mean_value(done, metric), metric.spec.lstrip("+")) for metric in more),
            *(number(sweep.paper(setting, metric.key), ".5g") for metric in in_paper),
        ])  # fmt: skip
    return Table(columns, rows, words=2)


def comparison_table(sweep: Sweep, family: Sequence[Comparison], metric: Metric) -> Table:
    papers = metric.key == "val/loss_min" and any(paper_difference(sweep, c) is not None for c in family)
    share = metric.key == "seconds"
    by_fold = any(c.test_over_train is not None for c in family)
    columns = [
        "A", "B", "verdict on A", "pairs", "mean of A − B", "95 % interval", *["% of B"] * share,
        *["paper's A − B"] * papers, "t: p", "Wilcoxon: p", "t: Holm p", "Wilcoxon: Holm p",
        *["corrected t: p", "corrected t: Holm p"] * by_fold, "pairs for 80 % power",
    ]  # fmt: skip
    rows = []
    for c in family:
        mean, low, high = (c.point.mean, c.point.low, c.point.high) if c.point else (None, None, None)
        of_b = 100 * mean / fmean(b for _, b in c.values.values()) if share and mean is not None else None
        rows.append([
            c.a, c.b, c.verdict(metric.less, metric.more), f"{len(c.differences)} of {c.planned}",
            number(mean, metric.spec),
            "–" if low is None else f"{number(low, metric.spec)} to {number(high, metric.spec)}",
            *[number(of_b, "+.2f")] * share, *[number(paper_difference(sweep, c), "+.4f")] * papers,
            *map(p_value, [*c.p, *c.adjusted, *c.corrected * by_fold]), number(c.n_needed, ",.0f"),
        ])  # fmt: skip
    return Table(columns, rows, words=3)


def paper_difference(sweep: Sweep, comparison: Comparison) -> float | None:
    a, b = sweep.paper(comparison.a), sweep.paper(comparison.b)
    return None if a is None or b is None or a == b else a - b  # equal: one number of the paper for both


def fault_table(sweep: Sweep) -> Table:
    """Each setting with a fault or random tokens, and what shows the fault: the warnings of train.py and, on uniformly
    random tokens, a last training loss further below ln V than chance explains."""
    rows = []
    for setting, done in ((setting, sweep.done(setting)) for setting in sweep.settings):
        fault = next((run.plan.config.fault.name for run in sweep.of(setting).values()), "none")
        on_random = [run.summary for run in done if run.plan.config.data.name == "random"]
        if fault == "none" and not on_random:
            continue
        warned = Counter(w.split(":")[0] for run in done for w in run.summary.get("start_up_warnings", []))
        floors = [math.log(summary["vocab_size"]) for summary in on_random]
        below = sum(
            summary["train/loss"] < floor - FLOOR_TOLERANCE for summary, floor in zip(on_random, floors, strict=True)
        )
        rows.append([
            setting, fault, "; ".join(f"{warning} ({n} of {len(done)})" for warning, n in warned.items()) or "–",
            number(mean_of(done, "train/loss")), number(fmean(floors) if floors else None),
            f"{below} of {len(floors)}" if floors else "–",
        ])  # fmt: skip
    columns = ["setting", "fault", "start-up warnings", "last train/loss", "ln V, the floor on random tokens"]
    return Table([*columns, f"runs more than {FLOOR_TOLERANCE} below it"], rows, words=3)


STABILITY_NOTE = """\
A learning rate counts as stable for a variant where every run is done, no loss of theirs (of the validation, or of \
the training where the sweep's `also` has it) ever lies more than 0.5 above the first validation loss, that of an \
untrained model, and the final validation loss, averaged over folds and seeds, has come down from the first one by at \
least half of what it comes down at the variant's best rate. The table has the highest rate up to which all are \
stable, and how the next one fails."""
WORSE = 0.5  # nats above an untrained model


def by_rate(sweep: Sweep) -> dict[str, dict[float, str]]:
    """Variant -> learning rate, from the lowest on -> setting; {} where no variant has several rates."""
    variants: dict[str, dict[float, str]] = {}
    for setting in sweep.settings:
        first = next(iter(sweep.of(setting).values()))
        variant = re.sub(r"(^|[,/])learning_rate=[^,]*", "", setting).strip(",/") or "all"
        variants.setdefault(variant, {})[first.plan.config.optim.learning_rate] = setting
    if all(len(of) < 2 for of in variants.values()):
        return {}
    return {variant: dict(sorted(of.items())) for variant, of in variants.items()}


def final_losses(sweep: Sweep) -> dict[str, dict[float, list[float]]]:
    """Variant -> learning rate -> the final validation losses of the runs that are done."""
    return {
        variant: {rate: [run.summary["val/loss"] for run in sweep.done(setting)] for rate, setting in of.items()}
        for variant, of in by_rate(sweep).items()
    }


def stability_table(sweep: Sweep) -> Table | None:
    """For each variant the highest stable learning rate, where several are swept; None where they are not."""
    rows = []
    for variant, settings in by_rate(sweep).items():
        of = {rate: list(sweep.of(setting).values()) for rate, setting in settings.items()}
        highest, failure = highest_stable(of)
        known = final_means(of)
        best = min(known, key=lambda rate: known[rate], default=None)
        alone = {}
        for replicate in sorted({run.replicate for runs in of.values() for run in runs}):
            here = {rate: [run for run in runs if run.replicate == replicate] for rate, runs in of.items()}
            alone[replicate_name(replicate)] = highest_stable({rate: runs for rate, runs in here.items() if runs})[0]
        rows.append([
            variant, number(best, "g"), number(known.get(best or 0.0)), number(highest, "g"),
            ", ".join(f"{name}: {number(rate, 'g')}" for name, rate in alone.items()), failure,
            ", ".join(f"{rate:g}: {number(known.get(rate), '.3f')}" for rate in of),
        ])  # fmt: skip
    columns = ["variant", "best rate", "its final loss", "highest stable rate", "of each run alone"]
    return Table([*columns, "how the next one fails", "final loss by rate"], rows) if rows else None


def final_means(of: Mapping[float, Sequence[Run]]) -> dict[float, float]:
    """The mean final validation loss of the rates whose runs are all done."""
    finals = {rate: mean_of(runs, "val/loss") for rate, runs in of.items() if all(run.done for run in runs)}
    return {rate: final for rate, final in finals.items() if final is not None}


def highest_stable(of: Mapping[float, Sequence[Run]]) -> tuple[float | None, str]:
    """The highest rate up to which all are stable (STABILITY_NOTE), and how the next one fails."""
    known = final_means(of)
    best = min(known.values(), default=math.inf)
    firsts = [run.curve[min(run.curve)] for runs in of.values() for run in runs if run.curve]
    highest = None
    for rate, runs in of.items():
        if not all(run.state.state in ("done", "diverged") for run in runs):
            return highest, f"{rate:g}: not all runs are made"
        broken = [run.state.reason for run in runs if not run.done]
        if broken:
            return highest, f"{rate:g}: {len(broken)} of {len(runs)} diverged ({broken[0]})"
        risen = (worst_loss(run) for run in runs if run.curve)
        peak, first = max(risen, key=lambda of_run: of_run[0] - of_run[1], default=(0.0, 0.0))
        if peak > first + WORSE:
            return highest, f"{rate:g}: a loss of {peak:.4g}; the first was {first:.4f}"
        if fmean(firsts) - known[rate] < (fmean(firsts) - best) / 2:
            return highest, f"{rate:g}: final loss {known[rate]:.4f}"
        highest = rate
    return highest, "–"


def worst_loss(run: Run) -> tuple[float, float]:
    """The highest loss of a run after its first validation loss, and that one."""
    first = min(run.curve)
    later = [loss for curve in (run.curve, run.curves.get("train/loss", {})) for i, loss in curve.items() if i > first]
    return max(later, default=run.curve[first]), run.curve[first]


def missing_table(sweep: Sweep) -> Table:
    """Every run that is not done, with the reason."""
    rows = [
        [run.plan.id, ", ".join(run.plan.points), replicate_name(run.replicate), run.state.state, run.state.reason]
        for state in STATES
        for run in sweep.runs
        if run.state.state == state != "done"
    ]
    return Table(["run", "settings", "fold or seed", "state", "reason"], rows, words=5)


FAULT_NOTE = "The losses of these runs are wrong on purpose (training/faults.py), but where the fault is none."
NOTES = """\
**Two readings of an averaged minimum.** A paper's "averaged minimum" may be the minimum of the curve averaged over \
folds, or the mean of each fold's own minimum, which is never larger. Both are given. Comparisons use each run's own \
minimum. Where settings have different numbers of runs done, their means are over different folds: only the paired \
comparisons compare like with like.

**Comparisons** are A − B, paired by seed and fold, over the pairs whose two runs are done: a run that diverged has no \
minimum to compare, and is named among the runs that are not done. The interval is the paired t test's. Holm's \
correction is over the whole family, for t and for Wilcoxon's signed-rank test separately; a test that cannot be made \
yet counts as p = 1. A verdict is the paired t test's at Holm p ≤ 0.05. "Pairs for 80 % power" is how many folds or \
seeds a paired t test (two-sided, 0.05, uncorrected) needs to find a difference of the observed size and spread with \
probability 0.8: exact, from the noncentral t distribution.

**Folds share training text**, and seeds share all of it. The differences are thus not quite independent, as these \
tests assume: near the threshold a verdict is worth less than its p says. For K folds, "corrected t" is the paired t \
test with (1/n + 1/(K − 1)) SD² as the variance of the mean, in place of SD²/n (Nadeau and Bengio, 2003). A difference \
with a p above 0.05 there cannot be told from the spread between the folds.

**Seconds and tokens a second** measure training only where nothing else ran on the device: runs side by side slow \
each other down.
"""


def facts(sweep: Sweep) -> dict[str, str]:
    """What was compared, for a reader."""
    definition, plans = sweep.definition, [run.plan for run in sweep.runs]
    found_folds = {getattr(plan.config.data, "fold", None) for plan in plans}
    folds = sorted(fold for fold in found_folds if fold is not None)
    seeds = sorted({plan.seed for plan in plans})
    asked = [one["overrides"] for one in sweep.about.get("frozen", [])]  # at each time that runs were planned
    words = [*definition.get("overrides", []), *(w for w in (asked or [[]])[0] if all(w in other for other in asked))]
    found = {
        "runs": f"{len(plans)} planned: {tally([run.state for run in sweep.runs])}",
        "settings": f"{len(sweep.settings)}, in {len(sweep.parts)} part{'s' * (len(sweep.parts) > 1)}",
        "folds": ", ".join(map(str, folds)) or "none: the last 10 % are held out",
        "seeds": ", ".join(map(str, seeds)),
        "every run": " ".join(words),
        "parameters": ", ".join(f"{n:,}" for n in sweep.distinct("parameters")),
        "device": "; ".join(map(str, sweep.distinct("device"))),
        "dtype": ", ".join(map(str, sweep.distinct("dtype"))),
        "commit": ", ".join(
            dict.fromkeys(short(c) for text in sweep.distinct("commit") for c in str(text).split(", "))
        ),
        "corpus SHA-256": ", ".join(map(str, sweep.distinct("corpus_sha256"))),
        "paper": (definition.get("paper") or {}).get("name", ""),
        "deliberate faults": ", ".join(dict.fromkeys(p.config.fault.name for p in plans if p.config.fault != HONEST)),
    }
    return {key: value for key, value in found.items() if value}


def runs_csv(sweep: Sweep) -> str:
    """A line a run; the settings that differ between runs are columns of their own."""
    configs = [flatten(asdict(run.plan.config)) for run in sweep.runs]
    keys = dict.fromkeys(key for config in configs for key in config if key not in ("seed", "data.fold"))
    varied = [key for key in keys if len({json.dumps(config.get(key)) for config in configs}) > 1]
    numbers = ["val/loss_min", "iter_of_min", "val/loss", "train/loss", "seconds", "tok_per_sec", "parameters"]
    measured = [*numbers, "cache_bytes_per_token", "device", "dtype", "torch", "commit"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [key.replace("/", "_") for key in measured]
    writer.writerow(["id", "settings", *varied, "seed", "fold", "status", *names, "iter", "reason"])
    for run, config in zip(sweep.runs, configs, strict=True):
        plan, state = run.plan, run.state
        values = [show(config[key]) if key in config else None for key in varied]
        found = [run.summary.get(key) for key in measured]
        row = [plan.id, ";".join(plan.points), *values, plan.seed, plan.fold, state.state, *found]
        writer.writerow([*row, run.summary.get("iter", state.iter), state.reason])
    return text.getvalue()
