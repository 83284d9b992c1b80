"""The settings of a corpus, and of data/prepare_fineweb.py. Free of torch."""

from typing import Annotated, Any, Literal

from core.schema import FREE, NOT_EMPTY, REQUIRED, AtLeast, BeforeItExisted, Between, Help, deciding, options, require

BPE_VOCAB_SIZE = 4096
MOST_TOKENS = 2**20  # the largest vocabularies in use have 2**18
MOVABLE = FREE  # a corpus may lie elsewhere: its SHA-256 is compared
TextTokenizer = Annotated[
    Literal["char", "byte", "bpe", "gpt2"], Help("char, byte, bpe (byte-level, learnt from this text) or gpt2")
]

OnDevice = Annotated[
    bool | Literal["auto"],
    FREE,
    Help("keep the tokens on the GPU and cut batches there; auto: if they take 1/16 of its memory or less"),
]


@options
class FoldedTextOptions:
    """A corpus that is one text, cut into folds."""

    name: str
    tokenizer: TextTokenizer = "char"
    folds: Annotated[int, AtLeast(2), Help("how many blocks the text is cut into")] = 10
    fold: Annotated[int | None, Help("the block that is held out, 0 .. folds - 1; null: the last 10 %")] = None
    split: Annotated[
        Literal["contiguous", "shuffled", "near", "far"],
        Help("shuffled: windows at random; near, far: training text around such windows, or far away"),
    ] = "contiguous"
    vocab_size: Annotated[
        int | None, Between(257, MOST_TOKENS), BeforeItExisted(None), Help(f"of tokenizer=bpe; null: {BPE_VOCAB_SIZE}")
    ] = None
    on_device: OnDevice = "auto"

    @property
    def bpe_vocab_size(self) -> int:
        """The number of tokens of data.tokenizer=bpe."""
        return BPE_VOCAB_SIZE if self.vocab_size is None else self.vocab_size

    def check(self) -> None:
        check_vocab_size("data.", self.tokenizer, self.vocab_size)
        without = "needs data.fold: without one the last 10 % are held out"
        require(self.split == "contiguous" or self.fold is not None, f"data.split={self.split} {without}")
        require(self.folds == FoldedTextOptions.folds or self.fold is not None, f"data.folds={self.folds} {without}")
        exists = self.fold is None or 0 <= self.fold < self.folds
        require(exists, f"data.fold={self.fold} must be in 0..{self.folds - 1} (data.folds={self.folds})")


@options
class TinyShakespeareOptions(FoldedTextOptions):
    """1.1 MB of Shakespeare, 65 characters"""

    name: str = "tiny_shakespeare"
    path: Annotated[
        str | None, MOVABLE, Help("the file or its folder; null: look in $NANOQK_DATA, the cache, the network")
    ] = None


@options
class PythonDocsOptions(FoldedTextOptions):
    """The language reference inside every CPython: no network"""

    name: str = "python_docs"


@options
class PythonSourceOptions(FoldedTextOptions):
    """The standard library's own source files, tens of MB: no network"""

    name: str = "python_source"
    tokenizer: TextTokenizer = "bpe"  # char has hundreds of characters here, most from the tests of str


@options
class TextFileOptions(FoldedTextOptions):
    """Any UTF-8 text"""

    name: str = "text"
    path: Annotated[str, MOVABLE, NOT_EMPTY, Help("the file")] = REQUIRED
    val_path: Annotated[str | None, MOVABLE, NOT_EMPTY, Help("a file to hold out; null: a part of data.path")] = None

    def check(self) -> None:
        super().check()
        told = f"data.val_path={self.val_path} is what is held out: there are no folds"
        require(self.val_path is None or self.fold is None, told)


@options
class BinOptions:
    """nanoGPT's train.bin, val.bin and meta.pkl (without it GPT-2's tokens)"""

    name: str = "bin"
    path: Annotated[str, MOVABLE, NOT_EMPTY, Help("their folder")] = REQUIRED
    verify: Annotated[bool, FREE, Help("hash both files at each start; false: once a machine")] = False
    on_device: OnDevice = "auto"


