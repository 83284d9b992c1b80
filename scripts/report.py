"""A sweep's report: python scripts/report.py sweep=NAME [sweep_dir=PATH] [out=PATH]

Reads the files of a sweep (by default runs/NAME), done or not, and writes to results/NAME: runs.csv (a line a run),
table.md (every number, with its spread and its test), figures as SVG and PNG, report.html (one page to explore, without
network) and provenance.json. The same runs give the same bytes. Neither torch nor a GPU is needed.
"""

import html
import json
import math
import re
import shlex
import string
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any

import vl_convert

from core.cli import run_script
from core.files import read_json, write_atomic
from core.schema import require
from scripts.reporting.charts import (
    STABILITY_CAPTION,
    Series,
    Style,
    curve_chart,
    difference_chart,
    draw_metrics,
    draw_part,
    draw_stability,
    image,
    stability_chart,
    styles,
    time_chart,
)
from scripts.reporting.runs import METRICS, Family, Run, Sweep, families, read_sweep
from scripts.reporting.statistics import Replicate
from scripts.reporting.tables import (
    FAULT_NOTE,
    HONEST,
    NOTES,
    STABILITY_NOTE,
    by_rate,
    comparison_table,
    facts,
    fault_table,
    final_losses,
    missing_table,
    part_table,
    runs_csv,
    seconds,
    stability_table,
    table_md,
)
from sweeps.definition import REDUCTIONS
from sweeps.status import sweep_directory, tally

POINTS = 100  # of a curve that figures and the page show of a metric other than the loss

# -----------------------------------------------------------------------------
# The page: reporting/page.html with the tables, and charts that are Vega-Lite (by Altair) and its runtime


def series_of(sweep: Sweep, settings: Sequence[str], look: Mapping[str, Style]) -> list[Series]:
    """What figures draw of some settings: those with a run that is done or diverged."""
    series = []
    for setting in settings:
        done = sweep.done(setting)
        curves = {run.replicate: run.curve for run in done}
        diverged = {run.replicate: run.curve for run in sweep.diverged(setting) if run.curve}
        series.append(Series(sweep.label(setting), look[setting], curves, seconds(done), diverged))
    return [s for s in series if s.curves or s.diverged]


def labels(sweep: Sweep, settings: Sequence[str]) -> dict[str, str]:
    return {setting: sweep.label(setting) for setting in settings}


def other_series(
    sweep: Sweep, settings: Mapping[str, str], look: Mapping[str, Style]
) -> dict[str, dict[str, list[Series]]]:
    """Of the definition's `also`: pattern -> {key that matches it: series}; without what no run has.
    settings: setting -> its name in the figure."""
    found: dict[str, dict[str, list[Series]]] = {}
    for pattern, how in drawn_as(sweep).items():
        runs = {setting: (sweep.done(setting), sweep.diverged(setting)) for setting in settings}
        every = [run for both in runs.values() for some in both for run in some]
        for key in sorted({key for run in every for key in run.curves if fnmatchcase(key, pattern)}):

            def of(some: list[Run], key: str = key, how: str = how) -> dict[Replicate, dict[int, float]]:
                return {r.replicate: thinned(r.curves[key], how) for r in some if key in r.curves}

            series = [Series(settings[s], look[s], of(a), [], of(b)) for s, (a, b) in runs.items()]
            found.setdefault(pattern, {})[key] = [s for s in series if s.curves or s.diverged]
    return found


def drawn_as(sweep: Sweep) -> dict[str, str]:
    """Of the definition's `also`, what is in the runs' lines: pattern -> the reduction that thins its curves."""
    return {key: how[0].replace("roughness", "last") for key, how in sweep.logged.items()}


def rate_panels(sweep: Sweep) -> dict[str, dict[str, list[Series]]]:
    """Where learning rates are swept, of each metric with one key: key -> {"learning rate 0.1": a series a variant}."""
    variants = by_rate(sweep)
    panels: dict[str, dict[str, list[Series]]] = {}
    for rate in sorted({rate for of in variants.values() for rate in of}):
        settings = {of[rate]: variant for variant, of in variants.items() if rate in of}
        found = other_series(sweep, settings, styles({"": settings}))
        for key, groups in found.items():
            if [*groups] == [key]:
                panels.setdefault(key, {})[f"learning rate {rate:g}"] = groups[key]
    return panels


