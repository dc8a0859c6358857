"""Trees: shapes by hand, the best nodes against brute force, and every verification rule exact on enumerated toys."""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.branches import Branches, SlotBranches
from drafters.sampling import Sampling, counter_uniform, draw
from drafters.vocabulary import DraftVocabulary
from eval.trees import (
    Shape,
    Source,
    Tree,
    TreeSettings,
    child_table,
    grow,
    grow_ddtree,
    grow_dynamic,
    grow_static,
    shape_of,
)
from eval.verification_trees import chance, refuse, verify, verify_own, verify_tree
from tests import markov
from tests.numerics.test_verification import Sentinel

V = 3
# The anchor has two children; the first has two, the second one; one node of depth 3.
PATHS = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0]]
SHAPE = shape_of(PATHS)
CHILDREN = ("top", "without_replacement", "with_replacement")


def chain_paths(depth: int) -> list[list[int]]:
    """Paths of a chain, for comparison."""
    return [[0] * n for n in range(1, depth + 1)]


def test_shape_by_hand() -> None:
    # Nodes 1 (0), 2 (1), 3 (0 0), 4 (0 1), 5 (1 0), 6 (0 1 0).
    assert SHAPE.parents == (0, 0, 1, 1, 2, 4)
    assert SHAPE.ranks == (0, 1, 0, 1, 0, 0)
    assert SHAPE.depths == (1, 1, 2, 2, 2, 3)
    assert SHAPE.counts == (2, 2, 1, 0, 1, 0, 0)
    assert [SHAPE.inner(depth) for depth in range(4)] == [[0], [1, 2], [4], []]
    assert shape_of(chain_paths(2)).parents == (0, 1)


@pytest.mark.parametrize("paths", [[], [[0], [0]], [[1]], [[0], [0, 1]], [[0, 0]], [[]], [[0], [-1]]])
def test_shapes_that_are_none(paths: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"tree\.paths"):
        shape_of(paths)


def test_ancestors_and_children_by_hand() -> None:
    parents = torch.tensor([[0, *SHAPE.parents], [0, 0, 1, 2, 3, 4, 5]])
    table = child_table(parents, 2)
    assert table[0].tolist() == [[1, 2], [3, 4], [5, 0], [0, 0], [6, 0], [0, 0], [0, 0]]
    assert table[1].tolist() == [[1, 0], [2, 0], [3, 0], [4, 0], [5, 0], [6, 0], [0, 0]]
    gone = torch.ones(2, 7, dtype=torch.bool)
    gone[0, 2] = False
    assert child_table(parents, 2, gone)[0, 0].tolist() == [1, 0]
    seen = Tree(parents, parents, parents, table, depth=6).ancestors()
    assert seen[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 0, 1],
    ]
    assert torch.equal(seen[1], torch.ones(7, 7).tril().bool())


# Growing the best nodes
# ----------------------------------------------------------------------------------------------------------------------


class PathBranches(Branches):
    """A table of logits for every path, per request: what each node gives depends on its whole path."""

    def __init__(self, tables: list[dict[tuple[int, ...], Tensor]]) -> None:
        self.tables, self.paths = tables, [[()] for _ in tables]
        self.first = torch.stack([table[()] for table in tables])

    def read(self, tokens: Tensor, parents: Tensor) -> Tensor:
        pairs = zip(tokens.tolist(), parents.tolist(), self.paths, strict=True)
        self.paths = [[(*old[p], t) for t, p in zip(*row, strict=True)] for *row, old in pairs]
        return torch.stack(
            [torch.stack([table[p] for p in row]) for table, row in zip(self.tables, self.paths, strict=True)]
        )


