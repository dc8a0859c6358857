"""The frozen target: loaded through transformers, showing chosen layers' outputs and its last hidden state.

`Target.forward` runs the decoder without its head and keeps only the layers asked for. `Target.parts` are the pieces
a drafter shares, found by structure and config, then checked against the model's own logits, so that a family this
file has never seen either works or is refused.

Letters in shapes: B rows, T tokens, L captured layers, D hidden width, V target vocabulary.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from checkpoints.files import index_of
from checkpoints.run import native_bf16
from checkpoints.target_files import config_of
from data.embedded import target_source
from data.identity import identity_of
from data.packed import PackedLinear, pack_linears, packable
from data.spread import Together, parallel_arguments
from data.structure import Anatomy, anatomy
from drafters.contract import TargetParts, check_layers
from drafters.layers import outputs_of

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TRUTH_SHARE = 0.99
LOGITS_AT_ONCE = 1 << 24


@dataclass
class Features:
    """aux [B, T, L, D] outputs of the chosen layers, in ascending order; last [B, T, D] after the final norm."""

    aux: Tensor
    last: Tensor


@dataclass(frozen=True)
class TargetSettings:
    """The target group of a config: the arguments of Target.load."""

    name: str
    dtype: str = "auto"
    device_map: str | dict[str, Any] | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    offload_folder: str | None = None
    tp_plan: str | dict[str, str] | None = None


def unused_token(tokenizer: PreTrainedTokenizerBase, rows: int) -> int | None:
    """A token id below `rows` that no rendered text contains, for mask inputs: the tokenizer's own mask token, else the
    first embedding row beyond the tokenizer, else its last special token that neither has a role nor stands in the chat
    template. None when there is no such id."""
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    if len(tokenizer) < rows:
        return len(tokenizer)
    roles = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    template = str(tokenizer.chat_template or "")
    added = tokenizer.added_tokens_decoder.items()
    free = [i for i, token in added if token.special and i < rows and i not in roles and token.content not in template]
    return max(free, default=None)


def ending_ids(generation: Any, config: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end an answer: the generation config's (None without one), else the config's, and the tokenizer's;
    ascending."""
    declared = getattr(generation, "eos_token_id", None)
    declared = getattr(config, "eos_token_id", None) if declared is None else declared
    ids = {*(declared if isinstance(declared, (list, tuple)) else [declared]), tokenizer.eos_token_id}
    return tuple(sorted(int(i) for i in ids if i is not None))


def declared_ids(source: str, config: Any, tokenizer: PreTrainedTokenizerBase, revision: str | None) -> tuple[int, ...]:
    """The same of a folder or hub id, without weights."""
    try:
        generation = GenerationConfig.from_pretrained(source, revision=revision or "main")
    except OSError:  # a target without one
        generation = None
    return ending_ids(generation, config, tokenizer)


