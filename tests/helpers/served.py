"""An HTTP server of a model in a process of its own, or in this one."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from source_tree import ROOT

ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class Served(NamedTuple):
    """The process, its port, and the file with what it logs."""

    process: subprocess.Popen
    port: int
    log: Path


@contextlib.contextmanager
def serving(folder: Path, log: Path, *options: str) -> Iterator[Served]:
    """Inside, a server of the model in a folder, on a free port unless options say another."""
    program = [sys.executable, "-m", "gla_ext.serve", str(folder)]
    command = [*program, "--port", "0", "--device", "cpu", *options]
    with (
        log.open("a") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | ENVIRONMENT
        ) as process,
    ):
        try:
            line = process.stdout.readline()
            assert line.startswith("Serving"), log.read_text()
            yield Served(process, int(line.rpartition(":")[2]), log)
        finally:
            process.kill()


def client_of(engine, ended=lambda: None, **options):
    """A client of an application of the engine, in this process."""
    from starlette.testclient import TestClient

    from gla_ext.serve.http import Application, Options

    return TestClient(Application(engine, Options(**options), ended).starlette())
