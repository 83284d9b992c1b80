"""A sweep's report: python scripts/report.py sweep=NAME

Reads the files of a sweep (by default runs/NAME), done or not, and writes to results/NAME: runs.csv (a line a run),
curves.csv.gz, table.md (every number, with its spread and its test), figures as SVG, report.html (one page to explore,
without network) and provenance.json. The same runs give the same bytes. Neither torch nor a GPU is needed.
python scripts/report.py from=results/NAME writes it again from the first two and provenance.json, without the runs:
in results/, Git keeps neither the page nor most figures.
python scripts/report.py run=RUN writes RUN/report.html: the curves, attention heads, samples and settings of one run.
watch=true, with sweep= or run=, writes nothing: it serves that page, which then shows what is new every few seconds.
"""

import csv
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from core.cli import run_script
from core.files import expand, finish_replacing, folder_locked, read_json, readable_json, replace_files, write_atomic
from core.process import say
from core.schema import NOT_EMPTY, ConfigError, Help, Rule, Writable, one_line, options, require
from scripts.reporting.charts import svg
from scripts.reporting.comparisons import compared_families
from scripts.reporting.live import run_content, watch
from scripts.reporting.one_run import single_run
from scripts.reporting.page import MARK, Content, caveats, figures_of, markdown, outline, page
from scripts.reporting.runs import Sweep, read_sweep
from scripts.reporting.stored import common_config, curves_csv, joined, read_stored, runs_csv
from scripts.reporting.tables import facts
from sweeps.definition import sweep_name
from sweeps.status import FINAL, SweepPlace, finished_in, tally


def report(sweep: Sweep, out: Path, argv: Sequence[str]) -> None:
    """Write a sweep's report. Raises: ConfigError before anything is written."""
    require(not out.exists() or out.is_dir(), f"out={out} is not a directory")
    families = compared_families(sweep)
    for said in caveats(sweep, families):
        say(f"note: {said}")
    about, sections = facts(sweep), outline(sweep, families)
    done = f"{sum(run.done for run in sweep.runs)} of {len(sweep.runs)} runs done"
    figures = figures_of(sections)
    for name, n in Counter(figure.name for figure in figures).items():
        require(n == 1, f"{n} figures would be {name}.svg: rename a part or a comparison")
    stored = {
        "runs.csv": runs_csv(sweep).encode(errors="replace"),
        "curves.csv.gz": curves_csv(sweep),
        "table.md": markdown(sweep.title, about, sections).encode(errors="replace"),
    }
    drawn = {
        "report.html": page(Content(sweep.title, done, about, sections)).encode(errors="replace"),
        **{f"{figure.name}.svg": svg(figure) for figure in figures},
    }
    write_files(out, stored | drawn, provenance(sweep, stored, drawn, argv))


def provenance(sweep: Sweep, stored: Mapping[str, bytes], drawn: Iterable[str], argv: Sequence[str]) -> dict[str, Any]:
    """What the files were made from, the SHA-256 of the stored ones, and the names of the page and the figures."""
    return {
        "sweep": sweep.name,
        "command": shlex.join(["python", "scripts/report.py", *argv]),
        "runs": dict(Counter(run.state.state for run in sweep.runs)),
        "planned": sweep.about.get("frozen", []),
        **{key: sweep.distinct(key) for key in ("commit", "device", "torch", "python", "dtype", "corpus_sha256")},
        "definition": sweep.about["sweep"],
        "config": common_config(sweep),
        "sha256": {name: sha256(content).hexdigest() for name, content in stored.items()},
        "drawn": [*drawn],
    }


def files_of(out: Path) -> set[str]:
    """The names of the files of the report in `out`, of those that a report can have."""
    about, kept = read_json(out / "provenance.json"), r"runs\.csv|curves\.csv\.gz|table\.md|report\.html|[^/\0]+\.svg"
    named = [about[key] for key in ("sha256", "drawn") if isinstance(about.get(key), dict | list)]
    return {one for of in named for one in of if isinstance(one, str) and re.fullmatch(kept, one)}