class Target:
    """A frozen language model with its tokenizer.

    model: the transformers model, in eval mode, without gradients. parts: what drafters share. identity: name,
    revision, fingerprints (weights, tokenizer, chat template), sizes. source: folder or hub id that engines open.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        source: str | None = None,
        revision: str | None = None,
    ) -> None:
        """ValueError when the model's norm, head, embedding or layers cannot be found or do not give its logits."""
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.source = source or name
        self._anatomy: Anatomy = anatomy(model)
        parameters = inspect.signature(self._anatomy.decoder.forward).parameters
        # transformers 5.2x renamed the argument; both spellings are in use.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.identity: dict[str, Any] = identity_of(model, tokenizer, name, revision) | {
            "num_layers": len(self._anatomy.layers),
            "hidden_size": self._anatomy.embedding.shape[1],
            "vocab_size": self._anatomy.head.shape[0],
        }
        # On a CPU the same products from weights laid out once; a model spread or moved elsewhere stays as it is.
        head = self._anatomy.head
        self._head = PackedLinear(head, self._anatomy.head_bias) if pack_linears(model) and packable(head) else None
        self._together: Together | None = None
        self._shown: TargetParts | None = None
        self._check_anatomy()

    @classmethod
    def load(
        cls,
        name: str,
        dtype: str = "auto",
        device_map: str | dict[str, Any] | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        offload_folder: str | None = None,
        tp_plan: str | dict[str, str] | None = None,
    ) -> Self:
        """Load by folder, hub id, or "smollm2" (the embedded default).

        dtype: auto (bfloat16 where the machine multiplies it in hardware, else float32), bfloat16, float16 or float32.
        device_map: passed to accelerate ("auto" spreads layers over all devices, then the CPU's memory, then
        offload_folder; or a dict of module: device); None puts the model on the first GPU, or the CPU. tp_plan: spread
        over the processes of torchrun, for capture (data.spread); only the first of them returns from here. ValueError
        on an unknown dtype or a model whose parts are not found.
        """
        if dtype not in ("auto", *DTYPES):
            raise ValueError(f"target.dtype must be auto, {', '.join(DTYPES)}, got {dtype!r}")
        wanted = DTYPES[("bfloat16" if native_bf16() else "float32") if dtype == "auto" else dtype]
        source = target_source(name)
        shared: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        check_files(source)
        config = config_of(source, **shared)
        auto = AutoModelForCausalLM if _is_causal(config) or trust_remote_code else AutoModelForImageTextToText
        placing: dict[str, Any] = {"device_map": device_map, "offload_folder": offload_folder}
        if tp_plan is not None:
            if device_map is not None:
                raise ValueError("target.tp_plan and target.device_map exclude each other")
            placing = parallel_arguments(tp_plan)
        model = auto.from_pretrained(source, dtype=wanted, use_safetensors=True, **placing, **shared)
        if device_map is tp_plan is None and torch.cuda.is_available():
            model = model.to("cuda")  # type: ignore[arg-type]  # the stubs take `self` for the first argument
        tokenizer = AutoTokenizer.from_pretrained(source, **shared)
        found = cls(model, tokenizer, name, source, revision or getattr(config, "_commit_hash", None))
        if tp_plan is not None:
            found._together = Together(found._anatomy.decoder, {"read": found._read, "top1": found._own_top1})
        return found

    @property
    def parts(self) -> TargetParts:
        """The pieces a drafter shares; tensors are the model's own, not copies."""
        found = self._anatomy
        return TargetParts(
            config=found.config,
            embedding=found.embedding,
            norm=found.norm,
            head=found.head,
            embedding_scale=found.embedding_scale,
            head_bias=found.head_bias,
            logit_scale=found.logit_scale,
            logit_softcap=found.logit_softcap,
            last_block=None if self._together else found.last_block,
            identity=self.identity,
            mask_token=unused_token(self.tokenizer, len(found.embedding)),
        )

    @property
    def device(self) -> torch.device:
        """Where token ids go: the device of the embedding."""
        return self._anatomy.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self._anatomy.embedding.dtype

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: the generation config's (else the config's) and the tokenizer's, ascending."""
        return ending_ids(self.model.generation_config, self._anatomy.config, self.tokenizer)

    def to(self, device: torch.device | str) -> Self:
        """Move a model that accelerate has not spread; updates the shared parts."""
        self.model.to(device)
        self._anatomy, self._head, self._shown = anatomy(self.model), None, None
        return self

    def forward(
        self,
        tokens: Tensor,
        layers: Sequence[int],
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        positions: Tensor | None = None,
        cache: Any = None,
    ) -> Features:
        """Run the decoder, without the head.

        tokens [B, T] int64. layers: ascending ids, 0 = first decoder layer's output. attention_mask [B, past + T],
        1 where a token is real; or what is added to the scores [B, 1, T, past + T], where a target has several kinds of
        attention one for each. positions [B, T]; by default real tokens are numbered from 0 in each row, so left and
        right padding give the same features; ValueError where they are needed. cache: a transformers Cache, extended in
        place.
        Returns features on the device of the last hidden state; those at padding are meaningless.
        """
        wanted = check_layers(tuple(layers), len(self._anatomy.layers)) if len(layers) else ()
        tokens = tokens.to(self.device)
        if isinstance(attention_mask, dict):
            attention_mask = {kind: mask.to(self.device) for kind, mask in attention_mask.items()}
        elif attention_mask is not None:
            attention_mask = attention_mask.to(self.device)
        if positions is None:
            if isinstance(attention_mask, dict) or (attention_mask is not None and attention_mask.ndim == 4):
                raise ValueError("masks that are added to the scores need positions")
            positions = default_positions(tokens, attention_mask, _past(cache))
        places = positions.to(self.device)
        if self._together is not None and cache is None:
            return cast(Features, self._together.run("read", tokens, wanted, attention_mask, places))
        return self._read(tokens, wanted, attention_mask, places, cache)

    def _read(
        self,
        tokens: Tensor,
        wanted: Sequence[int],
        attention_mask: Tensor | dict[str, Tensor] | None,
        positions: Tensor,
        cache: Any = None,
    ) -> Features:
        tokens, positions = tokens.to(self.device), positions.to(self.device)
        if isinstance(attention_mask, Tensor):
            attention_mask = attention_mask.to(self.device)
        arguments: dict[str, Any] = {"attention_mask": attention_mask, "position_ids": positions}
        if cache is not None:
            arguments[self._cache_name] = cache
        with outputs_of([self._anatomy.layers[i] for i in wanted], _states) as kept:
            result = self._anatomy.decoder(input_ids=tokens, use_cache=cache is not None, **arguments)
        last = result[0] if isinstance(result, tuple) else result.last_hidden_state
        if not wanted:
            return Features(last.new_empty(*last.shape[:2], 0, last.shape[-1]), last)
        return Features(torch.stack([output.to(last.device) for output in kept], dim=2), last)

    def logits(self, last: Tensor) -> Tensor:
        """The target's logits of last hidden states. last [..., D] -> [..., V], on the head's device."""
        last = last.to(self._anatomy.head.device)
        if self._shown is None:
            self._shown = self.parts  # asks the tokenizer: half a millisecond, too much for every round
        if self._head is not None and last.dtype == torch.float32:
            return self._shown.shape_logits(self._head(last))
        return self._shown.logits(last)

    @torch.inference_mode()
    def own_top1(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Argmax of the whole model's own logits, the outside witness of check 4. [B, T] -> int64 [B, T]."""
        if self._together is not None:
            return cast(Tensor, self._together.run("top1", tokens, attention_mask))
        return self._own_top1(tokens, attention_mask)

    def _own_top1(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
        positions = default_positions(tokens, attention_mask, 0)
        arguments = {"attention_mask": attention_mask, "position_ids": positions}
        moved = {name: None if value is None else value.to(self.device) for name, value in arguments.items()}
        return self.model(input_ids=tokens.to(self.device), use_cache=False, **moved).logits.argmax(-1)

    @torch.inference_mode()
    def _check_anatomy(self) -> None:
        """Eight tokens through the model: the parts must reproduce the first layer's input and the logits."""
        found = self._anatomy
        step = max(1, found.head.shape[0] // 9)
        tokens = (torch.arange(1, 9, device=self.device) * step % found.head.shape[0])[None]
        with _inputs(found.layers[0]) as first:
            own = self.model(input_ids=tokens, use_cache=False).logits
        found.check_embedding(tokens, first[0])
        ours = self.logits(self.forward(tokens, ()).last).to(own.device)
        error, size = float((ours.float() - own.float()).abs().max()), float(own.float().abs().max())
        # Kernels may round differently by shape; a wrong norm, head or scale is off by the logits' own size.
        allowed = max(1e-4, 8 * torch.finfo(self.dtype).eps) * max(size, 1.0)
        if not error <= allowed:
            raise ValueError(
                f"the parts found in {type(self.model).__name__} do not give its logits (largest difference "
                f"{error:.3g}, allowed {allowed:.3g}): {found.describe()}"
            )


def feature_truth(
    parts: TargetParts, last: Tensor, top1: Tensor, where: str, target_dtype: torch.dtype = torch.float32
) -> float:
    """Check 4: head(last) has the target's own argmax on >= 99% of positions; returns the share.

    last [N, D], top1 [N]. target_dtype: what the target computed top1 in; where that or the head is a 16-bit dtype,
    tokens whose logits that dtype cannot tell apart count as the same. ValueError names `where` and what to look at.
    An empty sample is an error: it proves nothing.
    """
    if top1.numel() == 0:
        raise ValueError(f"{where}: no positions to check the features on")
    head, hits = parts.head, 0
    eps = max(torch.finfo(dtype).eps for dtype in (head.dtype, target_dtype))
    step = max(1, LOGITS_AT_ONCE // head.shape[0])
    for rows, own in zip(last.split(step), top1.split(step), strict=True):
        logits = parts.logits(rows.to(head.device)).float()
        best = logits.amax(-1)
        hits += int((logits.gather(-1, own.to(head.device)[:, None])[:, 0] >= best - eps * best.abs()).sum())
    share = hits / top1.numel()
    if share < TRUTH_SHARE:
        raise ValueError(
            f"{where}: head(last) has the target's own argmax on only {share:.1%} of {top1.numel()} positions (>= "
            f"{TRUTH_SHARE:.0%} needed): the last hidden state is not the final norm's output, belongs to another "
            f"layer, dtype or target, or the head's scale is wrong"
        )
    return share


def check_files(source: str) -> None:
    """ValueError when the index of a folder's weights names a file outside of it."""
    index = Path(source) / "model.safetensors.index.json"
    if index.is_file():
        index_of(index)


def default_positions(tokens: Tensor, attention_mask: Tensor | None, past: int) -> Tensor:
    """Real tokens numbered from 0 in each row. tokens [B, T], attention_mask [B, past + T] -> int64 [B, T]."""
    if attention_mask is None or attention_mask.ndim != 2:
        return torch.arange(past, past + tokens.shape[1], device=tokens.device).expand(tokens.shape)
    if attention_mask.shape != (tokens.shape[0], past + tokens.shape[1]):
        wanted, got = [tokens.shape[0], past + tokens.shape[1]], list(attention_mask.shape)
        raise ValueError(f"attention_mask must be [B, past + T] = {wanted}, got {got}")
    return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, past:]


def _past(cache: Any) -> int:
    return 0 if cache is None else int(cache.get_seq_length())


def _is_causal(config: Any) -> bool:
    return type(config) in AutoModelForCausalLM._model_mapping


def _states(output: Any) -> Tensor:
    """A layer's hidden states: layers return a tensor or a tuple that starts with it."""
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def _inputs(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Collect a layer's hidden-state input during one forward."""
    kept: list[Tensor] = []

    def keep(_module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        kept.append(arguments[0] if arguments else named["hidden_states"])

    handle = layer.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield kept
    finally:
        handle.remove()
