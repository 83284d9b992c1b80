"""Downstream tasks through lm-evaluation-harness: python scripts/evaluate_lm.py run=RUN tasks=arc_easy,piqa

tasks: names of lm_eval's tasks, and `paper`: the eight of the QK-Normed MLA paper, 3-shot, beside its Table 1. `cloze`
needs no network: which of four passages goes on with one of the text that the run held out (chance: 25 %)?
num_fewshot: examples before each question (the task's own number; 3 for paper's). limit: questions a task (all).
include_path: a folder with task files of your own (YAML; `dataset_path: json` needs no network).
batch_size=16, checkpoint=best|latest, device=auto, dtype=float32|bfloat16|auto. out: a JSON file for all results; as
RUN/evaluation.json, the report of the run's sweep can compare them (README, "Reports").
Prints a table and ends with one JSON line. Needs the extra `eval`.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from core.cli import run_script
from core.device import resolve_device, resolve_dtype
from core.files import write_atomic
from core.schema import ConfigError, at_least, did_you_mean, one_of, require, show
from data.corpora import one_line, probe_hub
from data.tokenizer import NoText, Tokenizer
from data.tokens import load_corpus
from model.gpt import GPT
from sample import open_run
from training.config import check_common

INSTALL = "pip install -c constraints.txt -e '.[eval]'"

# Table 1: accuracy in percent with QK-Clip and with QK-Norm
PAPER = {
    "arc_challenge": (22.61, 24.66), "arc_easy": (53.07, 56.69), "boolq": (59.51, 62.20),
    "hellaswag": (38.32, 38.94), "lambada_openai": (42.40, 43.92), "openbookqa": (18.20, 19.60),
    "piqa": (70.67, 70.89), "winogrande": (53.20, 53.75),
}  # fmt: skip
FOLDERS = {"arc_challenge": "arc", "arc_easy": "arc", "boolq": "super_glue/boolq", "lambada_openai": "lambada"}
PAPER_PERPLEXITY = (16.28, 14.18)  # of LAMBADA
PAPER_SHOTS = 3
CLOZE, QUESTIONS, CHOICES = "cloze", 500, 4
LOCAL = ("json", "csv", "text", "parquet", "arrow", "pandas")  # what `datasets` reads from files, without the Hub


# -----------------------------------------------------------------------------
# Tasks


def load_tasks(names: Sequence[str], include_path: str | None) -> tuple[list[Any], Any]:
    """lm_eval's task objects, each with its data, and their TaskManager (its own would read every file of lm_eval's).

    Raises: ConfigError naming every task whose data is missing.
    """
    import lm_eval.tasks

    own = [] if include_path is None else [Path(include_path).expanduser()]
    require(all(folder.is_dir() for folder in own), f"include_path={include_path} is not a folder")
    theirs = Path(lm_eval.tasks.__file__).parent
    folders = dict.fromkeys(theirs / FOLDERS.get(name, name) for name in names if name in PAPER)
    manager = lm_eval.tasks.TaskManager(include_path=[*folders, *own], include_defaults=False)
    if not set(names) <= {CLOZE, *manager.all_tasks}:  # all of lm_eval's 14,000 files take many seconds
        manager = lm_eval.tasks.TaskManager(include_path=own)
    names = [name for name in names if name != CLOZE]
    for name in names:
        require(name in manager.task_index, f"tasks={name} is unknown{did_you_mean(name, manager.all_tasks)[:200]}")
    remote = [name for name in names if (manager.task_index[name].cfg or {}).get("dataset_path") not in LOCAL]
    problem = probe_hub() if remote else None
    if problem is not None:
        go_offline()  # what is in the cache can still be used; all else would be tried again for minutes
    tasks: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name in names:
        try:
            tasks |= manager.load([name])["tasks"]
        except Exception as error:  # datasets, its network stack and lm_eval share no base class
            failed[name] = one_line(error)
    if failed and problem is not None:
        raise ConfigError(
            f"tasks={','.join(failed)}: their data sets are not in the cache, and the Hugging Face Hub is out of reach "
            f"({problem}): run it once where there is network and copy $HF_HOME, or use task files of your own "
            "(include_path=DIR, dataset_path: json)"
        )
    require(not failed, "; ".join(f"tasks={name} cannot be loaded: {reason}" for name, reason in failed.items()))
    return list(tasks.values()), manager


def cloze(model: GPT, tokenizer: Tokenizer, state: dict[str, Any]) -> Any:
    """lm_eval's task of the run's own held-out text: QUESTIONS places in it, each with the T/2 tokens before it and
    CHOICES passages of T/4 tokens, one of which comes next and the others from elsewhere (T: block_size).

    The same questions for every run on the same text. Raises: ConfigError where too little text is held out, or it is
    not the run's (state: of its checkpoint).
    """
    import datasets
    from lm_eval.api.task import ConfigurableTask

    data, T = model.config.data, model.block_size
    corpus = load_corpus(data, T, state)
    require(corpus.sha256 == state["corpus_sha256"], f"tasks={CLOZE}: data={data.name} is not the run's text any more")
    before, after = max(1, T // 2), max(1, T // 4)
    starts = [at for first, end in corpus.split.val for at in range(first + before, end - after)]
    require(not isinstance(tokenizer, NoText), f"tasks={CLOZE} needs text: data={data.name} has none")
    require(len(starts) >= CHOICES, f"tasks={CLOZE} needs {before + after} held-out tokens in a row, and more")
    draw = np.random.Generator(np.random.Philox(key=0))

    def text(start: int, end: int) -> str:
        return tokenizer.decode(corpus.tokens[start:end].tolist())

    questions = []
    for _ in range(QUESTIONS):
        right, *wrong = (starts[i] for i in draw.choice(len(starts), CHOICES, replace=False))
        answer = int(draw.integers(CHOICES))
        places = [*wrong[:answer], right, *wrong[answer:]]
        choices = [text(at, at + after) for at in places]
        questions.append({"context": text(right - before, right), "choices": choices, "answer": answer})
    rows = datasets.Dataset.from_list(questions)
    return ConfigurableTask(
        config={
            "task": CLOZE, "custom_dataset": lambda **_: {"test": rows}, "test_split": "test", "fewshot_split": "test",
            "target_delimiter": "", "fewshot_delimiter": " ",
            "output_type": "multiple_choice", "doc_to_text": "context", "doc_to_choice": "choices",
            "doc_to_target": "answer", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        }
    )  # fmt: skip


def go_offline() -> None:
    import datasets.config
    import huggingface_hub.constants

    huggingface_hub.constants.HF_HUB_OFFLINE = True
    datasets.config.HF_HUB_OFFLINE = True


# -----------------------------------------------------------------------------
# Results


def metrics_of(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Task -> metric -> value; acc, acc_norm, perplexity, …, each with its _stderr where there is one."""
    found: dict[str, dict[str, float]] = {}
    for task, values in results["results"].items():
        numbers = {key: value for key, value in values.items() if "," in key and isinstance(value, int | float)}
        found[task] = {key.removesuffix(",none"): float(value) for key, value in numbers.items() if value == value}
    return found


