"""FineWeb, or any data set with a column of text, as token shards: python data/prepare_fineweb.py max_tokens=1000000000

(configs/prepare_fineweb.yaml has every setting; data/shards.py says what is written.) The result is a function of the
settings and the data set, whatever the workers, and however often the program is killed: progress.json says how much
of each file counts. The same command goes on from there.
"""

import contextlib
import fcntl
import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from core.cli import run_app
from core.files import cache_folder
from core.schema import ConfigError, require, show
from data.corpora import expand, one_line, probe_hub
from data.options import PrepareFineWebConfig
from data.shards import FORMAT, INDEX, PROGRESS, SPLITS, TOKENIZER, file_sha256, verify
from data.tokenizer import BPETokenizer, Tokenizer, build_tokenizer, from_dict, learn_bpe, token_dtype, tokenizer_sha256

SAVE_SECONDS = 5.0
PRINT_SECONDS = 30.0
BATCH_CHARS, BATCH_DOCUMENTS = 2**20, 1024  # of text, that a worker gets at a time

Batch = tuple[np.ndarray, list[int], list[int], list[bool]]  # tokens, and of each document: tokens, bytes, held out?


def prepare(config: PrepareFineWebConfig) -> int:
    out = cache_folder() / "fineweb" if config.out is None else expand(config.out)
    if config.verify:  # whatever settings they were made with
        require((out / INDEX).exists(), f"verify=true: {out} holds no finished shards")
        verify(out)
        return finished(out, " and intact")
    dataset = expand(config.dataset).resolve()
    require(dataset not in [out.resolve(), *out.resolve().parents], f"out={out} must not lie in dataset={dataset}")
    check_usable(out, config)
    if (out / INDEX).exists():
        return finished(out)
    begun: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError):
        begun = json.loads((out / PROGRESS).read_bytes())["source"]
    documents = Documents(config, begun)
    tokenizer = load_tokenizer(out, config, documents)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = os.open(out / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with this process, however it dies
    except BlockingIOError as error:
        raise ConfigError(f"out={out} is in use by another process") from error
    except OSError as error:
        raise ConfigError(f"out={out} cannot be written: {error.strerror}") from error
    try:
        check_usable(out, config)  # again, now that no other process writes: one may have come to its end
        if (out / INDEX).exists():
            return finished(out)
        return write_shards(out, config, documents, tokenizer)
    finally:
        os.close(lock)


def check_usable(out: Path, config: PrepareFineWebConfig) -> None:
    """Raise ConfigError for a folder that is somebody else's, or was begun with other settings."""
    try:
        held = set(os.listdir(out)) if out.exists() else set()
        state = json.loads((out / (INDEX if INDEX in held else PROGRESS)).read_bytes()) if held else {}
        begun = state.get("settings", {}) if isinstance(state, dict) else {}
    except FileNotFoundError:
        require(held <= {"lock", f"{PROGRESS}.tmp"}, f"out={out} is neither empty nor a folder of token shards")
        return
    except OSError as error:
        raise ConfigError(f"out={out} cannot be used: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"out={out} holds a damaged {PROGRESS} or {INDEX}: remove the folder") from error
    changes = [
        f"{key} {show(begun.get(key))} -> {show(value)}"
        for key, value in config.settings.items()
        if held and begun.get(key) != value
    ]
    whole = not held or INDEX in held or isinstance(state.get("source"), dict)
    require(whole, f"out={out} holds a {PROGRESS} that does not say of which files: remove the folder")
    require(not changes, f"out={out} was begun with other settings: {', '.join(changes)}; use another folder")


def finished(out: Path, intact: str = "") -> int:
    clean_up(out)
    print(f"{out} is complete{intact}: {summary(json.loads((out / INDEX).read_bytes()))}")
    return 0


def write_shards(out: Path, config: PrepareFineWebConfig, documents: "Documents", tokenizer: Tokenizer) -> int:
    state: dict[str, Any] = {"settings": config.settings, "source": documents.source}
    state |= {"documents": 0, "stream": None, "finished": False}
    state |= {split: {"shards": [], "tokens": 0, "documents": 0, "bytes": 0} for split in SPLITS}
    if (out / PROGRESS).exists():
        state = json.loads((out / PROGRESS).read_bytes())
        require(
            state["source"] == documents.source,
            f"dataset={config.dataset} is not what {out} was begun on: its files have changed; use another folder",
        )
    else:
        save_json(out / PROGRESS, state)
    if not (out / TOKENIZER).exists():
        save_json(out / TOKENIZER, tokenizer.to_dict())
    dtype = np.dtype(token_dtype(tokenizer.vocab_size))
    writers = {split: ShardWriter(out, split, dtype, config.shard_tokens, state[split]) for split in SPLITS}
    n_tokens = sum(writer.total("tokens") for writer in writers.values())
    if state["documents"]:
        print(f"{out}: goes on after {state['documents']:,} documents, {n_tokens:,} tokens")

    def save() -> None:
        for split, writer in writers.items():
            state[split] = writer.flushed_state()
        save_json(out / PROGRESS, state)

    saved = printed = time.monotonic()
    bar = tqdm(total=config.max_tokens, initial=n_tokens, unit="tok", unit_scale=True, disable=None, dynamic_ncols=True)
    with bar, contextlib.closing(tokenised(documents, state, tokenizer, config)) as batches:
        for (tokens, lengths, sizes, held_out), stream in batches:
            at, before = 0, n_tokens
            for length, size, is_val in zip(lengths, sizes, held_out, strict=True):
                writers["val" if is_val else "train"].add(tokens[at : at + length], size)
                at += length
                n_tokens += length
                state["documents"] += 1
                if config.max_tokens is not None and n_tokens >= config.max_tokens:
                    state["finished"] = True
                    break
            state["stream"] = stream
            bar.update(n_tokens - before)
            if time.monotonic() - saved > SAVE_SECONDS:  # here every file and `stream` are at the same document
                save()
                saved = time.monotonic()
            if bar.disable and time.monotonic() - printed > PRINT_SECONDS:
                print(f"{state['documents']:,} documents, {n_tokens:,} tokens", flush=True)
                printed = time.monotonic()
            if state["finished"]:
                break
    state["finished"] = True
    save()
    index: dict[str, Any] = {
        "format": FORMAT, "settings": config.settings, "source": documents.source, "dtype": dtype.name,
        "vocab_size": tokenizer.vocab_size, "tokenizer_sha256": tokenizer_sha256(tokenizer),
    }  # fmt: skip
    index |= {split: writer.finish() for split, writer in writers.items()}
    save_json(out / INDEX, index)
    clean_up(out)
    print(f"{out}: {summary(index)}")
    for split in SPLITS:
        if index[split]["tokens"] < 2:
            print(f"warning: {split} is empty: data=fineweb refuses these shards; change val_fraction= or max_tokens=")
    return 0


def summary(index: dict[str, Any]) -> str:
    return "; ".join(
        f"{split}: {part['documents']:,} documents, {part['tokens']:,} tokens, {part['bytes']:,} bytes, "
        f"{len(part['shards'])} shards"
        for split, part in ((split, index[split]) for split in SPLITS)
    )


def clean_up(out: Path) -> None:
    """What is of no use once the index is there."""
    for file in (out / PROGRESS, *out.glob("*.offsets"), *out.glob("*.tmp")):
        file.unlink(missing_ok=True)


def save_json(file: Path, content: dict[str, Any]) -> None:
    save_bytes(file, (json.dumps(content, indent=1) + "\n").encode())


def save_bytes(file: Path, content: bytes) -> None:
    """Whole or not at all; the lock sees to it that there is one writer."""
    temporary = file.with_name(f"{file.name}.tmp")
    with open(temporary, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, file)


# -----------------------------------------------------------------------------
# Documents in


class Documents:
    """The texts of a data set in its own order, streamed; and where in it the last one was.

    source: which data set that is, {"revision": …} of the Hub's, that of `begun` where there is one, or the files of a
    folder. Raises: ConfigError when the data set cannot be had, or its first row has no such text.
    """

    def __init__(self, config: PrepareFineWebConfig, begun: dict[str, Any]) -> None:
        self.config = config
        place, name = expand(config.dataset), config.settings["name"]
        if not place.is_dir():
            problem = probe_hub(config.dataset, None)
            require(
                problem is None,
                f"dataset={config.dataset} is no folder here, and the Hugging Face Hub does not give it ({problem}): "
                "dataset=FOLDER takes parquet files",
            )
        try:
            import datasets
            from huggingface_hub import HfApi

            datasets.disable_progress_bars()
            self.source: dict[str, Any]
            if place.is_dir():
                path, revision, self.source = str(place), None, source_of(place)
            else:
                path, revision = config.dataset, begun.get("revision")
                revision = revision or HfApi().dataset_info(config.dataset, expand=["sha"], timeout=10).sha
                self.source = {"revision": revision}
            self.rows = datasets.load_dataset(path, name, split=config.split, streaming=True, revision=revision)
            first = next(iter(self.rows.take(1)), None)
        except Exception as error:  # datasets, its network stack and pyarrow share no base class
            raise ConfigError(
                f"dataset={config.dataset} name={show(name)} split={config.split} cannot be loaded: {one_line(error)}"
            ) from error
        require(first is not None, f"dataset={config.dataset} is empty")
        assert first is not None
        require(config.column in first, f"column={config.column} must be one of {', '.join(first)}")
        kind = type(first[config.column]).__name__
        require(kind in ("str", "NoneType"), f"column={config.column} must hold text, not {kind}")
        self.rows = self.rows.select_columns([config.column])

    def batches(self, stream: dict[str, Any] | None) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """Texts after `stream`, and where they end; a row without a text is left out."""
        if stream is not None:
            self.rows.load_state_dict(stream)
        texts: list[str] = []
        size = 0
        rows = iter(self.rows)
        while True:
            try:
                row = next(rows, None)
            except Exception as error:
                raise OSError(f"dataset={self.config.dataset}: {one_line(error)}; the same command goes on") from error
            if row is not None and row[self.config.column] is not None:
                texts.append(row[self.config.column])
                size += len(texts[-1])
            if texts and (row is None or size >= BATCH_CHARS or len(texts) >= BATCH_DOCUMENTS):
                yield texts, self.rows.state_dict()
                texts, size = [], 0
            if row is None:
                return


def source_of(folder: Path) -> dict[str, Any]:
    """The files of a folder by name and size, but for hidden ones: what a position in a stream of them refers to."""
    found = {file.relative_to(folder): file for file in folder.rglob("*") if file.is_file()}
    hidden = {name for name in found if any(part.startswith(".") for part in name.parts)}
    sizes = sorted((str(name), file.stat().st_size) for name, file in found.items() if name not in hidden)
    return {"files": len(sizes), "names_and_sizes_sha256": hashlib.sha256(json.dumps(sizes).encode()).hexdigest()}


def is_held_out(text: bytes, fraction: float) -> bool:
    """By a hash of the text: copies of a document are on the same side."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) < fraction * 2**64


def load_tokenizer(out: Path, config: PrepareFineWebConfig, documents: Documents) -> Tokenizer:
    if (out / TOKENIZER).exists():
        return from_dict(json.loads((out / TOKENIZER).read_bytes()))
    if config.tokenizer == "bpe":
        return learn(config, documents)
    try:
        return build_tokenizer("gpt2", "")
    except ConfigError as error:
        raise ConfigError(str(error).replace("data.tokenizer", "tokenizer")) from error


def learn(config: PrepareFineWebConfig, documents: Documents) -> Tokenizer:
    """A BPE of the first training documents: nothing is learnt from held-out ones."""
    settings, learnt_from, size = config.settings, [], 0
    for texts, _ in documents.batches(None):
        for text in texts:
            if size < settings["learn_bytes"] and not is_held_out(text.encode(), config.val_fraction):
                learnt_from.append(text)
                size += len(text.encode())
        if size >= settings["learn_bytes"]:
            break
    try:
        return BPETokenizer(learn_bpe(learnt_from, settings["vocab_size"] - 1), has_separator=True)
    except ConfigError as error:
        raise ConfigError(f"vocab_size={settings['vocab_size']} is too large for {size} bytes of text") from error


# -----------------------------------------------------------------------------
# Tokens, by many processes, in the order of the documents


def tokenised(
    documents: Documents, state: dict[str, Any], tokenizer: Tokenizer, config: PrepareFineWebConfig
) -> Generator[tuple[Batch, dict[str, Any]], None, None]:
    if state["finished"]:
        return
    workers = config.workers or os.cpu_count() or 1
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks of datasets and pyarrow
    pool = ProcessPoolExecutor(workers, context, start_worker, (tokenizer.to_dict(), config.val_fraction))
    pending: deque[tuple[Future[Batch], dict[str, Any]]] = deque()
    try:
        for texts, stream in documents.batches(state["stream"]):
            pending.append((pool.submit(encode, texts), stream))
            if len(pending) > 2 * workers:
                future, stream = pending.popleft()
                yield future.result(), stream
        while pending:
            future, stream = pending.popleft()
            yield future.result(), stream
    except BrokenProcessPool as error:
        raise OSError(
            f"a worker died, of too little memory perhaps (workers={workers}); the same command goes on"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


worker: dict[str, Any] = {}  # of a worker process: its tokenizer and the held-out fraction


def start_worker(tokenizer: dict[str, Any], val_fraction: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair
    threading.Thread(target=die_with_parent, daemon=True).start()
    worker.update(tokenizer=from_dict(tokenizer), val_fraction=val_fraction)


def die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def encode(texts: list[str]) -> Batch:
    tokenizer: Tokenizer = worker["tokenizer"]
    raw = [text.encode(errors="surrogatepass") for text in texts]
    end = np.array([tokenizer.separator], dtype=token_dtype(tokenizer.vocab_size))
    tokens = [np.concatenate([tokenizer.encode(text), end]) for text in texts]
    held_out = [is_held_out(text, worker["val_fraction"]) for text in raw]
    return np.concatenate(tokens), [len(part) for part in tokens], [len(text) for text in raw], held_out


# -----------------------------------------------------------------------------
# Shards out


class ShardWriter:
    """The shards of one split. Its state says which are complete and how much of the open one counts: what else is
    on the disk was written after the state was saved: it is cut off, and the same is written again."""

    def __init__(self, out: Path, split: str, dtype: np.dtype, limit: int, state: dict[str, Any]) -> None:
        self.out, self.split, self.dtype, self.limit = out, split, dtype, limit
        self.shards: list[dict[str, Any]] = list(state["shards"])
        self.open: dict[str, int] = {key: state[key] for key in ("tokens", "documents", "bytes")}
        self.files: tuple[BinaryIO, BinaryIO] | None = None
        if self.open["tokens"]:
            self.reopen()

    def path(self, number: int, kind: str) -> Path:
        return self.out / f"{self.split}_{number:06d}.{kind}"

    def total(self, key: str) -> int:
        return self.open[key] + sum(shard[key] for shard in self.shards)

    def add(self, tokens: np.ndarray, n_bytes: int) -> None:
        """A document with its separator."""
        if self.open["tokens"] and self.open["tokens"] + len(tokens) > self.limit:
            self.close()
        if self.files is None:
            self.reopen()
        assert self.files is not None
        self.files[0].write(tokens.astype(self.dtype).tobytes())
        self.files[1].write(self.open["tokens"].to_bytes(8, "little"))
        self.open["tokens"] += len(tokens)
        self.open["documents"] += 1
        self.open["bytes"] += n_bytes

    def reopen(self) -> None:
        number = len(self.shards)
        self.files = (
            open_at(self.path(number, "bin"), self.open["tokens"] * self.dtype.itemsize),
            open_at(self.path(number, "offsets"), 8 * self.open["documents"]),
        )

    def flushed_state(self) -> dict[str, Any]:
        for file in self.files or ():
            file.flush()
            os.fsync(file.fileno())
        return {"shards": self.shards, **self.open}

    def close(self) -> None:
        """Complete the open shard."""
        self.flushed_state()
        for stream in self.files or ():
            stream.close()
        file = self.path(len(self.shards), "bin")
        self.shards.append({"file": file.name, **self.open, "sha256": file_sha256(file)})
        self.open, self.files = dict.fromkeys(self.open, 0), None

    def finish(self) -> dict[str, Any]:
        """Complete the last shard and write where the documents begin. Returns the split's part of the index."""
        if self.open["tokens"]:
            self.close()
        for number, shard in enumerate(self.shards):
            offsets = np.fromfile(self.path(number, "offsets"), dtype="<u8").tolist()
            file = self.path(number, "json")
            save_bytes(file, json.dumps({"offsets": offsets}).encode())
            shard |= {"offsets": file.name, "offsets_sha256": file_sha256(file)}
        return {**{key: self.total(key) for key in self.open}, "shards": self.shards}


def open_at(file: Path, length: int) -> BinaryIO:
    """The file, cut to `length` bytes, to be written on."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(file, os.O_CREAT | os.O_EXCL, 0o666))
    stream = open(file, "r+b")  # noqa: SIM115 (ShardWriter closes it)
    require(os.fstat(stream.fileno()).st_size >= length, f"{file} is shorter than {PROGRESS} says: remove the folder")
    stream.truncate(length)
    stream.seek(length)
    return stream


def main() -> None:
    run_app("prepare_fineweb", PrepareFineWebConfig, prepare)


if __name__ == "__main__":
    main()
