"""Under torchrun: models loaded with tp_plan="auto" beside the whole ones, then saved."""

import sys

import torch
import torch.distributed as dist
from hf_models import HYBRID, make_model
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

KINDS = [{}, {"tie_word_embeddings": True}, HYBRID, {"use_short_conv": True, "num_kv_heads": 2}]

dist.init_process_group("gloo")
ids = torch.arange(24).view(2, 12)
for i, options in enumerate(KINDS):
    whole, folder = make_model(**{"num_heads": 4} | options), f"{sys.argv[1]}/{i}"
    if dist.get_rank() == 0:
        whole.save_pretrained(folder)
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    assert all(isinstance(p.data, DTensor) for p in model.parameters())
    assert model.model.layers[0].mlp.up_proj.weight.shape[0] == 12
    tokens = [m.generate(ids, max_new_tokens=6, do_sample=False) for m in (model, whole)]
    assert torch.equal(*tokens)
    for m in (model, whole):
        m.train()(ids, labels=ids).loss.backward()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, atol=1e-4, rtol=1e-4)
    model.save_pretrained(f"{folder}-saved")
    saved = AutoModelForCausalLM.from_pretrained(f"{folder}-saved").state_dict()
    assert all(torch.equal(x, saved[name]) for name, x in whole.state_dict().items())
    dist.barrier()
