"""A target that several processes hold together: transformers' tensor- and expert-parallel plans, for capture.

torchrun starts one process a device. The first one runs the command as if it were alone; the others only hold their
part of the weights and follow: each forward pass is announced to them with its arguments, and they end when it does.
So there is one writer, one journal and one log, whatever the number of devices.
"""

import atexit
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import distributed, nn


def parallel_arguments(tp_plan: Any) -> dict[str, Any]:
    """Arguments of from_pretrained that spread a model over the processes that torchrun started.

    tp_plan: "auto" (the family's own tensor-parallel plan), "experts" (that, and its expert-parallel plan:
    whole experts divided), or a plan by module names. ValueError without several processes.
    """
    from transformers.distributed import DistributedConfig

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks < 2:
        raise ValueError("target.tp_plan spreads a target over processes: start the command through torchrun")
    if tp_plan == "experts":
        return {"distributed_config": DistributedConfig(tp_size=ranks, tp_plan="auto", ep_size=ranks)}
    return {"distributed_config": DistributedConfig(tp_size=ranks, tp_plan=tp_plan)}


class Together:
    """The first process's side: announces passes. `calls`: what followers can be asked to run, by name."""

    def __init__(self, model: nn.Module, calls: dict[str, Callable[..., Any]]) -> None:
        """On every other process this never returns: it follows until the first one ends, and exits with 0."""
        self._inside = False
        if distributed.get_rank() > 0:
            _follow(calls)
        self._calls = calls
        model.register_forward_pre_hook(self._announced)
        atexit.register(self._end)

    def run(self, name: str, *arguments: Any) -> Any:
        """Run one of the calls on every process; returns this one's result."""
        moved = [one.cpu() if isinstance(one, torch.Tensor) else one for one in arguments]
        distributed.broadcast_object_list([name, moved], src=0)
        self._inside = True
        try:
            return self._calls[name](*arguments)
        finally:
            self._inside = False

    def _announced(self, *_: Any) -> None:
        if not self._inside:
            raise ValueError(
                "a target spread by target.tp_plan reads features and nothing else: let a server answer "
                "(answers.backend=server), and train and evaluate with target.device_map or on one device"
            )

    @staticmethod
    def _end() -> None:
        if distributed.is_initialized():
            distributed.broadcast_object_list([None, None], src=0)
            distributed.destroy_process_group()


def _follow(calls: dict[str, Callable[..., Any]]) -> NoReturn:
    while True:
        announced: list[Any] = [None, None]
        distributed.broadcast_object_list(announced, src=0)
        name, arguments = announced
        if name is None:
            distributed.destroy_process_group()
            sys.exit(0)
        with torch.inference_mode():
            calls[name](*arguments)
