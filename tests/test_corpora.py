import hashlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import HANGING_DNS, run_python
from helpers.fineweb import write_parquet

from core.schema import ConfigError
from data import corpora
from data.corpora import load_text
from data.options import PythonDocsOptions, TextFileOptions, TinyShakespeareOptions

REAL_DATA = os.environ.get("NANOQK_DATA")


@pytest.fixture
def shakespeare() -> bytes:
    """The text in $NANOQK_DATA."""
    if not REAL_DATA:
        if os.environ.get("CI"):
            pytest.fail("NANOQK_DATA must name a folder with tiny_shakespeare/input.txt in CI")
        pytest.skip("NANOQK_DATA is not set")
    return (Path(REAL_DATA) / "tiny_shakespeare" / "input.txt").read_bytes()


@pytest.fixture(autouse=True)
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NANOQK_DATA", "HF_HUB_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def write(path: Path, raw: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return path


def hub_folder(root: Path, text: str) -> Path:
    """A local copy of the Hub's repository as refs/convert/parquet lays it out, of `text` cut in unequal parts."""
    cuts = [0, int(0.9 * len(text)), int(0.95 * len(text)), len(text)]
    for i, split in enumerate(("train", "validation", "test")):
        write_parquet(root / "default" / split / "0000.parquet", text=[text[cuts[i] : cuts[i + 1]]])
    return root


# -----------------------------------------------------------------------------
# python_docs and text


def test_python_docs_holds_every_topic_in_sorted_order_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    from pydoc_data.topics import topics

    monkeypatch.setattr(socket, "socket", None)
    text = load_text(PythonDocsOptions())
    end = 0
    for name in sorted(topics):
        start = text.index(topics[name], end)
        assert start - end <= 1
        end = start + len(topics[name])
    assert end == len(text) > 100_000


def test_python_docs_without_pydoc_data_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ConfigError, match="^data=python_docs needs the module pydoc_data.topics.*data=text data.path"):
        load_text(PythonDocsOptions())


def test_text_is_the_file_byte_for_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = "\ufeffline\r\n\u2028é\t𝄞\r\0\n".encode()
    write(tmp_path / "my.txt", raw)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_text(TextFileOptions(path=str(tmp_path / "my.txt"))).encode() == raw
    assert load_text(TextFileOptions(path="~/my.txt")).encode() == raw


# -----------------------------------------------------------------------------
# Tiny Shakespeare, found locally


@pytest.mark.parametrize("place", ["tiny_shakespeare/input.txt", "tiny_shakespeare", ""])
def test_data_path_takes_the_file_its_folder_or_the_folder_above(shakespeare: bytes, place: str) -> None:
    assert load_text(TinyShakespeareOptions(path=os.path.join(REAL_DATA or "", place))).encode() == shakespeare


