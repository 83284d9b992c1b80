import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Program, flip, run_python, write_corpus
from helpers.runs import CHARS, configured, random_model, save_run, saved_json
from variants import build, config_of

import sample
import train
from core import device
from core.schema import ConfigError
from data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, NoText, Tokenizer, build_tokenizer
from model.generate import generate
from sample import Text, load_asked_run, load_run, on_terminal, read_prompt


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run, whose text follows a question with more questions."""
    folder = tmp_path_factory.mktemp("trained")
    schedule = {"name": "cosine", "warmup_iters": 5, "min_lr": 1e-3}
    optim = {"name": "adamw", "learning_rate": 1e-2}
    config = configured(write_corpus(folder), folder / "run", max_iters=60, schedule=schedule, optim=optim)
    assert train.run(config) == 0
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run", symlinks=True)


Sampled = Callable[..., str]


@pytest.fixture
def sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Sampled:
    """The program's own main() in this process: what it prints, or its standard error where its status is not 0."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str, status: int = 0, stdin: str = "") -> str:
        monkeypatch.setattr(sys, "argv", ["sample.py", *words])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            sample.main()
        out, err = capsys.readouterr()
        assert exit_.value.code == status, err
        return err if status else out

    return call


def samples(out: str) -> list[str]:
    assert out.endswith("\n---------------\n")
    return out.removesuffix("\n---------------\n").split("\n---------------\n")


def test_samples_are_the_models_own_by_any_call(run: Path, program: Program, sampled: Sampled, tmp_path: Path) -> None:
    words = ["start=to be", "num_samples=3", "max_new_tokens=40", "temperature=0.7", "top_k=5", "top_p=0.9"]
    words += ["dtype=float32"]  # as below
    done = program("sample.py", "run=run", *words)
    texts = samples(done.stdout)
    assert len(texts) == 3 and len(set(texts)) == 3 and {len(t) for t in texts} == {5 + 40}
    model, tokenizer, _, state = load_run(run / "ckpt" / "best", torch.device("cpu"))
    assert state["step"] == saved_json(run, "summary")["iter_of_min"]
    idx = torch.tensor([tokenizer.encode("to be").tolist()] * 3)
    rows = torch.stack(list(generate(model, idx, 40, 0.7, 5, 0.9)), 1).tolist()
    assert texts == ["to be" + tokenizer.decode(row) for row in rows]
    # by checkpoint, from a file, from standard input, streamed
    (tmp_path / "prompt.txt").write_text("to be")
    for change in (["run=run/ckpt/best"], ["start=FILE:prompt.txt"], ["start=-"], ["stream=true"]):
        assert sampled("run=run", *words, *change, stdin="to be") == done.stdout, change
    assert sampled("run=run", *words, "seed=7") != done.stdout


@pytest.mark.usefixtures("run")
def test_greedy_samples_are_alike_and_go_past_block_size(sampled: Sampled) -> None:
    out = sampled("run=run", "start=to", "num_samples=2", "max_new_tokens=100", "temperature=0")
    first, second = samples(out)
    assert first == second and len(first) == 102  # block_size is 16


IMPORTS = """
import sys
import sample
from core.cli import run_script
for run in sys.argv[1:]:
    assert run_script(sample.SampleConfig, sample.sample, "", [f"run={run}", "max_new_tokens=3", "num_samples=1"]) == 0
print(*sys.modules)
"""


def test_sampling_does_not_load_pytorchs_compiler(tmp_path: Path) -> None:
    """It takes 2 s, and comes with the first operation on the meta device that PyTorch has in Python."""
    runs = []
    for attention, qk_norm in (("mha", "lp3"), ("gqa", "rms"), ("mla_unified", "layernorm")):
        config = config_of(attention, qk_norm)
        config = replace(config, model=replace(config.model, norm="rmsnorm", mlp="swiglu", mlp_hidden=48))
        model, characters = build(config, dtype=torch.float32), CharTokenizer("\nabcdefghij")
        runs.append(str(save_run(model, characters, tmp_path / attention)))
    imported = run_python(IMPORTS, *runs).stdout.split()
    assert "torch" in imported and not {*imported} & {"torch._dynamo", "sympy", "transformers", "tokenizers"}


def test_a_terminal_that_lacks_a_character_gets_a_question_mark(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.write_text("é" * 1000)
    assert train.run(configured(corpus, tmp_path / "run", max_iters=1)) == 0
    words, terminal = [f"run={tmp_path / 'run'}", "start=é", "num_samples=1", "max_new_tokens=2"], io.BytesIO()
    monkeypatch.setattr(sys, "argv", ["sample.py", *words])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding="ascii"))
    with pytest.raises(SystemExit, match="^0$"):
        sample.main()
    assert terminal.getvalue() == b"???\n---------------\n"


