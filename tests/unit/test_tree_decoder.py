"""Decoding by trees: the target's own tokens through tree attention, true features, and more accepted than chains."""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.verification_rules import judged
from data.target import Target
from drafters.branches import Branches
from drafters.contract import Drafter, Proposal
from drafters.drafting import along
from drafters.sampling import Sampling
from drafters.vocabulary import DraftVocabulary
from eval.cache import RowCache
from eval.decoder import DecodeSettings, Generation, generate
from eval.evaluate import EvalSettings
from eval.metrics import acceptance
from eval.tree_decoder import TreeDecodeSettings, decode, has_child
from eval.trees import Tree, TreeSettings
from eval.verification_trees import TreeVerdict
from tests import checks
from tests.doubles import VOCAB_SIZE, endless_target, tiny_target
from tests.unit.test_decoder import PROMPTS, Seen, Toy, never

K, WORDS = 3, DraftVocabulary.full(VOCAB_SIZE)
BUSH = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0], [0, 0, 0], [1, 0, 0]]
TREES = {
    "static": TreeSettings("static", paths=BUSH),
    "dynamic": TreeSettings("dynamic", nodes=9, width=3),
}


class ToyBranches(Branches):
    """Logits [V] of every path that a toy's `after` gives."""

    def __init__(self, toy: "TreeToy", state: Seen) -> None:
        self.toy, self.paths = toy, [[list(text)] for text in state.tokens]
        self.first = toy.after(self.paths)[:, 0]

    def read(self, tokens: Tensor, parents: Tensor) -> Tensor:
        pairs = zip(tokens.tolist(), parents.tolist(), self.paths, strict=True)
        self.paths = [[[*old[p], t] for t, p in zip(*row, strict=True)] for *row, old in pairs]
        return self.toy.after(self.paths)


class TreeToy(Toy):
    """Knows the target's greedy answers: at every third position the right token is only its second choice. With noise
    it is the target itself, its logits moved."""

    branching = "steps"
    vocabulary: DraftVocabulary
    known: dict[tuple[int, ...], int]

    def after(self, paths: list[list[list[int]]]) -> Tensor:
        if not self.known:
            return self.moved([path for row in paths for path in row]).unflatten(0, (len(paths), -1))
        logits = self.table[torch.tensor([[path[-1] for path in row] for row in paths])].clone()
        for r, row in enumerate(paths):
            for m, path in enumerate(row):
                right = self.known.get(tuple(path), 0)
                logits[r, m, right] = 9.0
                logits[r, m, (right + 1) % VOCAB_SIZE] = 10.0 if len(path) % 3 == 0 else 8.0
        return logits

    def moved(self, flat: list[list[int]]) -> Tensor:
        longest = max(map(len, flat))
        rows = torch.tensor([path + [0] * (longest - len(path)) for path in flat])
        mask = torch.tensor([[1] * len(path) + [0] * (longest - len(path)) for path in flat])
        last = self.target.forward(rows, (), mask).last[torch.arange(len(flat)), mask.sum(1) - 1]
        return self.target.logits(last) + self.noise

    def branch(self, state: Seen, num_slots: int) -> Branches:
        return ToyBranches(self, state)

    def propose(self, state: Seen, num_slots: int, sampling: Sampling, seeds: Tensor) -> Proposal:
        anchors = torch.tensor([len(text) - 1 for text in state.tokens])
        return along(self.branch(state, num_slots), num_slots, WORDS, sampling, seeds, anchors)


def toy(target: Target, noise: float = 0.0) -> TreeToy:
    made = TreeToy(target, lambda position: False, noise)
    made.vocabulary, made.known = WORDS, {}
    made.table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    if not noise:
        for prompt, answer in zip(PROMPTS, plain(target, max_new_tokens=20), strict=True):
            text = prompt + answer
            made.known |= {tuple(text[:n]): text[n] for n in range(len(prompt), len(text))}
    return made


def by_tree(target: Target, drafter: Drafter, tree: TreeSettings, **changes: Any) -> list[Generation]:
    settings = {"num_slots": K, "max_new_tokens": 14, "batch_size": 8, "tree": tree} | changes
    return decode(target, drafter, PROMPTS, TreeDecodeSettings(**settings))


def plain(target: Target, **changes: Any) -> list[list[int]]:
    made = generate(target, None, PROMPTS, DecodeSettings(**({"max_new_tokens": 14} | changes)))
    return [one.tokens for one in made]


@pytest.fixture(scope="module")
def llama() -> Target:
    return endless_target()


