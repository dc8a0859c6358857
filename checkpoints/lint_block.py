"""What an engine would refuse, or silently get wrong, in a block drafter's folder (DFlash, DFlash 2, DSpark, Domino).

Names and shapes are compared with the engine's own parameters, which follow from config.json alone.
"""

from transformers import PretrainedConfig

from checkpoints.layout import Head, stated_slots, target_vocabulary
from checkpoints.layout_block import (
    MASK_FILE,
    Block,
    describe,
    expected_shapes,
    mask_embedding,
    refusals,
    setting,
)
from checkpoints.lint_common import Finding, Level, dtypes, positions, rope_spelling, tensor_faults, vocabulary_map
from drafters.block import spread_layers

DFLASH, DFLASH2, DSPARK = ("DFlashDraftModel",), ("DFlash2DraftModel",), ("Qwen3DSparkModel", "Qwen3OmniDSparkModel")
ARCHITECTURES: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {"dflash": (*DFLASH, "MuseGlimmerAssistantModel"), "dflash2": DFLASH2, "dspark": DSPARK},
    "sglang": {"dflash": DFLASH, "dflash2": DFLASH2, "dspark": DSPARK, "domino": DFLASH},
    "transformers": {"dflash": ("MuseGlimmerAssistantModel",)},
}
KINDS = ("dflash", "dflash2", "dspark")  # of the speculators layout, in vLLM
OPTIONAL = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
# Other spellings that an engine takes, by the one they stand for.
ALIASES = {
    "vllm": ("encoder.fc.weight", "encoder.output_norm_enc.weight", "draft_id_to_target_id"),
    "sglang": (),
    "transformers": (),
}
OWN_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


def lint_block(head: Head, engine: str, target: PretrainedConfig | None) -> list[Finding]:
    """Findings in a block drafter for one engine."""
    try:
        block = describe(head)
    except (ValueError, TypeError) as error:
        return [Finding("refused", str(error))]
    found = _layout(head, block, engine)
    if any(finding.level == "refused" for finding in found):
        return found
    found += _tensors(head, block, engine) + _slots(head, block, engine) + _mask(head, block, engine, target)
    found += _layers(head, block, target) + _vocabulary(head, block, engine) + _attention(head, block, engine)
    return found + rope_spelling(head) + positions(head, target) + dtypes(head)


def _layout(head: Head, block: Block, engine: str) -> list[Finding]:
    if head.layout == "speculators":
        return _speculators(head, block, engine)
    if engine == "vllm_speculators":
        return [Finding("refused", f"{engine} does not read the plain layout")]
    kinds = ARCHITECTURES[engine]
    if block.kind not in kinds:
        return [Finding("refused", f"{engine} has no {block.kind}; its block drafters are {', '.join(kinds)}")]
    names = tuple(head.config.get("architectures") or ())
    if not set(names) & set(kinds[block.kind]):
        wanted = ", ".join(kinds[block.kind])
        return [Finding("refused", f"architectures {list(names)}; for {block.kind} {engine} loads {wanted}")]
    return []


def _speculators(head: Head, block: Block, engine: str) -> list[Finding]:
    if engine not in ("vllm", "vllm_speculators"):
        return [Finding("refused", f"{engine} does not read the speculators layout")]
    wrapped, found = head.config.get("speculators_config") or {}, []
    if block.kind not in KINDS:
        found.append(Finding("refused", f"speculators_model_type {block.kind!r}; vLLM reads {', '.join(KINDS)}"))
    if not wrapped.get("proposal_methods"):
        found.append(Finding("refused", "speculators_config.proposal_methods is missing"))
    if not (wrapped.get("verifier") or {}).get("name_or_path"):
        found.append(Finding("refused", "speculators_config.verifier.name_or_path is missing: no target to start"))
    if block.layers is None:
        found.append(Finding("refused", "aux_hidden_state_layer_ids is missing"))
    if engine == "vllm":
        found.append(Finding("note", "this is the speculators layout; `vllm serve <folder>` alone starts it"))
    return found


