"""Two processes: ``python space_spread.py FOLDER [ddp|fsdp]`` prints the first one's result.

Both are forked from one interpreter, so that torch is imported once.
"""

import json
import multiprocessing
import os
import signal
import socket
import sys
import warnings
from pathlib import Path

import torch
from space_runs import counting_weights, network_of, trainer_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import TrainerCallback


class RecordingCallback(TrainerCallback):
    def __init__(self, stops_at=None):
        self.steps, self.stops_at = [], stops_at

    def on_step_end(self, args, state, control, **_):
        self.steps.append(state.global_step)
        if state.global_step == self.stops_at:
            os.kill(os.getpid(), signal.SIGINT)


def train(rank, folder):
    """Train until one process is asked to stop, which stops both; then resume."""
    stopped = False
    try:
        trainer_of(
            folder, "gated", RecordingCallback(2 if rank else None), steps=4, accumulate=2
        ).fit()
    except KeyboardInterrupt:
        stopped = True
    recorder = RecordingCallback()
    trainer = trainer_of(folder, "gated", recorder, steps=4, accumulate=2)
    figures = trainer.fit()
    return {"stopped": stopped, "steps": recorder.steps, "samples": figures.samples}


def shard(rank, folder):
    """How far a row's loss and gradients are from those of the same network unsharded.

    Without the trainer: accelerate shards nothing on CPUs.
    """
    found = {}
    for mode in ("gated", "paper"):
        networks = [network_of(mode) for _ in range(2)]
        losses = []
        for network in networks:
            trainer = trainer_of(folder, mode, network=network)
            if network is networks[1]:
                layers = network.model.model.layers
                for module in (*layers, network):
                    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
            losses.append(trainer.compute_loss(network, trainer.data_collator([trainer.rows[0]])))
            torch.autograd.backward(losses[-1])
        whole, parts = (network.trained_parameters() for network in networks)
        assert whole.keys() == parts.keys()
        assert any(len(weight.to_local()) < len(weight) for weight in parts.values())
        pairs = [(whole[name].grad, parts[name].grad.full_tensor()) for name in whole]
        found[mode] = {
            "loss": float((losses[0] - losses[1]).abs()),
            "gradients": max(float((one - two).abs().max()) for one, two in pairs),
        }
    return found


def run(rank, port, folder, way):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    result = {"ddp": train, "fsdp": shard}[way](rank, Path(folder))
    if rank == 0:
        print(json.dumps(result), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    counting_weights()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        free = listener.getsockname()[1]
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=run, args=(i, free, *sys.argv[1:])) for i in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
        process.kill()
    sys.exit(any(process.exitcode for process in started))