@pytest.mark.parametrize(
    ("family", "attention"), [("llama", "eager"), ("llama", "sdpa"), ("mistral", "eager"), ("gemma2", "eager")]
)
def test_greedy_output_is_the_targets_own(family: str, attention: str) -> None:
    """Windows of 8 columns, several kinds of attention; requests that end at different rounds."""
    target = tiny_target(family, attn_implementation=attention)
    drafter, wanted = toy(target), plain(target, max_new_tokens=20)
    for tree in TREES.values():
        made = by_tree(target, drafter, tree, max_new_tokens=20)
        assert [one.tokens for one in made] == wanted
        assert sum(sum(one.accepted) for one in made) > 20
    alone = by_tree(target, drafter, TREES["dynamic"], batch_size=1, max_new_tokens=20)
    assert [one.tokens for one in alone] == wanted


def test_attention_of_targets_that_cannot(llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = toy(llama)
    monkeypatch.setattr(llama.model.config, "_attn_implementation", "flash_attention_2")
    with pytest.raises(ValueError, match="eager or sdpa"):
        by_tree(llama, drafter, TREES["dynamic"])


def test_a_tree_accepts_more_than_its_first_branch(llama: Target) -> None:
    drafter = toy(llama)
    chain = acceptance(generate(llama, drafter, PROMPTS, DecodeSettings(num_slots=K, max_new_tokens=14)), K)
    for tree in TREES.values():
        made = acceptance(by_tree(llama, drafter, tree), K, target_tokens=10)
        assert made.tau > chain.tau + 0.3
        assert made.efficiency == pytest.approx(made.tau / 10)


def test_a_walk_that_ends_at_a_leaf_proposed_nothing_below() -> None:
    """Node 2 is a leaf of depth 1; node 1 has child 3, a leaf of the tree's depth."""
    children = torch.tensor([[[1, 2], [3, 0], [0, 0], [0, 0]]]).expand(4, -1, -1)
    blank = torch.zeros(4, 4, dtype=torch.int64)
    nodes = torch.tensor([[0, 0, 0], [0, 2, 2], [0, 1, 1], [0, 1, 3]])
    verdict = TreeVerdict(torch.tensor([0, 1, 1, 2]), blank, nodes)
    assert has_child(Tree(blank, blank, blank, children, 2), verdict).tolist() == [1, 0, 1, 0]


def test_alpha_of_a_tree_counts_proposed_slots_alone(llama: Target) -> None:
    """Three children of the anchor, a single grandchild below the last: a walk that ends at a leaf of depth 1 says
    nothing of slot 2, so only walks through the last child are its trials."""
    tree = TreeSettings("static", paths=[[0], [1], [2], [2, 0]])
    drafter = toy(llama)
    made = by_tree(llama, drafter, tree, num_slots=2, max_new_tokens=20)
    pairs = [pair for one in made for pair in zip(one.accepted, one.proposed, strict=True)]
    assert (1, 1) in pairs, "a walk must end at a leaf for the test to mean anything"
    found = acceptance(made, 2)
    assert found.trials[1] == sum(a >= 1 and p == 2 for a, p in pairs) < sum(a >= 1 for a, _ in pairs)


def test_drafter_sees_the_features_of_the_text(llama: Target) -> None:
    drafter = toy(llama)
    checks.saw_the_text(llama, drafter, PROMPTS, by_tree(llama, drafter, TREES["dynamic"]), K)


def test_same_noise_gives_the_plain_runs_text(llama: Target) -> None:
    sampling = Sampling(1.0, top_k=20)
    wanted = plain(llama, sampling=sampling, max_new_tokens=8)
    how = {"sampling": sampling, "verification": "same_noise", "max_new_tokens": 8}
    made = by_tree(llama, toy(llama, 0.5), TREES["dynamic"], **how)
    assert [one.tokens for one in made] == wanted
    assert sum(sum(one.accepted) for one in made) > 0


def chi_square_p(target: Target, drafter: Drafter, settings: DecodeSettings, rows: int = 800) -> float:
    """p-value of two sampled tokens (top-k 3) after one prompt against the target's exact probabilities."""
    sampling, prompt = settings.sampling, PROMPTS[2]
    made = decode(target, drafter, [prompt] * rows, settings)
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        grown = {}
        for prefix, mass in exact.items():
            last = target.forward(torch.tensor([prompt + list(prefix)]), ()).last[:, -1]
            p = sampling.probs(target.logits(last))[0].double()
            grown |= {(*prefix, token): mass * float(p[token]) for token in p.nonzero().flatten().tolist()}
        exact = grown
    keys = sorted(exact)
    got = torch.tensor([sum(tuple(one.tokens) == key for one in made) for key in keys]).double()
    want = torch.tensor([exact[key] for key in keys]).double() * rows
    assert int(got.sum()) == rows
    small = want < 5
    got, want = (torch.cat([x[~small], x[small].sum()[None]]) for x in (got, want))
    statistic = ((got - want) ** 2 / want.clamp_min(1e-9)).sum()
    return float(torch.special.gammaincc(torch.tensor((len(want) - 1) / 2).double(), statistic / 2))


@pytest.mark.parametrize("how", ["without_replacement", "block"])
def test_sampled_text_is_the_targets(how: str, llama: Target) -> None:
    sampling, size = Sampling(1.5, top_k=3), 400
    if how == "block":
        settings = DecodeSettings(2, 3, size, sampling, verification="block")
    else:
        tree = TreeSettings("static", paths=[[0], [1], [0, 0], [0, 1]], children=how)  # type: ignore[arg-type]
        settings = TreeDecodeSettings(2, 3, size, sampling, tree=tree)
    assert chi_square_p(llama, toy(llama, 1.0), settings) > 1e-3


def test_block_keeps_more_of_recorded_rounds(llama: Target) -> None:
    """The same proposals, judged by both rules with u integrated out."""
    settings = DecodeSettings(num_slots=K, max_new_tokens=6, batch_size=100, sampling=Sampling(1.0, top_k=8))
    found = judged(llama, toy(llama, 1.0), [PROMPTS[2]] * 100, settings, [1, K])
    chain, block = found[K].unbind(1)
    assert len(chain) > 150
    assert block.mean() > 1.01 * chain.mean()
    assert torch.allclose(found[1][:, 0], found[1][:, 1]), "one slot leaves the rules no choice"


@pytest.mark.parametrize("name", checks.DRAFTERS)
def test_every_drafter_that_branches_stays_lossless(name: str, llama: Target) -> None:
    torch.manual_seed(0)
    drafter = checks.build(name, llama)
    for tree in (TreeSettings("dynamic", nodes=6, width=2), TreeSettings("ddtree", nodes=6)):
        settings = TreeDecodeSettings(K, 6, 8, tree=tree)
        if drafter.branching is None or (tree.kind == "ddtree" and drafter.branching != "slots"):
            with pytest.raises(ValueError, match="drafts chains only|read drafted tokens"):
                decode(llama, drafter, PROMPTS, settings)
            continue
        assert [one.tokens for one in decode(llama, drafter, PROMPTS, settings)] == plain(llama, max_new_tokens=6)


def test_a_node_that_sees_its_sibling_is_seen(llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    from eval.trees import Tree

    ancestors = Tree.ancestors
    monkeypatch.setattr(
        Tree, "ancestors", lambda self: ancestors(self) | (self.depths[:, :, None] == self.depths[:, None])
    )
    made = by_tree(llama, toy(llama), TREES["static"])
    assert [one.tokens for one in made] != plain(llama)


def test_columns_that_are_not_moved_are_seen(llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = RowCache.keep_nodes

    def first_columns(self: RowCache, nodes: Tensor, counts: list[int]) -> None:
        keep(self, torch.arange(nodes.shape[1]).expand_as(nodes), counts)

    monkeypatch.setattr(RowCache, "keep_nodes", first_columns)
    made = by_tree(llama, toy(llama), TREES["static"], max_new_tokens=20)
    assert [one.tokens for one in made] != plain(llama, max_new_tokens=20)


def test_settings_that_trees_refuse(llama: Target) -> None:
    tree = TREES["dynamic"]
    for wrong in ({"verification": "none"}, {"verification": "block"}, {"peaks": True}, {"tree": TreeSettings()}):
        with pytest.raises(ValueError, match="tree"):
            TreeDecodeSettings(**({"tree": tree} | wrong))
    with pytest.raises(ValueError, match="waits for every round"):
        decode(llama, toy(llama, 1.0), PROMPTS, TreeDecodeSettings(K, 8, tree=tree), group=lambda *_: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match="chains only"):
        decode(llama, never(llama), PROMPTS, TreeDecodeSettings(K, 8, tree=tree))
    static = EvalSettings(tree=TREES["static"])
    decoding = static.decoding(toy(llama))
    assert isinstance(decoding, TreeDecodeSettings)
    assert (decoding.num_slots, static.tree_tokens(3), EvalSettings().tree_tokens(3)) == (3, 10, None)
    with pytest.raises(ValueError, match="depth of tree.paths"):
        EvalSettings(num_slots=2, tree=TREES["static"]).decoding(toy(llama))
    assert EvalSettings(num_slots=2, tree=TreeSettings("dynamic", nodes=100, width=3)).tree_tokens(2) == 1 + 3 + 9
