"""Text <-> token ids. A tokenizer of your own is one class and one entry in TOKENIZERS, and its name in the check() of
training/config.py's FoldedTextOptions."""

import functools
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from core.schema import ConfigError, require
from data.corpora import PROBE_SECONDS, one_line, probe

if TYPE_CHECKING:
    import tiktoken


class Tokenizer(Protocol):
    """pieces: the UTF-8 bytes that each token stands for. separator: the token between two documents, or None; it is
    the last one, and no part of any text."""

    vocab_size: int
    pieces: list[bytes]
    separator: int | None

    @classmethod
    def build(cls, text: str, vocab_size: int | None = None) -> Self: ...
    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self: ...
    def to_dict(self) -> dict[str, Any]: ...
    def encode(self, text: str) -> np.ndarray: ...
    def decode(self, tokens: Iterable[int]) -> str: ...


class CharTokenizer:
    """One token a character; the vocabulary is the sorted set of the characters of the whole corpus."""

    separator: int | None = None

    def __init__(self, chars: str) -> None:
        self.chars = chars
        self.vocab_size = len(chars)
        self.pieces = [char.encode(errors="surrogatepass") for char in chars]
        self.dtype = token_dtype(self.vocab_size)
        points = code_points(chars)
        self.table = np.full(points.max(initial=0) + 2, -1, dtype=np.int32)  # code point -> token; the last: none
        self.table[points] = np.arange(self.vocab_size)

    @classmethod
    def build(cls, text: str, vocab_size: int | None = None) -> "CharTokenizer":
        return cls("".join(sorted(set(text))))

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> "CharTokenizer":
        return cls(saved["chars"])

    def to_dict(self) -> dict[str, Any]:
        return {"name": "char", "chars": self.chars}

    def encode(self, text: str) -> np.ndarray:
        """(len(text),) token ids. Raises: ConfigError naming the first character that the vocabulary lacks."""
        tokens = self.table[np.minimum(code_points(text), len(self.table) - 1)]  # (len(text),)
        unknown = np.flatnonzero(tokens < 0)
        if len(unknown) > 0:
            char = text[unknown[0]]
            raise ConfigError(
                f"the character {char!r} (U+{ord(char):04X}) is not among the {self.vocab_size} that the corpus has"
            )
        return np.asarray(tokens, dtype=self.dtype)

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(self.chars[token] for token in tokens)


class NoText:
    """vocab_size tokens that stand for no text: data=random."""

    separator: int | None = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.pieces = [b""] * vocab_size

    @classmethod
    def build(cls, text: str, vocab_size: int | None = None) -> "NoText":
        assert vocab_size is not None
        return cls(vocab_size)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> "NoText":
        return cls(saved["vocab_size"])

    def to_dict(self) -> dict[str, Any]:
        return {"name": "none", "vocab_size": self.vocab_size}

    def encode(self, text: str) -> np.ndarray:
        """Raises: ConfigError."""
        raise ConfigError("data=random has tokens that stand for no text")

    def decode(self, tokens: Iterable[int]) -> str:
        """Raises: ConfigError."""
        raise ConfigError("data=random has tokens that stand for no text")


