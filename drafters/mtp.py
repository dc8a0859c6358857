"""Multi-token prediction: the DeepSeek-V3 module (arXiv 2412.19437, section 2.2), one used recursively as FastMTP does
(arXiv 2509.18362) or one a slot.

A module fuses a state with a token's embedding, runs one decoder layer of the target's own kind, and shares the
target's embedding and head:

    x = eh_proj([enorm(emb(token)); hnorm(state)]);   out = block(x);   logits = head(norm(out))

    row          t = a - 1          a                  a + 1
    state        target's, of t     own, of slot 1     own, of slot 2
    token        x_a (the anchor)   x_{a+1}            x_{a+2}        data in training, drafted when drafting
    slot         1 -> a + 1         2 -> a + 2         3 -> a + 3

One module: slot k stands at rotary position t + k - 1 and sees the keys of rows <= t that were made from the target's
states, and its own chain's keys; with `sharing.share: kv` (GLM-5.2) the former only. One module a slot, as DeepSeek
trains them: module k reads module k - 1's output of the *same* row beside the token k further on, and sees its own
keys of rows <= t.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from drafters.branches import Branches, NodeColumns
from drafters.chains import visible_rows
from drafters.contract import Batch, Drafter, Grid, Needs, Proposal, SlotBatch, TargetParts, grid
from drafters.drafting import along, choose, take_rows
from drafters.layers import SharedEmbedding, SharedHead, check_counts, complete
from drafters.mtp_block import ChainKeys, DraftKeys, attention_weights, layer_kind, own_choices, probe
from drafters.mtp_index import Indexer, among, best, index_loss
from drafters.mtp_module import MtpModule
from drafters.sampling import Sampling
from drafters.vocabulary import DraftVocabulary

STATE: dict[str, Any] = {
    "reads": "post_norm",
    "recycles": "post_norm",
    "concat": "embedding_first",
    "zero_first": True,
}
BLOCK: dict[str, Any] = {"kind": "own", "mlp": "own"}
SHARING: dict[str, Any] = {"share": "none", "top": None, "index_heads": 4, "index_width": 64, "dense_until": 0.0}
CHOICES = {
    "reads": ("post_norm", "pre_norm"),
    "recycles": ("post_norm", "pre_norm"),
    "concat": ("embedding_first", "hidden_first"),
    "zero_first": (True, False),
    "kind": ("own", "llama"),
    "mlp": ("own", "dense"),
    "share": ("none", "kv"),
}


@dataclass
class DraftState:
    """Drafting state. keys of each module, by position; outputs: each module's block output [R, D] at its newest row;
    length [R] positions read, anchor [R]. index_keys: of the drafter's own indexer [R, C, width]. chosen: for each
    request the columns [R, C] that its newest row chose, where later slots keep to them."""

    keys: list[DraftKeys]
    outputs: list[Tensor]
    length: Tensor
    anchor: Tensor
    index_keys: Tensor | None = None
    chosen: Tensor | None = None


class Mtp(MtpModule, Drafter):
    """MTP drafter; it is its own first module, further ones are in `more`.

    num_slots: K. modules: 1, used for every slot, or K, one a slot. train_steps: slots that are trained, null for all;
    the others reuse the module untrained. block: kind (own, llama) and mlp (own, dense: no experts). sharing: share
    (none; kv: later slots see keys made from the target's states only), top (positions that slot 1's query chooses by
    an indexer of index_heads x index_width and that later slots keep; null for all), dense_until (share of the run in
    which all are seen while the indexer learns). A target's layer with an indexer of its own (DeepSeek-V3.2, GLM-5)
    keeps it, frozen; with kv later slots keep to what it chose in slot 1. state, single keys: reads (the target's last
    hidden state after its final norm, or before it), recycles (the module's own, after or before its norm), concat
    (order of eh_proj's inputs), zero_first (no embedding at position 0, as vLLM serves most families).
    """

    training_only = ("train_steps", "sharing.dense_until")

    def __init__(
        self,
        target: TargetParts,
        vocabulary: DraftVocabulary | None = None,
        *,
        num_slots: int = 3,
        modules: int = 1,
        train_steps: int | None = None,
        block: dict[str, Any] | None = None,
        sharing: dict[str, Any] | None = None,
        **state: Any,
    ) -> None:
        served = complete("model", STATE, state)
        settings, shared = complete("block", BLOCK, block), complete("sharing", SHARING, sharing)
        steps = num_slots if train_steps is None else train_steps
        _check(num_slots, modules, steps, served | settings | shared)
        kind = layer_kind(target.config, settings["kind"], eager=shared["top"] is not None)
        dense = settings["mlp"] == "dense"
        super().__init__(kind, dense, served)
        self.block_settings, self.sharing = settings, shared
        self.num_slots, self.train_steps, self.layer_config = num_slots, steps, kind.config
        last = target.config.num_hidden_layers - 1
        self.needs = Needs((), True) if served["reads"] == "post_norm" else Needs((last,))
        self.vocabulary = vocabulary or DraftVocabulary.full(target.config.vocab_size)
        self.size = kind.config.hidden_size
        self.key_shapes, self.own_width = probe(self.block, self.rotary, self.size)
        if self.own_width is not None and shared["top"] is not None:
            raise ValueError(
                f"sharing.top must be null: {type(self.block).__name__} chooses positions by itself, and sharing.share "
                f"kv lets later slots keep to what it chose"
            )
        self.keeps_choice = shared["top"] is not None or (self.own_width is not None and shared["share"] == "kv")
        self.follows_drafts = modules == 1  # module k walks the data's rows
        self.branching = "steps" if modules == 1 else None  # module k reads rows that only one text has
        self.more = nn.ModuleList(MtpModule(kind, dense, served) for _ in range(modules - 1))
        self.indexer = None
        if shared["top"] is not None:
            self.indexer = Indexer(self.size, shared["index_heads"], shared["index_width"])
        self.embedding = SharedEmbedding(target)
        self.lm_head = SharedHead(target, self.vocabulary.ids.to(target.head.device))

    @property
    def heads(self) -> list[MtpModule]:
        """The modules, first to last."""
        return [self, *cast(list[MtpModule], list(self.more))]

    def settings(self) -> dict[str, Any]:
        return {
            "num_slots": self.num_slots,
            "modules": 1 + len(self.more),
            "train_steps": self.train_steps,
            "block": dict(self.block_settings),
            "sharing": dict(self.sharing),
        } | self.state

    def read(self, aux: Tensor, last: Tensor) -> Tensor:
        """The target's states [..., D] that slot 1 reads, of aux [..., L, D] and last [..., D]."""
        states = last if self.state["reads"] == "post_norm" else aux[..., 0, :]
        return states.to(self.eh_proj.weight.dtype)

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Embeddings [B, N, D] of tokens [B, N] for rows at positions [B, N]."""
        rows = self.embedding(ids).to(self.eh_proj.weight.dtype)
        return rows * (positions > 0)[..., None] if self.state["zero_first"] else rows

    def slots(self, batch: Batch) -> SlotBatch:
        """All anchors' slots; in training those beyond train_steps are left out."""
        labels = grid(batch, self.num_slots)
        steps = self.train_steps if self.training else self.num_slots
        rows = (batch.anchors - 1).clamp_min(0)
        made = self._depths(batch, rows) if len(self.more) else self._chains(batch, labels, rows, steps)
        made += [torch.zeros_like(made[0])] * (self.num_slots - steps)
        mask = labels.mask & (torch.arange(self.num_slots, device=rows.device) < steps)
        return SlotBatch(torch.stack(made, 2), labels.prev_ids, labels.target_ids, mask, labels.teacher)

    def _chains(self, batch: Batch, labels: Grid, rows: Tensor, steps: int) -> list[Tensor]:
        """The slots [B, A, H] of one module: a pass over the rows, then one step of all chains after another."""
        positions, keys = batch.positions[:, :-1], ChainKeys(self.sharing["share"] == "kv")
        fused = self.fuse(self.read(batch.aux, batch.last)[:, :-1], self.embed(batch.tokens[:, 1:], positions))
        visible, extra = self._rows_seen(batch), None
        if self.indexer is None:
            with own_choices(self.block) as chosen:
                output = self.through(fused, positions, visible, keys)
            visible = among(visible, chosen[0]) if self.keeps_choice else visible
        else:
            scores = self.indexer.scores(fused.detach(), self.indexer.k_proj(fused.detach()))
            if not (self.training and batch.progress < self.sharing["dense_until"]):
                visible = best(scores, visible, self.sharing["top"])
            with attention_weights(self.block) as weights:
                output = self.through(fused, positions, visible, keys)
            extra = index_loss(weights[0], scores, visible).gather(1, rows)
        output, visible, positions = take_rows(output, rows), take_rows(visible, rows), positions.gather(1, rows)
        own = torch.eye(rows.shape[1], dtype=torch.bool, device=rows.device).expand(len(rows), -1, -1)
        made = [self._noted(self.norm(output), extra)]
        for k in range(1, steps):
            fused = self.fuse(self.recycle(output), self.embed(labels.prev_ids[:, :, k], positions + k))
            mask = visible if keys.shared else torch.cat([visible, *[own] * k], -1)
            output = self.through(fused, positions + k, mask, keys)
            made.append(self._noted(self.norm(output), None if extra is None else torch.zeros_like(extra)))
        return made

    def _rows_seen(self, batch: Batch) -> Tensor:
        """Which rows each row but the last may see: [B, T - 1, T - 1]."""
        rows = torch.arange(batch.tokens.shape[1] - 1, device=batch.tokens.device)
        return visible_rows(batch, rows.expand(len(batch.tokens), -1))

    def _noted(self, hidden: Tensor, extra: Tensor | None) -> Tensor:
        """hidden [B, A, D]; with an indexer, its loss [B, A] beside it: [B, A, D + 1]."""
        return hidden if extra is None else torch.cat([hidden, extra[..., None].to(hidden.dtype)], -1)

    def _depths(self, batch: Batch, rows: Tensor) -> list[Tensor]:
        """The slots [B, A, D] of one module each: every module passes over all rows whose token lies in the row."""
        states, made = self.read(batch.aux, batch.last), []
        visible, length = self._rows_seen(batch), batch.tokens.shape[1]
        for k, module in enumerate(self.heads, 1):
            count = max(length - k, 1)
            positions, states = batch.positions[:, :count], states[:, :count]
            embedded = self.embed(batch.tokens[:, length - count :], positions)
            mask = visible[:, :count, :count]
            output = module.through(module.fuse(states, embedded), positions, mask, ChainKeys())
            made.append(take_rows(module.norm(output), rows.clamp_max(count - 1)))
            states = module.recycle(output)
        return made

    def logits(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """hidden [N, D] (normed; with an indexer [N, D + 1]) -> [N, W]; prev_ids are not read."""
        return self.lm_head(hidden[..., : self.size])

    def measures(self) -> dict[str, Any]:
        """index: the indexer's loss, at slot 1 of each chain (mtp_index.index_loss); the only one that trains it."""
        return {} if self.indexer is None else {"index": lambda scored: scored.hidden[:, -1].float()}

    def warm_start(self, target: TargetParts) -> list[str]:
        """See MtpModule.start; the indexer starts random."""
        own, many, taken = self.block_settings["kind"] == "own", len(self.more) > 0, []
        for i, module in enumerate(self.heads, 1):
            taken += [f"module {i}: {line}" if many else line for line in module.start_from(target, own)]
        return taken

    def begin(self, requests: int, capacity: int) -> DraftState:
        like, columns = self.eh_proj.weight, capacity + self.num_slots + 1
        empty = torch.zeros(requests, dtype=torch.int64, device=like.device)
        shapes: list[tuple[int, ...]] = [(requests, heads, columns, width) for heads, width in self.key_shapes]
        shapes += [] if self.own_width is None else [(requests, columns, self.own_width)]
        state = DraftState(
            keys=[DraftKeys(*(like.new_zeros(shape) for shape in shapes)) for _ in self.heads],
            outputs=[like.new_zeros(requests, self.size) for _ in self.heads],
            length=empty,
            anchor=empty.clone(),
        )
        if self.indexer is not None:
            state.index_keys = like.new_zeros(requests, columns, self.sharing["index_width"])
        if self.keeps_choice:
            state.chosen = torch.zeros(requests, columns, dtype=torch.bool, device=like.device)
        return state

    def observe(self, state: DraftState, next_ids: Tensor, aux: Tensor, last: Tensor, lengths: Tensor) -> None:
        """Module m reads as many rows as came, m - 1 rows further back: those whose tokens are known by now."""
        states = self.read(aux, last)
        offsets = torch.arange(next_ids.shape[1], device=next_ids.device)
        end, fresh = (lengths - 1).clamp_min(0)[:, None], lengths > 0
        for m, module in enumerate(self.heads):
            rows = state.length[:, None] + offsets - m
            kept = (offsets < lengths[:, None]) & (rows >= 0)
            fused = module.fuse(states, self.embed(next_ids, rows.clamp_min(0)))
            output, seen = self._pass(state, m, fused, rows, kept)
            before = state.outputs[m]
            state.outputs[m] = torch.where(fresh[:, None], take_rows(output, end)[:, 0], before)
            if state.chosen is not None:
                state.chosen = torch.where(fresh[:, None], take_rows(seen, end)[:, 0], state.chosen)
            states = module.recycle(torch.cat([before[:, None], output[:, :-1]], 1))
        state.anchor = torch.where(fresh, next_ids.gather(1, end)[:, 0], state.anchor)
        state.length = state.length + lengths

    def _pass(self, state: DraftState, m: int, fused: Tensor, rows: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [R, N] through module m: block outputs [R, N, D] and the columns each saw [R, N, C]. Keys of rows that
        are not kept go to the spare last column, which no kept row sees."""
        keys, positions = state.keys[m], rows.clamp_min(0)
        spare = keys.keys.shape[2] - 1
        keys.columns = torch.where(kept, rows, spare)
        seen = torch.arange(spare + 1, device=rows.device) <= positions[..., None]
        if self.indexer is not None and state.index_keys is not None:
            made = self.indexer.k_proj(fused)
            state.index_keys.scatter_(1, keys.columns[..., None].expand_as(made), made)
            seen = best(self.indexer.scores(fused, state.index_keys), seen, self.sharing["top"])
        with own_choices(self.heads[m].block) as chosen:
            output = self.heads[m].through(fused, positions, seen, keys)
        return output, among(seen, chosen[0]) if chosen and self.keeps_choice else seen

    def propose(self, state: DraftState, num_slots: int, sampling: Sampling, seeds: Tensor) -> Proposal:
        """ValueError when there is one module a slot and more slots are asked for."""
        if not len(self.more):
            return along(self.branch(state, num_slots), num_slots, self.vocabulary, sampling, seeds, state.length)
        if num_slots > self.num_slots:
            raise ValueError(f"this drafter has {self.num_slots} modules, {num_slots} slots were asked for")
        token, outputs, tokens, probs = state.anchor, list(state.outputs), [], []
        for k in range(num_slots):
            if k > 0:
                self._deepen(state, outputs, token, k, num_slots)
            logits = self.logits(self.heads[k].norm(outputs[k]), token)
            token, chosen = choose(logits, self.vocabulary, sampling, seeds, state.length + k + 1)
            tokens.append(token)
            if chosen is not None:
                probs.append(chosen)
        return Proposal(torch.stack(tokens, 1), torch.stack(probs, 1) if probs else None)

    def branch(self, state: DraftState, num_slots: int) -> Branches:
        """One module only: see MtpBranches."""
        return super().branch(state, num_slots) if len(self.more) else MtpBranches(self, state)

    def _deepen(self, state: DraftState, outputs: list[Tensor], token: Tensor, k: int, num_slots: int) -> None:
        """One module a slot: with the k-th drafted token [R], modules k + 1.. read one row more each."""
        for m in range(num_slots - 1, k - 1, -1):  # from the last, as each reads what the one before gave last time
            rows = (state.length - 1 + k - m)[:, None]
            module, states = self.heads[m], self.heads[m - 1].recycle(outputs[m - 1])[:, None]
            fused = module.fuse(states, self.embed(token[:, None], rows.clamp_min(0)))
            outputs[m] = self._pass(state, m, fused, rows, rows >= 0)[0][:, 0]


class MtpBranches(Branches):
    """One module, level after level on its own output; rows of nodes go to columns that the next observe overwrites, or
    nowhere where later slots see none of them."""

    def __init__(self, drafter: Mtp, state: DraftState) -> None:
        self.drafter, self.state, self.level = drafter, state, 0
        width = state.keys[0].keys.shape[2]
        self.columns = NodeColumns(state.length, width, state.chosen)
        self.outputs = state.outputs[0][:, None]
        self.first = drafter.logits(drafter.norm(state.outputs[0]), state.anchor)

    def read(self, tokens: Tensor, parents: Tensor) -> Tensor:
        drafter, keys = self.drafter, self.state.keys[0]
        self.level += 1
        positions = (self.state.length - 1 + self.level)[:, None].expand_as(tokens)
        if drafter.sharing["share"] == "none":
            keys.columns, seen = self.columns.place(parents)
        else:
            keys.columns, seen = None, self.columns.visible.expand(-1, tokens.shape[1], -1)
        states = drafter.recycle(take_rows(self.outputs, parents))
        fused = drafter.fuse(states, drafter.embed(tokens, positions))
        self.outputs = drafter.through(fused, positions, seen, keys)
        logits = drafter.logits(drafter.norm(self.outputs).flatten(0, 1), tokens.flatten())
        return logits.unflatten(0, tokens.shape)


def _check(num_slots: int, modules: int, steps: int, chosen: dict[str, Any]) -> None:
    """ValueError on settings outside their ranges or at odds with each other."""
    check_counts("", num_slots=num_slots, modules=modules)
    if modules not in (1, num_slots):
        raise ValueError(f"modules must be 1 or num_slots, got {modules} with num_slots {num_slots}")
    if not 1 <= steps <= num_slots or (modules > 1 and steps < num_slots):
        raise ValueError(f"train_steps must be 1..num_slots, and all of them with modules > 1; got {steps}")
    for name, allowed in CHOICES.items():
        if chosen[name] not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {chosen[name]!r}")
    top, share = chosen["top"], chosen["share"]
    sizes = {name: chosen[name] for name in ("index_heads", "index_width")} | ({} if top is None else {"top": top})
    check_counts("sharing.", **sizes)
    if not 0 <= chosen["dense_until"] <= 1:
        raise ValueError(f"sharing.dense_until must be in [0, 1], got {chosen['dense_until']}")
    if modules > 1 and (top is not None or share != "none"):
        raise ValueError("sharing is between the steps of one module; with modules > 1 leave share none and top null")
