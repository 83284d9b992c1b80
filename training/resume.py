"""The run directory of a Session: opened by one rank, resumed from its newest checkpoint, refused for another run."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from core import checkpoint, dist, rundir
from core.dist import World
from core.files import file_sha256, is_intact
from core.plugins import changed_plugins
from core.process import EXIT_DIVERGED, say
from core.rundir import ReadOnlyRunDir, RunDir, RunRequest, read_status, read_summary
from core.schema import ConfigError, differences, require, with_earlier_defaults
from training.config import DecayOptions, TrainConfig, load_config, to_yaml
from training.session import Machine, Session, read_corpus, saved_state
from training.state import RunState
from training.tracking import draw_curve

DECIDES_BITS = ("device", "compile", "deterministic", "ranks", "torch", "kernels")  # a CPU's name has its threads


def run_request(config: TrainConfig) -> RunRequest:
    """What open_run() needs to open, or to refuse, the run directory."""
    refused = partial(refusal, config)
    return RunRequest(config.run_dir, to_yaml(config), refused, config.max_iters, config.fresh, config.eval_only)


def refusal(config: TrainConfig, old: Any) -> str:
    """What differs from `old`, an older config.yaml's content, and what to do; "" if nothing that decides does."""
    before, advice = load_config(old), "use another out_dir or fresh=true"
    changes = differences(labelled_trajectory(before), labelled_trajectory(config))
    moved = differences(text_files(before), text_files(config))  # which may be another text
    earlier, words = with_earlier_defaults(config, before)
    if words and labelled_trajectory(earlier) == labelled_trajectory(before):
        advice = f"add {' '.join(words)}, the default when it was begun, else {advice}"
    if not moved and isinstance(before.schedule, DecayOptions) and isinstance(config.schedule, DecayOptions):
        end = before.schedule.decay_end(before.max_iters)
        longer = replace(config, schedule=replace(config.schedule, lr_decay_iters=end))
        if config.max_iters > before.max_iters and labelled_trajectory(longer) == labelled_trajectory(before):
            advice = f"add schedule.lr_decay_iters={end} to train on at the schedule's last rate, else {advice}"
    return f"{', '.join([*moved, *changes])}; {advice}" if changes else ""


def text_files(config: TrainConfig) -> dict[str, Any]:
    """Where its text stands. It decides nothing: a file may move, and a run knows its text by its SHA-256."""
    return {f"data.{key}": getattr(config.data, key, None) for key in ("path", "val_path")}


def labelled_trajectory(config: TrainConfig) -> dict[str, Any]:
    """The settings that decide the numbers, as a person is told of them."""
    shown_as = {
        "schedule.lr_decay_iters": "schedule.lr_decay_iters (by default max_iters)",
        "init_sha256": "init_from (SHA-256 of its weights)",
    }
    return {shown_as.get(key, key): value for key, value in config.trajectory.items()}


def say_if_begun_before(config: TrainConfig) -> None:
    """Say where the same command has begun a run, in a directory of another name, when a default was another one."""
    earlier, words = with_earlier_defaults(config)
    if earlier.run_dir.exists() and not config.run_dir.exists():
        added = " ".join(words)
        say(f"note: {earlier.run_dir} was begun when {added} was the default: add it to go on there")


def look(config: TrainConfig, world: World) -> bool:
    """Whether the run that `config` describes is at its end. Writes nothing. Raises: ConfigError, on every rank, where
    open_run_dir() would."""
    if world.rank == 0:
        say_if_begun_before(config)
    return said_by_rank_0(world, lambda: has_ended(config))


def has_ended(config: TrainConfig) -> bool:
    """look(), for one rank."""
    ended = rundir.look(run_request(config))
    if not ended:
        require_within(config, saved_state(config).get("step", 0))
    return ended


def require_within(config: TrainConfig, step: int) -> None:
    told = f"must be >= {step}, the iteration that {config.run_dir} has reached"
    require(step <= config.max_iters, f"max_iters={config.max_iters} {told}")


def open_run_dir(config: TrainConfig, world: World) -> RunDir:
    """Rank 0 opens and locks the run directory, and so looks again; the others get one that writes nothing. Raises:
    ConfigError, on every rank."""
    opened: list[RunDir] = []  # stays on rank 0; the ranks share the answer alone

    def is_finished() -> bool:
        opened.append(rundir.open_run(run_request(config)))
        return opened[0].finished

    finished = said_by_rank_0(world, is_finished)
    return opened[0] if opened else ReadOnlyRunDir(config.run_dir, finished=finished)


def said_by_rank_0(world: World, ask: Callable[[], bool]) -> bool:
    """What rank 0 answers, on every rank. Raises: its ConfigError, on every rank."""
    answer, error = False, None
    if world.rank == 0:
        try:
            answer = ask()
        except ConfigError as refused:
            error = str(refused)
    answer, error = dist.gather((answer, error))[0]
    if error is not None:
        raise ConfigError(error)
    return answer


def resume(session: Session, run_dir: RunDir) -> RunState | None:
    """Load the newest checkpoint into model and optimizer. Returns its state; None where the run begins. Raises:
    ConfigError where it does not fit the run, and where the ranks found different ones."""
    try:
        saved = load_checkpoint(run_dir)
        steps = dist.gather(-1 if saved is None else saved.step)
        told = f"out_dir={run_dir.path}: the ranks found checkpoints of iterations {steps} (-1: none)"
        require(len({*steps}) == 1, f"{told}; is the folder shared, and can all of them read it?")
        if saved is None:
            return None
        with checkpoint.errors_as_corrupt(saved.path):
            state = RunState.from_json(saved.state, f"{saved.path}/{checkpoint.STATE}")
            check_resumable(session, run_dir, state)
            session.load_tensors(saved.tensors)
    except checkpoint.CorruptCheckpoint as error:
        raise ConfigError(f"out_dir={run_dir.path} cannot go on: {error}; fresh=true starts it anew") from error
    return state


