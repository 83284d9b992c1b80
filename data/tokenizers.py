"""Text <-> token ids. A tokenizer of your own is one class and one entry in TOKENIZERS."""

from collections.abc import Iterable
from typing import Any, Protocol, Self

import numpy as np

from training.config import ConfigError


class Tokenizer(Protocol):
    vocab_size: int

    @classmethod
    def build(cls, text: str) -> Self: ...
    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self: ...
    def to_dict(self) -> dict[str, Any]: ...
    def encode(self, text: str) -> np.ndarray: ...
    def decode(self, tokens: Iterable[int]) -> str: ...


class CharTokenizer:
    """One token a character; the vocabulary is the sorted set of the characters of the whole corpus."""

    def __init__(self, chars: str) -> None:
        self.chars = chars
        self.vocab_size = len(chars)
        self.dtype = np.uint16 if self.vocab_size <= 2**16 else np.uint32
        points = code_points(chars)
        self.table = np.full(points.max(initial=0) + 2, -1, dtype=np.int32)  # code point -> token; the last: none
        self.table[points] = np.arange(self.vocab_size)

    @classmethod
    def build(cls, text: str) -> "CharTokenizer":
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


class ByteTokenizer:
    """One token a UTF-8 byte. A sequence of tokens need not be text: `decode` puts U+FFFD where it is not."""

    vocab_size = 256

    @classmethod
    def build(cls, text: str) -> "ByteTokenizer":
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


def code_points(text: str) -> np.ndarray:
    # surrogatepass: a command line that is not UTF-8 arrives as lone surrogates
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")  # (len(text),)


TOKENIZERS: dict[str, type[Tokenizer]] = {"char": CharTokenizer, "byte": ByteTokenizer}


def build_tokenizer(name: str, text: str) -> Tokenizer:
    """The tokenizer `data.tokenizer=name` for the corpus `text`."""
    return TOKENIZERS[name].build(text)


def from_dict(saved: dict[str, Any]) -> Tokenizer:
    """The tokenizer whose `to_dict()` was saved."""
    return TOKENIZERS[saved["name"]].from_dict(saved)
