"""Bad input ends with exit status 2 and one line that names key, value and rule, before anything is written."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import CACHE, ROOT, TINY
from helpers.fineweb import Parquet
from helpers.refusals import Outcome, check, contents
from helpers.reports import Made, falling
from helpers.runs import CHARS, random_model, save_run
from variants import config_of

import train
from core.cli import combinations, compose
from core.schema import flatten
from data.tokenizer import BYTES, BPETokenizer, ByteTokenizer, NoText
from training.config import TrainConfig

TEXT = "data=text data.path=corpus.txt"

ONE_RANK = "RANK=0 LOCAL_RANK=0 gradient_accumulation_steps=2"
# What each program is given, with variables of its environment, and what its one line of error must hold.
TRAIN: dict[str, list[str]] = {
    "foo=1": ["foo=1", "unknown"],
    "+foo=1": ["foo=1", "unknown"],
    "max_iter=10": ["max_iter=10", "did you mean max_iters"],
    "model.n_heads=4": ["model.n_heads=4", "did you mean model.n_head"],
    "qk_norm=lp qk_norm.q=3": ["qk_norm.q=3", "unknown"],
    "qk_norm=none qk_norm.p=3": ["qk_norm.p=3", "unknown"],
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
    "--n_layer=4": ["--n_layer=4 is unknown", "write model.n_layer=4\n"],
    "--n-layer 4": ["--n-layer is unknown", "write model.n_layer=4\n"],
    "config/train_x.py": ["config/train_x.py is unknown", "write model=baby_gpt\n"],
    "init_from=resume": ["init_from=resume is not needed", "goes on with what it began"],
    "init_from=scratch": ["init_from=scratch is not needed"],
    "attention=softpick logits=softcap": ["logits=softcap acts on the softmax, which attention=softpick does not"],
    "attention=softpick softmax=sink": ["softmax=sink acts on the softmax"],
    "attention=softpick fault=no_mask": ["fault=no_mask replaces the whole softmax"],
    "qk_norm=mine": ["qk_norm=mine must be one of", "; one of yours needs plugins=[MODULE]"],
    "plugins=mine": ["plugins=mine must be a list, as [mine]"],
    "n_layer=4": ["n_layer=4 is unknown", "did you mean model.n_layer=4?"],
    "dataset=shakespeare_char": ["did you mean data=tiny_shakespeare?"],
    "always_save_checkpoint=True": ["did you mean checkpoint_interval=250?"],
    "learning_rate=1e-3": ["learning_rate=1e-3", "did you mean optim.learning_rate=1e-3?"],
    "lr=3e-4": ["lr=3e-4", "did you mean optim.learning_rate=3e-4?"],
    "beta1=0.9": ["beta1=0.9", "did you mean optim.betas=[0.9,0.99]?"],
    "wandb_log=False": ["did you mean wandb.mode=disabled?"],
    "dataset=openwebtext": ["dataset=openwebtext", "did you mean data=bin data.path=data/openwebtext?"],
    "wandb_log=true": ["wandb_log=true", "did you mean wandb.mode"],
    "model.n_kv_head=2": ["model.n_kv_head=2", "did you mean attention.n_kv_head=2?"],
    "grad_accum=4": ["grad_accum=4", "did you mean gradient_accumulation_steps=4?"],
    "wandb=disabled": ["wandb=disabled", "write wandb.mode=..."],
    "qk_norm=rmsnorm": ["qk_norm=rmsnorm", "did you mean qk_norm=rms?"],
    "model=baby-gpt": ["model=baby-gpt", "did you mean model=baby_gpt?"],
    "fault=no_msk": ["fault=no_msk", "did you mean fault=no_mask?"],
    "qk_norm.eps=1": ["qk_norm.eps=1", "belongs to qk_norm=rms"],
    "qk_norm.name=[1]": ["qk_norm.name=[1]", "must be one of"],
    "out_dir=${oc.env:NOT_SET}": ["NOT_SET"],
    "out_dir=${nothing}": ["nothing"],
    "batch_size=99999999999999999999": ["batch_size=99999999999999999999", "2**31"],
    f"seed={5000 * '9'}": ["seed=999", "999 must have at most 300 digits\n"],
    f"optim.betas=[{5000 * '9'},0.9]": ["optim.betas=[999", "300 digits"],
    "model={}": ["model={} has no effect"],
    "model=[]": ["model=[] has no effect"],
    "seed=1,2": ["seed=1,2 has several values", "-m trains each"],
    "model=nano_cpu wandb={}": ["wandb={} has no effect"],
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
    "optim.betas=[0.9,1.5]": ["optim.betas=[0.9, 1.5]", "[0, 1)"],
    "model=3": ["model=3"],
    "model.n_embd=30 model.n_head=7": ["model.n_embd=30", "divisible", "model.n_head=7"],
    "model.n_layer=0": ["model.n_layer=0", "[1, 1000]"],
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
    "schedule=constant schedule.warmup_iters=-1": ["schedule.warmup_iters=-1", ">= 0"],
    "optim=adamw optim.momentum=0.9": ["optim.momentum=0.9", "unknown"],
    "optim=muon optim.momentum=1.0": ["optim.momentum=1.0", "[0, 1)"],
    "optim=muon optim.ns_steps=0": ["optim.ns_steps=0", "[1, 99]"],
    "qk_norm=lp qk_norm.p=0.5": ["qk_norm.p=0.5", ">= 1"],
    "qk_norm=lp qk_norm.p=nan": ["qk_norm.p=nan", ">= 1"],
    "-m seed=range(1,3,0)": ["seed=range(1,3,0)", "no list of values"],
    "-m qk_norm=none,rns": ["qk_norm=rns", "did you mean qk_norm=rms?"],
    "-m seed=1,2 out_dir=run": ["out_dir=run", "one run, not several"],
    "-m qk_norm=glob(*)": ["qk_norm=glob(*)", "no list of values"],
    "optim.lr=1": ["optim.lr=1", "did you mean optim.learning_rate=1?"],
    "qk_norm=lp qk_norm.p=1e39": ["qk_norm.p=1e+39", "<= 1e30"],
    "qk_norm=lp qk_norm.alpha_init=-2": ["qk_norm.alpha_init=-2.0", "[1e-6, 1e6]"],
    "qk_norm=lp qk_norm.alpha_init=big": ["qk_norm.alpha_init=big", "henry"],
    "qk_norm=lp qk_norm.alpha_per=token": ["qk_norm.alpha_per=token", "layer, head"],
    "qk_norm=rms qk_norm.eps=0": ["qk_norm.eps=0.0", "> 0"],
    "init_from=nowhere": ["init_from=nowhere", "does not exist"],
    "init_from=nowhere init_sha256=0a": ["init_sha256=0a", "64 hexadecimal digits"],
    f"init_sha256={64 * 'a'}": ["init_sha256=a", "needs init_from"],
    "sweep=p_sweep": ["sweep=p_sweep", "sweeps/launch.py"],
    "launcher.workers=2": ["launcher.workers=2", "sweeps/launch.py"],
    "data.split=shuffled": ["data.split=shuffled", "data.fold"],
    "qk_clip=clip qk_norm=rms": ["qk_clip=clip", "needs qk_norm=none", "qk_norm=rms"],
    "qk_clip=clip qk_clip.threshold=0": ["qk_clip.threshold=0.0", "> 0"],
    "qk_clip=clip qk_clip.balance=1.1": ["qk_clip.balance=1.1", "[0, 1]"],
    "qk_clip=log qk_clip.threshold=100": ["qk_clip.threshold=100", "belongs to qk_clip=clip"],
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
    "data=text data.path=nowhere.txt": ["data.path=nowhere.txt does not exist\n"],
    "data=text data.path=empty.txt": ["data.path=empty.txt is empty\n"],
    "data=text data.path=latin1.txt": ["data.path=latin1.txt must be UTF-8 text; the byte 0xe9 at offset 3 is not\n"],
    "data=text data.path=folder": [
        "data.path=folder is a directory, it must be a file",
        "prepare_fineweb.py dataset=folder makes",
    ],
    "data=text data.path=folder(1)": [f"python {ROOT}/data/prepare_fineweb.py 'dataset=folder(1)' makes"],
    "data=text data.path=loop.txt": ["data.path=loop.txt cannot be read: Too many levels of symbolic links\n"],
    "data=text data.path='~nobody_of_this_name/a.txt'": ["data.path=~nobody_of_this_name/a.txt does not exist\n"],
    "fault=loss_over_accumulation": ["fault=loss_over_accumulation needs gradient_accumulation_steps > 1"],
    "fault.name=no_loss": ["fault.name=no_loss", "none, no_mask"],
    "model=mla_nano output=value_norm": ["output=value_norm needs attention=mha or gqa: MLA decodes"],
    "model=mla_nano output=xsa": ["output=xsa needs attention=mha or gqa: attention=mla caches no values"],
    "output=value_norm output.gain=0.0": ["output.gain=0.0 must be > 0 and at most 1e+30, or a word"],
    "model=mla_nano attention.qk_norm_layout=unified qk_norm=rms_whole": ["qk_norm_layout=blockwise: its gains differ"],
    "weights=sigma_reparam qk_clip=clip": ["qk_clip=clip: weights=sigma_reparam undoes"],
    "logits=softcap fault=no_mask": ["fault=no_mask replaces the whole softmax"],
    "softmax=sink softmax.logit=inf": ["softmax.logit=inf must be a finite number or learned"],
    "logits=softcap logits.cap=0.0": ["logits.cap=0.0 must be > 0 and at most 1e+30"],
    "data=text data.path=corpus.txt data.val_path=one.txt": ["data.val_path holds fewer than two tokens"],
    "data=text data.path=short.txt model.block_size=64": ["model.block_size=64", "64 tokens"],
    "data=tiny_shakespeare data.path=corpus.txt": ["data.path=corpus.txt", "Tiny Shakespeare"],
    "device=gpu": ["device=gpu", "auto, cpu, mps, cuda"],
    "dtype=float16": ["dtype=float16", "float32, bfloat16"],
    "wandb.mode=on": ["wandb.mode=on", "offline"],
    "wandb.project=a/b": ["wandb.project", "a/b"],
    "out_dir=corpus.txt/run": ["out_dir=corpus.txt/run", "not a directory"],
    "out_dir=corpus.txt/deep/run": ["out_dir=corpus.txt/deep/run", "not a directory"],
    "out_dir=corpus.txt": ["out_dir=corpus.txt"],
    "out_dir=/proc/run": ["out_dir=/proc/run"],
    "out_dir=folder": ["out_dir=folder", "config.yaml"],
    "out_dir=": ["out_dir"],
    f"out_dir={300 * 'a'}": ["too long"],
    "eval_only=true": ["eval_only=true needs one"],
    "gradient_accumulation_steps=0": ["gradient_accumulation_steps=0", ">= 1"],
    "threads=0": ["threads=0", ">= 1"],
    "max_iters": ["max_iters"],
    "max_iters=[": ["max_iters=["],
    "experiment=nothing": ["experiment=nothing", "quickstart"],
    "data=fineweb data.path=nowhere": [
        "data.path=nowhere",
        "prepare_fineweb.py out=nowhere max_tokens=1000000000 makes it",
    ],
    "data=fineweb data.path=folder": ["prepare_fineweb.py dataset=folder out=my_shards makes one of its files"],
    "data=fineweb data.path=folder(1)": [f"{ROOT}/data/prepare_fineweb.py 'dataset=folder(1)' out=my_shards makes"],
    "data=fineweb data.path=null": ["data=fineweb has no", "prepare_fineweb.py"],
    "data=fineweb data.path=shards_begun": ["not complete in shards_begun", "prepare_fineweb.py"],
    "data=fineweb data.path=shards_short": ["train_000000.bin is", "bytes"],
    "data=fineweb data.path=shards_damaged": ["shards_damaged/index.json", "not an index"],
    "data=fineweb data.path=shards_other": ["tokenizer.json", "not the one"],
    "data=fineweb data.path=shards_whole data.val_tokens=1": ["data.val_tokens=1", ">= 2"],
    "data=fineweb data.path=shards_whole data.val_tokens=10000000": ["data.val_tokens=10000000", "<="],
    "data=fineweb data.path=shards_whole data.fold=0": ["data.fold=0", "unknown"],
    "data=fineweb data.path=shards_whole data.folds=5": ["data.folds=5", "unknown"],
    "data=fineweb data.path=shards_whole +data.split=shuffled": ["data.split=shuffled", "unknown"],
    "data=fineweb data.path=shards_whole data.tokenizer=bpe": ["data.tokenizer=bpe", "unknown"],
    "RANK=abc": ["RANK=abc", "torchrun"],
    "RANK=0": ["RANK=0 WORLD_SIZE=", "torchrun"],
    f"{ONE_RANK} WORLD_SIZE=0": ["WORLD_SIZE=0", "torchrun"],
    f"{ONE_RANK} WORLD_SIZE=2": ["WORLD_SIZE=2", "torchrun"],  # without MASTER_ADDR
    "RANK=1": ["RANK=1", "torchrun"],  # no rank 0 that would speak for it
    "WANDB_MODE=of": ["WANDB_MODE=of must be one of online, offline, disabled"],
    "WANDB_MODE=": ["WANDB_MODE= must be one of online, offline, disabled"],
    "WANDB_MODE=of wandb.mode=offline": ["WANDB_MODE=of must be one of online"],  # W&B reads the variable itself
}
SAMPLE: dict[str, list[str]] = {
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
    "run=x +seed=3": ["+seed=3", "key=value"],
    "run=x --seed": ["--seed", "key=value"],
    f"run=x top_k={5000 * '9'}": ["top_k=999", "must be an integer of at most 300 digits"],
    f"run=x temperature={5000 * '9'}": ["temperature=999", "an integer of more than 300 digits is not read"],
    f"run=x seed=0x{5000 * 'F'}": ["seed=0xFFF", "an integer of more than 300 digits is not read"],
    "run=folder seed=1:30": ["seed=1:30 must be an integer"],  # to YAML it is 90
}
LAUNCH: dict[str, list[str]] = {
    "": ["sweep="],
    "sweep=nosuch": ["sweep=nosuch", "p_sweep_cpu"],
    'sweep=p_sweep_cpu sweep.grid={"model.name":[nano_cpu]}': ["grid.model.name keeps", "write grid.model"],
    "sweep=p_sweep_cpu launcher=cloud": ["launcher=cloud", "local"],
    "sweep=p_sweep_cpu launcher=slurm launcher.workers=0": ["launcher.workers=0", ">= 1"],
    "sweep=p_sweep_cpu launcher=slurm launcher.gpus=-1": ["launcher.gpus=-1", ">= 0"],
    "sweep=p_sweep_cpu launcher=slurm launcher.timeout_min=2 launcher.save_s=60": [
        "timeout_min=2",
        "launcher.save_s=60",
    ],
    "sweep=p_sweep_cpu launcher=slurm launcher.options={account:[a]}": ["launcher.options=", "account: lab"],
    "sweep=p_sweep_cpu launcher=slurm launcher.setup=[1]": ["launcher.setup=[1]", "shell lines"],
    "sweep=p_sweep_cpu launcher.ranks=2": ["launcher.ranks=2", "gradient_accumulation_steps=1"],
    "sweep=gqa_nano sweep.grid.gradient_accumulation_steps=[2,3] launcher.ranks=2": ["gradient_accumulation_steps=3"],
    "sweep=p_sweep_cpu launcher.threads=99999": ["launcher.threads=99999", "the CPUs here"],
    'sweep=gqa_nano sweep.grid={"words":{"a":["qk_norm=rms"]},"qk_norm":["rms"]}': [
        "grid.words.a: qk_norm=rms",
        "varies",
    ],
    "sweep=attention_track_final optim.learning_rate=0.001": ["optim.learning_rate=0.001", "grid.words.none"],
    "sweep=p_sweep_cpu launcher.mps=true": ["launcher.mps=true needs GPUs that workers share"],
    "sweep=p_sweep_cpu launcher=slurm launcher.mps=true": ["launcher.mps=true"],
    "sweep=p_sweep_cpu launcher.workers=0": ["launcher.workers=0", ">= 1"],
    "sweep=p_sweep_cpu launcher.worker=2": ["launcher.worker=2", "launcher.workers"],
    "sweep=p_sweep_cpu qk_norm.p=3": ["qk_norm.p=3", "sweep.grid.qk_norm.p"],
    "sweep=p_sweep_cpu seed=3": ["seed=3", "sweep.seeds"],
    "sweep=p_sweep_cpu out_dir=x": ["out_dir=x", "sweep_dir"],
    "sweep=p_sweep_cpu fresh=true": ["fresh=true", "another sweep_dir"],
    "sweep=p_sweep_cpu eval_only=true": ["eval_only=true", "trains"],
    "sweep=p_sweep_cpu sweep.overrides=[seed=3]": ["seed=3", "sweep.seeds"],
    "sweep=gqa_nano sweep.grid=3": ["sweep.grid=3", "a group"],
    "sweep=p_sweep_cpu sweep.overrides=qk_norm=lp": ["sweep.overrides=qk_norm=lp", "list"],
    'sweep=p_sweep_cpu sweep.grid={"data.fold":[0,1]}': ["data.fold", "sweep.folds"],
    'sweep=gqa_nano sweep.grid={"seed":[0,1]}': ["grid.seed", "sweep.seeds"],
    'sweep=gqa_nano sweep.grid={"words":{"a":["out_dir=x"]}}': ["out_dir=x", "sweep_dir"],
    "sweep=gqa_nano sweep.parts=[alpha_1]": ["sweep.parts", "gqa_nano", "no parts"],
    "sweep=p_sweep_cpu data=python_docs sweep_dir=/dev/null/x": ["sweep_dir=/dev/null/x", "Not a directory"],
    "sweep=p_sweep_cpu max_iter=3": ["max_iter=3", "max_iters"],
    "sweep=p_sweep_cpu sweep.folds=3": ["sweep.folds=3", "a list, as [1,2]"],
    "sweep=p_sweep_cpu sweep.folds=[10]": ["data.fold=10", "0..9"],
    "sweep=p_sweep_cpu folds=[1]": ["folds=[1]", "did you mean sweep.folds?"],
    "sweep=p_sweep_cpu sweep.fold=[1]": ["sweep.fold=[1]", "did you mean sweep.folds?"],
    "sweep=p_sweep_cpu sweep.seeds=[1,1]": ["sweep.seeds=[1, 1]", "none twice"],
    "sweep=p_sweep_cpu sweep.parts=[nosuch]": ["nosuch", "alpha_1"],
    "sweep=p_sweep_cpu sweep.grid.qk_norm.p=[0.5]": ["qk_norm.p=0.5", ">= 1"],
    "sweep=p_sweep_cpu sweep.grid.qk_norm.q=[2]": ["qk_norm.q=2", "unknown"],
    "sweep=p_sweep_cpu sweep.grid.qk_norm.p=[2,2]": ["twice"],
    'sweep=p_sweep_cpu sweep.compare={"a":{"base":p=2}}': ["compare.a.base=p=2", "did you mean compare.a.baseline?"],
    'sweep=p_sweep_cpu sweep.compare={"a":{"settings":["*"]}}': ["compare.a must have either baseline", "or pairs"],
    'sweep=p_sweep_cpu sweep.compare={"a":{"pairs":[["p=2"]]}}': ["compare.a.pairs=[['p=2']]", "list of pairs"],
    'sweep=p_sweep_cpu sweep.compare={"a":{"contrast":[{"p=3":1,"p=2":-2}]}}': ["compare.a.contrast=", "sum to 0"],
    'sweep=p_sweep_cpu sweep.compare={"a":{"contrast":[{"p=3":0}]}}': ["compare.a.contrast=", "not 0"],
    'sweep=p_sweep_cpu sweep.compare={"a":{"contrast":[[p=3,p=2]]}}': ["compare.a.contrast=", "{setting: weight}"],
    'sweep=p_sweep_cpu sweep.compare={"a":{"pairs":[[p=2,p=3]],"contrast":[{"p=3":1,"p=2":-1}]}}': ["or contrast"],
    'sweep=p_sweep_cpu sweep.compare={"a":{"baseline":p=2,"settings":p=2}}': ["compare.a.settings=p=2", "a list"],
    'sweep=p_sweep_cpu sweep.compare={"a":{"baseline":p=2,"title":3}}': ["compare.a.title=3", "text"],
    'sweep=p_sweep_cpu sweep.also={"grad_norm":median}': ["also.grad_norm=median", "max"],
    'sweep=p_sweep_cpu sweep.paper={"val_loss":{"a":low}}': ["paper.val_loss"],
    f"sweep=p_sweep_cpu sweep.seeds=[0x{5000 * 'F'}]": ["sweep.seeds=[0xFFF", "more than 300 digits is not read"],
    "sweep=p_sweep_cpu model={}": ["model={} has no effect"],
    "sweep=p_sweep_cpu retries=-1": ["retries=-1"],
    "sweep=p_sweep_cpu device=cuda:99": ["device=cuda:99"],
    "sweep=p_sweep_cpu data=text data.path=it's,(1).txt": ["data.path=it's,(1).txt does not exist"],
    f"sweep=p_sweep_cpu sweep.folds=[0] WANDB_MODE=of {TEXT}": ["WANDB_MODE=of must be one of online"],
}
PREPARE_FINEWEB: dict[str, list[str]] = {
    "foo=1": ["foo=1", "unknown"],
    "column=": ["column=", "empty"],
    "column=body": ["column=body", "text, id, dump, url"],
    "column=token_count": ["column=token_count", "text, not int"],
    "split=validation": ["split=validation", "cannot be loaded"],
    "dataset=nowhere": ["dataset=nowhere", "is no folder here"],
    "dataset=empty_folder": ["dataset=empty_folder cannot be loaded: it holds no file; read are .txt"],
    "dataset=two_kinds": ["two_kinds cannot be loaded: it holds b.jsonl (JSON) and a.txt (texts): give a folder"],
    "dataset=other_kind": ["other_kind cannot be loaded: it holds b.pdf; read are .txt, .txt.gz and .md files"],
    "dataset=not_utf8": ["not_utf8/a.md must be UTF-8 text; the byte 0xff at offset 0 is not"],
    "dataset=torn": ["torn/a.txt.gz cannot be unpacked"],
    "dataset=lost": ["lost/a.txt cannot be read: No such file or directory"],
    "dataset=not_utf8 column=body": ["column=body is for rows: the files of this folder are texts"],
    "dataset=not_utf8 split=test": ["split=test is for rows"],
    "tokenizer=char": ["tokenizer=char", "gpt2, bpe"],
    "tokenizer=gpt2 vocab_size=300": ["vocab_size=300", "tokenizer=bpe"],
    "tokenizer=gpt2": ["tokenizer=gpt2", "tiktoken's cache"],
    "tokenizer=bpe vocab_size=100": ["vocab_size=100", "[257, "],
    "tokenizer=bpe vocab_size=90000": ["vocab_size=90000", "too large"],
    "max_tokens=0": ["max_tokens=0", ">= 1"],
    "val_fraction=1.5": ["val_fraction=1.5", "(0, 1)"],
    "workers=0": ["workers=0", ">= 1"],
    "out=corpus.txt": ["out=corpus.txt"],
    "out=folder": ["out=folder", "neither empty nor"],
    "out=/proc/shards": ["out=/proc/shards"],
    "out=corpus.txt/x max_tokens=10": ["out=corpus.txt/x", "Not a directory"],
}
AUDIT: dict[str, list[str]] = {
    "": ["run=", "given"],
    "run=nowhere": ["run=nowhere"],
    "run=run_chars steps=3": ["steps=3 must be >= 20"],
    "run=run_chars steps=many": ["steps=many must be an integer"],
    "run=run_chars checkpoint=newest": ["best, latest"],
    "run=run_chars step=30": ["did you mean steps"],
    "run=run_chars device=gpu": ["device=gpu"],
}
COMPARE: dict[str, list[str]] = {
    "b=run_chars": ["a= must be given"],
    "a=run_chars b=nowhere": ["b=nowhere does not exist"],
    "a=run_chars b=folder": ["b=folder is not a checkpoint and has none: name a run's directory"],
    "a=run_chars b=run_chars": ["b=run_chars is the same checkpoint as a=run_chars: name another run"],
    "a=run_bytes b=run_bytes/../run_bytes": ["b=run_bytes/../run_bytes is the same checkpoint"],
    "a=run_chars b=run_random": ["b=run_random was trained on data=random, which is no text"],
    "a=run_chars b=run_shallow text=nothing": ["text=nothing does not exist"],
    "a=run_chars b=run_shallow text=latin.bin": ["text=latin.bin must be UTF-8 text; the byte 0xff at offset 0 is not"],
    "a=run_chars b=run_bytes text=other.txt": ["text=other.txt does not suit a=run_chars: the character 'X' (U+0058)"],
    "a=run_chars b=run_shallow text=a.txt": ["text=a.txt is too short: give a text=FILE of at least two tokens"],
    "a=run_chars b=run_shallow text=empty.txt": ["text=empty.txt is too short: give a text=FILE"],
    "a=run_chars b=run_shallow layer=1": ["layer=1 must be < 1, the layers of b=run_shallow"],
    "a=run_chars b=run_shallow head=4": ["head=4 must be < 4, the heads of a=run_chars"],
    "a=run_chars b=run_shallow out=none/page.html": ["out=none/page.html must be a file"],
    "a=run_chars b=run_shallow out=pipe": ["out=pipe must be a file"],
    "a=run_chars b=run_shallow txt=x": ["did you mean text"],
    "a=folder b=folder": ["a=folder", "not a checkpoint"],
}
REPORT: dict[str, list[str]] = {
    "run=loop.txt": ["loop.txt"],
    "": ["sweep=, run= or from= must be given"],
    "sweep=nowhere": ["sweep_dir=runs/nowhere holds no sweep"],
    "sweep_dir=sweep_made swep=x": ["swep=x"],
    "word": ["word"],
    "sweep_dir=sweep_made out=corpus.txt": ["out=corpus.txt is not a directory"],
    "sweep_dir=sweep_made watch=true out=x": ["watch=true takes no out="],
    "sweep_dir=~nobody-at-all/x": ["sweep_dir=~nobody-at-all/x holds no sweep"],
    "sweep_dir=sweep_torn": ["sweep_dir=sweep_torn has a plan.jsonl that cannot be read"],
    "sweep_dir=sweep_empty": ["without a run"],
    "sweep_dir=sweep_unnamed": ["sweep_dir=sweep_unnamed has no sweep.json"],
    "run=folder": ["run=", "holds no run"],
    "from=folder": ["from=folder", "no report"],
}
BENCH_DECODE: dict[str, list[str]] = {
    "device=gpu": ["device=gpu", "cuda:N"],
    "foo=1": ["foo=1", "unknown"],
    "contexts=[1]": ["contexts=[1] must be a list of integers >= 2"],
    "batch=2": ["batch=2 must be a list, as [1,2]"],
    "rounds=0": ["rounds=0 must be >= 1"],
    "starts=0": ["starts=0 must be >= 1"],
    "seconds=0": ["seconds=0.0 must be > 0 and at most 1e+30"],
    "attention=gqa": ["attention"],
}
if not torch.cuda.is_available():
    TRAIN["device=cuda"] = BENCH_DECODE["device=cuda"] = ["device=cuda", "absent"]
if not torch.backends.mps.is_available():
    TRAIN["device=mps"] = ["device=mps", "absent"]
REFUSED: dict[str, dict[str, list[str]]] = {  # by program
    "train.py": TRAIN,
    "sample.py": SAMPLE,
    "sweeps/launch.py": LAUNCH,
    "data/prepare_fineweb.py": PREPARE_FINEWEB,
    "scripts/audit.py": AUDIT,
    "scripts/compare.py": COMPARE,
    "scripts/report.py": REPORT,
    "scripts/benchmarks/bench_decode.py": BENCH_DECODE,
    "scripts/docs.py": {"foo=1": ["foo=1", "unknown"]},
    "scripts/evaluate_lm.py": {
        "run=nowhere tasks=[]": ["run=nowhere does not exist"],
        "run=folder": ["tasks=", "given"],
    },
    "scripts/export_hf.py": {"run=folder": ["out=", "given"], "run=nowhere out=x": ["run=nowhere does not exist"]},
    "scripts/benchmarks/bench_train.py": {
        "": ["one of peer= and variants=", "given"],
        "peer=folder": ["peer=folder", "no model.py"],
        "peer=. together=true": ["together=true needs variants="],
        "peer=nosuch": ["peer=nosuch must be a checkout of nanoGPT"],
        "peer=. qk_norm=rms": ["nanoGPT's own model", "qk_norm.name none -> rms"],
        "peer=. logits=softcap": ["nanoGPT's own model", "logits.cap"],
        "variants=qk_norm=none rounds=x": ["rounds=x must be an integer"],
    },
    "scripts/benchmarks/bench_sample.py": {
        "": ["one of peer= and variants="],
        "variants=qk_norm=none;qk_norm=non": ["qk_norm=non"],
        "variants=qk_norm=rms;qk_norm=rms": ["two different lists"],
        "peer=nosuch": ["peer=nosuch must be a checkout of nanoGPT"],
        "peer=folder tokens=0": ["tokens=0", ">= 1"],
    },
    "scripts/check_gpu.py": {
        "parts=[speed]": ["parts=[speed] must be of device, matmuls"],
        "model.n_layers=3": ["model.n_layers=3 is unknown"],
        "device=gpu": ["device=gpu must be auto, cpu"],
        "minutes=0": ["minutes=0.0 must be > 0 and at most 1e+30"],
    },
    "sweeps/status.py": {"sweep_dir=corpus.txt": ["sweep_dir=corpus.txt", "no sweep"]},
}


@pytest.fixture(scope="module")
def templates(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs, sweeps, shards and other files, under the names that the words above give them."""
    place = tmp_path_factory.mktemp("templates")
    plain = config_of("mha", "none")
    save_run(random_model(plain), CHARS, place / "run_chars")
    save_run(random_model(config_of("mha", "none", n_layer=1)), CHARS, place / "run_shallow")
    save_run(random_model(plain, ByteTokenizer()), ByteTokenizer(), place / "run_bytes")
    save_run(random_model(plain, NoText(9)), NoText(9), place / "run_random")
    for name in ("sweep_made", "sweep_torn", "sweep_empty", "sweep_unnamed"):
        Made(place / name).run("p=2", 0, falling(1.5))
    (place / "sweep_torn" / "plan.jsonl").write_text('{"id": "a-')
    (place / "sweep_empty" / "plan.jsonl").write_text("")
    (place / "sweep_unnamed" / "sweep.json").unlink()
    for name in ("shards_whole", "shards_short", "shards_damaged", "shards_other"):
        shutil.copytree(shards, place / name)
    os.truncate(place / "shards_short" / "train_000000.bin", 100)
    (place / "shards_damaged" / "index.json").write_text("[]")
    (place / "shards_other" / "tokenizer.json").write_text(json.dumps(BPETokenizer(BYTES).to_dict()))
    for file in ("shards_begun/progress.json", "empty_folder/.keep"):
        (place / file).parent.mkdir()
        (place / file).write_text("{}")
    (place / "empty_folder" / ".keep").unlink()
    for file, text in {"good.txt": "a bad egg, a fad!\nfade\n", "other.txt": "a fade X", "a.txt": "a"}.items():
        (place / file).write_text(text)
    (place / "latin.bin").write_bytes(b"\xff\xfe")
    texts = {"two_kinds/a.txt": b"", "two_kinds/b.jsonl": b"", "other_kind/a.txt": b"", "other_kind/b.pdf": b""}
    texts |= {"not_utf8/a.md": b"\xff", "torn/a.txt.gz": b"\x1f\x8b\x08", "lost/b.txt": b""}
    texts |= {"folder(1)/a.txt": b"a"}
    for file, content in texts.items():
        (place / file).parent.mkdir(exist_ok=True)
        (place / file).write_bytes(content)
    (place / "lost" / "a.txt").symlink_to("nothing")
    return place


