"""Write the reader as a stock model folder: weights, tokenizer, generation settings."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import BertLMHeadModel, GenerationConfig, PreTrainedTokenizerFast


def publish(model: BertLMHeadModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a folder that ``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer`` load.

    Weights are stored in float16 and declared float32: half the size on disk, and computed in
    single precision, which is faster on processors without native half precision.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = ["BertLMHeadModel"]
    model.config.dtype = torch.float32
    model.config.save_pretrained(folder)
    tied = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    weights = {
        name: tensor.detach().to(torch.float16).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable for the owner only
    tokenizer.save_pretrained(folder)
    _remove_local_paths(folder / "tokenizer_config.json")
    GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    ).save_pretrained(folder)


def _remove_local_paths(path: Path) -> None:
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings.pop("name_or_path", None)
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
