"""Models of random weights in vLLM's engine, and what gla_ext itself says of the tokens."""

import contextlib
import gc
import random

import torch

from gla_ext.model import GLAConfig, GLAForCausalLM
from gla_ext.model.tensors import save_model

VOCABULARY = 200
LENGTHS = (1, 1, 2, 31, 32, 33, 63, 64, 65, 128, 129)


def save_random(folder, **options) -> GLAForCausalLM:
    """A model in eval mode, which `folder` then holds."""
    torch.manual_seed(0)
    defaults = {"hidden_size": 64, "num_heads": 2, "num_hidden_layers": 2, "intermediate_size": 128}
    defaults |= {"vocab_size": VOCABULARY, "initializer_range": 0.2}
    model = GLAForCausalLM(GLAConfig(**defaults | options)).eval()
    save_model(model, folder)
    return model


def make_prompts(count: int, longest: int) -> list[list[int]]:
    draw = random.Random(0)
    lengths = [*LENGTHS, longest]
    lengths += [draw.randint(1, longest // 4) for _ in range(count - len(lengths))]
    return [[draw.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


@contextlib.contextmanager
def engine(folder, **options):
    """vLLM's `LLM` of a folder without a tokenizer, gone afterwards."""
    import vllm

    defaults = {"dtype": "float32", "max_model_len": 3072, "max_num_seqs": 16, "seed": 0}
    defaults |= {"enforce_eager": True, "enable_prefix_caching": False}
    defaults |= {"max_num_batched_tokens": 64, "skip_tokenizer_init": True}
    llm = vllm.LLM(model=str(folder), **defaults | options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def greedy(llm, prompts, least=4, **options) -> tuple[list[list[int]], int]:
    """The tokens after each prompt, up to 8 more than `least`, and how many tokens of prompts were
    cached.
    """
    from vllm import SamplingParams

    defaults = {"temperature": 0, "detokenize": False, "ignore_eos": True}
    params = [SamplingParams(max_tokens=least + i % 9, **defaults) for i in range(len(prompts))]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(asked, params, use_tqdm=False, **options)
    for output, param in zip(outputs, params, strict=True):
        assert len(output.outputs[0].token_ids) == param.max_tokens
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return tokens, sum(output.num_cached_tokens or 0 for output in outputs)


@torch.no_grad()
def short_of_best(model, prompts, continuations) -> list[float]:
    """For each prompt, by how much at most the logit of a token that followed is below the best of
    gla_ext's, which reads prompt and tokens at once. 0: the tokens are those of `generate`.
    """
    found = []
    for prompt, tokens in zip(prompts, continuations, strict=True):
        ids = torch.tensor([prompt + tokens])
        logits = model(ids, logits_to_keep=len(tokens) + 1).logits[0, :-1].float()
        chosen = logits.gather(1, torch.tensor(tokens).unsqueeze(1))[:, 0]
        found.append((logits.amax(1) - chosen).max().item())
    return found
