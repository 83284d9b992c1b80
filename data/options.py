"""The settings of a corpus, and of data/prepare_fineweb.py. Free of torch."""

from dataclasses import asdict, dataclass
from typing import Any

from core.schema import at_least, one_of, require

BPE_VOCAB_SIZE = 4096


@dataclass(frozen=True)
class FoldedTextOptions:
    """A corpus that is one text, cut into folds."""

    name: str
    tokenizer: str = "char"
    folds: int = 10
    fold: int | None = None
    split: str = "contiguous"
    vocab_size: int | None = None

    @property
    def bpe_vocab_size(self) -> int:
        """The number of tokens of data.tokenizer=bpe."""
        return BPE_VOCAB_SIZE if self.vocab_size is None else self.vocab_size

    def check(self) -> None:
        one_of("data.tokenizer", self.tokenizer, ("char", "byte", "bpe", "gpt2"))
        check_vocab_size("data.", self.tokenizer, self.vocab_size)
        one_of("data.split", self.split, ("contiguous", "shuffled"))
        require(
            self.split == "contiguous" or self.fold is not None,
            f"data.split={self.split} needs data.fold: without one the last 10 % are held out",
        )
        at_least("data.folds", self.folds, 2)
        if self.fold is None:
            require(
                self.folds == FoldedTextOptions.folds,
                f"data.folds={self.folds} needs data.fold: without one the last 10 % are held out",
            )
        else:
            require(
                0 <= self.fold < self.folds,
                f"data.fold={self.fold} must be in 0..{self.folds - 1} (data.folds={self.folds})",
            )


@dataclass(frozen=True)
class TinyShakespeareOptions(FoldedTextOptions):
    name: str = "tiny_shakespeare"
    path: str | None = None


@dataclass(frozen=True)
class PythonDocsOptions(FoldedTextOptions):
    name: str = "python_docs"


@dataclass(frozen=True)
class PythonSourceOptions(FoldedTextOptions):
    name: str = "python_source"
    tokenizer: str = "bpe"


@dataclass(frozen=True)
class TextFileOptions(FoldedTextOptions):
    name: str = "text"
    path: str = ""

    def check(self) -> None:
        super().check()
        require(self.path != "", "data.path= must name a UTF-8 text file")


@dataclass(frozen=True)
class FineWebOptions:
    """Token shards that data/prepare_fineweb.py has written: they have a validation part, and no folds."""

    name: str = "fineweb"
    path: str | None = None
    val_tokens: int | None = None

    def check(self) -> None:
        require(self.path != "", "data.path= must name a folder, or be null")
        if self.val_tokens is not None:
            at_least("data.val_tokens", self.val_tokens, 2)


@dataclass(frozen=True)
class RandomOptions:
    """n_tokens uniformly random tokens, of which the last val_tokens are held out: no text, and no folds."""

    name: str = "random"
    n_tokens: int = 10_000_000
    vocab_size: int = 256
    val_tokens: int = 100_000
    seed: int = 0

    def check(self) -> None:
        at_least("data.n_tokens", self.n_tokens, 4)
        at_least("data.vocab_size", self.vocab_size, 2)
        at_least("data.val_tokens", self.val_tokens, 2)
        require(
            self.val_tokens < self.n_tokens,
            f"data.val_tokens={self.val_tokens} must be < data.n_tokens={self.n_tokens}",
        )
        require(0 <= self.seed < 2**63, f"data.seed={self.seed} must be >= 0 and < 2**63")


CORPORA = {
    "tiny_shakespeare": TinyShakespeareOptions,
    "python_docs": PythonDocsOptions,
    "python_source": PythonSourceOptions,
    "text": TextFileOptions,
    "fineweb": FineWebOptions,
    "random": RandomOptions,
}


CorpusOptions = FoldedTextOptions | FineWebOptions | RandomOptions


@dataclass(frozen=True)
class PrepareFineWebConfig:
    """data/prepare_fineweb.py. name: null is sample-10BT of FineWeb, and a data set's only configuration elsewhere."""

    dataset: str = "HuggingFaceFW/fineweb"
    name: str | None = None
    split: str = "train"
    column: str = "text"
    out: str | None = None
    tokenizer: str = "gpt2"
    vocab_size: int | None = None
    learn_bytes: int | None = None
    max_tokens: int | None = None
    shard_tokens: int = 100_000_000
    val_fraction: float = 0.001
    workers: int | None = None
    verify: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the shards, resolved."""
        resolved = asdict(self)
        for key in ("out", "workers", "verify"):
            del resolved[key]
        if self.name is None and self.dataset == PrepareFineWebConfig.dataset:
            resolved["name"] = "sample-10BT"
        if self.tokenizer == "bpe":
            resolved["vocab_size"] = 2**15 if self.vocab_size is None else self.vocab_size
            resolved["learn_bytes"] = 100_000_000 if self.learn_bytes is None else self.learn_bytes
        return resolved

    def check(self) -> None:
        for key in ("dataset", "split", "column"):
            require(getattr(self, key) != "", f"{key}= must not be empty")
        require(self.out != "", "out= must name a folder, or be null")
        one_of("tokenizer", self.tokenizer, ("gpt2", "bpe"))
        check_vocab_size("", self.tokenizer, self.vocab_size)
        require(
            self.learn_bytes is None or self.tokenizer == "bpe",
            f"learn_bytes={self.learn_bytes} needs tokenizer=bpe: tokenizer={self.tokenizer} learns nothing",
        )
        for key in ("learn_bytes", "max_tokens", "shard_tokens"):
            value = getattr(self, key)
            require(value is None or 1 <= value < 2**53, f"{key}={value} must be >= 1 and < 2**53")
        require(0 < self.val_fraction < 1, f"val_fraction={self.val_fraction} must be in (0, 1)")
        if self.workers is not None:
            at_least("workers", self.workers, 1)


def check_vocab_size(prefix: str, tokenizer: str, vocab_size: int | None) -> None:
    if vocab_size is not None:
        require(
            tokenizer == "bpe",
            f"{prefix}vocab_size={vocab_size} needs {prefix}tokenizer=bpe: {prefix}tokenizer={tokenizer} has its own",
        )
        at_least(f"{prefix}vocab_size", vocab_size, 257)