def tables(seed: int, depth: int, words: int) -> dict[tuple[int, ...], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    prefixes = [path for n in range(depth + 1) for path in itertools.product(range(words), repeat=n)]
    return {path: torch.randn(words, generator=generator) * 1.5 for path in prefixes}


def source(branches: Branches, words: int, temperature: float = 0.0) -> Source:
    rows = len(branches.first)
    anchors, positions = torch.arange(rows), torch.full((rows,), 7)
    return Source(
        branches, DraftVocabulary.full(words), Sampling(temperature), anchors, positions, torch.arange(rows) + 3
    )


def paths_of(tree: Tree, row: int) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for node in range(1, tree.tokens.shape[1]):
        found.append((*found[int(tree.parents[row, node])], int(tree.tokens[row, node])))
        assert len(found[-1]) == int(tree.depths[row, node])
    assert len(set(found)) == len(found), "a node came twice"
    return found[1:]


def test_dynamic_is_the_best_of_all_prefixes_where_the_beam_is_wide() -> None:
    depth, words, nodes = 3, 4, 9
    drafts = [tables(seed, depth, words) for seed in range(3)]
    tree = grow_dynamic(source(PathBranches(drafts), words), depth, width=nodes, nodes=nodes)
    for row, table in enumerate(drafts):
        scores = {}
        for path in (p for n in range(1, depth + 1) for p in itertools.product(range(words), repeat=n)):
            scores[path] = sum(float(table[path[:i]].log_softmax(-1)[path[i]]) for i in range(len(path)))
        best = sorted(scores, key=lambda path: -scores[path])[:nodes]
        assert set(paths_of(tree, row)) == set(best)


def test_dynamic_by_hand_with_a_narrow_beam() -> None:
    # Width 1: the likeliest chain; of its 3 nodes the best 2.
    draft = tables(5, 3, 4)
    tree = grow_dynamic(source(PathBranches([draft]), 4), 3, width=1, nodes=2)
    first = int(draft[()].argmax())
    assert paths_of(tree, 0) == [(first,), (first, int(draft[(first,)].argmax()))]
    assert grow_dynamic(source(PathBranches([draft]), 4), 3, width=1, nodes=50).tokens.shape == (1, 4)


def test_ddtree_is_the_best_of_all_prefixes() -> None:
    slots = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(2)) * 2
    tree = grow_ddtree(source(SlotBranches(slots), 5), slots, nodes=20)
    logs = slots.log_softmax(-1)
    for row in range(3):
        every = [path for n in range(1, 5) for path in itertools.product(range(5), repeat=n)]
        scores = {path: sum(float(logs[row, k, t]) for k, t in enumerate(path)) for path in every}
        assert set(paths_of(tree, row)) == set(sorted(every, key=lambda path: -scores[path])[:20])


def test_a_small_draft_vocabulary_and_settings_that_do_not_fit() -> None:
    slots = torch.randn(1, 2, 2)
    words = DraftVocabulary(torch.tensor([4, 9]), 12)
    given = Source(SlotBranches(slots), words, Sampling(), torch.tensor([1]), torch.tensor([3]), torch.tensor([0]))
    tree = grow_static(given, shape_of([[0], [1], [2]]), "top")
    assert sorted(tree.tokens[0, 1:3].tolist()) == [4, 9]
    assert tree.children[0, 0].tolist() == [1, 2, 0]
    with pytest.raises(ValueError, match="no tree of kind ddtree"):
        grow(source(PathBranches([tables(1, 1, 3)]), 3), TreeSettings("ddtree"), 2)
    for wrong in (
        {"kind": "bush"},
        {"nodes": 0},
        {"kind": "static"},
        {"kind": "dynamic", "children": "with_replacement"},
    ):
        with pytest.raises(ValueError, match="tree"):
            TreeSettings(**wrong)


# Exact enumeration of the rules
# ----------------------------------------------------------------------------------------------------------------------

Tables = dict[tuple[int, ...], Tensor]
DEPTH = SHAPE.depth


def distributions(seed: int) -> Tables:
    return {path: (logits.double()).softmax(-1) for path, logits in tables(seed, DEPTH, V).items()}


def child_sets(q: Tensor, count: int, children: str) -> list[tuple[tuple[int, ...], float]]:
    """Which children can come, in order, and with what chance."""
    if children == "top":
        return [(tuple(q.topk(count).indices.tolist()), 1.0)]
    found = []
    for row in itertools.product(range(V), repeat=count):
        chance_of, left = 1.0, q.clone()
        for token in row:
            chance_of *= float(left[token] / left.sum()) if left.sum() > 0 else 0.0
            if children == "without_replacement":
                left[token] = 0.0
        if chance_of > 0:
            found.append((row, chance_of))
    return found


