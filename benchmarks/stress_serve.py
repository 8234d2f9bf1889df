"""Clients of mixed behaviour against a server: nobody loses a token, and nothing is left behind.

    python benchmarks/stress_serve.py [--clients 1000] [--device cuda]

Starts `python -m gla_ext.serve` on a small random model, with --batch-invariant, and lets clients
of BEHAVIOURS at it at once. Those that ask properly compare what they get with what an engine
gives that runs nothing else, token for token; the others read slowly, leave, and send garbage.
Afterwards the server must have no sequence, no open reply and no more memory than before.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from gla_ext.model import GLAConfig, GLAForCausalLM
from gla_ext.ops import batch_invariant
from gla_ext.serve import Engine, Limits, Request
from gla_ext.serve.text import Bytes

ROOT = Path(__file__).resolve().parents[1]
PROMPT_TOKENS, NEW_TOKENS = 1500, 400  # the server's limits
OPTIONS = ["--name", "tiny", "--rows", "8", "--waiting", "64", "--checkpoint-tokens", "64"]
OPTIONS += ["--max-prompt-tokens", str(PROMPT_TOKENS), "--max-new-tokens", str(NEW_TOKENS)]
OPTIONS += ["--cache-bytes", str(1 << 20), "--batch-invariant"]
SHARED = "Everything that is said here is said twice, and what is said twice is true. "
ASKS = [  # prompts with and without a beginning that others have
    {"prompt": SHARED * 6 + "So?", "max_tokens": 40, "temperature": 0.8, "seed": 1},
    {"prompt": SHARED * 6 + "Why?", "max_tokens": 25, "temperature": 0},
    {"prompt": "def f(", "max_tokens": 60, "temperature": 1.2, "seed": 2, "top_k": 40},
    {"prompt": SHARED * 15, "max_tokens": 10, "temperature": 0.9, "top_p": 0.9, "seed": 3},
    {"prompt": "", "max_tokens": 80, "temperature": 1, "seed": 4},
]


def make_folder(path: Path) -> GLAForCausalLM:
    """Saves the model that is served."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48}
    config = GLAConfig(**sizes, vocab_size=256, eos_token_id=None, initializer_range=0.3)
    model = GLAForCausalLM(config).eval()
    model.save_pretrained(path)
    return model


def expected_texts(model: GLAForCausalLM) -> list[str]:
    """What each of ASKS gets where nothing else runs."""
    names = {"max_tokens": "max_new_tokens"}
    limits = Limits(rows=8, checkpoint_tokens=64, cache_bytes=0)
    with batch_invariant():
        engine, texts = Engine(model, Bytes(), limits), []
        for ask in ASKS:
            options = {names.get(key, key): value for key, value in ask.items() if key != "prompt"}
            engine.submit(Request(Bytes().encode(ask["prompt"]), **options))
            text = ""
            while engine.busy:
                text += "".join(delta.text for _, delta in engine.step())
            texts.append(text)
    return texts


@contextlib.contextmanager
def serving(folder: Path, device: str, log: Path) -> Iterator[tuple[subprocess.Popen, int]]:
    """The server and its port; what it logs goes to a file."""
    command = [sys.executable, "-m", "gla_ext.serve", str(folder), "--port", "0", *OPTIONS]
    command += ["--device", device]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as server,
    ):
        try:
            yield server, int(server.stdout.readline().rpartition(":")[2])
        finally:
            server.terminate()


