# The names that this package offers, loaded when first used.

from .batch import BatchDrafter as BatchDrafter
from .llama_cpp import RagaccelDraft as RagaccelDraft
from .proposer import RagaccelProposer as RagaccelProposer
from .step_costs import StepCosts as StepCosts
