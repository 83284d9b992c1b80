"""Two checkpoints side by side: python scripts/compare.py a=RUN b=RUN text=FILE

Writes one page (out=), which needs no network: the nats of each token of the text under both, where they differ most,
the attention maps of a layer and head, samples from the same seed, and the settings that differ. Prints the losses.
Each token but the first is predicted once, as in validation, in windows of the smaller block_size, in float32. Where
tokenizers differ, the text is cut wherever a token of both ends, and the runs are compared piece by piece.
"""

import functools
import html
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
import torch
from torch.nn import functional as F

from core import checkpoint
from core.cli import run_script
from core.device import resolve_device
from core.files import expand, write_atomic
from core.process import say
from core.schema import NOT_EMPTY, REQUIRED, AtLeast, ConfigError, Help, Writable, differences, options, require
from data.corpora import read_text
from data.options import RandomOptions
from data.tokenizer import SEPARATOR, NoText, Tokenizer, begins_character
from data.tokens import Corpus, load_corpus
from model.diagnostics import attention_weights
from model.generate import generate
from model.gpt import GPT
from sample import LoadedRun, Plugins, RunPath, SampleConfig, Which, load_asked_run
from scripts.reporting.charts import VIRIDIS, Figure, Spec, marks, quantity, tooltips
from scripts.reporting.page import MARK, Content, Markup, Section, page
from scripts.reporting.tables import Table, number
from training.config import Device, Seed
from training.session import idle_threads
from training.state import UNKNOWN
from training.updates import CPU_TOKENS

LONGEST = 10_000  # characters that are compared
MAPPED = 64  # tokens of an attention map
PROMPT, NEW_TOKENS = 64, 200  # characters, tokens of a sample
LISTED, PRINTED = 20, 5  # places where they differ most
DARKEST = 6.0  # nats
HINT = "Hover over a token or a cell for its numbers."


@dataclass(frozen=True)
class Side:
    """One of the two. name: a or b. run: as asked for. tokens: of the text, (n,)."""

    name: str
    run: str
    loaded: LoadedRun
    tokens: np.ndarray


@dataclass(frozen=True)
class Spans:
    """The text in pieces that both sides predict, and each side's nats and number of tokens in them. first: the piece
    before them, which is not predicted."""

    first: str
    texts: list[str]
    nats: tuple[np.ndarray, np.ndarray]  # (spans,) each
    n_tokens: tuple[int, int]


