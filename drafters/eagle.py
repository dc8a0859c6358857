"""EAGLE-1 (arXiv 2401.15077, section 3), and the head that EAGLE-2 and HASS (arXiv 2408.15766) share with it.

A row reads the target's last hidden state of position t (after the final norm) and the embedding of the token at t + 1,
and predicts the target's last hidden state of t + 1, from which the target's frozen head gives the token at t + 2.

    row          t = a - 1             a                a + 1
    hidden       last hidden state     own output 1     own output 2
    token        x_a                   x_{a+1}          x_{a+2}
    x            fc([embedding; hidden])
    out          layer(x): h = x + attention(x), h + mlp(post_attention_layernorm(h)); no norm before, none after
    regresses    last hidden state a   of a + 1         of a + 2         the state that the next row would have read
    slot         1 -> a + 1            2 -> a + 2       3 -> a + 3

EAGLE-1 trains slot 1 alone, on features with uniform noise, and drafts the others on its own output: train_steps 1.
HASS trains train_steps 3, each slot reading what drafting would read.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from drafters.contract import Batch, Needs, SlotBatch, TargetParts
from drafters.decoder import PlainLayer, take_block
from drafters.layers import (
    Rotary,
    SharedEmbedding,
    SharedHead,
    check_counts,
    layer_config,
    layer_settings,
    plain_norm_weight,
)
from drafters.sampling import round_seeds
from drafters.unrolled import Unrolled
from drafters.vocabulary import DraftVocabulary

TOP_K = 10


class Eagle(Unrolled):
    """EAGLE-1 drafter; its head is the target's.

    num_slots: K, tokens drafted. train_steps: slots that training makes (null: all K). depth: layers; the first has no
    input norm. bias: of fc; vLLM has none. noise: training adds U(-noise, noise) to the features, drawn by the batch's
    seed. layer: overrides of the layers' sizes (drafters.layers.LAYER_KEYS).
    """

    training_only = ("train_steps", "noise")

    def __init__(
        self,
        target: TargetParts,
        vocabulary: DraftVocabulary | None = None,
        *,
        num_slots: int = 5,
        train_steps: int | None = 1,
        depth: int = 1,
        bias: bool = False,
        noise: float = 0.1,
        layer: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_counts("", num_slots=num_slots, depth=depth)
        if train_steps is not None and not 1 <= train_steps <= num_slots:
            raise ValueError(f"train_steps must be null or in 1..{num_slots} (num_slots), got {train_steps}")
        if noise < 0:
            raise ValueError(f"noise must be at least 0, got {noise}")
        self.num_slots, self.train_steps, self.bias, self.noise = num_slots, train_steps, bias, noise
        self.needs = Needs((), last_hidden=True)
        self.vocabulary = vocabulary or DraftVocabulary.full(target.config.vocab_size)
        self.layer_config = config = layer_config(target.config, layer)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.layers = nn.ModuleList(PlainLayer(config) for _ in range(depth))
        cast(PlainLayer, self.layers[0]).input_layernorm = nn.Identity()  # type: ignore[assignment]
        self.lm_head = SharedHead(target, self.vocabulary.ids.to(target.head.device))
        # Engines hand out unscaled rows, and no norm before fc would undo a scale.
        self.embedding = SharedEmbedding(replace(target, embedding_scale=1.0))
        self.rotary = Rotary(config)

    def settings(self) -> dict[str, Any]:
        return {
            "num_slots": self.num_slots,
            "train_steps": self.train_steps,
            "depth": len(self.layers),
            "bias": self.bias,
            "noise": self.noise,
            "layer": layer_settings(self.layer_config),
        }

    def read(self, aux: Tensor, last: Tensor) -> Tensor:
        return last

    def enter(self, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        fused = self.fc(torch.cat([embedded.to(hidden.dtype), hidden], -1))
        return fused, fused

    @property
    def body(self) -> Sequence[PlainLayer]:
        return cast(Sequence[PlainLayer], self.layers)

    def slots(self, batch: Batch) -> SlotBatch:
        return super().slots(self.noisy(batch))

    def noisy(self, batch: Batch) -> Batch:
        """The batch as this drafter reads it: in training mode with U(-noise, noise) on every feature, of the batch's
        seed and each row's number alone."""
        if not self.training or self.noise == 0:
            return batch
        device, (rows, *shape) = batch.last.device, batch.last.shape
        numbers = batch.first_row + batch.row_step * torch.arange(rows)
        # Mixed: a Mersenne twister's first numbers are alike for seeds that are.
        seeds = round_seeds(torch.full_like(numbers, batch.seed), numbers).tolist()
        generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        drawn = torch.stack([torch.rand(shape, generator=one, device=device) for one in generators])
        return replace(batch, last=batch.last + (self.noise * (2 * drawn - 1)).to(batch.last.dtype))

    def logits(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """hidden [N, D], a predicted last hidden state -> [N, W]; slots do not read prev_ids."""
        return self.lm_head(hidden)

    def measures(self) -> dict[str, Callable[[Any], Tensor]]:
        return {"topk_ce": topk_ce}

    @torch.no_grad()
    def warm_start(self, target: TargetParts) -> list[str]:
        """fc starts as the identity on the feature (its embedding half stays small and random), the layers as the
        target's last block.

        The first layer has no input norm, so its q, k, v take the block's norm weight, over the size that the final
        norm gives a feature. Layers after the first start without output.
        """
        size = self.layer_config.hidden_size
        self.fc.weight[:, size:].copy_(torch.eye(size))
        if self.bias:
            self.fc.bias.zero_()
        taken, final = ["fc <- identity on the feature"], plain_norm_weight(target.norm, size, self.norm_eps)
        if final is None or target.last_block is None:
            return taken
        block, norm_shift = target.last_block(), float((final - target.norm.weight.float()).mean())  # type: ignore[operator]
        for i, layer in enumerate(self.body):
            names = take_block(layer, block, norm_shift)
            if i > 0:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            elif "input_layernorm.weight" in block:
                scale = (block["input_layernorm.weight"].float() + norm_shift) / final.square().mean().sqrt()
                for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                    projection.weight.mul_(scale.to(projection.weight))
            taken += [f"layers.{i}.{name} <- target's last block" for name in names]
        return taken

    @property
    def norm_eps(self) -> float:
        return float(self.layer_config.rms_norm_eps)


def topk_ce(s: Any) -> Tensor:
    """-sum p log q over the TOP_K tokens of the draft vocabulary that the target holds most likely (HASS, section 3.1;
    p is not renormalised). s: training.objectives.Scored. [n]."""
    best, ids = s.teacher.float().topk(min(TOP_K, s.teacher.shape[-1]), -1)
    p = (best - s.lse[:, None]).exp()[s.owner]
    return -(p * s.logq.gather(-1, ids[s.owner])).sum(-1)
