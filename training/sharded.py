"""FSDP2: drafter, gradients and optimizer state spread over all ranks of a run.

The whole training step is one sharded unit: the drafter's weights are gathered when the step starts and stay until its
backward pass has ended, for the objective projects slots in chunks and computes gradients on the way. So masters,
gradients and moments (16 bytes a weight in float32) are divided by the number of ranks, gathered weights are not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

from lightning import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed import default_pg_timeout
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's strategy for FSDP2 with every rank in the data-parallel mesh, and checkpoints in one file, which any
    number of ranks and any strategy resumes. timeout: after which a collective without answer ends the run."""

    def __init__(self, timeout: timedelta = default_pg_timeout, process_group_backend: str | None = None) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            timeout=timeout,
            process_group_backend=process_group_backend,
        )

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()


def shard(module: LightningModule, mesh: DeviceMesh) -> None:
    """Spread a module's parameters over the mesh; its training step gathers them. Once."""
    if isinstance(module, FSDPModule):
        return
    fully_shard(module, mesh=mesh["data_parallel"], reshard_after_forward=False)
    register_fsdp_forward_method(module, "training_step")


@contextmanager
def whole(module: LightningModule) -> Iterator[None]:
    """All weights on every rank for a while; nothing to do for a module that is not sharded. Every rank must call
    it."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def gathered(module: nn.Module) -> dict[str, Tensor]:
    """The state dict, whole on rank 0 where ranks hold shards (others get none of it). Every rank must call it."""
    if not any(isinstance(p, DTensor) for p in module.parameters()):
        return module.state_dict()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return cast(dict[str, Tensor], get_model_state_dict(module, options=options))
