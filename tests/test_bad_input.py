"""Bad input ends with exit status 2 and one line that names key, value and rule, before anything is written."""

import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import CACHE, ROOT, TINY
from helpers.refusals import Outcome, check, contents

import sample
import train
from core.schema import ConfigError

TEXT = "data=text data.path=corpus.txt"

# Overrides of train.py, and what the line must hold.
BAD: dict[str, list[str]] = {
    "foo=1": ["foo=1", "unknown"],
    "+foo=1": ["foo=1", "unknown"],
    "max_iter=10": ["max_iter=10", "did you mean max_iters"],
    "model.n_heads=4": ["model.n_heads=4", "did you mean model.n_head"],
    "qk_norm=lp qk_norm.q=3": ["qk_norm.q=3", "unknown"],
    "qk_norm=none qk_norm.p=3": ["qk_norm.p=3", "unknown"],
    "qk_norm=none +qk_norm.p=3": ["qk_norm.p=3", "unknown"],
    "qk_norm=l2": ["qk_norm=l2", "lp, ngpt, none, rms"],
    "model=gpt5": ["model=gpt5", "baby_gpt, gpt2_124m"],
    "schedule.name=wsd": ["schedule.name=wsd keeps", "write schedule=wsd"],
    "model.name=gpt2_124m": ["write model=gpt2_124m"],
    "qk_norm.name=l2": ["qk_norm.name=l2", "none, lp, rms"],
    "nogroup/x=1": ["nogroup/x"],
    "max_iters=abc": ["max_iters=abc", "an integer"],
    "compile=maybe": ["compile=maybe", "true, false or auto"],
    "dry_run=yess": ["dry_run=yess", "true or false"],
    "~model": ["~model", "not a setting"],
    "--max_iters=5": ["--max_iters=5", "write max_iters=5"],
    "learning_rate=1e-3": ["learning_rate=1e-3", "did you mean optim.learning_rate"],
    "lr=3e-4": ["lr=3e-4", "did you mean optim.learning_rate"],
    "beta1=0.9": ["beta1=0.9", "did you mean optim.betas"],
    "dataset=openwebtext": ["dataset=openwebtext", "did you mean data?"],
    "wandb_log=true": ["wandb_log=true", "did you mean wandb.mode"],
    "model.n_kv_head=2": ["model.n_kv_head=2", "did you mean attention.n_kv_head?"],
    "grad_accum=4": ["grad_accum=4", "did you mean gradient_accumulation_steps?"],
    "wandb=disabled": ["wandb=disabled", "write wandb.mode=..."],
    "qk_norm=rmsnorm": ["qk_norm=rmsnorm", "did you mean qk_norm=rms?"],
    "model=baby-gpt": ["model=baby-gpt", "did you mean model=baby_gpt?"],
    "fault=no_msk": ["fault=no_msk", "did you mean fault=no_mask?"],
    "qk_norm.eps=1": ["qk_norm.eps=1", "belongs to qk_norm=rms"],
    "qk_norm.name=[1]": ["qk_norm.name=[1]", "must be one of"],
    "out_dir=${oc.env:NOT_SET}": ["NOT_SET"],
    "out_dir=${nothing}": ["nothing"],
    "batch_size=99999999999999999999": ["batch_size=99999999999999999999", "2**31"],
    f"seed={5000 * '9'}": ["seed=999", "4300 digits"],
    "threads=100000": ["threads=100000", "CPUs"],
    "device=cuda:99999999999999999999": ["device=cuda:9", "cuda:N"],
    "device=cuda:01": ["device=cuda:01", "cuda:N"],
    "grad_clip=inf": ["grad_clip=inf", "at most 1e+30"],
    "model.name=../up": ["model.name=../up", "word"],
    "qk_norm=lp qk_norm.alpha_init=1e300": ["qk_norm.alpha_init=1e+300", "1e6"],
    "data=text data.path=pipe": ["data.path=pipe", "regular file"],
    "data=text data.path=corpus.txt data.fold=0 data.folds=100000": ["data.folds", "at least 2"],
    "eval_iters=2 data=text data.path=corpus.txt data.fold=0 data.folds=500": ["block_size", "eval_iters=0"],
    "wandb=null": ["wandb=null"],
    "optim.betas=[0.9]": ["optim.betas=[0.9]", "list of 2 numbers"],
    "optim.betas=[0.9,1.5]": ["optim.betas=[0.9, 1.5]", "[0, 1)"],
    "model=3": ["model=3"],
    "model.n_embd=30 model.n_head=7": ["model.n_embd=30", "divisible", "model.n_head=7"],
    "model.n_layer=0": ["model.n_layer=0", "[1, 1000]"],
    "model.n_layer=2147483647": ["model.n_layer=2147483647", "[1, 1000]"],
    "model.n_embd=1073741824 dry_run=true": ["model.n_embd=1073741824", "1048576"],
    "model.n_embd=1048576 model.n_head=8 data=text data.path=corpus.txt": ["parameters", "need more than", "GiB"],
    "batch_size=2147483647": ["batch_size=2147483647", "need more than", "GiB"],
    "data=random data.vocab_size=2147483647": ["data.vocab_size=2147483647", "1048576"],
    "data=random data.n_tokens=2147483647": ["data.n_tokens=2147483647", "1000000000"],
    "data=[1]": ["data=[1]"],
    "hydra.run.dir=/proc/x": ["hydra.run.dir=/proc/x", "no effect"],
    "--experimental-rerun FILE": ["--experimental-rerun"],
    "--info foo": ["--info"],
    "-sc foo": ["-sc"],
    "--package": ["--package"],
    "model.dropout=1.0": ["model.dropout=1.0", "[0, 1)"],
    "model.dropout=nan": ["model.dropout=nan"],
    "batch_size=0": ["batch_size=0", ">= 1"],
    "max_iters=-1": ["max_iters=-1", ">= 1"],
    "seed=-1": ["seed=-1", ">= 0"],
    "grad_clip=-1": ["grad_clip=-1", ">= 0"],
    "eval_interval=0": ["eval_interval=0", ">= 1"],
    "optim.learning_rate=-1e-3": ["optim.learning_rate=-0.001", "> 0"],
    "optim.learning_rate=inf": ["optim.learning_rate=inf", "at most 1e+30"],
    "schedule.min_lr=1.0": ["schedule.min_lr=1.0", "optim.learning_rate=0.001"],
    "schedule.warmup_iters=5000": ["schedule.warmup_iters=5000", "5000"],
    "schedule=wsd schedule.warmup_iters=4001": ["schedule.warmup_iters=4001", "<= 4000", "schedule.decay_frac=0.2"],
    "schedule=wsd schedule.decay_frac=0": ["schedule.decay_frac=0.0", "(0, 1]"],
    "schedule=wsd schedule.decay_frac=1.2": ["schedule.decay_frac=1.2", "(0, 1]"],
    "schedule=wsd schedule.min_lr=1.0": ["schedule.min_lr=1.0", "optim.learning_rate=0.001"],
    "schedule=linear schedule.lr_decay_iters=100 schedule.warmup_iters=100": ["schedule.warmup_iters=100", "< 100"],
    "schedule=linear schedule.decay_frac=0.2": ["schedule.decay_frac=0.2", "unknown"],
    "schedule=constant schedule.min_lr=0": ["schedule.min_lr=0", "unknown", "belongs to schedule=cosine"],
    "schedule=constant +schedule.lr_decay_iters=9": ["schedule.lr_decay_iters=9", "unknown"],
    "schedule=constant schedule.warmup_iters=-1": ["schedule.warmup_iters=-1", ">= 0"],
    "schedule=step": ["schedule=step", "constant, cosine, linear, wsd"],
    "optim=sgd": ["optim=sgd", "adamw, muon"],
    "optim=adamw optim.momentum=0.9": ["optim.momentum=0.9", "unknown"],
    "optim=muon optim.momentum=1.0": ["optim.momentum=1.0", "[0, 1)"],
    "optim=muon optim.ns_steps=0": ["optim.ns_steps=0", "[1, 99]"],
    "optim=muon optim.nesterov=maybe": ["optim.nesterov=maybe", "true or false"],
    "optim=muon optim.momentun=0.9": ["optim.momentun=0.9", "did you mean optim.momentum"],
    "optim=muon optim.betas=[1,0.9]": ["optim.betas=[1.0, 0.9]", "[0, 1)"],
    "qk_norm=lp qk_norm.p=0.5": ["qk_norm.p=0.5", ">= 1"],
    "qk_norm=lp qk_norm.p=nan": ["qk_norm.p=nan", ">= 1"],
    "-m seed=range(1,3,0)": ["seed=range(1,3,0)", "no list of values"],
    "-m qk_norm=none,rns": ["qk_norm=rns", "did you mean qk_norm=rms?"],
    "-m seed=1,2 out_dir=run": ["out_dir=run", "one run, not several"],
    "-m qk_norm=glob(*)": ["qk_norm=glob(*)", "no list of values"],
    "optim.lr=1": ["optim.lr=1", "did you mean optim.learning_rate?"],
    "qk_norm=lp qk_norm.p=1e39": ["qk_norm.p=1e+39", "<= 1e30"],
    "qk_norm=lp qk_norm.alpha_init=-2": ["qk_norm.alpha_init=-2.0", "[1e-6, 1e6]"],
    "qk_norm=lp qk_norm.alpha_init=big": ["qk_norm.alpha_init=big", "henry"],
    "qk_norm=lp qk_norm.alpha_per=token": ["qk_norm.alpha_per=token", "layer, head"],
    "qk_norm=rms qk_norm.eps=0": ["qk_norm.eps=0.0", "> 0"],
    "init_from=nowhere": ["init_from=nowhere", "does not exist"],
    "init_from=nowhere init_sha256=0a": ["init_sha256=0a", "64 hexadecimal digits"],
    "init_sha256=aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa": [
        "init_sha256=a",
        "needs init_from",
    ],
    "sweep=p_sweep": ["sweep=p_sweep", "sweeps/launch.py"],
    "launcher.workers=2": ["launcher.workers=2", "sweeps/launch.py"],
    "data.split=shuffled": ["data.split=shuffled", "data.fold"],
    "qk_clip=clip qk_norm=rms": ["qk_clip=clip", "needs qk_norm=none", "qk_norm=rms"],
    "qk_clip=clip qk_norm=lp": ["qk_clip=clip", "needs qk_norm=none", "qk_norm=lp"],
    "qk_clip=clip qk_clip.threshold=0": ["qk_clip.threshold=0.0", "> 0"],
    "qk_clip=clip qk_clip.balance=1.1": ["qk_clip.balance=1.1", "[0, 1]"],
    "qk_clip=log qk_clip.threshold=100": ["qk_clip.threshold=100", "belongs to qk_clip=clip"],
    "qk_clip=always": ["qk_clip=always", "clip, log, none"],
    "attention=gqa attention.n_kv_head=4": ["model.n_head=", "divisible", "attention.n_kv_head=4"],
    "attention=mha attention.n_kv_head=1": ["attention.n_kv_head=1", "unknown"],
    "attention=mla": ["model.position=learned", "attention=mla needs rope"],
    "model=mla_nano attention.rope_dim=3": ["attention.rope_dim=3", "even"],
    "model=mla_nano model.bias=true": ["model.bias=true", "attention=mla"],
    "model=mla_nano attention.qk_norm_layout=unified": ["attention.qk_norm_layout=unified", "not qk_norm=none"],
    "model=mla_nano attention.qk_norm_layout=both": ["attention.qk_norm_layout=both", "blockwise, unified"],
    "data.fold=10": ["data.fold=10", "0..9"],
    "data.fold=-1": ["data.fold=-1", "0..9"],
    "data.folds=1 data.fold=0": ["data.folds=1", ">= 2"],
    "data.folds=5": ["data.folds=5", "data.fold"],
    "data.tokenizer=word": ["data.tokenizer=word", "char, byte, bpe, gpt2"],
    "data.vocab_size=300": ["data.vocab_size=300", "data.tokenizer=bpe"],
    "data=text data.path=corpus.txt data.tokenizer=gpt2 data.vocab_size=300": ["data.vocab_size=300", "gpt2 has its"],
    "data=text data.path=corpus.txt data.tokenizer=bpe data.vocab_size=256": ["data.vocab_size=256", "[257, "],
    "data=text data.path=corpus.txt data.tokenizer=bpe data.vocab_size=2147483647": ["data.vocab_size=2147483647"],
    "data=text data.path=corpus.txt data.tokenizer=bpe data.vocab_size=9000": ["data.vocab_size=9000", "tokens that"],
    "data=python_docs +data.path=x": ["data.path=x", "unknown"],
    "data=text": ["data.path", "given"],
    "data=text data.path=nowhere.txt": ["data.path=nowhere.txt", "exist"],
    "data=text data.path=empty.txt": ["data.path=empty.txt", "empty"],
    "data=text data.path=latin1.txt": ["data.path=latin1.txt", "UTF-8"],
    "data=text data.path=short.txt model.block_size=64": ["model.block_size=64", "64 tokens"],
    "data=tiny_shakespeare data.path=corpus.txt": ["data.path=corpus.txt", "Tiny Shakespeare"],
    "device=gpu": ["device=gpu", "auto, cpu, mps, cuda"],
    "dtype=float16": ["dtype=float16", "float32, bfloat16"],
    "wandb.mode=on": ["wandb.mode=on", "offline"],
    "wandb.project=a/b": ["wandb.project", "a/b"],
    "out_dir=corpus.txt/run": ["out_dir=corpus.txt/run", "not a directory"],
    "out_dir=corpus.txt": ["out_dir=corpus.txt"],
    "out_dir=/proc/run": ["out_dir=/proc/run"],
    "out_dir=folder": ["out_dir=folder", "config.yaml"],
    "out_dir=": ["out_dir"],
    f"out_dir={300 * 'a'}": ["too long"],
    "eval_only=true": ["eval_only=true", "run"],
    "gradient_accumulation_steps=0": ["gradient_accumulation_steps=0", ">= 1"],
    "threads=0": ["threads=0", ">= 1"],
    "max_iters": ["max_iters"],
    "max_iters=[": ["max_iters=["],
    "experiment=nothing": ["experiment=nothing", "quickstart"],
}
if not torch.cuda.is_available():
    BAD["device=cuda"] = ["device=cuda", "absent"]
