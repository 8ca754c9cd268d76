"""Programs of several processes that share a model: run by tests, one JSON line a program.

``python spread.py FOLDER PROGRAM ...``. The programs are forked from one interpreter, so that
torch is imported once; each process of one has the variables that ``torchrun`` would set.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from contextlib import ExitStack, closing
from datetime import timedelta

import torch
from decoding import Cheat, decode
from fakes import RandomDrafter
from tiny_models import VOCAB, generate, random_prompt
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from ragaccel.decode.request import Request, Sampling
from ragaccel.decode.session import Session
from ragaccel.engine.engine import Engine
from ragaccel.engine.scheduler import Scheduler
from ragaccel.errors import ParallelError
from ragaccel.models import channel, parallel, processes
from ragaccel.models.huggingface import HuggingFaceModel
from ragaccel.models.load import load_model

LONGEST = 60.0  # seconds of a program, after which it counts as hung
REQUEST = Request(random_prompt(20), max_new_tokens=30)


def run_together(engine, requests, drafters):
    scheduler = Scheduler(engine)
    with ExitStack() as stack:
        sessions = []
        for request, drafter in zip(requests, drafters, strict=True):
            verifier = stack.enter_context(closing(engine.open(request)))
            sessions.append(Session(verifier, drafter, request, token_budget=20))
        while running := [session for session in sessions if session.finish_reason is None]:
            scheduler.advance(running)
        return [list(session.result().token_ids) for session in sessions]


def answers(rank, folder):
    """Decode in every way, and compare with one process that has the whole model."""
    target, _ = load_model(folder, dtype="float64", tensor_parallel=2)
    sizes, forward = [], target.forward
    target.forward = lambda rows, keep: sizes.append(len(rows.spans)) or forward(rows, keep)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    prompt, engine = random_prompt(600), Engine(target, prefill_chunk=300)
    expected = generate(model, prompt, 20)
    request = Request(prompt, max_new_tokens=20)
    found = {
        "plain": decode(engine, request, token_budget=0) == expected,
        "trees": decode(engine, request) == expected,
        "long branches": decode(engine, request, Cheat(prompt, expected), 60) == expected,
        "measured budgets": decode(engine, request, Cheat(prompt, expected), None) == expected,
    }
    turn = [*prompt[:500], *random_prompt(9, 1)]
    seen = engine.prefilled_rows
    again = decode(engine, Request(turn, max_new_tokens=9))
    found["kept prefix"] = again == generate(model, turn, 9) and engine.prefilled_rows - seen < 50
    sampled = Request(prompt[:40], max_new_tokens=20, sampling=Sampling(0.9, top_p=0.95, seed=3))
    alone = decode(Engine(HuggingFaceModel(model)), sampled, token_budget=0)
    found["sampled"] = decode(engine, sampled, Cheat(prompt[:40], alone)) == alone
    exact = Engine(target, exact=True)
    found["exact"] = decode(exact, request, Cheat(prompt, expected)) == expected
    # Prompts that begin alike, more of them than are kept: caches are copied, dropped and reused.
    small = Engine(target, prefill_chunk=16, kept_prefixes=2)
    prompts = [[*prompt[: 20 + 7 * i], *random_prompt(i, i)] for i in range(6)]
    wanted = [generate(model, each, 12) for each in prompts]
    drafters = [RandomDrafter(i, VOCAB) for i in range(6)]
    requests = [Request(each, max_new_tokens=12) for each in prompts]
    found["together"] = run_together(small, requests, drafters) == wanted
    found["again"] = run_together(small, requests, drafters) == wanted
    found["sequences in a pass"] = max(sizes)
    target.close()
    target.close()
    found["closed"] = refusal(engine)
    return found


def refusal(engine):
    """What is said to one who asks for an answer."""
    started = time.perf_counter()
    try:
        decode(engine, REQUEST)
    except ParallelError as error:
        return [str(error), time.perf_counter() - started < 10.0]
    return "no error"


def failing_follower(rank, folder):
    """A pass fails in the other process."""
    follow_with(fail_at(3, RuntimeError("no memory left")))
    engine = Engine(load_model(folder, dtype="float64", tensor_parallel=2)[0])
    return [refusal(engine), refusal(engine)]


def hung_follower(rank, folder):
    """The other process never comes to the end of a pass."""
    processes._PASS = timedelta(seconds=1)

    def hang(target):
        target.forward = lambda rows, keep: time.sleep(LONGEST)

    follow_with(hang)
    return refusal(Engine(load_model(folder, dtype="float64", tensor_parallel=2)[0]))


def lost_follower(rank, folder):
    """The other process is killed while this one has nothing to do."""
    with open(os.path.join(folder, f"pid-{rank}"), "w") as file:
        file.write(str(os.getpid()))
    parallel._BEAT = 0.2
    engine = Engine(load_model(folder, dtype="float64", tensor_parallel=2)[0])
    with open(os.path.join(folder, "pid-1")) as file:
        os.kill(int(file.read()), signal.SIGKILL)
    time.sleep(1.0)
    return [bool(engine.model._lead._over), refusal(engine)]


def lost_leader(rank, folder):
    """This process leaves amid a pass without a word."""
    target, _ = load_model(folder, dtype="float64", tensor_parallel=2)
    target.target.forward = lambda rows, keep: os._exit(9)
    decode(Engine(target), REQUEST)


def failing_leader(rank, folder):
    """A pass fails in this process, which lives on; the other waits for it in the pass."""
    target, _ = load_model(folder, dtype="float64", tensor_parallel=2)
    fail_at(3, KeyboardInterrupt())(target.target)
    engine = Engine(target)
    try:
        decode(engine, REQUEST)
    except KeyboardInterrupt:
        return refusal(engine)


def idle(rank, folder):
    """Nothing is asked for longer than a lost process is waited for."""
    parallel._BEAT, channel._SILENCE = 0.3, timedelta(seconds=1)
    target, _ = load_model(folder, dtype="float64", tensor_parallel=2)
    time.sleep(2.5)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    found = decode(Engine(target), REQUEST) == generate(model, REQUEST.prompt_ids, 30)
    target.close()
    return found


def follow_with(change):
    follow = parallel.follow

    def changed(target, channel):
        change(target)
        follow(target, channel)

    parallel.follow = changed


def fail_at(number, error):
    def change(target):
        forward, count = target.forward, iter(range(number))

        def failing(rows, keep):
            if next(count, None) is None:
                raise error
            return forward(rows, keep)

        target.forward = failing

    return change


def process(program, rank, port, folder, answer):
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in own.items()}, MASTER_ADDR="127.0.0.1")
    answer.send(globals()[program](rank, folder))


def run(program, folder):
    """Run a program; say how its processes ended and what the first one found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    started = time.perf_counter()
    running = [
        context.Process(target=process, args=(program, rank, port, folder, sender))
        for rank in range(2)
    ]
    for each in running:
        each.start()
    sender.close()
    for each in running:
        each.join(max(0.0, LONGEST - (time.perf_counter() - started)))
        if each.is_alive():
            each.kill()
    codes = [each.exitcode for each in running]
    try:
        found = receiver.recv() if receiver.poll() else None
    except EOFError:  # it left without an answer
        found = None
    seconds = round(time.perf_counter() - started, 1)
    return {"program": program, "codes": codes, "found": found, "seconds": seconds}


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    for name in sys.argv[2:]:
        name, _, family = name.partition(":")
        place = os.path.join(sys.argv[1], family or "llama")
        print(json.dumps(run(name, place)), flush=True)