def test_prompts_stay_unknown_characters_are_named_corrupt_checkpoints_refused(run: Path, sampled: Sampled) -> None:
    out = sampled("run=run", "start='tis the", "num_samples=1", "max_new_tokens=1")
    assert out.startswith("'tis the")
    for prompt, named in (("'tis, {or}", "',' (U+002C)"), ("to be {or}, 'ñ'", "'{' (U+007B)")):  # Hydra's syntax
        error = sampled("run=run", f"start={prompt}", status=2)
        assert error.count("\n") == 1 and named in error
    flip(run / "ckpt" / "best" / "model.safetensors")
    assert "model.safetensors: checksum" in sampled("run=run", status=2)


@pytest.mark.parametrize(("text", "first"), [("ACGT" * 500, "A"), ("one\rtwo three" * 200, "\r"), ("a\nb" * 700, "\n")])
def test_without_start_a_sample_begins_with_a_character_that_the_model_has(
    text: str, first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_bytes(text.encode())
    assert train.run(configured(tmp_path / "text", tmp_path / "run", max_iters=1)) == 0
    capsys.readouterr()
    assert sample.sample(sample.SampleConfig(str(tmp_path / "run"), num_samples=1, max_new_tokens=1)) == 0
    assert capsys.readouterr().out.startswith(first)


@pytest.mark.parametrize("how", [["stream=true", "num_samples=1"], ["stream=false", "num_samples=40"]])
def test_a_reader_that_leaves_ends_it_quietly(how: list[str], run: Path) -> None:
    command = [sys.executable, str(ROOT / "sample.py"), f"run={run}", "start=to", "max_new_tokens=400", *how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 0


def test_prompt_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    os.mkfifo(tmp_path / "pipe")
    for name in ("nowhere", "empty", "binary", "pipe", "/dev/zero"):
        with pytest.raises(ConfigError, match="is not a regular file" if name in ("pipe", "/dev/zero") else "start="):
            read_prompt(f"FILE:{tmp_path / name}")


def test_sizes_that_no_memory_holds_are_refused_before_a_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "total_memory", lambda _: 2**28)
    config, few, many = config_of("mla", "none"), tmp_path / "few", tmp_path / "many"
    save_run(random_model(config), NoText(400_000_000), many, config)
    with pytest.raises(ConfigError, match=r"transformer.wte.weight is float32 .*, not float32 \(400000000, "):
        load_asked_run(str(many), "best", torch.device("cpu"))
    longer = replace(config, model=replace(config.model, block_size=2**26))
    save_run(random_model(config), CHARS, few, longer)
    with pytest.raises(ConfigError, match="block_size=67108864 positions need more than 2 GiB"):
        load_asked_run(str(few), "best", torch.device("cpu"))


def texts_while_tokens_come(tokenizer: Tokenizer, stop: str, tokens: Iterable[int | None]) -> tuple[Text, list[str]]:
    text, parts = Text(tokenizer, stop), []
    for token in tokens:
        text.add(token)
        parts.append(text.new())
    return text, parts


def test_a_sample_comes_a_character_at_a_time() -> None:
    said = "naïve €5 — 😀!"
    _, parts = texts_while_tokens_come(ByteTokenizer(), "", said.encode())
    prefixes = [said.encode()[: i + 1].decode(errors="ignore") for i in range(len(parts))]
    assert ["".join(parts[: i + 1]) for i in range(len(parts))] == prefixes
    tokenizer = build_tokenizer("bpe", said * 9, 262)
    generator = torch.Generator().manual_seed(0)
    for ids in (tokenizer.encode(said).tolist(), torch.randint(262, (500,), generator=generator).tolist()):
        text, parts = texts_while_tokens_come(tokenizer, "", [*ids, None])
        assert "".join(parts) == text.text == tokenizer.decode(ids)


def test_a_sample_ends_before_the_stop_text_and_with_its_document() -> None:
    for said, stop, shown in (
        ("a\n\nb", "\n\n", "a"), ("a\nb", "\n\n", "a\nb"), ("ababac", "abac", "ab"), ("x", "x", ""), ("aab", "ab", "a"),
    ):  # fmt: skip
        text, parts = texts_while_tokens_come(ByteTokenizer(), stop, [*said.encode(), None])
        assert "".join(parts) == text.text == shown and text.ended
    documents = BPETokenizer(build_tokenizer("bpe", "abc " * 99, 257).pieces, has_separator=True)
    tokens = [*documents.encode("a").tolist(), 257, *documents.encode("b").tolist()]
    assert texts_while_tokens_come(documents, "", tokens)[1] == ["a", "", ""]


def test_a_terminal_is_not_driven_by_a_sample() -> None:
    assert on_terminal("a\x1b[2J\x9b\r\n\té\u202e\0") == "a\\x1b[2J\\x9b\n\té\\u202e\\x00"


def test_standard_input_that_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for stdin in (None, io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8")):
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(ConfigError, match="start=-"):
            read_prompt("-")


@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_end_in_one_line(temperature: int, tmp_path: Path, sampled: Sampled) -> None:
    model = random_model(config_of("mha", "none"))
    for p in model.parameters():
        p.data *= 1e38
    save_run(model, CHARS, tmp_path / "run")
    said = sampled("run=run", "num_samples=1", "max_new_tokens=5", f"temperature={temperature}", status=2)
    assert said == "error: the model's logits are not finite: no token can be drawn\n"
