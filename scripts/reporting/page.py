"""The outline of a report, and the two ways to show it: table.md and report.html."""

import base64
import functools
import gzip
import html
import json
import re
import resource
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import vl_convert

from core.schema import require
from scripts.reporting import tables
from scripts.reporting.charts import VEGA_LITE, Figure, theme
from scripts.reporting.comparisons import Family, shares
from scripts.reporting.figures import difference_figure, family_figures, part_figures, rate_figures
from scripts.reporting.runs import Sweep
from scripts.reporting.tables import Table
from sweeps.plan import temperature_note, unknown_points

TEMPLATE = Path(__file__).with_name("page.html")
MARK = b'<meta name="generator" content="nanoQK">'
NOTES = Path(__file__).with_name("notes.md")
HINT = (
    "In a chart: click a name to hide or show a setting; hover for values; drag to move, Ctrl and the wheel to zoom; "
    "a double click shows all again."
)
CONCLUSIONS = (
    "A − B is the difference in the lowest validation loss, in nats a token, unless a table names another metric. "
    "{corrected}Holm's p is corrected for the number of comparisons. Two "
    "settings are *not told apart* where Holm's p is above 0.05, even if the interval excludes 0."
)
CLAIMS = (
    " A claim is *excluded*, which rules it out, where the interval leaves no room for the claimed size or for a "
    "difference worth having; *no power*: it cannot decide."
)
STILL_FALLING = (
    "**All {n} runs that are done have their lowest validation loss at their last evaluation**: longer runs may change "
    "the order."
)
END = "<!-- end -->"  # of what a script writes into a page of Markdown
FOLD_ABOVE = 20  # rows: the page folds a longer table without a title
OPEN_FILES = 64


@dataclass(frozen=True)
class Markup:
    """HTML for the page alone, in which all text is escaped."""

    html: str


@dataclass(frozen=True)
class Section:
    """items: paragraphs (with words in **, * or `), tables, figures and markup. grid: side by side."""

    title: str
    items: Sequence[str | Table | Figure | Markup]
    grid: bool = False


@dataclass(frozen=True)
class Content:
    """A page. about: label -> value of what was run; hint: how to use its charts."""

    title: str
    state: str
    about: Mapping[str, str]
    sections: Sequence[Section]
    hint: str = HINT

    def shown(self) -> dict[str, Any]:
        """What a live page gets anew."""
        charts = {figure.name: figure.spec for figure in figures_of(self.sections)}
        return {"state": self.state, "body": body(self.sections), "charts": charts}


def outline(sweep: Sweep, families: Sequence[Family]) -> list[Section]:
    """What the report says, in order."""
    first = [f"**{said}.**" for said in caveats(sweep, families)]
    not_run = [family.heading for family in families if not was_planned(sweep, family)]
    families = [family for family in families if was_planned(sweep, family)]
    figures, more_figures = part_figures(sweep), family_figures(sweep, families)
    conclusions: list[str | Table | Figure] = []
    for family in families:
        conclusions.append(tables.conclusion_table(family))
        if figure := difference_figure(family):
            explained = any(isinstance(item, Figure) for item in conclusions)
            conclusions.append(replace(figure, caption="") if explained else figure)
    several_folds = any(c.shared > 0 for family in families for c in family.comparisons[0])
    corrected = "Interval and p are corrected for the text that folds share. " if several_folds else ""
    claims = CLAIMS if any(family.asked.claim for family in families) else ""
    said = CONCLUSIONS.format(corrected=corrected) + claims
    done = [run for run in sweep.runs if run.done and run.losses]
    falling = all(run.losses[max(run.losses)] == min(run.losses.values()) for run in done)
    warned = [STILL_FALLING.format(n=len(done))] if falling and len(done) > 1 else []
    sections = [Section("Conclusions", [said, *warned, *conclusions])] if conclusions else []
    sections += [
        Section(
            sweep.title_of(part) if part else "The settings",
            [tables.part_table(sweep, settings), *figures[part], tables.readings_table(sweep, settings)],
        )
        for part, settings in sweep.parts.items()
    ]
    sections[0] = replace(sections[0], items=[*first, *sections[0].items])
    for family in families:
        compared: list[str | Table | Figure] = []
        for metric, comparisons in zip(family.metrics, family.comparisons, strict=True):
            table = tables.comparison_table(sweep, comparisons, metric)
            compared.append(replace(table, title=metric.name.capitalize(), folded=bool(compared)))
        if left := shares(sweep, families, family):
            compared.insert(1, tables.share_table(left, family.asked.share_of or ""))
        sections.append(Section(family.heading, [*compared[:1], *more_figures[family.name], *compared[1:]]))
    if any(run.config["fault.name"] != "none" for run in sweep.runs):
        sections.append(with_notes("Deliberate faults", tables.fault_table(sweep)))
    if stability := tables.stability_table(sweep):
        sections.append(with_notes("Highest stable learning rate", stability, *rate_figures(sweep)))
    if settings := tables.settings_table(sweep):
        sections.append(Section("What each setting is", [settings]))
    missing: list[str | Table | Figure] = [table for table in tables.missing_tables(sweep) if table.rows]
    if not_run:
        missing.append(f"In the sweep's file, but not in this sweep: {'; '.join(not_run)}.")
    sections.append(Section("Runs that are not done", missing or ["None."]))
    return [*sections, with_notes("How to read this")]


