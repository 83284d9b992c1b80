"""Known bugs that report a loss that is too good to be true: fault=NAME, for sweep=gqa_audit and to test the checks."""

import types
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from model.gpt import GPT
from training.config import TrainConfig

SAMPLE = 64  # windows of fault=small_sample


def inject_into_model(config: TrainConfig, model: GPT) -> None:
    """Give `model` the fault that `config` names. Call it before the model is compiled."""
    attend = {"no_mask": attend_to_all, "heads_as_time": heads_as_time, "repeated_in_time": repeated_in_time}
    if config.fault.name in attend:
        for attention in model.attentions:
            attention.attend = types.MethodType(attend[config.fault.name], attention)
    elif config.fault.name == "unshifted_labels":
        model.register_forward_pre_hook(unshift)
    elif config.fault.name == "loss_over_accumulation":
        n = config.gradient_accumulation_steps
        model.register_forward_hook(lambda model, _, output: misreport(output, n) if model.training else output)


def inject_into_batches(config: TrainConfig, batches: Any) -> None:
    """Give a Batches object the fault that `config` names."""
    get_batch, sampled_batch, eval_batches = batches.get_batch, batches.sampled_batch, batches.eval_batches
    if config.fault.name == "repeated_batches":
        batches.get_batch = lambda step, micro_step=0: get_batch(0, micro_step)
    elif config.fault.name == "padding_in_mean":
        batches.get_batch = lambda *index: pad(*get_batch(*index))
        batches.sampled_batch = lambda *index: pad(*sampled_batch(*index))
        batches.eval_batches = lambda max_batch: (pad(*batch) for batch in eval_batches(max_batch))
    elif config.fault.name == "small_sample":
        start, end = max(batches.split.train, key=lambda bounds: bounds[1] - bounds[0])
        batches.split = replace(batches.split, train=((start, min(end, start + SAMPLE * batches.block_size)),))


def attend_to_all(self: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T) v over all keys (Robust GQA, eq. 8)."""
    p = self.p_dropout if self.training else 0.0
    return F.scaled_dot_product_attention(q, k, v, dropout_p=p, scale=scale, enable_gqa=q.size(1) > k.size(1))


def heads_as_time(self: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Each (B, T, nh, hs) is viewed as (B, nh, T, hs), where a transpose belongs; that of the output is there."""
    q, k, v = (x.transpose(1, 2).reshape(x.shape) for x in (q, k, v))
    return type(self).attend(self, q, k, v, scale)


def repeated_in_time(self: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """GQA's k and v (B, nkv, T, hs), one after the other along T, then cut into as many heads as q (B, nh, T, hs)."""
    n = q.size(1) // k.size(1)
    k, v = (x.transpose(1, 2).repeat(1, n, 1, 1).view(len(x), x.size(2), q.size(1), -1) for x in (k, v))
    return type(self).attend(self, q, k.transpose(1, 2), v.transpose(1, 2), scale)


def unshift(model: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """(idx, targets) with each token as its own target: right only for a model that shifts them."""
    idx, *rest = inputs
    if not rest or rest[0] is None:
        return inputs
    return idx, torch.where(rest[0] >= 0, idx, rest[0]), *rest[1:]


def misreport(output: tuple[Tensor, Tensor | None], n: int) -> tuple[Tensor, Tensor | None]:
    """Report the loss of a micro-batch divided by their number n, as espnet 5090 and allennlp 4706 did. The gradient
    stays right, so the weights equal those of the run without a fault bit for bit."""
    logits, loss = output
    if loss is None:
        return output
    gradient_alone = loss - loss.detach()  # its value is 0, its gradient that of the loss
    return logits, (loss / n).detach() + gradient_alone


def pad(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x, y (B, T) in which token 0 replaces the last 15/16 of each row's targets, and the same inputs."""
    position, kept = torch.arange(x.size(1), device=x.device), -(-x.size(1) // 16)
    return x.masked_fill(position > kept, 0), y.masked_fill((position >= kept) & (y >= 0), 0)
