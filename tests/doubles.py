"""Tiny random targets for tests: one per family, five layers, hidden 32, vocabulary 64, with a character tokenizer."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from data.target import Target

VOCAB_SIZE, NUM_LAYERS, HIDDEN_SIZE = 64, 5, 32
PAD_ID, UNKNOWN_ID, START_ID, END_ID = 0, 1, 2, 3
SPECIAL = ("<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 \n.,?!:;-'\"()[]{}+=*/"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": PAD_ID,
    "bos_token_id": START_ID,
    "eos_token_id": END_ID,
    "attn_implementation": "eager",
}
_MOE: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_GROUPED: dict[str, Any] = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", _MOE | {"num_experts": 4}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "deepseek_v3": ("deepseek_v3", _MOE | _LATENT | _GROUPED | {"n_routed_experts": 4}),
    "glm4_moe": ("glm4_moe", _MOE | _GROUPED | {"n_routed_experts": 4}),
    "granite": ("granite", {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
}
# Most layers keep a recurrent state, which no cache takes back after a rejection: decoded plainly, never drafted for.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "qwen3_next",
        _MOE
        | {"num_experts": 4, "shared_expert_intermediate_size": 16, "linear_num_value_heads": 2}
        | {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    ),
}
# Every layer's indexer chooses three of the positions that it sees.
_INDEXED = (
    _MOE | _LATENT | _GROUPED | {"n_routed_experts": 4, "index_topk": 3, "index_head_dim": 16, "index_n_heads": 8}
)
SPARSE: dict[str, tuple[str, dict[str, Any]]] = {name: (name, _INDEXED) for name in ("glm_moe_dsa", "deepseek_v32")}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A character tokenizer of 64 entries (lower case; anything else is <|unk|>), ChatML template, eos <|im_end|>."""
    characters = {character: len(SPECIAL) + i for i, character in enumerate(CHARACTERS)}
    vocabulary = {token: i for i, token in enumerate(SPECIAL)} | characters
    if len(vocabulary) > VOCAB_SIZE:
        raise ValueError(f"tiny vocabulary has {len(vocabulary)} entries, more than {VOCAB_SIZE}")
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(family: str = "llama", **overrides: Any) -> PreTrainedModel:
    """A random float32 model of a family, equal for equal arguments. overrides go to its config; `seed` to weights."""
    known = HYBRIDS | SPARSE | FAMILIES
    if family not in known:
        raise ValueError(f"no tiny family {family!r}; there are {', '.join(known)}")
    model_type, own = known[family]
    seed = overrides.pop("seed", 0)
    config = CONFIG_MAPPING[model_type](**(_COMMON | own | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # Norm weights and biases start constant; random ones make a wrong norm or a forgotten bias visible.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data.add_(0.3 * torch.randn_like(parameter))
    model.generation_config = GenerationConfig(bos_token_id=START_ID, eos_token_id=END_ID, pad_token_id=PAD_ID)
    return model.eval()


def tiny_target(family: str = "llama", **overrides: Any) -> Target:
    """A tiny random target, equal for equal arguments. See tiny_model."""
    return Target(tiny_model(family, **overrides), tiny_tokenizer(), name=f"tiny-{family}")


def endless_target() -> Target:
    """A tiny Llama that does not end its greedy answers: the end of turn has logit 0, far below the best."""
    target = tiny_target("llama")
    with torch.no_grad():
        target.parts.head[END_ID] = 0
    return Target(target.model, target.tokenizer, name="endless")


def save_tiny(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    """Write a tiny model and its tokenizer as an ordinary folder that Target.load and engines open."""
    tiny_model(family, **overrides).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return Path(folder)