def caveats(sweep: Sweep, families: Sequence[Family]) -> list[str]:
    """What a reader must know before the conclusions: comparisons that measure something else, or are none."""
    lost = tuple(f"compare.{family.name}: " for family in families if not was_planned(sweep, family))
    found = [temperature_note(sweep.definition, sweep.configs)]
    found += [said for said in unknown_points(sweep.definition, sweep.settings) if said.startswith(lost)]
    for name, n in sweep.plugin_versions.items():
        if n > 1:
            found.append(f"the plugin {name} changed between runs: {n} versions of it are compared")
    for task, ways in sweep.evaluations.items():
        if len(ways) > 1:
            found.append(f"the runs were evaluated by {task} in different ways: {'; '.join(sorted(ways))}")
    for said, settings in sweep.mixed.items():
        found.append(f"the runs of {', '.join(settings)} differ in {said}: their mean mixes several settings")
    return [said for said in found if said]


def was_planned(sweep: Sweep, family: Family) -> bool:
    """Whether all settings of some comparison were planned; `sweep.parts` may leave some out."""
    return any(all(sweep.runs_of(setting) for setting, _ in c.terms) for c in family.comparisons[0])


def with_notes(title: str, *items: Table | Figure) -> Section:
    """A section that begins with the paragraphs under its title in notes.md."""
    text = NOTES.read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]
    return Section(title, [*text.strip().split("\n\n"), *items])


def figures_of(sections: Sequence[Section]) -> list[Figure]:
    return [item for section in sections for item in section.items if isinstance(item, Figure)]


def with_block(text: str, begin: str, block: str) -> str:
    """The text with `block` between the marks `begin` and END. Raises: ConfigError where it lacks one, or the block has
    END in it, before which the next one would end."""
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(END)
    require(bool(found and closed), f"no place between {begin.strip()} and {END}")
    require(END not in block, f"{END} cannot stand between {begin.strip()} and {END}")
    return f"{before}{begin}\n{block}\n{END}{after}"


def markdown(title: str, about: Mapping[str, str], sections: Sequence[Section]) -> str:
    """table.md, without the figures: git keeps it, and they would be most of its size."""

    def text(item: str | Table | Figure | Markup) -> str:
        assert not isinstance(item, Figure | Markup), "for the page alone"
        if isinstance(item, Table):
            heading = f"### {item.title}\n\n" if item.title else ""
            return heading + (item.markdown() if item.rows else "Nothing to compare.\n")
        return f"{item}\n"

    blocks = [f"# {title}\n"]
    for i, section in enumerate(sections):
        blocks += [f"## {section.title}\n", *(text(item) for item in section.items if not isinstance(item, Figure))]
        if i == 0:  # the conclusions come first
            rows = [[key, value] for key, value in about.items()]
            blocks += ["## What was run\n", Table(["", ""], rows, text_columns=2).markdown()]
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", "\n".join(blocks))  # names may hold tags


def body(sections: Sequence[Section]) -> str:
    """Contents and sections in HTML, with a place for each chart."""

    def text(item: str | Table | Figure | Markup) -> str:
        if isinstance(item, Markup):
            return item.html
        if isinstance(item, Table):
            table = item.html() if item.rows else "<p>Nothing to compare.</p>"
            if item.folded or len(item.rows) > FOLD_ABOVE and not item.title:
                name = item.title or f"{len(item.rows)} rows"
                return f"<details><summary>{html.escape(name)}</summary>{table}</details>"
            return f"<h3>{html.escape(item.title)}</h3>\n{table}" if item.title else table
        if isinstance(item, Figure):
            caption = f"<figcaption>{html.escape(item.caption)}</figcaption>" if item.caption else ""
            return f'<figure><div class="chart" id="{item.name}"></div>{caption}</figure>'
        marked = html.escape(item, quote=False)
        for mark, tag in ((r"\*\*", "strong"), (r"\*", "em"), ("`", "code")):
            marked = re.sub(f"{mark}(.+?){mark}", rf"<{tag}>\1</{tag}>", marked)
        return f"<p>{marked}</p>"

    links = [f'<li><a href="#section-{i}">{html.escape(of.title)}</a></li>' for i, of in enumerate(sections)]
    found = [f"<nav><details><summary>Contents</summary><ol>{''.join(links)}</ol></details></nav>\n"]
    for i, section in enumerate(sections):
        items = "\n".join(map(text, section.items))
        inner = f'<div class="grid">\n{items}\n</div>' if section.grid else items
        found.append(f'<section id="section-{i}">\n<h2>{html.escape(section.title)}</h2>\n{inner}\n</section>\n')
    return "".join(found)


def require_open_files(n: int = OPEN_FILES) -> None:
    """Raise ConfigError where a process may open fewer files than drawing takes: vl-convert would end in a panic."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    enough = most >= n or most == resource.RLIM_INFINITY
    require(enough, f"ulimit -n {most} is too low: a page of charts takes {n} open files")


def page(content: Content, live: bool = False) -> str:
    """report.html: one page that needs no other file and no network. Its charts and Vega's runtime are compressed.
    live: it asks for data.json, which has Content.shown(), every few seconds."""
    require_open_files()
    shown = content.shown()
    facts = "".join(f"<dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd>" for key, value in content.about.items())
    return string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=html.escape(content.title), state=html.escape(content.state), hint=html.escape(content.hint),
        body=shown["body"], facts=facts and f"<details><summary>What was run</summary><dl>{facts}</dl></details>",
        themes=json.dumps({"light": theme(dark=False), "dark": theme(dark=True)}), live=json.dumps(live),
        charts=packed(json.dumps(shown["charts"])), runtime=vega(),
    )  # fmt: skip


@functools.cache
def vega() -> str:
    """Vega's runtime, packed: about a second, once a process."""
    return packed(vl_convert.javascript_bundle(vl_version=VEGA_LITE))  # type: ignore[call-arg]  # its stub asks for more


def packed(text: str) -> str:
    """gzip in base64, which the page's unpack() reads."""
    return base64.b64encode(gzip.compress(text.encode(errors="replace"), mtime=0)).decode()
