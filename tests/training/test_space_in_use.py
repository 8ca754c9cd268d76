"""A trained adapter predicts in decoding what its evaluation measured."""

import pytest
import torch
from small_tokenizers import byte_level
from space_models import ungate_linears
from space_networks import MASKS, SAMPLES, all_logits, batch_of, network_of
from space_runs import COUNT, trainer_of
from tiny_models import VOCAB, generate, make_tiny_model

from ragaccel.decoding import DraftTree, attach_masks
from ragaccel.drafting import PaperSpaceDrafter
from ragaccel.engine import causal_rows, tree_rows
from ragaccel.llm import LLM
from ragaccel.models import HuggingFaceModel, SpaceAdapter
from ragaccel.training import Plan, Sample, count_passes, predict_masks

SETTINGS = {"max_new_tokens": 12, "remember": False}


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("gated", {"rank": 8, "learning_rate": 1e-2}),
        ("paper", {"learning_rate": 5e-3, "accumulate": 2}),
    ],
)
def test_decoding_takes_the_passes_that_evaluation_counts(tmp_path, mode, changes):
    trainer = trainer_of(tmp_path / "run", mode, steps=60, **changes)
    trainer.fit()
    network, out = trainer.model.eval(), tmp_path / "out"
    with torch.no_grad():  # what is written is rounded
        for name, weight in network.trained_parameters().items():
            if mode == "gated" or name == "mask_embeddings":
                weight.copy_(weight.bfloat16())
    expected = {}
    prompts = [[start, start + 1, start + 2] for start in range(2, COUNT - 5, 3)]
    for prompt in prompts:
        count = SETTINGS["max_new_tokens"]
        answer = generate(network.model, prompt, count, eos_token_id=byte_level().eos_token_id)
        predictions, own, _ = predict_masks(network, Sample(tuple(prompt), tuple(answer)), 500)
        assert own == answer
        expected[prompt[0]] = answer, count_passes(answer, predictions, 3)
    network.publish(out, byte_level(), {}, torch.float32)
    model = network.model
    ungate_linears(model)
    llm = LLM(
        model,
        byte_level(),
        space=SpaceAdapter.load(out if mode == "gated" else out / "space"),
        token_budget=3,
        save_measurements=False,
    )
    for prompt in prompts:
        answer = llm.generate(prompt, drafter=PaperSpaceDrafter(llm.mask_ids), **SETTINGS)
        tokens, passes = expected[prompt[0]]
        assert list(answer.token_ids) == tokens
        assert answer.stats.verify_passes == passes
        assert passes < len(tokens)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_a_verify_pass_has_the_logits_that_training_saw(tmp_path, family):
    """Compare a packed row with decoding through cache, tree and loaded adapter."""
    network = network_of(family, dtype=torch.float64)
    with torch.no_grad():  # what is written is rounded
        for weight in network.trained_parameters().values():
            weight.copy_(weight.bfloat16())
    network.publish(tmp_path, byte_level(), {}, torch.float64)
    sample = SAMPLES[0]
    first = len(sample.prompt_ids) - 1
    packed = all_logits(network, batch_of([Plan(sample, tuple(range(first, first + 4)))]))
    target = HuggingFaceModel(make_tiny_model(family))
    target.attach_space(SpaceAdapter.load(tmp_path))
    cache = target.new_cache(None, None)
    target.forward(causal_rows(sample.prompt_ids[:-1], cache), 1)
    cache.keep(range(first))
    chain = DraftTree.chain(sample.token_ids[first : first + 4])
    tree = attach_masks(chain, range(VOCAB, VOCAB + MASKS), range(4))
    with torch.inference_mode():
        logits = target.forward(tree_rows(tree, cache), len(tree))
    torch.testing.assert_close(logits[:4], packed[first : first + 4], rtol=1e-5, atol=1e-6)
    masks = packed[len(sample) : len(sample) + 4 * MASKS]
    torch.testing.assert_close(logits[4:], masks, rtol=1e-4, atol=1e-5)
