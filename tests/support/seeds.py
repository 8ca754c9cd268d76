"""Run a test for many seeds as one test."""

from functools import wraps
from inspect import signature


def each_seed(count):
    """Call a test with ``seed`` from 0 on; the output of a failure ends with its seed."""

    def decorate(test):
        @wraps(test)
        def run(**fixtures):
            for seed in range(count):
                print(f"seed={seed}")
                test(seed=seed, **fixtures)

        own = signature(test)
        kept = [one for one in own.parameters.values() if one.name != "seed"]
        run.__signature__ = own.replace(parameters=kept)
        return run

    return decorate
