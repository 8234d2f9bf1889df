"""Serves a language model over HTTP, with OpenAI's completion interface.

    python examples/serve.py MODEL [--port 8000] [--device cuda] [--dtype bfloat16]
    curl -N localhost:8000/v1/completions -d '{"prompt": "def ", "stream": true}'

MODEL is a folder with config.json and model.safetensors, of the other examples, of `make train` or
FLA; its tokenizer lies there too, or it is a model of bytes. It needs starlette and
uvicorn.
"""

import sys

from gla_ext.serve.command import main

if __name__ == "__main__":
    main(sys.argv[1:])
