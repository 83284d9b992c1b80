"""What a run prints: its headline, a line for each iteration that is logged, and the rows at its end."""

import shlex
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from core.files import program
from core.rundir import RunDir
from training.metrics import row_of, shown_in
from training.session import Session


def headline(session: Session) -> str:
    """Size and machine, in one line for a person."""
    facts = [
        f"{session.model.num_params() / 1e6:.2f}M parameters",
        f"{session.config.tokens_per_iter:,} tokens an iteration",
        session.facts.device,
        session.machine.dtype_in_words,
    ]
    if session.attention_backend is not None:
        facts.append(f"{session.attention_backend} attention")
    return ", ".join(filter(None, [*facts, session.machine.about_threads]))


def line_in_words(line: Mapping[str, Any]) -> str:
    """One line for a person: iter 250: train/loss 1.9034, …"""
    values = ", ".join(f"{key} {value:{row_of(key).spec}}" for key, value in line.items() if key != "iter")
    return f"iter {line['iter']}: {values}"


def show_progress(run_dir: RunDir, bar: tqdm, line: Mapping[str, Any], seconds_left: float | None) -> None:
    """seconds_left: None where it is not known yet, as the first update of a process is slow."""
    bar.set_postfix_str(f"loss {line['train/loss']:.4f}, {line['tok_per_sec']:,.0f} tok/s", refresh=False)
    left = "" if seconds_left is None else f", {tqdm.format_interval(seconds_left)} left"
    shown = {key: line[key] for key in shown_in("log") if key in line}  # some are known at evaluations alone
    run_dir.log(f"{line_in_words(shown)}{left}", show=bool(bar.disable))  # the bar shows it already


def closing_rows(run_dir: RunDir, summary: Mapping[str, Any], plotted: bool) -> list[str]:
    """What a run that is done prints last. summary: of summary.json."""
    curve, of_run = ", curve.png" if plotted else "", shlex.quote(f"run={run_dir.path}")
    untrained = ", the weights that it began with" if summary.get("init_from") and not summary["iter_of_min"] else ""
    return [
        f"done: val/loss {summary['val/loss']:.4f} at iteration {summary['iter']}",
        f"best: val/loss {summary['val/loss_min']:.4f} at iteration {summary['iter_of_min']}{untrained}",
        f"time: {tqdm.format_interval(summary['seconds'])}, {summary['tok_per_sec']:,.0f} tokens/s",
        f"kept: {run_dir.path}: metrics.jsonl, ckpt/best, ckpt/latest{curve}",
        f"next: {program('sample.py')} {of_run}",
        f"next: {program('scripts/report.py')} {of_run} watch=true",
    ]
