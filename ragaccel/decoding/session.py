"""The decoding loop: a Drafter proposes tokens, a Verifier checks them, a Session accepts them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ragaccel.decoding.speculation import (
    MaskGroup,
    SpeculationController,
    select_drafts_jointly,
    select_masks,
)
from ragaccel.decoding.stats import FinishReason, GenerationResult, Stats, Step
from ragaccel.decoding.tree import (
    DraftTree,
    MalformedTreeError,
    attach_masks,
    check_tree,
    likeliest_chain,
    limit_depth,
    limit_vocabulary,
)
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ragaccel.decoding.request import Reference, Request
    from ragaccel.decoding.tree import Origin


class Drafter:
    """A source of draft tokens; derive your own from it and write ``draft``.

    It holds settings only; a request's state lives in its context.
    """

    __slots__ = ()

    mask_ids: Sequence[int] = ()
    """Mask tokens to predict at, attached to a node as a chain; empty without SPACE.

    Ids from the model's vocabulary size on are the mask tokens of its attached SPACE adapter.
    """
    selects_masks: bool = False
    """Attach mask tokens only where ``mask_gains`` rates them worth it, not to every node."""
    num_alternatives: int = 0
    """How many of the next likeliest tokens come with every sampled one, in ``context.last``."""

    def draft(self, context: Context, budget: int) -> DraftTree:
        """Return a tree of at most ``budget`` draft tokens under the last token of ``context``."""
        raise NotImplementedError

    def draft_after(
        self,
        context: Context,  # noqa: ARG002
        drafted: Sequence[int],
        budget: int,  # noqa: ARG002
    ) -> DraftTree:
        """Return a tree that continues another drafter's tokens; its root is the last of them.

        For ``Mixture``, which calls ``draft`` first. By default the root alone.
        """
        return DraftTree.chain(drafted[-1:])

    def mask_gains(self, context: Context, tree: DraftTree) -> Sequence[float]:  # noqa: ARG002
        """Return [len(tree)] the tokens that masks under each node should add to the next pass."""
        return [1.0] * len(tree)


class NoDrafter(Drafter):
    """A drafter without draft tokens: plain autoregressive decoding, the baseline."""

    def draft(self, context: Context, budget: int) -> DraftTree:  # noqa: ARG002
        """Return a tree without draft tokens: the root alone."""
        return DraftTree.chain(context.token_ids[-1:])


MASK_TOP_K = 4
"""Number of likeliest tokens that a verifier returns for every mask token."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens that the target model sampled after every node of a tree, masks included.

    ``next_ids`` is [len(tree)]. ``alternatives`` is [len(tree)] lists of the next likeliest tokens,
    likeliest first, if requested. ``mask_predictions`` is [num_masks] lists of at most
    ``MASK_TOP_K`` (token, probability) pairs: the tokens likeliest to follow each mask token,
    likeliest first. An empty sequence means no predictions.
    """

    next_ids: Sequence[int]
    alternatives: Sequence[Sequence[int]] = ()
    mask_predictions: Sequence[Sequence[tuple[int, float]]] = ()


class Verifier:
    """A target model and its KV cache over one sequence."""

    max_rows: int
    """Maximum number of nodes of a pass: root, draft tokens and mask tokens."""
    chains_only: bool = False
    """Draft trees must not branch."""
    vocab_size: int | None = None
    """Exclusive upper bound of the draft tokens that the model can verify."""
    mask_predictions: Sequence[Sequence[tuple[int, float]]] = ()
    """After ``prefill``, the predictions for the answer's first tokens; see ``SampledTokens``."""

    @property
    def graphs_status(self) -> str:
        """On a GPU "on" if passes are replayed as CUDA graphs, else "off" and why; else empty."""
        return ""

    def predict_masks(self, mask_ids: Sequence[int]) -> None:
        """Read these mask tokens together with the prompt if possible; call before ``prefill``."""

    def prefill(self, request: Request) -> None:
        """Cache the prompt except its last token, which is the root of the first tree.

        Raises:
            CapacityError: the prompt and its answer do not fit the context.
        """

    def verify(self, tree: DraftTree, num_alternatives: int = 0) -> SampledTokens:
        """Sample the next token after every node, in one forward pass."""
        raise NotImplementedError

    def commit(self, path: Sequence[int]) -> None:
        """Keep these nodes of the last verified tree in the KV cache and drop the others.

        ``path`` starts with the root and goes from parent to child; an empty path keeps nothing.
        The cache is moved at the start of the next pass.
        """
        raise NotImplementedError

    def restart(self) -> bool:
        """Drop the cached states, because an interrupted pass may have moved some of them.

        Return whether decoding then samples the same tokens.
        """
        return False

    def cost_seconds(self, rows: int) -> float:  # noqa: ARG002
        """Return the estimated time of a pass over ``rows`` nodes with the present cache."""
        return 1.0

    def step_costs(self) -> Callable[[int], float]:
        """Return ``cost_seconds``, or a faster function that equals it until the next pass."""
        return self.cost_seconds

    def mask_seconds(self) -> float:
        """Return the estimated time that a pass takes longer if any of its rows is a mask token."""
        return 0.0

    def close(self) -> None:
        """Free the cache. Whoever opened the verifier closes it."""


