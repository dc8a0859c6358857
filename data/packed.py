"""Linear layers of a frozen target on a CPU, laid out once for oneDNN.

A product of a few rows with a large matrix lays the matrix out anew at every call in plain PyTorch, so verifying six
tokens would cost twice one, where on a GPU it costs the same. Laid out once, it nearly does here too: on two AVX2 cores
59 ms become 30 (benchmarks/packed_linear.py). The weights stay as they are beside the copy.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

PACK_AT_MOST = 4 << 30  # bytes of weights: packing holds them twice


class PackedLinear:
    """x -> x W^T + b, float32 on the CPU, from a packed copy; anything else goes to the plain product.

    weight [N, D], bias [N] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)

    def __call__(self, states: Tensor) -> Tensor:
        """states [..., D] -> [..., N]."""
        tracked = torch.is_grad_enabled() and states.requires_grad
        if tracked or states.device.type != "cpu" or states.dtype != torch.float32:
            device = states.device
            bias = None if self.bias is None else self.bias.to(device)
            return nn.functional.linear(states, self.weight.to(device), bias)
        return torch.ops.mkldnn._linear_pointwise(states, self._packed, self.bias, "none", [], "")


def packable(weight: Tensor) -> bool:
    """Whether a matrix can be packed: dense float32 on the CPU, and oneDNN is there."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.ndim == 2
        and not isinstance(weight, DTensor)
        and torch.backends.mkldnn.is_available()
    )


def pack_linears(model: nn.Module) -> int:
    """Let the linear layers of a frozen model compute from packed copies; returns how many do.

    0 when the model is larger than PACK_AT_MOST. Parameters, module types and names stay as they are. ValueError when
    its weights are trained.
    """
    linears = [module for module in model.modules() if type(module) is nn.Linear and packable(module.weight)]
    if sum(module.weight.nbytes for module in linears) > PACK_AT_MOST:
        return 0
    for module in linears:
        if module.weight.requires_grad:
            raise ValueError("only a frozen model can be packed: its weights would change and the copies would not")
        module.forward = PackedLinear(module.weight, module.bias)  # type: ignore[method-assign, assignment]
    return len(linears)
