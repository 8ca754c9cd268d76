# The names that this package offers, loaded when first used.

from .calls import (
    ALIASES as ALIASES,
    DEFAULT_MAX_NEW_TOKENS as DEFAULT_MAX_NEW_TOKENS,
    AsyncIterateWithin as AsyncIterateWithin,
    Call as Call,
    Reply as Reply,
    Sources as Sources,
    Toolbox as Toolbox,
    areply_all as areply_all,
    check_registry as check_registry,
    count_message_tokens as count_message_tokens,
    in_thread as in_thread,
    iterate_within as iterate_within,
    prepare as prepare,
    read_options as read_options,
    refuse_settings as refuse_settings,
    rename_options as rename_options,
    reply_all as reply_all,
    sampled_calls as sampled_calls,
    searched_references as searched_references,
    use_context as use_context,
)
from .filters import (
    Condition as Condition,
    combine as combine,
    metadata_condition as metadata_condition,
)
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
    remove_whitespace as remove_whitespace,
)
from .vector_stores import (
    get_shared_embedder as get_shared_embedder,
    index_documents as index_documents,
    open_collection as open_collection,
    open_search as open_search,
    reject_arguments as reject_arguments,
)
