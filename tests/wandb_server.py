"""A W&B server for tests: what wandb-core asks of one to start, resume and fill a run. It keeps what it is sent."""

import gzip
import json
import re
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class Server(ThreadingHTTPServer):
    """history: run id -> its lines, as the server has them. exits: its exit codes. dies_after: lines of any run.
    sweep: the configuration of the sweep there is; commands: for its agents, the first one first."""

    daemon_threads = allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.history: dict[str, list[str]] = defaultdict(list)
        self.runs: dict[str, dict[str, Any]] = {}
        self.exits: dict[str, list[int]] = defaultdict(list)
        self.down, self.dies_after = False, 10**9
        self.sweep, self.commands = "", list[dict[str, Any]]()
        Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: Any) -> None:
        """A client that went away."""

    def answer(self, query: str, v: dict[str, Any]) -> dict[str, Any]:
        """To a GraphQL request with the variables v."""
        if "query Viewer" in query:
            return {"viewer": {"id": "x", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        name, entity = v.get("name", ""), {"id": "e", "name": v.get("entity") or "me"}
        owner = {"id": "p", "name": v.get("project"), "entity": entity}
        run, lines = self.runs.get(name, {}), self.history.get(name, [])
        bucket = {"id": "b", "name": name, "displayName": name, "config": "{}", "historyLineCount": len(lines)}
        if "RunResumeStatus" in query:
            tail = {"historyTail": json.dumps(lines[-1:]), "summaryMetrics": run.get("summary", "{}")}
            empty = {"eventsTail": "[]", "eventsLineCount": 0, "logLineCount": 0, "wandbConfig": '{"t": {}}'}
            return {"model": {**owner, "bucket": bucket | tail | empty} if run else None}
        if "UpsertBucket" in query:
            self.runs[name] = run | {key: value for key, value in v.items() if value is not None}
            return {"upsertBucket": {"inserted": not run, "bucket": bucket | {"project": owner}}}
        if "CreateRunFiles" in query:
            files = [{"name": file, "uploadUrl": f"{self.url}/file/{file}"} for file in v["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        if "CreateArtifact" in query:  # as if it had the files already
            sequence = {"id": "s", "latestArtifact": None}
            return {"createArtifact": {"artifact": {"id": "a", "state": "COMMITTED", "artifactSequence": sequence}}}
        if "UpsertSweep" in query:
            self.sweep = v["config"]
            return {"upsertSweep": {"sweep": {"name": "sweep-1", "project": owner}, "configValidationWarnings": []}}
        if "SweepWithRuns" in query:
            return {"project": {"sweep": {"config": self.sweep, "runs": {"edges": []}}}}
        if "CreateAgent" in query:
            return {"createAgent": {"agent": {"id": "a"}}}
        if "Heartbeat" in query:
            commands, self.commands = self.commands[:1], self.commands[1:]
            return {"agentHeartbeat": {"agent": {"id": "a"}, "commands": json.dumps(commands)}}
        return {"project": None} if "query ArtifactType" in query else {}

    def stream(self, run: str, sent: dict[str, Any]) -> None:
        """Lines replace those from their offset on, as W&B's file stream has it."""
        files = sent.get("files") or {}
        if (part := files.get("wandb-history.jsonl")) is not None:
            self.history[run][part["offset"] : part["offset"] + len(part["content"])] = part["content"]
        if "wandb-summary.json" in files:
            self.runs[run]["summary"] = files["wandb-summary.json"]["content"][-1]
        if sent.get("complete"):
            self.exits[run].append(sent["exitcode"])
        self.down = self.down or sum(map(len, self.history.values())) >= self.dies_after


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.down:
            self.close_connection = True
            return
        data: dict[str, Any] = {}
        streamed = re.fullmatch(r"/files/.*/(.*?)/file_stream", self.path)
        if streamed or self.path == "/graphql":
            body = json.loads(gzip.decompress(raw) if self.headers.get("Content-Encoding") == "gzip" else raw)
            if streamed:
                self.server.stream(streamed[1], body)
            else:
                data = {"data": self.server.answer(body["query"], body.get("variables") or {})}
        answer = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_PUT = do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        """On no terminal."""
