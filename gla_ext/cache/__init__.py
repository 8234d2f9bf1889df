"""Caches of recurrent states, one entry per layer: GLACache, and one whose tensors never move."""

from gla_ext.cache.states import GLACache
from gla_ext.cache.static import StaticGLACache

__all__ = ["GLACache", "StaticGLACache"]
