"""Does a change of the code change a number? python tests/net.py out=AFTER.json [before=BEFORE.json] [tree=PATH]

Trains a tiny model for 20 updates in each of some 350 cases, by the programs' command lines: every layout with each
kind of QK norm, in float32 and bfloat16, with and without dropout, by AdamW and Muon; QK-Clip; other settings one by
one. It keeps the SHA-256 of weights, optimizer state and diagnostics.jsonl, every number of metrics.jsonl but speeds,
and sampled text. Equal code gives equal files on one machine; another machine or PyTorch rounds differently.
Settings:
  out=FILE      train, and write {case: {what: value}} there; takes six minutes on one core
  tree=PATH     the checkout that is tested, by default this one
  before=FILE   compare the file of an earlier commit with out=FILE
  only=GLOB     of the cases' names, as 'mla*/bfloat16/*'
CXX=none in the environment tests PyTorch's operations instead of the compiled kernels. Exit status: 0 equal, 1 not.
"""

import contextlib
import hashlib
import importlib
import io
import json
import os
import random
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

# 4 x 64 tokens of 64 channels are the fewest elements for which kernels replace PyTorch's operations; in bfloat16
# attention has a kernel where the channels of a head are a multiple of 16.
TINY = """model.n_layer=2 model.n_head=4 model.n_embd=64 model.block_size=64 batch_size=4 max_iters=20 compile=false
    schedule.warmup_iters=5 optim.learning_rate=0.01 log_interval=1 eval_interval=10 device=cpu threads=1 plot=false
    data=text"""
ROPE = "model.norm=rmsnorm model.position=rope model.rope_theta=100"
MLA = f"{ROPE} attention=mla attention.kv_rank=32 attention.nope_dim=16 attention.rope_dim=16 attention.v_dim=16"
LAYOUTS = {
    "mha": "attention=mha",
    "gqa": f"{ROPE} attention=gqa attention.n_kv_head=2",
    "mqa": f"{ROPE} attention=gqa attention.n_kv_head=1",
    "mla": MLA,
    "mla_q_rank": f"{MLA} attention.q_rank=24",
    "mla_unified": f"{MLA} attention.qk_norm_layout=unified",
}
NORMS = {name: f"qk_norm={name}" for name in ("none", "rms", "layernorm")}
NORMS |= {f"lp{p}": f"qk_norm=lp qk_norm.p={p} qk_norm.alpha_init=sqrt_d" for p in ("1", "1.5", "2", "inf", "learned")}
NORMS["lp3"] = "qk_norm=lp qk_norm.p=3 qk_norm.alpha_init=sqrt_d qk_norm.alpha_per=head"
CLIPS = {"log": "qk_clip=log", "clip": "qk_clip=clip qk_clip.threshold=0.1 qk_clip.balance=0.3"}
OTHERS = """model.mlp=swiglu | model.bias=true | model.tied=false | model.norm=rmsnorm | attention.head_dim=24
    | model.position=rope model.rope_theta=10000 | model.activation_checkpointing=true | grad_clip=0 | eval_iters=2
    | model.n_embd=32 model.block_size=16 | batch_size=96 max_iters=6 | gradient_accumulation_steps=3
    | schedule=wsd | schedule=linear | schedule=constant | optim=muon optim.nesterov=false
    | data.tokenizer=byte | data.tokenizer=bpe data.vocab_size=300 | data.fold=3 data.folds=5
    | data.fold=3 data.split=shuffled
    | qk_norm=lp qk_norm.alpha_init=henry qk_norm.alpha_map=softplus
    | qk_norm=lp qk_norm.p=3 qk_norm.alpha_init=matched qk_norm.alpha_map=linear
    | logits=softcap logits.cap=0.1 | logits=ssmax | softmax=sink | output=gate | output=value_norm
    | weights=sigma_reparam | weights=quack | qk_norm=ngpt | qk_norm=rms_whole | qk_norm=rms_scaled
    | logits=gain logits.learned=head output=value_norm output.gain=learned | output=xsa weights=spectral_cap
    | logits=ssmax logits.power=0.5 output=affine | qk_norm=rms_whole qk_norm.gain=layer output=output_norm
    | fault=no_mask | fault=unshifted_labels | fault=padding_in_mean | fault=repeated_batches
    | fault=loss_over_accumulation gradient_accumulation_steps=2"""
ROWS = "num_samples=64 temperature=1"  # thousands of tokens: logits that are 0.1 % off change some of them
ROW, GREEDY = "num_samples=1 temperature=0.9 top_p=0.95", "num_samples=1 temperature=0"  # one row has its own kernel


def all_cases() -> dict[str, str]:
    """name -> train.py's words."""
    cases = {}
    for dtype, p in ((dtype, p) for dtype in ("float32", "bfloat16") for p in (0.0, 0.2)):
        place, given = f"{dtype}/dropout{p:g}", f"dtype={dtype} model.dropout={p}"
        for layout, of_layout in LAYOUTS.items():
            for norm, of_norm in NORMS.items():
                cases[f"{layout}/{norm}/{place}/adamw"] = words = f"{of_layout} {of_norm} {given}"
                if dtype == "bfloat16" and p:
                    cases[f"{layout}/{norm}/{place}/muon"] = f"{words} optim=muon"
            for clip, of_clip in CLIPS.items():
                cases[f"{layout}/none/{place}/qk_clip_{clip}"] = f"{of_layout} qk_norm=none {of_clip} {given}"
        for others in (" ".join(case.split()) for case in OTHERS.split("|") if p):
            cases[f"{others}/{dtype}"] = f"{given} {others}"
    return {name: words for name, words in cases.items() if "mla_unified/none" not in name}  # it needs a norm


