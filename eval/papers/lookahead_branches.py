"""Branches: one, several apart, or a merged tree? Lookahead's ablation, in tokens a verify pass.

    python -m eval.papers.lookahead_branches --data DATA --out eval/results/lookahead-branches.json

"one" is the likeliest branch alone. "parallel" are the branches of the tree one after the other,
each whole and from its root, the likelier first, until the rows are used up: a prefix that several
share takes rows of each, as in the parallel mode of Lookahead. "parting" branches begin with
different tokens, so that no row is taken twice: our drafter's own parallel mode. "hierarchical" is
the merged tree. All may take the same number of rows. Ends in one JSON document.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from eval.ledger import kept_beside
from eval.papers.lookahead_grid import Point, add_memory_option, lengths, replay_sets, trie_point
from eval.papers.lookahead_sets import SETS, read_sets
from eval.papers.lookahead_tables import branches_table
from eval.papers.published import published
from eval.papers.recorded_sets import add_replayed_options, chosen_models, describe_paper_run
from eval.script import measured, new_parser, result
from ragaccel.decoding.tree import DraftTree, merge
from ragaccel.drafting.trie import TrieDrafter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ragaccel.decoding.session import Context

DECODING_LENGTHS = (16, 32, 64, 128)
BRANCH_LENGTH = 24  # as our drafter ships
ROWS = 100


class BranchesApart(TrieDrafter):
    """The branches of the likeliest tree as if each were verified from its root on its own.

    What shares a prefix is merged again before it is verified, which accepts the same tokens: the
    longest of all branches that agree. So the tree has fewer nodes than rows were paid for.
    """

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Take whole branches for at most ``budget`` rows, never more than ``decoding_length``."""
        tree = TrieDrafter.draft(self, context, budget)
        rows = min(budget, self.decoding_length)
        return merge([DraftTree.chain(tree.token_ids[:1]), *branches(tree, rows)], rows)


def branches(tree: DraftTree, rows: int) -> Iterator[DraftTree]:
    """Cut a tree into its branches, depth first and the likelier first, for so many rows in all.

    A row is a guess of a branch; the last branch may be cut short.
    """
    for leaf in leaves(tree):
        if rows <= 0:
            return
        path = tree.path(leaf)[: 1 + rows]
        rows -= len(path) - 1
        yield DraftTree.chain(
            [tree.token_ids[node] for node in path],
            [tree.path_probs[node] for node in path],
            [tree.origins[node] for node in path],
        )


def leaves(tree: DraftTree) -> list[int]:
    """List the nodes without children in the order of a walk, likelier children first."""
    children: list[list[int]] = [[] for _ in range(len(tree))]
    for node in range(1, len(tree)):
        children[tree.parents[node]].append(node)
    found, waiting = [], [0]
    while waiting:
        node = waiting.pop()
        if node and not children[node]:
            found.append(node)
        waiting += sorted(children[node], key=tree.path_probs.__getitem__)
    return found


def points(decoding_length: int, branch_length: int) -> list[Point]:
    """All ways to branch with so many rows and branches of such a length."""
    one, parting, hierarchical = (
        trie_point(decoding_length, branch_length, mode=mode)
        for mode in ("one", "parallel", "hierarchical")
    )
    parallel = Point(
        hierarchical.parameters | {"mode": "parallel"},
        lambda past: BranchesApart(decoding_length, branch_length, past=past),
        decoding_length,
    )
    parting.parameters["mode"] = "parting"  # their parallel branches do not
    return [one, parallel, parting, hierarchical]


def main(arguments: Sequence[str] | None = None) -> None:
    document = measured("papers.lookahead_branches", measure, parse(arguments))
    print(branches_table(document))
    print(json.dumps({"grid": document["grid"]}))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("papers.lookahead_branches", __doc__)
    add_replayed_options(parser, SETS)
    parser.set_defaults(limit=ROWS)
    add_memory_option(parser)
    add = parser.add_argument
    add("--decoding-lengths", type=lengths, default=DECODING_LENGTHS, help="rows of a pass")
    add("--branch-length", type=int, default=BRANCH_LENGTH, help="tokens of a branch")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Replay every way to branch, at every size."""
    settings = describe_paper_run(options) | {
        "memory": list(options.memory),
        "decoding_lengths": list(options.decoding_lengths),
        "branch_length": options.branch_length,
    }
    ledger = kept_beside(options.out, settings)
    every = [p for size in options.decoding_lengths for p in points(size, options.branch_length)]
    sets = read_sets(options, chosen_models(options)[1], options.limit)
    return result(
        "lookahead_branches",
        settings,
        module="papers.lookahead_branches",
        sets={name: len(rows) for name, rows in sets.items()},
        grid=replay_sets(sets, options.memory, every, ledger),
        published=published("lookahead"),
    )


if __name__ == "__main__":
    main()
