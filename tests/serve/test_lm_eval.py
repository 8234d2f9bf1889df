"""lm-eval on a server and on the model itself: the same log-likelihoods, so the same scores."""

import json
import random

import pytest
from models import make_model
from served import serving

for package in ("lm_eval", "aiohttp", "tenacity", "datasets", "starlette", "uvicorn"):
    pytest.importorskip(package)

TASK = """
task: doubled
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
num_fewshot: 2
metric_list:
  - metric: acc
  - metric: acc_norm
"""


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_multiple_choice(tmp_path, monkeypatch, batch_size):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoTokenizer

    from gla_ext.hf import GLAForCausalLM
    from gla_ext.train.tokens.tokenizer import byte_tokenizer

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    make_model(vocab_size=256, eos_token_id=0).save_pretrained(folder)
    byte_tokenizer().save(folder)
    generator, docs = random.Random(0), []
    for n in range(20):
        choices = [f" {word * generator.randint(1, 9)}" for word in ("ja", "nein", "é", "x")]
        docs.append({"question": f"{n} " * (1 + n % 7), "choices": choices, "gold": n % 4})
    data = tmp_path / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (tmp_path / "doubled.yaml").write_text(TASK.format(data=data))

    def evaluate(model):
        tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
        result = lm_eval.simple_evaluate(
            model, tasks=["doubled"], task_manager=tasks, bootstrap_iters=0, log_samples=True
        )
        samples = sorted(result["samples"]["doubled"], key=lambda sample: sample["doc_id"])
        return result["results"]["doubled"], [sample["filtered_resps"] for sample in samples]

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = GLAForCausalLM.from_pretrained(folder).float()
    scores, likelihoods = evaluate(HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4))
    options = ["--rows", "8", "--waiting", "64"]
    with serving(folder, tmp_path / "log", *options) as server:
        served = lm_eval.api.registry.get_model("local-completions")(
            model=str(folder.name),
            tokenizer=str(folder),
            base_url=f"http://127.0.0.1:{server.port}/v1/completions",
            add_bos_token=True,  # as HFLM does where the tokenizer has one
            batch_size=batch_size,
        )
        found, others = evaluate(served)
    assert {name: value for name, value in found.items() if name != "alias"} == {
        name: value for name, value in scores.items() if name != "alias"
    }
    assert len(others) == len(docs)
    for doc, other in zip(likelihoods, others, strict=True):
        for (value, greedy), (value_there, greedy_there) in zip(doc, other, strict=True):
            assert value_there == pytest.approx(value, abs=1e-3, rel=1e-5)
            assert greedy_there == greedy