def load_checkpoint(run_dir: RunDir) -> checkpoint.Checkpoint | None:
    """The newest valid checkpoint. Raises: ConfigError where there should be one, as no run starts over unasked;
    CorruptCheckpoint."""
    resumed = checkpoint.load_latest(run_dir.path / "ckpt", run_dir.log)
    reached = read_status(run_dir.path).get("iter") or read_summary(run_dir.path).get("iter")
    require(
        resumed is not None or not reached,
        f"out_dir={run_dir.path} has reached iteration {reached} but holds no checkpoint; fresh=true starts it anew",
    )
    if resumed is None and (run_dir.path / "metrics.jsonl").exists():
        run_dir.log("the run was stopped before its first checkpoint: it starts again at iteration 0")
    return resumed


def check_resumable(session: Session, run_dir: RunDir, saved: RunState) -> None:
    """Refuse what would change the run; warn of what makes the rest of it unequal bit for bit."""
    config, path, here, then = session.config, run_dir.path, session.facts, saved.facts
    changes = refusal(config, saved.config)
    require(not changes, f"out_dir={path} has a checkpoint of other settings: {changes}")
    require(
        then.dtype == here.dtype,
        f"dtype={config.dtype} is {here.dtype} here, but {path} was begun in {then.dtype}: "
        f"set dtype={str(then.dtype).removeprefix('torch.')}",
    )
    require_same_text(config, path, session.data.corpus.sha256, str(then.corpus_sha256))
    require(
        saved.tokenizer == session.data.corpus.tokenizer.to_dict(),
        f"data={config.data.name} has other tokens here than {path} was begun with; fresh=true starts it anew",
    )
    require_within(config, saved.step)
    pairs = {key: (getattr(then, key), getattr(here, key)) for key in DECIDES_BITS}
    if changed := [f"{key} {old} -> {new}" for key, (old, new) in pairs.items() if old is not None and old != new]:
        run_dir.log(f"warning: {', '.join(changed)}: the rest of the run will not be equal bit for bit")
    for change in changed_plugins(then.plugins or {}):
        run_dir.log(f"warning: {change}")
    if {*here.commits} - {*then.commits} and saved.step < config.max_iters and not config.eval_only:
        run_dir.log(f"warning: commit {then.commit} -> {here.commit}: other code trains the rest of the run")


def say_how_it_ended(config: TrainConfig, machine: Machine, run_dir: RunDir) -> int:
    """Say how a finished run ended. Builds no model. Returns the exit status; 1 where its files are damaged."""
    damage = find_damage(run_dir.path)
    if not damage:  # of a damaged summary.json neither dtype nor text can be trusted
        check_finished(config, machine, run_dir)
    if config.plot is True and run_dir.state == "done" and not damage and machine.world.rank == 0:
        draw_curve(run_dir.path)
    but = f", but {damage}" if damage else ""
    run_dir.log(f"{run_dir.path} is {run_dir.state}{but}; fresh=true starts it anew")
    return 1 if damage else EXIT_DIVERGED if run_dir.state == "diverged" else 0


def check_finished(config: TrainConfig, machine: Machine, run_dir: RunDir) -> None:
    """Warn of plugins that have changed. Raises: ConfigError where a finished run has another dtype or text than the
    one that was asked for. The text is read, no model is built."""
    summary, dtype = read_summary(run_dir.path), str(machine.dtype)
    require(
        config.dtype == "auto" or summary.get("dtype", dtype) == dtype,
        f"dtype={config.dtype}: {run_dir.path} is {run_dir.state} in {summary.get('dtype')}; use another out_dir or "
        "fresh=true",
    )
    sha256 = read_corpus(config).sha256
    require_same_text(config, run_dir.path, sha256, summary.get("corpus_sha256") or sha256)
    for change in changed_plugins(summary.get("plugins") or {}):
        run_dir.log(f"warning: {change}")


def find_damage(path: Path) -> str:
    """What is wrong with the files of a finished run; "" where nothing is. Deleted checkpoints are no damage."""
    for folder in {(path / "ckpt" / name).resolve() for name in ("best", "latest")}:
        try:
            if folder.is_dir():
                checkpoint.verify(folder)
        except checkpoint.CorruptCheckpoint as error:
            return str(error)
    summary = read_summary(path)
    if not is_intact(summary):
        return f"{path / 'summary.json'} has changed since"
    for file, sha256 in (summary.get("records") or {}).items():
        if not (path / file).is_file() or file_sha256(path / file) != sha256:
            return f"{path / file} has changed since"
    return ""


def refuse_other_text(config: TrainConfig, here: str) -> None:
    """Raise ConfigError where the directory holds a run of another text than that of SHA-256 `here`."""
    saved = {} if config.fresh else read_summary(config.run_dir) | saved_state(config)
    require_same_text(config, config.run_dir, here, saved.get("corpus_sha256") or here)


def require_same_text(config: TrainConfig, path: Path, here: str, sha256: str) -> None:
    data = config.data
    require(
        sha256 == here,
        f"data={data.name} data.path={getattr(data, 'path', None)} is not the text that {path} was begun on: "
        f"its SHA-256 is {here[:12]}..., not {sha256[:12]}...; use another out_dir or fresh=true",
    )
