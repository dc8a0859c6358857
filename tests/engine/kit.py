"""Hand-built target and EAGLE-3 drafters that turn each convention into 0% or 100% acceptance.

Copy target. Tokens 0..63; embedding of x is the unit vector e_x in dimensions 0..63 ("name"). All attention is
silent. Block 3 alone acts: its MLP writes the same token once more into dimensions 64..127 ("marker"). The head reads
the name and answers x + 2 (mod 64), so greedy text is known: x, x+2, x+4, ..., two cycles of 32 tokens, odd and even.
Dimensions 128..191 stay empty for the drafters. A gated MLP whose gate is constant is an exact linear map, so all of
it is written by formula.

    dimensions   0..63 name      64..127 marker      128..191 spare

Drafters. State in the drafter's residual: the name of the next token known to it. Each case below reads what it is
told to read through one convention only; reading it otherwise gives nothing, or the negative, and no token is accepted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from drafters.contract import Drafter, TargetParts
from drafters.eagle3 import Eagle3
from drafters.vocabulary import DraftVocabulary

TOKENS, WIDTH, LAYERS, ACTING, STEP = 64, 192, 8, 3, 2
HEAD_DIM, HEADS, THETA = 128, 2, 500.0
NAME, MARKER, SPARE = (torch.arange(TOKENS) + TOKENS * i for i in range(3))
SLOTS = 3
# Fewer than 32 positions each, so no token comes twice and content-based attention has one answer.
PROMPTS = [[1, 3, 5, 7], [11, 13], [33, 35, 37], [21, 23, 25, 27, 29]]
LONG_PROMPTS = [[(start + STEP * i) % TOKENS for i in range(14)] for start in (1, 11, 33, 21)]
NEW_TOKENS = 16
GATE = 20.0  # silu(20) = 20 up to 4e-8


def shift(by: int) -> Tensor:
    """[64, 64] matrix M with M e_x = e_(x + by)."""
    return torch.eye(TOKENS).roll(by, 0)


def expected(prompt: list[int], count: int = NEW_TOKENS) -> list[int]:
    """The target's greedy answer."""
    return [(prompt[-1] + STEP * (i + 1)) % TOKENS for i in range(count)]


def linear_mlp(state: dict[str, Tensor], prefix: str, matrix: Tensor, reads: Tensor, norm: float) -> None:
    """Make the gated MLP `prefix` add matrix @ x to the residual x, for inputs that have ones in as many dimensions
    as `norm` says: the RMS norm multiplies them by sqrt(WIDTH / norm). The gate sums the dimensions `reads`, one of
    which is 1."""
    scale = (WIDTH / norm) ** 0.5
    gate = torch.zeros(WIDTH)
    gate[reads] = GATE / scale
    state[f"{prefix}.gate_proj.weight"].copy_(gate.expand_as(state[f"{prefix}.gate_proj.weight"]))
    state[f"{prefix}.up_proj.weight"].copy_(matrix / (scale * GATE))
    state[f"{prefix}.down_proj.weight"].copy_(torch.eye(WIDTH))


def copy_target(head_dim: int = HEAD_DIM, marker: float = 0.0) -> LlamaForCausalLM:
    """The target described above. marker: its final norm's weight on the marker; 0: a feature that passed through it
    lacks the marker."""
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        rms_norm_eps=1e-9,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        state = model.state_dict()
        for name, tensor in state.items():
            tensor.fill_(1.0) if "norm" in name else tensor.zero_()
        state["model.embed_tokens.weight"][:, NAME] = torch.eye(TOKENS)
        state["lm_head.weight"][:, NAME] = shift(STEP)
        state["model.norm.weight"][MARKER] = marker
        write = torch.zeros(WIDTH, WIDTH)
        write[MARKER, NAME] = 1.0
        linear_mlp(state, f"model.layers.{ACTING}.mlp", write, NAME, norm=1)
    return model


def parts(model: LlamaForCausalLM) -> TargetParts:
    identity = {
        "name": "copy-target",
        "architecture": "LlamaForCausalLM",
        "weights": "copy",
        "tokenizer": "none",
        "chat_template": "none",
        "num_layers": LAYERS,
        "hidden_size": WIDTH,
        "vocab_size": TOKENS,
    }
    return TargetParts(
        config=model.config,
        embedding=model.get_input_embeddings().weight.detach(),
        norm=model.model.norm,
        head=model.lm_head.weight.detach(),
        identity=identity,
    )


@dataclass(frozen=True)
class Case:
    """One convention. build writes the drafter; alpha is the acceptance of each slot, 0 or 1. A name that starts with
    fault_ plants one in the weights."""

    name: str
    build: Callable[[TargetParts], Drafter]
    alpha: tuple[int, ...] = (1,) * SLOTS
    long: bool = False

    @property
    def prompts(self) -> list[list[int]]:
        return LONG_PROMPTS if self.long else PROMPTS


