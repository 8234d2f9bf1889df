"""Small trainers, and the command with as small a model."""

import torch

from gla_ext.train import command as train
from gla_ext.train.data import Corpus
from gla_ext.train.trainer import Settings, Trainer

SIZES = {"batch_size": 2, "hidden_size": 16, "heads": 2}
TINY = ["--steps", 6, "--batch-size", 2, "--seq-len", 32, "--hidden-size", 16, "--layers", 1]
TINY += ["--heads", 2, "--device", "cpu", "--sample-bytes", 8]

TEXTS = [b"abcdefg", b"hi", b"j" * 40, b"klmnop" * 9, b"q", b"rstuv" * 11, b"wxyz" * 30]
CORPUS = Corpus("texts", tuple((str(i), x) for i, x in enumerate(TEXTS)), (("8", b"abab" * 20),))


def run(*args, code=0):
    """The command, which ends with this status."""
    assert train.main([str(arg) for arg in args]) == code


def make_trainer(corpus=CORPUS, device="cpu", compiled=False, cuda_graph=False, **options):
    settings = Settings(**{"steps": 6, "seq_len": 32, "layers": 1} | SIZES | options)
    return Trainer(settings, corpus, torch.device(device), compiled, cuda_graph)
