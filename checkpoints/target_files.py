"""Single tensors of a target's checkpoint, read without loading the model."""

from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.utils import cached_file

from checkpoints.files import index_of

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.language_model.lm_head.weight")
EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)


def config_of(name: str, **hub: Any) -> PretrainedConfig:
    """A model's config, from a folder or the hub. ValueError says that neither has one, and why."""
    try:
        return AutoConfig.from_pretrained(name, **hub)
    except OSError as error:
        place = "no config.json can be read there" if Path(name).exists() else "no such path here, and the hub says"
        raise ValueError(f"model {name!r}: {place}: {' '.join(str(error).split())}") from error


def target_config(name: str, **hub: Any) -> PretrainedConfig:
    """The target's text config, from a folder or the hub."""
    return config_of(name, **hub).get_text_config()


def target_head(name: str, **hub: Any) -> Tensor:
    """The target's output projection [V, D]: its own, or its embedding when tied. ValueError when neither name is
    there."""
    wanted = HEADS + (EMBEDDINGS if target_config(name, **hub).tie_word_embeddings else ())
    files = _files(name, **hub)
    for tensor in wanted:
        if tensor in files:
            with safe_open(files[tensor], framework="pt") as handle:
                return handle.get_tensor(tensor)
    raise ValueError(f"{name} holds none of {', '.join(wanted)}")


def _files(name: str, **hub: Any) -> dict[str, str]:
    """File of each tensor."""
    index = cached_file(name, INDEX, _raise_exceptions_for_missing_entries=False, **hub)
    if index is not None:
        places = index_of(Path(index))
        return {
            tensor: str(cached_file(name, file, **hub))
            for tensor, file in places.items()
            if tensor in HEADS + EMBEDDINGS
        }
    single = cached_file(name, SINGLE, **hub)
    with safe_open(single, framework="pt") as handle:
        return dict.fromkeys(handle.keys(), str(single))
