"""The only place of the version; setup.py and CMakeLists.txt read this file as text."""

__version__ = "0.3.0"
