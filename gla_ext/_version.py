"""The one source of the version, which setup.py and CMakeLists.txt read as text."""

__version__ = "0.3.0"
