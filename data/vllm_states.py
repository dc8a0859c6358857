"""vLLM's hidden-state connector for a CPU. Runs inside the engine's environment, copied beside nothing else.

The engine's own (0.32, ExampleHiddenStatesConnector) copies to pinned memory and waits for CUDA events, which a CPU has
not. This one writes what is in memory already. Imports nothing of this project.
"""

import fcntl
import os
from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class Done:
    """A copy that has ended."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes {token_ids [T], hidden_states [T, layers, D]} of each finished request, without a device's streams."""

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)[:, None] * self._block_size
        slots = (blocks + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        tensors = {"hidden_states": states.contiguous().clone(), "token_ids": pending.token_ids.clone()}
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        handle = self._lock_fds.pop(pending.req_id, None)
        if handle is None and self.use_lock:
            handle = os.open(pending.filename + ".lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(handle, fcntl.LOCK_EX)
        future = self._executor.submit(self._write_tensors, tensors, Done(), pending.filename, handle)
        self._req_copy_events[pending.req_id] = Done()
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
