"""Training of the sentence ranker (``ragaccel.retrieval.sentence_ranker``)."""
