"""The live page of a sweep or a run: live.html, and /data.json, which it polls. Both are served on 127.0.0.1 alone."""

import html
import json
import re
import string
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from core.cli import parse_yaml
from core.files import read_json
from core.record import Lines, is_number
from core.schema import ConfigError, flatten, require, show
from scripts.reporting.charts import (
    DASHES,
    VEGA_LITE,
    Series,
    colours,
    legend_selection,
    palette,
    styles,
    theme,
    tooltips,
    zoom,
)
from scripts.reporting.page import TEMPLATE
from scripts.reporting.runs import thinned
from sweeps.definition import part_and_name
from sweeps.plan import PlannedRun, read_plan
from sweeps.status import State, state_of, tally
from training.config import load_config
from training.metrics import METRICS, in_words, shown_in

CURVES, HEADS = shown_in("live"), shown_in("heads")
SAMPLES = 20  # the last ones of each run
LOG = 8192  # bytes of its end


class WatchedRun:
    """What the page shows of a run. update() reads what is new, and keeps it as JSON."""

    def __init__(self, sweep_dir: Path, plan: PlannedRun) -> None:
        self.sweep_dir, self.plan, self.state = sweep_dir, plan, State("pending")
        folder = sweep_dir / plan.id
        self.metrics = Lines(folder / "metrics.jsonl")
        self.diagnostics = Lines(folder / "diagnostics.jsonl", keep=1)
        self.samples = Lines(folder / "samples.jsonl", keep=SAMPLES)
        self.json = ""

    def update(self) -> bool:
        """Whether something has changed."""
        before, self.state = self.state, state_of(self.sweep_dir, self.plan)
        new = [lines.update() for lines in (self.metrics, self.diagnostics, self.samples)]
        if self.json and self.state == before and not any(new):
            return False
        self.json = json.dumps(self.shown())
        return True

    def shown(self) -> dict[str, Any]:
        config, state = self.plan.config, self.state
        curves = {key: curve for key in CURVES if (curve := self.metrics.curve(key))}
        step = max(self.metrics.curve("iter"), default=0)
        speed = next(reversed(curves.get("tok_per_sec", {}).values()), 0.0)
        running = state.state == "running" and speed > 0
        left = (config.max_iters - step) * config.tokens_per_iter / speed if running else None
        samples = [{"iter": line["iter"], "text": str(line.get("text"))} for line in self.samples.lines[-SAMPLES:]]
        return {
            "id": self.plan.id, "setting": self.plan.points[0], "state": state.state, "reason": state.reason,
            "iter": step, "max_iters": config.max_iters, "seconds_left": left,
            "best": min(((loss, i) for i, loss in curves.get("val/loss", {}).items()), default=None),
            "curves": {key: [*thinned(curve, METRICS[key].thins).items()] for key, curve in curves.items()},
            "heads": self.heads(), "measured": self.diagnostics.lines[-1]["iter"] if self.diagnostics.lines else None,
            "samples": samples, "log": self.log(),
            "config": {key: show(value) for key, value in flatten(asdict(config)).items()},
        }  # fmt: skip

    def heads(self) -> dict[str, list[dict[str, float]]]:
        """The last line of diagnostics.jsonl, as rows of heat maps."""
        rows: dict[str, list[dict[str, float]]] = {key: [] for key in HEADS}
        for name, value in self.diagnostics.lines[-1].items() if self.diagnostics.lines else ():
            found = re.fullmatch(r"(.+)/layer_(\d{1,5})/head_(\d{1,5})", name)
            if found and found[1] in HEADS and is_number(value):
                rows[found[1]].append({"layer": int(found[2]), "head": int(found[3]), "value": value})
        return rows

    def log(self) -> str:
        """The end of the log of a run that did not end well."""
        if self.state.state not in ("failed", "diverged", "stopped"):
            return ""
        for file in (self.sweep_dir / "logs" / f"{self.plan.id}.log", self.sweep_dir / self.plan.id / "train.log"):
            with suppress(OSError), open(file, "rb") as opened:
                opened.seek(max(0, file.stat().st_size - LOG))
                return opened.read().decode(errors="replace")
        return ""