def blank(target: TargetParts, layers: list[int], **arguments: Any) -> tuple[Eagle3, dict[str, Tensor]]:
    """A drafter of zeros with unit norms, head = name + 2, and its state to write into."""
    drafter = Eagle3(target, arguments.pop("vocabulary", None), num_slots=SLOTS, layers=layers, **arguments).eval()
    state = {name: tensor for name, tensor in drafter.state_dict(keep_vars=True).items()}
    for name, tensor in state.items():
        tensor.requires_grad_(False)
        tensor.fill_(1.0) if "norm" in name else tensor.zero_()
    if "lm_head.weight" in state:
        state["lm_head.weight"][:, NAME] = shift(STEP)[drafter.vocabulary.ids]
    return drafter, state


def advance(state: dict[str, Tensor], norm: float = 1) -> None:
    """The draft layer's MLP turns the name of x into that of x + 2."""
    matrix = torch.zeros(WIDTH, WIDTH)
    matrix[NAME[:, None], NAME] = shift(STEP) - torch.eye(TOKENS)
    linear_mlp(state, "midlayer.mlp", matrix, NAME, norm)


def features(
    target: TargetParts, layers: list[int], slot: int, source: Tensor = MARKER, sign: float = 1.0, **arguments: Any
) -> Eagle3:
    """Reads the token at t from dimensions `source` of captured feature `slot`, nothing else; recycles its own state.

    hidden = name(x_t); the MLP makes it name(x_t + 2) = name of the anchor; the head answers the token after.
    """
    drafter, state = blank(target, layers, **arguments)
    state["fc.weight"][NAME, slot * WIDTH + source] = sign
    advance(state)
    return drafter


def token(target: TargetParts, offset: int = 0, half: int = 0) -> Eagle3:
    """Reads the token embedding alone, through attention to its own row: the anchor, then each drafted token.

    Queries and keys are both the token's name, so a row attends where its own token stands. The value is the new
    token's name less the recycled one. offset -1 expects the token *before* the one it is given (an unshifted token
    column).
    """
    drafter, state = blank(target, [ACTING - 1, ACTING])
    attention = "midlayer.self_attn."
    # One head of 128 dimensions rotates dimension i with i + 64, so names in 0..63 never mix with one another.
    for projection, factor in (("q_proj", 2.0), ("k_proj", 2.0)):
        for head in range(HEADS if projection == "q_proj" else 1):
            state[f"{attention}{projection}.weight"][head * HEAD_DIM + NAME, half * WIDTH + NAME] = factor
    scale = WIDTH**0.5
    state[f"{attention}v_proj.weight"][NAME, half * WIDTH + NAME] = 1.0 / scale
    state[f"{attention}v_proj.weight"][NAME, (1 - half) * WIDTH + NAME] = -1.0 / scale
    state[f"{attention}o_proj.weight"][NAME, NAME] = 1.0
    if offset:
        state["lm_head.weight"].zero_()
        state["lm_head.weight"][:, NAME] = shift(STEP * (1 - offset))
    return drafter


def recycled(target: TargetParts, **switches: bool) -> Eagle3:
    """Recycles through a copy in the spare dimensions that the last norm would turn negative.

    The state is name(x) + spare(x). The head reads the name; the MLP advances both from the spare copy. With
    norm_output the recycled state must be the negative copy, without it the positive one. fc and the MLP are written
    for what is asked.
    """
    drafter, state = blank(target, [ACTING - 1, ACTING], switches=switches)
    sign = -1.0 if switches.get("norm_output") else 1.0
    state["fc.weight"][NAME, WIDTH + MARKER] = 1.0
    state["fc.weight"][SPARE, WIDTH + MARKER] = sign
    matrix = torch.zeros(WIDTH, WIDTH)
    matrix[NAME[:, None], SPARE] = sign * shift(STEP)
    matrix[SPARE[:, None], SPARE] = sign * shift(STEP) - torch.eye(TOKENS)
    matrix[NAME, NAME] = -1.0
    linear_mlp(state, "midlayer.mlp", matrix, NAME, norm=2)
    # Weighted so that a normed state of two ones has size one again.
    state["norm.weight"].fill_((2 / WIDTH) ** 0.5)
    state["norm.weight"][SPARE] *= -1.0
    return drafter