class ByteTokenizer:
    """One token a UTF-8 byte. A sequence of tokens need not be text: `decode` puts U+FFFD where it is not."""

    vocab_size = 256
    pieces = [bytes([byte]) for byte in range(256)]
    separator: int | None = None

    @classmethod
    def build(cls, text: str, vocab_size: int | None = None) -> "ByteTokenizer":
        return cls()

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> "ByteTokenizer":
        return cls()

    def to_dict(self) -> dict[str, Any]:
        return {"name": "byte"}

    def encode(self, text: str) -> np.ndarray:
        """(bytes of text,) uint8."""
        return np.frombuffer(text.encode(errors="surrogatepass"), dtype=np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(map(int, tokens)).decode(errors="replace")  # bytes(array) would read an array's raw memory


class BPETokenizer:
    """Byte-level BPE: GPT-2's pre-tokens, each merged into ever longer tokens, those with the smallest id first.

    The first 256 tokens are the bytes, in GPT-2's order. `learnt`: the bytes of all tokens but the separator.
    The `tokenizers` library learns them; `tiktoken`, several times faster, encodes.
    """

    name = "bpe"

    def __init__(self, learnt: list[bytes], has_separator: bool = False) -> None:
        assert len(set(learnt)) == len(learnt) and {token for token in learnt if len(token) == 1} == set(BYTES)
        self.learnt = learnt
        self.separator = len(learnt) if has_separator else None
        self.pieces = [*learnt, SEPARATOR.encode()] if has_separator else learnt
        self.vocab_size = len(self.pieces)
        self.dtype = token_dtype(self.vocab_size)

    @classmethod
    def build(cls, text: str, vocab_size: int | None = None) -> Self:
        """Learn `vocab_size` tokens from the text. Raises: ConfigError when the text is too short for so many."""
        assert vocab_size is not None
        return cls(learn_bpe([text], vocab_size))

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        return cls([printable_to_bytes(token) for token in saved["tokens"].split(" ")], saved["separator"])

    def to_dict(self) -> dict[str, Any]:
        tokens = " ".join(bytes_to_printable(token) for token in self.learnt)
        return {"name": self.name, "separator": self.separator is not None, "tokens": tokens}

    def encode(self, text: str) -> np.ndarray:
        """Token ids of the text; what looks like a separator in it is text."""
        try:
            text.encode()
        except UnicodeEncodeError:  # a command line that is not UTF-8 arrives as lone surrogates
            text = text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")
        encode = functools.partial(self.encoder.encode_to_numpy, disallowed_special=())
        if len(text) <= PART:
            return np.asarray(encode(text), dtype=self.dtype)
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return np.concatenate([np.asarray(part, dtype=self.dtype) for part in threads.map(encode, parts(text))])

    def decode(self, tokens: Iterable[int]) -> str:
        """The text, with U+FFFD for bytes that are none."""
        return b"".join(self.pieces[token] for token in tokens).decode(errors="replace")

    @functools.cached_property
    def encoder(self) -> "tiktoken.Encoding":
        import tiktoken

        ranks = {token: i for i, token in enumerate(self.learnt)}
        return tiktoken.Encoding(self.name, pat_str=PRE_TOKENS, mergeable_ranks=ranks, special_tokens={})


class GPT2Tokenizer(BPETokenizer):
    """GPT-2's own tokens, as `tiktoken` fetches and keeps them. Saved with a run, they need no network again."""

    name = "gpt2"

    @classmethod
    def build(cls, text: str, vocab_size: int | None = None) -> Self:
        """Raises: ConfigError when neither tiktoken's cache nor the network has the vocabulary."""
        return cls(fetch_gpt2(), has_separator=True)


SEPARATOR = "<|endoftext|>"
PRE_TOKENS = (  # GPT-2's, as tiktoken writes them
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
)
PART = 2**19  # characters that are encoded at a time

# GPT-2 writes a byte as a printable character: itself, or one from U+0100 on.
PLAIN = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
OTHER = [byte for byte in range(256) if byte not in PLAIN]
BYTES = [bytes([byte]) for byte in (*PLAIN, *OTHER)]  # in the order of GPT-2's first 256 tokens
PRINTABLE = {**{byte: chr(byte) for byte in PLAIN}, **{byte: chr(256 + i) for i, byte in enumerate(OTHER)}}
FROM_PRINTABLE = {char: byte for byte, char in PRINTABLE.items()}


def bytes_to_printable(token: bytes) -> str:
    return "".join(PRINTABLE[byte] for byte in token)


def printable_to_bytes(token: str) -> bytes:
    return bytes(FROM_PRINTABLE[char] for char in token)


def learn_bpe(texts: Iterable[str], vocab_size: int) -> list[bytes]:
    """The tokens of a byte-level BPE, the 256 bytes first; a function of the joined texts, whatever the threads.

    Raises: ConfigError when the texts hold less than vocab_size of them.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # unset, it warns wherever a process forks later
    from tokenizers import Tokenizer as Learner
    from tokenizers import models, pre_tokenizers, trainers

    learner = Learner(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = [PRINTABLE[byte[0]] for byte in BYTES]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator((part for text in texts for part in parts(text)), trainer)
    ids = learner.get_vocab()
    tokens = [printable_to_bytes(token) for token in sorted(ids, key=lambda token: ids[token])]
    assert tokens[:256] == BYTES
    require(
        len(tokens) == vocab_size,
        f"data.vocab_size={vocab_size} is more than the {len(tokens)} tokens that the text has for data.tokenizer=bpe",
    )
    return tokens


def parts(text: str) -> Iterator[str]:
    """The text in parts of about PART characters. A part begins where a pre-token does, whatever comes before: with
    white space after something else, or with the last white space of several. So the tokens of the parts are those of
    the text. And no white space that something follows is longer than a part: of a million spaces before a word the
    pattern would have to try every one."""
    start = 0
    while start < len(text):
        cut = CUT.search(text, start + PART)
        end = len(text) if cut is None else cut.start()
        yield text[start:end]
        start = end


SPACE = r"[^\S\x1c-\x1f]"  # to Python these four are white space as well
CUT = re.compile(rf"(?<=\S)[ \n]|(?<={SPACE}){SPACE}(?=\S)")

# -----------------------------------------------------------------------------
# GPT-2's tokens

GPT2_FILES = [
    f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}" for name in ("vocab.bpe", "encoder.json")
]  # as tiktoken_ext.openai_public has them


def fetch_gpt2() -> list[bytes]:
    import tiktoken

    if not all(os.path.exists(file) for file in tiktoken_cache(GPT2_FILES)):
        import requests  # with which tiktoken waits without end

        problem = probe(lambda: requests.head(GPT2_FILES[0], timeout=PROBE_SECONDS).raise_for_status())
        require(
            problem is None,
            f"data.tokenizer=gpt2 is not in tiktoken's cache, and its server is out of reach ({problem}): set "
            "TIKTOKEN_CACHE_DIR to a folder that has it, or use data.tokenizer=bpe, which is learnt from the text",
        )
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except Exception as error:  # requests, the file system, a wrong checksum
        raise ConfigError(f"data.tokenizer=gpt2 cannot be loaded: {one_line(error)}") from error
    return [encoding.decode_single_token_bytes(token) for token in range(encoding.eot_token)]


def tiktoken_cache(urls: list[str]) -> list[str]:
    """Where tiktoken keeps what it downloads."""
    default = os.environ.get("DATA_GYM_CACHE_DIR", os.path.join(tempfile.gettempdir(), "data-gym-cache"))
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", default)
    return [os.path.join(folder, hashlib.sha1(url.encode()).hexdigest()) for url in urls]


# -----------------------------------------------------------------------------


def code_points(text: str) -> np.ndarray:
    # surrogatepass: a command line that is not UTF-8 arrives as lone surrogates
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")  # (len(text),)


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if vocab_size <= 2**16 else np.uint32


TOKENIZERS: dict[str, type[Tokenizer]] = {
    "char": CharTokenizer,
    "byte": ByteTokenizer,
    "bpe": BPETokenizer,
    "gpt2": GPT2Tokenizer,
}


def build_tokenizer(name: str, text: str, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer `data.tokenizer=name` for the corpus `text`; vocab_size: of bpe.

    It is learnt from the whole text, the held-out part included, as nanoGPT's characters are: which characters or
    merges there are is all that it can tell of that part, and every fold and seed has the same tokens, so that their
    losses compare. Folds are counted in tokens: there are none before there is a tokenizer.
    """
    return TOKENIZERS[name].build(text, vocab_size)


def from_dict(saved: dict[str, Any]) -> Tokenizer:
    """The tokenizer whose `to_dict()` was saved."""
    if saved["name"] == "none":
        return NoText.from_dict(saved)
    return TOKENIZERS[saved["name"]].from_dict(saved)


def tokenizer_sha256(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(json.dumps(tokenizer.to_dict(), sort_keys=True).encode()).hexdigest()


def text_size(tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and characters of each token, (V,) each. A character is counted where it begins."""
    pieces = [b"" if token == tokenizer.separator else piece for token, piece in enumerate(tokenizer.pieces)]
    n_chars = [sum(byte & 0xC0 != 0x80 for byte in piece) for piece in pieces]
    return np.array([len(piece) for piece in pieces]), np.array(n_chars)
