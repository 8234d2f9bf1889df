"""What `/metrics` says, read by Prometheus' own parser."""

from collections import Counter

import pytest
from models import make_model
from served import client_of

from gla_ext.serve import Engine, Limits
from gla_ext.serve.text import Bytes

pytest.importorskip("starlette")
parser = pytest.importorskip("prometheus_client.parser")


def test_metrics_are_of_prometheus():
    engine = Engine(make_model(vocab_size=256, eos_token_id=None), Bytes(), Limits(rows=1))
    with client_of(engine) as client:
        for prompt in ("a" * 1100, "a" * 1100, 5):
            client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 3})
        reply = client.get("/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = {family.name: family for family in parser.text_string_to_metric_families(reply.text)}
    kinds = Counter(family.type for family in found.values())
    assert kinds == {"counter": 6, "gauge": 8, "histogram": 3}
    values = {
        sample.name.removeprefix("gla_ext_") + "".join(sample.labels.values()): sample.value
        for family in found.values()
        for sample in family.samples
    }
    expected = {"generated_tokens_total": 6, "prompt_tokens_total": 2202, "requests_totallength": 2}
    expected |= {"cached_prompt_tokens_total": 1024, "checkpoints": 2, "rows": 1, "running": 0}
    expected |= {"body_bytes": 0, "reply_logprobs": 0}
    expected |= {"completion_responses_total200": 2, "completion_responses_total400": 1}
    expected |= {"time_to_first_token_seconds_count": 2, "time_between_tokens_seconds_count": 4}
    assert {name: values[name] for name in expected} == expected
    for family in found.values():
        if family.type == "histogram":
            *buckets, last, total, count = family.samples
            assert (total.name, count.name) == (f"{family.name}_sum", f"{family.name}_count")
            assert last.labels == {"le": "+Inf"} and last.value == count.value
            counts = [bucket.value for bucket in buckets]
            assert counts == sorted(counts) and 0 < total.value < 60 * count.value