def residual(target: TargetParts, **switches: bool) -> Eagle3:
    """The residual starts from hidden_norm's output, which is negative in the spare copy, or from its input."""
    drafter, state = blank(target, [ACTING - 1, ACTING], switches=switches)
    sign = -1.0 if switches.get("norm_before_residual") else 1.0
    state["fc.weight"][NAME, WIDTH + MARKER] = 1.0
    state["fc.weight"][SPARE, WIDTH + MARKER] = 1.0
    state["midlayer.hidden_norm.weight"].fill_((2 / WIDTH) ** 0.5)
    state["midlayer.hidden_norm.weight"][SPARE] *= -1.0
    matrix = torch.zeros(WIDTH, WIDTH)
    matrix[NAME[:, None], SPARE] = sign * shift(STEP)
    matrix[SPARE[:, None], SPARE] = sign * shift(STEP) - torch.eye(TOKENS)
    matrix[NAME, NAME] = -1.0
    linear_mlp(state, "midlayer.mlp", matrix, NAME, norm=2)
    return drafter


def layer_norms(target: TargetParts) -> Eagle3:
    """fc_norm turns the marker of the second feature negative, and fc reads it with a minus."""
    drafter = features(target, [ACTING - 1, ACTING], 1, sign=-1.0, switches={"fc_norm": True})
    state = drafter.state_dict(keep_vars=True)
    # The feature is name + marker: two ones, which the norm makes sqrt(WIDTH / 2).
    state["fc_norm.1.weight"].fill_((2 / WIDTH) ** 0.5)
    state["fc_norm.1.weight"][MARKER] *= -1.0
    return drafter


def behind(target: TargetParts, distance: int = 10) -> Eagle3:
    """Attends exactly `distance` rows back by the rotary phases alone: another theta, scaling or position looks
    elsewhere.

    Queries and keys are one constant vector each; the key is turned ahead by distance * frequency. Attention writes
    the name found there into the spare dimensions; the MLP moves it over the old name; the head advances it distance
    + 1 steps.
    """
    drafter, state = blank(target, [ACTING - 1, ACTING])
    half = HEAD_DIM // 2
    angle = distance / THETA ** (torch.arange(half) / half)
    key = torch.cat([angle.cos(), angle.sin()])
    query = torch.cat([torch.ones(half), torch.zeros(half)])
    attention, scale = "midlayer.self_attn.", WIDTH**0.5
    state[f"{attention}k_proj.weight"][:, NAME] = (12.0 / scale * key)[:, None].expand(-1, TOKENS)
    state[f"{attention}q_proj.weight"][:HEAD_DIM, NAME] = (12.0 / scale * query)[:, None].expand(-1, TOKENS)
    state[f"{attention}v_proj.weight"][NAME, NAME] = 1.0 / scale
    state[f"{attention}o_proj.weight"][SPARE, NAME] = 1.0
    state["fc.weight"][NAME, NAME] = 1.0
    matrix = torch.zeros(WIDTH, WIDTH)
    matrix[NAME, NAME], matrix[NAME, SPARE], matrix[SPARE, SPARE] = -1.0, 1.0, -1.0
    linear_mlp(state, "midlayer.mlp", matrix, NAME, norm=2)
    state["lm_head.weight"].zero_()
    state["lm_head.weight"][:, NAME] = shift(STEP * (distance + 1))
    return drafter


def odd_tokens() -> DraftVocabulary:
    """Half the tokens: draft id i is token 2 i + 1, so d2t[i] = i + 1 and no draft id is its own token."""
    return DraftVocabulary(torch.arange(1, TOKENS, 2), TOKENS)


def pruned(target: TargetParts, head: str = "own") -> Eagle3:
    return features(target, [ACTING - 1, ACTING], 1, vocabulary=odd_tokens(), head=head)


NONE = (0,) * SLOTS
CASES = [
    Case("layer", lambda t: features(t, [ACTING - 1, ACTING], 1)),
    Case("fault_swapped_layer", lambda t: features(t, [ACTING - 1, ACTING], 0), NONE),
    Case("last_layer_before_norm", lambda t: features(t, [0, LAYERS - 1], 1)),
    Case("four_layers", lambda t: features(t, [0, 2, 3, 6], 2)),
    Case("token", token),
    Case("fault_unshifted_token", lambda t: token(t, offset=-1), NONE),
    Case("fault_swapped_halves", lambda t: token(t, half=1), NONE),
    Case("vocabulary", pruned),
    Case("target_head", lambda t: features(t, [ACTING - 1, ACTING], 1, head="target")),
    Case("target_head_rows", lambda t: pruned(t, head="target")),
    Case("recycled_before_norm", recycled),
    Case("recycled_after_norm", lambda t: recycled(t, norm_output=True)),
    Case("residual_after_norm", lambda t: residual(t, norm_before_residual=True)),
    Case("layer_norms", layer_norms),
    Case("rope", behind, long=True),
]


def save_target(folder: Path) -> Path:
    copy_target().save_pretrained(folder)
    return folder
