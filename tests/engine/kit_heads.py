"""Hand-built P-EAGLE and Medusa drafters on the copy target of tests/engine/kit.py.

P-EAGLE. Every row, the anchor's and the mask rows after it, looks BACK positions back by its rotary phases and reads
the fused feature there: at a - 1 + (k - 1) - BACK for slot k. The query comes from the row's token (the anchor's, or
the mask token), the gate of the MLP from its feature (or mask_hidden): without either a row gives nothing.

Medusa. Head k turns the name of the token before the anchor into that of k tokens on; the shared head gives the next.
"""

from typing import Any

import torch
from torch import Tensor

from drafters.contract import TargetParts
from drafters.medusa import Medusa
from drafters.peagle import PEagle
from tests.engine.kit import (
    ACTING,
    HEAD_DIM,
    MARKER,
    NAME,
    NONE,
    SLOTS,
    SPARE,
    STEP,
    WIDTH,
    Case,
    linear_mlp,
    odd_tokens,
    shift,
)
from tests.engine.kit_block import constant_query, phases

BACK, MASK = SLOTS, 0
PAIR = [ACTING - 1, ACTING]
SCALE = WIDTH**0.5


def parallel(target: TargetParts, layers: list[int], slot: int, depth: int = 1, **arguments: Any) -> PEagle:
    """Reads the marker of captured feature `slot`, BACK positions back."""
    vocabulary = arguments.pop("vocabulary", None)
    drafter = PEagle(
        target, vocabulary, num_slots=SLOTS, depth=depth, layers=layers, mask_rows={"token": MASK}, **arguments
    ).eval()
    state: dict[str, Tensor] = dict(drafter.state_dict(keep_vars=True))
    for name, tensor in state.items():
        tensor.requires_grad_(False)
        tensor.fill_(1.0) if "norm" in name else tensor.zero_()
    state["fc.weight"][NAME, slot * WIDTH + MARKER] = 1.0
    state["mask_hidden"][0, slot * WIDTH + MARKER[5]] = 1.0
    attention, query = "layers.0.self_attn.", 12.0 / SCALE * constant_query()
    # Another mask token than this one looks where the phases fit least. Texts have odd tokens.
    state[f"{attention}q_proj.weight"][:HEAD_DIM, NAME] = query[:, None]
    state[f"{attention}q_proj.weight"][:HEAD_DIM, NAME[MASK + 2 :: 2]] = -query[:, None]
    state[f"{attention}k_proj.weight"][:, WIDTH + NAME] = (12.0 / SCALE * phases(BACK))[:, None].expand(-1, len(NAME))
    state[f"{attention}v_proj.weight"][NAME, WIDTH + NAME] = 1.0 / SCALE
    state[f"{attention}o_proj.weight"][SPARE, NAME] = 1.0
    matrix = torch.zeros(WIDTH, WIDTH)
    matrix[NAME[:, None], SPARE] = shift(STEP * (BACK + 1))
    matrix[NAME, NAME] = -1.0
    matrix[SPARE, SPARE] = -1.0
    linear_mlp(state, "layers.0.mlp", matrix, NAME, norm=2)
    if "lm_head.weight" in state:
        state["lm_head.weight"][:, NAME] = shift(STEP)[drafter.vocabulary.ids]
    return drafter


def heads(target: TargetParts, off: int = 0, **arguments: Any) -> Medusa:
    """Head k is k + off tokens on."""
    vocabulary = arguments.pop("vocabulary", None)
    drafter = Medusa(target, vocabulary, num_slots=SLOTS, **arguments).eval()
    state: dict[str, Tensor] = dict(drafter.state_dict(keep_vars=True))
    for name, tensor in state.items():
        tensor.requires_grad_(False)
        if name == "lm_head.weight":
            tensor.zero_()[:, NAME] = shift(STEP)[drafter.vocabulary.ids]
    for k in range(SLOTS):
        # SiLU is the identity far above zero, so the token meant outweighs the one that is there three times.
        state[f"blocks.{k}.layers.0.weight"][NAME[:, None], NAME] = 3.0 * shift(STEP * (k + 1 + off))
    return drafter


HEAD_CASES = [
    Case("parallel_layer", lambda t: parallel(t, PAIR, 1), long=True),
    Case("fault_parallel_swapped_layer", lambda t: parallel(t, PAIR, 0), NONE, long=True),
    Case("parallel_four_layers_two_deep", lambda t: parallel(t, [0, 2, 3, 6], 2, depth=2), long=True),
    Case("parallel_vocabulary", lambda t: parallel(t, PAIR, 1, vocabulary=odd_tokens(), head="target"), long=True),
    Case("medusa", heads),
    Case("fault_medusa_heads_off_by_one", lambda t: heads(t, off=-1), NONE),
    Case("medusa_vocabulary", lambda t: heads(t, vocabulary=odd_tokens())),
    Case("medusa_target_head", lambda t: heads(t, head="target")),
]