def joint_error(
    children: str, rules: tuple[Any, Any] = (chance, refuse), given: bool | None = None, seed: int = 1
) -> float:
    """Largest error of the joint over D + 1 tokens: one round on trees of SHAPE, then the target's own tokens. given:
    whether the rules are told q (None: as is right)."""
    p, q = distributions(seed), distributions(seed + 50)
    joint = torch.zeros([V] * (DEPTH + 1), dtype=torch.float64)
    told = children != "top" if given is None else given

    def finish(prefix: tuple[int, ...], mass: float) -> None:
        if len(prefix) == DEPTH + 1:
            joint[prefix] += mass
            return
        for token in range(V):
            finish((*prefix, token), mass * float(p[prefix][token]))

    def visit(node: int, prefix: tuple[int, ...], mass: float) -> None:
        kids = [child for child, parent in enumerate(SHAPE.parents, 1) if parent == node]
        if not kids:
            finish(prefix, mass)
            return
        for row, weight in child_sets(q[prefix], len(kids), children):
            left, other, rest = p[prefix], q[prefix] if told else None, mass * weight
            for kid, token in zip(kids, row, strict=True):
                kept = float(rules[0](left, other, torch.tensor(token)))
                visit(kid, (*prefix, token), rest * kept)
                rest *= 1 - kept
                left, other = rules[1](left, other, torch.tensor(token), children == "with_replacement")
            for token in range(V):
                finish((*prefix, token), rest * float(left[token] / left.sum()))

    visit(0, (), 1.0)
    exact = torch.ones_like(joint)
    for text in itertools.product(range(V), repeat=DEPTH + 1):
        for n in range(DEPTH + 1):
            exact[text] *= p[text[:n]][text[n]]
    return float((joint - exact).abs().max())


@pytest.mark.parametrize("children", CHILDREN)
@pytest.mark.parametrize("seed", [1, 4])
def test_joint_over_the_whole_depth_is_the_targets(children: str, seed: int) -> None:
    assert joint_error(children, seed=seed) < 1e-12


def residual_is_p(p: Tensor, q: Tensor | None, child: Tensor, replaced: bool) -> tuple[Tensor, Tensor | None]:
    return p, refuse(p, q, child, replaced)[1]


def q_stays(p: Tensor, q: Tensor | None, child: Tensor, replaced: bool) -> tuple[Tensor, Tensor | None]:
    return refuse(p, q, child, True)


def test_the_rule_of_chosen_children_is_exact_for_any_children() -> None:
    # It asks p alone, so it does not matter where the children come from; drawn ones survive less often by it.
    assert joint_error("without_replacement", given=False) < 1e-12


def test_planted_faults_move_the_joint() -> None:
    assert joint_error("top", given=True) > 1e-3, "min(1, p / q) on children that were chosen"
    assert joint_error("without_replacement", (chance, q_stays)) > 1e-3
    for children in CHILDREN:
        assert joint_error(children, (chance, residual_is_p)) > 1e-3


# The batched code: rounds one after another
# ----------------------------------------------------------------------------------------------------------------------

K, WORDS = 3, DraftVocabulary.full(V)
BUSH, CHAIN = shape_of([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1]]), shape_of(chain_paths(K))


class MarkovBranches(Branches):
    def __init__(self, q: Tensor, anchor: Tensor) -> None:
        self.logs = q.log()
        self.first = self.logs[anchor]

    def read(self, tokens: Tensor, parents: Tensor) -> Tensor:
        return self.logs[tokens]