def write_files(out: Path, files: Mapping[str, bytes], about: Mapping[str, Any]) -> None:
    """Write the files and provenance.json; delete those of the report before that are no longer part of it. Raises:
    ConfigError where they would replace files of another origin."""
    out.mkdir(parents=True, exist_ok=True)
    with folder_locked(out):
        finish_replacing(out)
        ours = {"sha256", "drawn"} <= read_json(out / "provenance.json").keys()
        other = [] if ours else [name for name in (*files, "provenance.json") if os.path.lexists(out / name)]
        require(not other, f"out={out} has {', '.join(other)}, which no report wrote: write another out=")
        before = files_of(out)
        replace_files(out, {**files, "provenance.json": readable_json(about)})
        for name in before - set(files):
            (out / name).unlink(missing_ok=True)


def refuse_to_drop_runs(sweep: Sweep, out: Path) -> None:
    """Raises: ConfigError where the report in `out` has runs at their end that `sweep` lacks, or cannot be read."""
    if not (out / "runs.csv").is_file():
        return
    replaces = f"out={out} replaces it, another out= keeps it"
    try:
        stored = finished_in(out)
    except (ValueError, KeyError, csv.Error) as error:
        raise ConfigError(f"{out / 'runs.csv'} cannot be read ({one_line(error)}): {replaces}") from error
    if not (lost := stored - {run.id for run in sweep.runs if run.state.state in FINAL}):
        return
    with suppress(ConfigError):  # another study's, which cannot stand beside these
        joined(read_stored(out, sweep.name), sweep)
        replaces = f"from={out} adds them, {replaces}"
    raise ConfigError(f"{out} has finished runs that this report lacks ({len(lost)}): {replaces}")


@options
class ReportOptions(SweepPlace):
    out: Annotated[
        str | None, NOT_EMPTY, Help("folder of the report; null: that of from= or run= alone, or results/NAME")
    ] = None
    from_: Annotated[
        str | None,
        NOT_EMPTY,
        Help("folder of a report; with sweep=: its runs are added to those here; alone: write that report again"),
    ] = None
    run: Annotated[str | None, NOT_EMPTY, Help("directory of a single run")] = None
    watch: Annotated[bool, Help("serve a page on 127.0.0.1 that shows the runs while they train")] = False
    port: Annotated[
        int, Rule(lambda port: 0 <= port < 65536, "must be a port"), Help("of watch=true; 0: a free one")
    ] = 0

    def check(self) -> None:
        given = bool(self.sweep or self.sweep_dir)
        require(not self.run or not (given or self.from_), "run= is given without sweep= and from=")
        if self.watch:
            require(given or bool(self.run), "watch=true takes either sweep= or run=")
            require(not (self.out or self.from_), "watch=true takes no out= or from=")
        else:
            require(self.port == 0, "port= is a setting of watch=true")
            require(given or bool(self.from_ or self.run), "sweep=, run= or from= must be given")


def write_run(path: Path, out: str | None) -> int:
    run = single_run(path)
    run.update()
    folder = expand(out) if out else path
    require(not folder.exists() or folder.is_dir(), f"out={out} is not a directory")
    folder.mkdir(parents=True, exist_ok=True)
    ours = out is None or Writable(MARK).holds(str(folder / "report.html"))  # an earlier version left no mark
    require(ours, f"{folder / 'report.html'} cannot be written, or no report wrote it: write another out=")
    write_atomic(folder / "report.html", page(run_content(run)).encode(errors="replace"))
    say(f"open {shlex.quote(str(folder / 'report.html'))}")
    return 0


def write_report(asked: ReportOptions, argv: list[str]) -> int:
    if asked.watch:
        return watch(asked.directory, expand(asked.run) if asked.run else None, asked.port)
    if asked.run:
        return write_run(expand(asked.run).resolve(), asked.out)
    name = sweep_name(str(expand(asked.sweep or asked.sweep_dir or asked.from_ or "").resolve()))
    again = not (asked.sweep or asked.sweep_dir)  # from= alone: the report in that folder is made again
    out = expand(asked.out or (asked.from_ if again else None) or Path("results") / name)
    finish_replacing(out)
    if asked.from_ is None:
        sweep = read_sweep(asked.directory, name)
    else:
        sweep = read_stored(expand(asked.from_), name)
        if not again:
            sweep = joined(sweep, read_sweep(asked.directory, name))
    if asked.out is None:
        refuse_to_drop_runs(sweep, out)
    report(sweep, out, argv)
    states, page_file = tally([run.state for run in sweep.runs]), shlex.quote(str(out / "report.html"))
    say(f"{out}: {len(sweep.runs)} runs, {states}; open {page_file}")
    return 0


def main(argv: list[str]) -> int:
    return run_script(ReportOptions, lambda asked: write_report(asked, argv), __doc__, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
