"""What the README tells a user to type does what it says."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY

MLA = [
    "attention.kv_rank=8", "attention.nope_dim=8", "attention.rope_dim=4", "attention.v_dim=8", "model.dropout=0.0",
]  # fmt: skip


def blocks() -> dict[str, str]:
    """The README's fenced blocks of its section on a QK norm of one's own, by the file that they go into."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("### A QK norm of your own")[1].split("\n## ")[0]
    found = re.findall(r"`([\w/]+\.(?:py|yaml))`:\n\n```\w+\n(.*?)```", section, re.DOTALL)
    return dict(found)


@pytest.mark.parametrize("layout", ["mha", "mla", "unified"])
def test_a_qk_norm_of_ones_own_is_what_the_readme_says(layout: str, corpus: Path, tmp_path: Path) -> None:
    assert set(blocks()) == {"model/gpt.py", "model/options.py", "configs/qk_norm/soft.yaml"}
    copy = tmp_path / "copy"
    for name in ("train.py", "sample.py", "core", "model", "training", "data", "configs"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            copy.mkdir(exist_ok=True)
            shutil.copy(source, copy / name)
    for name, text in blocks().items():
        with open(copy / name, "a", encoding="utf-8") as file:
            file.write("\n\n" + text if name.endswith(".py") else text)
    tiny = [word for word in TINY if not word.startswith("model.n_embd")]
    words = ["data=text", f"data.path={corpus}", *tiny, "max_iters=4", "qk_norm=soft", f"out_dir={tmp_path / 'run'}"]
    words += ["model.n_embd=16"] if layout == "mha" else ["model=mla_nano", *MLA]
    words += ["attention.qk_norm_layout=unified"] if layout == "unified" else []
    clip = subprocess.run(
        [sys.executable, "train.py", *words, "qk_clip=clip"], cwd=copy, capture_output=True, text=True
    )
    assert clip.returncode == 2 and "qk_clip=clip needs qk_norm=none" in clip.stderr, clip.stderr
    done = subprocess.run([sys.executable, "train.py", *words], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0 and "done: val/loss" in done.stdout, done.stderr
    sampled = [
        sys.executable,
        "sample.py",
        f"run={tmp_path / 'run'}",
        "start=to be",
        "num_samples=1",
        "max_new_tokens=40",
    ]
    out = subprocess.run(sampled, cwd=copy, capture_output=True, text=True)
    assert out.returncode == 0 and out.stdout.startswith("to be"), out.stderr
    code = (
        "import torch\nfrom pathlib import Path\nfrom sample import load_run\n"
        f"model = load_run(Path({str(tmp_path / 'run')!r}) / 'ckpt/best', torch.device('cpu'))[0].double()\n"
        "idx = torch.randint(5, (2, 16))\ncaches = model.new_caches(2, 16, torch.float64)\n"
        "parts = [model(idx[:, t : t + 1], caches=caches, pos=t)[0] for t in range(16)]\n"
        "torch.testing.assert_close(torch.cat(parts, 1), model(idx)[0], rtol=1e-10, atol=1e-10)\n"
        "assert type(model.attentions[0].q_norm).__name__ == 'SoftNorm'"
    )
    checked = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
