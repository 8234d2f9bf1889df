"""The engine over HTTP, with OpenAI's completion interface. Needs the extra `serve`."""

from gla_ext.serve.http.application import Application, Options
from gla_ext.serve.http.server import serve

__all__ = ["Application", "Options", "serve"]
