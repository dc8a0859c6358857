"""What engines would refuse, or silently get wrong, in a P-EAGLE, Medusa or EAGLE-1 folder, or in that of an ordinary
model."""

from transformers import AutoConfig, PretrainedConfig

from checkpoints.engine_model import name_of, skeleton
from checkpoints.layout import Head, Shapes, layer_shapes, target_vocabulary
from checkpoints.lint_common import Finding, Level, dtypes, positions, rope_spelling, tensor_faults, vocabulary_map


def _against(head: Head, wanted: Shapes, optional: set[str]) -> list[Finding]:
    """Names and shapes of the tensors against the engine's own parameters."""
    found = []
    for name in sorted(set(head.tensors) - set(wanted) - optional):
        found.append(Finding("refused", f"{head.written.get(name, name)} is no parameter of the engine"))
    return found + tensor_faults(head, wanted)


def _sizes(head: Head, keys: tuple[str, ...]) -> list[Finding]:
    missing = [key for key in keys if not isinstance(head.body.get(key), int)]
    return [Finding("refused", f"config.json lacks {', '.join(missing)}")] if missing else []


# P-EAGLE
# ----------------------------------------------------------------------------------------------------------------------


def lint_peagle(head: Head, engine: str, target: PretrainedConfig | None) -> list[Finding]:
    """Findings in a P-EAGLE folder for one engine."""
    if not engine.startswith("vllm"):
        return [Finding("refused", f"{engine} has no parallel EAGLE drafting; vLLM's V1 runner has")]
    if (engine == "vllm_speculators") != (head.layout == "speculators"):
        return [Finding("refused", f"{engine} does not read the {head.layout} layout")]
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    if found := _sizes(head, keys):
        return found
    architectures = head.config.get("architectures") or []
    if engine == "vllm" and not any(name.endswith("Eagle3") or name.startswith("Eagle3") for name in architectures):
        text = f"architectures {architectures}: method eagle3 looks for them under another name"
        found.append(Finding("refused", text))
    found += _against(head, _peagle_shapes(head), {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"})
    return found + _peagle_settings(head, target) + rope_spelling(head) + positions(head, target) + dtypes(head)


def _peagle_shapes(head: Head) -> Shapes:
    size = head.body["hidden_size"]
    wide = size * _features(head)
    shapes: Shapes = {"fc.weight": (size, wide), "mask_hidden": (1, wide), "norm.weight": (size,)}
    for i in range(head.body["num_hidden_layers"]):
        layer = layer_shapes(head.body, size if i else 2 * size)
        if i == 0:
            layer["hidden_norm.weight"] = (size,)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _features(head: Head) -> int:
    return int(head.body.get("num_aux_hidden_states") or head.config.get("num_aux_hidden_states") or 3)


def _peagle_settings(head: Head, target: PretrainedConfig | None) -> list[Finding]:
    found, size = [], target_vocabulary(head)
    ids = head.config.get("eagle_aux_hidden_state_layer_ids")
    if ids and len(ids) != _features(head):
        found.append(Finding("refused", f"{len(ids)} layer ids are stated, fc reads {_features(head)} features"))
    if ids and target is not None and not 0 < min(ids) <= max(ids) <= target.num_hidden_layers:
        found.append(
            Finding("refused", f"ids {ids} count blocks applied, 1..{target.num_hidden_layers} in this target")
        )
    mask = head.config.get("mask_token_id", head.config.get("pard_token"))
    if mask is None:
        found.append(Finding("refused", "mask_token_id is missing"))
    elif not 0 <= mask < size:
        found.append(Finding("refused", f"mask_token_id is {mask}, the vocabulary is 0..{size - 1}"))
    rows, d2t = head.config.get("draft_vocab_size") or size, head.tensors.get("d2t")
    lm_head = head.tensors.get("lm_head.weight")
    if lm_head is not None and len(lm_head) != rows:
        found.append(Finding("refused", f"lm_head has {len(lm_head)} rows, draft_vocab_size is {rows}"))
    if rows != size and (lm_head is None or d2t is None):
        lacks = "lm_head" if lm_head is None else "d2t"
        found.append(Finding("wrong", f"draft_vocab_size {rows} is below {size}, but there is no {lacks}"))
    elif d2t is not None:
        found += vocabulary_map(d2t, head.tensors.get("t2d"), rows, size)
    return found


# Medusa
# ----------------------------------------------------------------------------------------------------------------------


def lint_medusa(head: Head, engine: str, target: PretrainedConfig | None) -> list[Finding]:
    """Findings in a Medusa folder (vLLM's own names) for one engine."""
    if engine != "vllm":
        return [Finding("refused", f"{engine} has no Medusa; vLLM's plain layout has")]
    keys = ("hidden_size", "vocab_size", "num_heads", "num_hidden_layers")
    if found := _sizes(head, keys):
        return found
    size, count = head.body["hidden_size"], head.body["vocab_size"]
    words = head.body.get("truncated_vocab_size") or count
    shapes: Shapes = {}
    for i in range(head.body["num_heads"]):
        for j in range(head.body["num_hidden_layers"]):
            shapes[f"blocks.{i}.layers.{j}.weight"] = (size, size)
            if head.body.get("medusa_fc_bias"):
                shapes[f"blocks.{i}.layers.{j}.bias"] = (size,)
        if not head.body.get("original_lm_head"):
            shapes[f"lm_heads.{i}.weight"] = (count, size)
    if head.body.get("original_lm_head"):
        shapes["lm_head.weight"] = (words, size)
    # Names that are not its own are dropped without a word.
    reduced = words < count or "token_map" in head.tensors
    found = [Finding("refused", "token_map is not taken as loaded (vLLM 0.32): write all rows")] if reduced else []
    found += [
        Finding("wrong", f"{finding.text}: skipped without a word") if "no parameter" in finding.text else finding
        for finding in _against(head, shapes, {"token_map"})
    ]
    if target is not None and (size, count) != (target.hidden_size, target.vocab_size):
        own = (target.hidden_size, target.vocab_size)
        found.append(Finding("refused", f"hidden_size and vocab_size are {(size, count)}, the target's {own}"))
    return found + dtypes(head)


# EAGLE-1, and HASS: two engines, two class names, and a bias that one drops and the other always has
# ----------------------------------------------------------------------------------------------------------------------

EAGLE1_CLASSES = {"vllm": ("EagleLlamaForCausalLM", "LlamaForCausalLM"), "sglang": ("LlamaForCausalLMEagle",)}


def lint_eagle1(head: Head, engine: str, target: PretrainedConfig | None) -> list[Finding]:
    """Findings in an EAGLE-1 folder for one engine."""
    if engine not in EAGLE1_CLASSES or head.layout != "plain":
        return [Finding("refused", f"EAGLE-1 is served from plain folders by {' and '.join(EAGLE1_CLASSES)} alone")]
    if found := _sizes(head, ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")):
        return found
    architectures = head.config.get("architectures") or []
    if not set(architectures) & set(EAGLE1_CLASSES[engine]):
        text = f"architectures {architectures}; {engine} loads {', '.join(EAGLE1_CLASSES[engine])}"
        found.append(Finding("refused", text))
    for finding in _against(head, _eagle1_shapes(head), {"embed_tokens.weight", "fc.bias"}):
        unknown = "is no parameter" in finding.text
        if unknown and engine == "sglang":
            level: Level = "note" if "lm_head" in finding.text else "wrong"
            found.append(Finding(level, f"{finding.text}: skipped without a word"))
        else:
            found.append(finding)
    bias = head.tensors.get("fc.bias")
    if engine == "vllm" and bias is not None and bool(bias.any()):
        found.append(Finding("wrong", "fc.bias is dropped without a word"))
    if engine == "sglang" and bias is None:
        found.append(Finding("wrong", "fc.bias is missing: the engine has one, which stays at its random start"))
    if (head.config.get("draft_vocab_size") or target_vocabulary(head)) != target_vocabulary(head):
        found.append(Finding("refused", "draft_vocab_size is reduced; EAGLE-1 drafts with the target's whole head"))
    if target is not None and (head.body["hidden_size"], target_vocabulary(head)) != (
        target.hidden_size,
        target.vocab_size,
    ):
        found.append(Finding("refused", f"sizes are not the target's {target.hidden_size} and {target.vocab_size}"))
    return found + rope_spelling(head) + positions(head, target) + dtypes(head)


def _eagle1_shapes(head: Head) -> Shapes:
    shapes: Shapes = {"fc.weight": (head.body["hidden_size"], 2 * head.body["hidden_size"])}
    for i in range(head.body["num_hidden_layers"]):
        layer = layer_shapes(head.body, head.body["hidden_size"])
        if i == 0:
            del layer["input_layernorm.weight"]
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


# Ordinary models
# ----------------------------------------------------------------------------------------------------------------------


def lint_model(head: Head, engine: str, target: PretrainedConfig | None) -> list[Finding]:
    """Findings in an ordinary model's folder that is to draft for one engine."""
    if engine == "vllm_speculators":
        return [Finding("refused", "an ordinary model has no speculators layout")]
    values = {key: value for key, value in head.config.items() if key not in ("architectures", "model_type")}
    try:
        config = AutoConfig.for_model(str(head.config.get("model_type")), **values)
        model = skeleton(config)
    except ValueError as error:
        return [Finding("refused", f"transformers builds no model of this config: {error}")]
    shapes: Shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    own_head = f"{name_of(model, model.get_output_embeddings())}.weight"
    tied = {own_head} if config.tie_word_embeddings else set()
    found = _against(head, {name: shape for name, shape in shapes.items() if name not in tied}, tied)
    if target is not None and config.vocab_size != target.vocab_size:
        text = f"its vocabulary has {config.vocab_size} tokens, the target's {target.vocab_size}"
        found.append(Finding("refused", text))
    return found + positions(head, target) + dtypes(head)
