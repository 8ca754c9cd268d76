# What other packages, evaluation and tests use of this package; loaded when first used.

from .prompt_parsing import (
    find_question as find_question,
)
from .prompt_parsing import (
    is_documents_only as is_documents_only,
)
from .prompt_parsing import (
    parse_prompt as parse_prompt,
)
from .references import gather_references as gather_references
from .registry import (
    Match as Match,
)
from .registry import (
    ReferenceRegistry as ReferenceRegistry,
)
from .registry import (
    ReferenceScope as ReferenceScope,
)
from .registry import (
    VisibleReferences as VisibleReferences,
)
from .registry import (
    auto_references_enabled as auto_references_enabled,
)
from .registry import (
    current_scope as current_scope,
)
from .registry import (
    default_registry as default_registry,
)
from .registry import (
    reference_scope as reference_scope,
)
from .registry import (
    visible_references as visible_references,
)
from .shared_model import (
    SharedModel as SharedModel,
)
from .shared_model import (
    get_shared_model as get_shared_model,
)
from .text_matching import (
    KGRAM_LENGTH as KGRAM_LENGTH,
)
from .text_matching import (
    MIN_COMMON as MIN_COMMON,
)
from .text_matching import (
    FingerprintIndex as FingerprintIndex,
)
from .text_matching import (
    KGrams as KGrams,
)
from .text_matching import (
    kgram_keys as kgram_keys,
)
from .text_matching import (
    remove_whitespace as remove_whitespace,
)
