"""Downstream tasks through lm-evaluation-harness: python scripts/evaluate_lm.py run=RUN tasks=arc_easy,piqa

tasks: names of lm_eval's tasks, all but those that write text, and one more. `cloze` needs no network: which of four
passages continues a text that the run held out (chance: 25 %)?
include_path: a folder with your own task files (YAML; `dataset_path: json` needs no network).
The report of a sweep compares its runs where out= is RUN/evaluation.json (docs/sweeps.md).
Prints a table; the last line is JSON. Needs the extra `eval`.
"""

import contextlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from core.cli import run_script
from core.device import resolve_device, resolve_dtype
from core.files import ROOT, expand, sealed, write_atomic
from core.schema import REQUIRED, AtLeast, ConfigError, Help, Writable, did_you_mean, one_line, options, require, show
from data.corpora import probe_hub
from data.options import RandomOptions
from data.tokenizer import BPETokenizer, begins_character
from data.tokens import load_corpus
from sample import LoadedRun, Plugins, RunPath, Which, load_asked_run
from training.config import Device, Dtype

CLOZE, QUESTIONS, CHOICES = "cloze", 500, 4
LOCAL = ("json", "csv", "text", "parquet", "arrow", "pandas")  # `datasets` reads these from files, without the Hub


# -----------------------------------------------------------------------------
# Tasks


def load_tasks(names: Sequence[str], own: Sequence[Path]) -> tuple[list[Any], Any]:
    """lm_eval's task objects with their data, and a TaskManager that knows them: the default one reads all of lm_eval's
    14,000 files, which takes many seconds. own: folders with further task files. Raises: ConfigError naming every task
    whose data is missing."""
    import datasets.config
    import huggingface_hub.constants
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    folders = filter(Path.is_dir, dict.fromkeys(root / name.partition("_")[0] for name in names))
    manager = lm_eval.tasks.TaskManager(include_path=[*folders, *own], include_defaults=False)
    if not set(names) <= {CLOZE, *manager.all_tasks}:
        manager = lm_eval.tasks.TaskManager(include_path=own)
    taken = CLOZE in names and CLOZE in manager.task_index
    require(not taken, f"tasks={CLOZE}: include_path= has a task of that name, too: give it another one")
    names = [name for name in names if name != CLOZE]
    known = [CLOZE, *manager.all_tasks]
    for name in names:
        require(name in manager.task_index, f"tasks={name} is unknown{did_you_mean(name, known)[:200]}")
    remote = [name for name in names if (manager.task_index[name].cfg or {}).get("dataset_path") not in LOCAL]
    problem = probe_hub() if remote else None
    if problem is not None:
        huggingface_hub.constants.HF_HUB_OFFLINE = True  # the cache still works, and nothing is tried for minutes
        datasets.config.HF_HUB_OFFLINE = True
    tasks: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name in names:
        try:
            tasks |= manager.load([name])["tasks"]
        except Exception as error:  # datasets, its network stack and lm_eval share no base class
            failed[name] = one_line(error)
    require(
        problem is None or not failed,
        f"tasks={','.join(failed)}: their data sets are not in the cache, and the Hugging Face Hub is out of reach "
        f"({problem}): run it once with a network and copy $HF_HOME, or use your own task files (include_path=DIR, "
        "dataset_path: json)",
    )
    require(not failed, "; ".join(f"tasks={name} cannot be loaded: {reason}" for name, reason in failed.items()))
    return list(tasks.values()), manager


