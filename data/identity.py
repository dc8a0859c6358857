"""Fingerprints that say which target made a file: weights, tokenizer, chat template."""

import hashlib
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from checkpoints.files import fingerprint
from data.structure import whole_parameters
from drafters.vocabulary import tokenizer_fingerprint

SAMPLES = 4096
CHUNK = 1 << 24
MUST_AGREE = ("weights", "tokenizer", "num_layers", "hidden_size", "vocab_size")


def identity_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, revision: str | None
) -> dict[str, Any]:
    """Name, revision, architecture and the three fingerprints of a target."""
    return {
        "name": name,
        "revision": revision,
        "architecture": type(model).__name__,
        "weights": weights_fingerprint(model),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "chat_template": fingerprint(tokenizer.chat_template or ""),
    }


def identity_difference(wanted: dict[str, Any], got: dict[str, Any]) -> list[str]:
    """One line per key that makes two targets different; names, revisions and chat templates may differ."""
    return [
        f"{key} {got.get(key)!r} instead of {wanted.get(key)!r}"
        for key in MUST_AGREE
        if wanted.get(key) != got.get(key)
    ]


@torch.inference_mode()
def weights_fingerprint(model: PreTrainedModel) -> str:
    """16 hex digits over all parameters: names, shapes, a bit sum over every value, and samples of each tensor.

    Floats are rounded to bfloat16 first, so that a checkpoint has one fingerprint whether loaded as bfloat16 or
    float32, one of float16 in that, too. (Loaded as float16, values of other checkpoints are rounded twice or lie
    beyond its range: those are other weights.) Any single value that changes in bfloat16 changes the sum; one pass over
    the weights, nothing is copied whole.
    """
    digest = hashlib.sha256()
    for name, parameter in whole_parameters(model):
        bits, flat = 0, parameter.reshape(-1)
        for piece in flat.split(CHUNK):
            bits += int(_bits(piece).sum(dtype=torch.int64))
        samples = _bits(flat[:: max(1, flat.numel() // SAMPLES)]).cpu()
        digest.update(f"{name} {tuple(parameter.shape)} {bits}".encode())
        digest.update(samples.numpy().tobytes())
    return digest.hexdigest()[:16]


def _bits(values: Tensor) -> Tensor:
    """Values rounded to bfloat16, as int32 bit patterns of float32; integer tensors (quantised weights) as they are."""
    if not values.is_floating_point():
        return values.to(torch.int64)
    return values.to(torch.bfloat16).float().contiguous().view(torch.int32)
