"""What an engine would refuse, or silently get wrong, in a head's folder: ours or anybody's.

Most faults of exported heads never raise, they only accept less. So each is looked for in the files themselves, against
what the engine is known to read (vLLM 0.32, SGLang 0.5.23, transformers 5.24). Here: EAGLE-3, and the parts that every
family shares; checkpoints/lint_block.py has the block drafters, native_lint.py targets with a native head.
"""

from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from checkpoints.engine_entry import is_default_layers
from checkpoints.engines import ENGINES
from checkpoints.layout import KNOWN, Head, num_features, read_head, stated_layers, target_vocabulary
from checkpoints.lint_block import lint_block
from checkpoints.lint_common import Finding, Level, dtypes, misshapen, missing, positions, rope_spelling, vocabulary_map
from checkpoints.lint_heads import lint_eagle1, lint_medusa, lint_model, lint_peagle
from checkpoints.native_lint import carries_native, lint_native
from drafters.contract import default_layers

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
ARCHITECTURES = {
    "vllm": ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"),
    "sglang": ("LlamaForCausalLMEagle3",),
}


def lint(folder: Path, engine: str, target: PretrainedConfig | None = None) -> list[Finding]:
    """Findings for one engine, worst first. target: its text config, for the checks that need its depth, width and
    length.

    ValueError on an unknown engine or a folder that cannot be read at all.
    """
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; allowed: {', '.join(ENGINES)}")
    if carries_native(folder):
        return _worst_first(lint_native(folder, engine))
    head = read_head(folder)
    if head.family == "block":
        found = lint_block(head, engine, target)
    elif head.family == "medusa":
        found = lint_medusa(head, engine, target)
    elif head.family == "peagle":
        found = lint_peagle(head, engine, target)
    elif head.family == "eagle1":
        found = lint_eagle1(head, engine, target)
    elif head.family == "model":
        found = lint_model(head, engine, target)
    elif engine == "transformers":
        found = [Finding("refused", "transformers runs block drafters alone")]
    else:
        found = _lint_eagle3(head, engine, target)
    return _worst_first(found)


def _worst_first(found: list[Finding]) -> list[Finding]:
    return sorted(found, key=lambda finding: ("refused", "wrong", "note").index(finding.level))


def _lint_eagle3(head: Head, engine: str, target: PretrainedConfig | None) -> list[Finding]:
    found = _layout(head, engine)
    found += _names(head, engine) + _layers(head, engine, target) + _vocabulary(head, engine)
    return found + _shapes(head) + _switches(head, engine) + positions(head, target) + dtypes(head)


def _layout(head: Head, engine: str) -> list[Finding]:
    if (engine == "vllm_speculators") != (head.layout == "speculators"):
        if engine == "vllm":
            return [
                Finding(
                    "note", "this is the speculators layout; vLLM reads it, and `vllm serve <folder>` alone starts it"
                )
            ]
        return [Finding("refused", f"{engine} does not read the {head.layout} layout")]
    if engine == "vllm_speculators":
        found = []
        if not (head.config.get("speculators_config") or {}).get("proposal_methods"):
            found.append(Finding("refused", "speculators_config.proposal_methods is missing"))
        elif not head.config["speculators_config"].get("verifier", {}).get("name_or_path"):
            found.append(Finding("refused", "speculators_config.verifier.name_or_path is missing: no target to start"))
        if "norm_before_residual" not in head.config:
            found.append(Finding("wrong", "norm_before_residual is not written; this layout reads that as true"))
        return found
    architectures = tuple(head.config.get("architectures") or ())
    if not set(architectures) & set(ARCHITECTURES[engine]):
        return [
            Finding(
                "refused", f"architectures {list(architectures)}; {engine} loads {', '.join(ARCHITECTURES[engine])}"
            )
        ]
    return []