def base_of(program: str, given: list[str], parquet: Path) -> list[str]:
    """Words that are right, of settings that those under test leave alone."""
    if program == "train.py":
        text = [] if any(word.startswith(("data=", "max_iters", "dry_run")) for word in given) else TEXT.split()
        return text + [word for word in TINY if group_of(word) not in map(group_of, given)]
    words = {
        "data/prepare_fineweb.py": [f"dataset={parquet}", "out=out", "tokenizer=bpe", "vocab_size=300"],
        "scripts/compare.py": ["text=good.txt"],
    }
    fitting = [word for word in words.get(program, []) if group_of(word) not in map(group_of, given)]
    return [word for word in fitting if word != "vocab_size=300" or "tokenizer=gpt2" not in given]


def group_of(word: str) -> str:
    return word.lstrip("+").split("=")[0].split(".")[0]


@pytest.mark.parametrize(("program", "words"), [(program, words) for program in REFUSED for words in REFUSED[program]])
def test_a_bad_setting_is_one_line_and_writes_nothing(
    program: str,
    words: str,
    templates: Path,
    parquet: Parquet,
    folder: Path,
    outcome: Outcome,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for entry in templates.iterdir():
        if entry.name in words or entry.suffix == ".txt":
            copy = partial(shutil.copytree, symlinks=True) if entry.is_dir() else shutil.copy
            copy(entry, folder / entry.name)
    given = []
    for word in words.split():
        name, equals, value = word.partition("=")
        if equals and name.isupper():
            monkeypatch.setenv(name, value)
        else:
            given.append(word)
    before = contents(folder)
    status, stderr = outcome(program, *base_of(program, given, parquet[0]), *given)
    check(status, stderr, REFUSED[program][words])
    assert contents(folder) == before


def test_an_unknown_wandb_mode_variable_is_no_matter_where_w_and_b_is_not_used(
    folder: Path, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "of")
    assert outcome("train.py", *TEXT.split(), "wandb.mode=disabled", "dry_run=true", *TINY) == (0, "")


# Names of files that Hydra's grammar cannot read, or reads as something else
NAMES = [
    "input (1).txt", "a=b.txt", "it's.txt", "/home/jürgen/a.txt", "[x].txt", "{x}.txt", "a,b.txt", "a#b.txt", "a;b.txt",
    "a&b.txt", "a!b.txt", "a~b.txt", "~/a.txt", 'say "hi".txt', "100% (final).txt", "日本.txt", "<a>.txt", "a`b.txt",
    "a^b.txt", "a\nb.txt", "(a", "'a", "'a'.txt", "a.txt,", "range(1,3)", "glob(*)", "[x]", "{x: 1}", "{}", "2024",
    "1e3", "true", "9" * 5000, "${x", "a${b} (1).txt", "\\${x} (", "a (\\", '\\"(',
]  # fmt: skip


def test_a_text_that_hydra_cannot_read_is_taken_as_it_is(folder: Path, outcome: Outcome) -> None:
    keys = ["data.path", "data.val_path", "out_dir", "wandb.entity", "wandb.name", "wandb.group", "wandb.notes"]
    for given in (dict(zip(keys, NAMES[i:], strict=False)) for i in range(0, len(NAMES), len(keys))):
        found = flatten(compose(TrainConfig, ["data=text", *(f"{key}={name}" for key, name in given.items())]))
        assert {key: found[key] for key in given} == given
    kept = {"'a b'": "a b", '"a,b"': "a,b", "a\\,b": "a,b", "null": None, "${seed}": 1337, "a b": "a b", "str(3)": "3"}
    found = flatten(compose(TrainConfig, ["data=text", *map("=".join, zip(keys, kept, strict=True))]))
    assert [found[key] for key in keys] == [*kept.values()]
    assert combinations(["data.path=a (1),b", "seed=1,2"]) == [["data.path=a (1),b", f"seed={n}"] for n in (1, 2)]
    assert combinations(["data.path=a,b"]) == [["data.path=a"], ["data.path=b"]]
    for name in ("it's (1).txt", "a,b=ü.txt"):
        shutil.copy("corpus.txt", name)
        words = ["data=text", f"data.path={name}", f"out_dir={name} run"]
        assert outcome("train.py", *TINY, *words, "max_iters=2") == (0, "")
        assert (folder / f"{name} run" / "summary.json").is_file()


# A text, and what the line must hold where it is bad; TRAIN has others.
SENTENCE = b"to be or not to be, that is the question."
CORPORA: dict[str, tuple[bytes, list[str]]] = {
    "binary": (b"\x7fELF\x02\x01\x01\x00\xf8\xff" * 300, ["data.path=text.txt", "0xf8 at offset 8"]),
    "UTF-16": (SENTENCE.decode().encode("utf-16") * 30, ["must be UTF-8"]),
    "invalid UTF-8 in the middle": (SENTENCE * 30 + b"\xff" + SENTENCE * 30, ["0xff at offset 1230"]),
    "one character": (b"a", ["tokens"]),
    "one kind of character": (b"a" * 2000, []),
    "one line": (SENTENCE * 60, []),
    "CRLF": ((SENTENCE + b"\r\n") * 60, []),
    "BOM": (b"\xef\xbb\xbf" + SENTENCE * 60, []),
    "zeros": (b"\0" * 2000, []),
}


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe data.vocab_size=260"])
@pytest.mark.parametrize("text", CORPORA)
def test_a_strange_text_is_read_as_it_is_or_refused(text: str, tokenizer: str, folder: Path, outcome: Outcome) -> None:
    content, expected = CORPORA[text]
    (folder / "text.txt").write_bytes(content)
    words = [*TINY, "data=text", "data.path=text.txt", *f"data.tokenizer={tokenizer}".split(), "dry_run=true"]
    status, stderr = outcome(train.main, *words)
    if expected:
        check(status, stderr, expected)
    else:
        assert (status, stderr) == (0, "")


def test_closed_pipes_no_temporary_folder_bad_settings_and_bytes_for_a_prompt_end_in_no_traceback(folder: Path) -> None:
    words = shlex.join([sys.executable, str(ROOT / "train.py"), *TEXT.split(), *TINY, "max_iters=2"])
    sample_py = shlex.join([sys.executable, str(ROOT / "sample.py"), "run=run", "start=-", "max_new_tokens=2"])
    report_py = shlex.join([sys.executable, str(ROOT / "scripts" / "report.py"), "run=run"])
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("a text of some words " * 20)
    prepare_py = [sys.executable, str(ROOT / "data" / "prepare_fineweb.py"), "dataset=texts", "tokenizer=bpe"]
    lines = {
        f"{shlex.join(prepare_py)} vocab_size=258 workers=1 out=shards <&- 2>&-": 0,
        f"{words} out_dir=run >&- 2>&-": 0,
        f"TMPDIR=/nowhere {words} -m seed=1,2 >&-": 0,
        f"{words} seed=-1": 2,
        f"ulimit -n 16; {report_py} >&-": 2,
        f"printf '\\377\\376' | {sample_py}": 2,
    }
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(CACHE)}
    for line, status in lines.items():
        done = subprocess.run(["sh", "-c", line], cwd=folder, capture_output=True, text=True, env=environment)
        assert done.returncode == status, (line, done.stderr)
        assert done.stderr.count("\n") == (status == 2) == done.stderr.startswith("error: "), done.stderr
        assert status == 0 or done.stdout == ""


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
