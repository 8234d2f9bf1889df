"""For pytest-xdist on several GPUs: a GPU for each worker, and failures as they come.

    PYTHONPATH=tests/helpers pytest -p each_gpu -n 4 -m cuda --ignore tests/distributed

More workers than GPUs are slower: kernels of two processes do not run at the same time. Tests that
need two GPUs are skipped.
"""

import os

import torch

worker = os.environ.get("PYTEST_XDIST_WORKER")
if worker is not None and (count := torch.cuda.device_count()):
    os.environ["CUDA_VISIBLE_DEVICES"] = str(int(worker[2:]) % count)


def pytest_runtest_logreport(report):
    if report.failed and worker is None:
        print(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext[-2000:]}", flush=True)
