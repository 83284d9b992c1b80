"""Turn FineWeb, or any data set with a text column, into shards: python data/prepare_fineweb.py max_tokens=1000000000

data/shards.py describes the files. The result depends on the settings and the data set only. A killed preparation
continues with the same command: progress.json says how much is done.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import sys
import time
import zlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from core.cli import run_script
from core.files import (
    ANYWHERE,
    LINES_BYTES,
    WHOLE_BYTES,
    FileLock,
    cache_folder,
    expand,
    is_leftover,
    open_regular,
    parse_object,
    read_json,
    read_regular,
    unpacked,
    write_atomic,
    write_json,
)
from core.process import available_cpus, say
from core.schema import ConfigError, differences, one_line, require, show
from data.corpora import decoded, probe_hub, read_bytes
from data.options import PrepareFineWebConfig
from data.shards import FORMAT, INDEX, PROGRESS, SPLITS, TOKENIZER, parse_index, read_tokenizer
from data.tokenizer import BPETokenizer, GPT2Tokenizer, Tokenizer, fetch_gpt2, learn_bpe, token_dtype, tokenizer_sha256

SAVE_SECONDS = 5.0
PRINT_SECONDS = 30.0  # between two states of the progress bar in a log
LEARN_BYTES = 100_000_000  # of text that tokenizer=bpe learns from
BATCH_CHARS, BATCH_DOCUMENTS = 2**20, 1024  # a thread's task ends at the first limit that it reaches

TIMES = "times.json"  # of the files that finished shards were made of; index.json depends on their content alone
CHANGED = "is not what {} was begun on: its files have changed; use another folder"

Position = dict[str, Any]  # of the stream of `datasets`, between two documents
Document = tuple[np.ndarray, int, bool]  # tokens, bytes of its text in UTF-8, whether it is held out
Batches = Iterable[tuple[list[Document], Position]]  # some documents at a time, and the position after them


def prepare(config: PrepareFineWebConfig) -> int:
    out = cache_folder() / "fineweb" if config.out is None else expand(config.out)
    dataset = expand(config.dataset).resolve()
    require(dataset not in [out.resolve(), *out.resolve().parents], f"out={out} must not lie in dataset={dataset}")
    if finish_if_complete(out, config):
        return 0
    documents = open_documents(config, begun=read_json(out / PROGRESS).get("source", {}))
    tokenizer = open_or_learn_tokenizer(out, config, documents)
    try:
        lock = FileLock(out / "lock", timeout=0)
    except OSError as error:
        raise ConfigError(f"out={out} cannot be written: {error.strerror}") from error
    with lock:
        require(lock.held, f"out={out} is in use by another process")
        # again: another process may have written before this one had the lock
        return 0 if finish_if_complete(out, config) else write_shards(out, config, documents, tokenizer)


def finish_if_complete(out: Path, config: PrepareFineWebConfig) -> bool:
    """Whether all shards are there; then leftovers are removed, and a summary is printed. Raises: ConfigError for a
    folder with other files, or one that was begun with other settings."""
    try:
        names = set(os.listdir(out)) if out.exists() else set()
        raw = read_regular(out / (INDEX if INDEX in names else PROGRESS))
        begun = {**parse_object(raw)["settings"]}
        index = parse_index(out, raw) if INDEX in names else {}
        said = summary(index) if index else ""
    except FileNotFoundError:
        own = all(name == "lock" or is_leftover(name, PROGRESS) for name in names)
        require(own, f"out={out} is neither empty nor a folder of token shards")
        return False
    except OSError as error:
        raise ConfigError(f"out={out} cannot be used: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"out={out} holds a damaged {PROGRESS} or {INDEX}: remove the folder") from error
    changes = differences({key: begun.get(key) for key in config.settings}, config.settings)
    require(not changes, f"out={out} was begun with other settings: {', '.join(changes)}; use another folder")
    if said:
        folder, times = expand(config.dataset), read_json(out / TIMES).get("times")  # an earlier version wrote none
        same = {**index["source"], **source_of(folder)} == index["source"] and times in (None, times_of(folder))
        require(same or not folder.is_dir(), f"dataset={config.dataset} {CHANGED.format(out)}")
        clean_up(out)
        say(f"{out} is complete: {said}")
    return said != ""


def write_shards(out: Path, config: PrepareFineWebConfig, documents: "Source", tokenizer: Tokenizer) -> int:
    state, sha256 = load_progress(out, config, documents), tokenizer_sha256(tokenizer)
    same = state.setdefault("tokenizer_sha256", sha256) == sha256
    require(same, f"{out / TOKENIZER} was changed since {PROGRESS} was written: remove the folder")
    if not (out / TOKENIZER).exists():
        write_json(out / TOKENIZER, tokenizer.to_dict(), indent=1)
    dtype = np.dtype(token_dtype(tokenizer.vocab_size))
    writers = {split: ShardWriter(out, split, dtype, config.shard_tokens, state[split]) for split in SPLITS}
    with contextlib.closing(tokenised(documents, state["stream"], tokenizer, config)) as batches:
        write_documents(out, config.max_tokens, state, writers, batches)
    load_progress(out, config, documents)  # refuses files that have changed meanwhile
    write_json(out / TIMES, {"times": state.get("times")})
    index: dict[str, Any] = {
        "format": FORMAT, "settings": config.settings, "source": documents.source, "dtype": dtype.name,
        "vocab_size": tokenizer.vocab_size, "tokenizer_sha256": sha256,
    }  # fmt: skip
    index |= {split: writer.finish() for split, writer in writers.items()}
    write_json(out / INDEX, index, indent=1)  # whose SHA-256 is the corpus's
    clean_up(out)
    say(f"{out}: {summary(index)}")
    for split in SPLITS:
        if index[split]["tokens"] < 2:
            say(f"warning: {split} is empty: data=fineweb refuses these shards; change val_fraction= or max_tokens=")
    return 0


def load_progress(out: Path, config: PrepareFineWebConfig, documents: "Source") -> dict[str, Any]:
    """The content of progress.json, which is written where there is none. stream: a Position after `documents`."""
    times = times_of(expand(config.dataset))
    if state := read_json(out / PROGRESS):
        same = state.get("source") == documents.source and state.get("times", times) == times
        require(same, f"dataset={config.dataset} {CHANGED.format(out)}")
        require(fits(state), f"out={out} holds a damaged {PROGRESS}: remove the folder")
        return state
    state = {"settings": config.settings, "source": documents.source, "times": times, "documents": 0, "stream": None}
    state |= {split: {"shards": [], "tokens": 0, "documents": 0, "bytes": 0} for split in SPLITS}
    write_json(out / PROGRESS, state)
    return state


def fits(state: dict[str, Any]) -> bool:
    """Whether a progress.json has what load_progress() writes."""
    try:
        counts = [state[split][key] for split in SPLITS for key in ("tokens", "documents", "bytes")]
        counts += [
            {**shard}[key] for split in SPLITS for shard in state[split]["shards"] for key in ("tokens", "bytes")
        ]
        counts += [state["documents"], {"files": 0, **(state["stream"] or {})}["files"]]
    except (KeyError, TypeError):
        return False
    return all(type(count) is int and count >= 0 for count in counts)


def write_documents(
    out: Path, max_tokens: int | None, state: dict[str, Any], writers: dict[str, "ShardWriter"], batches: Batches
) -> None:
    """Write the documents up to the one that reaches `max_tokens`, and save the progress now and then."""
    n_tokens = sum(writer.total("tokens") for writer in writers.values())
    if state["documents"]:
        say(f"{out}: continues after {state['documents']:,} documents, {n_tokens:,} tokens")
    saved, interval = time.monotonic(), 0.1 if sys.stderr.isatty() else PRINT_SECONDS
    with tqdm(total=max_tokens, initial=n_tokens, unit="tok", unit_scale=True, mininterval=interval) as bar:
        for documents, stream in batches:
            for tokens, n_bytes, held_out in documents:
                writers["val" if held_out else "train"].add(tokens, n_bytes)
                n_tokens += len(tokens)
                state["documents"] += 1
                bar.update(len(tokens))
                if max_tokens is not None and n_tokens >= max_tokens:
                    return
            if time.monotonic() - saved > SAVE_SECONDS:  # all files and `stream` end after the same document
                state |= {"stream": stream, **{split: writer.flushed_state() for split, writer in writers.items()}}
                write_json(out / PROGRESS, state)
                saved = time.monotonic()


def summary(index: dict[str, Any]) -> str:
    source = index["source"]
    files = f"; {source['files']:,} files, each a document" if "documents" in source else ""
    parts = (
        f"{split}: {part['documents']:,} documents, {part['tokens']:,} tokens, {part['bytes']:,} bytes, "
        f"{len(part['shards'])} shards"
        for split, part in ((split, index[split]) for split in SPLITS)
    )
    return "; ".join(parts) + files


def clean_up(out: Path) -> None:
    """Remove the files that only an unfinished preparation needs."""
    written = rf"{PROGRESS}|{TIMES}|{INDEX}|{TOKENIZER}|({'|'.join(SPLITS)})_\d+\.bin"
    for name in os.listdir(out):
        if name == PROGRESS or is_leftover(name, written):
            (out / name).unlink()


# -----------------------------------------------------------------------------
# Documents in

KINDS = {  # of a folder's files -> how their names end
    "texts": (".txt", ".txt.gz", ".md"),
    "parquet": (".parquet",),
    "JSON": (".json", ".jsonl", ".json.gz", ".jsonl.gz"),
}
CARD = ("README.md", "LICENSE", "LICENSE.md", "LICENSE.txt")  # what a copy from the Hub has beside its rows
ARE_READ = "read are .txt, .txt.gz and .md files, each a document, or .parquet, or .json and .jsonl files with rows"


class TextFiles:
    """The texts of a folder, a document a file, in the order of their names. source: their names and sizes."""

    def __init__(self, config: PrepareFineWebConfig, folder: Path, files: list[Path]) -> None:
        of_rows = "is for rows: the files of this folder are texts"
        for key, default in (("name", None), ("split", "train"), ("column", "text")):
            value = getattr(config, key)
            require(value == default, f"{key}={value} {of_rows}")
        try:
            self.files, self.source = files, {**source_of(folder), "documents": "files"}
        except OSError as error:  # a link to nothing
            raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error

    def batches(self, stream: Position | None) -> Iterator[tuple[list[str], Position]]:
        """Some texts at a time, and the position after them. Raises: ConfigError where a file is no UTF-8 text."""
        texts: list[str] = []
        size = 0
        for n, file in enumerate(self.files, 1):
            if n <= (0 if stream is None else stream["files"]):
                continue
            texts.append(read_document(file))
            size += len(texts[-1])
            if size >= BATCH_CHARS or len(texts) >= BATCH_DOCUMENTS or n == len(self.files):
                yield texts, {"files": n}
                texts, size = [], 0


def read_document(file: Path) -> str:
    packed = file.suffix.lower() == ".gz"
    try:
        return decoded(unpacked(file, ANYWHERE) if packed else read_bytes(file, str(file)), str(file))
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{file} cannot be unpacked: {error}") from error


class Documents:
    """The texts of a data set, streamed in its own order. source: {"revision": …} on the Hub, or the files of a folder.

    begun: the source of the preparation that continues, whose revision is used again. files: of the folder, all of one
    kind. Raises: ConfigError.
    """

    def __init__(self, config: PrepareFineWebConfig, begun: dict[str, Any], files: Iterable[str] = ()) -> None:
        self.config = config
        folder, name = expand(config.dataset), config.settings["name"]
        if not folder.is_dir():
            problem = probe_hub(config.dataset, None)
            absent = f"is no folder here, and the Hugging Face Hub does not give it ({problem})"
            require(problem is None, f"dataset={config.dataset} {absent}: dataset=FOLDER takes a folder of files")
        try:
            import datasets
            import pyarrow.parquet as pq
            from huggingface_hub import HfApi

            datasets.disable_progress_bars()
            self.source: dict[str, Any] = source_of(folder) if folder.is_dir() else {"revision": begun.get("revision")}
            if not folder.is_dir() and not self.source["revision"]:
                self.source["revision"] = HfApi().dataset_info(config.dataset, expand=["sha"], timeout=10).sha
            path, where = config.dataset, {"revision": self.source.get("revision")}
            kinds, parts = {kind_of(file) for file in files}, dict[str, list[str]]()
            pattern = next((name for name in (str(folder), *files) if kinds and re.search(r"[*?[]|::", name)), None)
            require(pattern is None, f"{pattern} has *, ?, [ or ::, which reads as a pattern: rename it")
            if kinds:  # not what a file of the folder names, which lies anywhere
                (kind,), found = kinds, datasets.data_files.get_data_patterns(str(folder))
                every = datasets.data_files.DataFilesDict.from_patterns(found, base_path=str(folder))
                parts = {str(split): [file for file in of if kind_of(file) == kind] for split, of in every.items()}
                path, where = kind.lower(), {"data_files": {split: of for split, of in parts.items() if of}}
            if kinds == {"JSON"}:
                require(bool(parts.get(config.split)), f"split={config.split} must be one of {', '.join(parts)}")
                self.source["rows"] = "json"  # of an earlier version the positions were others
                rows_of = {"files": parts[config.split], "column": config.column}
                self.rows = datasets.IterableDataset.from_generator(json_rows, gen_kwargs=rows_of)
            else:
                self.rows = datasets.load_dataset(path, name, split=config.split, streaming=True, **where)
            first = next(iter(self.rows.take(1)), None)
        except Exception as error:  # the errors of datasets, its network stack and pyarrow share no base class
            chosen = f"dataset={config.dataset} name={show(name)} split={config.split}"
            raise ConfigError(f"{chosen} cannot be loaded: {one_line(error)}") from error
        lines = "holds texts, which would be read line by line: download them, and give their folder"
        require(self.rows.info.builder_name != "text", f"dataset={config.dataset} {lines}")
        if self.rows.num_shards < len([*files]):  # files are parts of a split by their names, or of none
            say(f"note: split={config.split} is {self.rows.num_shards} of the {len([*files])} files in {folder}")
        if first is None:
            raise ConfigError(f"dataset={config.dataset} is empty")
        require(config.column in first, f"column={config.column} must be one of {', '.join(first)}")
        kind = type(first[config.column]).__name__
        require(kind in ("str", "NoneType"), f"column={config.column} must hold text, not {kind}")
        for file in parts.get(config.split, []) if kinds == {"parquet"} else []:
            found = pq.read_schema(file)  # `datasets` makes texts of another file's numbers and dates
            texts = config.column in found.names and "string" in str(found.field(config.column).type)
            require(texts, f"column={config.column} of {file} must hold text")
        self.rows = self.rows.select_columns([config.column])

    def batches(self, stream: Position | None) -> Iterator[tuple[list[str], Position]]:
        """Some texts at a time, and the position after them. Begins at the position `stream`; skips null rows.
        Raises: ConfigError at a row of another type."""
        if stream is not None:
            self.rows.load_state_dict(stream)
        texts: list[str] = []
        size = 0
        try:
            for row in self.rows:
                if (text := row[self.config.column]) is not None:
                    require(isinstance(text, str), f"column={self.config.column} must hold text, not {show(text)[:50]}")
                    texts.append(text)
                    size += len(text)
                if size >= BATCH_CHARS or len(texts) >= BATCH_DOCUMENTS:
                    yield texts, self.rows.state_dict()
                    texts, size = [], 0
        except ConfigError:
            raise
        except Exception as error:
            raise OSError(f"dataset={self.config.dataset}: {one_line(error)}; the same command goes on") from error
        if texts:
            yield texts, self.rows.state_dict()


def json_rows(files: list[str], column: str) -> Iterator[dict[str, Any]]:
    """The rows of files with a list, or with a row a line, as they are: `datasets` takes the texts of a file for dates
    or numbers where all of them can be. Raises: ConfigError."""
    import fsspec

    parse = partial(json.loads, object_pairs_hook=without_doubles)
    for file in files:
        try:
            with fsspec.open(file, "rt", encoding="utf-8-sig", compression="infer") as opened:
                lines = iter(partial(opened.readline, WHOLE_BYTES), "")  # a part of a longer one is no JSON
                head = next((line for line in lines if line.strip()), "[]")
                if head.lstrip().startswith("["):
                    rows: Iterable[Any] = parse(head + opened.read(LINES_BYTES))
                else:
                    rows = map(parse, filter(str.strip, itertools.chain([head], lines)))
                for n, row in enumerate(rows):
                    require(isinstance(row, dict), f"{file} holds row {n}, which is no object")
                    require(n > 0 or column in row, f"column={column} must be one of {', '.join(row)}, as in {file}")
                    yield {column: None, **row}
        except ConfigError:
            raise
        except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
            raise ConfigError(f"{file} cannot be read: {one_line(error)}") from error


def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises: ValueError where a key has two values, of which Python would take the last one."""
    names = [name for name, _ in pairs]
    if len({*names}) < len(names):
        raise ValueError(f"an object has several values of {show(max(names, key=names.count))}")
    return dict(pairs)


