"""A foreign checkpoint as a finished run: python scripts/import_checkpoint.py from=ckpt.pt out=RUN [meta=meta.pkl]

from: nanoGPT's ckpt.pt, a Hugging Face folder (GPT-2, Llama, Qwen3, DeepSeek-V3), gpt2, gpt2-medium, gpt2-large or
gpt2-xl. sample.py, compare.py, evaluate_lm.py and export_hf.py take the run, and train.py init_from=RUN trains it on.
meta: nanoGPT's meta.pkl, which says what the tokens of a character-level model are; without it they are GPT-2's.
"""

import sys
from dataclasses import asdict
from typing import Annotated

from core.cli import run_script
from core.files import expand
from core.rundir import RunRequest, open_run
from core.schema import NOT_EMPTY, REQUIRED, ConfigError, Help, options, require
from data.options import TextFileOptions
from model.gpt import GPT
from training.config import TrainConfig, to_yaml
from training.origin import read_origin, sha256_of
from training.state import Facts, RunState


@options
class ImportOptions:
    from_: Annotated[str, NOT_EMPTY, Help("what to read")] = REQUIRED
    out: Annotated[str, NOT_EMPTY, Help("the run directory to write")] = REQUIRED
    meta: Annotated[str | None, NOT_EMPTY, Help("nanoGPT's meta.pkl")] = None


def import_run(asked: ImportOptions) -> int:
    origin = read_origin(asked.from_, asked.meta, "from")
    require(not origin.state, f"from={asked.from_} is a run of this project already")
    out, tokenizer = expand(asked.out), origin.tokenizer
    require(not out.exists() or (out.is_dir() and not any(out.iterdir())), f"out={asked.out} exists, and is not empty")
    if tokenizer is None:
        raise ConfigError(f"from={asked.from_} has no tokenizer: neither tokenizer.json nor vocab.json and merges.txt")
    model = GPT(origin.config, tokenizer.vocab_size)
    origin.load_into(model)
    groups = {name: getattr(origin.config, name) for name in asdict(origin.config)}
    vocab_size = tokenizer.vocab_size if tokenizer.name == "bpe" else None
    data = TextFileOptions(path=asked.from_, tokenizer=tokenizer.name, vocab_size=vocab_size)  # type: ignore[arg-type]
    config = TrainConfig(**groups, data=data, max_iters=max(1, origin.step), out_dir=asked.out)
    facts = Facts(
        init_from={asked.from_: sha256_of(asked.from_)}, dtype="torch.float32", parameters=model.num_params(),
        vocab_size=tokenizer.vocab_size,
    )  # fmt: skip
    state = RunState(origin.step, asdict(config), tokenizer.to_dict(), facts)
    with open_run(RunRequest(out, to_yaml(config), lambda _: "", 0)) as run:
        run.begin(to_yaml(config), origin.step)
        for note in origin.notes:
            run.log(f"from={asked.from_} {note}")
        run.save(origin.step, {"model": dict(model.state_dict()), "optimizer": {}}, state.to_json(), True, None)
        run.finish({"status": "done", "iter": origin.step, **facts.to_json()})
        run.status("done", iter=origin.step)
        run.log(f"{run.path}: {model.num_params():,} parameters, {tokenizer.vocab_size} tokens ({tokenizer.name})")
        run.log(f"next: python sample.py run={run.path}")
    return 0


def main(argv: list[str]) -> int:
    return run_script(ImportOptions, import_run, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
