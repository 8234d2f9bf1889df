"""Tests in the real vLLM, on a CPU: `make test-vllm` makes the environment that they need."""

import importlib.util
import os

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["*"]

if not collect_ignore_glob:
    # vLLM reads these when it is imported.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # And Python does where a process starts: it then imports the gla_ext that is installed, not
    # the source in this folder.
    os.environ["PYTHONSAFEPATH"] = "1"