if not torch.backends.mps.is_available():
    BAD["device=mps"] = ["device=mps", "absent"]

BAD_SAMPLE: dict[str, list[str]] = {
    "": ["run", "given"],
    "run=nowhere": ["run=nowhere does not exist"],
    "run=folder": ["run=folder"],
    "run=x checkpoint=newest": ["checkpoint=newest", "best, latest"],
    "run=x num_samples=0": ["num_samples=0", ">= 1"],
    "run=x temperature=-1": ["temperature=-1", ">= 0"],
    "run=x top_k=0": ["top_k=0", ">= 1"],
    "run=x seed=99999999999999999999": ["seed=99999999999999999999", "2**63"],
    "run=~nobody-at-all/x": ["run="],
    f"run={5000 * 'a'}": ["aaaa ... aaaa", "does not exist"],
    "run=x start=FILE:~nobody-at-all/x": ["run=x"],
    "run=x top_p=0": ["top_p=0", "(0, 1]"],
    "run=x max_tokens=3": ["max_tokens=3", "did you mean max_new_tokens"],
    "run=x +seed=3": ["+seed=3", "key=value"],
    "run=x --seed": ["--seed", "key=value"],
}


@pytest.mark.parametrize("overrides", BAD)
def test_a_bad_setting_of_train_is_one_line_and_writes_nothing(overrides: str, folder: Path, outcome: Outcome) -> None:
    before = contents(folder)
    given = overrides.split()
    base = [] if any(o.startswith(("data=", "max_iters", "dry_run")) for o in given) else TEXT.split()
    status, stderr = outcome(train.main, *base, *(o for o in TINY if fits(o, given)), *given)
    check(status, stderr, BAD[overrides])
    assert contents(folder) == before


