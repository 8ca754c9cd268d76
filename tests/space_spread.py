"""A run in two processes: ``python space_spread.py FOLDER`` prints what the first one tells.

Both are forked from one interpreter, so that torch is imported once.
"""

import json
import multiprocessing
import os
import socket
import sys
import warnings
from pathlib import Path

from space_runs import counting_weights, fit_of

from ragaccel.train.space.fit import make_accelerator


def train(rank, port, folder):
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
    }
    fit = fit_of(Path(folder), accelerator=make_accelerator("cpu"), steps=4, accumulate=2)
    done = fit.run()
    if rank == 0:
        print(json.dumps({"tokens": done.progress.tokens, "samples": done.figures.samples}))
    fit.accelerator.end_training()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    counting_weights()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=train, args=(i, free, sys.argv[1])) for i in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
        process.kill()
    sys.exit(any(process.exitcode for process in started))