def thinned(curve: Mapping[int, float], how: str) -> dict[int, float]:
    """A curve of at most POINTS values: of each of so many equal spans one, by the metric's own reduction (REDUCTIONS),
    so that no peak is lost of a maximum. The value stands at the span's last iteration."""
    width = math.ceil((max(curve) + 1) / POINTS)
    spans: dict[int, dict[int, float]] = {}
    for i, value in curve.items():
        spans.setdefault(i // width, {})[i] = value
    return {max(of): REDUCTIONS[how](list(of.values())) for of in spans.values()}


def page(sweep: Sweep, compared: Sequence[Family], look: Mapping[str, Style]) -> str:
    charts: dict[str, dict[str, Any]] = {}
    body: list[str] = []

    def section(title: str, *content: str) -> None:
        heading = f'<section id="section-{len(body)}">\n<h2>{html.escape(title)}</h2>'
        body.append("\n".join([heading, *content, "</section>"]))

    def figure(name: str, chart: Any, caption: str) -> str:
        charts[name] = chart.to_dict()  # Altair
        return f'<figure><div class="chart" id="{name}"></div><figcaption>{html.escape(caption)}</figcaption></figure>'

    for i, (part, settings) in enumerate(sweep.parts.items()):
        series = series_of(sweep, settings, look)
        content = [part_table(sweep, settings).html()]
        hint = "Click a name to switch it off or on; hover for values; drag and scroll to move and zoom."
        if series:
            caption = f"Mean of the runs with the 95 % t interval of the mean, or single folds. {hint}"
            content.insert(0, figure(f"loss-{i}", curve_chart(series), caption))
            caption = "Training time: median, quartiles, whiskers to 1.5 IQR; the diamond is the mean."
            content.append(figure(f"time-{i}", time_chart(series), caption))
        for j, (key, groups) in enumerate(other_series(sweep, labels(sweep, settings), look).items()):
            if len(groups) == 1:  # of more, the figures have the panels
                content.append(figure(f"metric-{i}-{j}", curve_chart(groups[key], key), f"{key}. {hint}"))
        section(sweep.title_of(part), *content)
    for i, family in enumerate(compared):
        content = []
        for metric, comparisons in zip(sweep.metrics, family.metrics, strict=True):
            table = comparison_table(sweep, comparisons, metric).html() if comparisons else "<p>Nothing to compare.</p>"
            if metric is not METRICS[0]:
                table = f"<details><summary>{metric.name.capitalize()}</summary>{table}</details>"
            elif any(c.differences for c in comparisons):
                caption = "A − B in validation loss: a point a fold or seed; the bar is the mean's 95 % interval."
                content.append(figure(f"difference-{i}", difference_chart(comparisons), caption))
            content.append(table)
        section(f"Comparison {': '.join(filter(None, [family.name, family.title]))}", *content)
    if any(run.plan.config.fault != HONEST for run in sweep.runs):
        section("Deliberate faults", f"<p>{FAULT_NOTE}</p>", fault_table(sweep).html())
    if stability := stability_table(sweep):
        chart = figure("stability", stability_chart(final_losses(sweep)), STABILITY_CAPTION)
        section("Highest stable learning rate", chart, f"<p>{STABILITY_NOTE}</p>", stability.html())
    missing = missing_table(sweep)
    states = tally([run.state for run in sweep.runs if not run.done])
    opened = " open" * (len(missing.rows) <= 20)
    listed = f"<details{opened}><summary>{states}</summary>{missing.html()}</details>"
    section("Runs that are not done", listed if missing.rows else "<p>None.</p>")
    notes = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", html.escape(NOTES, quote=False))
    section("How to read this", *(f"<p>{paragraph}</p>" for paragraph in notes.split("\n\n")))
    rows = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in facts(sweep).items())
    done = sum(run.done for run in sweep.runs)
    template = string.Template((Path(__file__).parent / "reporting" / "page.html").read_text(encoding="utf-8"))
    bundle = vl_convert.javascript_bundle(vl_version="6.4")  # type: ignore[call-arg]  # its stub asks for more
    return template.substitute(
        title=html.escape(sweep.title), state=f"{done} of {len(sweep.runs)} runs done", facts=rows,
        body="\n".join(body), charts=json.dumps(charts).replace("<", "\\u003c"),
        runtime=bundle.replace("</script", "<\\/script"),
    )  # fmt: skip