Source = Documents | TextFiles


def open_documents(config: PrepareFineWebConfig, begun: dict[str, Any]) -> Source:
    """The documents of dataset=. Raises: ConfigError, also for a folder with files of two kinds, or of another one."""
    folder, told = expand(config.dataset), f"dataset={config.dataset} cannot be loaded: it holds"
    if not folder.is_dir():
        return Documents(config, begun)
    files = visible_files(folder)
    if {"parquet", "JSON"} & {*map(kind_of, files)}:
        files = {name: file for name, file in files.items() if name not in CARD}
    first = {kind_of(name): name for name in reversed(files)}
    require(len(first) > 0, f"{told} no file; {ARE_READ}")
    cards = [file for file in (folder / "README.md", folder / ".huggingface.yaml") if file.exists()]
    card = next((file.name for file in cards if re.search("data_(files|dir)", read_document(file))), None)
    require(card is None or "texts" in first, f"{told} a {card} that names files, here or elsewhere: move it away")
    require("" not in first, f"{told} {first.get('')}; {ARE_READ}")
    both = " and ".join(f"{name} ({kind})" for kind, name in first.items())
    require(len(first) == 1, f"{told} {both}: give a folder with files of one kind")
    return TextFiles(config, folder, [*files.values()]) if "texts" in first else Documents(config, begun, [*files])