@dataclasses.dataclass
class Clients:
    """What clients do, at a port.

    Attributes:
        done: how many have done what, by behaviour.
        wrong: what went wrong.
        refusals: how often a client was told to come back later.
        seconds: how long proper requests took, from the first try.
    """

    port: int
    texts: list[str]
    done: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    wrong: list[str] = dataclasses.field(default_factory=list)
    refusals: int = 0
    seconds: list[float] = dataclasses.field(default_factory=list)

    async def send(self, body: bytes, path: str = "/v1/completions", size: int | None = None):
        """Sends a request, of which more may follow, and gives the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        method = "POST" if body else "GET"
        size = len(body) if size is None else size
        writer.write(f"{method} {path} HTTP/1.0\r\nContent-Length: {size}\r\n\r\n".encode() + body)
        with contextlib.suppress(ConnectionError):  # refused before all of it was sent
            await writer.drain()
        return reader, writer

    async def ask(self, ask: dict, pause: float = 0.0) -> tuple[int, str]:
        """Status and body of a reply, which is read in small pieces where there is a pause."""
        while True:
            reader, writer = await self.send(json.dumps(ask).encode())
            data, piece = b"", 512 if pause else 1 << 16
            while block := await reader.read(piece):
                data += block
                await asyncio.sleep(pause)
            writer.close()
            head, _, body = data.decode().partition("\r\n\r\n")
            status = int(head.split()[1])
            if status != 429:
                return status, body
            self.refusals += 1
            await asyncio.sleep(random.uniform(0.05, 0.5))

    async def proper(self, number: int, stream: bool = False, pause: float = 0.0) -> None:
        which, start = number % len(ASKS), time.monotonic()
        status, body = await self.ask(ASKS[which] | {"stream": stream}, pause)
        if stream:
            *events, done = re.findall(r"^data: (.*)$", body, re.MULTILINE)
            pieces = [json.loads(event) for event in events]
            text = "".join(piece["choices"][0]["text"] for piece in pieces)
            assert done == "[DONE]", body[-200:]
        else:
            text = json.loads(body)["choices"][0]["text"]
        assert (status, text) == (200, self.texts[which]), f"{status} {text!r}"
        self.seconds.append(time.monotonic() - start)

    async def streams(self, number: int) -> None:
        await self.proper(number, stream=True)

    async def reads_slowly(self, number: int) -> None:
        await self.proper(number, stream=True, pause=0.02)

    async def leaves(self, number: int) -> None:
        body = {"prompt": "a" * (number % 1000), "max_tokens": NEW_TOKENS, "stream": True}
        reader, writer = await self.send(json.dumps(body).encode())
        await reader.read(1 + number % 2000)
        writer.close()

    async def leaves_at_once(self, number: int) -> None:
        body = {"prompt": SHARED * 10, "max_tokens": NEW_TOKENS, "n": 2}
        _, writer = await self.send(json.dumps(body).encode())
        await asyncio.sleep(random.uniform(0, 0.1))
        writer.transport.abort()

    async def sends_half(self, number: int) -> None:
        _, writer = await self.send(b'{"prompt": "a', size=1000)
        await asyncio.sleep(random.uniform(0, 0.5))
        writer.close()

    async def sends_garbage(self, number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(random.Random(number).randbytes(1 + number * 37 % 5000) + b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            writer.write_eof()
            data = await reader.read(1000)
            assert not data or data.startswith(b"HTTP/1.1 400"), data[:100]
        writer.close()

    async def asks_wrongly(self, number: int) -> None:
        asks = [{"prompt": 5}, {"prompt": "a", "temperature": -1}, {"prompt": [999]}, [1], {}]
        status, body = await self.ask(asks[number % len(asks)])
        assert status == 400 and "expected" in json.loads(body)["error"]["message"], body

    async def asks_too_much(self, number: int) -> None:
        size = [PROMPT_TOKENS + 1, 10**6, 9 << 20][number % 3]
        status, _ = await self.ask({"prompt": "a" * size})
        assert status == (413 if size > 8 << 20 else 400), status

    async def run(self, count: int) -> None:
        """Lets so many clients at the server at once, within a second."""

        async def one(number: int) -> None:
            behaviour = BEHAVIOURS[number % len(BEHAVIOURS)]
            await asyncio.sleep(random.Random(number).uniform(0, 1))
            try:
                await behaviour(self, number // len(BEHAVIOURS))
            except Exception as error:  # of any kind: it is told at the end
                self.wrong.append(f"{behaviour.__name__} {number}: {type(error).__name__} {error}")
            self.done[behaviour.__name__] += 1

        await asyncio.gather(*map(one, range(count)))

    async def gauges(self) -> dict[str, float]:
        """The server's metrics."""
        reader, writer = await self.send(b"", "/metrics")
        text = (await reader.read()).decode()
        writer.close()
        found = re.findall(r"^gla_ext_(\S+) (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    async def settle(self) -> dict[str, float]:
        """The server's metrics, when it has nothing to do or after ten seconds."""
        for _ in range(100):
            found = await self.gauges()
            if not any(found[name] for name in LEFT):
                break
            await asyncio.sleep(0.1)
        return found


BEHAVIOURS = [
    *(Clients.proper, Clients.streams, Clients.reads_slowly, Clients.leaves),
    *(Clients.streams, Clients.leaves_at_once, Clients.sends_half, Clients.sends_garbage),
    *(Clients.proper, Clients.asks_wrongly, Clients.asks_too_much),
]
LEFT = ("running", "waiting", "open_replies", "body_bytes", "reply_logprobs")


def memory_bytes(process: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


@dataclasses.dataclass(frozen=True)
class Report:
    """What came of it: `Clients` afterwards, the server's metrics, its memory by round, and how
    many errors it has logged.
    """

    clients: Clients
    gauges: dict[str, float]
    memory: list[int]
    seconds: float
    logged: int


def stress(folder: Path, count: int, device: str = "cpu", rounds: int = 2) -> Report:
    """Runs so many clients, several times over, against a server of a model made in a folder."""
    texts = expected_texts(make_folder(folder).to(device))
    log = folder.with_name("log")
    with serving(folder, device, log) as (server, port):
        clients, memory, start = Clients(port, texts), [], time.monotonic()

        async def run() -> dict[str, float]:
            for _ in range(rounds):
                await clients.run(count // rounds)
                gauges = await clients.settle()
                memory.append(memory_bytes(server.pid))
            return gauges

        gauges = asyncio.run(run())
        seconds = time.monotonic() - start
    logged = log.read_text().count("ERROR") + log.read_text().count("Traceback")
    return Report(clients, gauges, memory, seconds, logged)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = stress(Path(folder) / "model", args.clients, args.device, args.rounds)
    clients, seconds = report.clients, sorted(report.clients.seconds)
    print(f"{sum(clients.done.values())} clients in {report.seconds:.1f} s: {dict(clients.done)}")
    print(f"{len(seconds)} proper replies, all as expected but for {len(clients.wrong)} failures")
    print(f"asked to come back {clients.refusals} times")
    print(f"p50 {seconds[len(seconds) // 2]:.2f} s, p99 {seconds[len(seconds) * 99 // 100]:.2f} s")
    print(f"memory after each round, MiB: {[x >> 20 for x in report.memory]}")
    print(f"left in the server: { ({name: report.gauges[name] for name in LEFT}) }")
    print(f"errors in the server's log: {report.logged}")
    for line in clients.wrong[:20]:
        print(line)
    if clients.wrong or report.logged or any(report.gauges[name] for name in LEFT):
        sys.exit(1)


if __name__ == "__main__":
    main()
