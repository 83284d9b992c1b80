"""The losses, gradient norms and logit maxima of updates. They stay on the device until several updates are read at
once, because the host must wait to read one."""

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core import dist
from training.config import LogClipOptions
from training.qk_clip import over_updates, qk_clip_line
from training.schedule import learning_rate, n_evaluations
from training.session import Session
from training.state import Readings


class Diverged(Exception):
    """A loss, a gradient or a weight is not finite. line: what is logged of that iteration, "iter" among it."""

    def __init__(self, line: dict[str, Any], reason: str) -> None:
        super().__init__(reason)
        self.line, self.step, self.reason = line, line["iter"], reason


class Meter:
    """For each update: start(), then add(). read() raises Diverged for the first update that is not finite, however
    many were made after it. readings: those of the checkpoint from which a resumed run goes on.

    The line of iteration 250 holds val/loss before update 250, train/loss and grad_norm of update 250, and tok_per_sec,
    mfu and qk_clip/... of all updates since the line before.
    """

    def __init__(self, session: Session, readings: Readings = Readings()) -> None:  # noqa: B008  # it is frozen
        self.session = session
        self._peak = session.peak  # FLOP/s; the measured one may be too low
        self.train_loss, self.clip_metrics = readings.train_loss, readings.clip_metrics
        self.train_seconds = readings.train_seconds
        self._began = time.perf_counter() - readings.seconds
        self._unread: list[tuple[int, Tensor, Tensor | None]] = []
        self._updates, self._logged_seconds = 0, self.train_seconds  # since the last line

    @property
    def seconds(self) -> float:
        """Seconds of the whole run, over all resumes."""
        return time.perf_counter() - self._began

    def readings(self) -> Readings:
        return Readings(self.train_loss, self.clip_metrics, self.seconds, self.train_seconds)

    def start(self) -> None:
        self._update_began = time.perf_counter()

    def add(self, step: int, loss: Tensor, grad_norm: Tensor, maxima: Tensor | None) -> None:
        """Take an update's loss on this rank, (), gradient norm, () and QK-Clip's maxima, (n_layer, n_head)."""
        mean_loss = dist.all_reduce(loss / self.session.machine.world.size)
        self._unread.append((step, torch.stack([mean_loss, grad_norm]), maxima))
        self._updates += 1
        self.train_seconds += time.perf_counter() - self._update_began

    def read(self, line: Mapping[str, Any]) -> dict[str, float]:
        """Read the updates since the last read(). Returns train/loss and grad_norm of the last one. line: what is known
        of its iteration. Raises: Diverged."""
        began = time.perf_counter()
        steps, numbers, maxima = zip(*self._unread, strict=True)
        self._unread = []
        numbers_per_update = torch.stack(numbers).tolist()
        maxima_per_update = torch.stack(maxima).cpu() if maxima[0] is not None else [None] * len(steps)
        read: dict[str, float] = {}
        for step, (loss, norm), maxima_of_update in zip(steps, numbers_per_update, maxima_per_update, strict=True):
            read = {"train/loss": loss, "grad_norm": norm}
            finite = math.isfinite(loss) and math.isfinite(norm)
            if maxima_of_update is not None:
                # an update that is not finite reports its maxima only, as with qk_clip=log: its clips do not count
                options = self.session.config.qk_clip if finite else LogClipOptions()
                self.clip_metrics = over_updates(self.clip_metrics, qk_clip_line(maxima_of_update, options))
            if not finite:
                known = line if step == line["iter"] else {"iter": step, "lr": learning_rate(step, self.session.config)}
                raise Diverged({**known, **read}, f"train/loss {loss}, grad_norm {norm}")
            self.train_loss = loss
        self.train_seconds += time.perf_counter() - began
        return read

    def take_interval(self) -> dict[str, float]:
        """Tokens a second, MFU and QK-Clip's numbers of the updates since the last call. Starts the next interval."""
        config, seconds = self.session.config, self.train_seconds - self._logged_seconds
        rate = self._updates * config.tokens_per_iter / seconds
        flops = rate * self.session.model.flops_per_token()
        self._peak = max(self._peak, flops)
        line = {"tok_per_sec": rate, "mfu": flops / self._peak, **self.clip_metrics}
        self._updates, self._logged_seconds, self.clip_metrics = 0, self.train_seconds, {}
        return line

    def seconds_left(self, line: Mapping[str, Any]) -> float:
        """What is left after a line's update: updates at its speed, and evaluations as long as those so far."""
        config, step = self.session.config, line["iter"]
        updates = (config.max_iters - step - 1) * config.tokens_per_iter / line["tok_per_sec"]
        done = step // config.eval_interval + 1  # evaluations
        return updates + (n_evaluations(config) - done) * (self.seconds - self.train_seconds) / done
