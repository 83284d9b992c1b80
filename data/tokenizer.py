"""Text <-> token ids.

To add a tokenizer: a class, its entry in TOKENIZERS and in build_tokenizer(), and its name in data/options.py.
"""

import functools
import hashlib
import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from core.process import available_cpus, in_thread
from core.schema import ConfigError, one_line, require
from data.corpora import PROBE_SECONDS, probe

if TYPE_CHECKING:
    import tiktoken


class Tokenizer:
    """name: in data.tokenizer= and in checkpoints. pieces: the UTF-8 bytes of each token. separator: the token that
    ends a document, the last of the vocabulary, or None; encode() never returns it. saved: the attributes from which it
    is built again."""

    name: str
    saved: tuple[str, ...] = ()
    vocab_size: int
    pieces: list[bytes]
    separator: int | None = None

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        return cls(**{key: saved[key] for key in cls.saved})

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, **{key: getattr(self, key) for key in self.saved}}

    def encode(self, text: str) -> np.ndarray:
        """(n,) token ids, unsigned. Raises: ConfigError."""
        raise NotImplementedError

    def decode(self, tokens: Iterable[int]) -> str:
        raise NotImplementedError


class CharTokenizer(Tokenizer):
    """One token per character. The vocabulary is the sorted set of the characters of the whole corpus."""

    name = "char"
    saved = ("chars",)

    def __init__(self, chars: str) -> None:
        self.chars = chars
        self.vocab_size = len(chars)
        self.pieces = [char.encode() for char in chars]
        points = code_points(chars)
        self.table = np.full(points.max(initial=0) + 2, -1, dtype=np.int32)  # code point -> token, or -1
        self.table[points] = np.arange(self.vocab_size)

    def encode(self, text: str) -> np.ndarray:
        """(len(text),) token ids. Raises: ConfigError naming the first character that the vocabulary lacks."""
        tokens = self.table[np.minimum(code_points(text), len(self.table) - 1)]  # (len(text),)
        unknown = np.flatnonzero(tokens < 0)
        if len(unknown) > 0:
            char = text[unknown[0]]
            raise ConfigError(
                f"the character {char!r} (U+{ord(char):04X}) is not among the {self.vocab_size} of the model's text; "
                "a model with data.tokenizer=byte takes any text"
            )
        return np.asarray(tokens, dtype=token_dtype(self.vocab_size))

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(self.chars[token] for token in tokens)


