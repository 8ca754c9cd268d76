from __future__ import annotations

from time import perf_counter

import pytest
import torch
from fakes import RandomDrafter
from recorded import ANSWER, make_job, make_target
from torch.nn.modules.module import register_module_forward_pre_hook

from eval.decoders import DEFAULT, Ours, make_decoder
from eval.measure import FORCED_LOGIT, teacher_forced
from eval.models import build_random_model, load_target
from ragaccel.decoding import DraftTree
from ragaccel.engine import KVCache, causal_rows, tree_rows

FAMILIES = ["llama", "mistral", "qwen2-sliding", "gemma3", "gpt2", "opt"]
MODES = ["ours_exact", "ours_exact_plain", "ours_tree", "ours_full"]


@pytest.mark.parametrize("name", [*DEFAULT, *MODES])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_decoder_gives_exactly_the_recording(family, name):
    target, job = make_target(family), make_job()
    decoder = make_decoder(name, target)
    with decoder.teacher_forced(job) as forcing:
        run = decoder.run(job)
    assert run.token_ids == ANSWER
    assert forcing.passes >= run.passes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_trees_of_nonsense_give_the_recording_too(family, seed):
    target, job = make_target(family), make_job()
    decoder = Ours("nonsense", target, lambda: RandomDrafter(seed, 97), token_budget=12)
    with decoder.teacher_forced(job):
        assert decoder.run(job).token_ids == ANSWER


def test_passes_and_rows_are_those_of_the_decoder():
    target, job = make_target(), make_job()
    runs = {}
    for name in DEFAULT:
        decoder = make_decoder(name, target)
        with decoder.teacher_forced(job):
            runs[name] = decoder.run(job)
    for plain in ("ours_plain", "generate"):
        assert (runs[plain].passes, runs[plain].rows) == (len(ANSWER), len(ANSWER))
        assert runs[plain].tokens_of_each == (1,) * len(ANSWER)
    for run in runs.values():
        assert sum(run.tokens_of_each) == len(ANSWER)
        assert len(run.tokens_of_each) == run.passes
        assert all(
            0 < n <= rows for n, rows in zip(run.tokens_of_each, run.rows_of_each, strict=True)
        )
        assert 0 < run.first_token_seconds <= run.prefill_seconds + run.decode_seconds
    for copying in ("ours_paper", "generate_lookup"):
        run = runs[copying]
        assert run.passes < len(ANSWER)
        assert run.passes + run.accepted_tokens == len(ANSWER)
        assert run.rows == run.passes + run.draft_tokens


def test_a_recording_without_an_end_token_ends_by_length():
    target, job = make_target(), make_job(ANSWER[:10])
    for name in DEFAULT:
        decoder = make_decoder(name, target)
        with decoder.teacher_forced(job):
            assert decoder.run(job).token_ids == ANSWER[:10]


def test_rows_off_the_recording_keep_the_models_own_logits():
    target, job = make_target(), make_job()
    start = job.prompt_ids[:-1]
    root, first, second = job.prompt_ids[-1], *ANSWER[:2]
    # Nodes: the root, its recorded child, a wrong one; a recorded token below each.
    tree = DraftTree((root, first, 90, second, second), (-1, 0, 0, 1, 2), (1.0,) * 5, ((),) * 5)
    forced, own = (_verify(target, job, start, tree, follow) for follow in (True, False))
    wanted = [ANSWER[0], ANSWER[1], None, ANSWER[2], None]
    for row, token in enumerate(wanted):
        changed = (forced[row] != own[row]).nonzero().flatten().tolist()
        assert changed == ([] if token is None else [token])
        if token is not None:
            assert forced[row, token] == FORCED_LOGIT


@torch.inference_mode()
def _verify(target, job, start, tree, follow):
    cache, device = KVCache(), target.model.device

    def verify():
        target.ours.forward(causal_rows(start, cache, device), 1)
        cache.keep(range(len(start)))
        return target.ours.forward(tree_rows(tree, cache, device), len(tree))

    if not follow:
        return verify()
    with teacher_forced(target.ours.network, job.prompt_ids, job.answer_ids):
        return verify()


def test_past_the_recording_the_model_chooses_for_itself():
    target, job = make_target(), make_job(ANSWER[:6], max_new_tokens=9, eos_ids=frozenset())
    with teacher_forced(target.model, job.prompt_ids, job.answer_ids):
        run = make_decoder("generate", target).run(job)
    ids = torch.tensor([[*job.prompt_ids, *run.token_ids[:6]]])
    with torch.no_grad():
        choice = int(target.model(ids).logits[0, -1].argmax())
    assert run.token_ids[:6] == ANSWER[:6]
    assert run.token_ids[6] == choice


def test_the_model_is_itself_again_afterwards():
    target, job = make_target(), make_job()
    ids = torch.tensor([job.prompt_ids])
    with torch.no_grad():
        before = target.model(ids).logits
        with teacher_forced(target.model, job.prompt_ids, job.answer_ids):
            assert not torch.equal(target.model(ids).logits, before)
        assert torch.equal(target.model(ids).logits, before)


def test_forcing_costs_next_to_nothing():
    config = {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    }
    model = build_random_model(config, torch.float32, torch.device("cpu"))
    prompt, answer = list(range(10, 60)), list(range(60, 84))
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
    with teacher_forced(model, prompt, answer) as forcing:
        started = perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        seconds = perf_counter() - started
    assert forcing.passes == 24
    assert forcing.seconds < 0.1 * seconds


def test_what_cannot_be_followed_is_refused():
    model = make_target().model
    with pytest.raises(ValueError, match="at least one token"), teacher_forced(model, [1], []):
        pass
    with pytest.raises(ValueError, match="tokenizer that fits"), teacher_forced(model, [1], [97]):
        pass
    with (
        teacher_forced(model, [1, 2], [3]),
        torch.no_grad(),
        pytest.raises(ValueError, match="batch"),
    ):
        model(torch.tensor([[1, 2], [1, 2]]))


def test_each_decoder_runs_its_own_network():
    target, job = make_target(), make_job()
    stock, copy = target.model, target.ours.network
    assert stock is not copy
    ran = []
    handle = register_module_forward_pre_hook(lambda module, _args: ran.append(module))
    try:
        for name in DEFAULT:
            ran.clear()
            make_decoder(name, target).run(job)
            used, unused = (copy, stock) if name.startswith("ours") else (stock, copy)
            assert used in ran
            assert unused not in ran
    finally:
        handle.remove()


def test_transformers_keep_the_stock_weights_of_a_loaded_model(tmp_path):
    made = make_target()
    made.model.save_pretrained(tmp_path)
    made.tokenizer.tokenizer.save_pretrained(tmp_path)
    target = load_target(str(tmp_path))
    assert target.model.config._attn_implementation == "sdpa"
    assert target.ours.network is not target.model


def test_a_prompt_is_read_again_each_time():
    target, job = make_target(), make_job(eos_ids=frozenset())
    decoder = make_decoder("ours_plain", target)
    for _ in range(3):
        decoder.run(job)
    assert decoder._engine.prefilled_rows == 3 * (len(job.prompt_ids) - 1)