def kind_of(name: str) -> str:
    """The kind of a file, one of KINDS; "" for others."""
    return next((kind for kind, endings in KINDS.items() if name.lower().endswith(endings)), "")


def visible_files(folder: Path) -> dict[str, Path]:
    """The files of a folder, without hidden ones, by their sorted names within it; {} for none. Raises: ConfigError
    where a folder in it is a link, or cannot be read."""

    def refuse(error: OSError) -> None:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}")

    found: dict[str, Path] = {}
    for place, folders, names in os.walk(folder, onerror=refuse) if folder.is_dir() else ():
        folders[:] = [name for name in folders if not name.startswith(".")]
        linked = next((name for name in folders if Path(place, name).is_symlink()), None)
        told = "a link to a folder, which is not read: move it away, or copy it"
        require(linked is None, f"{folder} holds {Path(place, linked or '').relative_to(folder)}, {told}")
        files = [Path(place, name) for name in names if not name.startswith(".")]
        found |= {str(file.relative_to(folder)): file for file in files}
    return dict(sorted(found.items()))


def source_of(folder: Path) -> dict[str, Any]:
    """The names and sizes of a folder's files. A position in the stream refers to these files."""
    sizes = [(name, file.stat().st_size) for name, file in visible_files(folder).items()]
    return {"files": len(sizes), "names_and_sizes_sha256": hashlib.sha256(json.dumps(sizes).encode()).hexdigest()}


