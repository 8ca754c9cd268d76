# What other packages, evaluation and tests use of this package; loaded when first used.

from .config import (
    Recipe as Recipe,
)
from .config import (
    make_recipe as make_recipe,
)
from .data import (
    IGNORED as IGNORED,
)
from .data import (
    Collator as Collator,
)
from .data import (
    Plan as Plan,
)
from .data import (
    Rows as Rows,
)
from .data import (
    Sample as Sample,
)
from .data import (
    Samples as Samples,
)
from .data import (
    answer_samples as answer_samples,
)
from .data import (
    pack as pack,
)
from .data import (
    plan_epoch as plan_epoch,
)
from .data import (
    plan_sample as plan_sample,
)
from .data import (
    read_answers as read_answers,
)
from .data import (
    read_samples as read_samples,
)
from .data import (
    split_held_out as split_held_out,
)
from .data import (
    truncate_samples as truncate_samples,
)
from .data import (
    write_samples as write_samples,
)
from .evaluate import (
    count_passes as count_passes,
)
from .evaluate import (
    predict_masks as predict_masks,
)
from .model import SpaceNetwork as SpaceNetwork
from .trainer import (
    Job as Job,
)
from .trainer import (
    Listener as Listener,
)
from .trainer import (
    SpaceTrainer as SpaceTrainer,
)
from .trainer import (
    claim_run_folder as claim_run_folder,
)
from .trainer import (
    make_arguments as make_arguments,
)
from .trainer import (
    train_space as train_space,
)