T = TypeVar("T")


class Context:
    """The tokens of a request so far, its references, and the result of its last draft.

    Every verification pass appends the tokens it emits; the last token is the root of the next
    draft tree. Drafters only read it. The first ``num_prompt`` of ``token_ids`` are the prompt.
    ``mask_predictions`` are the predictions at mask tokens read with the prompt, if any.
    """

    def __init__(self, token_ids: Sequence[int], references: Sequence[Reference] = ()) -> None:
        self.token_ids = list(token_ids)
        self.references = tuple(references)
        self.num_prompt = len(self.token_ids)
        self.last: Acceptance | None = None
        self.mask_predictions: Sequence[Sequence[tuple[int, float]]] = ()
        self._shared: dict[Any, Any] = {}

    def advance(self, acceptance: Acceptance) -> None:
        """Append the tokens that a verification pass emitted, and keep its result as ``last``."""
        self.token_ids += acceptance.emitted
        self.last = acceptance

    def shared(self, make: Callable[[Context], T]) -> T:
        """Return ``make(self)``, built once per request and shared by all drafters that ask."""
        if make not in self._shared:
            self._shared[make] = make(self)
        built: T = self._shared[make]
        return built

    def forget(self) -> None:
        """Drop the shared objects: a drafter was interrupted while it built one, or is done."""
        self._shared.clear()


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The result of verifying one draft tree.

    ``path`` holds the accepted nodes, from the root down; the target model sampled one token after
    each of them. The first ``num_emitted`` of these tokens are emitted: all of them, unless the
    answer ends among them.
    """

    tree: DraftTree
    sampled: SampledTokens
    path: tuple[int, ...]
    num_emitted: int

    @property
    def emitted(self) -> list[int]:
        """Return the emitted tokens: accepted draft tokens, then the bonus token if not cut off."""
        return [self.sampled.next_ids[node] for node in self.committed]

    @property
    def committed(self) -> tuple[int, ...]:
        """Return the nodes that the KV cache keeps: everything before the last emitted token."""
        return self.path[: self.num_emitted]

    @property
    def accepted(self) -> tuple[int, ...]:
        """Return the nodes whose draft tokens were emitted. The bonus token has no node."""
        return self.path[1 : self.num_emitted + 1]

    @property
    def num_accepted(self) -> int:
        """Return the number of emitted tokens that were drafted."""
        return len(self.accepted)

    def cut(self, num_emitted: int) -> Acceptance:
        """Return this result with only the first ``num_emitted`` tokens emitted."""
        if num_emitted == self.num_emitted:
            return self
        return replace(self, num_emitted=num_emitted)


def accept_tree(tree: DraftTree, sampled: SampledTokens) -> Acceptance:
    """Return the nodes reached by following the target model's sampled tokens down from the root.

    Every emitted token is the one that the target model samples after exactly the tokens before it,
    so the output equals that of decoding one token at a time, greedy or sampled.
    """
    end = 1 + tree.num_drafts
    edges = zip(tree.parents[1:end], tree.token_ids[1:end], strict=True)
    child = dict(zip(edges, range(1, end), strict=True))
    path = [0]
    while (node := child.get((path[-1], sampled.next_ids[path[-1]]))) is not None:
        path.append(node)
    return Acceptance(tree, sampled, tuple(path), len(path))


def find_end(
    request: Request, token_ids: Sequence[int], start: int
) -> tuple[int, FinishReason | None]:
    """Return how many of the answer's tokens to keep, and the finish reason or None to continue.

    ``token_ids`` are the new tokens; those from ``start`` on are not judged yet. Length and end
    tokens cut first. Each stop rule then sees only what the rules before it left, so no rule sees a
    token that decoding one at a time would not reach. If several reasons fall on one token, "stop"
    wins over "length".
    """
    keep = min(len(token_ids), request.max_new_tokens)
    reason: FinishReason | None = "length" if keep == request.max_new_tokens else None
    for i in range(start, keep):
        if token_ids[i] in request.eos_ids:
            keep, reason = i + 1, "stop"
            break
    for rule in request.stop_rules:
        if keep == start:
            break
        end = rule.cut(token_ids[:keep], start)
        if end is not None:
            keep, reason = min(keep, max(end, start + 1)), "stop"
    return keep, reason


class Session(Context):
    """The decoding loop of one request. Iterate it once for its steps, then call ``result()``.

    It is the context that its drafter reads. ``answer_ids`` are the tokens of the answer so far.

    ``token_budget`` is the maximum number of draft tokens of a pass: None chooses the number at
    every step by the verifier's costs, 0 means plain decoding. A step is ``draft``, then
    ``allocate`` for the sessions of one pass, verification, and ``accept``, until ``finish_reason``
    is set. Whoever opened the verifier closes it. An error of the drafter or the verifier reaches
    the caller between two steps; the tokens emitted before stay valid.

    Raises:
        ConfigurationError: the budget is negative, or the mask tokens exceed the rows of a pass.
    """

    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter,
        request: Request,
        *,
        token_budget: int | None = None,
    ) -> None:
        super().__init__(request.prompt_ids, request.references)
        self.verifier, self.drafter, self.request = verifier, drafter, request
        self.token_budget = 0 if request.is_plain else token_budget
        self.answer_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.prefill_seconds = self.draft_seconds = self.verify_seconds = 0.0
        self.phase: Literal["", "drafting", "computing", "accepting"] = ""
        """The part of a step that is running, and that an interruption leaves incomplete."""
        self._num_passes = self._num_drafted = 0
        self._accepted_by_source: dict[str, int] = {}
        self._num_masks = len(drafter.mask_ids) if self.token_budget != 0 else 0
        self._rows_per_node = 1 if drafter.selects_masks else 1 + self._num_masks
        self._controller = SpeculationController() if self.token_budget is None else None
        self._is_prefilled = False
        self._tree: DraftTree | None = None
        self._num_requested = 0  # draft tokens requested in this step
        self._relative_cost = 0.0  # of draft and mask tokens, in plain passes
        self._drafting_seconds = 0.0  # of this step
        self._verify_start = 0.0
        self._check_options(token_budget)
        if drafter.selects_masks and self._num_masks and self._tokens_left() > 0:
            verifier.predict_masks(drafter.mask_ids)

    def _check_options(self, token_budget: int | None) -> None:
        if token_budget is not None and token_budget < 0:
            raise ConfigurationError(f"token_budget must be 0 (off) or more, not {token_budget}")
        if self.verifier.chains_only and self._num_masks:
            raise ConfigurationError(
                "deterministic mode (exact=True) does not support mask tokens: "
                "use a drafter without them"
            )
        if 1 + self._num_masks > self.verifier.max_rows:
            raise ConfigurationError(
                f"{self._num_masks} mask tokens and a root exceed the {self.verifier.max_rows} "
                "rows of a verification pass: use fewer mask tokens or a larger max_rows"
            )

    def __iter__(self) -> Iterator[Step]:
        """Decode to the end, or continue where an earlier iteration stopped."""
        self.prefill()
        while self.finish_reason is None:
            self.draft()
            tree = allocate_alone(self)
            yield self.accept(self.verifier.verify(tree, self.drafter.num_alternatives))

    def prefill(self) -> None:
        """Cache the prompt. Later calls do nothing."""
        if self._is_prefilled:
            return
        started = perf_counter()
        self.verifier.prefill(self.request)
        self.mask_predictions = self.verifier.mask_predictions
        self._is_prefilled = True
        self.prefill_seconds += perf_counter() - started

    def draft(self) -> DraftTree:
        """Draft a tree for the next verification pass; ``allocate`` selects what it verifies.

        Raises:
            MalformedTreeError: the drafter returned an invalid tree; nothing was verified.
            RuntimeError: the session has ended.
        """
        if self.finish_reason is not None:
            raise RuntimeError(f"the session has ended ({self.finish_reason}): open a new one")
        self.prefill()
        started = perf_counter()
        self.phase = "drafting"
        budget = self._max_drafts()
        if self._controller is not None and budget:
            budget = self._controller.next_length(budget)
        self._num_requested = budget
        self._tree = self._checked_draft(budget) if budget else DraftTree.chain(self.token_ids[-1:])
        self.phase = ""
        self._drafting_seconds = perf_counter() - started
        self.draft_seconds += self._drafting_seconds
        return self._tree

    def accept(self, sampled: SampledTokens) -> Step:
        """Accept draft tokens, apply the stop rules, commit, and advance the context.

        Nothing past a stop reaches the answer, the statistics, the context or the cache.
        """
        if self._tree is None:
            raise RuntimeError("there is no tree to accept: call draft first")
        self.phase = "accepting"
        tree, self._tree = self._tree, None
        acceptance = self._apply_stops(accept_tree(tree, sampled))
        self.verifier.commit(acceptance.committed)
        self.advance(acceptance)
        accepted = [tree.origins[node] for node in acceptance.accepted]
        tokens = tuple(acceptance.emitted)
        self.answer_ids += tokens
        self._count(tree.num_drafts, accepted)
        origins = (*accepted, *[()] * (len(tokens) - len(accepted)))
        if self._controller is not None and self._num_requested:
            self._controller.record(len(tokens) - 1, len(tokens) - 1 - self._relative_cost)
        self.phase = ""
        return Step(tokens, tree.num_drafts, len(accepted), origins)

    def recover(self) -> None:
        """Prepare to repeat a step that an interruption left incomplete.

        Raises:
            RuntimeError: it cannot be repeated exactly; the verifier is closed.
        """
        phase, self.phase = self.phase, ""
        if phase == "drafting":
            self.forget()
        elif phase and (not self.verifier.restart() or phase == "accepting"):
            # An interrupted accept may have made only some of its changes.
            self.verifier.close()
            raise RuntimeError(
                "another caller of this process was interrupted while it computed this request's "
                "pass, which cannot be repeated exactly: ask again"
            )

    def close(self) -> None:
        """End the session now, as "cancelled" unless it has ended. Emitted tokens stay."""
        self.finish_reason = self.finish_reason or "cancelled"
        self._tree = None
        self.forget()  # they may hold this session, and so would free it late

    @property
    def stats(self) -> Stats:
        """Return the counts and seconds so far."""
        prefill, draft, verify = self.prefill_seconds, self.draft_seconds, self.verify_seconds
        return Stats(
            prompt_tokens=len(self.request.prompt_ids),
            new_tokens=len(self.answer_ids),
            verify_passes=self._num_passes,
            draft_tokens=self._num_drafted,
            accepted_tokens=sum(self._accepted_by_source.values()),
            accepted_by_source=dict(self._accepted_by_source),
            prefill_seconds=prefill,
            draft_seconds=draft,
            verify_seconds=verify,
            total_seconds=prefill + draft + verify,
            graphs=self.verifier.graphs_status,
        )

    def result(self) -> GenerationResult:
        """Return the finished generation.

        Raises:
            RuntimeError: the session has neither ended nor been closed.
        """
        if self.finish_reason is None:
            raise RuntimeError("the session has not ended: iterate it to its end, or close it")
        return GenerationResult(tuple(self.answer_ids), self.finish_reason, self.stats)

    def _max_drafts(self) -> int:
        """Return the maximum number of draft tokens of the next verification pass."""
        if self.token_budget == 0 or self._tokens_left() <= 0:
            return 0
        rows = self.verifier.max_rows // self._rows_per_node - 1
        if self.drafter.selects_masks:  # leave rows for mask tokens, but at least one draft token
            rows -= min(self._num_masks, rows - 1)
        return max(0, rows if self.token_budget is None else min(rows, self.token_budget))

    def _tokens_left(self) -> int:
        """Return how many more draft tokens the answer has room for, before a bonus token."""
        return self.request.max_new_tokens - len(self.answer_ids) - 1

    def _checked_draft(self, budget: int) -> DraftTree:
        tree = self.drafter.draft(self, budget)
        try:
            check_tree(tree, self.token_ids[-1], budget)
        except MalformedTreeError as error:
            name = type(self.drafter).__name__
            raise MalformedTreeError(f"{name} drafted a malformed tree: {error}") from None
        # Texts of other vocabularies may be copied from. A logits processor may use the tokens it
        # is given as indices into the scores, so it must never see an id outside the vocabulary.
        if self.verifier.vocab_size is not None:
            tree = limit_vocabulary(tree, self.verifier.vocab_size)
        tree = limit_depth(tree, self._tokens_left())
        return likeliest_chain(tree) if self.verifier.chains_only else tree

    def _mask_groups(self, tree: DraftTree) -> list[MaskGroup]:
        """Return the mask tokens that may be attached to the nodes of a tree, best first.

        Return [] if the next step drafts nothing. Skip nodes so close to the end of the answer
        that a draft token and the token after it no longer fit. All groups together fit into a pass
        of this sequence, even if it is part of a larger shared pass.
        """
        if not self._num_masks or (self._controller is not None and self._controller.disabled):
            return []
        tokens_left = self._tokens_left() - 2
        nodes = [node for node, depth in enumerate(tree.depths()) if depth <= tokens_left]
        gains = self.drafter.mask_gains(self, tree)
        best = sorted((node for node in nodes if gains[node] > 0.0), key=lambda node: -gains[node])
        max_groups = max(0, self.verifier.max_rows - len(tree)) // self._num_masks
        return [MaskGroup(node, self._num_masks, gains[node]) for node in best[:max_groups]]

    def _finalize(
        self,
        tree: DraftTree,
        groups: Sequence[MaskGroup],
        relative_cost: float,
        plain_seconds: float,
    ) -> DraftTree:
        """Attach the mask tokens, and set the tree that ``accept`` takes the tokens of.

        Args:
            tree: the root and the draft tokens that are worth verifying.
            groups: the mask tokens to attach.
            relative_cost: extra cost of draft and mask tokens, in plain passes of this sequence.
            plain_seconds: seconds of a plain pass of this sequence.
        """
        if self._num_requested and self._controller is not None:
            self._controller.record_length(tree.num_drafts, self._num_requested)
        # The first step's drafting includes sorting the texts, which happens only once.
        drafting = self._drafting_seconds / max(1e-9, plain_seconds) if self._num_passes else 0.0
        self._relative_cost = relative_cost + drafting
        nodes = sorted(group.node for group in groups)
        self._tree = attach_masks(tree, self.drafter.mask_ids, nodes)
        self._verify_start = perf_counter()
        return self._tree

    def _apply_stops(self, acceptance: Acceptance) -> Acceptance:
        start = len(self.answer_ids)
        answer = self.answer_ids + acceptance.emitted
        keep, self.finish_reason = find_end(self.request, answer, start)
        return acceptance.cut(keep - start)

    def _count(self, num_drafts: int, accepted: Sequence[tuple[Origin, ...]]) -> None:
        self._num_passes += 1
        self._num_drafted += num_drafts
        by_source = self._accepted_by_source
        for origins in accepted:
            source = origins[0].source if origins else type(self.drafter).__name__
            by_source[source] = by_source.get(source, 0) + 1
        self.verify_seconds += perf_counter() - self._verify_start


def allocate_alone(session: Session) -> DraftTree:
    """Return the part of a session's draft that is worth verifying in a pass of its own."""
    verifier = session.verifier
    (tree,) = allocate([session], verifier.step_costs(), verifier.max_rows, verifier.mask_seconds())
    return tree