class NoText(Tokenizer):
    """vocab_size tokens without a text: data=random."""

    name = "none"
    saved = ("vocab_size",)

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    @functools.cached_property
    def pieces(self) -> list[bytes]:  # type: ignore[override]
        return [b""] * self.vocab_size

    def encode(self, text: str) -> np.ndarray:
        raise ConfigError("data=random has tokens that stand for no text")

    def decode(self, tokens: Iterable[int]) -> str:
        raise ConfigError("data=random has tokens that stand for no text")


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte. `decode` replaces bytes that are not UTF-8 by U+FFFD."""

    name = "byte"
    vocab_size = 256
    pieces = [bytes([byte]) for byte in range(256)]

    def encode(self, text: str) -> np.ndarray:
        """(bytes of text,) uint8."""
        return np.frombuffer(text.encode(errors="surrogatepass"), dtype=np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(map(int, tokens)).decode(errors="replace")  # bytes(array) would copy the array's raw memory


class BPETokenizer(Tokenizer):
    """Byte-level BPE: each of GPT-2's pre-tokens is merged into longer tokens, smallest token id first.

    learnt: the bytes of all tokens but the separator; the first 256 are the single bytes, in GPT-2's order.
    The `tokenizers` library learns them. `tiktoken` encodes: it is several times faster.
    """

    name = "bpe"

    def __init__(self, learnt: list[bytes], has_separator: bool = False) -> None:
        assert len(set(learnt)) == len(learnt) and {token for token in learnt if len(token) == 1} == set(BYTES)
        assert max(map(len, learnt)) <= LONGEST
        self.learnt = learnt
        self.separator = len(learnt) if has_separator else None
        self.pieces = [*learnt, SEPARATOR.encode()] if has_separator else learnt
        self.vocab_size = len(self.pieces)
        self.dtype = token_dtype(self.vocab_size)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        return cls([printable_to_bytes(token) for token in saved["tokens"].split(" ")], saved["separator"])

    def to_dict(self) -> dict[str, Any]:
        tokens = " ".join(bytes_to_printable(token) for token in self.learnt)
        return {"name": self.name, "separator": self.separator is not None, "tokens": tokens}

    def encode(self, text: str) -> np.ndarray:
        """Token ids of the text. A "<|endoftext|>" in it is encoded as ordinary text, with a warning."""
        if SEPARATOR in text:
            warnings.warn(f"{SEPARATOR} in a text is ordinary text: it ends no document", stacklevel=2)
        try:
            text.encode()
        except UnicodeEncodeError:  # bytes of the command line that are not UTF-8 arrive as lone surrogates
            text = text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")
        encode = functools.partial(self.encoder.encode_to_numpy, disallowed_special=())
        if len(text) <= PART_CHARS:
            return np.asarray(encode(text), dtype=self.dtype)
        with ThreadPoolExecutor(available_cpus()) as threads:
            return np.concatenate([np.asarray(part, dtype=self.dtype) for part in threads.map(encode, parts(text))])

    def decode(self, tokens: Iterable[int]) -> str:
        """The text, with U+FFFD for bytes that are not UTF-8."""
        return b"".join(self.pieces[token] for token in tokens).decode(errors="replace")

    @functools.cached_property
    def encoder(self) -> "tiktoken.Encoding":
        import tiktoken

        ranks = {token: i for i, token in enumerate(self.learnt)}
        return tiktoken.Encoding(self.name, pat_str=PRE_TOKENS, mergeable_ranks=ranks, special_tokens={})


class GPT2Tokenizer(BPETokenizer):
    """GPT-2's own tokens, which `tiktoken` downloads and caches. Sampling takes them from the checkpoint."""

    name = "gpt2"


SEPARATOR = "<|endoftext|>"
PRE_TOKENS = (  # the pattern of GPT-2's pre-tokens, as tiktoken writes it
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
)
PART_CHARS = 2**19  # a thread encodes about this many characters at a time
LONGEST = 2**16  # bytes of a token; learnt ones have at most LEARNT_CHARS, those of others may hold up every start
LEARNT_CHARS = 2**13  # longer pre-tokens are cut where merges are learnt, as learning is quadratic in their length

# GPT-2's files write each byte as a printable character: itself, or one from U+0100 on.
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
    """The tokens of a byte-level BPE, the 256 bytes first. They depend on the texts only, not on the threads."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # unset, the library warns if the process forks later
    from tokenizers import Tokenizer as Learner
    from tokenizers import models, pre_tokenizers, trainers

    learner = Learner(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.FixedLength(LEARNT_CHARS)]
    )
    alphabet = [PRINTABLE[byte[0]] for byte in BYTES]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    all_parts = (part for text in texts for part in parts(text))
    in_thread(lambda: learner.train_from_iterator(all_parts, trainer))  # minutes without a look at signals
    ids = learner.get_vocab()
    tokens = [printable_to_bytes(token) for token in sorted(ids, key=lambda token: ids[token])]
    assert tokens[:256] == BYTES
    most = f"the {len(tokens)} tokens that the text has for data.tokenizer=bpe"
    require(len(tokens) == vocab_size, f"data.vocab_size={vocab_size} is more than {most}")
    return tokens


def parts(text: str) -> Iterator[str]:
    """The text in parts of about PART_CHARS characters, whose tokens are those of the whole text.

    A part begins at a sure start of a pre-token: at white space after another character, or at the last of several
    white spaces. The second also splits a long run of spaces before a word, on which tiktoken's pattern gives up.
    """
    start = 0
    while start < len(text):
        cut = CUT.search(text, start + PART_CHARS)
        end = len(text) if cut is None else cut.start()
        yield text[start:end]
        start = end


SPACE = r"[^\S\x1c-\x1f]"  # without the four characters that only Python counts as white space
CUT = re.compile(rf"(?<=\S)[ \n]|(?<={SPACE}){SPACE}(?=[\S\x1c-\x1f])")

# -----------------------------------------------------------------------------
# GPT-2's tokens

GPT2_FILES = [
    f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}" for name in ("vocab.bpe", "encoder.json")
]  # the same as in tiktoken_ext.openai_public


def fetch_gpt2(key: str = "data.tokenizer") -> list[bytes]:
    """key: of the setting. Raises: ConfigError where neither tiktoken's cache nor the network has the vocabulary."""
    import tiktoken

    if not all(os.path.exists(file) for file in tiktoken_cache(GPT2_FILES)):
        import requests  # tiktoken uses it without a timeout

        problem = probe(lambda: requests.head(GPT2_FILES[0], timeout=PROBE_SECONDS).raise_for_status())
        absent = f"{key}=gpt2 is not in tiktoken's cache, and its server is out of reach ({problem})"
        advice = f"set TIKTOKEN_CACHE_DIR to a folder that has it, or use {key}=bpe, which is learnt from the text"
        require(problem is None, f"{absent}: {advice}")
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except Exception as error:  # requests, the file system, a wrong checksum
        raise ConfigError(f"{key}=gpt2 cannot be loaded: {one_line(error)}") from error
    return [encoding.decode_single_token_bytes(token) for token in range(encoding.eot_token)]