def cloze(run: LoadedRun) -> Any:
    """lm_eval's task of QUESTIONS places in the text that the run held out. Each shows T/2 tokens and CHOICES passages
    of T/4 tokens; one follows in the text, the others are from elsewhere in it (T: block_size). Runs with the same
    held-out text, tokenizer and block_size get the same questions. Raises: ConfigError where too little text is held
    out, or it is not the text that the checkpoint's `state` names, or T < 2."""
    import datasets
    from lm_eval.api.task import ConfigurableTask

    model, tokenizer, config, state = run
    data, T = config.data, model.block_size
    require(T >= 2, f"tasks={CLOZE} needs model.block_size={T} >= 2: a passage, and what goes before it")
    require(not isinstance(data, RandomOptions), f"tasks={CLOZE} needs text: data={data.name} has none")
    corpus = load_corpus(data, T, state)
    require(
        corpus.sha256 == state.get("corpus_sha256"), f"tasks={CLOZE}: data={data.name} is not the run's text any more"
    )
    before, after = max(1, T // 2), max(1, T // 4)
    begins = begins_character(tokenizer)
    starts_blank = np.array([piece[:1].isspace() for piece in tokenizer.pieces])
    ends_blank = np.array([piece[-1:].isspace() for piece in tokenizer.pieces])
    starts: list[int] = []
    sure: list[int] = []  # before white space: no merge of BPE crosses, so context and answer can be encoded apart
    for first, end in corpus.split.val:
        tokens = np.asarray(corpus.tokens[first:end])
        at = np.arange(before, len(tokens) - after)
        ends = np.cumsum([0, *(tokens == tokenizer.separator)])  # documents that end before each token
        whole = begins[tokens[at - before]] & begins[tokens[at]] & begins[tokens[at + after]]
        whole &= ends[at + after] == ends[at - before]
        starts += (first + at[whole]).tolist()
        sure += (first + at[whole & starts_blank[tokens[at]] & ~ends_blank[tokens[at - 1]]]).tolist()
    if isinstance(tokenizer, BPETokenizer) and len(sure) >= QUESTIONS:
        starts = sure
    require(len(starts) >= CHOICES, f"tasks={CLOZE} needs more than {before + after} held-out tokens in a row")
    draw = np.random.Generator(np.random.Philox(key=0))

    def text(start: int, end: int) -> str:
        return tokenizer.decode(corpus.tokens[start:end].tolist())

    questions = []
    for _ in range(QUESTIONS):
        right, *wrong = (starts[i] for i in draw.choice(len(starts), CHOICES, replace=False))
        answer = int(draw.integers(CHOICES))
        choices = [text(at, at + after) for at in (*wrong[:answer], right, *wrong[answer:])]
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


# -----------------------------------------------------------------------------
# Results


def metrics_of(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Task -> metric -> value: acc, acc_norm, perplexity, …, and their _stderr. NaN and infinity are dropped."""
    found: dict[str, dict[str, float]] = {}
    for task, values in results["results"].items():
        numbers = {key: value for key, value in values.items() if "," in key and isinstance(value, int | float)}
        found[task] = {key.removesuffix(",none"): float(x) for key, x in numbers.items() if math.isfinite(x)}
    return found


@options
class EvaluateOptions:
    run: RunPath = REQUIRED
    tasks: Annotated[str, Help("names of lm_eval's tasks, or cloze: A,B")] = REQUIRED
    checkpoint: Which = "best"
    plugins: Plugins = ()
    num_fewshot: Annotated[int | None, AtLeast(0), Help("examples before each question; null: the task's own")] = None
    limit: Annotated[int | None, AtLeast(1), Help("questions per task; null: all")] = None
    include_path: Annotated[str | None, Help("a folder with task files of one's own")] = None
    batch_size: Annotated[int, AtLeast(1), Help("questions at a time")] = 16
    device: Device = "auto"
    dtype: Dtype = "float32"
    out: Annotated[
        str | None, Writable(b'{\n "results": {'), Help("a JSON file for all results; reports read RUN/evaluation.json")
    ] = None

    @property
    def task_names(self) -> list[str]:
        return list(dict.fromkeys(word for word in self.tasks.replace(" ", "").split(",") if word))

    def check(self) -> None:
        require(bool(self.task_names), "tasks= must name a task")


def evaluate(asked: EvaluateOptions) -> dict[str, Any]:
    """lm_eval's results; "about" has the metrics and the conditions."""
    try:
        import lm_eval
    except ImportError as error:
        install = "pip install -c constraints.txt -e '.[eval]'"
        raise ConfigError(f"scripts/evaluate_lm.py needs lm_eval ({error}): {install}") from error
    from scripts.lm_eval_model import NanoQK

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # its resamples are one task: a pool of forks only adds a risk
    device = resolve_device(asked.device)
    dtype = resolve_dtype(asked.dtype, device)
    run = load_asked_run(asked.run, asked.checkpoint, device)
    own = [] if asked.include_path is None else [expand(asked.include_path).absolute()]
    require(all(folder.is_dir() for folder in own), f"include_path={asked.include_path} is not a folder")
    with contextlib.chdir(own[0] if own else ROOT):  # it imports modules of the current folder that a metric names
        tasks, manager = load_tasks(asked.task_names, own)
    tasks += [cloze(run)] if CLOZE in asked.task_names else []
    began = time.perf_counter()
    lm = NanoQK(run.model, run.tokenizer, asked.batch_size, dtype)
    try:
        with contextlib.chdir(ROOT):  # it calls `python -m pip` and git, which would run what the current folder holds
            results = lm_eval.simple_evaluate(
                lm, tasks=tasks, task_manager=manager, num_fewshot=asked.num_fewshot, limit=asked.limit,
                batch_size=asked.batch_size, bootstrap_iters=1000,
            )  # fmt: skip
    except ConfigError:
        raise
    except ValueError as error:  # more examples than a task has documents, for instance
        raise ConfigError(f"tasks={asked.tasks} num_fewshot={show(asked.num_fewshot)}: {one_line(error)}") from error
    fault, metrics = run.config.fault.name, metrics_of(results)
    about = {
        "run": asked.run, "run_id": run.config.run_id, "checkpoint": asked.checkpoint, "iter": run.state.get("step"),
        "num_fewshot": results["n-shot"], "limit": asked.limit,
        "dtype": str(dtype).removeprefix("torch."), "lm_eval": lm_eval.__version__,
        "seconds": round(time.perf_counter() - began, 1), "truncated": lm.truncated,
        "questions": {task: n["effective"] for task, n in results["n-samples"].items()},
        **({"fault": fault} if fault != "none" else {}), "metrics": metrics,
    }  # fmt: skip
    return {**results, "about": about}


def evaluate_run(asked: EvaluateOptions) -> int:
    results = evaluate(asked)
    from lm_eval.utils import make_table

    about = results["about"]
    if asked.out is not None:  # before anything is printed: the reader of a pipe may be gone
        plain = json.loads(json.dumps(results, default=str))
        text = json.dumps(sealed(plain), indent=1, ensure_ascii=False) + "\n"
        write_atomic(expand(asked.out), text.encode())
    print(make_table(results), end="")
    if about["truncated"]:
        print(f"warning: {about['truncated']} prompts lost their first tokens: model.block_size has no room for them "
              "and their answers")  # fmt: skip
    print(json.dumps(about))
    return 0


if __name__ == "__main__":
    sys.exit(run_script(EvaluateOptions, evaluate_run, __doc__))