def average(metrics: dict[str, dict[str, float]]) -> float | None:
    """Mean accuracy over the tasks that have one."""
    accuracies = [values["acc"] for values in metrics.values() if "acc" in values]
    return fmean(accuracies) if accuracies else None


def table(metrics: dict[str, dict[str, float]], paper: bool) -> str:
    """Markdown. Accuracies in percent, with ± their standard error; with `paper`, Table 1 of the paper beside them."""
    rows: list[tuple[str, str, str, tuple[float, ...]]] = []
    for task, values in metrics.items():
        for metric, value in values.items():
            stem, comma, filtered = metric.partition(",")
            if stem.endswith("_stderr"):
                continue
            error = values.get(f"{stem}_stderr{comma}{filtered}")
            unit = 100.0 if stem in ("acc", "acc_norm", "exact_match") else 1.0
            shown = f"{unit * value:.2f}" + (f" ± {unit * error:.2f}" if error is not None else "")
            theirs: tuple[float, ...] = PAPER[task] if stem == "acc" and task in PAPER else ()
            theirs = PAPER_PERPLEXITY if (task, stem) == ("lambada_openai", "perplexity") else theirs
            rows.append((task, metric, shown, theirs))
    mean = average(metrics)
    if mean is not None and len(metrics) > 1:
        all_eight = set(metrics) == set(PAPER)
        theirs = tuple(map(fmean, zip(*PAPER.values(), strict=True))) if all_eight else ()
        rows.append(("average", "acc", f"{100 * mean:.2f}", theirs))
    heads = ["task", "metric", "value", *(["paper: QK-Clip", "paper: QK-Norm"] if paper else [])]
    lines = [heads, ["---", "---", *["---:"] * (len(heads) - 2)]]
    for task, metric, shown, theirs in rows:
        beside = [f"{x:.2f}" for x in theirs] or ["", ""]
        lines.append([task, metric, shown, *(beside if paper else [])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# -----------------------------------------------------------------------------


def evaluate(words: dict[str, Any]) -> dict[str, Any]:
    """lm_eval's results for the program's words, with "metrics" and what they were measured with."""
    asked = [name for name in words["tasks"].split(",") if name]
    paper = "paper" in asked
    names = [*dict.fromkeys(task for name in asked for task in (PAPER if name == "paper" else [name]))]
    require(bool(names), "tasks= must name a task")
    shots = words.get("num_fewshot")
    which, batch_size = words.get("checkpoint", "best"), words.get("batch_size", 16)
    one_of("checkpoint", which, ("best", "latest"))
    check_common(0, words.get("device", "auto"), words.get("dtype", "float32"))
    for key, value, least in (
        ("num_fewshot", shots, 0),
        ("limit", words.get("limit"), 1),
        ("batch_size", batch_size, 1),
    ):
        if value is not None:
            at_least(key, value, least)
    try:
        import lm_eval
    except ImportError as error:
        raise ConfigError(f"scripts/evaluate_lm.py needs lm_eval ({error}): {INSTALL}") from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # its resamples are one task: a pool of forks would add but a risk
    device = resolve_device(words.get("device", "auto"))
    dtype = resolve_dtype(words.get("dtype", "float32"), device)
    model, tokenizer, state = open_run(words["run"], which, device)
    tasks, manager = load_tasks(names, words.get("include_path"))
    for task in tasks:
        if paper and shots is None and task.config.task in PAPER:
            task.set_config("num_fewshot", PAPER_SHOTS)
    tasks += [cloze(model, tokenizer, state)] if CLOZE in names else []
    from scripts.lm_eval_model import NanoQK

    began = time.perf_counter()
    lm = NanoQK(model, tokenizer, batch_size, dtype)
    try:
        results = lm_eval.simple_evaluate(
            lm, tasks=tasks, task_manager=manager, num_fewshot=shots, limit=words.get("limit"), batch_size=batch_size,
            bootstrap_iters=1000,
        )  # fmt: skip
    except ConfigError:
        raise
    except ValueError as error:  # more shots than a task has documents, say
        asked_for = f"tasks={words['tasks']} num_fewshot={show(PAPER_SHOTS if paper and shots is None else shots)}"
        raise ConfigError(f"{asked_for}: {one_line(error)}") from error
    about = {
        "run": words["run"], "iter": state.get("step"), "num_fewshot": results["n-shot"], "limit": words.get("limit"),
        "dtype": str(dtype).removeprefix("torch."), "lm_eval": lm_eval.__version__,
        "seconds": round(time.perf_counter() - began, 1), "truncated": lm.truncated,
        "questions": {task: n["effective"] for task, n in results["n-samples"].items()},
        **({"fault": model.config.fault.name} if model.config.fault.name != "none" else {}),
    }  # fmt: skip
    metrics = metrics_of(results)
    return {**results, "about": {**about, "metrics": metrics, "average": average(metrics)}, "paper": paper}


def evaluate_run(words: dict[str, Any]) -> int:
    require(bool(words.get("run") and words.get("tasks")), "run= and tasks= must be given")
    out = Path(words["out"]).expanduser() if "out" in words else None
    if out is not None:
        good = out.parent.is_dir() and not out.is_dir() and os.access(out.parent, os.W_OK)
        require(good, f"out={words['out']} must be a file in a folder that can be written")
    results = evaluate(words)
    print(table(results["about"]["metrics"], results.pop("paper")))
    if results["about"]["truncated"]:
        print(f"warning: {results['about']['truncated']} prompts lost their first tokens: model.block_size has no room "
              "for them and their answers")  # fmt: skip
    if out is not None:
        text = json.dumps(results, indent=1, default=str, ensure_ascii=False) + "\n"
        write_atomic(out, text.encode())
    print(json.dumps(results["about"]))
    return 0


def main(argv: list[str]) -> int:
    texts = ("run", "tasks", "checkpoint", "include_path", "device", "dtype", "out")
    known = {**dict.fromkeys(texts, str), **dict.fromkeys(("num_fewshot", "limit", "batch_size"), int)}
    return run_script(argv, __doc__, known, evaluate_run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
