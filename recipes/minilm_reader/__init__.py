"""A trial: a reader that starts from the layers of the embedding model; not trained to an end."""
