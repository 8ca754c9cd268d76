# The names that this package offers, loaded when first used.

from .config import (
    Recipe as Recipe,
    make_recipe as make_recipe,
)
from .data import (
    IGNORED as IGNORED,
    Collator as Collator,
    Plan as Plan,
    Sample as Sample,
    Samples as Samples,
    answer_samples as answer_samples,
    pack as pack,
    plan_epoch as plan_epoch,
    plan_rows as plan_rows,
    plan_sample as plan_sample,
    read_answers as read_answers,
    read_samples as read_samples,
    split_held_out as split_held_out,
    truncate_samples as truncate_samples,
    write_samples as write_samples,
)
from .evaluate import (
    count_passes as count_passes,
    predict_masks as predict_masks,
)
from .model import SpaceNetwork as SpaceNetwork
from .trainer import (
    Job as Job,
    Listener as Listener,
    SpaceTrainer as SpaceTrainer,
    claim_run_folder as claim_run_folder,
    make_arguments as make_arguments,
    train_space as train_space,
)
