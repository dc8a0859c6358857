"""An ordinary small language model as drafter (vanilla speculative decoding, arXiv 2211.17192): it reads tokens alone.

    position     0    1   ...   a        a + 1     a + 2
    token        x_0  x_1       x_a      x_{a+1}   x_{a+2}      data in training, drafted when drafting
    state                       slot 1   slot 2    slot 3       slot k predicts a + k

Every slot is the model's own next-token prediction after the token before it, so the slots of a whole grid are gathered
from one pass over the packed row. Drafting keeps a key-value cache and goes one token at a time.
"""

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import cached_file

from drafters.branches import Branches, NodeColumns
from drafters.contract import Batch, Drafter, Needs, Proposal, SlotBatch, TargetParts, grid
from drafters.drafting import along, take_rows
from drafters.layers import WholeBuffers, check_counts, layer_config, layer_settings
from drafters.placed import PlacedLayer
from drafters.sampling import Sampling
from drafters.vocabulary import DraftVocabulary, tokenizer_fingerprint

FULL, SLIDING = "full_attention", "sliding_attention"
NOT_OF_THE_MODEL = ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path")


@dataclass
class DraftState:
    """Drafting state: the model's cache, `width` columns wide; tokens read less one (the anchor's position) [R]; the
    model's state at the anchor [R, D]. length is -1 before the first token is read."""

    cache: DynamicCache
    width: int
    length: Tensor
    output: Tensor


