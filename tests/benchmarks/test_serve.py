"""`benchmarks/bench_serve.py` at its tiny size, on a CPU."""

import re

import bench_serve
import pytest
import torch
from shared.gate import WrongResults


def test_every_table_is_printed(capsys):
    bench_serve.main(["--device", "cpu", "--tiny"])
    output = capsys.readouterr().out
    tables = re.findall(r"^\| (.*?) \|.*\n\|(?:-+:?\|)*.*\n((?:\|.*\n)+)", output, re.MULTILINE)
    rows = {name: len(body.splitlines()) for name, body in tables}
    expected = {"start": 7, "decoding, tokens/s": 2, "first token, ms": 2, "6 clients": 2}
    assert rows == expected
    without, with_it = re.findall(r"\| (\d+) % \|", output)
    assert (without, int(with_it) > 30) == ("0", True)
    assert "nan" not in output


def test_wrong_tokens_stop_it(monkeypatch):
    bench_serve.check(bench_serve.TINY, "cpu")

    def wrong(self, prompts, count, **options):
        return [torch.tensor([*prompt, *[0] * count]) for prompt in prompts]

    monkeypatch.setattr(bench_serve.GLAForCausalLM, "generate", wrong)
    with pytest.raises(WrongResults, match="expected generate's tokens after 30"):
        bench_serve.check(bench_serve.TINY, "cpu")
