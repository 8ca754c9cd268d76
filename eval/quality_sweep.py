"""Which settings of retrieval are best: ``python -m eval.quality --sweep --data FOLDER``.

Two sweeps, of fusion (:mod:`eval.fusion_sweep`) and of how documents are cut
(:mod:`eval.passage_sweep`). In both, settings are chosen by half of the articles, and what the
chosen ones gain over the library's is told of the other half. ``demo`` has too few questions to
choose by, and does so only where there is no data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eval import passage_sweep
from eval.fusion_sweep import DEPTHS, FusionSweep, search_deeply
from eval.ledger import kept_beside
from eval.machine import current_commit
from eval.passage_sweep import BUDGETS, LENGTHS, articles_corpus, cuts_swept, demo_corpus
from eval.quality import index_folder_of, opened, remembering_embedder, sets_at_hand
from eval.question_sets import SETS, load_set
from eval.script import note, result

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

    from eval.ledger import Ledger
    from eval.passage_sweep import Corpus
    from ragaccel.retrieval.embedder import Embedder

KIND = "quality_sweep"


def sweep(options: argparse.Namespace) -> dict[str, Any]:
    """Sweep both; lay out every setting's figures and which settings are chosen."""
    names = sets_at_hand(options, SETS, ("demo",))
    embedder = remembering_embedder()
    settings = {
        "sets": names,
        "limit": options.limit,
        "depths": list(DEPTHS),
        "lengths": list(LENGTHS),
        "budgets": list(BUDGETS),
        "embedder": embedder.fingerprint[:12],
        "commit": current_commit(),
    }
    ledger = kept_beside(options.out, {"kind": KIND, **settings})
    judging = [name for name in names if name != "demo"] or names
    with index_folder_of(options) as folder:
        fusion = FusionSweep()
        for name in names:
            asked = load_set(name, embedder, options.data, options.limit)
            with opened(asked, embedder, folder) as retriever:
                fusion.add(asked, search_deeply(asked, retriever, folder))
        corpora = [demo_corpus()]
        if "squad" in names and "clapnq" in names:
            corpora.append(articles_corpus(options.data, options.limit))
        questions = {}
        for corpus in corpora:
            questions |= _sweep_passages(corpus, embedder, folder, ledger)
    by_people = {name: asked for name, asked in questions.items() if name != "demo"} or questions
    grid = [*fusion.grid(), *map(passage_sweep.grid_entry, ledger.rows)]
    # the command is that of eval.quality
    document = result("quality", settings, grid=grid)
    document["fusion"] = fusion.verdict(judging)
    document["passages"] = passage_sweep.verdict(ledger.rows, by_people)
    return {**document, "kind": KIND}


def _sweep_passages(
    corpus: Corpus, embedder: Embedder, folder: Path, ledger: Ledger
) -> dict[str, Sequence[Any]]:
    """Search a corpus cut in every way, those in the ledger excepted; return its questions."""
    questions: dict[str, Sequence[Any]] = {}
    for cut in cuts_swept():
        sets = corpus.cut(cut, embedder.count_tokens)
        questions = {name: asked.questions for name, asked in sets.items()}
        known = {(row["set"], row["tokens"], row["overlap"]) for row in ledger.rows}
        if all((name, cut.tokens, cut.overlap) in known for name in sets):
            continue
        rows = []
        for name, asked in sets.items():
            with opened(asked, embedder, folder) as retriever:
                rows.append(passage_sweep.passage_row(name, asked, retriever, cut))
        note(f"{corpus.name}, {cut.name} tokens a passage: done")
        ledger.add(*rows)
    return questions
