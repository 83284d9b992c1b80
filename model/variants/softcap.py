"""Soft-capped logits: cap * tanh(logit / cap), Gemma 2 (arXiv 2408.00118, section 2). Gemma 2's cap is 50."""

from model import ops
from model.options import GPTConfig, SoftcapOptions
from model.slots import Logits, register


class Softcap(Logits):
    def __init__(self, options: SoftcapOptions, config: GPTConfig):
        super().__init__(options, config)
        self.bend = ops.Softcap(options.cap)


register(SoftcapOptions, Softcap)
