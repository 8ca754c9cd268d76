"""A recorded answer that is copied whole, as the replay reads it."""

from eval.data import Recorded
from ragaccel.decoding import Reference

EOS = 1
PASSAGE = tuple(range(20, 60))
COPIED = Recorded((0, *PASSAGE, 5), (Reference(PASSAGE),), (Reference(PASSAGE),), (*PASSAGE, EOS))
