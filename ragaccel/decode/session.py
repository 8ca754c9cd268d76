"""The decoding loop: draft, verify, accept, commit, until the answer ends."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from ragaccel.decode.accept import Acceptance, accept
from ragaccel.decode.budget import Group, Returns, worth_probing, worth_verifying
from ragaccel.decode.context import Context
from ragaccel.decode.result import FinishReason, GenerationResult, Stats, Step
from ragaccel.decode.stopping import ending
from ragaccel.decode.tree import (
    DraftTree,
    MalformedTreeError,
    attach_probes,
    check_tree,
    likeliest_chain,
    no_deeper,
    within_vocabulary,
)
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ragaccel.decode.interfaces import Choices, Drafter, Verifier
    from ragaccel.decode.request import Request
    from ragaccel.decode.tree import Origin


class Session:
    """One generation. Iterate it once for its steps; ``result()`` is there when it ends.

    ``token_budget`` is the most guesses a verify pass takes: None asks the verifier's cost table
    at every step, 0 decodes plainly. A scheduler drives it by halves instead: ``prefill``, then
    ``propose`` and ``absorb`` until ``finish_reason`` is set. Whoever opened the verifier closes
    it. An error of the drafter or verifier reaches the caller between two steps: what was
    emitted before stays right. ``propose`` is ``draft`` and ``settle`` in one: between the two, a
    scheduler may narrow the trees of several sessions together.

    Raises:
        ConfigurationError: a negative budget, or more probes than a verify pass has rows.
    """

    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter,
        request: Request,
        *,
        token_budget: int | None = None,
    ) -> None:
        self.verifier, self.drafter, self.request = verifier, drafter, request
        self.token_budget = 0 if request.is_plain else token_budget
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stats = Stats(prompt_tokens=len(request.prompt_ids))
        self.context = Context(request.prompt_ids, request.references)
        self.num_probes = len(drafter.probe_ids) if self.token_budget != 0 else 0
        self._gains = getattr(drafter, "probe_gains", None)
        self.rows_per_node = 1 if self._gains is not None else 1 + self.num_probes
        self.num_runner_ups: int = getattr(drafter, "num_runner_ups", 0)
        self._tree: DraftTree | None = None
        self._prefilled = False
        self._returns = Returns()
        self._asked = 0  # guesses asked for in the present step
        self._price = 0.0  # what they cost, in plain passes
        self._draft_seconds = 0.0  # and what they took
        self._mark = 0.0
        if token_budget is not None and token_budget < 0:
            raise ConfigurationError(f"token_budget must be 0 (off) or more, not {token_budget}")
        if verifier.chains_only and self.num_probes:
            raise ConfigurationError("exact mode takes no probes: use another drafter, or none")
        foresees = self._gains is not None and self.num_probes and self._room() > 0
        if foresees and hasattr(verifier, "foresee"):
            verifier.foresee(drafter.probe_ids)
        if 1 + self.num_probes > verifier.max_rows:
            raise ConfigurationError(
                f"{self.num_probes} probes and a root exceed the {verifier.max_rows} rows "
                "of a verify pass: use fewer probes or a larger max_rows"
            )

    def __iter__(self) -> Iterator[Step]:
        """Decode to the end; goes on where an earlier iteration was left."""
        self.prefill()
        while self.finish_reason is None:
            tree = self.propose(self.budget())
            yield self.absorb(self.verifier.verify(tree, self.num_runner_ups))

    def prefill(self) -> None:
        """Cache the prompt, once."""
        if self._prefilled:
            return
        self._mark = perf_counter()
        self.verifier.prefill(self.request)
        self.context.foreseen = getattr(self.verifier, "foreseen", ())
        self._prefilled = True
        self.stats.prefill_seconds += self._lap()

    def charge_prefill(self, seconds: float) -> None:
        """Count time that a scheduler spent on this prompt."""
        self.stats.prefill_seconds += seconds
        self.stats.total_seconds += seconds

    def budget(self) -> int:
        """Count the guesses the next verify pass may take at most."""
        rows = self.verifier.max_rows // self.rows_per_node - 1
        if self._gains is not None:  # probes have room too, but without a guess they are no use
            rows -= min(self.num_probes, rows - 1)
        limit = rows if self.token_budget is None else min(rows, self.token_budget)
        return 0 if self._room() <= 0 else max(0, limit)

    def propose(self, budget: int) -> DraftTree:
        """Draft the tree that the next verify pass is to run over; its choices go to ``absorb``.

        Raises:
            MalformedTreeError: the drafter returned no proper tree; nothing was verified.
            RuntimeError: the session has ended.
        """
        return self.narrow(self.draft(budget))

    def narrow(self, tree: DraftTree) -> DraftTree:
        """Settle on what of a drafted tree is worth verifying in a pass of its own."""
        if self.chooses_width:
            tree = worth_verifying(tree, self.verifier.cost_seconds, self.rows_per_node)
        cost, groups = self.verifier.cost_seconds, self.probe_groups(tree)
        if self._gains is not None:
            groups = worth_probing(
                groups,
                cost,
                rows=len(tree),
                expected=sum(tree.path_probs),
                max_rows=self.verifier.max_rows,
            )
        plain = cost(1)
        more = cost(len(tree) + sum(group.rows for group in groups)) - plain
        return self.settle(tree, more / max(1e-9, plain), plain, groups)

    def probe_groups(self, tree: DraftTree) -> list[Group]:
        """List what probes may hang under the nodes of a tree that is to be verified, best first.

        None where nothing will be drafted next, nor under nodes that the answer can hardly reach:
        behind them there must be room for a guess and the token after it. All of them together fit
        a pass of this sequence: one that is shared takes more rows, but not of each.
        """
        if not self.num_probes or (self.chooses_width and self._returns.rests):
            return []
        room = self._room() - 2
        nodes = [node for node, depth in enumerate(tree.depths()) if depth <= room]
        gains = self._gains(self.context, tree) if self._gains is not None else [1.0] * len(tree)
        best = sorted((node for node in nodes if gains[node] > 0.0), key=lambda node: -gains[node])
        most = max(0, self.verifier.max_rows - len(tree)) // self.num_probes
        return [Group(node, self.num_probes, gains[node]) for node in best[:most]]

    def draft(self, budget: int) -> DraftTree:
        """Draft as many guesses as are asked for; what of them is verified, ``settle`` is told.

        Raises:
            MalformedTreeError: the drafter returned no proper tree; nothing was verified.
            RuntimeError: the session has ended.
        """
        if self.finish_reason is not None:
            raise RuntimeError(f"the session has ended ({self.finish_reason})")
        self.prefill()
        self._mark = perf_counter()
        budget = min(budget, self.budget())
        if self.chooses_width and budget:
            budget = self._returns.allows(budget)
        self._asked = budget
        root = DraftTree.chain(self.context.token_ids[-1:])
        tree = self._draft(budget) if budget else root
        self._draft_seconds = self._lap()
        self.stats.draft_seconds += self._draft_seconds
        return tree

    def settle(
        self, tree: DraftTree, price: float, plain_seconds: float, groups: Sequence[Group] = ()
    ) -> DraftTree:
        """Take what is left of the drafted tree as the one to be verified, probes added.

        Args:
            tree: the root and those guesses that are worth verifying.
            price: what the guesses and probes add to the pass, in plain passes of this sequence.
            plain_seconds: what a plain pass of this sequence takes.
            groups: the probes that are to hang under its nodes.
        """
        if self._asked and self.chooses_width:
            self._returns.take(tree.num_drafts, self._asked)
        self._price = price + self._drafting_price(plain_seconds)
        nodes = sorted(group.node for group in groups)
        self._tree = tree = attach_probes(tree, self.drafter.probe_ids, nodes)
        self._mark = perf_counter()
        return tree

    @property
    def chooses_probes(self) -> bool:
        """Whether probes hang only where the drafter expects them to pay."""
        return self._gains is not None

    @property
    def chooses_width(self) -> bool:
        """Whether as many guesses are verified as pay, rather than a given number."""
        return self.token_budget is None

    def absorb(self, choices: Choices) -> Step:
        """Accept, apply the stop rules, commit, and advance the context.

        Nothing past a stop reaches the answer, the statistics, the context or the cache.
        """
        if self._tree is None:
            raise RuntimeError("absorb follows propose: there is no tree to judge")
        tree, self._tree = self._tree, None
        acceptance = self._end(accept(tree, choices))
        self.verifier.commit(acceptance.committed)
        self.context.advance(acceptance)
        tokens, origins = tuple(acceptance.emitted), _origins(acceptance)
        step = Step(tokens, tree.num_drafts, acceptance.num_accepted, origins)
        self.token_ids += tokens
        self._count(step, acceptance)
        if self._asked and self.chooses_width:
            self._returns.learn(len(tokens) - 1, len(tokens) - 1 - self._price)
        return step

    def close(self) -> None:
        """End the session here, as "cancelled" unless it had ended; what it emitted stays."""
        self.finish_reason = self.finish_reason or "cancelled"
        self._tree = None

    def result(self) -> GenerationResult:
        """Return the finished generation.

        Raises:
            RuntimeError: it has neither ended nor been closed.
        """
        if self.finish_reason is None:
            raise RuntimeError("the session has not ended: iterate it to its end, or close it")
        return GenerationResult(tuple(self.token_ids), self.finish_reason, self.stats)

    def _draft(self, budget: int) -> DraftTree:
        tree = self.drafter.draft(self.context, budget)
        try:
            check_tree(tree, self.context.token_ids[-1], budget)
        except MalformedTreeError as error:
            name = type(self.drafter).__name__
            raise MalformedTreeError(f"{name} drafted a malformed tree: {error}") from None
        # Texts of other vocabularies may be copied from. What cannot be chosen is not shown to
        # anyone: a logits processor may look scores up by the tokens it is given.
        vocab_size = getattr(self.verifier, "vocab_size", None)
        if vocab_size is not None:
            tree = within_vocabulary(tree, vocab_size)
        tree = no_deeper(tree, self._room())
        if self.verifier.chains_only:
            tree = likeliest_chain(tree)
        return tree

    def _drafting_price(self, plain_seconds: float) -> float:
        """What drafting took, in plain passes; the first time texts are sorted, once for all."""
        if self.stats.verify_passes == 0:
            return 0.0
        return self._draft_seconds / max(1e-9, plain_seconds)

    def _room(self) -> int:
        """Count the guesses in a row that the answer has room for, a bonus token behind them."""
        return self.request.max_new_tokens - len(self.token_ids) - 1

    def _end(self, acceptance: Acceptance) -> Acceptance:
        start = len(self.token_ids)
        answer = self.token_ids + acceptance.emitted
        keep, self.finish_reason = ending(self.request, answer, start)
        return acceptance.cut(keep - start)

    def _count(self, step: Step, acceptance: Acceptance) -> None:
        stats = self.stats
        stats.verify_passes += 1
        stats.new_tokens += len(step.token_ids)
        stats.draft_tokens += step.num_drafts
        stats.accepted_tokens += step.num_accepted
        for node in acceptance.accepted:
            origins = acceptance.tree.origins[node]
            source = origins[0].source if origins else type(self.drafter).__name__
            stats.accepted_by_source[source] = stats.accepted_by_source.get(source, 0) + 1
        stats.verify_seconds += self._lap()

    def _lap(self) -> float:
        """Return the seconds since the last mark, and set a new one."""
        last, self._mark = self._mark, perf_counter()
        self.stats.total_seconds += self._mark - last
        return self._mark - last


def _origins(acceptance: Acceptance) -> tuple[tuple[Origin, ...], ...]:
    origins = [acceptance.tree.origins[node] for node in acceptance.accepted]
    return tuple(origins + [()] * (acceptance.num_emitted - len(origins)))
