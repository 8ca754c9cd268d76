# The names that this package offers, loaded when first used.

from .prompt_parsing import (
    find_question as find_question,
    is_documents_only as is_documents_only,
    parse_prompt as parse_prompt,
)
from .references import gather_references as gather_references
from .registry import (
    Match as Match,
    ReferenceRegistry as ReferenceRegistry,
    ReferenceScope as ReferenceScope,
    VisibleReferences as VisibleReferences,
    auto_references_enabled as auto_references_enabled,
    current_scope as current_scope,
    default_registry as default_registry,
    reference_scope as reference_scope,
    visible_references as visible_references,
)
from .shared_model import (
    SharedModel as SharedModel,
    get_shared_model as get_shared_model,
)
from .text_matching import (
    KGRAM_LENGTH as KGRAM_LENGTH,
    MIN_COMMON as MIN_COMMON,
    FingerprintIndex as FingerprintIndex,
    KGrams as KGrams,
    kgram_keys as kgram_keys,
    remove_whitespace as remove_whitespace,
)
