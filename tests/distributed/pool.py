"""Processes with gloo, four unless told otherwise, started once, that run what tests send them."""

import datetime
import importlib
import io
import multiprocessing
import os
import sys
import traceback
from pathlib import Path

import torch

SIZE = 4
TIMEOUT = 60  # seconds, of a collective and of an answer


class Failed(AssertionError):
    """A rank has raised: its traceback."""


def _packed(value) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes):
    return torch.load(io.BytesIO(data), weights_only=False)


def _serve(rank: int, size: int, port: int, connection, path: list[str]) -> None:
    import torch.distributed as dist

    sys.path[:] = path
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    groups = {n: dist.new_group(list(range(n)), timeout=limit) for n in range(1, size + 1)}
    while (task := connection.recv_bytes()) != b"":
        module, name, ranks, args, kwargs = _unpacked(task)
        try:
            torch.manual_seed(0)
            function = getattr(importlib.import_module(module), name)
            answer = (True, function(groups[ranks], *args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send_bytes(_packed(answer))
    os._exit(0)  # a group's threads may still wait for a rank that failed


class Pool:
    """Runs functions on the first so many of its ranks, at once, and gives what each returned.

    A pool in which a rank failed, or that did not answer in time, is made anew at the next call.
    """

    def __init__(self, size: int = SIZE) -> None:
        self.size, self.processes, self.connections = size, [], []

    def start(self) -> None:
        from torch.distributed import TCPStore

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["gla_ext.model", "torch.distributed.tensor"])
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        here = [str(Path(__file__).parent), str(Path(__file__).parents[2]), *sys.path]
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            args = (rank, self.size, self.store.port, theirs, here)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes, self.connections = [], []

    def __call__(self, function, *args, ranks: int | None = None, **kwargs) -> list:
        """Runs `function(group, *args, **kwargs)` on ranks 0 to `ranks` - 1, by default on all.
        `group` is the process group of these ranks.

        The function is a module's own. Results come in the order of the ranks.
        """
        ranks = self.size if ranks is None else ranks
        if not self.processes:
            self.start()
        module = function.__module__.rpartition(".")[2]  # of this folder, whatever pytest calls it
        task = _packed((module, function.__name__, ranks, args, kwargs))
        for connection in self.connections[:ranks]:
            connection.send_bytes(task)
        answers = []
        for rank, connection in enumerate(self.connections[:ranks]):
            if not connection.poll(2 * TIMEOUT):
                self.stop()
                raise Failed(f"rank {rank} of {ranks} did not answer in {2 * TIMEOUT} s")
            try:
                answers.append(_unpacked(connection.recv_bytes()))
            except EOFError:
                self.stop()
                raise Failed(f"rank {rank} of {ranks} has ended by itself") from None
        failures = [(rank, text) for rank, (good, text) in enumerate(answers) if not good]
        if failures:
            self.stop()
            text = "\n".join(f"rank {rank} of {ranks}:\n{trace}" for rank, trace in failures)
            raise Failed(text)
        return [result for _, result in answers]
