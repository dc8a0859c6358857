"""K-forcing (arXiv 2606.10820) as a head on the target's features: slots know the noise that decides their tokens.

The target's token at position t is pick(p_t, u_t), an inverse CDF of one noise, so K tokens are a function of the
context and K noises, and one pass can say them jointly. A block (drafters.block) holds the anchor's row and noise rows:

    position            ... a-1  |  a      a+1      a+2      a+3
    context keys             c   |
    causal                       |  x_a    u_a+1    u_a+2    u_a+3     row a+k predicts a+k, sees noises up to its own
    conditional                  |  x_a    u_a+1    u_a+2              row a+k-1 predicts a+k, sees noises before it
    joint                        |  x_a    [u_a+1 .. u_a+3]            one row, K heads: every slot sees all noises

Rows are causal. causal and joint say the target's very token and are verified by the same noise; conditional gives a
distribution (C-PTP, arXiv 2512.21323). docs/kforcing.md derives labels and losslessness.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from drafters.attention import block_block_mask, dense_block, flex_block, fused
from drafters.block import BLOCK, BlockDrafter, BlockState, View
from drafters.branches import Branches
from drafters.contract import Batch, Coupling, Drafter, Grid, Proposal, SlotBatch, TargetParts, grid
from drafters.drafting import choose
from drafters.layers import complete
from drafters.noise import PointwiseNoiseEncoder, bins, pick, pick_ranked
from drafters.sampling import DRAFT_STREAM, NOISE_STREAM, TRAIN_STREAM, Sampling, counter_uniform
from drafters.vocabulary import DraftVocabulary

FORMS, ORDERS = ("causal", "joint", "conditional"), ("id", "ranked")
NOISE: dict[str, Any] = {
    "form": "causal",
    "order": "id",
    "coupling": None,
    "temperatures": [1.0],
    "greedy": 0.25,
    "fresh": 0.25,
    "width": None,
}
LOGITS_AT_ONCE = 1 << 24
# What a training draw is for: its number is added to the position above all columns.
FIELD, FRESH, HEAT, GREEDY, CHOSEN, STAGE = (n << 44 for n in range(6))

# Aux features [B, A, n, L, D] of branches [B, A, n] that follow the batch's anchors, as the target reads them.
Reader = Callable[[Batch, Tensor, tuple[int, ...]], Tensor]


@dataclass
class NoiseView(View):
    """A causal view. limit [B, A]: row columns before it may be seen (of the document at limit - 1). branch: so many
    columns of each anchor's own stand after the row's, anchor by anchor, at positions limit, limit + 1, ..."""

    limit: Tensor
    branch: int = 0

    def attend(
        self, query: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], window: int | None
    ) -> Tensor:
        """As View's, causal in every layer."""
        if fused(query) and torch.is_grad_enabled() and not self.branch:
            if window not in self.masks:
                self.masks[window] = block_block_mask(self.documents, self.anchors, self.slots, window, True)
            return flex_block(query, context, block, self.masks[window])
        return dense_block(query, context, block, self.visible(window), self.inside(window, query.device))

    def visible(self, window: int | None) -> Tensor:
        """[B, A, S or 1, T + A * branch]: the context that a block's rows see."""
        rows, count = self.limit.shape
        device, limit = self.limit.device, self.limit[..., None, None]
        columns = torch.arange(self.documents.shape[1], device=device)
        own = self.documents.gather(1, (self.limit - 1).clamp(0, self.documents.shape[1] - 1))[..., None, None]
        seen = (columns < limit) & (self.documents[:, None, None] == own)
        ends = torch.arange(count * self.branch, device=device)
        branch = (ends // max(self.branch, 1) == torch.arange(count, device=device)[:, None])[None, :, None]
        seen = torch.cat([seen, branch.expand(rows, -1, -1, -1)], -1)
        if window is None:
            return seen
        places = torch.cat([columns.expand(rows, count, 1, -1), limit + ends % max(self.branch, 1)], -1)
        last = self.anchors[..., None, None] + torch.arange(self.slots, device=device)[:, None]
        return seen & (places > last - window)

    def inside(self, window: int | None, device: torch.device) -> Tensor:
        """[S, S]: no later row, and in a windowed layer none further back than the window."""
        earlier = torch.ones(self.slots, self.slots, dtype=torch.bool, device=device).tril()
        return earlier if window is None else earlier.triu(1 - window)


class SlotHead(nn.Module):
    """One slot's own layer of the joint form: h + SiLU(proj(norm(h))), the identity at first."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(size), nn.Linear(size, size)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return hidden + nn.functional.silu(self.proj(self.norm(hidden)))


@dataclass
class Draws:
    """Noises of a slot grid.

    noise [B, A, K] float64. tau [B, A]. labels [B, A, K] the tokens they decide. mask [B, A, K]: slots whose labels are
    the target's own (or the frozen drafter's).
    """

    noise: Tensor
    tau: Tensor
    labels: Tensor
    mask: Tensor


class KForcing(BlockDrafter):
    """K-forcing drafter.

    noise: form (causal, joint, conditional), order of the CDF (id, ranked), coupling (null: same noise in that order
    for causal and joint, rejection for conditional, which may also take same_noise), temperatures (one is drawn for
    each packed row; a drafter in eval mode reads the first), greedy (share of anchors that learn temperature 0), fresh
    (share of positions whose noise is uniform instead of inside the bin of the data's token), width (of the noise
    encoder; null: the hidden size, at most 768). The rest as in BlockDrafter.
    """

    training_only = ("block.anchors", "noise.temperatures", "noise.greedy", "noise.fresh")

    follows_drafts = False  # noises tell later slots what came before, not tokens: there is one branch to draft
    branching = None
    reads_teacher = True  # pushes the target's own noise forward

    def __init__(
        self,
        target: TargetParts,
        vocabulary: DraftVocabulary | None = None,
        *,
        noise: dict[str, Any] | None = None,
        **block: Any,
    ) -> None:
        found = complete("noise", NOISE, noise)
        super().__init__(
            target, vocabulary, slot_convention="anchor_first" if found["form"] == "conditional" else "fill_in", **block
        )
        size = self.layer_config.hidden_size
        self.noise = _checked(found, size)
        self.form, self.ranked = self.noise["form"], self.noise["order"] == "ranked"
        self.coupling: Coupling = self.noise["coupling"]
        if self.noise["form"] != "conditional":
            self.fitting_measures = ("hard_ce",)  # what the noise decides is no token of the target's distribution
        self.stream = DRAFT_STREAM if self.coupling == "rejection" else NOISE_STREAM
        width = self.noise["width"]
        self.encoder = PointwiseNoiseEncoder(width, width if self.form == "joint" else size)
        if self.form == "joint":
            self.join = nn.ModuleList(nn.Linear(width, size, bias=False) for _ in range(self.num_slots))
            self.heads = nn.ModuleList(SlotHead(size) for _ in range(self.num_slots))
        self._stage: tuple[KForcing, Reader, float, bool] | None = None

    def _block(self, given: dict[str, Any], target: TargetParts) -> dict[str, Any]:
        """No mask rows here, so no mask token."""
        if given.get("mask_token") is not None or given.get("trained_mask"):
            raise ValueError("noise rows stand in place of mask rows: block.mask_token and trained_mask do not apply")
        return super()._block(BLOCK | given | {"mask_token": 0}, target) | {"mask_token": None}

    def settings(self) -> dict[str, Any]:
        kept = super().settings()
        del kept["slot_convention"]
        return kept | {"noise": dict(self.noise)}

    def noise_rows(self, anchors: Tensor, noise: Tensor, tau: Tensor) -> Tensor:
        """Input rows of blocks: anchor tokens [B, A], noise [B, A, K], tau [B, A] -> [B, A, S, D]."""
        first = self.embedding(anchors)[..., None, :]
        if self.form == "conditional":
            noise = noise[..., :-1]
        rows = self.encoder(noise, tau[..., None].expand_as(noise))
        if self.form == "joint":
            parts = [join(rows[..., k, :]) for k, join in enumerate(self.join)]
            rows = torch.stack(parts).sum(0)[..., None, :]
        return torch.cat([first, rows], -2)

    def sample_rows(self, anchors: Tensor) -> Tensor:
        places = torch.arange(anchors[..., None].expand(*anchors.shape, self.num_slots).numel(), device=anchors.device)
        noise = counter_uniform(torch.zeros_like(places), places, TRAIN_STREAM).view(*anchors.shape, self.num_slots)
        return self.noise_rows(anchors, noise, torch.ones(anchors.shape, device=anchors.device))

    def run(self, rows: Tensor, view: View, context: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Rows [B, A, S, D] through all layers -> normed states of the K slots [B, A, K, D]."""
        if self.form != "joint":
            return super().run(rows, view, context)
        for layer, keys_values in zip(self.draft_layers, context, strict=True):
            rows = layer(rows, view, keys_values)
        return self.norm(torch.stack([head(rows[:, :, 1]) for head in self.heads], 2))

    def slots(self, batch: Batch) -> SlotBatch:
        labels = grid(batch, self.num_slots)
        drawn = self.draws(batch, labels)
        tokens = batch.tokens.gather(1, batch.anchors.clamp_min(0))
        hidden = self.blocks(batch, tokens, drawn.noise, drawn.tau)
        # The conditional form learns the target's distribution after the data's tokens, which the noises stand for.
        said = None if self.form == "conditional" else drawn.labels
        return SlotBatch(hidden, labels.prev_ids, labels.target_ids, drawn.mask, labels.teacher, said)

    def blocks(self, batch: Batch, tokens: Tensor, noise: Tensor, tau: Tensor, branch: Tensor | None = None) -> Tensor:
        """States [B, A, K, D] of blocks whose anchors are tokens [B, A], with noise [B, A, K] and tau [B, A].

        branch None: the anchors are the batch's. Else each anchor lies behind a branch of its own: the batch's anchor,
        n tokens with aux features [B, A, n, L, D], and then the token given.
        """
        place = batch.anchors.clamp_min(0)
        starts = batch.positions.gather(1, place)
        fused = self.fuse(batch.aux)
        context = [one.self_attn.keys_values(fused, self.rotary, batch.positions) for one in self.draft_layers]
        lag, count = 0, 0
        if branch is not None:
            count = branch.shape[2]
            lag = count + 1
            extra = self.fuse(branch).flatten(1, 2)
            places = (starts[..., None] + torch.arange(1, lag, device=place.device)).flatten(1)
            more = [one.self_attn.keys_values(extra, self.rotary, places) for one in self.draft_layers]
            context = [
                (torch.cat([k, e], 2), torch.cat([v, f], 2)) for (k, v), (e, f) in zip(context, more, strict=True)
            ]
        rows = self.noise_rows(tokens, noise, tau)
        positions = (starts + lag)[..., None] + torch.arange(rows.shape[2], device=place.device)
        limit = batch.anchors + (lag > 0)
        view = NoiseView(
            self.rotary, batch.documents, batch.anchors + lag, positions.flatten(1), rows.shape[2], limit, count
        )
        return self.run(rows, view, context)

    # Training: noises and the tokens that they decide.

    def _uniforms(self, batch: Batch, columns: Tensor, steps: Tensor, purpose: int = FIELD) -> Tensor:
        """Numbers [B, N, S] of the positions `steps` [S] after columns [B, N].

        A drafter in eval mode reads what drafting reads with the batch's seed: by position in the document.
        """
        if not self.training and purpose == FIELD:
            places = batch.positions.gather(1, columns)[..., None] + steps
            return counter_uniform(torch.full_like(places, batch.seed), places, self.stream)
        rows = batch.row_numbers[:, None] * (1 << 20)
        places = (rows + columns)[..., None] + steps
        return counter_uniform(torch.full_like(places, batch.seed), places + purpose, TRAIN_STREAM)

    def _temperatures(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Temperature of each row's noises [B], and tau of each anchor [B, A]: that, or 0."""
        zero = batch.anchors.new_zeros(1)
        # Filled in on the device: a tensor of the list would be a copy that it is waited for.
        values = torch.cat([zero.new_full((1,), one, dtype=torch.float32) for one in self.noise["temperatures"]])
        if not self.training:
            heat = values[:1].expand(len(batch.anchors))
            return heat, heat[:, None].expand(batch.anchors.shape)
        drawn = self._uniforms(batch, torch.zeros_like(batch.anchors[:, :1]), zero, HEAT)[:, 0, 0]
        heat = values[(drawn * len(values)).long()]
        greedy = self._uniforms(batch, batch.anchors.clamp_min(0), zero, GREEDY)[..., 0] < self.noise["greedy"]
        return heat, torch.where(greedy, 0.0, heat[:, None])

    @torch.no_grad()
    def draws(self, batch: Batch, labels: Grid) -> Draws:
        """Noises and labels of all slots. A slot is supervised while every token before it in its block is the data's:
        the target was read along the data alone."""
        place, steps = batch.anchors.clamp_min(0), torch.arange(1, self.num_slots + 1, device=batch.anchors.device)
        heat, tau = self._temperatures(batch)
        noise, picks = self._trajectory(batch, labels, heat)

        def at(values: Tensor) -> Tensor:
            return values.gather(1, labels.teacher.flatten(1)).view_as(labels.teacher)

        noise = torch.where(labels.mask, at(noise), self._uniforms(batch, place, steps))
        said = torch.where(tau[..., None] > 0, at(picks), at(batch.top1))
        same = (said == labels.target_ids).cumprod(-1).bool()
        before = torch.cat([torch.ones_like(same[..., :1]), same[..., :-1]], -1)
        drawn = Draws(noise, tau, said.clamp_min(0), labels.mask & before & (said >= 0))
        return self._self_forced(batch, labels, drawn) if self._stage is not None and self.training else drawn

    def _trajectory(self, batch: Batch, labels: Grid, heat: Tensor) -> tuple[Tensor, Tensor]:
        """By teacher position [B, T]: the next position's noise, and the target's pick for it (-1: not asked for, or
        the data's token has no bin).

        Fresh noise is uniform; other noise is uniform in the bin of the data's token.
        """
        columns, one = torch.arange(batch.tokens.shape[1], device=heat.device), batch.anchors.new_ones(1)
        columns = columns.expand(batch.tokens.shape)
        noise = self._uniforms(batch, columns, one)[..., 0]
        fresh, some = torch.ones_like(noise, dtype=torch.bool), not self.training or self.noise["fresh"] > 0
        if self.training:
            fresh = self._uniforms(batch, columns, one, FRESH)[..., 0] < self.noise["fresh"]
        asked = torch.zeros_like(batch.tokens).scatter_add_(1, labels.teacher.flatten(1), labels.mask.flatten(1).long())
        picks = torch.full_like(batch.tokens, -1)
        target = self.lm_head.target
        for where in asked.nonzero().split(max(1, LOGITS_AT_ONCE // len(target.head))):
            rows, place = where.unbind(1)
            with torch.autocast(noise.device.type, enabled=False):
                logits = target.logits(batch.last[rows, place]).to(noise.device)
                probs = (logits.float() / heat[rows, None]).softmax(-1)
            drawn, anew, data = noise[rows, place], fresh[rows, place], batch.tokens[rows, place + 1]
            left, right = bins(probs, data, self.ranked)
            drawn = torch.where(anew, drawn, left + (right - left) * drawn)
            wanted = (pick_ranked if self.ranked else pick)(probs, drawn) if some else data
            picks[rows, place] = torch.where(anew, wanted, torch.where(right > left, data, -1))
            noise[rows, place] = drawn
        return noise, picks

    def begin_stage(self, half: Any, read: Reader, share: float, start: bool = True, exact: bool = True) -> list[str]:
        """Take labels of a share of the rows from a frozen drafter of half as many slots, run twice (exact: only behind
        those that the target gives, and where it agreed with them); start: from its tensors, too. Returns one line per
        thing done. ValueError when the two do not belong together."""
        if self.form == "conditional" or not isinstance(half, KForcing) or half.form == "conditional":
            raise ValueError("stages are of two drafters that push noise forward (form causal or joint)")
        if half.num_slots * 2 != self.num_slots:
            raise ValueError(f"a stage of {self.num_slots} slots needs a drafter of half as many, got {half.num_slots}")
        pairs: dict[str, tuple[Any, Any]] = {
            "layers": (self.needs.layers, half.needs.layers),
            "order": (self.noise["order"], half.noise["order"]),
            "vocabulary": (self.vocabulary.fingerprint, half.vocabulary.fingerprint),
        }
        if other := [f"{name} {a} and {b}" for name, (a, b) in pairs.items() if a != b]:
            raise ValueError(f"the stage's two drafters differ: {'; '.join(other)}")
        if not 0 < share <= 1:
            raise ValueError(f"stage share must be in (0, 1], got {share}")
        self._stage = (half.eval().requires_grad_(False), read, share, exact)
        behind = " behind the target's own" if exact else ""
        lines = [f"labels{behind} of {share:.0%} of the rows by the drafter of {half.num_slots} slots, run twice"]
        if start:
            own, theirs = self.state_dict(), half.state_dict()
            same = {name: tensor for name, tensor in theirs.items() if name in own and tensor.shape == own[name].shape}
            self.load_state_dict(own | same)
            for join in list(getattr(self, "join", []))[half.num_slots :]:
                nn.init.zeros_(cast(nn.Linear, join).weight)  # the new noises start unread
            lines.append(f"{len(same)} of {len(own)} tensors from it")
        return lines

    def _self_forced(self, batch: Batch, labels: Grid, drawn: Draws) -> Draws:
        """Labels of some rows by the frozen drafter: its first half, then, behind that half as the target reads it, its
        second. Whole rows, since the target reads a row before it reads any branch of it. Where exact labels stay, the
        noise does too, and the frozen drafter speaks behind them if it said each of them; else noise is fresh."""
        assert self._stage is not None
        half, read, share, exact = self._stage
        numbers = batch.first_row + batch.row_step * torch.arange(len(batch.tokens))  # on the host, which need not wait
        keys = counter_uniform(torch.full_like(numbers, batch.seed), numbers * (1 << 20) + CHOSEN, TRAIN_STREAM)
        if not (keys < share).any():
            return drawn
        rows = (keys < share).nonzero()[:, 0].to(batch.tokens.device, non_blocking=True)
        steps, width = torch.arange(1, self.num_slots + 1, device=rows.device), half.num_slots
        noise = (drawn.noise if exact else self._uniforms(batch, batch.anchors.clamp_min(0), steps, STAGE))[rows]
        part, tau = _rows_of(batch, rows), drawn.tau[rows]
        first = half.guess(part, part.tokens.gather(1, part.anchors.clamp_min(0)), noise[..., :width], tau)
        branch = read(part, first[..., :-1], half.needs.layers)
        second = half.guess(part, first[..., -1], noise[..., width:], tau, branch)
        said, mask = torch.cat([first, second], -1), labels.mask[rows]
        if exact:
            known, own = drawn.mask[rows], drawn.labels[rows]
            agreed = (said.eq(own) | ~known).all(-1, keepdim=True)
            said, mask = torch.where(known, own, said), known | (mask & agreed)
        return Draws(
            drawn.noise.index_copy(0, rows, noise),
            drawn.tau,
            drawn.labels.index_copy(0, rows, said),
            drawn.mask.index_copy(0, rows, mask),
        )

    @torch.no_grad()
    def guess(self, batch: Batch, tokens: Tensor, noise: Tensor, tau: Tensor, branch: Tensor | None = None) -> Tensor:
        """The tokens [B, A, K] that noise decides, arguments as in `blocks`."""
        hidden = self.blocks(batch, tokens, noise, tau, branch)
        ids, step = self.vocabulary.ids_on(hidden.device), max(1, LOGITS_AT_ONCE // len(self.vocabulary))
        best = [self.lm_head(part).argmax(-1) for part in hidden.flatten(0, 2).split(step)]
        return ids[torch.cat(best)].view(hidden.shape[:-1])

    def branch(self, state: BlockState, num_slots: int) -> Branches:
        return Drafter.branch(self, state, num_slots)

    def propose(self, state: BlockState, num_slots: int, sampling: Sampling, seeds: Tensor) -> Proposal:
        """causal and joint choose each slot's most likely token and give its probability as confidence; conditional
        draws from what it gives. ValueError when more slots are asked for than were trained."""
        if num_slots > self.num_slots:
            raise ValueError(f"this drafter was made for at most {self.num_slots} slots, got {num_slots}")
        anchors, length = state.length[:, None], state.keys[0].shape[2]
        count = self.num_slots if self.form == "joint" else num_slots
        places = anchors + 1 + torch.arange(count, device=anchors.device)
        noise = counter_uniform(seeds[:, None].expand_as(places), places, self.stream)
        tau = torch.full(anchors.shape, float(sampling.temperature), device=anchors.device)
        rows = self.noise_rows(state.anchor[:, None], noise[:, None], tau)
        positions = anchors + torch.arange(rows.shape[2], device=anchors.device)
        documents = torch.zeros(len(anchors), length, dtype=torch.int64, device=anchors.device)
        view = NoiseView(self.rotary, documents, anchors, positions, rows.shape[2], anchors)
        hidden = self.run(rows, view, list(zip(state.keys, state.values, strict=True)))[:, 0, :num_slots]
        logits = self.lm_head(hidden)
        if self.form == "conditional":
            return Proposal(
                *choose(logits, self.vocabulary, sampling, seeds[:, None].expand_as(places), places, self.stream)
            )
        best = logits.float().max(-1)
        sure = (best.values - logits.float().logsumexp(-1)).exp()
        return Proposal(self.vocabulary.ids_on(logits.device)[best.indices], None, sure)


def _rows_of(batch: Batch, rows: Tensor) -> Batch:
    """Some of a batch's rows, whose numbers are lost."""
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch) if isinstance(getattr(batch, f.name), Tensor)}
    return replace(batch, drafted=None, **{name: value[rows] for name, value in tensors.items()})


def _checked(found: dict[str, Any], size: int) -> dict[str, Any]:
    """The noise group, resolved. ValueError names a value that is not allowed."""
    if found["form"] not in FORMS or found["order"] not in ORDERS:
        raise ValueError(
            f"noise.form must be one of {', '.join(FORMS)} and noise.order of {', '.join(ORDERS)}, got "
            f"{found['form']!r} and {found['order']!r}"
        )
    same = "same_noise_ranked" if found["order"] == "ranked" else "same_noise"
    allowed = ("rejection", "same_noise") if found["form"] == "conditional" else (same,)
    found["coupling"] = found["coupling"] or allowed[0]
    if found["coupling"] not in allowed or (found["form"], found["order"]) == ("conditional", "ranked"):
        raise ValueError(
            f"noise.form {found['form']} with order {found['order']} is verified by {' or '.join(allowed)}, got "
            f"{found['coupling']!r} (conditional noise is in token-id order)"
        )
    found["temperatures"] = [float(one) for one in found["temperatures"]]
    if not found["temperatures"] or min(found["temperatures"]) <= 0:
        raise ValueError(f"noise.temperatures must be one or more values above 0, got {found['temperatures']}")
    for name in ("greedy", "fresh"):
        if not 0 <= found[name] <= 1:
            raise ValueError(f"noise.{name} must be in [0, 1], got {found[name]}")
    found["width"] = found["width"] or min(size, 768)
    if found["width"] < 2 or found["width"] % 2:
        raise ValueError(f"noise.width must be even and at least 2, got {found['width']}")
    return found