def _tensors(head: Head, block: Block, engine: str) -> list[Finding]:
    """Names and shapes against the engine's own parameters."""
    try:
        wanted = expected_shapes(head, block)
    except ValueError as error:
        return [Finding("refused", str(error))]
    found = []
    for name in sorted(set(head.tensors) - set(wanted) - set(OPTIONAL)):
        written = head.written.get(name, name)
        silent = engine == "sglang" or written.endswith(".bias")
        text = "skipped without a word" if silent else "no parameter of the engine"
        found.append(Finding("wrong" if silent else "refused", f"{written} is {text}"))
    found += tensor_faults(head, wanted)
    for name in sorted(set(wanted) & set(head.tensors)):
        own = OWN_NAMES.get(name, name) if engine == "transformers" else name
        written = head.written.get(name, name)
        known = {own, f"model.{own}", *ALIASES.get(engine, ())}
        if written not in known:
            level: Level = "wrong" if engine != "vllm" else "refused"
            found.append(Finding(level, f"{written} is {name} elsewhere; {engine} calls it {own}"))
    return found


def _slots(head: Head, block: Block, engine: str) -> list[Finding]:
    found = []
    rows, slots = block.rows, stated_slots(head)
    if rows is None:
        found.append(Finding("wrong", "block_size is missing: engines take 16, or what their command line says"))
    elif rows < 2 and block.slot_convention == "fill_in":
        found.append(Finding("refused", f"block_size {rows} leaves no slot beside the anchor"))
    if head.layout == "speculators" and rows is not None and slots is not None and slots != block.num_slots:
        found.append(
            Finding("wrong", f"block_size {rows} is a block of {block.num_slots} slots, speculative_tokens is {slots}")
        )
    anchor = block.slot_convention == "anchor_first"
    if anchor and block.kind in ("dflash", "dflash2"):
        level: Level = "refused" if engine.startswith("vllm") else "wrong"
        found.append(Finding(level, "it drafts from the anchor's row; the engine reads mask rows only"))
    if block.kind == "dspark" and engine == "sglang" and not anchor:
        found.append(Finding("wrong", "it drafts from mask rows only; SGLang reads the anchor's row as slot 1"))
    return found


def _mask(head: Head, block: Block, engine: str, target: PretrainedConfig | None) -> list[Finding]:
    mask, size = block.mask_token, target_vocabulary(head)
    if mask is None:
        return [Finding("refused", "mask_token_id is missing")]
    if not 0 <= mask < size:
        return [Finding("refused", f"mask_token_id is {mask}, the vocabulary is 0..{size - 1}")]
    found = []
    try:
        row = mask_embedding(head.folder, mask)
    except ValueError as error:
        return [Finding("refused", str(error))]
    if row is not None and (not engine.startswith("vllm") or block.kind == "dspark"):
        found.append(Finding("wrong", f"{MASK_FILE} is not read: mask rows get the target's embedding of {mask}"))
    if target is not None:
        ends = target.eos_token_id if isinstance(target.eos_token_id, list) else [target.eos_token_id]
        used = {"bos_token_id": [target.bos_token_id], "eos_token_id": ends}
        found += [
            Finding("wrong", f"mask_token_id {mask} is the target's {key}, which texts hold")
            for key, ids in used.items()
            if mask in ids
        ]
    return found


def _layers(head: Head, block: Block, target: PretrainedConfig | None) -> list[Finding]:
    fc, size = head.tensors.get("fc.weight"), head.body["hidden_size"]
    found: list[Finding] = []
    if fc is not None and fc.ndim == 2 and block.layers is not None and fc.shape[1] != size * len(block.layers):
        text = f"{len(block.layers)} layer ids are stated, fc reads {fc.shape[1] / size:g} features"
        found.append(Finding("refused", text))
    if block.layers is not None and block.layers != sorted(set(block.layers)):
        found.append(Finding("wrong", f"layer ids {block.written_layers} are not ascending: engines sort them"))
    if target is None:
        return [*found, Finding("note", "no target given: layer ids are not compared with its depth")]
    depth, declared = target.num_hidden_layers, setting(head, "num_target_layers")
    if declared is not None and declared != depth:
        found.append(Finding("wrong", f"num_target_layers is {declared}, the target has {depth}"))
    if block.layers is None:
        return [*found, Finding("note", "no layer ids: the engine spreads them itself, as many as there are layers")]
    if max(block.layers) >= depth or min(block.layers) < 0:
        return [*found, Finding("refused", f"outputs {block.layers} are stated, the target has {depth} layers")]
    return found + _looks_shifted(head, block, depth)


