"""QK gain: logits g q . k / sqrt(hs), g fixed or learned. Of 1.3 to 5 over an RMS norm: marin 5373 (one a head, or a
layer), openai/parameter-golf 1423 (one a head)."""

from torch import Tensor

from model.options import GainOptions, GPTConfig
from model.slots import Logits, register


class Gain(Logits):
    def __init__(self, options: GainOptions, config: GPTConfig):
        super().__init__(options, config)
        n = config.model.n_head if options.learned == "head" else 1
        self.g = self.new_parameter(n, options.g) if options.learned else None

    def scale_queries(self, q: Tensor, pos: int) -> Tensor:
        g = self.options.g if self.g is None else self.g[:, None, None]
        return (q * g).to(q.dtype)  # (B, nh, T, hs)


register(GainOptions, Gain)
