"""vLLM's OpenAI server, with what a training run leaves: a model of bytes and its tokenizer."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

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
    vllm = Path(sys.executable).with_name("vllm")
    command = [vllm, "serve", tmp_path, "--served-model-name", "bytes", "--port", str(port)]
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
    found = [choice["token_ids"] for choice in reply["choices"]]
    for prompt, tokens in zip(tokenizer.encode(prompts), found, strict=True):
        expected = model.generate(torch.tensor([prompt]), 12, temperature=0)[0, -12:]
        assert tokens == expected.tolist()
