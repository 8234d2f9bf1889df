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
    last, update = int(sys.argv[1]), Trainer.update

    def step(self) -> None:
        update(self)
        if dist.get_rank() == 0 and self.step == last:
            os.kill(os.getpid(), signal.SIGKILL)

    Trainer.update = step
    sys.exit(train.main(sys.argv[2:]))