class Independent(WholeBuffers, Drafter):
    """Independent drafter.

    num_slots: K, tokens drafted. train_steps: slots that training makes (null: all K); one covers every position of the
    answers already, more serve objectives that weigh whole chains. path: folder or hub name of a causal language model
    (safetensors, no remote code); its tokenizer must be the target's where it has one. config: with `model_type`, the
    whole config of a fresh model of that type; without, overrides of a small Llama that has the target's sizes and
    `num_hidden_layers` 2. attention: attn_implementation, null for the one that transformers chooses.
    """

    training_only = ("train_steps",)

    follows_drafts = False  # slots are gathered from one pass over the data's tokens
    branching = "steps"

    def __init__(
        self,
        target: TargetParts,
        vocabulary: DraftVocabulary | None = None,
        *,
        num_slots: int = 5,
        train_steps: int | None = 1,
        path: str | None = None,
        config: dict[str, Any] | None = None,
        attention: str | None = None,
    ) -> None:
        super().__init__()
        check_counts("", num_slots=num_slots)
        if train_steps is not None and not 1 <= train_steps <= num_slots:
            raise ValueError(f"train_steps must be null or in 1..{num_slots} (num_slots), got {train_steps}")
        if path is not None and config:
            raise ValueError(f"path and config exclude each other, got {path!r} and {sorted(config)}")
        self.num_slots, self.train_steps, self.attention = num_slots, train_steps, attention
        self.needs, self.pretrained = Needs(()), path is not None
        self.vocabulary = vocabulary or DraftVocabulary.full(target.config.vocab_size)
        model = _load(path, target, attention) if path else _fresh(config or {}, target, attention)
        self.config: PretrainedConfig = model.config
        self.kinds = _kinds(model)
        self.prefix = model.base_model_prefix
        self.body = cast(PreTrainedModel, model.base_model)
        head = model.get_output_embeddings()
        embedding = model.get_input_embeddings()
        # A tied head is the embedding itself: registered once, saved once.
        self.lm_head: nn.Linear | None = None if head.weight is embedding.weight else head
        self._cache_name = _known(self.body, "cache", "past_key_values")
        self._check_head(model)

    def settings(self) -> dict[str, Any]:
        """A drafter read from `path` is rebuilt from its config: its weights are its own by then."""
        values = {key: value for key, value in self.config.to_dict().items() if key not in NOT_OF_THE_MODEL}
        return {
            "num_slots": self.num_slots,
            "train_steps": self.train_steps,
            "path": None,
            "config": json.loads(json.dumps(values)),
            "attention": self.attention,
        }

    @property
    def trained_slots(self) -> int:
        """Slots of the grid: all K, or in training mode the first train_steps."""
        return self.train_steps if self.training and self.train_steps else self.num_slots

    @property
    def head_weight(self) -> Tensor:
        return cast(Tensor, (self.lm_head or self.body.get_input_embeddings()).weight)

    def slots(self, batch: Batch) -> SlotBatch:
        """One pass over the packed rows. Positions that do not go on by one begin a document: transformers then keeps
        documents apart in every layer's mask."""
        labels = grid(batch, self.trained_slots)
        output = self.body(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False).last_hidden_state
        hidden = take_rows(output, labels.teacher.flatten(1)).view(*labels.teacher.shape, -1)
        return SlotBatch(hidden, labels.prev_ids, labels.target_ids, labels.mask, labels.teacher)

    def logits(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """hidden [N, D], the model's states -> [N, W], as its own head gives them; slots do not read prev_ids."""
        weight = self.head_weight
        bias: Tensor | None = None if self.lm_head is None else self.lm_head.bias
        if not self.vocabulary.is_full:
            ids = self.vocabulary.ids_on(weight.device)
            weight, bias = weight[ids], None if bias is None else bias[ids]
        return self._shaped(nn.functional.linear(hidden, weight, bias))

    def _shaped(self, logits: Tensor) -> Tensor:
        """The scale and the soft cap that some families put behind their head."""
        scale = (getattr(self.config, "logit_scale", None) or 1.0) / (
            getattr(self.config, "logits_scaling", None) or 1.0
        )
        cap = getattr(self.config, "final_logit_softcapping", None)
        logits = logits if scale == 1.0 else logits * scale
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @torch.no_grad()
    def _check_head(self, model: PreTrainedModel) -> None:
        """ValueError when the head is more than the matrix, bias, scale and cap known here: tried on numbers."""
        tokens = torch.arange(4)[None] % self.config.vocab_size
        model.eval()  # a drafter's own mode is set on it as a whole
        hidden = self.body(input_ids=tokens, use_cache=False).last_hidden_state[0]
        bias = None if self.lm_head is None else self.lm_head.bias
        own = self._shaped(nn.functional.linear(hidden, self.head_weight, bias)).float()
        if not torch.allclose(own, model(input_ids=tokens, use_cache=False).logits[0].float(), rtol=1e-3, atol=1e-3):
            raise ValueError(f"{type(model).__name__} computes its logits in a way that is not known here")

    @torch.no_grad()
    def warm_start(self, target: TargetParts) -> list[str]:
        """A fresh model of the target's width takes its embedding and head; a pretrained one is left alone."""
        embedding = cast(nn.Embedding, self.body.get_input_embeddings()).weight
        taken: list[str] = []
        if self.pretrained:
            return taken
        if embedding.shape == target.embedding.shape:
            embedding.copy_(target.embedding * target.embedding_scale)
            taken.append("embedding <- the target's")
        if self.lm_head is not None and self.lm_head.weight.shape == target.head.shape:
            self.lm_head.weight.copy_(target.head)
            taken.append("lm_head <- the target's")
        return taken

    # Drafting
    # ------------------------------------------------------------------------------------------------------------------

    def begin(self, requests: int, capacity: int) -> DraftState:
        cache = DynamicCache()
        cache.layer_class_to_replicate = PlacedLayer
        weight = self.head_weight
        length = torch.full((requests,), -1, dtype=torch.int64, device=weight.device)
        output = weight.new_zeros(requests, weight.shape[1])
        return DraftState(cache, capacity + self.num_slots + 1, length, output)

    def start(self, state: DraftState, first_ids: Tensor) -> None:
        zero = torch.zeros_like(first_ids)
        self._read(state, first_ids[:, None], zero[:, None], zero[:, None])
        state.length = zero

    def observe(self, state: DraftState, next_ids: Tensor, aux: Tensor, last: Tensor, lengths: Tensor) -> None:
        """ValueError when the requests' first tokens were not given (`start`)."""
        if not len(state.cache.layers):
            raise ValueError("this drafter reads whole texts: call start(state, first_ids) before the first observe")
        offsets = torch.arange(next_ids.shape[1], device=next_ids.device)
        positions = state.length[:, None] + 1 + offsets
        # Entries past a request's length go to the spare last column, which no row that counts ever sees.
        columns = torch.where(offsets < lengths[:, None], positions, state.width - 1)
        output = self._read(state, next_ids, positions, columns)
        newest = take_rows(output, (lengths - 1).clamp_min(0)[:, None])[:, 0]
        state.output = torch.where((lengths > 0)[:, None], newest, state.output)
        state.length = state.length + lengths

    def propose(self, state: DraftState, num_slots: int, sampling: Sampling, seeds: Tensor) -> Proposal:
        """K passes of one token, the first of which observe has made; drafted tokens go to columns that the next
        observe overwrites."""
        return along(self.branch(state, num_slots), num_slots, self.vocabulary, sampling, seeds, state.length)

    def branch(self, state: DraftState, num_slots: int) -> "ModelBranches":
        return ModelBranches(self, state)

    def _read(self, state: DraftState, tokens: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
        """Run tokens [R, N] at positions [R, N] over the cache; their keys and values go to columns [R, N]. A position
        sees the columns up to its own."""
        places = torch.arange(state.width, device=positions.device).expand(len(positions), -1)
        return self.read_rows(state, tokens, positions, columns, (places, places[:, None] <= positions[..., None]))

    def read_rows(
        self,
        state: DraftState,
        tokens: Tensor,
        positions: Tensor,
        columns: Tensor,
        known: tuple[Tensor, Tensor],
    ) -> Tensor:
        """As `_read`, with known: the position [R, C] that each column holds, and the columns visible [R, N, C]."""
        while len(state.cache.layers) < self.config.num_hidden_layers:
            state.cache.layers.append(PlacedLayer())
        for layer in cast(list[PlacedLayer], state.cache.layers):
            layer.columns, layer.width = columns, state.width
        masks = {kind: self._mask(kind, positions, *known, state.output.dtype) for kind in self.kinds}
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        arguments = {"input_ids": tokens, "position_ids": positions, "attention_mask": mask, "use_cache": True}
        return self.body(**arguments, **{self._cache_name: state.cache}).last_hidden_state

    def _mask(self, kind: str, positions: Tensor, places: Tensor, visible: Tensor, dtype: torch.dtype) -> Tensor:
        """Additive mask [R, 1, N, C] of visible columns; where the layer has a window, of the newest places."""
        if kind == SLIDING:
            visible = visible & (places[:, None] > positions[..., None] - self.config.sliding_window)
        return torch.where(visible, 0.0, torch.finfo(dtype).min).to(dtype)[:, None]


class ModelBranches(Branches):
    """The model's own states, one pass a level."""

    def __init__(self, drafter: Independent, state: DraftState) -> None:
        self.drafter, self.state, self.level = drafter, state, 0
        self.first = drafter.logits(state.output, state.length)
        self.columns = NodeColumns(state.length + 1, state.width)
        self.places = torch.arange(state.width, device=state.length.device).expand(len(state.length), -1)

    def read(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self.level += 1
        columns, visible = self.columns.place(parents)
        positions = (self.state.length + self.level)[:, None].expand_as(tokens)
        self.places = self.places.scatter(1, columns, positions)
        output = self.drafter.read_rows(self.state, tokens, positions, columns, (self.places, visible))
        return self.drafter.logits(output.flatten(0, 1), tokens.flatten()).unflatten(0, tokens.shape)


# Building the model
# ----------------------------------------------------------------------------------------------------------------------


def _fresh(given: dict[str, Any], target: TargetParts, attention: str | None) -> PreTrainedModel:
    """A random model: of the whole config, or a small Llama of the target's sizes with overrides."""
    values = dict(given)
    if "model_type" not in values:
        tied = bool(getattr(target.config, "tie_word_embeddings", False))
        sizes = layer_settings(layer_config(target.config))
        common = {"vocab_size": target.config.vocab_size, "num_hidden_layers": 2, "tie_word_embeddings": tied}
        ends = {key: getattr(target.config, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        values = {"model_type": "llama"} | sizes | common | ends | values
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    _same_size(config, "a model of this config", target)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)


def _load(path: str, target: TargetParts, attention: str | None) -> PreTrainedModel:
    """A pretrained model in float32, whose vocabulary was found to be the target's."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    _same_size(config, path, target)
    _same_tokenizer(path, target)
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=attention, use_safetensors=True, trust_remote_code=False
    )


def _same_size(config: PretrainedConfig, name: str, target: TargetParts) -> None:
    if config.vocab_size != target.config.vocab_size:
        identity = target.identity or {}
        raise ValueError(
            f"{name} has a vocabulary of {config.vocab_size} tokens, the target {identity.get('name')!r} one of "
            f"{target.config.vocab_size}: an independent drafter needs the target's own"
        )


def _same_tokenizer(path: str, target: TargetParts) -> None:
    """Equal sizes may hide other words: where both tokenizers are known, they must be the same."""
    identity = target.identity or {}
    known = any(
        cached_file(path, name, _raise_exceptions_for_missing_entries=False) is not None
        for name in ("tokenizer.json", "tokenizer_config.json")
    )
    if not known or identity.get("tokenizer") is None:
        return
    own = tokenizer_fingerprint(AutoTokenizer.from_pretrained(path, trust_remote_code=False))
    if own != identity["tokenizer"]:
        raise ValueError(
            f"{path} has tokenizer {own}, the target {identity.get('name')!r} has {identity['tokenizer']}: the same "
            "ids would be other words"
        )


def _kinds(model: PreTrainedModel) -> list[str]:
    """Kinds of attention in the layers. ValueError for a model whose cache is more than keys and values by position."""
    config = model.config
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or [FULL if window is None else SLIDING])
    if kinds - {FULL, SLIDING} or getattr(model, "_is_stateful", False):
        found = ", ".join(sorted(kinds - {FULL, SLIDING})) or "recurrent state"
        raise ValueError(f"{type(model).__name__} has {found}; an independent drafter has full or sliding attention")
    return sorted(kinds)


def _known(module: nn.Module, *names: str) -> str:
    """The first of the names that the module's forward takes."""
    parameters: Callable[..., Any] = module.forward
    taken = inspect.signature(parameters).parameters
    return next(name for name in names if name in taken)