def allocate(
    sessions: Sequence[Session],
    cost_seconds: Callable[[int], float],
    max_rows: int,
    mask_seconds: float = 0.0,
) -> list[DraftTree]:
    """Return the part of each session's draft that is worth verifying in one shared pass.

    Mask tokens are attached. Sessions with a fixed number of draft tokens keep theirs; the others
    share one budget. Each added row is charged an equal share of the time that all of them add to
    a pass over the roots alone. A session counts its cost in plain passes: that pass's time per
    sequence.

    Args:
        sessions: the sessions, each with a draft.
        cost_seconds: the cost of a pass, by its number of rows.
        max_rows: the maximum number of rows of the pass.
        mask_seconds: added to the cost of a pass with mask tokens.
    """
    has_fixed_masks = any(session._rows_per_node > 1 for session in sessions)

    def masked_cost(rows: int) -> float:
        return cost_seconds(rows) + mask_seconds

    costs, added_cost = (masked_cost, 0.0) if has_fixed_masks else (cost_seconds, mask_seconds)
    trees = _select_drafts(sessions, costs, max_rows)
    groups = _select_masks(sessions, trees, costs, max_rows, added_cost)
    added = [
        tree.num_drafts + sum(group.rows for group in own)
        for tree, own in zip(trees, groups, strict=True)
    ]
    roots = cost_seconds(len(sessions))
    whole = cost_seconds(len(sessions) + sum(added)) + mask_seconds * any(groups)
    plain = roots / len(sessions)
    relative_cost = max(0.0, whole - roots) / max(1, sum(added)) / max(1e-9, plain)
    return [
        session._finalize(tree, own, relative_cost * rows, plain)
        for session, tree, own, rows in zip(sessions, trees, groups, added, strict=True)
    ]


