# The names that this package offers, loaded when first used.

from .request import (
    Cancellation as Cancellation,
    Cancelled as Cancelled,
    Reference as Reference,
    Request as Request,
    Sampling as Sampling,
)
from .session import (
    Context as Context,
    Drafter as Drafter,
    NoDrafter as NoDrafter,
    SampledTokens as SampledTokens,
    Session as Session,
    Verifier as Verifier,
    accept_tree as accept_tree,
    allocate as allocate,
    allocate_alone as allocate_alone,
    find_end as find_end,
)
from .speculation import (
    INITIAL_LENGTH as INITIAL_LENGTH,
    MAX_DISABLED_STEPS as MAX_DISABLED_STEPS,
    MAX_MISSES as MAX_MISSES,
    SpeculationController as SpeculationController,
    select_drafts_jointly as select_drafts_jointly,
)
from .stats import (
    GenerationResult as GenerationResult,
    Stats as Stats,
)
from .tree import (
    DraftTree as DraftTree,
    MalformedTreeError as MalformedTreeError,
    Origin as Origin,
    attach_masks as attach_masks,
    check_tree as check_tree,
    graft as graft,
    keep_likeliest as keep_likeliest,
    likeliest_chain as likeliest_chain,
    limit_vocabulary as limit_vocabulary,
    merge as merge,
)
