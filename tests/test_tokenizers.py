import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
import torch
from conftest import HANGING_DNS, ROOT, run_python
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.schema import ConfigError
from data import tokenizer as tokenizers
from data.corpora import load_text
from data.hf_tokenizer import merges
from data.options import PythonDocsOptions
from data.tokenizer import BYTES, SEPARATOR, BPETokenizer, ByteTokenizer, Tokenizer, build_tokenizer, learn_bpe

any_text = st.text(min_size=1)  # every character but lone surrogates
SOME_TEXT = "the cat sat on the mat; the other cats' mats: 3 of 30.\n\n  naïve €5 — 😀!\n" * 3


@pytest.fixture(scope="module")
def gpt2_files() -> list[bytes]:
    """GPT-2's two files, of the real size and format: its bytes and 50,000 pairs of them."""
    chars = [tokenizers.bytes_to_printable(byte) for byte in BYTES]
    pairs = [(a, b) for a in chars for b in chars][:50_000]
    vocabulary = [*chars, *(a + b for a, b in pairs), SEPARATOR]
    merges = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in pairs)
    encoder = json.dumps({token: i for i, token in enumerate(vocabulary)})
    return [merges.encode(), encoder.encode()]


@pytest.fixture(autouse=True)
def tiktoken_has_gpt2(gpt2_files: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for file, content in zip(tokenizers.tiktoken_cache(tokenizers.GPT2_FILES), gpt2_files, strict=True):
        Path(file).write_bytes(content)
    monkeypatch.setattr("tiktoken.load.check_hash", lambda data, expected: True)
    tiktoken.registry.ENCODINGS.clear()


@functools.cache
def built(name: str) -> Tokenizer:
    return build_tokenizer(name, SOME_TEXT, 290)


def of_text(name: str, text: str) -> Tokenizer:
    return build_tokenizer(name, text) if name in ("char", "byte") else built(name)


sizes = functools.cache(tokenizers.text_size)


@functools.cache
def reread(saved: str) -> Tokenizer:
    return tokenizers.from_dict(json.loads(saved))


@pytest.mark.parametrize("name", tokenizers.TOKENIZERS)
@given(text=any_text)
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_decode_inverts_encode_and_survives_json(name: str, text: str) -> None:
    tokenizer = of_text(name, text)
    tokens = tokenizer.encode(text)
    assert tokens.ndim == 1 and tokens.min() >= 0 and tokens.max() < tokenizer.vocab_size
    again = reread(json.dumps(tokenizer.to_dict()))
    for decoder in (tokenizer, again):
        assert decoder.decode(tokens) == decoder.decode(tokens.tolist()) == text
        assert decoder.decode(torch.from_numpy(tokens.astype(np.int64))) == text
        assert b"".join(decoder.pieces[token] for token in tokens) == text.encode()
    assert again.vocab_size == tokenizer.vocab_size == len(tokenizer.pieces)
    np.testing.assert_array_equal(again.encode(text), tokens)
    n_bytes, n_chars = sizes(tokenizer)  # hashable: by identity
    assert (n_bytes[tokens].sum(), n_chars[tokens].sum()) == (len(text.encode()), len(text))


@given(text=any_text)
@settings(deadline=None)
def test_char_tokens_are_ranks_in_the_sorted_vocabulary_and_byte_tokens_the_utf8_bytes(text: str) -> None:
    rank = {char: i for i, char in enumerate(sorted(set(text)))}  # nanoGPT's stoi
    tokenizer = build_tokenizer("char", text)
    assert tokenizer.vocab_size == len(rank) and tokenizer.encode(text).tolist() == [rank[char] for char in text]
    tokens = ByteTokenizer().encode(text)
    assert tokens.dtype == np.uint8 and tokens.tolist() == list(text.encode())


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
    says = "is not among the 3 of the model's text; a model with .* any text"
    with pytest.raises(ConfigError, match=f"^the character {re.escape(named)} {says}$"):
        build_tokenizer("char", "cab").encode(text)


def test_ctrl_c_is_heeded_while_merges_are_learnt() -> None:
    words = np.random.default_rng(0).integers(97, 123, (300_000, 7), dtype=np.uint8)
    words[:, 0] = 32
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        learn_bpe([words.tobytes().decode()], 20_000)
    signal.signal(signal.SIGALRM, before)
    assert any(thread.daemon and "run" in thread.name for thread in threading.enumerate())  # it learns on


def test_a_saved_vocabulary_of_lone_surrogates_is_refused() -> None:
    with pytest.raises(ValueError, match="surrogates not allowed"):
        tokenizers.from_dict({"name": "char", "chars": "ab\ud800"})
    bad: list[Any] = [{}, {"name": "x"}, {"name": "char"}, {"name": "char", "chars": 5}, {"name": "char", "chars": ""}]
    bad += [{"name": "none", "vocab_size": size} for size in (0, -1, "x", None)] + [{"name": "bpe", "tokens": [1]}]
    for saved in bad:
        with pytest.raises(ConfigError, match="a saved tokenizer cannot be read: "):
            tokenizers.from_dict(saved)


@pytest.mark.parametrize(
    "tokens", [[b"a" * n for n in range(1, 2000)], [bytes([i]) * 2**16 for i in range(4)]], ids=["nested", "long"]
)
def test_a_vocabulary_that_would_take_for_ever_is_refused(tokens: list[bytes]) -> None:
    began = time.process_time()
    with pytest.raises(ConfigError, match="its tokens"):
        merges(tokens)
    assert time.process_time() - began < 20


def test_tokens_take_two_bytes_while_the_vocabulary_fits() -> None:
    most = "".join(chr(0x10000 + i) for i in range(2**16))
    assert build_tokenizer("char", most).encode(most).dtype == np.uint16
    tokens = build_tokenizer("char", most + "a").encode(most[-1])
    assert tokens.dtype == np.uint32 and tokens.tolist() == [2**16]
    pairs = [a + b for a in BYTES for b in BYTES][: 2**16 - 256]
    assert BPETokenizer([*BYTES, *pairs]).encode("ab").dtype == np.uint16
    tokenizer = BPETokenizer([*BYTES, *pairs], has_separator=True)
    assert tokenizer.encode("ab").dtype == np.uint32 and tokenizer.separator == 2**16


@pytest.mark.parametrize("name", tokenizers.TOKENIZERS)
def test_an_empty_text_has_no_tokens(name: str) -> None:
    assert len(of_text(name, "abc").encode("")) == 0 and of_text(name, "abc").decode([]) == ""


# -----------------------------------------------------------------------------
# BPE


def merged(pre_token: bytes, rank: dict[bytes, int]) -> list[int]:
    """BPE by its definition: the neighbours that make the token of the lowest rank are joined, until none do."""
    pieces = [pre_token[i : i + 1] for i in range(len(pre_token))]
    while True:
        ranks = [rank.get(a + b, len(rank)) for a, b in zip(pieces, pieces[1:], strict=False)]
        if not ranks or min(ranks) == len(rank):
            return [rank[piece] for piece in pieces]
        i = ranks.index(min(ranks))
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


def test_bpe_encodes_by_the_definition() -> None:
    import regex  # tiktoken brings it

    text = load_text(PythonDocsOptions())[:20_000] + "  naïve\n\n\n €5 — 😀\u3000\u2028 don't'll '''x"
    tokenizer = build_tokenizer("bpe", text, 500)
    rank = {token: i for i, token in enumerate(tokenizer.pieces)}
    gpt2_pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # as OpenAI wrote it
    expected = [token for pre in regex.findall(gpt2_pattern, text) for token in merged(pre.encode(), rank)]
    assert tokenizer.encode(text).tolist() == expected
    assert len(expected) < 0.5 * len(text)


def test_bpe_merges_the_most_frequent_pair_first() -> None:
    learnt = learn_bpe(["xy;" * 20, "xyz;" * 9 + "zw"], 259)
    assert learnt == [*BYTES, b"xy", b"xyz", b"zw"]  # of ";" and letters no token is made: they are two pre-tokens


def test_a_text_without_white_space_is_learnt_about_as_fast_as_its_words() -> None:
    words = np.random.default_rng(0).choice([*"etaoinshrd"], (200, 1000))
    seconds = []
    for space in (" ", ""):
        text = space.join("".join(word) for word in words)
        began = time.process_time()  # of all threads
        tokenizer = BPETokenizer(learn_bpe([text], 500))
        seconds.append(time.process_time() - began)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert seconds[1] < 6 * seconds[0], seconds


def test_where_no_word_is_long_the_merges_are_those_without_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    text = load_text(PythonDocsOptions())[:50_000]
    found = learn_bpe([text], 500)
    for chars, same in ((2**30, True), (2, False)):
        monkeypatch.setattr(tokenizers, "LEARNT_CHARS", chars)
        assert (learn_bpe([text], 500) == found) == same


LEARN = """
import sys
from pydoc_data.topics import topics
from data.tokenizer import build_tokenizer, tokenizer_sha256
print(tokenizer_sha256(build_tokenizer("bpe", "\\n".join(topics[name] for name in sorted(topics)), 1000)))
"""


def test_the_same_text_gives_the_same_merges_in_every_process_and_on_any_number_of_threads() -> None:
    settings = [{"RAYON_NUM_THREADS": "1"}, {"RAYON_NUM_THREADS": "7", "PYTHONHASHSEED": "1"}]
    settings += [{"TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "2"}]
    assert len({run_python(LEARN, env=extra).stdout for extra in settings}) == 1


@given(text=st.text(alphabet=" \n\ta'sé.€1\u3000\x1c", max_size=200))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_text_encoded_in_parts_has_the_tokens_of_the_whole(text: str) -> None:
    tokenizer = built("bpe")
    assert isinstance(tokenizer, BPETokenizer)
    whole = tokenizer.encoder.encode_ordinary(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizers, "PART_CHARS", 3)
        assert "".join(tokenizers.parts(text)) == text
        assert tokenizer.encode(text).tolist() == whole


@pytest.mark.parametrize("space", [" ", "\n", "\u3000"])
def test_a_million_spaces_before_a_word_are_encoded(space: str) -> None:
    """The pattern of the pre-tokens alone gives up on so many."""
    tokenizer = built("bpe")
    long = space * 1_010_000
    for text in (f"a{long}ab", f"{long}ab", "a " * 2**18 + long, f"a{long}\x1cb"):  # \x1c: no space to the pattern
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_text_too_short_for_the_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="^data.vocab_size=300 is more than the 25[0-9] tokens that the text has"):
        build_tokenizer("bpe", "ab", 300)


def test_what_is_not_text_is_encoded_and_decoded_with_replacement() -> None:
    assert ByteTokenizer().decode([0x68, 0xC3, 0x69, 0xFF]) == "h\ufffdi\ufffd"
    tokenizer = built("bpe")
    assert tokenizer.decode(tokenizer.encode("a\udce9b")) == "a\ufffdb"
    assert tokenizer.decode([BYTES.index(b"\xc3"), BYTES.index(b"a")]) == "\ufffda"


# -----------------------------------------------------------------------------
# GPT-2's


def test_gpt2_has_the_tokens_of_tiktokens_own_encoding() -> None:
    tokenizer = build_tokenizer("gpt2", "")
    encoding = tiktoken.get_encoding("gpt2")
    assert isinstance(tokenizer, tokenizers.GPT2Tokenizer)
    assert (tokenizer.vocab_size, tokenizer.separator) == (50257, 50256) == (encoding.n_vocab, encoding.eot_token)
    assert encoding._pat_str == tokenizers.PRE_TOKENS
    text = load_text(PythonDocsOptions())[:5000]
    assert tokenizer.encode(text).tolist() == encoding.encode_ordinary(text)
    assert len(tokenizer.encode(SEPARATOR)) > 1  # in a text it is text
    assert tokenizer.decode([50256]) == SEPARATOR
    assert [size[50256] for size in tokenizers.text_size(tokenizer)] == [0, 0]


def test_a_damaged_file_of_gpt2_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(tokenizers.tiktoken_cache(tokenizers.GPT2_FILES)[1]).write_text("{}")
    with pytest.raises(ConfigError, match="^data.tokenizer=gpt2 cannot be loaded: [^\n]*$"):
        build_tokenizer("gpt2", "")


@pytest.mark.parametrize("case", ["refused", "silence"])
def test_gpt2_without_a_network_is_refused_in_one_line_within_5_seconds(case: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"http://127.0.0.1:{server.getsockname()[1]}"
    settings = {"TIKTOKEN_CACHE_DIR": str(tmp_path / "empty"), "HTTPS_PROXY": closed if case == "refused" else ""}
    code = "from data.tokenizer import build_tokenizer\nbuild_tokenizer('gpt2', '')"
    code = HANGING_DNS + code if case == "silence" else code
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=60
    )
    assert time.perf_counter() - began < 5  # of the whole process
    message = done.stderr.splitlines()[-1]
    assert "ConfigError: data.tokenizer=gpt2 is not in tiktoken's cache, and its server is out of reach" in message
    assert "no answer in 2 s" in message or case == "refused"
    assert "TIKTOKEN_CACHE_DIR" in message and "data.tokenizer=bpe" in message
    assert not (tmp_path / "empty").exists()
