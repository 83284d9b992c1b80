import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.tokenizers import TOKENIZERS, ByteTokenizer, CharTokenizer, build_tokenizer, from_dict
from training.config import ConfigError

any_text = st.text(min_size=1)  # every character but lone surrogates


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=any_text)
@settings(deadline=None, max_examples=50)
def test_decode_inverts_encode_and_survives_json(name: str, text: str) -> None:
    tokenizer = build_tokenizer(name, text)
    tokens = tokenizer.encode(text)
    assert tokens.ndim == 1 and tokens.min() >= 0 and tokens.max() < tokenizer.vocab_size
    again = from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    for decoder in (tokenizer, again):
        assert decoder.decode(tokens) == decoder.decode(tokens.tolist()) == text
        assert decoder.decode(torch.from_numpy(tokens.astype(np.int64))) == text
    assert again.vocab_size == tokenizer.vocab_size
    np.testing.assert_array_equal(again.encode(text), tokens)


@given(text=any_text)
@settings(deadline=None)
def test_char_tokens_are_ranks_in_the_sorted_vocabulary(text: str) -> None:
    rank = {char: i for i, char in enumerate(sorted(set(text)))}  # nanoGPT's stoi
    tokenizer = CharTokenizer.build(text)
    assert tokenizer.vocab_size == len(rank)
    assert tokenizer.encode(text).tolist() == [rank[char] for char in text]


@given(text=any_text)
def test_byte_tokens_are_the_utf8_bytes(text: str) -> None:
    tokens = ByteTokenizer().encode(text)
    assert tokens.dtype == np.uint8
    assert tokens.tolist() == list(text.encode())


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("abd", r"'d' (U+0064)"),  # past the last code point
        ("aAb", r"'A' (U+0041)"),  # before the first
        ("a\nb", r"'\n' (U+000A)"),
        ("ab𝄞", "'𝄞' (U+1D11E)"),
        ("a\udce9", r"'\udce9' (U+DCE9)"),  # a byte of a command line that is not UTF-8
    ],
)
def test_an_unknown_character_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"^the character {re.escape(named)} is not among the 3 that the corpus has$"):
        CharTokenizer.build("cab").encode(text)


def test_a_byte_sequence_that_is_not_utf8_decodes_with_replacement() -> None:
    assert ByteTokenizer().decode([0x68, 0xC3, 0x69, 0xFF]) == "h\ufffdi\ufffd"


def test_char_tokens_take_two_bytes_while_the_vocabulary_fits() -> None:
    most = "".join(chr(0x10000 + i) for i in range(2**16))
    assert CharTokenizer.build(most).encode(most).dtype == np.uint16
    more = most + "a"
    tokenizer = CharTokenizer.build(more)
    assert tokenizer.encode(more).dtype == np.uint32
    assert tokenizer.encode(most[-1]).tolist() == [2**16]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_empty_text_has_no_tokens(name: str) -> None:
    tokenizer = build_tokenizer(name, "abc")
    assert len(tokenizer.encode("")) == 0
    assert tokenizer.decode([]) == ""