def tiktoken_cache(urls: list[str]) -> list[str]:
    """The files in which tiktoken caches these downloads."""
    default = os.environ.get("DATA_GYM_CACHE_DIR", os.path.join(tempfile.gettempdir(), "data-gym-cache"))
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", default)
    return [os.path.join(folder, hashlib.sha1(url.encode()).hexdigest()) for url in urls]


# -----------------------------------------------------------------------------
# Any tokenizer


def code_points(text: str) -> np.ndarray:
    # surrogatepass: bytes of the command line that are not UTF-8 arrive as lone surrogates
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")  # (len(text),)


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if vocab_size <= 2**16 else np.uint32


TOKENIZERS: dict[str, type[Tokenizer]] = {
    tokenizer.name: tokenizer for tokenizer in (CharTokenizer, ByteTokenizer, BPETokenizer, GPT2Tokenizer)
}


def build_tokenizer(name: str, text: str, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer `data.tokenizer=name` for the corpus `text`. vocab_size is for bpe only. Raises: ConfigError.

    It is learnt from the whole text, held-out part included, as nanoGPT's vocabulary is. So every fold and seed has the
    same tokens and their losses compare. All that leaks of the held-out part is which characters or merges exist.
    """
    if name == "bpe":
        assert vocab_size is not None
        return BPETokenizer(learn_bpe([text], vocab_size))
    if name == "gpt2":
        return GPT2Tokenizer(fetch_gpt2(), has_separator=True)
    return CharTokenizer("".join(sorted(set(text)))) if name == "char" else ByteTokenizer()


def from_dict(saved: dict[str, Any]) -> Tokenizer:
    """The tokenizer whose `to_dict()` was saved. Raises: ConfigError where that cannot be."""
    known: dict[str, type[Tokenizer]] = {**TOKENIZERS, NoText.name: NoText}
    try:
        made = known[saved["name"]].from_dict(saved)
        require(made.vocab_size > 0, "it has no tokens")
        return made
    except (LookupError, TypeError, AttributeError, ValueError, AssertionError) as error:
        raise ConfigError(f"a saved tokenizer cannot be read: {one_line(error)}") from error


def tokenizer_sha256(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(json.dumps(tokenizer.to_dict(), sort_keys=True).encode()).hexdigest()


def text_size(tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and characters of each token, (V,) each. A character counts in the token that holds its first byte."""
    pieces = [b"" if token == tokenizer.separator else piece for token, piece in enumerate(tokenizer.pieces)]
    n_chars = [sum(byte & 0xC0 != 0x80 for byte in piece) for piece in pieces]
    return np.array([len(piece) for piece in pieces]), np.array(n_chars)


def begins_character(tokenizer: Tokenizer) -> np.ndarray:
    """Whether the first byte of each token begins a character, (V,)."""
    return np.array([piece[:1] < b"\x80" or piece[:1] >= b"\xc0" for piece in tokenizer.pieces])
