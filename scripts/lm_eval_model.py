"""Our model as an LM of lm-evaluation-harness (lm_eval 0.4.13): NanoQK(model, tokenizer).

Shapes: B requests of a batch, G distinct contexts among them, T positions, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import Collator
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from core.device import autocast
from core.schema import ConfigError, require
from data.tokenizer import Tokenizer
from model.gpt import GPT, Cache
from model.ops import at_least_fp32

Request = tuple[tuple[str, str] | None, list[int], list[int]]  # (context, continuation) as text, and as tokens
Score = tuple[float, bool]  # log-likelihood of the continuation in nats; whether greedy decoding gives it


class NanoQK(TemplateLM):
    """`dtype` is the autocast and cache type."""

    def __init__(self, model: GPT, tokenizer: Tokenizer, batch_size: int = 16, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.model, self.ours, self.batch_size, self.dtype = model, tokenizer, batch_size, dtype
        self._device = model.transformer.wte.weight.device
        self.max_length = model.block_size
        self.truncated = 0  # prompts that were longer than block_size and lost their first tokens

    @property
    def eot_token_id(self) -> int:
        """Stands for an empty context: the separator, else a new line, else the vocabulary's first token."""
        if self.ours.separator is not None:
            return self.ours.separator
        vocabulary = self.ours.to_dict().get("chars", "\n")
        return int(self.ours.encode("\n")[0]) if "\n" in vocabulary else 0

    def tok_encode(self, string: Any, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """string: text, or a number where a task file has one as an answer."""
        return self.ours.encode(str(string)).tolist()

    # Log-likelihoods

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Score]:
        """As TemplateLM's, which does not score a first token that equals eot_token_id where the context is empty."""
        pairs = [(str(context), str(answer)) for context, answer in (request.args for request in requests)]
        tokens = [self._encode_pair(*pair) if pair[0] else ([], self.tok_encode(pair[1])) for pair in pairs]
        scored = [(pair, *encoded) for pair, encoded in zip(pairs, tokens, strict=True)]
        return self._loglikelihood_tokens(scored, disable_tqdm)

    def _loglikelihood_tokens(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[Score]:
        """In the order of the requests. Too long ones lose their first tokens, as in lm_eval's own adapter."""
        cut: list[tuple[list[int], list[int]]] = []
        for _, context, continuation in requests:
            n, takes = len(continuation), f"the model takes 1 to {self.max_length} (model.block_size)"
            require(0 < n <= self.max_length, f"a question's answer has {n} tokens: {takes}")
            whole = (context or [self.eot_token_id]) + continuation  # lm_eval leaves a prompt of blanks empty
            tokens = whole[-(self.max_length + 1) :]
            self.truncated += len(whole) > len(tokens)
            cut.append((tokens[:-n], tokens[-n:]))
        # equal contexts become neighbours, and contexts of similar length
        ordered: Any = Collator(cut, sort_fn=lambda pair: (-len(pair[0]), pair[0], -len(pair[1])))
        scores: list[Score] = []
        for batch in ordered.get_batched(n=self.batch_size):
            contexts, continuations = zip(*batch, strict=True)
            scores += self.score(contexts, continuations)
        return ordered.get_original(scores)

    @torch.inference_mode()
    def score(self, contexts: Sequence[list[int]], continuations: Sequence[list[int]]) -> list[Score]:
        """Runs each distinct context once: its first tokens (one less than the shortest context has) fill a cache. Its
        other tokens and the continuation follow, one row per request. Padding on the right changes no earlier token."""
        distinct = [context for context, _ in groupby(contexts)]  # equal contexts are neighbours
        shared = min(map(len, distinct)) - 1
        tails = [(x + y)[shared:-1] for x, y in zip(contexts, continuations, strict=True)]
        idx = pad_sequence([torch.tensor(tail) for tail in tails], batch_first=True).to(self._device)  # (B, T)
        with autocast(self._device.type, self.dtype):
            caches = None
            if shared > 0:
                heads = torch.tensor([context[:shared] for context in distinct], device=self._device)  # (G, shared)
                caches = self.model.new_caches(len(distinct), shared + idx.size(1), self.dtype)
                self.model(heads, caches=caches, last_only=True)
                rows = [i for i, (_, same) in enumerate(groupby(contexts)) for _ in same]
                caches = [take_rows(cache, torch.tensor(rows, device=self._device)) for cache in caches]
            logits = self.model(idx, caches=caches, pos=shared)[0]  # (B, T, V)
        results = []
        for row, tail, continuation in zip(logits, tails, continuations, strict=True):
            n = len(continuation)
            target = torch.tensor(continuation, device=self._device)  # (n,)
            last = at_least_fp32(row[len(tail) - n : len(tail)])  # (n, V)
            nats = F.log_softmax(last, -1).gather(1, target[:, None]).sum()
            results.append((nats.item(), bool((last.argmax(-1) == target).all())))
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts. Each window of block_size predicts its own part of the text."""
        windows: list[tuple[int, Request]] = []
        for i, request in enumerate(requests):
            rolling = utils.get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.eot_token_id, self.max_length, context_len=1
            )
            windows += [(i, (None, *utils.make_disjoint_window(window))) for window in rolling]
        totals = [0.0] * len(requests)
        for (i, _), (nats, _) in zip(windows, self._loglikelihood_tokens([w for _, w in windows]), strict=True):
            totals[i] += nats
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        raise ConfigError("tasks= must be scored by log-likelihood: these write text")


def take_rows(cache: Cache, rows: Tensor) -> Cache:
    """A cache whose row i is row rows[i] of `cache`."""
    return replace(cache, **{name: x[rows] for name, x in vars(cache).items() if x is not None})
