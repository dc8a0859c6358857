"""Hand-built MTP heads, stitched into a copy target as MiMo heads: each goes through one convention.

The copy target is the kit's with heads as wide as MiMo has them (hidden size / heads) and a final norm that turns the
marker negative, so a state before and one after that norm tell opposite tokens. Row t holds the token after t and the
state of t, in which the token at t stands as name and as marker; slot 1 is the token two after t. The head answers
x + 2 to the name of x, so the block has to leave there the name of the token at t + 1.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from drafters.contract import Drafter, TargetParts
from drafters.mtp import Mtp
from tests.engine.kit import (
    LONG_PROMPTS,
    MARKER,
    NAME,
    PROMPTS,
    SLOTS,
    SPARE,
    STEP,
    THETA,
    TOKENS,
    WIDTH,
    copy_target,
    linear_mlp,
    shift,
)

HEADS = 2
HEAD_DIM = WIDTH // HEADS
SINGLE = [[1], [11], [33], [21]]
SERVED = {"reads": "pre_norm", "recycles": "post_norm", "concat": "hidden_first", "zero_first": True}


def native_target() -> LlamaForCausalLM:
    """See above."""
    return copy_target(HEAD_DIM, marker=-1.0)


def blank(target: TargetParts, **changed: Any) -> tuple[Mtp, dict[str, Tensor]]:
    """A head of zeros with unit norms, and its state to write into."""
    drafter = Mtp(target, num_slots=SLOTS, **(SERVED | changed)).eval()
    state = dict(drafter.state_dict(keep_vars=True))
    for name, tensor in state.items():
        tensor.requires_grad_(False)
        tensor.fill_(1.0) if "norm" in name else tensor.zero_()
    return drafter, state


def half(drafter: Mtp, what: str) -> int:
    """First column of eh_proj that reads the "state" or the "token"."""
    return WIDTH * ((drafter.state["concat"] == "hidden_first") == (what == "token"))


def own_state(target: TargetParts, sign: float = 1.0, back: float = -1.0, **changed: Any) -> Mtp:
    """Reads the target's marker times `sign`, and its own state of later steps from the spare dimensions times `back`,
    which the last norm turns negative. The plain name, the same before and after all norms, only opens the gate."""
    drafter, state = blank(target, **changed)
    first = half(drafter, "state")
    # The target's state holds two ones, and so does its own: name and spare.
    scale = (WIDTH / 2) ** 0.5
    state["eh_proj.weight"][NAME, first + MARKER] = sign / scale
    state["eh_proj.weight"][NAME, first + SPARE] = back / scale
    state["eh_proj.weight"][MARKER, first + NAME] = 1.0 / scale
    matrix = torch.zeros(WIDTH, WIDTH)
    matrix[NAME[:, None], NAME] = shift(STEP) - torch.eye(TOKENS)
    matrix[SPARE[:, None], NAME] = shift(STEP)
    matrix[MARKER, MARKER] = -1.0
    linear_mlp(state, "block.mlp", matrix, MARKER, norm=2)
    state["norm.weight"].fill_((2 / WIDTH) ** 0.5)
    state["norm.weight"][SPARE] *= -1.0
    return drafter


def token(target: TargetParts, what: str = "token", **changed: Any) -> Mtp:
    """Passes on the name in one half of eh_proj's input: the new token's, or the state's, which is one token old."""
    drafter, state = blank(target, **changed)
    state["eh_proj.weight"][NAME, half(drafter, what) + NAME] = 1.0 / WIDTH**0.5
    return drafter


def behind(target: TargetParts, distance: int = 10, turned: int = 10, **changed: Any) -> Mtp:
    """Attends exactly `turned` rows back by the rotary phases alone and advances the name found there by what is right
    for `distance`."""
    drafter, state = blank(target, **changed)
    width, scale = HEAD_DIM // 2, WIDTH**0.5
    state["eh_proj.weight"][NAME, half(drafter, "token") + NAME] = 1.0 / scale
    angle = turned / THETA ** (torch.arange(width) / width)
    key, query = torch.cat([angle.cos(), angle.sin()]), torch.cat([torch.ones(width), torch.zeros(width)])
    attention = "block.self_attn."
    state[f"{attention}k_proj.weight"][:, NAME] = (16.0 / scale * key)[:, None].expand(-1, TOKENS)
    state[f"{attention}q_proj.weight"][:HEAD_DIM, NAME] = (16.0 / scale * query)[:, None].expand(-1, TOKENS)
    state[f"{attention}v_proj.weight"][NAME, NAME] = 1.0 / scale
    state[f"{attention}o_proj.weight"][SPARE, NAME] = 1.0
    matrix = torch.zeros(WIDTH, WIDTH)
    matrix[NAME, NAME], matrix[SPARE, SPARE] = -1.0, -1.0
    matrix[NAME[:, None], SPARE] = shift(STEP * distance)
    linear_mlp(state, "block.mlp", matrix, NAME, norm=2)
    return drafter


@dataclass(frozen=True)
class NativeCase:
    """One convention, as kit.Case has them. A fault is built for another convention and passed off as one for this."""

    name: str
    build: Callable[[TargetParts], Drafter]
    alpha: tuple[int, ...] = (1,) * SLOTS
    prompts: list[list[int]] = field(default_factory=lambda: PROMPTS)


FIRST = (1, 0, 0)
NATIVE_CASES = (
    NativeCase("state", own_state),
    NativeCase("token", token),
    NativeCase("behind", behind, prompts=LONG_PROMPTS),
    # Built for a state after the target's final norm, for a recycled one before the head's, for the other order.
    NativeCase("fault_reads", lambda target: own_state(target, sign=-1.0), (0, 0, 0)),
    NativeCase("fault_recycles", lambda target: own_state(target, back=1.0), FIRST),
    NativeCase("fault_concat", lambda target: token(target, "state"), (0, 0, 0)),
    NativeCase("fault_distance", lambda target: behind(target, turned=9), (0, 0, 0), LONG_PROMPTS),
)
# The same weights where they belong: each fault above is right under these settings.
ELSEWHERE = {
    "fault_reads": lambda target: own_state(target, sign=-1.0, reads="post_norm"),
    "fault_recycles": lambda target: own_state(target, back=1.0, recycles="pre_norm"),
    "fault_concat": lambda target: token(target, concat="embedding_first"),
}