def _select_drafts(
    sessions: Sequence[Session], cost_seconds: Callable[[int], float], max_rows: int
) -> list[DraftTree]:
    trees: list[DraftTree] = []
    adaptive: list[int] = []
    fixed_rows, fixed_tokens = 0, 0.0
    for i, session in enumerate(sessions):
        if session._tree is None:
            raise RuntimeError("there is no draft to allocate: call draft first")
        trees.append(session._tree)
        if session.token_budget is None:
            adaptive.append(i)
        else:
            fixed_rows += len(session._tree) * session._rows_per_node
            fixed_tokens += sum(session._tree.path_probs)
    if adaptive:
        selected = select_drafts_jointly(
            [trees[i] for i in adaptive],
            (lambda rows: cost_seconds(fixed_rows + rows)) if fixed_rows else cost_seconds,
            [sessions[i]._rows_per_node for i in adaptive],
            max_rows=max_rows - fixed_rows,
            expected_elsewhere=fixed_tokens,
        )
        for i, tree in zip(adaptive, selected, strict=True):
            trees[i] = tree
    return trees


def _select_masks(
    sessions: Sequence[Session],
    trees: Sequence[DraftTree],
    cost_seconds: Callable[[int], float],
    max_rows: int,
    mask_seconds: float,
) -> list[list[MaskGroup]]:
    """Return the mask tokens to attach for each session: the best if rated, otherwise all."""
    kept: list[list[MaskGroup]] = []
    candidates: list[MaskGroup] = []
    for i, (session, tree) in enumerate(zip(sessions, trees, strict=True)):
        own = session._mask_groups(tree)
        kept.append([] if session.drafter.selects_masks else own)
        if session.drafter.selects_masks:
            candidates += [replace(group, owner=i) for group in own]
    if candidates:
        selected = select_masks(
            candidates,
            cost_seconds,
            rows=sum(map(len, trees)) + sum(group.rows for own in kept for group in own),
            expected=sum(sum(tree.path_probs) for tree in trees),
            max_rows=max_rows,
            mask_seconds=mask_seconds,
        )
        for group in selected:
            kept[group.owner].append(group)
    return kept