@options
class FineWebOptions:
    """Token shards of data/prepare_fineweb.py: they have a validation part, and no folds"""

    name: str = "fineweb"
    path: Annotated[
        str | None, MOVABLE, NOT_EMPTY, Help("their folder; null: fineweb in $NANOQK_DATA, or in the cache")
    ] = None
    verify: Annotated[bool, FREE, Help("check every file's SHA-256 at each start; false: once a machine")] = False
    val_tokens: Annotated[int | None, AtLeast(2), Help("evaluate on so many held-out tokens; null: on all")] = None
    on_device: OnDevice = "auto"


FLOOR_TOLERANCE = 0.01  # nats below ln vocab_size at which a loss on random tokens counts as wrong


@options
class RandomOptions:
    """Uniformly random tokens: no honest loss is below ln vocab_size"""

    name: str = "random"
    n_tokens: Annotated[int, Between(4, 10**9), Help("in all")] = 10_000_000
    vocab_size: Annotated[int, Between(2, MOST_TOKENS), Help("different tokens")] = 256
    val_tokens: Annotated[int, AtLeast(2), Help("the last ones, which are held out")] = 100_000
    seed: Annotated[int, AtLeast(0, bits=63), Help("seed of the tokens")] = 0
    on_device: OnDevice = "auto"

    def check(self) -> None:
        fits = self.val_tokens < self.n_tokens
        require(fits, f"data.val_tokens={self.val_tokens} must be < data.n_tokens={self.n_tokens}")


CorpusOptions = FoldedTextOptions | FineWebOptions | BinOptions | RandomOptions
TEXTS: list[Any] = [TinyShakespeareOptions, PythonDocsOptions, PythonSourceOptions, TextFileOptions]
CORPORA: dict[str, type] = {corpus.name: corpus for corpus in [*TEXTS, BinOptions, FineWebOptions, RandomOptions]}


@options
class PrepareFineWebConfig:
    dataset: Annotated[
        str,
        NOT_EMPTY,
        Help("a data set of the Hugging Face Hub, or a folder of parquet or JSON files, or of texts (a document each)"),
    ] = "HuggingFaceFW/fineweb"
    name: Annotated[str | None, Help("the configuration; null: sample-10BT of FineWeb, else the only one")] = None
    split: Annotated[str, NOT_EMPTY, Help("split of the data set")] = "train"
    column: Annotated[str, NOT_EMPTY, Help("the column that has the text")] = "text"
    out: Annotated[
        str | None, FREE, NOT_EMPTY, Help("the folder to write; null: fineweb in the cache, where data=fineweb looks")
    ] = None
    tokenizer: Annotated[Literal["gpt2", "bpe"], Help("gpt2, or bpe: learnt from the first documents")] = "gpt2"
    vocab_size: Annotated[int | None, Between(257, MOST_TOKENS), Help("bpe's, with the separator; null: 32768")] = None
    max_tokens: Annotated[
        int | None, AtLeast(1, bits=53), Help("stop after the document that reaches it, train and val together")
    ] = None
    shard_tokens: Annotated[int, AtLeast(1, bits=53), Help("a shard's size; documents are not cut")] = 100_000_000
    val_fraction: Annotated[
        float, Between(0, 1, "()"), Help("share of the documents that is held out, by a hash of the text")
    ] = 0.001
    workers: Annotated[int | None, FREE, AtLeast(1), Help("threads that tokenise; null: one a core")] = None

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the shards, resolved."""
        resolved = deciding(self)
        if self.name is None and self.dataset == PrepareFineWebConfig.dataset:
            resolved["name"] = "sample-10BT"
        if self.tokenizer == "bpe":
            resolved["vocab_size"] = 2**15 if self.vocab_size is None else self.vocab_size
        return resolved

    def check(self) -> None:
        check_vocab_size("", self.tokenizer, self.vocab_size)


def check_vocab_size(prefix: str, tokenizer: str, vocab_size: int | None) -> None:
    rule = f"needs {prefix}tokenizer=bpe: {prefix}tokenizer={tokenizer} has its own"
    require(vocab_size is None or tokenizer == "bpe", f"{prefix}vocab_size={vocab_size} {rule}")