@torch.no_grad()
def token_nats(model: GPT, tokens: np.ndarray, window: int) -> np.ndarray:
    """-ln p of each token but the first, (n - 1,), in consecutive windows, whose first tokens see little context."""
    device, n = model.transformer.wte.weight.device, len(tokens) - 1
    padded = F.pad(torch.from_numpy(tokens.astype(np.int64)), (0, -n % window))
    parts = []
    for rows in padded.unfold(0, window + 1, window).split(max(1, CPU_TOKENS // window)):  # (B, window + 1)
        x, y = rows[:, :-1].to(device), rows[:, 1:].to(device)
        logits = model(x)[0]
        assert logits is not None
        parts.append(F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="none"))
    return torch.cat(parts)[:n].cpu().double().numpy()


def compare(text: str, a: Side, b: Side, *, name: str = "the text") -> Spans:
    """The nats of both over the same pieces of the text; the piece with a side's first token is not predicted. Raises:
    ConfigError about `name` where there is one piece."""
    pieces = [[side.loaded.tokenizer.pieces[token] for token in side.tokens] for side in (a, b)]
    ends = [np.cumsum([len(x) for x in parts]) for parts in (*pieces, [c.encode() for c in text])]  # in bytes
    both = functools.reduce(np.intersect1d, ends)  # where tokens of both and a character end
    require(len(both) > 1, f"{name} is too short: give a text=FILE of at least two tokens of either run")
    window = min(side.loaded.model.block_size for side in (a, b))
    nats, counts = [], []
    for side, end in zip((a, b), ends, strict=False):
        of_span = np.searchsorted(both, end)  # (n,)
        each = token_nats(side.loaded.model, side.tokens, window)
        nats.append(np.bincount(of_span[1:], each, minlength=len(both))[1:])
        counts.append(int((of_span > 0).sum()))
    encoded = text.encode()
    first, *texts = (encoded[i:j].decode() for i, j in itertools.pairwise([0, *both]))
    return Spans(first, texts, (nats[0], nats[1]), (counts[0], counts[1]))


def attention_map(side: Side, layer: int, head: int) -> tuple[list[str], list[list[float]]]:
    """The first MAPPED tokens of the text, and how much each attends to each before it, (T, T)."""
    model, tokens = side.loaded.model, side.tokens[: min(MAPPED, side.loaded.model.block_size)].tolist()
    try:
        weights = attention_weights(model, torch.tensor([tokens], device=model.transformer.wte.weight.device))
    except ConfigError as error:
        raise ConfigError(f"{side.name}={side.run}: {error}") from error
    return [visible(side.loaded.tokenizer.decode([token])) for token in tokens], weights[layer][0, head].tolist()


def sampled(side: Side, prompt: str, separated: bool, seed: int) -> str:
    model, tokenizer = side.loaded.model, side.loaded.tokenizer
    tokens = tokens_of(prompt, tokenizer, separated).tolist()
    idx = torch.tensor([tokens], device=model.transformer.wte.weight.device)
    how = SampleConfig()
    return tokenizer.decode(int(t) for t in generate(model, idx, NEW_TOKENS, how.temperature, how.top_k, seed=seed))


# -----------------------------------------------------------------------------
# The page


def visible(text: str) -> str:
    return text.replace("\n", "⏎").replace("\t", "⇥") if text.strip(" ") else "␣" * len(text)


def summary(a: Side, b: Side, spans: Spans) -> Table:
    """Mean losses, and b − a. Nats a token compare only where the tokens are the same."""
    n_bytes = sum(len(text.encode()) for text in spans.texts)
    per_token = [nats.sum() / n for nats, n in zip(spans.nats, spans.n_tokens, strict=True)]
    per_byte = [nats.sum() / math.log(2) / n_bytes for nats in spans.nats]
    rows = []
    for side, n, x, y in zip((a, b), spans.n_tokens, per_token, per_byte, strict=True):
        config, state = side.loaded.config, side.loaded.state
        no_text = state.get("corpus_sha256") == UNKNOWN  # imported weights; data=random stands for their text
        setting = config.label.removesuffix(f"-{config.data.name}") if no_text else config.label
        about = [side.name, side.run, setting, str(state["step"])]
        rows.append([*about, f"{n:,}", number(x), number(y)])
    same = a.loaded.tokenizer.to_dict() == b.loaded.tokenizer.to_dict()
    gap = number(per_token[1] - per_token[0], "+.4f") if same else "–"
    rows.append(["b − a", "", "", "", "", gap, number(per_byte[1] - per_byte[0], "+.4f")])
    columns = ["", "run", "setting", "iteration", "tokens predicted", "loss (nats a token)", "bits a byte"]
    return Table(columns, rows, text_columns=3)


def largest(spans: Spans, n: int) -> Table:
    """The n pieces whose nats differ most, in their context."""
    rows, difference = [], spans.nats[1] - spans.nats[0]
    for i in np.argsort(-abs(difference), kind="stable")[:n].tolist():
        before = "".join([spans.first, *spans.texts][max(0, i - 39) : i + 1])[-40:]
        after = "".join(spans.texts[i + 1 : i + 20])[:20]
        values = [number(nats[i], ".2f") for nats in spans.nats]
        rows.append([*map(visible, (before, spans.texts[i], after)), *values, number(difference[i], "+.2f")])
    return Table(["before", "here", "after", "a (nats)", "b (nats)", "b − a"], rows, text_columns=3)


def coloured(spans: Spans, a: Side, b: Side) -> Markup:
    """The text under each, a token the darker the less it was expected."""

    def shown(text: str) -> str:
        return html.escape(text.replace("\n", "⏎\n"))

    def token(text: str, nats: tuple[float, float], side: int) -> str:
        title = f"a {nats[0]:.2f}, b {nats[1]:.2f}"
        return f'<span style="--n:{min(1, nats[side] / DARKEST):.2f}" title="{title}">{shown(text)}</span>'

    pieces = [*zip(spans.texts, zip(*spans.nats, strict=True), strict=True)]
    texts = [shown(spans.first) + "".join(token(*piece, side) for piece in pieces) for side in (0, 1)]
    return side_by_side(a, b, texts)


def side_by_side(a: Side, b: Side, contents: Sequence[str]) -> Markup:
    heads = [f"<h3>{side.name}: {html.escape(side.run)}</h3>" for side in (a, b)]
    parts = [f"<div>{head}<pre>{inner}</pre></div>" for head, inner in zip(heads, contents, strict=True)]
    return Markup(f'<div class="pair">{"".join(parts)}</div>')


def attention_chart(maps: Mapping[str, tuple[Sequence[str], Sequence[Sequence[float]]]]) -> Spec:
    """Attention weights beside one another. maps: title -> the tokens' texts, and a row of weights for each query."""
    colour = quantity("weight", title="weight", scale={"type": "sqrt", "domain": [0, 1], "range": VIRIDIS})
    bare = {"labels": False, "ticks": False}
    tooltip = tooltips("query:Q", "of:N", "key:Q", "to:N", "weight:.4f", of="the query's token", to="the key's token")
    x, y = ({"field": field, "type": "ordinal", "axis": bare} for field in ("key", "query"))
    cells = {"x": x, "y": y, "color": colour, "tooltip": tooltip}
    charts = []
    for title, (texts, weights) in maps.items():
        rows = [
            {"query": i, "key": j, "weight": row[j], "of": texts[i], "to": texts[j]}
            for i, row in enumerate(weights)
            for j in range(i + 1)
        ]
        size = {"title": {"text": title, "limit": 400}, "width": 400, "height": 400}
        charts.append({**marks("rect", cells), "data": {"values": rows}, **size})
    return {"concat": charts, "columns": 2, "spacing": 40}


def sections_of(asked: "CompareOptions", text: str, a: Side, b: Side, spans: Spans) -> list[Section]:
    maps = {f"{side.name}: {side.run}": attention_map(side, asked.layer, asked.head) for side in (a, b)}
    title = f"Attention, layer {asked.layer}, head {asked.head}"
    caption = f"Over the text's first tokens, at most {MAPPED}: a row for each query, a column for each key."
    prompt = text[:PROMPT]
    begin = f"Prompt: {visible(prompt)!r}. Seed {asked.seed}, as sample.py samples by default."
    samples = [html.escape(sampled(side, prompt, asked.text is None, asked.seed)) for side in (a, b)]
    changes = differences(*(asdict(side.loaded.config) for side in (a, b)))
    colours = f"The stronger the colour, the less expected: none is 0 nats, the full one {DARKEST:g} or more."
    return [
        Section("Loss on the text", [summary(a, b, spans)]),
        Section("Where they differ most", [largest(spans, LISTED)]),
        Section("Token by token", [colours, coloured(spans, a, b)]),
        Section(title, [Figure("attention", title, attention_chart(maps), caption)]),
        Section("Samples", [Markup(f"<p>{html.escape(begin)}</p>"), side_by_side(a, b, samples)]),
        Section("Settings that differ", [Table(["setting a -> b"], [[change] for change in changes])]),
    ]


# -----------------------------------------------------------------------------
# The command line, and what text it asks for


@options
class CompareOptions:
    a: RunPath = REQUIRED
    b: RunPath = REQUIRED
    checkpoint: Which = "best"
    plugins: Plugins = ()
    text: Annotated[
        str | None, NOT_EMPTY, Help(f"a UTF-8 file, up to {LONGEST:,} characters of it; null: what both runs hold out")
    ] = None
    layer: Annotated[int, AtLeast(0), Help("of the attention maps")] = 0
    head: Annotated[int, AtLeast(0), Help("of the attention maps")] = 0
    seed: Seed = 1337
    device: Device = "auto"
    out: Annotated[str, Writable(MARK), Help("the page")] = "compare.html"


def chosen_text(asked: CompareOptions, runs: dict[str, LoadedRun]) -> str:
    """The file's text, or the start of the text that both runs hold out. Raises: ConfigError."""
    if asked.text is not None:
        return read_text(asked.text, f"text={asked.text}", math.inf)[:LONGEST]
    found = []
    for name, (model, _, config, state) in runs.items():
        unknown = state.get("corpus_sha256") == UNKNOWN
        require(not unknown, f"{name}: its weights were imported, and what it holds out is not known; give text=FILE")
        random = isinstance(config.data, RandomOptions)  # gigabytes, as a stranger's config may say
        require(not random, f"{name}: data=random has no text; give text=FILE")
        try:
            corpus = load_corpus(config.data, model.block_size, state)
        except ConfigError as error:
            raise ConfigError(f"{name}: what it holds out cannot be read: {error}; give text=FILE") from error
        kept = corpus.sha256 == state.get("corpus_sha256")
        require(kept, f"{name}: data={config.data.name} is not the run's text any more; give text=FILE")
        found.append(held_out_text(corpus))
    n = min(map(len, found))
    same = n > 0 and found[0][:n] == found[1][:n]
    require(same, "a and b hold out different text, so that one has seen it: give text=FILE")
    return found[0][:n]


def held_out_text(corpus: Corpus) -> str:
    """The start of the held-out text. Raises: ConfigError where the text itself has SEPARATOR."""
    tokens, tokenizer = held_out_tokens(corpus), corpus.tokenizer
    text = tokenizer.decode(tokens)
    plain = tokenizer.separator is None or text.count(SEPARATOR) == tokens.count(tokenizer.separator)
    require(plain, f"the held-out text has the characters {SEPARATOR}: give text=FILE")
    return text[:LONGEST]


def held_out_tokens(corpus: Corpus) -> list[int]:
    """The first held-out tokens, at most LONGEST, of whole characters; shuffled windows are joined."""
    found: list[int] = []
    begins, tokens = begins_character(corpus.tokenizer), corpus.tokens
    for start, end in corpus.split.val:
        stop = min(end, start + LONGEST - len(found))
        places = start + np.flatnonzero(begins[tokens[start : stop + 1]])  # where characters begin, `stop` included
        if len(places) > 0:
            found += tokens[int(places[0]) : stop if stop == len(tokens) else int(places[-1])].tolist()
        if len(found) > LONGEST - 4:  # no room for a character of 4 bytes
            break
    return found


def tokens_of(text: str, tokenizer: Tokenizer, separated: bool) -> np.ndarray:
    """separated: SEPARATOR in the text is the token between documents, which encode() never gives."""
    if not separated or tokenizer.separator is None:
        return tokenizer.encode(text)
    between, *rest = (tokenizer.encode(part) for part in text.split(SEPARATOR))
    end = np.array([tokenizer.separator], between.dtype)
    return np.concatenate([between, *(tokens for part in rest for tokens in (end, part))])


def compare_runs(asked: CompareOptions) -> int:
    out, device = expand(asked.out), resolve_device(asked.device)
    torch.set_num_threads(idle_threads(device))
    named = {"a": asked.a, "b": asked.b}
    places = {checkpoint.resolve(expand(run), asked.checkpoint, name) for name, run in named.items()}
    same = f"b={asked.b} is the same checkpoint as a={asked.a}"
    require(len(places) == 2, f"{same}: name another run, or another checkpoint of it, as RUN/ckpt/step_000500")
    runs = {name: load_asked_run(run, asked.checkpoint, device, name) for name, run in named.items()}
    for name, run in runs.items():
        has_text = not isinstance(run.tokenizer, NoText)
        require(has_text, f"{name}={named[name]} was trained on data=random, which is no text: name another run")
        layers, heads = len(run.model.attentions), run.config.model.n_head
        require(asked.layer < layers, f"layer={asked.layer} must be < {layers}, the layers of {name}={named[name]}")
        require(asked.head < heads, f"head={asked.head} must be < {heads}, the heads of {name}={named[name]}")
    text, sides = chosen_text(asked, runs), []
    for name, run in runs.items():
        try:
            sides.append(Side(name, named[name], run, tokens_of(text, run.tokenizer, asked.text is None)))
        except ConfigError as error:
            raise ConfigError(f"text={asked.text} does not suit {name}={named[name]}: {error}") from error
    a, b = sides
    spans = compare(text, a, b, name=f"text={asked.text}" if asked.text else "what both runs hold out")
    cut = ", the most that are read" if len(text) == LONGEST else ""
    about = {"text": asked.text or "what both runs hold out", "compared": f"its first {len(text):,} characters{cut}"}
    title, state = f"{asked.a} and {asked.b}", "Two checkpoints on the same text"
    write_atomic(out, page(Content(title, state, about, sections_of(asked, text, a, b, spans), HINT)).encode())
    say(summary(a, b, spans).markdown())
    say(largest(spans, PRINTED).markdown())
    say(str(out))
    return 0


if __name__ == "__main__":
    sys.exit(run_script(CompareOptions, compare_runs, __doc__))
