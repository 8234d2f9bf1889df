"""For torchrun: `gla_ext.train`, whose first rank is killed after a step, without warning.

The first argument is the step, the others are the command line's.
"""

import os
import signal
import sys

import torch.distributed as dist

from gla_ext import train
from gla_ext.train.trainer import Trainer

if __name__ == "__main__":
    last, train_step = int(sys.argv[1]), Trainer.train_step

    def step(self) -> None:
        train_step(self)
        if dist.get_rank() == 0 and self.step == last:
            os.kill(os.getpid(), signal.SIGKILL)

    Trainer.train_step = step
    sys.exit(train.main(sys.argv[2:]))