def test_nanoqk_data_and_cache_are_found(shakespeare: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_cache = write(tmp_path / "cache" / "nanoqk" / "tiny_shakespeare" / "input.txt", shakespeare)
    monkeypatch.setenv("NANOQK_DATA", str(tmp_path / "nothing_here"))
    assert load_text(TinyShakespeareOptions()).encode() == shakespeare
    in_cache.unlink()
    monkeypatch.setenv("NANOQK_DATA", str(REAL_DATA))
    assert load_text(TinyShakespeareOptions()).encode() == shakespeare


def test_data_path_comes_before_nanoqk_data_before_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Three impostors: the one that is refused is the one that was read.
    by_path = write(tmp_path / "a.txt", b"by path")
    by_env = write(tmp_path / "env" / "tiny_shakespeare" / "input.txt", b"by environment")
    by_cache = write(tmp_path / "cache" / "nanoqk" / "tiny_shakespeare" / "input.txt", b"by cache")
    monkeypatch.setenv("NANOQK_DATA", str(tmp_path / "env"))
    advice = "data=text data.path=FILE takes any text$"
    with pytest.raises(ConfigError, match=f"^data.path={by_path} is not Tiny Shakespeare: it has 7 bytes.*{advice}"):
        load_text(TinyShakespeareOptions(path=str(by_path)))
    with pytest.raises(ConfigError, match=f"^{by_env} is not Tiny Shakespeare: it has 14 bytes.*{advice}"):
        load_text(TinyShakespeareOptions())
    by_env.unlink()
    with pytest.raises(ConfigError, match=f"^{by_cache} is not .* {hashlib.sha256(b'by cache').hexdigest()}.*{advice}"):
        load_text(TinyShakespeareOptions())


def test_one_changed_byte_is_refused(shakespeare: bytes, tmp_path: Path) -> None:
    file = write(tmp_path / "input.txt", shakespeare[:-1] + bytes([shakespeare[-1] ^ 1]))
    with pytest.raises(ConfigError, match="has 1115394 bytes and SHA-256"):
        load_text(TinyShakespeareOptions(path=str(file)))


def test_an_explicit_path_is_not_replaced(shakespeare: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOQK_DATA", str(REAL_DATA))
    with pytest.raises(ConfigError, match=r"^data.path=nowhere does not exist$"):
        load_text(TinyShakespeareOptions(path="nowhere"))
    with pytest.raises(ConfigError, match=f"^data.path={tmp_path} holds neither input.txt nor"):
        load_text(TinyShakespeareOptions(path=str(tmp_path)))


# -----------------------------------------------------------------------------
# Tiny Shakespeare, through `datasets`


@pytest.fixture
def hub(shakespeare: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The Hub played by a local folder; the list records each probe."""
    probes: list[str] = []
    monkeypatch.setattr(corpora, "HUB_REPO", str(hub_folder(tmp_path / "repo", shakespeare.decode())))
    monkeypatch.setattr(corpora, "probe_hub", lambda: probes.append("asked"))
    return probes


def test_a_fetched_text_is_cached_and_fetched_once_or_where_it_cannot_be_costs_a_warning_only(
    hub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    first = load_text(TinyShakespeareOptions())
    assert "examples/s" not in capfd.readouterr().err  # no progress bars
    folder = tmp_path / "cache" / "nanoqk" / "tiny_shakespeare"
    assert {f.name for f in folder.iterdir()} == {"input.txt", "input.txt.lock"}
    assert (folder / "input.txt").read_bytes() == first.encode()
    assert load_text(TinyShakespeareOptions()) == first and hub == ["asked"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(write(tmp_path / "a_file", b"")))
    with pytest.warns(UserWarning, match="input.txt cannot be written, the next run downloads again"):
        assert load_text(TinyShakespeareOptions()) == first
    monkeypatch.setattr(corpora, "HUB_REPO", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="^data=tiny_shakespeare from the Hugging Face Hub cannot be loaded: [^\n]*$"):
        load_text(TinyShakespeareOptions())


def test_processes_that_start_together_download_once(hub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for the first. Threads stand for processes: each opens the lock file itself."""
    download, ready = corpora.download_tiny_shakespeare, threading.Barrier(3)
    downloads: list[bytes] = []

    def counted() -> bytes:
        downloads.append(download())
        return downloads[-1]

    monkeypatch.setattr(corpora, "probe_hub", lambda: [ready.wait(), None][1])  # all have found no file
    monkeypatch.setattr(corpora, "download_tiny_shakespeare", counted)
    with ThreadPoolExecutor(3) as threads:
        texts = set(threads.map(load_text, [TinyShakespeareOptions()] * 3))
    assert len(downloads) == len(texts) == 1


LOAD = """
import sys
from data.corpora import load_text
from core.schema import ConfigError
from data.options import TinyShakespeareOptions
try:
    load_text(TinyShakespeareOptions())
except ConfigError as error:
    print(error)
print("datasets" in sys.modules)
"""


@pytest.fixture
def servers() -> Iterator[dict[str, str]]:
    """closed: refuses connections. silent: accepts them (into its backlog) and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            ports = {"closed": closed.getsockname()[1], "silent": silent.getsockname()[1]}
        yield {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("HF_ENDPOINT", "closed", "refused"),
        ("HTTPS_PROXY", "closed", "refused"),
        ("HF_ENDPOINT", "silent", "no answer in 2 s|[Tt]ime"),
        ("HF_ENDPOINT", "http://hanging.invalid", "no answer in 2 s"),
        ("HF_ENDPOINT", "http://hub.invalid", "no answer in 2 s|[Nn]ame"),
        ("HF_HUB_OFFLINE", "1", "offline"),
    ],
)
def test_without_a_network_one_line_says_what_to_do_within_5_seconds(
    variable: str, value: str, reason: str, servers: dict[str, str], tmp_path: Path
) -> None:
    code = HANGING_DNS + LOAD if "hanging" in value else LOAD
    began = time.perf_counter()
    message, datasets_imported = run_python(code, env={variable: servers.get(value, value)}).stdout.splitlines()
    seconds = time.perf_counter() - began  # of the whole process: an abandoned probe must not hold up its exit
    assert message.startswith(f"data=tiny_shakespeare is not at {tmp_path}/cache/nanoqk/tiny_shakespeare/input.txt")
    folder = "a folder with tiny_shakespeare/input.txt"
    assert message.endswith(f"set data.path or NANOQK_DATA to {folder}, or use data=python_docs")
    assert re.search(reason, message), message
    assert datasets_imported == "False"
    assert seconds < 5