@dataclass
class TreeRound:
    """One round by trees. children: of a static tree of `shape`, or "dynamic". rules: in place of the right ones, and
    told q in any case. own: verify by the target's noise."""

    children: Any
    shape: Shape = BUSH
    rules: tuple[Any, Any] | None = None
    own: bool = False

    def __call__(self, p: Tensor, q: Tensor, anchor: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        given = Source(MarkovBranches(q, anchor), WORDS, Sampling(1.0), anchor, positions, seeds)
        if self.children == "dynamic":
            tree = grow_dynamic(given, K, 2, 6)
        else:
            tree = grow_static(given, self.shape, self.children)
        if self.rules is None:
            verdict = verify(p[tree.tokens].log(), tree, Sampling(1.0), seeds, positions, self.own)
            return verdict.accepted, verdict.tokens
        if tree.given is None:
            tree.given = q[tree.tokens]

        def after(nodes: Tensor) -> Tensor:
            return p[tree.tokens.gather(1, nodes[:, None])[:, 0]]

        verdict = verify_tree(after, tree, seeds, positions, self.rules)
        return verdict.accepted, verdict.tokens


ROWS = 20_000


@pytest.fixture(scope="module")
def toys() -> tuple[Tensor, Tensor]:
    return markov.table(1), markov.table(4)


@pytest.mark.parametrize("children", [*CHILDREN, "dynamic"])
def test_rounds_one_after_another(children: str, toys: tuple[Tensor, Tensor]) -> None:
    p, q = toys
    found, accepted = markov.texts(TreeRound(children), ROWS, p, q)
    assert markov.chi_square(found, p) > 1e-3
    branch = TreeRound("top" if children == "dynamic" else children, CHAIN)
    assert accepted > 1.1 * markov.texts(branch, ROWS // 4, p, q)[1], "a tree must accept more than one branch"


def test_faults_show_in_rounds(toys: tuple[Tensor, Tensor]) -> None:
    p, q = toys
    assert markov.chi_square(markov.texts(TreeRound("top", rules=(chance, refuse)), ROWS, p, q)[0], p) < 1e-6
    wrong = (chance, residual_is_p)
    assert markov.chi_square(markov.texts(TreeRound("without_replacement", rules=wrong), ROWS, p, q)[0], p) < 1e-6


def test_own_noise_gives_the_targets_own_text(toys: tuple[Tensor, Tensor]) -> None:
    p, q = toys
    found, _ = markov.texts(TreeRound("dynamic", own=True), 300, p, q)
    last, seeds = torch.zeros(300, dtype=torch.long), torch.arange(300)
    for n in range(markov.LENGTH):
        noise = counter_uniform(seeds, torch.full((300,), markov.ANCHOR + n + 1), 3)
        last = draw(p[last].log().float().softmax(-1), noise)
        assert torch.equal(found[:, n], last)


def test_walk_by_hand() -> None:
    # Nodes 1: 5, 2: 6, 3: 7 (under 1), 4: 8 (under 1), 5: 9 (under 2), 6: 4 (under 4).
    parents = torch.tensor([[0, *SHAPE.parents]]).expand(3, -1)
    tokens = torch.tensor([[1, 5, 6, 7, 8, 9, 4]]).expand(3, -1)
    tree = Tree(tokens, parents, parents, child_table(parents, 2), depth=3)
    best = torch.tensor([[5, 8, 0, 0, 4, 0, 2], [6, 0, 3, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0, 0]])
    verdict = verify_own(lambda nodes, depth: best.gather(1, nodes[:, None])[:, 0], tree)
    assert verdict.accepted.tolist() == [3, 1, 0]
    assert verdict.tokens.tolist() == [[5, 8, 4, 2], [6, 3, -1, -1], [4, -1, -1, -1]]
    assert verdict.nodes.tolist() == [[0, 1, 4, 6], [0, 2, 2, 2], [0, 0, 0, 0]]


def test_alone_as_in_a_batch_and_nothing_waits(toys: tuple[Tensor, Tensor]) -> None:
    p, q = toys
    anchor, seeds, positions = torch.tensor([0, 1, 2, 0]), torch.arange(4) * 3, torch.arange(4) + 5
    for children in (*CHILDREN, "dynamic"):
        one_round = TreeRound(children)
        with Sentinel():
            accepted, tokens = one_round(p, q, anchor, seeds, positions)
        for r in range(4):
            row = slice(r, r + 1)
            alone = one_round(p, q, anchor[row], seeds[row], positions[row])
            assert alone[1].tolist() == [tokens[r].tolist()]
            assert alone[0].tolist() == [int(accepted[r])]
