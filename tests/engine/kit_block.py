"""Hand-built block drafters on the copy target of tests/engine/kit.py: what each convention gives, 0% or 100%.

The drafter shares the target's head, which turns the name of x into x + 2, so slot k must end in the name of the token
before it. Mask rows look exactly DISTANCE = K + 1 positions back by their rotary phases: row k of slot k stands at its
own position a + k and finds position a + k - K - 1, the newest being a - 1. There it reads the marker that the target's
block 3 wrote, and the MLP advances it. A row that stands elsewhere, another layer, an anchor's feature in the context,
another theta: each gives another token.
"""

from typing import Any

import torch
from torch import Tensor

from drafters.contract import TargetParts
from drafters.dflash import DFlash
from drafters.dspark import DSpark
from tests.engine.kit import (
    ACTING,
    HEAD_DIM,
    LAYERS,
    MARKER,
    NAME,
    NONE,
    SLOTS,
    SPARE,
    STEP,
    THETA,
    WIDTH,
    Case,
    linear_mlp,
    odd_tokens,
    shift,
)

DISTANCE = SLOTS + 1
MASK = 0  # even: no text of odd tokens holds it
WINDOW = 8
SHARP = 12.0
HALF = HEAD_DIM // 2
PAIR = [ACTING - 1, ACTING]
SCALE = WIDTH**0.5


def blank(target: TargetParts, layers: list[int], **block: Any) -> tuple[DFlash, dict[str, Tensor]]:
    """A drafter of zeros with unit norms and sharp attention, and its state to write into."""
    vocabulary = block.pop("vocabulary", None)
    block = {"depth": 1, "mask_token": MASK} | block
    drafter = DFlash(target, vocabulary, num_slots=SLOTS, layers=layers, block=block).eval()
    state = dict(drafter.state_dict(keep_vars=True))
    for name, tensor in state.items():
        tensor.requires_grad_(False)
        tensor.fill_(1.0) if "norm" in name else tensor.zero_()
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            tensor.fill_(SHARP)
    return drafter, state


def phases(distance: float, used: int = HALF) -> Tensor:
    """Key that a constant query finds `distance` positions back, by its first `used` frequencies."""
    angle = distance / THETA ** (torch.arange(HALF) / HALF)
    kept = torch.arange(HALF) < used
    return torch.cat([angle.cos() * kept, angle.sin() * kept])


def constant_query() -> Tensor:
    return torch.cat([torch.ones(HALF), torch.zeros(HALF)])


def look(state: dict[str, Tensor], row: Tensor = NAME[MASK : MASK + 1], keys: Tensor | None = None) -> None:
    """Attention of layer 0: the query stands in rows that have a one in dimension `row`, the mask token's alone."""
    attention = "layers.0.self_attn."
    key = phases(DISTANCE) if keys is None else keys
    state[f"{attention}q_proj.weight"][:HEAD_DIM, row] = constant_query()[:, None]
    state[f"{attention}k_proj.weight"][:, NAME] = key[:, None].expand(-1, len(NAME))
    state[f"{attention}v_proj.weight"][NAME, NAME] = 1.0 / SCALE
    state[f"{attention}o_proj.weight"][SPARE, NAME] = 1.0


def advance(state: dict[str, Tensor], steps: int, reads: Tensor = NAME) -> None:
    """The MLP turns what attention found, in the spare dimensions, into a name `steps` tokens on, and clears the row's
    own. reads: the dimensions in which every row has its own one."""
    matrix = torch.zeros(WIDTH, WIDTH)
    matrix[NAME[:, None], SPARE] = shift(STEP * steps)
    matrix[NAME, NAME] = -1.0
    matrix[SPARE, SPARE] = -1.0
    linear_mlp(state, "layers.0.mlp", matrix, reads, norm=2)


def behind(target: TargetParts, layers: list[int], slot: int, **block: Any) -> DFlash:
    """Reads the marker of captured feature `slot`, DISTANCE positions back."""
    drafter, state = blank(target, layers, **block)
    state["fc.weight"][NAME, slot * WIDTH + MARKER] = 1.0
    look(state)
    advance(state, DISTANCE - 1)
    return drafter


def anchor(target: TargetParts) -> DFlash:
    """Reads the anchor's token in the block. All rows find the same, so slot 1 alone is right.

    The lowest frequency hardly turns over a block: keys are there in rows that are not masks.
    """
    drafter, state = blank(target, PAIR)
    attention, still = "layers.0.self_attn.", HALF - 1
    state[f"{attention}q_proj.weight"][still, NAME[MASK]] = 1.0
    state[f"{attention}k_proj.weight"][still, NAME[MASK + 1 :]] = 1.0
    state[f"{attention}v_proj.weight"][NAME, NAME] = 1.0 / SCALE
    state[f"{attention}o_proj.weight"][SPARE, NAME] = 1.0
    advance(state, 0)
    return drafter


def trained_mask(target: TargetParts) -> DFlash:
    """Mask rows are a vector of their own, with a one in the marker's dimensions, and only that has a query."""
    drafter, state = blank(target, PAIR, trained_mask=True)
    state["mask_embedding"][MARKER[0]] = 1.0
    state["fc.weight"][NAME, WIDTH + MARKER] = 1.0
    look(state, row=MARKER[:1])
    advance(state, DISTANCE - 1, reads=MARKER)
    return drafter


def looks_ahead(target: TargetParts, **block: Any) -> DFlash:
    """A mask row prefers the mask row after it, then what lies DISTANCE back, then itself. Right where it is causal.

    Mask rows' keys are turned one position ahead; those of the context are a little weaker, two frequencies being left
    out of them.
    """
    drafter, state = blank(target, PAIR, **block)
    state["fc.weight"][NAME, WIDTH + MARKER] = 1.0
    look(state, keys=phases(DISTANCE, used=HALF - 2))
    state["layers.0.self_attn.k_proj.weight"][:, NAME[MASK]] = phases(-1)
    advance(state, DISTANCE - 1)
    return drafter


def sequential(target: TargetParts) -> DSpark:
    """A DSpark drafter of zeros, for engines that refuse the method."""
    return DSpark(target, num_slots=SLOTS, layers=PAIR, block={"depth": 1, "mask_token": MASK}, head={"rank": 4})


FIRST_ONLY = (1,) + (0,) * (SLOTS - 1)
WINDOWED = {"window": WINDOW, "windowed": [0]}
BLOCK_CASES = [
    Case("block_layer", lambda t: behind(t, PAIR, 1), long=True),
    Case("fault_block_swapped_layer", lambda t: behind(t, PAIR, 0), NONE, long=True),
    Case("block_last_layer", lambda t: behind(t, [0, LAYERS - 1], 1), long=True),
    Case("block_four_layers_two_deep", lambda t: behind(t, [0, 2, 3, 6], 2, depth=2), long=True),
    Case("block_anchor", anchor, FIRST_ONLY, long=True),
    Case("block_vocabulary", lambda t: behind(t, PAIR, 1, vocabulary=odd_tokens()), long=True),
    Case("block_trained_mask", trained_mask, long=True),
    Case("block_windowed", lambda t: looks_ahead(t, **WINDOWED), long=True),
    Case("fault_block_not_causal", looks_ahead, NONE, long=True),
]