def _looks_shifted(head: Head, block: Block, depth: int) -> list[Finding]:
    """Ids that are the spread default in the other convention: off by one, most likely."""
    assert block.layers is not None
    try:
        default = list(spread_layers(depth, len(block.layers)))
    except ValueError:
        return []
    speculators = head.layout == "speculators"
    other = [layer - 1 if speculators else layer + 1 for layer in default]
    if block.layers != other:
        return []
    looks, right = ("outputs", "blocks applied") if speculators else ("blocks applied", "outputs")
    wanted = [layer + 1 for layer in default] if speculators else default
    text = f"layer ids {block.written_layers} look like {looks}: as {right} the default is {wanted}"
    return [Finding("wrong", text)]


def _vocabulary(head: Head, block: Block, engine: str) -> list[Finding]:
    size, d2t, lm_head = target_vocabulary(head), head.tensors.get("d2t"), head.tensors.get("lm_head.weight")
    rows = int(setting(head, "draft_vocab_size") or size)
    found = []
    if not engine.startswith("vllm"):
        if rows != size and block.kind != "dflash":
            found.append(Finding("refused", f"{block.kind} needs the whole vocabulary, draft_vocab_size is {rows}"))
        if lm_head is not None or d2t is not None:
            found.append(Finding("note", "lm_head and d2t are not read: the engine drafts with the target's head"))
        return found
    if lm_head is not None and len(lm_head) != rows:
        found.append(Finding("refused", f"lm_head has {len(lm_head)} rows, draft_vocab_size is {rows}"))
    if rows == size:
        if d2t is not None:
            found.append(Finding("refused", "d2t is there though the draft vocabulary is whole: vLLM has no place"))
        return found
    if block.kind == "dflash2":
        found.append(Finding("refused", f"dflash2 needs the whole vocabulary, draft_vocab_size is {rows}"))
    level: Level = "refused" if block.kind == "dspark" else "wrong"
    if lm_head is None:
        found.append(Finding(level, f"draft_vocab_size {rows} is below {size}, but there is no lm_head"))
    if d2t is None:
        return [*found, Finding(level, f"draft_vocab_size {rows} is below {size}, but there is no d2t")]
    return found + vocabulary_map(d2t, head.tensors.get("t2d"), rows, size)


def _attention(head: Head, block: Block, engine: str) -> list[Finding]:
    found: list[Finding] = []
    mixed = bool(block.windowed) and len(block.windowed) < block.depth
    if block.windowed and block.window is None:
        found.append(Finding("refused", "layer_types has windowed layers, but sliding_window is missing"))
    if block.windowed and not head.body.get("use_sliding_window", True):
        found.append(Finding("wrong", "use_sliding_window is false: transformers drops the window of its layers"))
    if engine.startswith("vllm") and (mixed or block.kind in ("dspark", "dflash2")):
        why = "windowed and full layers are mixed" if mixed else block.kind
        found.append(Finding("note", f"it needs vLLM's V2 model runner ({why}); the CPU has V1"))
    if engine == "sglang" and block.kind == "dspark" and setting(head, "markov_head_type") is None:
        found.append(Finding("refused", "markov_head_type is missing, and SGLang has no default"))
    if block.kind == "domino" and int(setting(head, "pure_draft_prefix_len", 1)) != 1:
        found.append(Finding("refused", "pure_draft_prefix_len is not 1, the only one that SGLang takes"))
    if engine.startswith("vllm") and block.kind == "dspark" and block.head["kind"] != "vanilla":
        found.append(Finding("refused", f"markov_head_type is {block.head['kind']}; vLLM has vanilla alone"))
    if head.body.get("hidden_act", "silu") != "silu":
        found.append(Finding("refused", f"hidden_act is {head.body['hidden_act']!r}, engines have silu"))
    found += [Finding("note", f"{reason} (our importer refuses it)") for reason in refusals(head, block)]
    return found
