"""What a folder of a model holds for others: custom code, a tokenizer's chat template.

Equal bits (see common.py): the same calls, also in another process.
"""

import os

import pytest
import torch
from common import run_python
from models import make_ids

pytest.importorskip("transformers")

import transformers
from hf_models import make_model

from gla_ext import hf

LOAD = """
import sys

import torch
from transformers import AutoModel, AutoModelForCausalLM

folder, again = FOLDERS
assert "gla_ext" not in sys.modules
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
print(type(model).__module__.split(".")[0], type(model).__mro__[1].__module__)
ids = torch.arange(12).view(1, 12)
print(model(ids).logits.double().sum().item())
model.save_pretrained(again)
print(type(AutoModel.from_pretrained(again, trust_remote_code=True)).__name__)
"""


@pytest.mark.slow
def test_custom_code_is_found_by_trust_remote_code_alone(tmp_path):
    model = hf.add_custom_code(make_model(attn={"layers": [1], "num_heads": 2}))
    model.save_pretrained(tmp_path / "model")
    names = {"config.json", "generation_config.json", "model.safetensors", "modeling_gla_ext.py"}
    assert set(os.listdir(tmp_path / "model")) == names
    code = LOAD.replace("FOLDERS", repr([str(tmp_path / name) for name in ("model", "again")]))
    modules = str(tmp_path / "modules")
    output = run_python(code, HF_MODULES_CACHE=modules, HF_HUB_OFFLINE="1").splitlines()
    assert output[0] == "transformers_modules gla_ext.hf.modeling"
    expected = model(torch.arange(12).view(1, 12)).logits.double().sum().item()
    assert float(output[1]) == expected
    assert output[2] == "GLAModel"
    assert (tmp_path / "again" / "modeling_gla_ext.py").exists()
    # Where gla_ext.hf is imported its own classes are taken.
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert type(again) is hf.GLAForCausalLM
    assert torch.equal(again(make_ids()).logits, model(make_ids()).logits)


def test_no_custom_code_unless_it_is_wanted(tmp_path):
    make_model().save_pretrained(tmp_path)
    assert "modeling_gla_ext.py" not in os.listdir(tmp_path)


def test_a_chat_template_passes_through(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": 0, "<user>": 3, "<bot>": 4, "hello": 5, "you": 6, "<unk>": 7}
    words |= {f"w{n}": n for n in range(8, 31)}
    model = tokenizers.models.WordLevel(words, unk_token="<unk>")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}<bot>{% endif %}"
    )
    ours = make_model()
    for part in (ours, tokenizer):
        part.save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "hello you"}]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    inputs = tokenizer.apply_chat_template(messages, **options)
    assert inputs["input_ids"].tolist() == [[3, 5, 6, 4]]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    keys = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    expected = ours.generate(torch.tensor([[3, 5, 6, 4]]), **options)
    assert torch.equal(again.generate(**keys, **options), expected)
    pipeline = transformers.pipeline("text-generation", model=again, tokenizer=tokenizer)
    answer = pipeline(messages, **options)[0]["generated_text"][-1]
    assert answer["role"] == "assistant"
    content = tokenizer.decode(expected[0, 4:], skip_special_tokens=True)
    assert answer["content"].lstrip() == content  # transformers 4.55 leaves a blank before it
