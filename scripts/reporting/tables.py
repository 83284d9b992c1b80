"""The tables of a report: each once, for table.md and for the page."""

import html
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean, median, stdev
from typing import TypeVar

from core.git import short
from core.process import printable
from core.schema import show
from data.options import FLOOR_TOLERANCE
from scripts.reporting.comparisons import Comparison, Family
from scripts.reporting.numbers import Estimate, independent, mean_curve, of_several_folds
from scripts.reporting.rates import best_rate, final_means, highest_stable, runs_by_rate, stable_by_replicate
from scripts.reporting.runs import METRICS, Metric, Run, Sweep, replicate_name
from sweeps.status import STATES, tally


@dataclass(frozen=True)
class Table:
    """text_columns: how many, from the left, hold text; the others hold numbers. folded: the page shows it closed."""

    columns: list[str]
    rows: list[list[str]]
    text_columns: int = 1
    title: str = ""
    folded: bool = False

    def markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(printable(" ".join(cell.split())).replace("|", "\\|") for cell in cells) + " |"

        rule = ["---" if i < self.text_columns else "---:" for i in range(len(self.columns))]
        return "\n".join(map(line, [self.columns, rule, *self.rows])) + "\n"

    def html(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            kinds = ["" if i < self.text_columns else ' class="number"' for i in range(len(cells))]
            return "".join(f"<{tag}{kind}>{html.escape(c)}</{tag}>" for kind, c in zip(kinds, cells, strict=True))

        body = "".join(f"<tr>{line(row, 'td')}</tr>\n" for row in self.rows)
        return f'<div class="table"><table><thead><tr>{line(self.columns, "th")}</tr></thead>\n{body}</table></div>'


T = TypeVar("T")
Columns = dict[str, Callable[[T], str]]  # the head of a column -> an item's cell


def filled(columns: Columns[T], items: Iterable[T], text_columns: int) -> Table:
    """A row for each item."""
    return Table([*columns], [[cell(item) for cell in columns.values()] for item in items], text_columns)


def number(value: float | None, spec: str = ".4f") -> str:
    """For a reader: a dash where there is no value, a true minus sign."""
    return "–" if value is None else format(value, spec).replace("-", "−")


def p_value(p: float | None) -> str:
    return "–" if p is None else "< 0.0001" if p < 0.0001 else f"{p:.4f}"


def values_of(runs: Sequence[Run], key: str) -> list[float]:
    """The known values of a summary's number; of several folds the seeds of each are averaged first."""
    known = {run.replicate: run.summary[key] for run in runs if run.summary.get(key) is not None}
    return independent(known, of_several_folds(known))


def mean_of(runs: Sequence[Run], key: str) -> float | None:
    values = values_of(runs, key)
    return fmean(values) if values else None


def part_table(sweep: Sweep, settings: Collection[str]) -> Table:
    """A row a setting: its loss, where α started with Lp, and what the definition's `also` names."""

    def minima(setting: str) -> list[float]:
        return values_of(sweep.done(setting), "val/loss_min")

    def mean_of_runs(metric: Metric) -> Callable[[str], str]:
        return lambda s: number(mean_of(sweep.done(s), metric.column), metric.spec.lstrip("+"))

    def of_paper(key: str, name: str, spec: str) -> Columns[str]:
        known = any(sweep.paper(setting, key) is not None for setting in settings)
        return {f"{name}, at its own scale": lambda s: number(sweep.paper(s, key), spec)} if known else {}

    columns: Columns[str] = {
        "setting": sweep.label,
        "runs done": lambda s: made_and_lost([*sweep.runs_of(s).values()]),
        "α starts": lambda s: show(sweep.configs[s].get("qk_norm.alpha_init", "–")),
        "mean of the runs' minima": lambda s: number(mean_of(sweep.done(s), "val/loss_min")),
        "SD": lambda s: number(stdev(minima(s)) if len(minima(s)) > 1 else None),
        "mean iteration of the minimum": lambda s: number(mean_of(sweep.done(s), "iter_of_min"), ",.0f"),
        "median seconds": lambda s: number(median(sweep.seconds(s)) if sweep.seconds(s) else None, ",.1f"),
    }
    if not any("qk_norm.alpha_init" in sweep.configs[setting] for setting in settings):
        del columns["α starts"]
    more = sweep.metrics[len(METRICS) :]
    for metric in more:
        name = f"mean of {metric.name}" if metric.reduction in ("last", "max", "min") else metric.name
        columns[f"{name} ({metric.key})" if name in columns else name] = mean_of_runs(metric)
    columns |= of_paper("val_loss", "paper", ".5f")
    for metric in more:
        columns |= of_paper(metric.key, f"paper's {metric.key}", ".5g")
    return filled(columns, settings, text_columns=3 if "α starts" in columns else 2)


def readings_table(sweep: Sweep, settings: Collection[str]) -> Table:
    """The other readings of the loss: the minimum of the mean curve, which papers call averaged, too, and the last."""

    @cache
    def lowest(setting: str) -> tuple[float | None, int | None]:
        curve = mean_curve({run.replicate: run.losses for run in sweep.done(setting)})
        return min(((estimate.mean, i) for i, estimate in curve.items()), default=(None, None))

    columns: Columns[str] = {
        "setting": sweep.label,
        "minimum of the mean curve": lambda s: number(lowest(s)[0]),
        "at iteration": lambda s: number(lowest(s)[1], ",d"),
        "final loss": lambda s: number(mean_of(sweep.done(s), "val/loss")),
    }
    return replace(filled(columns, settings, text_columns=1), title="Other readings of the loss", folded=True)


def made_and_lost(runs: Sequence[Run]) -> str:
    lost = Counter(run.state.state for run in runs if not run.done)
    return f"{len(runs) - lost.total()} of {len(runs)}" + "".join(f", {lost[s]} {s}" for s in STATES if lost[s])


def comparison_table(sweep: Sweep, family: Sequence[Comparison], metric: Metric) -> Table:
    def p_of(test: str) -> Columns[Comparison]:
        return {f"{test}: Holm p": lambda c: p_value(c.adjusted[test]), f"{test}: p": lambda c: p_value(c.p.get(test))}

    columns: Columns[Comparison] = {
        "A": lambda c: c.a,
        "B": lambda c: c.b,
        "verdict on A": lambda c: c.verdict(metric.less, metric.more),
        "pairs": pairs_of,
        "mean of A − B": lambda c: number(c.estimate.mean if c.estimate else None, metric.spec),
    }
    if any(c.shared for c in family):
        columns |= {"corrected 95 % interval": lambda c: ends(c.deciding, metric.spec), **p_of("corrected t")}
    columns["95 % interval"] = lambda c: ends(c.estimate, metric.spec)
    if metric.key == "seconds":
        columns["% of B"] = lambda c: number(percent_of_b(c), "+.2f")
    if metric.key == "val/loss_min" and any(paper_difference(sweep, c) is not None for c in family):
        columns["paper's A − B"] = lambda c: number(paper_difference(sweep, c), "+.4f")
    columns |= {**p_of("t"), **p_of("Wilcoxon"), "pairs for 80 % power": needed}
    return filled(columns, family, text_columns=3)


def conclusion_table(family: Family) -> Table:
    """A row a comparison of the family's first metric: which settings are told apart, and what becomes of the claim."""
    metric, names, asked = family.metrics[0], family.short_names(), family.asked
    columns: Columns[Comparison] = {"A": lambda c: names[c.a]}
    if not family.against:
        columns["B"] = lambda c: names[c.b]
    columns["verdict on A"] = lambda c: c.verdict(metric.less, metric.more)
    if asked.claim:
        worth = f" (least worth having: {asked.least:g})" if asked.least is not None else ""
        claimed = metric.less if asked.claim == "lower" else metric.more
        columns[f"claim: {claimed}{worth}"] = lambda c: c.judged(asked)
    columns |= {
        f"A − B{f' in {metric.name}' if asked.metric else ''} (95 % interval)": lambda c: mean_and_ends(
            c.deciding, metric.spec
        ),
        "Holm p": lambda c: p_value(c.adjusted.get(c.deciding_test)),
        "pairs": pairs_of,
    }
    title = family.heading + (f" (B: {names[family.against]})" if family.against else "")
    return replace(filled(columns, family.ranked(), text_columns=len(columns) - 3), title=title)


def needed(c: Comparison) -> str:
    if c.n_needed is None or math.isfinite(c.n_needed) or not c.shared:
        return "> 1,000,000" if c.n_needed == math.inf else number(c.n_needed, ",.0f")
    return f"more than {round(1 / c.shared) + 1} folds"


def settings_table(sweep: Sweep) -> Table | None:
    """What each setting sets, of the keys in which the settings differ; None where all names say so, as p=3 does."""
    if all("=" in word for setting in sweep.settings for word in sweep.label(setting).split(",")):
        return None
    configs = sweep.configs
    keys = dict.fromkeys(key for config in configs.values() for key in config)
    here = [key for key in keys if key not in ("seed", "data.fold", "out_dir")]
    here = [key for key in here if len({show(config.get(key)) for config in configs.values()}) > 1]
    if not here:
        return None
    rows = [
        [s, " ".join(f"{key}={show(config[key])}" for key in here if key in config)] for s, config in configs.items()
    ]
    return Table(["setting", "its settings, where they are not the same in all"], rows, 2, "Settings", folded=True)


def pairs_of(c: Comparison) -> str:
    """How many there are; of several seeds a fold also the number that counts."""
    n = len(c.differences)
    folds = c.estimate.n if c.estimate else n
    return f"{n} of {c.planned}" + (f" ({folds} folds, seeds averaged)" if folds < n else "")


def percent_of_b(c: Comparison) -> float | None:
    of_b = independent({r: b for r, (_, b) in c.values.items()}, c.shared > 0)
    return 100 * c.estimate.mean / fmean(of_b) if c.estimate else None


def share_table(left: Mapping[str, Mapping[int, Estimate]], whole: str) -> Table:
    """A row an evaluation, a column a setting. left: as statistics.shares() has it."""
    rows = [
        [f"{i:,}", *(mean_and_ends(of[i], "z.0%") if i in of else "–" for of in left.values())]
        for i in sorted({i for of in left.values() for i in of})
    ]
    title = f"Share of the difference in {whole} that is left, with Fieller's 95 % interval"
    return Table(["iteration", *left], rows, text_columns=0, title=title)


def ends(estimate: Estimate | None, spec: str) -> str:
    if estimate is None or estimate.low is None:
        return "–"
    return f"{number(estimate.low, spec)} to {number(estimate.high, spec)}"


def mean_and_ends(estimate: Estimate | None, spec: str) -> str:
    """The mean alone where it has no interval; with what its grid leaves open where it is read off a grid."""
    if estimate is None or estimate.low is None:
        return number(estimate.mean if estimate else None, spec)
    grid = f", grid ± {estimate.grid:.3g}" if estimate.grid else ""
    return f"{number(estimate.mean, spec)} ({ends(estimate, spec)}{grid})"


def paper_difference(sweep: Sweep, comparison: Comparison) -> float | None:
    terms = [(weight, sweep.paper(setting)) for setting, weight in comparison.terms]
    known = [(weight, number) for weight, number in terms if number is not None]
    if len(known) < len(terms) or len({number for _, number in known}) == 1:  # one number of the paper for all
        return None
    return sum(weight * number for weight, number in known)


def fault_table(sweep: Sweep) -> Table:
    """Each setting with a fault or random tokens, and what shows the fault: the warnings of train.py and, on uniformly
    random tokens, a last training loss more than FLOOR_TOLERANCE below ln V."""
    rows = []
    for setting in sweep.settings:
        done = sweep.done(setting)
        fault = next(iter(sweep.runs_of(setting).values())).config["fault.name"]
        on_random = [run.summary for run in done if run.config["data.name"] == "random"]
        if fault == "none" and not on_random:
            continue
        recorded = [run.summary["start_up_warnings"] for run in done if "start_up_warnings" in run.summary]
        warned = Counter(warning.split(":")[0] for warnings in recorded for warning in warnings)
        floors = [math.log(summary["vocab_size"]) for summary in on_random]
        losses = [summary["train/loss"] for summary in on_random]
        below = sum(loss < floor - FLOOR_TOLERANCE for loss, floor in zip(losses, floors, strict=True))
        rows.append([
            setting, fault,
            "; ".join(f"{warning} ({n} of {len(done)})" for warning, n in warned.items())
            or ("–" if recorded else "not recorded"),
            number(mean_of(done, "train/loss")), number(fmean(floors) if floors else None),
            f"{below} of {len(floors)}" if floors else "–",
        ])  # fmt: skip
    columns = ["setting", "fault", "start-up warnings", "last train/loss", "ln V, the floor on random tokens"]
    return Table([*columns, f"runs more than {FLOOR_TOLERANCE} below it"], rows, text_columns=3)


def stability_table(sweep: Sweep) -> Table | None:
    """For each variant the highest stable learning rate, where several are swept; None where they are not."""
    rows = []
    for variant, runs_at in runs_by_rate(sweep).items():
        highest, failure = highest_stable(runs_at)
        known = final_means(runs_at)
        best = best_rate(known) if known else None
        alone = stable_by_replicate(runs_at)
        rows.append([
            variant, number(best, "g"), number(known.get(best or 0.0)), number(highest, "g"),
            f"all {number(highest, 'g')}" if {*alone.values()} == {highest}
            else ", ".join(f"{replicate_name(r)}: {number(rate, 'g')}" for r, rate in alone.items()), failure,
            ", ".join(f"{rate:g}: {number(known.get(rate), '.3f')}" for rate in runs_at),
        ])  # fmt: skip
    columns = ["variant", "best rate", "its final loss", "highest stable rate", "of each run alone"]
    return Table([*columns, "how the next one fails", "final loss by rate"], rows) if rows else None


def missing_tables(sweep: Sweep) -> list[Table]:
    """Every run that is not done, with the reason; those that have not begun apart, and folded."""

    def table(states: Sequence[str]) -> Table:
        runs = [run for state in states for run in sweep.runs if run.state.state == state]
        return filled(columns, runs, text_columns=5)

    columns: Columns[Run] = {
        "run": lambda run: run.id,
        "settings": lambda run: ", ".join(run.settings),
        "fold or seed": lambda run: replicate_name(run.replicate),
        "state": lambda run: run.state.state,
        "reason": lambda run: run.state.reason,
    }
    pending = table(["pending"])
    lost = table([state for state in STATES if state not in ("done", "pending")])
    return [lost, replace(pending, title=f"{len(pending.rows)} pending", folded=True)]


def facts(sweep: Sweep) -> dict[str, str]:
    """Label -> value of the report's list "What was run"."""
    folds = sorted({run.config["data.fold"] for run in sweep.runs if run.config.get("data.fold") is not None})
    foldable = all("data.fold" in run.config for run in sweep.runs)
    held_out = "the last 10 % are held out" if foldable else "the corpus has a validation part of its own"
    asked = [one["overrides"] for one in sweep.about.get("frozen", [])]  # at each time that runs were planned
    common = [word for word in (asked or [[]])[0] if all(word in other for other in asked)]
    words = dict(word.partition("=")[::2] for word in [*sweep.definition.overrides, *common])  # the last one counts
    values = {key: {show(run.config.get(key, run.config.get(f"{key}.name"))) for run in sweep.runs} for key in words}
    same = {key: found.pop() for key, found in values.items() if len(found) == 1}
    shared = {key: words[key] if value == show(None) else value for key, value in same.items()}
    commits = [short(one) for several in sweep.distinct("commit") for one in several.split(", ")]
    faults = [run.config["fault.name"] for run in sweep.runs if run.config["fault.name"] != "none"]
    found = {
        "runs": f"{len(sweep.runs)} planned: {tally([run.state for run in sweep.runs])}",
        "settings": f"{len(sweep.settings)}, in {len(sweep.parts)} part{'s' if len(sweep.parts) > 1 else ''}",
        "folds": ", ".join(map(str, folds)) or f"none: {held_out}",
        "seeds": ", ".join(map(str, sorted({run.seed for run in sweep.runs}))),
        "every run": " ".join(f"{key}={value}" for key, value in shared.items()),
        "parameters": ", ".join(f"{n:,}" for n in sweep.distinct("parameters")),
        "device": "; ".join(sweep.distinct("device")),
        "ranks": ", ".join(map(str, sweep.distinct("ranks"))) if sweep.has_ranks else "",
        "dtype": ", ".join(sweep.distinct("dtype")),
        "PyTorch": ", ".join(sweep.distinct("torch")),
        "Python": ", ".join(sweep.distinct("python")),
        "commit": ", ".join(dict.fromkeys(commits)),
        "corpus SHA-256": ", ".join(sweep.distinct("corpus_sha256")),
        "plugins": ", ".join(f"{name} ({n} versions)" if n > 1 else name for name, n in sweep.plugin_versions.items()),
        "paper": sweep.definition.paper.get("name", ""),
        "deliberate faults": ", ".join(dict.fromkeys(faults)),
    }
    return {key: value for key, value in found.items() if value}