def call(program: str, words: str) -> str:
    """What a program of the tree prints. Raises: RuntimeError where its exit status is not 0."""
    sys.argv = [f"{program}.py", *words.split()]
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            importlib.import_module(program).main()
        except SystemExit as end:
            status = int(end.code or 0)
    if status > 128:  # Ctrl-C, which the loop has caught
        sys.exit(status)
    if status:
        raise RuntimeError(f"{program}.py {words} ends with status {status}: {err.getvalue()[-2000:]}")
    return out.getvalue()


def train_case(words: str, folder: Path) -> dict[str, Any]:
    """Train one model and sample from it. Returns what is kept: text, or the list of a metric's numbers."""
    from safetensors.numpy import load_file

    run, dtype = folder / "run", "dtype=float32" if "dtype=float32" in words else "dtype=bfloat16"
    call("train", f"{TINY} data.path={folder}/text {words} out_dir={run}")
    read = {name: (run / f"{name}.jsonl").read_text().splitlines() for name in ("metrics", "diagnostics")}
    metrics, tables = ([json.loads(line) for line in lines] for lines in read.values())
    keys = sorted({key for line in metrics for key in line} - {"iter", "tok_per_sec", "mfu"})
    kept: dict[str, Any] = {key: [line[key] for line in metrics if key in line] for key in keys}
    hashed: dict[str, Any] = {"diagnostics": [sorted(line.items()) for line in tables]}
    for group in ("model", "optimizer"):
        tensors = sorted(load_file(run / "ckpt" / "latest" / f"{group}.safetensors").items())
        hashed[group] = [(name, str(x.dtype), x.shape, x.tobytes()) for name, x in tensors]
    kept |= {name: hashlib.sha256(repr(content).encode()).hexdigest() for name, content in hashed.items()}
    how = ROWS if "dropout=0.0" in words else GREEDY if "muon" in words or "qk_clip" in words else ROW
    kept["sample"] = call("sample", f"run={run} checkpoint=latest start=a max_new_tokens=70 device=cpu {dtype} {how}")
    return kept


def train_all(tree: Path, only: str) -> dict[str, dict[str, Any]]:
    os.environ |= {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}  # before torch is loaded
    sys.path[0] = str(tree)  # in place of scripts/
    file = Path(importlib.import_module("train").__file__ or "")
    assert file.parent == tree, f"{file} is imported, not that of tree={tree}"
    draw, results = random.Random(0), {}
    words_of_text = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(1, 7))) for _ in range(40)]
    text = "".join(word + draw.choice("   \n") for word in draw.choices(words_of_text, k=5000))[:20_000]
    cases = {name: words for name, words in all_cases().items() if fnmatch(name, only)}
    for name, words in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "text").write_text(text)
            try:
                results[name] = train_case(words, Path(folder))
            except RuntimeError as error:  # whose text has the folder's name
                results[name] = {"failed": str(error).replace(folder, "FOLDER")}
        if len(results) % 20 == 0 or "failed" in results[name]:
            said = results[name].get("failed", "").strip().rpartition("\n")[2]
            print(f"{len(results)} of {len(cases)}: {name} {said}", file=sys.stderr)
    return results


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Print which cases differ, in what, and by how much their losses do. Returns how many differ."""
    differing, largest = 0, 0.0
    for case in {**before, **after}:
        a, b = before.get(case, {}), after.get(case, {})
        fields = [key for key in {**a, **b} if a.get(key) != b.get(key)]
        if fields:
            differing += 1
            print(f"{case}: {', '.join(fields) if a and b else 'is only in ' + ('before' if a else 'after')}")
        for key in ("train/loss", "val/loss"):
            for x, y in zip(a.get(key, []), b.get(key, []), strict=False):
                largest = max(largest, abs(x - y) / max(abs(x), abs(y)))
    print(f"{differing} of {len({**before, **after})} cases differ; losses by up to {largest:.2e} of their size")
    return differing


def main(argv: list[str]) -> int:
    values = dict(word.partition("=")[::2] for word in argv)
    if {"-h", "--help"} & values.keys():
        print(__doc__)
        return 0
    tree, only = Path(values.get("tree", Path(__file__).parent.parent)).resolve(), values.get("only", "*")
    files = [Path(values["before"])] if "before" in values else []
    good = values.keys() <= {"out", "tree", "before", "only"} and Path(values.get("out", "/missing/x")).parent.is_dir()
    if not good or not all(file.is_file() for file in [*files, tree / "train.py"]):
        print(f"error: {' '.join(argv)}: an unknown word, a missing file, or no out=", file=sys.stderr)
        return 2
    after = train_all(tree, only)
    Path(values["out"]).write_text(json.dumps(after, indent=0) + "\n")
    if not files:
        return 0
    before = {case: kept for case, kept in json.loads(files[0].read_text()).items() if fnmatch(case, only)}
    return min(1, compare(before, after))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
