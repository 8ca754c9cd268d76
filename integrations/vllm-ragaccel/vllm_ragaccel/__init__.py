"""ragaccel's drafts in engines that people already run: vLLM and llama.cpp.

>>> # vllm serve MODEL --speculative-config '{"method": "custom_class",
>>> #     "model": "vllm_ragaccel.RagaccelProposer", "num_speculative_tokens": 16}'

Names are loaded when they are first used. Neither torch nor transformers is imported.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
