"""The live page: a report, or the page of one run, whose content is made again while files grow. It is served on
127.0.0.1 alone."""

import html
import json
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from core.process import say
from core.schema import ConfigError
from scripts.reporting.comparisons import Family, compared_families
from scripts.reporting.one_run import RunFiles, duration, headline, run_outline, single_run
from scripts.reporting.page import OPEN_FILES, Content, Markup, Section, outline, page, require_open_files
from scripts.reporting.runs import read_definition
from scripts.reporting.tables import facts
from sweeps.plan import read_plan
from sweeps.status import FINAL, STATES, tally

CLIENTS = 64  # that are served at a time: drawing needs open files, too
SHARE = 0.1  # of a core, at most, for making pages


@dataclass
class Made:
    """A page's content as it was made last. seen: of the files' versions; due: not before this time."""

    content: Content
    seen: list[int]
    due: float


class LivePage:
    """The page of a sweep's directory with one for each run, or that of a single run. Raises: ConfigError, at first."""

    def __init__(self, folder: Path, run: Path | None) -> None:
        self.folder = folder
        self.single = None if run is None else single_run(run)
        self.runs: dict[str, RunFiles] = {}
        self.plan_read = 0
        self.families: tuple[list[str], list[Family]] = ([], [])
        self.pages: dict[str, Made] = {}
        self.lock = threading.Lock()  # two pages may poll
        self.content("")

    def answer(self, path: str) -> tuple[str, bytes] | None:
        """Content type and content of a path: "/" and "/data.json", the same below each run's id. None for others."""
        asked = re.fullmatch(r"/(?:([^/]+)/)?(data\.json)?", unquote(path))
        name = asked[1] or "" if asked else ""
        with self.lock:
            if asked is None or name not in ("", *self.runs):
                return None
            content = self.content(name, now=not asked[2])
        if asked[2]:
            return "application/json", json.dumps(content.shown()).encode()
        return "text/html; charset=utf-8", page(content, live=True).encode(errors="replace")

    def content(self, name: str, now: bool = True) -> Content:
        """Of the page of a run, or of what was asked for. now: else it is made again only so often that SHARE holds."""
        made, begun = self.pages.get(name), time.monotonic()
        if made is None or now or begun >= made.due:
            with suppress(*[ConfigError, OSError] if made else []):  # the files may be away for a moment
                one = self.runs[name] if name else self.single
                if one is None and (changed := (self.folder / "plan.jsonl").stat().st_mtime_ns) != self.plan_read:
                    self.plan_read = changed  # it may have grown
                    for plan in read_plan(self.folder):
                        self.runs.setdefault(plan.id, RunFiles(self.folder, plan))
                seen = [run.update() for run in ([one] if one else self.runs.values())]
                if made is None or seen != made.seen:
                    content = run_content(one) if one else self.sweep_content()
                    took = time.monotonic() - begun
                    made = self.pages[name] = Made(content, seen, begun + took / SHARE)
        assert made is not None
        return made.content

    def sweep_content(self) -> Content:
        sweep = read_definition(self.folder, self.folder.name, live=True)
        sweep.runs.extend(run.row(sweep) for run in self.runs.values())
        ended = [run.id for run in sweep.runs if run.state.state in FINAL]
        if self.families[0] != ended:
            self.families = ended, compared_families(sweep)
        sections = [Section("Runs", [run_list(self.runs.values())]), *outline(sweep, self.families[1])]
        title = ": ".join(dict.fromkeys([sweep.name, sweep.title]))
        return Content(title, tally(run.state for run in self.runs.values()), facts(sweep), sections)


def run_content(run: RunFiles) -> Content:
    setting = run.plan.points[0]
    title = run.plan.id if setting == run.plan.id else f"{run.plan.id}: {setting}"
    return Content(title, headline(run), {}, run_outline(run))


def run_list(runs: Iterable[RunFiles]) -> Markup:
    """The runs that train first; each leads to its own page."""
    heads = ["run", "setting", "state", "progress", "iteration", "lowest validation loss", "at iteration", "left"]
    rows = []
    for run in sorted(runs, key=lambda run: (run.state.state != "running", STATES.index(run.state.state))):
        step, left, best = run.progress()
        last, name = run.plan.config.max_iters, html.escape(run.plan.id)
        cells = [
            f'<a href="{quote(run.plan.id, safe="")}/">{name}</a>', html.escape(run.plan.points[0]), run.state.state,
            f'<progress max="{last}" value="{step}"></progress>', f"{step} / {last}",
            *(("", "") if best is None else (f"{best[0]:.4f}", str(best[1]))), "" if left is None else duration(left),
        ]  # fmt: skip
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    head = "".join(f"<th>{head}</th>" for head in heads)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return Markup(
        f'<div class="table" id="runs"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def watch(sweep_dir: Path, run: Path | None, port: int) -> int:
    """Serve the page until Ctrl-C. Raises: ConfigError."""
    require_open_files(OPEN_FILES + CLIENTS)
    return serve(LivePage(sweep_dir.resolve(), None if run is None else run.resolve()), port)


def serve(live: LivePage, port: int) -> int:
    """Answer GET of the pages and of their data, and nothing else. A Host header of another name is refused: that is
    how a foreign site whose name leads to 127.0.0.1 would read along."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 30  # seconds for a browser that connects and asks nothing

        def do_GET(self) -> None:
            if self.headers.get("Host") not in (f"127.0.0.1:{server.server_port}", f"localhost:{server.server_port}"):
                self.send_error(403, "Host must be 127.0.0.1 or localhost, with the port")
                return
            try:
                answer = live.answer(self.path)
            except (ConfigError, OSError) as error:
                self.send_error(503, explain=str(error))
                return
            if answer is None:
                self.send_error(404)
                return
            kind, content = answer
            self.send_response(200)
            headers = {"Content-Type": kind, "Content-Length": str(len(content)), "Cache-Control": "no-store"}
            for name, value in {**headers, "X-Content-Type-Options": "nosniff"}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """The terminal shows the address alone."""

    class Server(ThreadingHTTPServer):
        def verify_request(self, *_: Any) -> bool:
            return threading.active_count() <= CLIENTS  # each has a thread; of more the connection is closed

        def handle_error(self, *_: Any) -> None:
            if not isinstance(sys.exception(), ConnectionError):  # the page was closed
                traceback.print_exc()

    try:
        server = Server(("127.0.0.1", port), Handler)
    except OSError as error:
        raise ConfigError(f"port={port} cannot be used: {error.strerror}") from error
    with server, suppress(KeyboardInterrupt):
        say(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C ends it)")
        server.serve_forever()
    return 0
