"""FineWeb's way: parquet files, and shards that are made of them."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from data.options import PrepareFineWebConfig
from data.prepare_fineweb import prepare
from data.tokenizer import Tokenizer, from_dict

WORDS = "the naïve cat sat on a mat — of €5 and 😀, while other cats' mats lay there\n\n in 1999"
CHOICES = WORDS.split(" ")
Parquet = tuple[Path, list[str]]  # a folder of parquet files, and the texts in their order


def write_parquet(file: Path, **columns: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file, row_group_size=64)


@pytest.fixture(scope="session")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> Parquet:
    """Three files laid out and typed like FineWeb's sample-10BT."""
    folder = tmp_path_factory.mktemp("fineweb")
    draw = random.Random(0)
    texts = [" ".join(draw.choices(CHOICES, k=draw.randrange(120))) for _ in range(600)]
    texts[10], texts[300] = texts[400], ""
    for i in range(3):
        part = texts[200 * i : 200 * (i + 1)]
        n = len(part)
        write_parquet(
            folder / "sample" / "10BT" / f"{i:03d}_00000.parquet",
            text=part, id=[f"<urn:uuid:{i}-{row}>" for row in range(n)], dump=["CC-MAIN-2013-20"] * n,
            url=["http://example.com"] * n, date=["2013-05-18T05:48:54Z"] * n,
            file_path=["s3://commoncrawl/x.warc.gz"] * n, language=["en"] * n, language_score=[0.9] * n,
            token_count=[len(text) for text in part],
        )  # fmt: skip
    return folder, texts


def settings_of(parquet: Parquet, out: Path, **changes: Any) -> PrepareFineWebConfig:
    defaults: Any = {"tokenizer": "bpe", "vocab_size": 300, "shard_tokens": 5000, "val_fraction": 0.1, "workers": 2}
    return PrepareFineWebConfig(dataset=str(parquet[0]), out=str(out), **(defaults | changes))


@pytest.fixture(scope="session")
def shards(parquet: Parquet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "out"
    assert prepare(settings_of(parquet, out)) == 0
    return out


def files(out: Path) -> dict[str, bytes]:
    """Without those that depend on more than the documents."""
    others = ("lock", "times.json")
    return {file.name: file.read_bytes() for file in out.iterdir() if file.name not in others}


def index_of(out: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((out / "index.json").read_bytes())
    return index


def tokenizer_of(out: Path) -> Tokenizer:
    return from_dict(json.loads((out / "tokenizer.json").read_bytes()))


def held_out(text: str, fraction: float) -> bool:
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return int(digest, 16) / 2**64 < fraction
