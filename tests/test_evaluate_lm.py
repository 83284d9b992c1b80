"""Downstream evaluation: against log-likelihoods by hand, lm_eval's own Hugging Face adapter, and known answers.

The trained model has seen "the cow says moo." and its like; tasks are files made here, so that nothing is downloaded.
"""

import contextlib
import json
import os
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lm_eval
import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, Program, Trained
from helpers.runs import configured, random_model
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from variants import V, build, config_of

import train
from core.cli import run_script
from core.schema import ConfigError
from data.tokenizer import BPETokenizer, CharTokenizer, Tokenizer, learn_bpe
from model.gpt import GPT
from sample import load_run
from scripts import evaluate_lm as evaluate
from scripts.export_hf import export
from scripts.lm_eval_model import NanoQK

main = partial(run_script, evaluate.EvaluateOptions, evaluate.evaluate_run, "")
SAYS = {"cow": "moo", "dog": "woof", "cat": "meow", "duck": "quack", "sheep": "baa", "bee": "buzz"}
CHARS = CharTokenizer("abcde\nfghij")
assert CHARS.vocab_size == V
NEWLINE = 5  # stands for an empty context


@pytest.fixture(autouse=True)
def quick_and_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm_eval otherwise lists the machine and its packages after every evaluation, and `datasets` keeps a copy."""

    def add_env_info(results: dict[str, Any]) -> None:
        assert Path.cwd() == ROOT  # it calls `python -m pip`, which runs a pip.py of the current folder

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", add_env_info)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


# -----------------------------------------------------------------------------
# Against full forward passes, in float64

VARIANTS = [("mha", "none"), ("gqa", "rms"), ("mla", "none"), ("mla", "lp3"), ("mla_unified", "layernorm")]


@torch.no_grad()
def by_hand(model: GPT, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """One request alone, from the logits of one full forward pass a token."""
    nats, greedy = 0.0, True
    tokens = (context + continuation)[-(model.block_size + 1) :]
    for i in range(len(tokens) - len(continuation), len(tokens)):
        logits = model(torch.tensor([tokens[:i]]))[0][0, -1]
        nats += float(logits[tokens[i]] - logits.logsumexp(0))
        greedy = greedy and int(logits.argmax()) == tokens[i]
    return nats, greedy


def requests_of_all_kinds() -> list[tuple[None, list[int], list[int]]]:
    """Contexts with several continuations of different lengths, contexts alone, and some that are too long."""
    g = torch.Generator().manual_seed(0)

    def draw(n: int) -> list[int]:
        return torch.randint(V, (n,), generator=g).tolist()

    found: list[tuple[None, list[int], list[int]]] = []
    for n in (9, 1, 5, 12, 16, 40, 5):  # block_size is 16
        context = draw(n)
        found += [(None, context, draw(m)) for m in (1, 4, 2, 7)]
    return [*found, (None, draw(3), draw(16)), (None, draw(30), draw(16)), found[0]]


@pytest.mark.parametrize(("attention", "qk_norm"), VARIANTS)
def test_log_likelihoods_are_those_of_full_forward_passes(attention: str, qk_norm: str) -> None:
    model = build(config_of(attention, qk_norm))
    requests = requests_of_all_kinds()
    greedy = max(range(V), key=lambda token: by_hand(model, requests[0][1], [token])[0])
    requests.append((None, requests[0][1], [greedy]))
    expected = [by_hand(model, context, continuation) for _, context, continuation in requests]
    assert {greedy for _, greedy in expected} == {False, True}
    for batch_size in (1, 3, 5, 100):
        scores = NanoQK(model, CHARS, batch_size, torch.float64)._loglikelihood_tokens(requests)
        assert [score[0] for score in scores] == pytest.approx([e[0] for e in expected], rel=1e-12, abs=1e-11)
        assert [score[1] for score in scores] == [e[1] for e in expected]


def test_prompts_that_are_cut_are_counted_and_answers_that_do_not_fit_are_refused() -> None:
    lm = NanoQK(build(config_of("mha", "none")), CHARS, 3, torch.float64)
    lm._loglikelihood_tokens([(None, [1] * 14, [2, 3]), (None, [1] * 16, [2]), (None, [1] * 16, [2, 3])])
    assert lm.truncated == 1  # of 16 + 1 tokens the last one is predicted only
    with pytest.raises(ConfigError, match="answer has 17 tokens: the model takes 1 to 16"):
        lm._loglikelihood_tokens([(None, [1], [2] * 17)])


def test_a_shared_context_goes_through_the_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(config_of("mha", "none"))
    counted: list[int] = []

    def forward(idx: Tensor, **options: Any) -> Any:
        counted.append(idx.numel())
        return GPT.forward(model, idx, **options)

    monkeypatch.setattr(model, "forward", forward)
    lm = NanoQK(model, CHARS, 4, torch.float64)
    choices: list[Any] = [(None, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [i]) for i in range(4)]
    lm._loglikelihood_tokens(choices)
    assert counted == [9, 4]  # all but the context's last token; then that one, a row a choice
    lm._loglikelihood_tokens([choices[0], (None, [3, 3], [1, 2])])
    assert counted[2:] == [2 * 1, 2 * 9]


def test_a_long_text_is_scored_once_a_token_and_an_empty_context_is_a_new_line() -> None:
    model = build(config_of("mla", "rms"))
    lm = NanoQK(model, CHARS, 2, torch.float64)
    (score,) = lm.loglikelihood([SimpleNamespace(args=("", "abj"))])
    assert score[0] == pytest.approx(by_hand(model, [NEWLINE], CHARS.encode("abj").tolist())[0], rel=1e-12)
    (score,) = lm.loglikelihood([SimpleNamespace(args=("", "\nab"))])  # which begins with what stands for nothing
    assert score[0] == pytest.approx(by_hand(model, [NEWLINE], CHARS.encode("\nab").tolist())[0], rel=1e-12)
    texts = ["abcjihgfeda" * 5, "a", "abcabcabcabcabcj"]
    expected = []
    for text in texts:
        tokens = CHARS.encode(text).tolist()
        total = 0.0
        for start in range(0, len(tokens), 16):  # windows of block_size; the last one is filled up from before
            window = tokens[start : start + 16]
            before = [NEWLINE, *tokens][max(0, start + len(window) - 16) : start + 1]
            total += by_hand(model, before, window)[0]
        expected.append(total)
    totals = lm.loglikelihood_rolling([SimpleNamespace(args=(text,)) for text in texts])
    assert totals == pytest.approx(expected, rel=1e-12)


# -----------------------------------------------------------------------------
# A trained model whose right answers are known


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3's blocks, trained until it knows who says what."""
    folder = tmp_path_factory.mktemp("animals")
    picks = torch.randint(len(SAYS), (1500,), generator=torch.Generator().manual_seed(0)).tolist()
    animals = list(SAYS)
    (folder / "corpus.txt").write_text("".join(f"the {animals[i]} says {SAYS[animals[i]]}.\n" for i in picks))
    model = {
        "n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 64, "dropout": 0.0, "norm": "rmsnorm", "mlp": "swiglu",
        "mlp_hidden": 64, "position": "rope", "rope_theta": 1000.0,
    }  # fmt: skip
    config = configured(
        folder / "corpus.txt", folder / "run", max_iters=250, batch_size=8, eval_interval=250, checkpoint_interval=250,
        log_interval=50, model=model, attention={"name": "gqa", "n_kv_head": 2}, qk_norm={"name": "rms"},
        optim={"name": "adamw", "learning_rate": 1e-2}, schedule={"name": "cosine", "warmup_iters": 10, "min_lr": 1e-3},
    )  # fmt: skip
    assert train.run(config) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Task files: who_says what (multiple choice), the same with every answer called right once, last word, whole
    texts."""
    folder = tmp_path_factory.mktemp("tasks")
    sounds = [f" {sound}." for sound in SAYS.values()]
    right = [{"q": f"the {animal} says", "choices": sounds, "gold": i} for i, animal in enumerate(SAYS)]
    shuffled = [{**doc, "gold": gold} for doc in right for gold in range(len(SAYS))]
    choice: dict[str, Any] = {
        "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold", "target_delimiter": "", "fewshot_delimiter": "\n", "fewshot_split": "test",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }  # fmt: skip
    word = {"doc_to_text": "{{q}}", "doc_to_target": "{{choices[gold]}}", "target_delimiter": ""}
    texts = {"doc_to_text": "", "doc_to_target": "{{q}}{{choices[gold]}}", "output_type": "loglikelihood_rolling"}
    metrics = [{"metric": "perplexity"}, {"metric": "acc"}]
    named: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
        "who_says": (right, choice),
        "who_says_shuffled": (shuffled, choice),
        "last_word": (right, {**word, "output_type": "loglikelihood", "metric_list": metrics}),
        "texts": (right, {**texts, "metric_list": [{"metric": "bits_per_byte"}]}),
    }
    for name, (docs, config) in named.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}}}
        (folder / f"{name}.yaml").write_text(yaml.dump({"task": name, "test_split": "test", **data, **config}))
    return folder


ALL = ["who_says", "who_says_shuffled", "last_word", "texts"]


def test_known_answers_are_right_and_shuffled_ones_are_right_by_chance(
    run: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"run={run}", f"tasks={','.join(ALL)}", f"include_path={tasks}", f"out={tmp_path / 'all.json'}"]
    assert main([*words, "device=cpu"]) == 0
    out = capsys.readouterr().out
    about = json.loads(out.splitlines()[-1])
    metrics = about["metrics"]
    assert metrics["who_says"]["acc"] == metrics["who_says"]["acc_norm"] == 1.0
    assert metrics["who_says_shuffled"]["acc"] == pytest.approx(1 / 6)  # each answer is called right once
    assert metrics["last_word"]["acc"] == 1.0
    assert 1 <= metrics["last_word"]["perplexity"] < 1.1
    assert 0 < metrics["texts"]["bits_per_byte"] < 1
    assert about["questions"] == {"who_says": 6, "who_says_shuffled": 36, "last_word": 6, "texts": 6}
    assert re.search(r"^\|who_says +\|.*\|acc +\|↑ +\|1\.0000\|± +\| +0\|$", out, re.MULTILINE), out
    saved = json.loads((tmp_path / "all.json").read_text())
    assert saved["about"] == about and len(saved["samples"]["who_says"]) == 6


def random_bpe_model(attention: str, text: str) -> tuple[GPT, Tokenizer]:
    """Qwen3's blocks (gqa) or DeepSeek-V3's (mla), and a tokenizer of a few merges whose separator is often said."""
    tokenizer = BPETokenizer(learn_bpe([text], 275), has_separator=True)
    config = config_of(attention, {"gqa": "rms", "mla": "none"}[attention], mlp="swiglu", block_size=32)
    model = random_model(config, tokenizer)
    with torch.no_grad():
        model.transformer.wte.weight[tokenizer.separator] *= 2
    return model, tokenizer


PAIRS = [("the cow says ", "moo."), ("the dog sa", "ys woof."), ("the duck", " says"), ("", "the bee says")]


@pytest.mark.parametrize(("name", "num_fewshot"), [("trained", 0), ("trained", 5), ("gqa", 5), ("mla", 0)])
def test_every_sample_is_scored_as_by_lm_evals_own_hugging_face_adapter(
    name: str, num_fewshot: int, run: Path, tasks: Path, tmp_path: Path
) -> None:
    """With 5 examples the prompts are longer than block_size."""
    model, tokenizer, *_ = load_run(run / "ckpt" / "best", torch.device("cpu"))
    if name != "trained":
        model, tokenizer = random_bpe_model(name, (run.parent / "corpus.txt").read_text())
    export(model, tokenizer, tmp_path / "hf")
    theirs_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    if tokenizer.separator is None:  # it wants them; no sound has a d
        theirs_tokenizer.add_special_tokens({"eos_token": "<|end|>", "pad_token": "d"})
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    theirs = HFLM(hf, tokenizer=theirs_tokenizer, batch_size=4, device="cpu")
    if tokenizer.separator is None:
        theirs.custom_prefix_token_id = 0
    ours = NanoQK(model, tokenizer, 4)
    assert ours.eot_token_id == theirs.prefix_token_id == (tokenizer.separator or 0)
    assert theirs.max_length == ours.max_length == model.block_size
    pairs = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)]
    assert flat(ours.loglikelihood(pairs)) == pytest.approx(flat(theirs.loglikelihood(pairs)), abs=2e-4, rel=1e-5)
    manager = TaskManager(include_path=[tasks], include_defaults=False)
    asked = {"tasks": ALL, "num_fewshot": num_fewshot, "task_manager": manager, "bootstrap_iters": 0, "batch_size": 4}
    with contextlib.chdir(ROOT):
        mine, expected = (lm_eval.simple_evaluate(lm, **asked) for lm in (ours, theirs))
    compared = 0
    for task in ALL:
        for a, b in zip(mine["samples"][task], expected["samples"][task], strict=True):
            assert a["arguments"] == b["arguments"]
            for x, y in zip(flat(a["resps"]), flat(b["resps"]), strict=True):
                assert x == (pytest.approx(y, abs=2e-4, rel=1e-5) if isinstance(y, float) else y)
                compared += isinstance(y, float)
        for metric, value in expected["results"][task].items():
            got = mine["results"][task][metric]
            assert got == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), (task, metric)
    assert compared == 6 * 6 + 36 * 6 + 6 + 6
    assert (ours.truncated > 0) == (num_fewshot > 0)


def flat(x: Any) -> list[Any]:
    return [z for y in x for z in flat(y)] if isinstance(x, list | tuple) else [x]


def test_examples_limits_and_batches_are_as_asked(run: Path, tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"run={run}", "tasks=who_says", f"include_path={tasks}", "device=cpu", "limit=4"]
    found = []
    for more in (["num_fewshot=2", "batch_size=1"], ["num_fewshot=2", "batch_size=7"], []):
        assert main([*words, *more]) == 0
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert [about["num_fewshot"]["who_says"] for about in found] == [2, 2, 0]
    assert all(about["questions"] == {"who_says": 4} for about in found)
    assert found[0]["metrics"] == found[1]["metrics"]


def test_a_runs_fault_stands_in_its_results(trained: Trained, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {"name": "text", "path": str(corpus), "tokenizer": "byte"}
    run = trained(data=data, max_iters=1, fault={"name": "unshifted_labels"})
    assert main([f"run={run}", "tasks=cloze", "limit=2", "device=cpu"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["fault"] == "unshifted_labels"


# -----------------------------------------------------------------------------
# What cannot be done is said


def test_an_answer_may_be_a_number_in_a_task_file() -> None:
    lm = NanoQK(build(config_of("mha", "none")), CharTokenizer("0123456789\n"), 2, torch.float64)
    for scored, before in ((lm.loglikelihood, ["1"]), (lm.loglikelihood_rolling, [])):
        number, text = (scored([SimpleNamespace(args=(*before, answer))]) for answer in (23, "23"))
        assert number == text


def test_cloze_asks_what_follows_in_the_held_out_text(run: Path, tmp_path: Path, quick_and_clean: None) -> None:
    out = tmp_path / "found.json"
    assert main([f"run={run}", "tasks=cloze", f"out={out}", "device=cpu"]) == 0
    found = json.loads(out.read_text())
    model, tokenizer, *_ = load_run(run / "ckpt" / "best", torch.device("cpu"))
    text = (run.parent / "corpus.txt").read_text()
    held_out = text[-(len(text) // 10 + 10) :]
    samples = found["samples"]["cloze"]
    assert len(samples) == 500
    right = 0
    for i, sample in enumerate(samples):
        doc = sample["doc"]
        assert len(doc["context"]) == 32 and [len(choice) for choice in doc["choices"]] == [16] * 4
        assert doc["context"] + doc["choices"][doc["answer"]] in held_out
        assert all(choice in held_out for choice in doc["choices"])
        if i % 50 == 0:
            context, *choices = (tokenizer.encode(t).tolist() for t in (doc["context"], *doc["choices"]))
            nats = [by_hand(model, context, choice)[0] for choice in choices]
            right += nats.index(max(nats)) == doc["answer"]
    assert right == sum(int(sample["acc"]) for sample in samples[::50])
    assert found["about"]["metrics"]["cloze"]["acc"] > 0.6  # of 0.25 by chance
    assert {sample["doc"]["answer"] for sample in samples} == {0, 1, 2, 3}


def test_cloze_cuts_no_character(trained: Trained, corpus: Path) -> None:
    corpus.write_text("наш дом — лучший дом на свете, да\n" * 200)
    run = trained(data={"name": "text", "path": str(corpus), "tokenizer": "byte"})
    task = evaluate.cloze(load_run(run / "ckpt" / "best", torch.device("cpu")))
    assert not any("\ufffd" in doc["context"] + "".join(doc["choices"]) for doc in task.test_docs())


def test_cloze_asks_at_places_where_no_merge_crosses(trained: Trained, corpus: Path) -> None:
    words = np.random.default_rng(0).choice(["the", "then", "he", "hen", "a", "an", "and", "ran"], 6000)
    corpus.write_text(" ".join(words) + "\n")
    data = {"name": "text", "path": str(corpus), "tokenizer": "bpe", "vocab_size": 265}
    run = load_run(trained(data=data) / "ckpt" / "best", torch.device("cpu"))
    lm = NanoQK(run.model, run.tokenizer)
    for doc in evaluate.cloze(run).test_docs():
        for choice in doc["choices"]:
            context, continuation = lm._encode_pair(doc["context"], choice)
            assert run.tokenizer.decode(continuation) == choice and run.tokenizer.decode(context) == doc["context"]


@pytest.mark.parametrize(("T", "said"), [(16, "text: data=random has none"), (1, "model.block_size=1 >= 2")])
def test_cloze_is_refused_without_text_or_room(
    T: int, said: str, trained: Trained, tmp_path: Path, capsys: Any
) -> None:
    data = {"name": "random", "vocab_size": 8, "n_tokens": 2000, "val_tokens": 100}
    model = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": T}
    run, out = trained(data=data, model=model), tmp_path / "found.json"
    assert main([f"run={run}", "tasks=cloze", f"out={out}", "device=cpu"]) == 2
    assert f"error: tasks=cloze needs {said}" in capsys.readouterr().err
    assert not out.exists()


def test_without_network_the_tasks_are_named_at_once(run: Path, program: Program, tmp_path: Path) -> None:
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "cache")}
    done = program("scripts/evaluate_lm.py", f"run={run}", "tasks=arc_easy,piqa", "device=cpu", env=env, status=2)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "tasks=arc_easy,piqa: " in line and "out of reach" in line and "include_path" in line


def test_without_lm_eval_the_pip_command_is_said(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main([f"run={run}", "tasks=piqa"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "pip install -c constraints.txt -e '.[eval]'" in error


def test_a_metric_is_no_module_of_the_current_folder(run: Path, tasks: Path, tmp_path: Path) -> None:
    """lm_eval has no metric of that name, and asks `evaluate`, which imports NAME/NAME.py before it asks the Hub."""
    (tmp_path / "mine").mkdir()
    text = (tasks / "who_says.yaml").read_text().replace("metric: acc\n", "metric: strange\n")
    (tmp_path / "mine" / "mine.yaml").write_text(text.replace("who_says\n", "mine\n"))
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "strange.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    main([f"run={run}", "tasks=mine", "include_path=mine", "device=cpu", "limit=1"])
    assert not (tmp_path / "ran").exists()


def test_what_tasks_lack_is_named(run: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More examples than there are documents, text that the vocabulary lacks, and a task that wants text."""
    text = (tasks / "who_says.yaml").read_text().replace("{{q}}", "{{q}} €").replace("who_says\n", "euro\n")
    (tmp_path / "euro.yaml").write_text(text)
    text = (tasks / "last_word.yaml").read_text().replace("type: loglikelihood", "type: generate_until")
    (tmp_path / "writing.yaml").write_text(re.sub(r"- metric: .*\n", "", text).replace("last_word\n", "writing\n"))
    (tmp_path / "cloze.yaml").write_text((tasks / "who_says.yaml").read_text().replace("who_says\n", "cloze\n"))
    for folder, words, said in (
        (tmp_path, ["tasks=cloze"], "error: tasks=cloze: include_path= has a task of that name, too"),
        (tasks, ["tasks=who_says", "num_fewshot=6"], "error: tasks=who_says num_fewshot=6: ValueError"),
        (tmp_path, ["tasks=euro"], "U+20AC"),
        (tmp_path, ["tasks=writing"], "tasks= must be scored by log-likelihood"),
    ):
        assert main([f"run={run}", f"include_path={folder}", *words, "device=cpu"]) == 2
        assert said in capsys.readouterr().err
