"""What README.md and docs/your_own_variant.md tell a user to type does what they say."""

import re
from pathlib import Path

import pytest
from conftest import ROOT, TINY, Program
from helpers.runs import lines, saved_json

SIZES = [f"attention.{key}" for key in ("kv_rank=8", "nope_dim=8", "rope_dim=4", "v_dim=8")]
LAYOUTS = {
    "mha": ["model.n_embd=16"],
    "gqa": ["model=gqa_nano", "attention.n_kv_head=1", "model.n_embd=16"],
    "mla": ["model=mla_nano", *SIZES],
}
LAYOUTS["unified"] = [*LAYOUTS["mla"], "attention.qk_norm_layout=unified"]


@pytest.fixture
def my_norm(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The page's plugin as a file in the folder where programs run."""
    page = (ROOT / getattr(request, "param", "docs/your_own_variant.md")).read_text(encoding="utf-8")
    codes = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for name, code in zip(("my_norm", "my_sign"), codes, strict=False):
        (tmp_path / f"{name}.py").write_text(code)
    return tmp_path / "my_norm.py"


def words(corpus: Path, layout: str, *more: str) -> list[str]:
    tiny = [word for word in TINY if not word.startswith("model.n_embd")]
    chosen = ["plugins=[my_norm]", "qk_norm=power", "model.dropout=0.0", "wandb.mode=disabled", "out_dir=run"]
    return ["data=text", f"data.path={corpus}", *tiny, *chosen, *LAYOUTS[layout], *more]


PAGES = [*(("docs/your_own_variant.md", layout) for layout in LAYOUTS), ("README.md", "mla")]


@pytest.mark.parametrize(("my_norm", "layout"), PAGES, indirect=["my_norm"])
def test_a_qk_norm_of_ones_own_trains_samples_and_decodes_as_the_page_says(
    layout: str, my_norm: Path, corpus: Path, forked: Program
) -> None:
    done = forked("train.py", *words(corpus, layout, "max_iters=4", "qk_norm.q=0.25"))
    assert "done: val/loss" in done.stdout and "nearly uniform" not in done.stderr
    summary = saved_json(my_norm.parent / "run", "summary")
    assert [*summary["plugins"]] == ["my_norm"] and len(summary["plugins"]["my_norm"]) == 64
    out = forked("sample.py", "run=run", "start=to be", "num_samples=1", "max_new_tokens=40")
    assert out.stdout.startswith("to be") and out.stderr == "", out.stderr
    code = (
        "import torch\nfrom pathlib import Path\nfrom sample import load_run\n"
        "model = load_run(Path('run/ckpt/best'), torch.device('cpu'))[0].double()\n"
        "idx = torch.randint(5, (2, 16))\ncaches = model.new_caches(2, 16, torch.float64)\n"
        "parts = [model(idx[:, t : t + 1], caches=caches, pos=t)[0] for t in range(16)]\n"
        "torch.testing.assert_close(torch.cat(parts, 1), model(idx)[0], rtol=1e-10, atol=1e-10)\n"
        "norm = model.attentions[0].q_norm\n"
        "assert type(norm).__name__ == 'PowerNorm' and norm.options.q == 0.25"
    )
    (my_norm.parent / "check.py").write_text(code)
    forked(str(my_norm.parent / "check.py"))


def test_the_pages_norm_attends(my_norm: Path, corpus: Path, forked: Program) -> None:
    """Its logits grow with the weights. With q = 1 they cannot, and the start says so."""
    largest = {}
    for q, n in ((0.5, 200), (1, 100)):
        more = [f"{key}={n}" for key in ("max_iters", "eval_interval", "checkpoint_interval")]
        more += ["optim.learning_rate=0.02", f"qk_norm.q={q}", f"out_dir=q{q}"]
        done = forked("train.py", *words(corpus, "mha", *more))
        largest[q] = lines(my_norm.parent / f"q{q}")[-1]["attn/max_logit"]
        warned = "warning: qk_norm=power bounds every |logit| by 0.35, whatever the weights"
        assert (warned in done.stdout) == (q == 1), done.stdout
    assert largest[1] <= 8**-0.5 + 1e-5 and largest[0.5] > 1.5, largest


def test_the_pages_optimizer_learns(my_norm: Path, corpus: Path, forked: Program) -> None:
    own = ["plugins=[my_norm,my_sign]", "optim=sign", "optim.beta=0.9", "optim.learning_rate=0.005"]
    forked("train.py", *words(corpus, "gqa", *own, "max_iters=60", "eval_interval=60", "checkpoint_interval=60"))
    logged = lines(my_norm.parent / "run")
    assert logged[-1]["val/loss"] < logged[0]["val/loss"] - 0.3