# -----------------------------------------------------------------------------
# The files


def suffixes_of(parts: Iterable[str]) -> dict[str, str]:
    """What a part adds to its figures' names; no two add the same."""
    suffixes: dict[str, str] = {}
    for part in parts:
        plain = suffix = f"_{re.sub(r'[^A-Za-z0-9.-]+', '_', part)}" if part else ""
        n = 1
        while suffix in suffixes.values():
            n += 1
            suffix = f"{plain}_{n}"
        suffixes[part] = suffix
    return suffixes


def file_name(key: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "_", key).strip("_")


def report(sweep_dir: Path, out: Path, name: str, argv: Sequence[str]) -> Sweep:
    """Read a sweep and write its report. Raises: ConfigError before anything is written."""
    require(not out.exists() or out.is_dir(), f"out={out} is not a directory")
    sweep = read_sweep(sweep_dir, name)
    compared = families(sweep)
    look = styles({part: labels(sweep, settings) for part, settings in sweep.parts.items()})
    files: dict[str, bytes] = {"runs.csv": runs_csv(sweep).encode()}
    figures: list[tuple[str | None, str, str]] = []
    spans = {key: f"a point is the {how} over a {POINTS}th of the run" for key, how in drawn_as(sweep).items()}
    suffixes = suffixes_of(sweep.parts)
    for part, settings in sweep.parts.items():
        suffix = suffixes[part]
        series = series_of(sweep, settings, look)
        drawn = list(draw_part(series, sweep.title_of(part))) if series else []
        for key, groups in other_series(sweep, labels(sweep, settings), look).items():
            drawn.append((file_name(key), *draw_metrics(groups, key, sweep.title_of(part), spans[key])))
        for kind, figure, caption in drawn:
            figures.append((part, f"{kind}{suffix}.svg", caption))
            files |= {f"{kind}{suffix}.{ending}": image(figure, ending) for ending in ("svg", "png")}
    if finals := final_losses(sweep):
        drawn = [("stability", draw_stability(finals, sweep.title), STABILITY_CAPTION)]
        for key, groups in rate_panels(sweep).items():
            drawn.append((f"stability_{file_name(key)}", *draw_metrics(groups, key, sweep.title, spans[key])))
        for kind, figure, caption in drawn:
            figures.append((None, f"{kind}.svg", caption))
            files |= {f"{kind}.{ending}": image(figure, ending) for ending in ("svg", "png")}
    files["table.md"] = table_md(sweep, compared, figures).encode()
    files["report.html"] = page(sweep, compared, look).encode()
    provenance = {
        "sweep": sweep.name,
        "command": shlex.join(["python", "scripts/report.py", *argv]),
        "runs": dict(Counter(run.state.state for run in sweep.runs)),
        "planned": sweep.about.get("frozen", []),
        **{key: sweep.distinct(key) for key in ("commit", "device", "torch", "python", "dtype", "corpus_sha256")},
        "definition": sweep.definition,
        "sha256": {name: sha256(content).hexdigest() for name, content in files.items()},
    }
    out.mkdir(parents=True, exist_ok=True)
    before = read_json(out / "provenance.json").get("sha256", {})
    for name, content in files.items():
        write_atomic(out / name, content)
    for name in set(before) - set(files):  # a figure of a part that is gone
        if Path(name).name == name:
            (out / name).unlink(missing_ok=True)
    write_atomic(out / "provenance.json", (json.dumps(provenance, indent=2, ensure_ascii=False) + "\n").encode())
    return sweep


def write_report(values: dict[str, Any], argv: list[str]) -> int:
    sweep_dir = sweep_directory(values)
    name = Path(values.get("sweep") or sweep_dir.resolve().name).stem
    out = Path(values.get("out") or Path("results") / name).expanduser()
    sweep = report(sweep_dir, out, name, argv)
    print(f"{out}: {len(sweep.runs)} runs, {tally([run.state for run in sweep.runs])}; open {out / 'report.html'}")
    return 0


def main(argv: list[str]) -> int:
    known = {"sweep": str, "sweep_dir": str, "out": str}
    return run_script(argv, __doc__, known, lambda values: write_report(values, argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
