"""`from_pretrained(tp_plan="auto")` on two processes."""

from pathlib import Path

import pytest
from launching import torchrun

pytest.importorskip("transformers")

from gla_ext.hf.parallel import HEAD_PLAN


@pytest.mark.slow
@pytest.mark.skipif(not HEAD_PLAN, reason="needs transformers 5.24")
def test_a_model_loaded_by_its_plan_is_the_whole_one(tmp_path):
    status, text = torchrun(2, Path(__file__).with_name("tensor_parallel.py"), tmp_path)
    assert status == 0, text
