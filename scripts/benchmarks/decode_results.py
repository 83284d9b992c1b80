"""The results of bench_decode.py as a folder: bench.json and a table."""

import json
from pathlib import Path
from typing import Any

from core.files import write_atomic
from core.schema import ConfigError, require

NORMS = {"absorbed": "none", "rms": "rms", "lp": "lp", "full_keys": "rms", "reexpanded": "rms"}  # side -> its QK norm
NAMES = {
    "absorbed": "MLA", "rms": "+ RMS", "lp": "+ Lp, p = 3", "full_keys": "full keys", "reexpanded": "re-expanded",
}  # fmt: skip
PAPER = {  # Table 2, as printed. context: ms of MLA, ms with QK norm, overhead in percent, on an H800 in bf16
    4096: (1.715, 1.740, 1.41), 8192: (1.891, 1.909, 0.95), 16384: (2.082, 2.121, 1.87), 32768: (2.486, 2.511, 1.03),
    65536: (3.217, 3.253, 1.12), 131072: (5.427, 5.517, 1.66), 196608: (7.271, 7.392, 1.66),
    262144: (13.082, 13.274, 1.46),
}  # fmt: skip
CACHED = [name for name in NORMS if name != "lp"]  # whose cache sizes are listed; Lp's is that of RMS

Point = dict[str, Any]


def write_results(result: dict[str, Any], folder: Path) -> None:
    write_atomic(folder / "bench.json", (json.dumps(result, indent=1) + "\n").encode())
    write_atomic(folder / "table.md", table(result).encode())


def read_results(files: str) -> dict[str, Any]:
    """The points and commands of several bench.json, which must come from one machine."""
    found: list[dict[str, Any]] = []
    first, *_ = names = files.split(",")
    for file in names:
        try:
            result = json.loads(Path(file).read_text())
            table(result)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"from={file} must be a bench.json of this benchmark: {error}") from error
        for key in ("device", "dtype", "torch"):
            require(not found or result[key] == found[0][key], f"from={file} has another {key} than {first}")
        found.append(result)
    points = sorted((p for result in found for p in result["points"]), key=lambda p: (p["batch"], p["context"]))
    return {**found[0], "points": points, "command": "; ".join(result["command"] for result in found)}


def table(result: dict[str, Any]) -> str:
    """The points as Markdown, beside the paper's Table 2."""
    heads = ["batch", "context", "starts × rounds", NAMES["absorbed"], NAMES["rms"], "overhead", NAMES["lp"],
             "overhead", NAMES["full_keys"], NAMES["reexpanded"], "cache MiB", "attend with RMS, GB/s (of copying)",
             "paper: MLA", "paper: + QK norm", "overhead"]  # fmt: skip
    rows = [heads, ["---:"] * len(heads), *map(cells, result["points"])]
    lines = [
        "# Decode speed of MLA with a QK norm", "", "```", *result["command"].split("; "), "```", "",
        f"{result['device']}, {result['dtype']}, torch {result['torch']}. One layer, one token. Times are ms a step,",
        "median (lowest–highest) over rounds in which the sides alternate; the paper's are on an H800 in bf16.",
        "An overhead is the median of the ratios within rounds with its 95 % interval, not the ratio of the medians.",
        "With several starts it is the median over starts of their medians. Each start has new processes.",
        "Fewer than six values have no interval: bench.json has their lowest and highest.",
        "",
        *("| " + " | ".join(r) + " |" for r in rows), "",
        f"Cache: {' / '.join(NAMES[n] for n in CACHED)}; Lp's is that of RMS. On a CPU full keys are in fp32.",
        "– marks a side that was dropped.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def cells(point: Point) -> list[str]:
    """A row of the table."""
    sides, published = point["sides"], PAPER.get(point["context"])
    times, overheads = ({name: show(point, name) for name in NORMS} for show in (time_of, overhead_of))
    rms = sides.get("rms")
    return [
        str(point["batch"]), short(point["context"]), f"{point['starts']} × {point['rounds']}",
        times["absorbed"], times["rms"], overheads["rms"], times["lp"], overheads["lp"], times["full_keys"],
        times["reexpanded"],
        "/".join(f"{sides[n]['cache_bytes'] / 2**20:.1f}" if n in sides else "–" for n in CACHED),
        f"{rms['attend_gb_per_s']:.1f} ({100 * rms['attend_of_copy']:.0f} %)" if rms else "–",
        *([f"{published[0]:.3f}", f"{published[1]:.3f}", f"{published[2]:.2f} %"] if published else ["–"] * 3),
    ]  # fmt: skip


def time_of(point: Point, name: str) -> str:
    side = point["sides"].get(name)
    return f"{side['ms']:.3f} ({side['ms_lowest']:.3f}–{side['ms_highest']:.3f})" if side else "–"


def overhead_of(point: Point, name: str) -> str:
    found = point.get("overhead_percent", {}).get(name)
    if found is None:
        return "–"
    return f"{found['median']:+.2f} %" + (f" ({found['low']:+.2f} to {found['high']:+.2f})" if "low" in found else "")


def short(context: int) -> str:
    return f"{context // 1024}k" if context % 1024 == 0 else str(context)
