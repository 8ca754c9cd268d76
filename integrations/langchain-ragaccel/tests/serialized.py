"""Deserialize objects with every version of langchain-core."""

import inspect

from langchain_core.load import dumpd, load


def loaded_again(made):
    """Serialize and deserialize an object; newer versions need its class to be allowed."""
    allowed = {"allowed_objects": [type(made)]}
    known = inspect.signature(load).parameters.keys() & allowed.keys()
    options = {name: allowed[name] for name in known}
    return load(dumpd(made), valid_namespaces=["langchain_ragaccel"], **options)