def watched_run(path: Path) -> PlannedRun:
    """A run directory as the only run of a sweep. Raises: ConfigError."""
    try:
        text = (path / "config.yaml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"run={path} holds no run (its config.yaml cannot be read)") from error
    content = parse_yaml(text, f"run={path} has a config.yaml that cannot be read")
    require(isinstance(content, dict), f"run={path} has a config.yaml without settings")
    config = load_config(content)
    return PlannedRun(path.name, [path.name], config.seed, None, [], config)


class LivePage:
    """The page of a sweep's directory, or of a single run's, and what it polls. Raises: ConfigError, at first."""

    def __init__(self, folder: Path, single: bool) -> None:
        self.folder, self.single = folder, single
        self.runs: dict[str, WatchedRun] = {}
        self.lock = threading.Lock()  # two pages may poll
        self.last_html, self.last_json = self.read(), b""

    def html(self) -> bytes:
        with suppress(ConfigError):  # the files may be away for a moment
            self.last_html = self.read()
        return self.last_html.encode()

    def read(self) -> str:
        plan = [watched_run(self.folder)] if self.single else read_plan(self.folder)  # it may have grown
        with self.lock:
            for run in plan:
                self.runs.setdefault(run.id, WatchedRun(self.folder.parent if self.single else self.folder, run))
        sweep = read_json(self.folder / "sweep.json").get("sweep") or {}
        title = ": ".join(filter(None, [self.folder.name, sweep.get("title")]))
        return page(title, plan, sweep.get("parts", {}))

    def json(self) -> bytes:
        with self.lock:
            runs = self.runs.values()
            changed = [run.update() for run in runs]  # of every run
            if any(changed):
                state = json.dumps(tally(run.state for run in runs))
                self.last_json = f'{{"state": {state}, "runs": [{", ".join(run.json for run in runs)}]}}'.encode()
            return self.last_json


def watch(sweep_dir: Path, run: Path | None, port: int) -> int:
    """Serve the page until Ctrl-C. Raises: ConfigError."""
    return serve(LivePage((run or sweep_dir).resolve(), single=run is not None), port)


def page(title: str, plan: Sequence[PlannedRun], parts: Collection[str] = ()) -> str:
    """live.html with its charts, and with the style of report.html."""
    named: dict[str, dict[str, str]] = {}
    for point in dict.fromkeys(run.points[0] for run in plan):
        part, name = part_and_name(point, parts)
        named.setdefault(part, {})[point] = name
    looks = styles(named)
    if len(named) > 1:  # a number has one colour in all parts
        looks = {
            p: replace(looks[p], dashes=DASHES[i % len(DASHES)]) for i, of in enumerate(named.values()) for p in of
        }
    series = [Series(point, style, {}) for point, style in looks.items()]
    charts = {key: live_chart(series, in_words(key), large=key == "val/loss").to_dict() for key in CURVES}
    heads = {key: head_chart(in_words(key)).to_dict() for key in HEADS}
    style = TEMPLATE.read_text(encoding="utf-8").partition("<style>")[2].partition("</style>")[0]
    return string.Template(TEMPLATE.with_name("live.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(title), style=style, runtime=vl_convert.javascript_bundle(vl_version=VEGA_LITE),  # type: ignore[call-arg]
        **{name: json.dumps(value).replace("<", "\\u003c") for name, value in {
            "charts": charts, "heads": heads, "themes": {"light": theme(dark=False), "dark": theme(dark=True)},
        }.items()},
    )  # fmt: skip


def serve(live: LivePage, port: int) -> int:
    """Answer GET / and GET /data.json, and nothing else.

    A Host header of another name is refused: that is how a foreign site whose name leads to 127.0.0.1 would read along.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = 30  # seconds for a browser that connects and asks nothing

        def do_GET(self) -> None:
            if self.headers.get("Host") not in (f"127.0.0.1:{server.server_port}", f"localhost:{server.server_port}"):
                self.send_error(403, "Host must be 127.0.0.1 or localhost, with the port")
                return
            if self.path not in ("/", "/data.json"):
                self.send_error(404)
                return
            content = live.html() if self.path == "/" else live.json()
            kind = "text/html; charset=utf-8" if self.path == "/" else "application/json"
            self.send_response(200)
            headers = {"Content-Type": kind, "Content-Length": str(len(content)), "Cache-Control": "no-store"}
            for name, value in {**headers, "X-Content-Type-Options": "nosniff"}.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(ConnectionError):  # the page was closed
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """The terminal shows the address alone."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise ConfigError(f"port={port} cannot be used: {error.strerror}") from error
    with server, suppress(KeyboardInterrupt):
        print(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C ends it)", flush=True)
        server.serve_forever()
    return 0


# -----------------------------------------------------------------------------
# Charts, which the page gives their rows


def live_chart(series: Sequence[Series], key: str, large: bool) -> alt.Chart:
    """A line for each run, of rows (setting, run, iteration, value, drawn). The page's chosen run stands out.

    drawn: the value, or where the axis ends. large: with a legend, which switches settings off and on.
    """
    chosen = alt.param(name="chosen", value="")
    names, legend = [s.name for s in series], large and 1 < len(series) <= 30
    dashes = alt.Scale(domain=names, range=[s.style.dashes for s in series])
    symbols = alt.Scale(domain=names, range=[s.style.symbol for s in series])
    by_setting = [colours(series, outline=0), alt.StrokeDash("setting:N", title=None, scale=dashes),
                  alt.Shape("setting:N", title=None, scale=symbols)]  # fmt: skip
    base = alt.Chart(alt.NamedData("rows")).encode(
        *(channel if legend else channel.legend(None) for channel in by_setting),
        x=alt.X("iteration:Q", title="iteration", axis=alt.Axis(tickCount=5)),
        y=alt.Y("drawn:Q", title=key, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5)),
        opacity=alt.condition("chosen === '' || datum.run === chosen", alt.value(1), alt.value(0.3)),
        detail="run:N",
        tooltip=tooltips("setting:N", "run:N", "iteration:Q", "value:.5g", value=key),
    )
    lines = base.mark_line(point=alt.OverlayMarkDef(size=20), strokeWidth=1.4, clip=True).add_params(chosen, zoom())
    if legend:
        shown = legend_selection(names)
        lines = lines.add_params(shown).transform_filter(shown)
    return lines.properties(width="container", height=360 if large else 200, usermeta=palette(series))


def head_chart(key: str) -> alt.Chart:
    """A heat map by layer and head, of rows (layer, head, value)."""
    colour = alt.Color("value:Q", title=None, scale=alt.Scale(scheme="viridis"), legend=alt.Legend(format="~g"))
    cells = alt.Chart(alt.NamedData("rows")).mark_rect().encode(
        x=alt.X("head:O", axis=alt.Axis(labelAngle=0)), y="layer:O", color=colour,
        tooltip=tooltips("layer:Q", "head:Q", "value:.5g", value=key),
    )  # fmt: skip
    return cells.properties(width="container", height=200, title=key)
