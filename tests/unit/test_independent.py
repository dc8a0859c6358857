"""The independent drafter: it says what its model says, alone and packed, cached and not; whose words it takes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from checkpoints.engines import Source, export_engine
from checkpoints.folder import load_drafter, read_drafter, save_drafter
from checkpoints.foreign import import_head
from checkpoints.lint import lint
from data.identity import tokenizer_fingerprint
from drafters.independent import Independent
from drafters.sampling import Sampling
from drafters.vocabulary import DraftVocabulary
from tests import checks
from tests.doubles import CHARACTERS, save_tiny, tiny_model, tiny_target, tiny_tokenizer

# Plain, with biases, with norms in attention and a tied head, windows in some or all layers, caps and scales.
KINDS = ["llama", "qwen2", "qwen3", "gemma2", "mistral", "granite", "cohere"]


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def pretrained(folder: Path, target, family: str, **model: Any) -> tuple[Independent, PreTrainedModel]:
    """A drafter of a saved random model without tokenizer, and that model."""
    whole = tiny_model(family, seed=5)
    whole.save_pretrained(folder / family)
    path = str(folder / family)
    return Independent(target.parts, path=path, attention="eager", **({"num_slots": 3} | model)).eval(), whole


@torch.no_grad()
@pytest.mark.parametrize("family", KINDS)
def test_slots_are_the_models_own_predictions(target, tmp_path, family):
    """Each document by itself through the whole model, against the packed grid; longer than the window of 8."""
    drafter, model = pretrained(tmp_path, target, family)
    texts = [checks.random_text(target, n, n) for n in (13, 11)]
    samples = [checks.sample(target, drafter, t, [0] * 3 + [1] * (len(t) - 3), str(i)) for i, t in enumerate(texts)]
    batch = checks.row_batch([samples], 26)
    made = drafter.slots(batch)
    seen = 0
    for start, text in ((0, texts[0]), (13, texts[1])):
        logits = model(torch.tensor([text])).logits[0]
        for index, anchor in enumerate(batch.anchors[0].tolist()):
            for k in range(3):
                if start <= anchor < start + len(text) and made.mask[0, index, k]:
                    own = drafter.logits(made.hidden[0, index, k][None], made.prev_ids[0, index, k][None])[0]
                    assert torch.allclose(own, logits[anchor - start + k], atol=1e-4), (anchor, k)
                    seen += 1
    # 9 and 7 anchors of a document; of their slots 1, 2, 3 those that stay inside the answer.
    assert seen == (9 + 8 + 7) + (7 + 6 + 5)


@torch.no_grad()
@pytest.mark.parametrize("family", KINDS)
def test_drafting_equals_the_models_own_greedy_text(target, tmp_path, family):
    """Two requests of different lengths; after a round they go on with other tokens than were drafted."""
    drafter, model = pretrained(tmp_path, target, family)

    def greedy(text: list[int]) -> list[int]:
        text = list(text)
        for _ in range(3):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
        return text[-3:]

    texts = [checks.random_text(target, n, n) for n in (12, 9)]
    state = drafter.begin(2, 32)
    drafter.start(state, torch.tensor([text[0] for text in texts]))
    read = [0, 0]
    for lengths in ([7, 5], [2, 0], [2, 3]):
        ids = torch.zeros(2, max(lengths), dtype=torch.int64)
        for r, count in enumerate(lengths):
            ids[r, :count] = torch.tensor(texts[r][read[r] + 1 : read[r] + 1 + count], dtype=torch.int64)
            read[r] += count
        empty = torch.zeros(2, ids.shape[1], 0, 32), torch.zeros(2, ids.shape[1], 32)
        drafter.observe(state, ids, *empty, torch.tensor(lengths))
        made = drafter.propose(state, 3, Sampling(), torch.zeros(2, dtype=torch.int64))
        assert made.probs is None
        assert made.tokens.tolist() == [greedy(text[: n + 1]) for text, n in zip(texts, read, strict=True)]


@torch.no_grad()
def test_sampled_tokens_come_with_their_distribution(target, tmp_path):
    drafter, model = pretrained(tmp_path, target, "gemma2")
    text = checks.random_text(target, 6, 1)
    state = drafter.begin(1, 16)
    drafter.start(state, torch.tensor(text[:1]))
    drafter.observe(state, torch.tensor([text[1:]]), torch.zeros(1, 5, 0, 32), torch.zeros(1, 5, 32), torch.tensor([5]))
    sampling = Sampling(temperature=0.7, top_p=0.9)
    made = drafter.propose(state, 3, sampling, torch.tensor([4]))
    for k in range(3):
        wanted = sampling.probs(model(torch.tensor([text + made.tokens[0, :k].tolist()])).logits[0, -1])
        assert torch.allclose(made.probs[0, k], wanted, atol=1e-4)
        assert made.probs[0, k, made.tokens[0, k]] > 0


def test_the_first_token_must_be_given(target):
    drafter = Independent(target.parts)
    with pytest.raises(ValueError, match="start"):
        drafter.observe(
            drafter.begin(1, 8), torch.tensor([[5]]), torch.zeros(1, 1, 0, 32), torch.zeros(1, 1, 32), torch.tensor([1])
        )


@pytest.mark.parametrize(("train_steps", "wanted"), [(1, 1), (None, 3)])
def test_training_makes_train_steps_slots(target, train_steps, wanted):
    drafter = Independent(target.parts, num_slots=3, train_steps=train_steps)
    batch = checks.train_batch(target, drafter)
    whole = drafter.eval().slots(batch)
    some = drafter.train().slots(batch)
    assert whole.hidden.shape[2] == 3
    assert torch.allclose(some.hidden, whole.hidden[:, :, :wanted], atol=1e-6)


# Whose words, and what is kept
# ----------------------------------------------------------------------------------------------------------------------


def test_another_vocabulary_is_refused(target, tmp_path):
    path = save_tiny(tmp_path / "larger", vocab_size=72)
    with pytest.raises(ValueError, match=r"larger has a vocabulary of 72 tokens, the target 'tiny-llama' one of 64"):
        Independent(target.parts, path=str(path))
    with pytest.raises(ValueError, match="80 tokens"):
        Independent(target.parts, config={"vocab_size": 80})


def test_equal_sizes_with_other_words_are_refused(target, tmp_path):
    path = save_tiny(tmp_path / "same")
    assert Independent(target.parts, path=str(path)).pretrained
    other = json.loads((path / "tokenizer.json").read_text())
    words = other["model"]["vocab"]
    first, second = CHARACTERS[0], CHARACTERS[1]
    words[first], words[second] = words[second], words[first]
    (path / "tokenizer.json").write_text(json.dumps(other))
    own = tokenizer_fingerprint(tiny_tokenizer())
    with pytest.raises(ValueError, match=rf"same has tokenizer \w+, the target 'tiny-llama' has {own}"):
        Independent(target.parts, path=str(path))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).unlink()
    assert Independent(target.parts, path=str(path)).pretrained, "an unknown tokenizer is not compared"


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3", "mistral"], ids=["tied", "untied"])
def test_a_saved_one_is_rebuilt_without_its_path(target, tmp_path, family):
    drafter, model = pretrained(tmp_path, target, family)
    assert drafter.warm_start(target.parts) == []
    assert ("lm_head.weight" in drafter.state_dict()) == (family == "mistral")
    save_drafter(tmp_path / "own", drafter, target_identity=target.identity)
    (tmp_path / family / "model.safetensors").unlink()
    back = load_drafter(tmp_path / "own", target.parts)
    assert back.settings() == drafter.settings()
    assert back.settings()["path"] is None
    assert back.settings()["config"]["model_type"] == family
    batch = checks.train_batch(target, drafter)
    assert torch.equal(back.slots(batch).hidden, drafter.slots(batch).hidden)
    assert sum(p.numel() for p in back.parameters()) == sum(p.numel() for p in model.parameters())


def test_a_fresh_model_has_the_targets_sizes_and_embedding():
    target = tiny_target("gemma")
    drafter = Independent(target.parts, config={"num_hidden_layers": 3, "intermediate_size": 20})
    sizes = drafter.settings()["config"]
    assert (sizes["model_type"], sizes["num_hidden_layers"], sizes["intermediate_size"]) == ("llama", 3, 20)
    assert (sizes["hidden_size"], sizes["num_key_value_heads"], sizes["vocab_size"]) == (32, 2, 64)
    assert len(drafter.warm_start(target.parts)) == 1 + (drafter.lm_head is not None)
    wanted = target.parts.embedding * target.parts.embedding_scale
    assert torch.equal(drafter.body.get_input_embeddings().weight, wanted)
    narrow = Independent(target.parts, config={"hidden_size": 24})
    assert narrow.warm_start(target.parts) == []


def test_rotary_frequencies_stay_whole_in_bf16(target):
    drafter = Independent(target.parts).to(torch.bfloat16)
    buffers = dict(drafter.named_buffers())
    assert buffers
    assert {buffer.dtype for buffer in buffers.values()} == {torch.float32}
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"num_slots": 0}, "num_slots"),
        ({"num_slots": "3"}, "num_slots must be at least 1 and whole"),
        ({"train_steps": 9}, r"1\.\.5"),
        ({"path": "x", "config": {"hidden_size": 8}}, "exclude each other"),
        (
            {"config": {"model_type": "mamba", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1}},
            "linear_attention",
        ),
    ],
)
def test_bad_settings_are_refused(target, model, words):
    with pytest.raises(ValueError, match=words):
        Independent(target.parts, **model)


# Engines
# ----------------------------------------------------------------------------------------------------------------------


def exported(folder: Path, target, family: str, engine: str, vocabulary: DraftVocabulary | None = None) -> tuple:
    path = save_tiny(folder / "model", family, seed=5)
    made = Independent(target.parts, vocabulary, path=str(path)).eval()
    save_drafter(folder / "own", made, target_identity=target.identity)
    given = Source(read_drafter(folder / "own"), "/models/target", torch.float32, lambda: target.parts.head)
    return export_engine(given, engine, folder / "out"), made


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_an_export_is_the_ordinary_folder(target, tmp_path, family):
    done, _ = exported(tmp_path, target, family, "vllm")
    assert '"method": "draft_model"' in done.command
    config = json.loads((done.folder / "config.json").read_text())
    assert config["architectures"] == [type(tiny_model(family)).__name__]
    model = AutoModelForCausalLM.from_pretrained(done.folder, dtype=torch.float32).eval()
    tokens = torch.tensor([checks.random_text(target, 12, 3)])
    assert torch.allclose(model(tokens).logits, tiny_model(family, seed=5)(tokens).logits, atol=1e-4)
    for engine in ("vllm", "sglang", "transformers"):
        assert [one for one in lint(done.folder, engine, target.parts.config) if one.level != "note"] == []
    assert lint(done.folder, "vllm_speculators")[0].level == "refused"
    with pytest.raises(ValueError, match="drafter=independent"):
        import_head(done.folder, target.parts)


def test_lint_sees_another_vocabulary_and_a_lost_tensor(target, tmp_path):
    folder = exported(tmp_path, target, "llama", "vllm")[0].folder
    other = tiny_target("llama", vocab_size=72).parts.config
    assert any("64 tokens" in one.text for one in lint(folder, "vllm", other) if one.level == "refused")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors")
    found = {one.level: one.text for one in lint(folder, "vllm", target.parts.config)}
    assert "model.norm.weight is missing" in found["wrong"]
    assert "q_norm.weight is no parameter" in found["refused"]


def test_a_reduced_vocabulary_is_not_served(target, tmp_path):
    with pytest.raises(ValueError, match="3 of 64 tokens"):
        exported(tmp_path, target, "llama", "sglang", DraftVocabulary(torch.tensor([1, 4, 9]), 64))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_transformers_takes_it_as_assistant(target, tmp_path):
    done, _ = exported(tmp_path, target, "llama", "transformers")
    assistant = AutoModelForCausalLM.from_pretrained(done.folder, dtype=torch.float32)
    assert "assistant_model" in done.command
    prompt = torch.tensor([checks.random_text(target, 6, 2)])
    arguments = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False}
    alone = target.model.generate(prompt, **arguments)
    assert torch.equal(target.model.generate(prompt, assistant_model=assistant, **arguments), alone)
