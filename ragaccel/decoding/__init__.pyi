# What other packages, evaluation and tests use of this package; loaded when first used.

from .request import (
    Cancellation as Cancellation,
)
from .request import (
    Cancelled as Cancelled,
)
from .request import (
    Reference as Reference,
)
from .request import (
    Request as Request,
)
from .request import (
    Sampling as Sampling,
)
from .session import (
    Context as Context,
)
from .session import (
    Drafter as Drafter,
)
from .session import (
    NoDrafter as NoDrafter,
)
from .session import (
    SampledTokens as SampledTokens,
)
from .session import (
    Session as Session,
)
from .session import (
    Verifier as Verifier,
)
from .session import (
    accept_tree as accept_tree,
)
from .session import (
    allocate as allocate,
)
from .session import (
    find_end as find_end,
)
from .speculation import (
    INITIAL_LENGTH as INITIAL_LENGTH,
)
from .speculation import (
    MAX_DISABLED_STEPS as MAX_DISABLED_STEPS,
)
from .speculation import (
    MAX_MISSES as MAX_MISSES,
)
from .speculation import (
    SpeculationController as SpeculationController,
)
from .speculation import (
    select_drafts as select_drafts,
)
from .speculation import (
    select_drafts_jointly as select_drafts_jointly,
)
from .stats import (
    GenerationResult as GenerationResult,
)
from .stats import (
    Stats as Stats,
)
from .tree import (
    DraftTree as DraftTree,
)
from .tree import (
    MalformedTreeError as MalformedTreeError,
)
from .tree import (
    Origin as Origin,
)
from .tree import (
    attach_masks as attach_masks,
)
from .tree import (
    check_tree as check_tree,
)
from .tree import (
    graft as graft,
)
from .tree import (
    keep_likeliest as keep_likeliest,
)
from .tree import (
    likeliest_chain as likeliest_chain,
)
from .tree import (
    limit_vocabulary as limit_vocabulary,
)
from .tree import (
    merge as merge,
)