def _names(head: Head, engine: str) -> list[Finding]:
    """Tensor names against the engine's own parameter names."""
    found = []
    for name in sorted(head.tensors):
        if KNOWN.fullmatch(name):
            continue
        if name.endswith(".bias") and engine != "sglang":
            found.append(Finding("wrong", f"{name} is dropped without a word"))
        elif engine == "sglang":
            found.append(Finding("wrong", f"{name} is unknown and skipped without a word"))
        else:
            found.append(Finding("refused", f"{name} is no parameter of the engine's EAGLE-3"))
    names = set(head.tensors)
    needed = {"fc.weight", "norm.weight", "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight"}
    needed |= {f"midlayer.self_attn.{part}_proj.weight" for part in "qkvo"}
    needed |= {f"midlayer.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    needed.add("midlayer.post_attention_layernorm.weight")
    count = num_features(head) if "fc.weight" in names else 0
    if head.setting("fc_norm"):
        needed |= {f"fc_norm.{i}.weight" for i in range(count)}
    if head.setting("norm_before_fc"):
        needed.add("input_norm.weight")
    found += missing(head, sorted(needed))
    if not head.setting("fc_norm") and any(name.startswith("fc_norm.") for name in names):
        found.append(
            Finding("refused" if engine != "sglang" else "wrong", "fc_norm tensors are there, but fc_norm is off")
        )
    if "embed_tokens.weight" in names and engine == "sglang":
        found.append(Finding("note", "embed_tokens is replaced by the target's"))
    return found


def _layers(head: Head, engine: str, target: PretrainedConfig | None) -> list[Finding]:
    found, count = [], num_features(head)
    stated = head.config.get("num_aux_hidden_states", head.body.get("num_aux_hidden_states"))
    if stated is None:
        level: Level = "note" if count == 3 else "refused"
        found.append(
            Finding(level, f"num_aux_hidden_states is missing: the engine assumes 3 features, fc reads {count}")
        )
    elif stated != count:
        found.append(Finding("refused", f"num_aux_hidden_states is {stated}, fc reads {count} features"))
    top = head.config.get(LAYER_IDS) or head.body.get(LAYER_IDS)
    nested = (head.config.get("eagle_config") or {}).get(LAYER_IDS)
    if nested and engine != "sglang":
        found.append(
            Finding(
                "wrong",
                f"ids {nested} in eagle_config count outputs elsewhere; vLLM V1 reads them as blocks applied, "
                "V2 not at all",
            )
        )
    try:
        layers, _ = stated_layers(head)
    except ValueError as error:
        return [*found, Finding("wrong", str(error))]
    if layers is not None and len(layers) != count:
        found.append(Finding("refused", f"{len(layers)} layer ids are stated, fc reads {count} features"))
    return found + _against_depth(engine, layers, top, nested, target)


def _against_depth(
    engine: str, layers: list[int] | None, top: Any, nested: Any, target: PretrainedConfig | None
) -> list[Finding]:
    if target is None:
        return [Finding("note", "no target given: layer ids are not compared with its depth")]
    depth = target.num_hidden_layers
    if layers is None:
        try:
            return [Finding("note", f"no layer ids: the engine captures outputs {list(default_layers(depth))}")]
        except ValueError as error:
            return [Finding("refused", str(error))]
    if layers[-1] >= depth:
        return [Finding("refused", f"output {layers[-1]} is stated, the target has {depth} layers")]
    if engine == "sglang" and top and not nested and not is_default_layers(layers, depth):
        return [
            Finding("wrong", f"SGLang ignores top-level ids {top} and captures its default layers; write them nested")
        ]
    default = default_layers(depth) if depth >= 8 else None
    if default is not None and top and [layer + 1 for layer in layers] == list(default):
        return [
            Finding(
                "wrong",
                f"top-level ids {top} look like outputs: as blocks applied the default is {[i + 1 for i in default]}",
            )
        ]
    return []


def _vocabulary(head: Head, engine: str) -> list[Finding]:
    size, d2t, lm_head = target_vocabulary(head), head.tensors.get("d2t"), head.tensors.get("lm_head.weight")
    if engine == "sglang" and "draft_vocab_size" not in head.config:
        return [Finding("refused", "draft_vocab_size is missing, and SGLang reads it without a default")]
    rows = head.setting("draft_vocab_size") or size
    found = []
    if lm_head is not None and len(lm_head) != rows:
        found.append(Finding("refused", f"lm_head has {len(lm_head)} rows, draft_vocab_size is {rows}"))
    if rows == size:
        if d2t is not None:
            level: Level = "note" if engine == "sglang" else "refused"
            found.append(Finding(level, "d2t is there though the draft vocabulary is whole: vLLM has no place for it"))
        if engine == "sglang" and lm_head is None and head.config.get("draft_vocab_size") is not None:
            found.append(Finding("wrong", "no lm_head: SGLang takes the target's only when draft_vocab_size is null"))
        return found
    if lm_head is None:
        found.append(Finding("wrong", f"draft_vocab_size {rows} is below {size}, but there is no lm_head"))
    if d2t is None:
        return [
            *found,
            Finding(
                "wrong", f"draft_vocab_size {rows} is below {size}, but there is no d2t: draft ids pass as target ids"
            ),
        ]
    return found + vocabulary_map(d2t, head.tensors.get("t2d"), rows, size)


def _shapes(head: Head) -> list[Finding]:
    body, found = head.body, []
    hidden, heads = body.get("hidden_size"), body.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int):
        return [Finding("refused", "hidden_size or num_attention_heads is missing")]
    if body.get("head_dim") is None:
        found.append(Finding("note", f"head_dim is missing: engines take hidden_size / heads = {hidden / heads:g}"))
    width = body.get("head_dim") or hidden // heads
    groups = body.get("num_key_value_heads") or heads
    inner: Any = body.get("intermediate_size")
    wanted = {
        "midlayer.self_attn.q_proj.weight": (heads * width, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (groups * width, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (groups * width, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads * width),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
    }
    return found + misshapen(head, wanted)


def _switches(head: Head, engine: str) -> list[Finding]:
    found = []
    if engine == "sglang":
        if head.setting("norm_before_residual"):
            found.append(Finding("wrong", "norm_before_residual is on and SGLang ignores it"))
        if head.setting("attention_bias"):
            found.append(Finding("wrong", "attention_bias is on and SGLang has no bias there"))
        if head.body.get("tie_word_embeddings"):
            found.append(Finding("wrong", "tie_word_embeddings is on: SGLang uses the embedding as the draft head"))
        if num_features(head) == 1:
            found.append(
                Finding("wrong", "one captured layer: SGLang skips fc when the feature is as wide as the embedding")
            )
    if head.body.get("hidden_act", "silu") != "silu":
        found.append(Finding("refused", f"hidden_act is {head.body['hidden_act']!r}, engines have silu"))
    return found + rope_spelling(head)
