"""Decode in one call; a drafter that knows the answer."""

from contextlib import ExitStack, closing

from fakes import RandomDrafter
from tiny_models import VOCAB

from ragaccel.decoding import Drafter, DraftTree, Session, merge
from ragaccel.engine import Scheduler


def decode(engine, request, drafter=None, token_budget=20):
    verifier = engine.open(request)
    try:
        session = Session(
            verifier, drafter or RandomDrafter(3, VOCAB), request, token_budget=token_budget
        )
        for _ in session:
            pass
        return list(session.result().token_ids)
    finally:
        verifier.close()


def watch_passes(engine, before=lambda rows: None):
    """Record the rows and sequences of every pass from now on; ``before`` is called ahead of it."""
    seen, forward = [], engine.model.forward

    def watched(rows, keep):
        seen.append((rows.num_rows, len(rows.spans)))
        before(rows)
        return forward(rows, keep)

    engine.model.forward = watched
    return seen


def open_session(engine, request, drafter, stack, token_budget=None):
    verifier = stack.enter_context(closing(engine.open(request)))
    return Session(verifier, drafter, request, token_budget=token_budget)


def run_together(engine, requests, drafters, token_budget=None, **settings):
    scheduler = Scheduler(engine, **settings)
    with ExitStack() as stack:
        sessions = [
            open_session(engine, request, drafter, stack, token_budget)
            for request, drafter in zip(requests, drafters, strict=True)
        ]
        running = list(sessions)
        while running:
            scheduler.advance(running)
            running = [session for session in running if session.finish_reason is None]
        return [list(session.result().token_ids) for session in sessions]


class OracleDrafter(Drafter):
    """Drafts the known answer among wrong branches, so that long branches are kept and moved."""

    def __init__(self, prompt, answer, seed=0):
        self.text, self.random = [*prompt, *answer], RandomDrafter(seed, VOCAB)

    def draft(self, context, budget):
        at = len(context.token_ids)
        right = [context.token_ids[-1], *self.text[at : at + budget // 2]]
        chain = DraftTree.chain(right, [0.9] * len(right))
        noise = self.random.draft(context, budget)
        noise = DraftTree(noise.token_ids, noise.parents, (1.0,) * len(noise), noise.origins)
        return merge([noise, chain], budget) if self.random.random.random() < 0.5 else chain