def utf8(text: str) -> bytes:
    """Raises: ConfigError for a text that holds half a character, as JSON can write it."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half, near = ascii(text[error.start]), ascii(text[max(0, error.start - 20) : error.end + 20])
        raise ConfigError(f"a document holds {half}, which is half a character, in {near}") from error


def times_of(folder: Path) -> str:
    """A hash of when a folder's files were changed last."""
    times = [file.stat().st_mtime_ns for file in visible_files(folder).values()]
    return hashlib.sha256(json.dumps(times).encode()).hexdigest()


def is_held_out(text: bytes, fraction: float) -> bool:
    """By a hash of the text, so that all copies of a document are in the same split."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) < fraction * 2**64


def open_or_learn_tokenizer(out: Path, config: PrepareFineWebConfig, documents: Source) -> Tokenizer:
    """A BPE tokenizer is learnt from the first training documents, none of them held out."""
    if (out / TOKENIZER).exists():
        return read_tokenizer(out / TOKENIZER)
    if config.tokenizer == "gpt2":
        return GPT2Tokenizer(fetch_gpt2("tokenizer"), has_separator=True)
    vocab_size, learnt_from, size = config.settings["vocab_size"], [], 0
    for text in (text for texts, _ in documents.batches(None) for text in texts):
        raw = utf8(text)
        if not is_held_out(raw, config.val_fraction):
            learnt_from.append(text)
            size += len(raw)
        if size >= LEARN_BYTES:
            break
    try:
        return BPETokenizer(learn_bpe(learnt_from, vocab_size - 1), has_separator=True)
    except ConfigError as error:
        raise ConfigError(f"vocab_size={vocab_size} is too large for {size} bytes of text") from error


# -----------------------------------------------------------------------------
# Tokens: threads encode, in the order of the documents


def tokenised(
    documents: Source, stream: Position | None, tokenizer: Tokenizer, config: PrepareFineWebConfig
) -> Generator[tuple[list[Document], Position], None, None]:
    """The documents from the position `stream` on."""
    workers = config.workers or available_cpus()
    pending: deque[tuple[Future[list[Document]], Position]] = deque()
    with ThreadPoolExecutor(workers) as pool:  # tiktoken releases Python's lock
        for texts, position in documents.batches(stream):
            pending.append((pool.submit(encode, texts, tokenizer, config.val_fraction), position))
            if len(pending) > 2 * workers:
                encoded, position = pending.popleft()
                yield encoded.result(), position
        for encoded, position in pending:
            yield encoded.result(), position


def encode(texts: list[str], tokenizer: Tokenizer, val_fraction: float) -> list[Document]:
    end = np.array([tokenizer.separator], dtype=token_dtype(tokenizer.vocab_size))
    documents = []
    for text in texts:
        raw = utf8(text)
        tokens = np.concatenate([tokenizer.encode(text), end])
        documents.append((tokens, len(raw), is_held_out(raw, val_fraction)))
    return documents


# -----------------------------------------------------------------------------
# Shards out


class ShardWriter:
    """The shards of one split. `state` lists the complete ones and says how much of the current one is valid: what was
    written after the state was saved is cut off, and the same documents are written again."""

    def __init__(self, out: Path, split: str, dtype: np.dtype, limit: int, state: dict[str, Any]) -> None:
        self.out, self.split, self.dtype, self.limit = out, split, dtype, limit
        self.shards: list[dict[str, Any]] = list(state["shards"])
        self.current: dict[str, int] = {key: state[key] for key in ("tokens", "documents", "bytes")}
        self.digest = hashlib.sha256()  # of the current shard
        self.stream: BinaryIO | None = self.reopen(state.get("sha256")) if self.current["tokens"] else None

    @property
    def file(self) -> Path:
        return self.out / f"{self.split}_{len(self.shards):06d}.bin"

    def total(self, key: str) -> int:
        return self.current[key] + sum(shard[key] for shard in self.shards)

    def reopen(self, sha256: str | None = None) -> BinaryIO:
        """The current shard, truncated to what is valid and open for appending. sha256: of that, where it is known."""
        length = self.current["tokens"] * self.dtype.itemsize
        if not self.file.exists():
            write_atomic(self.file, b"")
        stream: BinaryIO = open_regular(self.file, "r+b")
        require(not self.file.is_symlink(), f"{self.file} is a link: remove it")
        valid = os.fstat(stream.fileno()).st_size >= length
        require(valid, f"{self.file} is shorter than {PROGRESS} says: remove the folder")
        stream.truncate(length)
        while part := stream.read(2**20):
            self.digest.update(part)
        same = sha256 in (None, self.digest.hexdigest())
        require(same, f"{self.file} was changed since {PROGRESS} was written: remove the folder")
        return stream

    def add(self, tokens: np.ndarray, n_bytes: int) -> None:
        """Append a document, whose last token is the separator."""
        if self.current["tokens"] and self.current["tokens"] + len(tokens) > self.limit:
            self.close()
        if self.stream is None:
            self.stream = self.reopen()
        raw = tokens.astype(self.dtype).tobytes()
        self.stream.write(raw)
        self.digest.update(raw)
        self.current["tokens"] += len(tokens)
        self.current["documents"] += 1
        self.current["bytes"] += n_bytes

    def flushed_state(self) -> dict[str, Any]:
        if self.stream is not None:
            self.stream.flush()
            os.fsync(self.stream.fileno())
        return {"shards": self.shards, **self.current, "sha256": self.digest.hexdigest()}

    def close(self) -> None:
        """Complete the current shard."""
        assert self.stream is not None
        self.flushed_state()
        self.stream.close()
        self.shards.append({"file": self.file.name, **self.current, "sha256": self.digest.hexdigest()})
        self.current, self.stream, self.digest = dict.fromkeys(self.current, 0), None, hashlib.sha256()

    def finish(self) -> dict[str, Any]:
        """Complete the last shard. Returns the split's part of the index."""
        if self.current["tokens"]:
            self.close()
        return {**{key: self.total(key) for key in self.current}, "shards": self.shards}


if __name__ == "__main__":
    sys.exit(run_script(PrepareFineWebConfig, prepare, __doc__))
