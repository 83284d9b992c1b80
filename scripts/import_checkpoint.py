"""A foreign checkpoint as a finished run: python scripts/import_checkpoint.py from=ckpt.pt out=RUN meta=meta.pkl

from: what train.py's init_from= reads, as nanoGPT's ckpt.pt, a Hugging Face folder or gpt2. sample.py, compare.py,
export_hf.py and evaluate_lm.py take the run. meta: nanoGPT's meta.pkl, the characters; without it the tokens of a
ckpt.pt are GPT-2's.
"""

import os
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import torch

from core.cli import run_script
from core.device import require_memory
from core.files import expand, program, written_aside
from core.rundir import RunRequest, open_run
from core.schema import NOT_EMPTY, REQUIRED, ConfigError, Help, declared, options, require
from data.options import RandomOptions
from model.gpt import GPT
from training.config import TrainConfig, to_yaml
from training.origin import read_origin, sha256_of
from training.state import UNKNOWN, Facts, RunState


@options
class ImportOptions:
    from_: Annotated[str, NOT_EMPTY, Help("what to read")] = REQUIRED
    out: Annotated[str, NOT_EMPTY, Help("the run directory to write")] = REQUIRED
    meta: Annotated[str | None, NOT_EMPTY, Help("nanoGPT's meta.pkl")] = None


def import_run(asked: ImportOptions) -> int:
    origin = read_origin(asked.from_, asked.meta, "from")
    out, tokenizer = expand(asked.out), origin.tokenizer
    require(not origin.state, f"from={asked.from_} is a run of this project already")
    require(not out.exists() or (out.is_dir() and not any(out.iterdir())), f"out={asked.out} exists, and is not empty")
    if tokenizer is None:
        raise ConfigError(f"from={asked.from_} has no tokens that are known: give meta=FILE, nanoGPT's meta.pkl")
    with torch.device("meta"):
        like = GPT(origin.config, tokenizer.vocab_size)
    require_memory(like.nbytes, torch.device("cpu"), f"from={asked.from_}: its weights and tables")
    weights = origin.weights_for(like)  # refused before a model takes memory
    model = GPT(origin.config, tokenizer.vocab_size)
    model.load_state_dict(weights)
    groups = {name: getattr(origin.config, name) for name in declared(type(origin.config))}
    groups["model"] = replace(origin.config.model, name="imported")
    config = TrainConfig(**groups, data=RandomOptions(vocab_size=tokenizer.vocab_size), out_dir=asked.out)
    facts = Facts(init_from={asked.from_: sha256_of(asked.from_)}, corpus_sha256=UNKNOWN, parameters=model.num_params())
    state = RunState(origin.step, asdict(config), tokenizer.to_dict(), facts)
    with (
        written_aside(Path(os.path.abspath(out))) as aside,
        open_run(RunRequest(aside, to_yaml(config), lambda _: "", 0)) as run,
    ):
        run.begin(to_yaml(config), origin.step)
        run.save(origin.step, {"model": dict(model.state_dict()), "optimizer": {}}, state.to_json(), True, None)
        run.finish({"status": "done", "iter": origin.step, **facts.to_json()})
        run.status("done", iter=origin.step)
        for note in origin.notes:
            run.log(f"from={asked.from_} {note}")
        run.log(f"{out}: {model.num_params():,} parameters, {tokenizer.vocab_size} tokens ({tokenizer.name})")
        run.log(f"next: {program('sample.py')} {shlex.quote(f'run={out}')}")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(ImportOptions, import_run, __doc__))
