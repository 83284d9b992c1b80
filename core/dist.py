"""torchrun: rank and world size from its environment, and the few collectives that training needs."""

import atexit
import os
import socket
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.process import StopSignal, end_with_parent, torchrun_ends
from core.schema import ConfigError, require


@dataclass(frozen=True)
class World:
    """local_rank, local_size: among the ranks of this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def read_world() -> World:
    """The ranks that torchrun describes in the environment; alone without it. Raises: ConfigError."""
    if "RANK" not in os.environ:
        return World()
    texts = {key: os.environ.get(key, "") for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    texts["LOCAL_WORLD_SIZE"] = os.environ.get("LOCAL_WORLD_SIZE", "1")
    said = " ".join(f"{key}={text}" for key, text in texts.items())
    rule = f"{said}: torchrun sets these variables; unset RANK to train in one process"
    require(all(text.isdecimal() and len(text) < 8 for text in texts.values()), rule)
    world = World(*map(int, texts.values()))
    can_meet = world.size == 1 or {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    require(world.rank < world.size and can_meet, rule)
    return world


def init(world: World, device: torch.device) -> None:
    if world.size > 1 and not dist.is_initialized():
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_parent(torchrun_ends)
            require_store()
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        atexit.register(dist.destroy_process_group)


def require_store() -> None:
    """Raises: ConfigError where torchrun has ended, whose process has the store that ranks meet at. They would wait for
    it half an hour."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            socket.create_connection(place, timeout=60).close()
        except OSError as error:
            raise ConfigError(f"torchrun has ended: its store at {place[0]}:{place[1]} is gone ({error})") from error


def all_reduce(tensor: Tensor, maximum: bool = False) -> Tensor:
    """Sum (or maximum) over the ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM)
    return tensor


def of_last_rank(tensor: Tensor) -> Tensor:
    """The last rank's, which computes the last micro-batch, on every rank, in place."""
    if dist.is_initialized():
        dist.broadcast(tensor, dist.get_world_size() - 1)
    return tensor


class AgreedStop:
    """Whether all ranks stop, because any one of them got a signal. Every rank calls agree() after each update. With
    several ranks `agreed` is about the call LAG calls earlier: that exchange has ended by now, so no rank waits."""

    LAG = 2

    def __init__(self, received: StopSignal) -> None:
        self.received, self.agreed = received, False
        self._sent: deque[tuple[Tensor, Any]] = deque()

    def at_once(self) -> bool:
        """Whether this process stops, between two updates too: one without other ranks has none to agree with."""
        self.agreed |= self.received.signal > 0 and not dist.is_initialized()
        return self.agreed

    def agree(self) -> None:
        wants = self.received.signal > 0
        if not dist.is_initialized():
            self.agreed = wants
            return
        flag = torch.tensor(int(wants))  # on the CPU: gloo exchanges it without a wait for a GPU
        self._sent.append((flag, dist.all_reduce(flag, dist.ReduceOp.MAX, async_op=True)))
        if len(self._sent) > self.LAG:
            flag, work = self._sent.popleft()
            work.wait()
            self.agreed = bool(flag)


def barrier() -> None:
    """Wait for every rank."""
    if dist.is_initialized():
        dist.barrier()


def gather(value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    values = [value]
    if dist.is_initialized():
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
    return values