def fits(override: str, given: list[str]) -> bool:
    """Whether a default of the tests leaves the setting under test alone."""
    keys = {g.lstrip("+").split("=")[0].split(".")[0] for g in given}
    return override.split("=")[0].split(".")[0] not in keys


ENVIRONMENTS: dict[str, list[str]] = {
    "RANK=abc": ["RANK=abc", "torchrun"],
    "RANK=0": ["RANK=0 WORLD_SIZE=", "torchrun"],
    "RANK=0 WORLD_SIZE=0 LOCAL_RANK=0": ["WORLD_SIZE=0", "torchrun"],
    "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0": ["WORLD_SIZE=2", "torchrun"],  # without MASTER_ADDR
    "RANK=1": ["RANK=1", "torchrun"],  # no rank 0 that would speak for it
}


@pytest.mark.parametrize("variables", ENVIRONMENTS)
def test_an_environment_that_torchrun_does_not_set_is_refused(
    variables: str, folder: Path, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(folder)
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    status, stderr = outcome(train.main, *TEXT.split(), *TINY, "max_iters=2", "gradient_accumulation_steps=2")
    check(status, stderr, ENVIRONMENTS[variables])
    assert contents(folder) == before


@pytest.mark.parametrize(
    "line",
    [
        f"train.py {TEXT} max_iters=1",
        f"train.py {TEXT} max_iters=1 wandb.mode=offline",  # W&B reads the variable itself
        f"sweeps/launch.py sweep=p_sweep_cpu sweep.folds=[0] sweep.grid.qk_norm.p=[2] {TEXT} max_iters=1 "
        "schedule.warmup_iters=0",
        "scripts/report.py sweep=p_sweep_cpu wandb=true",
    ],
)
@pytest.mark.parametrize("word", ["of", ""])
def test_an_unknown_wandb_mode_variable_is_refused_where_w_and_b_is_used(
    word: str, line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(folder)
    monkeypatch.setenv("WANDB_MODE", word)
    script, *words = line.split()
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert isinstance(exit_.value.code, int)
    check(exit_.value.code, capsys.readouterr().err, [f"WANDB_MODE={word} must be one of online, offline, disabled"])
    assert contents(folder) == before
    monkeypatch.setattr(sys, "argv", ["train.py", *TEXT.split(), "wandb.mode=disabled", "dry_run=true", *TINY])
    with pytest.raises(SystemExit, match="0"):
        train.main()


@pytest.mark.parametrize("prompt", ["/dev/zero", "pipe"])
def test_a_prompt_is_read_from_a_regular_file_alone(prompt: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match="must be a regular file"):
        sample.read_prompt(f"FILE:{prompt}")


@pytest.mark.parametrize("overrides", BAD_SAMPLE)
def test_a_bad_setting_of_sample_is_one_line_and_writes_nothing(overrides: str, folder: Path, outcome: Outcome) -> None:
    before = contents(folder)
    status, stderr = outcome(sample.main, *overrides.split())
    check(status, stderr, BAD_SAMPLE[overrides])
    assert contents(folder) == before


def test_the_program_itself_says_one_line_and_leaves_with_2(folder: Path) -> None:
    before = contents(folder)
    command = [sys.executable, str(ROOT / "train.py"), "data=text", "data.path=nowhere.txt"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert contents(folder) == before


# Words of the other programs, and what the line must hold.
SCRIPTS: dict[str, list[str]] = {
    "sample.py run=folder seed=1:30": ["seed=1:30 must be an integer"],  # to YAML it is 90
    "scripts/audit.py": ["run=", "model=", "given"],
    "scripts/audit.py --run=folder": ["--run=folder", "key=value"],
    "scripts/compare.py a=folder b=folder": ["a=folder", "not a checkpoint"],
    "scripts/dashboard.py": ["sweep=", "given"],
    "scripts/dashboard.py sweep=nowhere": ["entity=", "given"],
    "scripts/docs.py foo=1": ["foo=1", "unknown"],
    "scripts/evaluate_lm.py run=nowhere tasks=[]": ["run=nowhere does not exist"],
    "scripts/evaluate_lm.py run=folder": ["tasks=", "given"],
    "scripts/export_hf.py run=folder": ["out=", "given"],
    "scripts/export_hf.py run=nowhere out=x": ["run=nowhere does not exist"],
    "scripts/report.py run=folder": ["run=", "watch=true"],
    "scripts/report.py from=folder": ["from=folder", "no report"],
    "scripts/benchmarks/bench_train.py": ["one of peer=, old= and variants=", "given"],
    "scripts/benchmarks/bench_train.py peer=folder": ["peer=folder", "no model.py"],
    "scripts/benchmarks/bench_train.py old=. together=true": ["together=true needs variants="],
    "scripts/benchmarks/bench_train.py old=nosuch": ["old=nosuch must be a checkout of this repository"],
    "scripts/benchmarks/bench_train.py peer=nosuch": ["peer=nosuch must be a checkout of nanoGPT"],
    "scripts/benchmarks/bench_train.py peer=. qk_norm=rms": ["nanoGPT's own model", "qk_norm.name none -> rms"],
    "scripts/benchmarks/bench_train.py peer=. logits=softcap": ["nanoGPT's own model", "logits.cap"],
    "scripts/benchmarks/bench_train.py variants=qk_norm=none rounds=x": ["rounds=x must be an integer"],
    "scripts/benchmarks/bench_sample.py": ["one of peer=, old= and variants="],
    "scripts/benchmarks/bench_sample.py variants=qk_norm=none;qk_norm=non": ["qk_norm=non"],
    "scripts/benchmarks/bench_sample.py variants=qk_norm=rms;qk_norm=rms": ["two different lists"],
    "scripts/benchmarks/bench_sample.py peer=nosuch": ["peer=nosuch must be a checkout of nanoGPT"],
    "scripts/benchmarks/bench_sample.py peer=folder tokens=0": ["tokens=0", ">= 1"],
    "scripts/check_gpu.py parts=[speed]": ["parts=[speed] must be of device, profile"],
    "scripts/check_gpu.py model.n_layers=3": ["model.n_layers=3 is unknown"],
    "scripts/check_gpu.py device=gpu": ["device=gpu must be auto, cpu"],
    "scripts/check_gpu.py minutes=0": ["minutes=0.0 must be > 0 and at most 1e+30"],
    "scripts/benchmarks/bench_sample.py old=folder": ["old=folder", "no bench_sample.py"],
    "scripts/benchmarks/bench_decode.py device=gpu": ["device=gpu", "cuda:N"],
    "scripts/benchmarks/bench_decode.py foo=1": ["foo=1", "unknown"],
    "sweeps/status.py sweep_dir=corpus.txt": ["sweep_dir=corpus.txt", "no sweep"],
    "data/prepare_fineweb.py out=corpus.txt/x max_tokens=10": ["out=corpus.txt/x", "Not a directory"],
}


@pytest.mark.parametrize("line", SCRIPTS)
def test_a_bad_setting_of_a_script_is_one_line_and_writes_nothing(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(folder)
    script, *words = line.split()
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert isinstance(exit_.value.code, int)
    check(exit_.value.code, capsys.readouterr().err, SCRIPTS[line])
    assert contents(folder) == before


# A text, and what the line must hold where it is bad.
SENTENCE = b"to be or not to be, that is the question."
CORPORA: dict[str, tuple[bytes, list[str]]] = {
    "binary": (b"\x7fELF\x02\x01\x01\x00\xf8\xff" * 300, ["data.path=text.txt", "0xf8 at offset 8"]),
    "invalid UTF-8 in the middle": (SENTENCE * 30 + b"\xff" + SENTENCE * 30, ["0xff at offset 1230"]),
    "UTF-16": (SENTENCE.decode().encode("utf-16") * 30, ["must be UTF-8"]),
    "empty": (b"", ["data.path=text.txt is empty"]),
    "one character": (b"a", ["tokens"]),
    "one kind of character": (b"a" * 2000, []),
    "one line": (SENTENCE * 60, []),
    "CRLF": ((SENTENCE + b"\r\n") * 60, []),
    "BOM": (b"\xef\xbb\xbf" + SENTENCE * 60, []),
    "zeros": (b"\0" * 2000, []),
}


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe data.vocab_size=260"])
@pytest.mark.parametrize("text", CORPORA)
def test_a_strange_text_is_read_as_it_is_or_refused_in_one_line(
    text: str, tokenizer: str, folder: Path, outcome: Outcome
) -> None:
    content, expected = CORPORA[text]
    (folder / "text.txt").write_bytes(content)
    words = [*TINY, "data=text", "data.path=text.txt", *f"data.tokenizer={tokenizer}".split(), "dry_run=true"]
    status, stderr = outcome(train.main, *words)
    if expected:
        check(status, stderr, expected)
    else:
        assert (status, stderr) == (0, "")


def test_closed_pipes_no_temporary_folder_and_bytes_for_a_prompt_end_in_no_traceback(folder: Path) -> None:
    words = shlex.join([sys.executable, str(ROOT / "train.py"), *TEXT.split(), *TINY, "max_iters=2"])
    sample_py = shlex.join([sys.executable, str(ROOT / "sample.py"), "run=run", "start=-", "max_new_tokens=2"])
    lines = {
        f"{words} out_dir=run >&- 2>&-": 0,
        f"TMPDIR=/nowhere {words} -m seed=1,2 >&-": 0,
        f"printf '\\377\\376' | {sample_py}": 2,
    }
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(CACHE)}
    for line, status in lines.items():
        done = subprocess.run(["sh", "-c", line], cwd=folder, capture_output=True, text=True, env=environment)
        assert done.returncode == status, (line, done.stderr)
        assert done.stderr.count("\n") == (status == 2) and "Traceback" not in done.stderr, done.stderr


def test_a_refused_config_leaves_a_finished_run_alone(folder: Path, outcome: Outcome) -> None:
    words = [*TEXT.split(), *TINY, "max_iters=2", "out_dir=run"]
    assert outcome(train.main, *words)[0] == 0
    before = contents(folder)
    status, stderr = outcome(train.main, *words, "seed=7", "model.bias=true")
    check(status, stderr, ["out_dir=run", "seed", "1337", "7", "model.bias", "fresh=true"])
    assert contents(folder) == before


def test_the_status_is_that_of_the_run_though_nobody_reads_its_output() -> None:
    read, write = os.pipe()
    os.close(read)
    code = "import sys; from core.process import guarded; sys.exit(guarded(lambda: print('a line') or 130))"
    env = {**os.environ, "PYTHONUNBUFFERED": ""}
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=write, env=env).returncode == 130
    os.close(write)


def test_a_lost_terminal_stops_no_launcher_that_gets_no_hangup() -> None:
    terminal, side = os.openpty()
    code = "from core.process import say; say('1'); input(); say('2'); say('3'); raise SystemExit(7)"
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=side, start_new_session=True)
    os.close(side)
    assert os.read(terminal, 1) == b"1"
    os.close(terminal)
    process.communicate(b"\n")
    assert process.returncode == 7
