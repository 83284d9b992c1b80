"""A run as a Hugging Face folder: python scripts/export_hf.py run=RUN out=FOLDER

Writes config.json, model.safetensors and the tokenizer's files. transformers loads the folder with
AutoModelForCausalLM.from_pretrained(FOLDER) and computes the same logits. The settings of the run decide the
architecture: GPT-2, Llama, Qwen3 or DeepSeek-V3. Settings that no architecture has, such as an Lp QK norm, are refused.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import torch
from safetensors.torch import save

from core.cli import run_script
from core.files import expand, written_aside
from core.process import say
from core.schema import NOT_EMPTY, REQUIRED, Help, options, require
from data.hf_tokenizer import tokenizer_json
from data.tokenizer import SEPARATOR, Tokenizer
from model.gpt import GPT
from model.hf import architecture_of, config_json, renamed
from sample import Plugins, RunPath, Which, load_asked_run


def export(model: GPT, tokenizer: Tokenizer, out: Path, fault: str = "none") -> list[str]:
    """Write the folder, completely or not at all. Returns the names of its files. Raises: ConfigError before anything
    is written, where no architecture fits or `out` exists; OSError."""
    config, state = config_json(model), renamed(model, model.state_dict())
    if fault != "none":
        config["fault"] = fault  # transformers keeps the key and ignores it
    config["eos_token_id"] = separator = tokenizer.separator  # it ends generation
    out = expand(out).resolve()
    require(not out.exists() or out.is_dir(), f"out={out} is not a folder")
    require(not out.exists() or not any(out.iterdir()), f"out={out} is not empty")
    documents = {"config.json": config}
    if (tokens := tokenizer_json(tokenizer)) is not None:
        documents |= {"tokenizer.json": tokens, "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.block_size,
            "clean_up_tokenization_spaces": False, **({} if separator is None else {"eos_token": SEPARATOR}),
        }}  # fmt: skip
    with written_aside(out) as temporary:
        for name, content in documents.items():
            (temporary / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        tensors = {key: w.detach().cpu().clone(memory_format=torch.contiguous_format) for key, w in state.items()}
        (temporary / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    return sorted(file.name for file in out.iterdir())


@options
class ExportOptions:
    run: RunPath = REQUIRED
    out: Annotated[str, NOT_EMPTY, Help("the folder to write")] = REQUIRED
    checkpoint: Which = "best"
    plugins: Plugins = ()


def export_run(asked: ExportOptions) -> int:
    model, tokenizer, config, _ = load_asked_run(asked.run, asked.checkpoint, torch.device("cpu"))
    out = Path(asked.out)
    files = export(model, tokenizer, out, config.fault.name)
    say(f"{out}: {architecture_of(model.config)}, {model.num_params():,} parameters; {', '.join(files)}")
    if "tokenizer.json" not in files:
        say(f"without a tokenizer: tokenizer.json cannot hold data.tokenizer={tokenizer.to_dict()['name']}")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(ExportOptions, export_run, __doc__))
