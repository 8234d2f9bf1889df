"""Serves a language model over HTTP: tokens as they come, as server-sent events.

    python examples/serve.py MODEL [--port 8000] [--device cuda] [--dtype bfloat16]
    curl -N localhost:8000/generate -d '{"prompt": "def ", "max_new_tokens": 100}'

MODEL is a folder with config.json and model.safetensors, of the other examples, of `make train` or
FLA; its tokenizer lies there too, or it is a model of bytes. A request may have temperature, top_k
and top_p of `generate`. An event is {"token": id, "text": what it completes}, the last one [DONE].
A prompt that is too long gets status 413, another request that does not fit 400, with the reason.
Requests take turns, a token each; `gla_ext.decode.Decoder` is what batches them in one step.
"""

import argparse
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from text import Tokenizer, device_argument, load_tokenizer, with_text

from gla_ext.model import GLAForCausalLM

MAX_BODY_BYTES = 1 << 20
MAX_REFUSED_BYTES = 1 << 26  # read before a refusal, which a client that still sends does not see
TYPES = {"prompt": str, "max_new_tokens": int, "temperature": int | float}
TYPES |= {"top_k": int | None, "top_p": int | float | None}


class TooLong(ValueError):
    """More than the server takes."""


class Server(ThreadingHTTPServer):
    """Holds the model; a thread a request, of which one at a time computes.

    Args:
        address: host and port.
        model, tokenizer: what answers.
        max_prompt_tokens, max_new_tokens: limits of a request.
    """

    request_queue_size = 1024  # clients whose connection may wait; others are turned away
    daemon_threads = False  # a thread that computes while the process ends would abort it

    def __init__(
        self,
        address: tuple[str, int],
        model: GLAForCausalLM,
        tokenizer: Tokenizer,
        max_prompt_tokens: int,
        max_new_tokens: int,
    ):
        super().__init__(address, Handler)
        self.model, self.tokenizer, self.turn = model, tokenizer, threading.Lock()
        self.max_prompt_tokens, self.max_new_tokens = max_prompt_tokens, max_new_tokens
        self.connections: set[socket.socket] = set()
        self.stopping = False

    def process_request(self, request: socket.socket, client_address: tuple) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Ends every reply, then waits for the threads."""
        self.stopping = True
        for connection in list(self.connections):
            with contextlib.suppress(OSError):  # the client has closed it already
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()

    def generate(self, request: dict) -> Iterator[tuple[int, str]]:
        """Tokens up to the model's eos_token_id, each with the text that it completes.

        Raises:
            KeyError, TypeError, ValueError: at the call, for a request that does not fit.
            TooLong: at the call, for a prompt of too many tokens.
        """
        options = {"max_new_tokens": min(100, self.max_new_tokens)} | request
        for name, value in options.items():
            if name not in TYPES:
                raise ValueError(f"expected names among {', '.join(TYPES)}, got {name}")
            if not isinstance(value, TYPES[name]):
                raise TypeError(f"expected {name} to be {TYPES[name]}, got {value!r}")
        if options["max_new_tokens"] > self.max_new_tokens:
            raise ValueError(
                f"expected max_new_tokens to be at most {self.max_new_tokens}, got "
                f"{options['max_new_tokens']}"
            )
        prompt = self.tokenizer.encode(options.pop("prompt"))
        if len(prompt) > self.max_prompt_tokens:
            raise TooLong(
                f"expected a prompt of at most {self.max_prompt_tokens} tokens, got {len(prompt)}"
            )
        eos = self.model.config.eos_token_id
        with self.turn:
            stream = self.model.generate_stream([prompt], **options, eos_token_id=eos)
        ends = eos if isinstance(eos, list) else [eos]
        return with_text(self.tokenizer, prompt, self.in_turns(stream, ends))

    def in_turns(self, stream: Iterator, ends: list[int | None]) -> Iterator[int]:
        try:
            while True:
                with self.turn:
                    token = None if self.stopping else next(stream, None)
                if token is None or token.item() in ends:
                    return
                yield token.item()
        finally:
            with self.turn:
                del stream  # which gives its decoder back to the model


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # which has chunks
    error_content_type, error_message_format = "text/plain; charset=utf-8", "%(explain)s\n"

    def do_POST(self) -> None:
        self.close_connection = True  # after this reply
        if self.path != "/generate":
            return self.send_error(404, explain="expected POST /generate")
        try:
            self.answer()
        except ConnectionError:
            self.log_message("the client left")

    def answer(self) -> None:
        try:
            events = self.server.generate(json.loads(self.read_body()))
        except TooLong as error:
            return self.send_error(413, explain=f"{error}")
        except (KeyError, TypeError, ValueError) as error:
            return self.send_error(400, explain=f"{type(error).__name__}: {error}")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.closing(events):
            for token, text in events:
                self.send_event(json.dumps({"token": token, "text": text}))
        self.send_event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def read_body(self) -> bytes:
        size = int(self.headers.get("Content-Length", 0))
        if size < 1:
            raise ValueError(f"expected a body of 1 to {MAX_BODY_BYTES} bytes, got {size}")
        if size <= MAX_BODY_BYTES:
            return self.rfile.read(size)
        left = min(size, MAX_REFUSED_BYTES)
        while left > 0 and (block := self.rfile.read(min(left, MAX_BODY_BYTES))):
            left -= len(block)
        raise TooLong(f"expected a body of 1 to {MAX_BODY_BYTES} bytes, got {size}")

    def send_event(self, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    device_argument(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--max-prompt-tokens", type=int, default=32_768, help="of a request")
    parser.add_argument("--max-new-tokens", type=int, default=4096, help="of a request")
    args = parser.parse_args()
    model = GLAForCausalLM.from_pretrained(args.model).to(args.device, getattr(torch, args.dtype))
    tokenizer = load_tokenizer(args.model, model.config.vocab_size)
    limits = args.max_prompt_tokens, args.max_new_tokens
    with Server((args.host, args.port), model, tokenizer, *limits) as server:
        print(f"Serving {args.model} on http://{args.host}:{server.server_port}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    main()
